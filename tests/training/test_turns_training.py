"""Episodes of several turns in the trainer: what was observed is context, and nothing of it is trained on."""

import dataclasses

import numpy as np
import pytest
import torch
from training_cases import VOCABULARY, random_batch, reference_logprobs, tiny

from stretto.objectives.naive import NaiveOptions
from stretto.objectives.ppo import PpoOptions
from stretto.training.advantages import outcome_advantages, token_rewards, turn_advantages
from stretto.training.flops import Costs
from stretto.training.packing import micro_batch, sampled_lengths
from stretto.training.turn_credit import batch_turn_advantages
from stretto.training.update_metrics import batch_metrics
from stretto.types import Batch, Supports
from tests.training.test_trainer_objectives import gradients, made, objectives, relative_error

TEMPERATURE = 0.8  # of the trainers that `made` makes


def with_turns(batch: Batch, seed: int = 0) -> Batch:
    """The same tokens, of which some are observed: up to three turns each, with a reward each."""
    draw = np.random.default_rng(seed)
    samples = []
    for sample in batch.samples:
        length = len(sample.completion.tokens)
        count = min(3, (length + 1) // 2)
        cuts = np.sort(draw.permutation(length)[: 2 * count - 1]) if length > 1 else np.zeros(1, dtype=np.int64)
        spans = np.append(cuts, length).reshape(count, 2).astype(np.int32)
        logprobs = np.zeros(length, dtype=np.float32)
        for start, end in spans.tolist():
            logprobs[start:end] = sample.completion.logprobs[start:end]
        completion = dataclasses.replace(sample.completion, logprobs=logprobs, turns=spans)
        rewards = tuple(draw.integers(-1, 3, count).astype(float).tolist())
        samples.append(
            dataclasses.replace(sample, completion=completion, reward=float(sum(rewards)), turn_rewards=rewards)
        )
    return Batch(batch.update, samples)


def reference_gradients(batch, advantages):
    """Of `-sum(A log pi) / C` over the sampled tokens, by whole sequences of the stock model and a mask."""
    model, total = tiny(dtype=torch.float64), sum(s.completion.num_sampled for s in batch.samples)
    for sample, own in zip(batch.samples, advantages, strict=True):
        logprobs = reference_logprobs(model, sample, TEMPERATURE)
        mask, weights = torch.zeros(len(logprobs), dtype=torch.float64), torch.zeros(len(logprobs), dtype=torch.float64)
        mask[sample.completion.sampled] = 1.0
        weights[sample.completion.sampled] = torch.as_tensor(np.asarray(own), dtype=torch.float64)
        (-(mask * weights * logprobs).sum() / total).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("micro_tokens", [10_000, 30, 1])
@pytest.mark.parametrize("by_turn", [False, True])
def test_the_gradient_is_that_of_a_mask_over_whole_sequences(by_turn, micro_tokens):
    batch = with_turns(random_batch(groups=2, members=4))
    groups = [s.group for s in batch.samples]
    lengths = sampled_lengths(batch.samples)
    if by_turn:
        rewards = [s.turn_rewards for s in batch.samples]
        turns = [s.completion.turn_lengths for s in batch.samples]
        found = turn_advantages("group", rewards, turns, groups, gamma=0.5)
    else:
        found = outcome_advantages("group", [s.reward for s in batch.samples], groups)
    own = np.split(found.of_tokens(lengths), np.cumsum(lengths)[:-1])
    algorithm = NaiveOptions(advantage="group", turns={"gamma": 0.5} if by_turn else None)
    got = gradients(made(algorithm, lora=False, micro_tokens=micro_tokens), batch)
    assert relative_error(got, reference_gradients(batch, own)) < 1e-9


@pytest.mark.parametrize("algorithm", objectives(turns={}, entropy={"coefficient": 0.2}))
def test_gradients_depend_neither_on_micro_batches_nor_on_the_order_of_samples(algorithm):
    batch = with_turns(random_batch(groups=2, members=3))
    shuffled = Batch(0, [batch.samples[i] for i in np.random.default_rng(0).permutation(len(batch.samples))])
    expected = gradients(made(algorithm), batch)
    assert any(gradient.abs().max() > 0 for gradient in expected.values())
    assert relative_error(gradients(made(algorithm, micro_tokens=1), batch), expected) < 1e-6
    assert relative_error(gradients(made(algorithm, micro_tokens=40), shuffled), expected) < 1e-6


def test_an_observed_token_is_context_and_no_target():
    """Its own log-probability may be anything: what it is changes only what follows it."""
    batch = with_turns(random_batch(groups=2, members=4))
    observed = sum(len(s.completion.tokens) - s.completion.num_sampled for s in batch.samples)
    assert observed > 10
    micro = micro_batch(batch.samples, range(8), np.zeros(8), np.ones(8))
    assert len(micro.targets) == sum(micro.num_targets) == int(sampled_lengths(batch.samples).sum())
    expected = np.concatenate([s.completion.tokens[s.completion.sampled] for s in batch.samples])
    assert micro.targets.tolist() == expected.tolist()
    starts = np.cumsum([0, *(len(s.prompt) + len(s.completion.tokens) - 1 for s in batch.samples)])
    places = [
        start + len(s.prompt) - 1 + j
        for start, s in zip(starts, batch.samples, strict=False)
        for j in s.completion.sampled
    ]
    assert micro.predicts.tolist() == places
    # A false log-probability of an observed token, as an engine would never write it, reaches nothing.
    samples = []
    for sample in batch.samples:
        logprobs = np.full_like(sample.completion.logprobs, -7.0)
        logprobs[sample.completion.sampled] = sample.completion.logprobs[sample.completion.sampled]
        samples.append(
            dataclasses.replace(sample, completion=dataclasses.replace(sample.completion, logprobs=logprobs))
        )
    algorithm = next(iter(objectives())).values[0]
    first, second = made(algorithm), made(algorithm)
    one, other = first.update(batch), second.update(Batch(0, samples))
    assert {**one.metrics, "seconds": 0} == {**other.metrics, "seconds": 0}
    assert first.weights(1).checksum == second.weights(1).checksum


def test_one_turn_that_is_everything_trains_as_no_turns_do():
    plain = random_batch(groups=2, members=4)
    spans = [
        dataclasses.replace(
            s,
            turn_rewards=(s.reward,),
            completion=dataclasses.replace(
                s.completion, turns=np.array([[0, len(s.completion.tokens)]], dtype=np.int32)
            ),
        )
        for s in plain.samples
    ]
    algorithm = next(iter(objectives())).values[0]
    first, second = made(algorithm), made(algorithm)
    first.update(plain)
    second.update(Batch(0, spans))
    assert first.weights(1).checksum == second.weights(1).checksum


def test_supports_of_observed_tokens_are_left_out():
    batch = with_turns(random_batch(groups=1, members=4))
    samples = []
    for sample in batch.samples:
        tokens = sample.completion.tokens
        pairs = np.stack([tokens, (tokens + 1) % VOCABULARY], axis=1)
        counts = np.ones(len(tokens), dtype=np.int32)
        counts[sample.completion.sampled] = 2
        members = np.concatenate([pair[:count] for pair, count in zip(pairs, counts, strict=True)]).astype(np.int32)
        supports = Supports(counts, members)
        samples.append(
            dataclasses.replace(sample, completion=dataclasses.replace(sample.completion, supports=supports))
        )
    trainer = made(NaiveOptions(), lora=False)
    micro = micro_batch(samples, range(4), np.zeros(4), np.ones(4), dtype=torch.float64)
    with torch.no_grad():
        logprobs, _ = trainer.packed.logprobs(micro, TEMPERATURE)
    model, expected = tiny(dtype=torch.float64), []
    for sample in samples:
        ids = torch.tensor([*sample.prompt, *sample.completion.tokens.tolist()])
        with torch.no_grad():
            logits = model(input_ids=ids[None], use_cache=False).logits[0, len(sample.prompt) - 1 : -1] / TEMPERATURE
        for j in sample.completion.sampled.tolist():
            token = int(sample.completion.tokens[j])
            both = logits[j, [token, (token + 1) % VOCABULARY]]
            expected.append(float(both[0] - torch.logsumexp(both, 0)))
    assert logprobs.tolist() == pytest.approx(expected, abs=1e-9)


def test_lengths_and_arithmetic_count_what_was_sampled():
    batch = with_turns(random_batch(groups=2, members=4))
    sampled = int(sampled_lengths(batch.samples).sum())
    measured = batch_metrics(batch, outcome_advantages("group", [0.0] * 8, [s.group for s in batch.samples]))
    assert measured["tokens"] == sampled
    assert measured["observed_tokens"] == sum(len(s.completion.tokens) for s in batch.samples) - sampled
    assert measured["turns_mean"] == np.mean([len(s.turn_rewards) for s in batch.samples])
    assert "turns_mean" not in batch_metrics(random_batch(), outcome_advantages("group", [0.0] * 12, [0] * 12))
    costs = Costs(tiny(), trains_weights=True)
    whole = Batch(
        0, [dataclasses.replace(s, completion=dataclasses.replace(s.completion, turns=None)) for s in batch.samples]
    )
    observed = measured["observed_tokens"]
    assert costs.forward(whole) - costs.forward(batch) == 2.0 * costs.head_elements * observed


def turn_weights(batch, high):
    """The capped product of `pi / mu` over each token's turn, by sample, by the stock model."""
    model, found = tiny(dtype=torch.float64), []
    for sample in batch.samples:
        with torch.no_grad():
            logs = reference_logprobs(model, sample, TEMPERATURE).numpy() - sample.completion.logprobs
        spans = [(0, len(logs))] if sample.completion.turns is None else sample.completion.turns.tolist()
        products = [np.full(end - start, np.exp(logs[start:end].sum())) for start, end in spans]
        found.append(np.minimum(np.concatenate(products), high))
    return found


@pytest.mark.parametrize("micro_tokens", [10_000, 30])
def test_a_correction_by_turn_weighs_the_sampled_tokens_of_each_turn_as_one(micro_tokens):
    batch = with_turns(random_batch(groups=2, members=4))
    groups = [s.group for s in batch.samples]
    advantages = outcome_advantages("group", [s.reward for s in batch.samples], groups).values
    weights = turn_weights(batch, 3.0)
    expected = reference_gradients(batch, [a * own for a, own in zip(advantages, weights, strict=True)])
    algorithm = NaiveOptions(advantage="group", correction={"level": "turn", "high": 3.0})
    got = gradients(made(algorithm, lora=False, micro_tokens=micro_tokens), batch)
    assert relative_error(got, expected) < 1e-9
    metrics = made(algorithm, lora=False, micro_tokens=micro_tokens).update(batch).metrics
    computed = np.concatenate([own for a, own in zip(advantages, weights, strict=True) if a])
    assert metrics["correction_weight"] == pytest.approx(computed.mean())
    capped = np.mean(computed == 3.0)
    assert 0 < capped < 1
    assert metrics["correction_outside"] == pytest.approx(capped)


def test_a_completion_without_tokens_has_no_turn_that_is_weighed():
    """Two of them lie before the only one that has a token."""
    batch = random_batch(groups=1, members=3, longest=2)
    nothing = {"tokens": np.zeros(0, dtype=np.int32), "logprobs": np.zeros(0, dtype=np.float32)}
    samples = [
        dataclasses.replace(each, prompt=(1,) * 9, completion=dataclasses.replace(each.completion, **nothing))
        for each in batch.samples[:2]
    ]
    samples.append(batch.samples[2])
    algorithm = NaiveOptions(advantage="group", correction={"level": "turn", "high": 3.0})
    metrics = made(algorithm, lora=False).update(Batch(0, samples)).metrics
    assert metrics["tokens"] == 1
    assert metrics["correction_weight"] == pytest.approx(turn_weights(Batch(0, samples[2:]), 3.0)[0][0])


# -- credit ------------------------------------------------------------------------------------------------------------


def test_what_is_added_to_a_whole_reward_is_earned_at_the_last_turn():
    batch = with_turns(random_batch(groups=2, members=4))
    groups = [s.group for s in batch.samples]
    shaped = np.array([s.reward for s in batch.samples]) - 0.5 * np.arange(8)
    found = batch_turn_advantages("group-mean", batch, shaped, np.zeros(8), gamma=1.0)
    rewards = [[*s.turn_rewards[:-1], s.turn_rewards[-1] - 0.5 * i] for i, s in enumerate(batch.samples)]
    turns = [s.completion.turn_lengths for s in batch.samples]
    assert found.tokens == pytest.approx(turn_advantages("group-mean", rewards, turns, groups).tokens)
    penalties = np.arange(8.0)
    apart = batch_turn_advantages("group-mean", batch, shaped, penalties, gamma=1.0)
    means = np.array([penalties[np.array(groups) == g].mean() for g in groups])
    lengths = sampled_lengths(batch.samples)
    assert apart.tokens == pytest.approx(found.tokens - np.repeat(penalties - means, lengths))
    assert apart.values == pytest.approx(
        [part.mean() for part in np.split(apart.tokens, np.cumsum(lengths)[:-1])], abs=1e-12
    )


def test_a_group_whose_turns_alone_differ_has_a_signal():
    batch = with_turns(random_batch(groups=1, members=2, longest=30, seed=4))
    assert [len(s.turn_rewards) for s in batch.samples] == [3, 3]
    rewards = [(1.0, 0.0, 0.0), (0.0, 0.0, 1.0)]
    samples = [
        dataclasses.replace(s, reward=1.0, turn_rewards=each) for s, each in zip(batch.samples, rewards, strict=True)
    ]
    by_turn, whole = made(NaiveOptions(advantage="group", turns={})), made(NaiveOptions(advantage="group"))
    assert by_turn.update(Batch(0, samples)).metrics["groups_without_signal"] == 0
    assert whole.update(Batch(0, samples)).metrics["groups_without_signal"] == 1


def test_a_critic_is_fitted_to_what_turns_earned_where_they_earned_it():
    batch = with_turns(random_batch(groups=2, members=3))
    options = {"critic": {"lam": 1.0, "whiten": False}}
    by_turn, whole = made(PpoOptions(turns={}, **options)), made(PpoOptions(**options))
    found = by_turn.update(batch).metrics
    earned = token_rewards(
        [s.turn_rewards for s in batch.samples],
        sampled_lengths(batch.samples),
        [s.completion.turn_lengths for s in batch.samples],
    )
    returns = [part[::-1].cumsum()[::-1] for part in np.split(earned, np.cumsum(sampled_lengths(batch.samples))[:-1])]
    assert found["return_mean"] == pytest.approx(np.concatenate(returns).mean())
    assert whole.update(batch).metrics["return_mean"] != pytest.approx(found["return_mean"])
