import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from training_cases import random_batch

from stretto.errors import TrainerError
from stretto.models.packed_attention import bucket_lengths, layout_of
from stretto.models.varlen_layout import ragged_arange
from stretto.training.packing import micro_batch
from stretto.training.sequence_sizes import first_fit_decreasing, input_lengths
from stretto.types import Supports

LENGTHS = st.lists(st.integers(1, 300), min_size=1, max_size=60)


@given(LENGTHS, st.integers(1, 500))
def test_every_sequence_is_packed_once_and_only_one_that_is_too_long_exceeds_the_budget(lengths, budget):
    bins = first_fit_decreasing(lengths, budget)
    assert sorted(index for members in bins for index in members) == list(range(len(lengths)))
    for members in bins:
        assert sum(lengths[i] for i in members) <= budget or len(members) == 1
    # First fit leaves at most one bin that is half empty, besides those of one sequence each.
    assert sum(sum(lengths[i] for i in members) * 2 <= budget for members in bins) <= 1


@given(LENGTHS)
def test_a_layout_places_every_token_once_and_its_two_ways_are_inverse(lengths):
    layout = layout_of(np.array(lengths))
    assert torch.equal(layout.gather[layout.scatter], torch.arange(sum(lengths)))
    assert len(layout.gather) == sum(n * length for n, length in layout.buckets)
    assert sum(n for n, _ in layout.buckets) == len(lengths)
    assert layout.longest == max(lengths)


@given(LENGTHS, st.integers(0, 2000))
def test_buckets_cost_no_more_than_one_bucket_or_one_each(lengths, price):
    sizes = bucket_lengths(np.array(lengths), bucket_cost=price)

    def cost(chosen):
        return sum(min(size for size in chosen if size >= length) for length in lengths) + price * len(chosen)

    assert sizes[-1] == max(lengths)
    assert sizes == sorted(set(sizes))
    assert cost(sizes) <= cost([max(lengths)])
    coarse = 1.1 * sum(lengths) + price * len(set(lengths))
    assert cost(sizes) <= coarse + 1e-6


def test_padding_in_attention_stays_small_where_there_is_much_to_pack():
    lengths = np.clip(np.random.default_rng(0).lognormal(4, 1, 2000), 1, 4000).astype(np.int64)
    assert len(layout_of(lengths).gather) <= 1.12 * lengths.sum()


def test_a_micro_batch_says_which_input_predicts_which_token():
    batch = random_batch()
    chosen = [5, 0, 9]
    advantages = np.arange(12.0)
    weights = np.arange(12.0) / 100
    micro = micro_batch(batch.samples, chosen, advantages, weights)
    at = 0
    offset = 0
    for place, index in enumerate(chosen):
        sample = batch.samples[index]
        whole = [*sample.prompt, *sample.completion.tokens.tolist()]
        inputs = whole[:-1]
        part = slice(offset, offset + len(inputs))
        assert micro.input_ids[part].tolist() == inputs
        assert micro.position_ids[part].tolist() == list(range(len(inputs)))
        for token, logprob in zip(sample.completion.tokens.tolist(), sample.completion.logprobs, strict=True):
            position = int(micro.predicts[at]) - offset
            assert whole[position + 1] == token == int(micro.targets[at])
            assert micro.behaviour_logprobs[at] == logprob
            assert micro.advantages[at] == advantages[index]
            assert micro.weights[at] == pytest.approx(weights[index])
            assert micro.sequences[at] == place
            at += 1
        offset += len(inputs)
    assert at == len(micro.targets) == sum(micro.num_targets)
    assert offset == len(micro.input_ids) == input_lengths(batch.samples)[chosen].sum()


def test_an_empty_prompt_is_refused_by_name():
    sample = dataclasses.replace(random_batch().samples[0], prompt=(), trajectory=77)
    with pytest.raises(TrainerError, match="trajectory 77"):
        micro_batch([sample], [0], np.zeros(1), np.zeros(1))


def test_tokens_without_their_logprobs_are_refused_by_name():
    sample = random_batch().samples[0]
    cut = dataclasses.replace(sample.completion, logprobs=sample.completion.logprobs[:-1])
    with pytest.raises(TrainerError, match="trajectory 0 has"):
        micro_batch([dataclasses.replace(sample, completion=cut)], [0], np.zeros(1), np.zeros(1))


def test_ragged_arange_counts_each_length_from_zero():
    assert ragged_arange(np.array([2, 0, 3])).tolist() == [0, 1, 0, 1, 2]
    assert ragged_arange(np.array([], dtype=np.int64)).tolist() == []


def with_supports(sample, width=3):
    """The same sample, each token drawn from itself and those after it."""
    tokens = sample.completion.tokens
    others = (tokens[:, None] + np.arange(width, dtype=np.int32)) % 23
    supports = Supports(np.full(len(tokens), width, np.int32), others[:, ::-1].reshape(-1).astype(np.int32))
    return dataclasses.replace(sample, completion=dataclasses.replace(sample.completion, supports=supports))


def test_supports_follow_the_targets():
    samples = [with_supports(sample, 2 + place % 3) for place, sample in enumerate(random_batch().samples)]
    micro = micro_batch(samples, [3, 0, 7], np.zeros(12), np.zeros(12))
    assert micro.supports is not None
    starts = np.cumsum(micro.supports.sizes) - micro.supports.sizes
    assert micro.supports.sizes.tolist() == micro.supports.counts.tolist()
    assert set(micro.supports.sizes.tolist()) == {2, 3}
    drawn = micro.supports.tokens[torch.from_numpy(starts) + micro.supports.hits]
    assert torch.equal(drawn, micro.targets)


def test_supports_that_cannot_be_right_are_errors():
    one, other = random_batch().samples[:2]
    with pytest.raises(TrainerError, match="trajectory 1 was drawn from the whole vocabulary and trajectory 0"):
        micro_batch([with_supports(one), other], [0, 1], np.zeros(2), np.zeros(2))
    full = with_supports(one).completion.supports
    short = Supports(full.counts[:-1], full.tokens[:-3])
    wrong = Supports(full.counts, (full.tokens + 5) % 23)
    for supports, said in ((short, "supports"), (wrong, "not among those that it was drawn from")):
        broken = dataclasses.replace(one, completion=dataclasses.replace(one.completion, supports=supports))
        with pytest.raises(TrainerError, match=said):
            micro_batch([broken], [0], np.zeros(1), np.zeros(1))
