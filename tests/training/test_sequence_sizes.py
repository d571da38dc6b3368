"""Sizes of samples that share prompts, and the micro-batches that they are packed into."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from training_cases import random_batch

from stretto.training.packing import micro_batch
from stretto.training.sequence_sizes import COPIES_PER_TOKEN, LEAST_PREFIX, SequenceSizes, prompt_families
from stretto.types import Completion, Sample


def sample(number, prompt, completion, group=0, routing=None):
    tokens = np.arange(completion, dtype=np.int32) % 23
    made = Completion(number, 0, tokens, np.zeros(completion, np.float32), "stop", "", routing=routing)
    return Sample(number, group, 0, prompt, made, 0.0)


def test_samples_share_by_the_tokens_of_their_prompts():
    one, other, short = tuple(range(30)), tuple(range(1, 31)), tuple(range(LEAST_PREFIX))
    samples = [sample(0, one, 4), sample(1, other, 4), sample(2, list(one), 5, group=7), sample(3, one, 0)]
    samples += [sample(4, short, 3), sample(5, short, 3)]
    assert prompt_families(samples).tolist() == [0, -1, 0, -1, -1, -1]
    sizes = SequenceSizes.of(samples, shares_prompts=True)
    assert sizes.own.tolist() == [4, 33, 5, 29, 18, 18]
    assert sizes.total == 4 + 33 + 5 + 29 + 18 + 18 + 29
    assert SequenceSizes.of(samples, shares_prompts=False).total == 33 + 33 + 34 + 29 + 18 + 18


def test_samples_that_went_to_other_experts_in_their_prompts_do_not_share_them():
    prompt = tuple(range(20))
    records = [np.full((23, 2, 2), expert, dtype=np.uint8) for expert in (0, 1, 0)]
    records[2][19:] = 5  # after the prefix
    samples = [sample(place, prompt, 4, routing=record) for place, record in enumerate(records)]
    assert prompt_families(samples).tolist() == [0, -1, 0]


BATCHES = st.lists(
    st.tuples(st.integers(1, 60), st.lists(st.integers(0, 80), min_size=1, max_size=6)), min_size=1, max_size=8
)


def samples_of(groups):
    return [
        sample(index, (group, *range(prompt - 1)), completion, group)
        for group, (prompt, completions) in enumerate(groups)
        for index, completion in enumerate(completions)
    ]


@given(BATCHES, st.integers(1, 400))
def test_every_sample_is_packed_once_and_only_a_single_one_exceeds_the_budget(groups, budget):
    sizes = SequenceSizes.of(samples_of(groups), shares_prompts=True)
    bins = sizes.bins(budget)
    assert sorted(index for chosen in bins for index in chosen) == list(range(len(sizes)))
    for chosen in bins:
        assert sizes[chosen].total <= budget or len(chosen) == 1


@given(BATCHES, st.integers(1, 400))
def test_a_prefix_is_repeated_only_for_as_many_tokens_of_samples(groups, budget):
    sizes = SequenceSizes.of(samples_of(groups), shares_prompts=True)
    bins = sizes.bins(budget)
    for members in sizes.families:
        parts = [sorted(set(chosen) & set(members.tolist())) for chosen in bins]
        parts = [part for part in parts if part]
        if sizes[members].total_load <= budget and len(parts) > 1:
            prefix = int(sizes.prefix[members[0]])
            assert sum(sizes.own[part].sum() < prefix for part in parts) <= 1, "what is left, in its own bin"


@pytest.mark.parametrize(
    ("prompt", "answer", "members", "groups", "budget"),
    [(100, 300, 16, 40, 8_192), (100, 600, 8, 64, 8_192), (100, 300, 8, 64, 32_768), (1_000, 300, 16, 40, 8_192)],
)
def test_sharing_needs_no_more_micro_batches_than_repeating(prompt, answer, members, groups, budget):
    draw = np.random.default_rng(0)
    lengths = draw.normal(answer, answer / 3, (groups, members)).clip(1).astype(int)
    samples = [
        sample(0, (group, *range(prompt - 1)), int(length)) for group, own in enumerate(lengths) for length in own
    ]
    shared, repeated = (SequenceSizes.of(samples, shares_prompts=shares) for shares in (True, False))
    bins = shared.bins(budget)
    assert len(bins) < len(repeated.bins(budget))
    computed = sum(shared[chosen].total for chosen in bins)
    assert computed < 1.1 * shared.total, "few prefixes are computed twice"


@given(BATCHES)
def test_a_micro_batch_has_as_many_tokens_as_its_sizes_say(groups):
    samples = samples_of(groups)
    zeros = np.zeros(len(samples))
    micro = micro_batch(samples, range(len(samples)), zeros, zeros, flash=True, shares_prompts=True)
    assert len(micro.input_ids) == SequenceSizes.of(samples, shares_prompts=True).total


@given(st.integers(0, 1000), st.integers(1, 9))
def test_a_shared_prompt_predicts_and_attends_as_a_repeated_one_does(seed, multiple):
    samples = random_batch(seed=seed, prompt_tokens=(10, 30)).samples
    chosen = np.random.default_rng(seed).permutation(12)[:7].tolist()
    zeros, shape = np.zeros(12), {"flash": True, "multiple": multiple}
    plain = micro_batch(samples, chosen, zeros, zeros, **shape)
    shared = micro_batch(samples, chosen, zeros, zeros, shares_prompts=True, **shape)
    for name in ("targets", "sequences", "behaviour_logprobs"):
        assert torch.equal(getattr(plain, name), getattr(shared, name))
    assert len(set(shared.predicts.tolist())) == len(shared.predicts), "each input predicts one token"
    assert seen(plain) == seen(shared)


def seen(micro):
    """What each predicting input attends to: its tokens with their positions, in order."""
    varlen = micro.layout.varlen
    num_keys = int(varlen.sizes[1])
    keys = varlen.copies[:num_keys].tolist() if num_keys else list(range(len(micro.input_ids)))
    ends, key_ends = varlen.ends.tolist()
    pairs = list(zip(micro.input_ids.tolist(), micro.position_ids.tolist(), strict=True))
    found = []
    for place in micro.predicts.tolist():
        sequence = np.searchsorted(ends, place, side="right") - 1
        later = ends[sequence + 1] - place - 1
        found.append([pairs[key] for key in keys[key_ends[sequence] : key_ends[sequence + 1] - later]])
    return found


@pytest.mark.parametrize(("prompt", "completion", "members"), [(5_000, 10, 64), (400, 300, 64), (3_000, 400, 16)])
def test_a_long_prompt_with_many_samples_has_a_bounded_number_of_keys(prompt, completion, members):
    budget, samples = 8_192, [sample(number, tuple(range(prompt)), completion) for number in range(members)]
    bins = SequenceSizes.of(samples, shares_prompts=True).bins(budget)
    zeros = np.zeros(members)
    for chosen in bins:
        micro = micro_batch(samples, chosen, zeros, zeros, flash=True, shares_prompts=True)
        assert len(micro.input_ids) <= budget
        assert micro.layout.varlen.ends[1, -1] <= COPIES_PER_TOKEN * budget
    repeated = SequenceSizes.of(samples, shares_prompts=False).bins(budget)
    assert len(bins) < len(repeated)


def test_prompts_are_shared_in_layouts_for_flash_attention_alone():
    samples = random_batch(prompt_tokens=(20, 30)).samples
    with pytest.raises(ValueError, match="shares_prompts"):
        micro_batch(samples, [0, 1], np.zeros(12), np.zeros(12), shares_prompts=True)


def test_micro_batches_of_half_the_size_count_a_shared_prompt_once():
    samples = [sample(number, tuple(range(1000)), 400) for number in range(16)]
    shared = SequenceSizes.of(samples, shares_prompts=True)
    assert (shared.total, shared.total_load) == (999 + 6400, 999 + 16 * (400 + 88))
    assert shared.smaller(1 << 15) == 8807 // 2
    assert SequenceSizes.of(samples, shares_prompts=False).smaller(1 << 15) == 16 * 1399 // 2
    alone = SequenceSizes.of(samples[:1], shares_prompts=True)
    assert alone.smaller(1 << 15) is None


def test_sizes_of_some_samples_are_those_of_a_batch_of_them():
    samples = random_batch(prompt_tokens=(10, 30)).samples
    sizes = SequenceSizes.of(samples, shares_prompts=True)[[0, 5, 6]]
    alone = SequenceSizes.of([samples[index] for index in (0, 5, 6)], shares_prompts=True)
    assert sizes.total == alone.total
    assert dataclasses.astuple(sizes[np.array([0])])[0].shape == (1,)
