"""Trajectories of several lineages in the trainer: compared and weighed as one, trained as a row each."""

import dataclasses

import numpy as np
import pytest
import torch
from training_cases import random_batch, reference_logprobs, tiny

from stretto.objectives.gspo import GspoOptions
from stretto.objectives.naive import NaiveOptions
from stretto.objectives.ppo import PpoOptions
from stretto.training.batch_advantages import batch_advantages, shaped_rewards
from stretto.training.packing import sampled_lengths
from stretto.training.trajectories import Trajectories
from stretto.training.update_metrics import batch_metrics
from stretto.types import Batch, by_trajectory
from tests.training.test_trainer_objectives import gradients, made, objectives, relative_error
from tests.training.test_turns_training import with_turns

TEMPERATURE = 0.8  # of the trainers that `made` makes
ROWS = (2, 1, 3, 1)  # lineages of the trajectories of each group


def branched(seed: int = 0, *, rewards=(1.0, 0.0, 2.0, 4.0), turns: bool = False) -> Batch:
    """Two groups of four trajectories with `ROWS` lineages, each with a context and a length of its own."""
    given = random_batch(groups=2, members=sum(ROWS), seed=seed)
    given = with_turns(given, seed) if turns else given
    samples, rows = [], iter(given.samples)
    for number in range(2 * len(ROWS)):
        own = [next(rows) for _ in range(ROWS[number % len(ROWS)])]
        counts = [len(row.completion.turn_lengths) for row in own]
        numbers = np.random.default_rng(number).permutation(sum(counts))
        starts = np.cumsum([0, *counts])
        reward = rewards[number % len(ROWS)] + 0.25 * number
        for lineage, row in enumerate(own):
            context = (*row.prompt, *range(number + lineage + 1))
            samples.append(
                dataclasses.replace(
                    row, trajectory=number, group=number // len(ROWS), prompt=context, reward=reward, lineage=lineage,
                    turn_rewards=None,
                    turn_numbers=tuple(sorted(numbers[starts[lineage] : starts[lineage + 1]].tolist()))
                    if len(own) > 1
                    else None,
                )
            )  # fmt: skip
    return Batch(0, samples)


def by_hand(batch: Batch) -> list[float]:
    """The advantage of each row: that of its trajectory, which its group counts once."""
    found = []
    for sample in batch.samples:
        group = {s.trajectory: s.reward for s in batch.samples if s.group == sample.group}
        rewards = np.array(list(group.values()))
        found.append((sample.reward - rewards.mean()) / (rewards.std() + 1e-6))
    return found


def weight_by_hand(batch: Batch, average: str, index: int) -> float:
    sample, count = batch.samples[index], len({s.trajectory for s in batch.samples})
    if average == "token":
        return 1.0 / sum(s.completion.num_sampled for s in batch.samples)
    if average == "constant":
        return 1.0 / (20 * count)
    own = sum(s.completion.num_sampled for s in batch.samples if s.trajectory == sample.trajectory)
    return 1.0 / (own * count)


@pytest.mark.parametrize("micro_tokens", [10_000, 30, 1])
@pytest.mark.parametrize("average", ["token", "sequence", "constant"])
def test_the_gradient_is_that_of_trajectories_of_several_rows(average, micro_tokens):
    batch = branched()
    model = tiny(dtype=torch.float64)
    for index, (sample, advantage) in enumerate(zip(batch.samples, by_hand(batch), strict=True)):
        logprobs = reference_logprobs(model, sample, TEMPERATURE)
        (-weight_by_hand(batch, average, index) * advantage * logprobs.sum()).backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    options = {"average_tokens": 20} if average == "constant" else {}
    algorithm = NaiveOptions(advantage="group", average=average, **options)
    got = gradients(made(algorithm, lora=False, micro_tokens=micro_tokens), batch)
    assert relative_error(got, expected) < 1e-9


def test_a_trajectory_that_is_split_into_two_lineages_has_the_gradient_of_the_whole_one():
    """The second lineage begins with all of the first, so that both have the log-probabilities of one row."""
    whole = random_batch(groups=2, members=3, longest=20, seed=3)
    samples = []
    for sample in whole.samples:
        made_of, cut = sample.completion, len(sample.completion.tokens) // 2
        if not cut:
            samples.append(sample)
            continue
        for lineage, (start, end) in enumerate([(0, cut), (cut, len(made_of.tokens))]):
            part = dataclasses.replace(made_of, tokens=made_of.tokens[start:end], logprobs=made_of.logprobs[start:end])
            context = (*sample.prompt, *made_of.tokens[:start].tolist())
            samples.append(
                dataclasses.replace(
                    sample, prompt=context, completion=part, lineage=lineage, turn_numbers=(lineage,)
                )
            )  # fmt: skip
    assert len(samples) > len(whole.samples)
    for average in ("token", "sequence"):
        algorithm = NaiveOptions(advantage="group", average=average)
        got = gradients(made(algorithm, lora=False), Batch(0, samples))
        assert relative_error(got, gradients(made(algorithm, lora=False), whole)) < 1e-6


@pytest.mark.parametrize("algorithm", objectives(entropy={"coefficient": 0.2}))
def test_gradients_depend_neither_on_micro_batches_nor_on_the_order_of_rows(algorithm):
    batch = branched()
    shuffled = Batch(0, [batch.samples[i] for i in np.random.default_rng(0).permutation(len(batch.samples))])
    expected = gradients(made(algorithm), batch)
    assert any(gradient.abs().max() > 0 for gradient in expected.values())
    assert relative_error(gradients(made(algorithm, micro_tokens=40), shuffled), expected) < 1e-6


@pytest.mark.parametrize("name", ["group", "group-mean", "leave-one-out", "whiten"])
@pytest.mark.parametrize("turns", [None, {"gamma": 0.5}])
def test_every_lineage_has_the_advantage_of_its_trajectory_which_counts_once(name, turns):
    batch = branched()
    algorithm = NaiveOptions(advantage=name, turns=turns)
    rewards = np.array([s.reward for s in batch.samples])
    found = batch_advantages(batch, algorithm, rewards, np.zeros(len(rewards)))
    once = Batch(0, [dataclasses.replace(own[0], turn_numbers=None) for own in by_trajectory(batch.samples)])
    given = np.array([s.reward for s in once.samples])
    plain = batch_advantages(once, NaiveOptions(advantage=name), given, np.zeros(8))
    if turns is None:
        owners = Trajectories.of(batch.samples).owners
        assert found.values.tolist() == plain.values[owners].tolist()
        assert (found.num_groups, found.num_without_signal) == (plain.num_groups, plain.num_without_signal)
    else:  # turns that other lineages have too are compared by their number in the episode
        assert found.tokens is not None
        assert len(found.tokens) == int(sampled_lengths(batch.samples).sum())


def test_credit_by_turn_follows_the_order_of_turns_over_all_lineages():
    batch = branched(turns=True)
    samples = []
    for own in by_trajectory(batch.samples):
        count = sum(len(s.completion.turn_lengths) for s in own)
        rewards = tuple(float(own[0].trajectory + n % 3) for n in range(count))
        samples += [dataclasses.replace(s, turn_rewards=rewards, reward=sum(rewards)) for s in own]
    batch = Batch(0, samples)
    rewards = np.array([s.reward for s in samples])
    found = batch_advantages(
        batch, NaiveOptions(advantage="group-mean", turns={"gamma": 0.5}), rewards, np.zeros(len(rewards))
    )
    returns = {}  # (group, turn) -> trajectory -> discounted rewards from that turn on
    for own in by_trajectory(samples):
        given = own[0].turn_rewards
        for turn in range(len(given)):
            later = sum(0.5 ** (k - turn) * given[k] for k in range(turn, len(given)))
            returns.setdefault((own[0].group, turn), {})[own[0].trajectory] = later
    expected = []
    for sample in samples:
        numbers = sample.turn_numbers or range(len(sample.completion.turn_lengths))
        for number, length in zip(numbers, sample.completion.turn_lengths, strict=True):
            reached = returns[sample.group, number]
            expected += [reached[sample.trajectory] - np.mean(list(reached.values()))] * length
    assert found.tokens == pytest.approx(expected)
    lengths = sampled_lengths(samples)
    assert found.values == pytest.approx([part.mean() for part in np.split(found.tokens, np.cumsum(lengths)[:-1])])


def test_a_turn_that_is_not_trained_counts_for_the_turns_before_it():
    batch = branched(turns=True)
    (first, second), *rest = by_trajectory(batch.samples)
    turns = [*(first.turn_numbers), *(second.turn_numbers)]
    rewards = tuple(float(n == len(turns)) for n in range(len(turns) + 1))  # the last one is of a third lineage
    own = [dataclasses.replace(s, turn_rewards=rewards, reward=1.0) for s in (first, second)]
    others = [dataclasses.replace(s, reward=0.0) for each in rest for s in each]
    samples = [*own, *others]
    given = np.array([s.reward for s in samples])
    algorithm = NaiveOptions(advantage="group-mean", turns={"gamma": 1.0})
    found = batch_advantages(Batch(0, samples), algorithm, given, np.zeros(len(given)))
    trained = found.tokens[: sum(s.completion.num_sampled for s in own)]
    reached = [sum(len(s.completion.turn_lengths) for s in each) for each in rest if each[0].group == 0]
    numbers = np.concatenate([np.repeat(s.turn_numbers, s.completion.turn_lengths) for s in own])
    assert trained == pytest.approx([1 - 1 / (1 + sum(count > n for count in reached)) for n in numbers])


def test_rewards_are_shaped_by_the_length_of_the_trajectory():
    batch = branched()
    groups = [own[0].group for own in by_trajectory(batch.samples)]
    lengths = [[s.completion.num_sampled for s in own] for own in by_trajectory(batch.samples)]
    relative = shaped_rewards(batch, NaiveOptions(length={"type": "relative"}), max_tokens=20)
    added = relative.rewards - [s.reward for s in batch.samples]
    owners = Trajectories.of(batch.samples).owners
    for group in (0, 1):
        own = np.array([sum(each) for each, of in zip(lengths, groups, strict=True) if of == group])
        expected = 0.5 - (own - own.min()) / (own.max() - own.min())
        got = [added[owners == index][0] for index in range(8) if groups[index] == group]
        assert got == pytest.approx(expected)
    overlong = shaped_rewards(batch, NaiveOptions(length={"type": "overlong", "cache": 10}), max_tokens=20)
    added = overlong.rewards - [s.reward for s in batch.samples]
    longest = np.array([max(each) for each in lengths])[owners]
    assert added == pytest.approx(np.clip((10 - longest) / 10, -1, 0))
    assert overlong.metrics["length_shaped"] == sum(max(each) > 10 for each in lengths)


def test_a_divergence_in_the_reward_is_that_of_the_whole_trajectory():
    batch = branched()
    options = {"advantage": "group-mean", "kl": {"coefficient": 0.3, "place": "reward"}}
    trainer = made(NaiveOptions(**options), lora=True)
    model = tiny(dtype=torch.float64)
    penalties = []
    for sample in batch.samples:
        with torch.no_grad():
            reference = reference_logprobs(model, sample, TEMPERATURE).numpy()
        penalties.append(0.3 * float((sample.completion.logprobs - reference).sum()))
    rewards = []
    for own in by_trajectory(batch.samples):
        inside = [p for p, s in zip(penalties, batch.samples, strict=True) if s.trajectory == own[0].trajectory]
        rewards.append(own[0].reward - sum(inside))
    groups = np.array([own[0].group for own in by_trajectory(batch.samples)])
    centred = np.array(rewards) - np.array([np.mean(np.array(rewards)[groups == group]) for group in groups])
    rows = centred[Trajectories.of(batch.samples).owners]
    metrics = trainer.update(batch).metrics
    assert metrics["advantage_max"] == pytest.approx(rows.max(), rel=1e-6)
    assert metrics["advantage_min"] == pytest.approx(rows.min(), rel=1e-6)


def test_ratios_by_sequence_are_by_row():
    batch = branched()
    metrics = made(GspoOptions(), lora=False).update(batch).metrics
    assert metrics["num_sequences"] == len(batch.samples)


def test_a_critic_places_the_reward_at_the_end_of_every_row():
    batch = branched()
    found = made(PpoOptions(critic={"lam": 1.0, "whiten": False})).update(batch).metrics
    lengths = sampled_lengths(batch.samples)
    assert found["return_mean"] == pytest.approx(np.average([s.reward for s in batch.samples], weights=lengths))


def test_a_trajectory_that_is_used_again_is_another_one():
    batch = branched()
    again = [dataclasses.replace(s, use=1) for s in batch.samples if s.trajectory < 4]
    both = Trajectories.of([*batch.samples, *again])
    assert len(both) == 12
    assert len(by_trajectory([*batch.samples, *again])) == 12


def test_rewards_and_turns_are_averaged_over_trajectories():
    batch = branched(turns=True)
    rewards = [own[0].reward for own in by_trajectory(batch.samples)]
    given = np.array([s.reward for s in batch.samples])
    found = batch_metrics(batch, batch_advantages(batch, NaiveOptions(), given, np.zeros(len(given))))
    assert (found["reward_mean"], found["reward_std"]) == pytest.approx((np.mean(rewards), np.std(rewards)))
    assert found["lineages_mean"] == len(batch.samples) / 8
    assert found["turns_mean"] == sum(len(s.completion.turn_lengths) for s in batch.samples) / 8
    assert found["num_sequences"] == len(batch.samples)
    plain = random_batch()
    given = np.array([s.reward for s in plain.samples])
    assert "lineages_mean" not in batch_metrics(plain, batch_advantages(plain, NaiveOptions(), given, 0 * given))
