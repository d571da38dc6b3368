"""Tokens scored under the versions that sampled them, through the real trainer: what it finds, and what it costs."""

import dataclasses

import numpy as np
import pytest
import torch
from training_cases import random_batch
from version_cases import UPDATES, aged, make, recorded, stock_gradients, stock_sampled, with_logprobs

from stretto.errors import LostObjectError, TrainerError
from stretto.objectives.dora import DoraOptions
from stretto.objectives.grpo import GrpoOptions
from stretto.objectives.hispo import HispoOptions
from stretto.objectives.naive import NaiveOptions
from stretto.training import version_scoring
from stretto.training.packing import micro_batch
from stretto.types import Batch
from tests.training.test_trainer_objectives import gradients, relative_error

POLICIES = pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
TYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
AGES = range(UPDATES + 1)


@pytest.fixture(autouse=True)
def always(monkeypatch):
    """Compares engine and trainer in every update."""
    monkeypatch.setattr(version_scoring, "FULL_WEIGHTS_EVERY", 1)
    monkeypatch.setattr(version_scoring, "ADAPTERS_EVERY", 1)


class Watch:
    """Records the passes of a trainer, and what its objective is given of each sample."""

    def __init__(self, trainer, monkeypatch):
        self.scored = []  # the samples of each pass without a gradient
        self.trained = []  # of each pass with one
        self.tokens = {}  # by sample: log-probabilities, sampled ones and the rest, of its tokens
        states, kind = trainer.packed.states, type(trainer.algorithm)
        loss = kind.loss

        def watched_states(micro):
            (self.trained if torch.is_grad_enabled() else self.scored).append(micro.samples)
            return states(micro)

        def watched_loss(options, tokens):
            for place, sample in enumerate(self.trained[-1]):
                own = tokens.sequences == place
                self.tokens[sample] = {
                    name: None if getattr(tokens, name) is None else getattr(tokens, name)[own].detach().numpy()
                    for name in ("logprobs", "behaviour", "sampled", "proximal")
                }
            return loss(options, tokens)

        monkeypatch.setattr(trainer.packed, "states", watched_states)
        monkeypatch.setattr(kind, "loss", watched_loss)

    def all(self, name):
        return np.concatenate([self.tokens[sample][name] for sample in sorted(self.tokens)])


def equal_states(one, other):
    one, other = one.state(), other.state()
    assert one.keys() == other.keys()
    return all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def lengths_of(batch):
    return np.array([s.completion.num_sampled for s in batch.samples])


# -- what is scored ----------------------------------------------------------------------------------------------------


@POLICIES
@TYPES
def test_a_token_that_the_trainer_recorded_has_no_discrepancy_at_any_age(lora, dtype, monkeypatch):
    trainer, batch = aged(DoraOptions(), dtype=dtype, lora=lora)
    hispo, _ = aged(HispoOptions(), dtype=dtype, lora=lora)
    watch = Watch(trainer, monkeypatch)
    metrics = trainer.update(batch).metrics
    # The policy has moved, so tokens of older versions have another probability by now.
    stale = np.abs(np.exp(watch.all("logprobs") - watch.all("behaviour")) - 1)
    assert stale.max() > 0.3
    ratios = np.exp(watch.all("sampled") - watch.all("behaviour"))
    assert np.abs(ratios - 1).max() < 1e-5
    assert metrics["weight_capped_fraction"] == 0.0
    assert metrics["mismatch_tokens"] == lengths_of(batch).sum()
    for name in ("mismatch_kl", *(f"mismatch_kl_age_{age}" for age in AGES)):
        assert 0 <= metrics[name] < 1e-9, name
    assert metrics["staleness_kl"] > 1e-3
    said = hispo.update(batch).metrics
    assert said["masked_fraction"] == said["masked_sequence_fraction"] == 0.0
    assert said["mismatch_kl"] < 1e-9


@POLICIES
def test_what_the_trainer_scores_is_what_the_stock_model_says_of_each_version(lora, monkeypatch):
    trainer, batch = aged(DoraOptions(), lora=lora, micro_tokens=40)
    expected = stock_sampled(batch, trainer.weights(UPDATES))
    watch = Watch(trainer, monkeypatch)
    trainer.update(batch)
    assert len(watch.tokens) == len(batch.samples)
    for index, own in enumerate(expected):
        np.testing.assert_allclose(watch.tokens[index]["sampled"], own, atol=1e-9)
        fresh = batch.samples[index].version == UPDATES
        assert np.allclose(watch.tokens[index]["proximal"], own, atol=1e-9) is fresh


@TYPES
def test_noise_in_the_record_is_masked_and_measured_and_staleness_is_not(dtype):
    _, batch = aged(HispoOptions(), dtype=dtype)
    samples = list(batch.samples)
    # One token of age 3 is off by itself; a whole sequence of age 2 is off a little, and as a whole too much.
    first = next(i for i, s in enumerate(samples) if s.version == 0 and s.completion.num_sampled > 6)
    second = next(i for i, s in enumerate(samples) if s.version == 1 and s.completion.num_sampled > 2)
    noise = [np.zeros(length) for length in lengths_of(batch)]
    noise[first][4] = -np.log(2.0)  # recorded half as likely as it was: a ratio of 2 against a bound of 0.8
    noise[second][:] = 0.2
    for index in (first, second):
        samples[index] = with_logprobs(samples[index], samples[index].completion.logprobs + noise[index])
    length = lengths_of(batch)[first]
    options = HispoOptions(sequence_bound=2 ** (1 / length) - 1 + 1e-3, token_bound=0.8)
    assert np.abs(np.exp(-0.2) - 1) > options.sequence_bound
    trainer, _ = aged(options, dtype=dtype)
    metrics = trainer.update(dataclasses.replace(batch, samples=samples)).metrics
    count = lengths_of(batch).sum()
    assert metrics["masked_sequence_fraction"] == pytest.approx(lengths_of(batch)[second] / count)
    assert metrics["masked_fraction"] == pytest.approx((1 + lengths_of(batch)[second]) / count)
    ages = np.repeat([UPDATES - s.version for s in samples], lengths_of(batch))
    off = -np.concatenate(noise)
    divergence = np.expm1(off) - off
    assert metrics["mismatch_kl"] == pytest.approx(divergence.mean(), rel=1e-4)
    for age in AGES:
        assert metrics[f"mismatch_kl_age_{age}"] == pytest.approx(divergence[ages == age].mean(), rel=1e-4, abs=1e-9)
    assert metrics["mismatch_kl_age_1"] < 1e-9 < 1e-3 < metrics["staleness_kl_age_1"]


def test_tokens_of_a_continued_trajectory_are_scored_each_under_its_own_version(monkeypatch):
    """With turns beside: the tokens observed between them have no version."""
    trainer, batch = aged(DoraOptions(), micro_tokens=40)
    samples = list(batch.samples)
    long = [i for i, s in enumerate(samples) if len(s.completion.tokens) >= 8][:3]
    assert len(long) == 3
    spreads = [(0, 1, 2, 3), (1, 3), (0, 2)]
    for index, spread in zip(long, spreads, strict=True):
        count = len(samples[index].completion.tokens)
        versions = np.sort(np.resize(np.array(spread, dtype=np.int32), count))
        completion = dataclasses.replace(samples[index].completion, version=spread[0], token_versions=versions)
        if index == long[0]:
            turns = np.array([[0, 3], [5, count]], dtype=np.int32)
            completion = dataclasses.replace(completion, turns=turns)
        samples[index] = dataclasses.replace(samples[index], version=spread[0], completion=completion)
    mixed = dataclasses.replace(batch, samples=samples)
    expected = stock_sampled(mixed, trainer.weights(UPDATES))
    for index in long:  # recorded as each version had it
        samples[index] = with_logprobs(samples[index], expected[index])
    watch = Watch(trainer, monkeypatch)
    metrics = trainer.update(mixed).metrics
    for index, own in enumerate(expected):
        np.testing.assert_allclose(watch.tokens[index]["sampled"], own, atol=1e-9)
        np.testing.assert_allclose(watch.tokens[index]["behaviour"], own, atol=1e-9)
    assert len({tuple(np.unique(samples[index].token_versions)) for index in long}) == 3
    assert metrics["mismatch_kl"] < 1e-12
    assert metrics["mismatch_tokens"] == lengths_of(mixed).sum()
    # A pass for each version has the sequences with a token of it, and no other.
    for version in range(UPDATES):
        has = {i for i, s in enumerate(samples) if version in s.token_versions}
        assert sum(set(part) <= has for part in watch.scored) >= 1
    scored = sorted(index for part in watch.scored for index in part)
    assert scored == sorted(i for i, s in enumerate(samples) for v in set(s.token_versions.tolist()) if v < UPDATES)


# -- the loss ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("lora", "micro_tokens"), [(True, 30), (False, 10_000)], ids=["lora", "full"])
@pytest.mark.parametrize(
    "algorithm",
    [
        DoraOptions(),
        DoraOptions(weight_cap=1.05, clip_low=0.05, clip_high=0.05, dual_clip=1.1),
        HispoOptions(),
        HispoOptions(sequence_bound=0.05, token_bound=0.2, average="token"),
        GrpoOptions(anchor="sampled"),
        GrpoOptions(anchor="sampled", clip_low=0.05, clip_high=0.05, average="sequence"),
    ],
    ids=["dora", "dora-tight", "hispo", "hispo-tight", "grpo", "grpo-tight"],
)
def test_the_gradient_is_that_of_the_formula_and_of_the_stock_model(algorithm, micro_tokens, lora):
    trainer, batch = aged(algorithm, lora=lora, micro_tokens=micro_tokens, updates=2)
    draw = np.random.default_rng(1)
    noisy = [
        with_logprobs(s, s.completion.logprobs + draw.normal(0, 0.15, len(s.completion.tokens))) for s in batch.samples
    ]
    batch = dataclasses.replace(batch, samples=noisy)
    loss, expected, data = stock_gradients(algorithm, batch, trainer.weights(2))
    assert np.abs(data.sampled - data.current).max() > 0.1
    assert np.abs(data.sampled - data.behaviour).max() > 0.1
    assert relative_error(gradients(trainer, batch), expected) < 1e-9
    again, _ = aged(algorithm, lora=lora, micro_tokens=micro_tokens, updates=2)
    assert again.update(batch).metrics["loss"] == pytest.approx(loss, rel=1e-9)


def test_the_two_parts_of_a_correction_are_weighed_through_the_trainer():
    """`pi_w / mu` and `pi_n / pi_w`, which the plain policy gradient is multiplied by."""
    algorithm = NaiveOptions(
        discrepancy_correction={"level": "sequence", "high": 1.3, "low": 0.8},
        staleness_correction={"mode": "filter", "high": 1.1, "low": 0.9},
    )
    trainer, batch = aged(algorithm, lora=False, updates=2)
    draw = np.random.default_rng(1)
    noisy = [
        with_logprobs(s, s.completion.logprobs + draw.normal(0, 0.15, len(s.completion.tokens))) for s in batch.samples
    ]
    batch = dataclasses.replace(batch, samples=noisy)
    _, _, data = stock_gradients(NaiveOptions(), batch, trainer.weights(2))
    sums = np.bincount(data.owner, data.sampled - data.behaviour)[data.owner]
    by_engine = np.clip(np.exp(sums), 0.8, 1.3)
    inside = np.abs(np.exp(data.proximal - data.sampled) - 1) <= 0.1
    assert 0 < inside.mean() < 1
    data.advantages = data.advantages * by_engine * inside
    metrics = trainer.update(batch).metrics
    assert metrics["discrepancy_correction_weight"] == pytest.approx(by_engine.mean(), rel=1e-9)
    assert metrics["discrepancy_correction_outside"] == pytest.approx(
        np.mean((np.exp(sums) > 1.3) | (np.exp(sums) < 0.8))
    )
    assert metrics["staleness_correction_weight"] == pytest.approx(inside.mean())
    assert metrics["staleness_correction_outside"] == pytest.approx(1 - inside.mean())
    assert metrics["loss"] == pytest.approx(-np.mean(data.advantages * data.current), rel=1e-9)


# -- what it costs, and what it leaves ---------------------------------------------------------------------------------


@POLICIES
@TYPES
def test_a_comparison_with_the_engine_changes_no_bit_of_the_update(lora, dtype):
    without, batch = aged(GrpoOptions(), dtype=dtype, lora=lora, mismatch_samples=0)
    compared, _ = aged(GrpoOptions(), dtype=dtype, lora=lora, mismatch_samples=4)
    scarce, rich = without.update(batch).metrics, compared.update(batch).metrics
    assert equal_states(without, compared)
    assert without.weights(4).checksum == compared.weights(4).checksum
    # What there is to say differs; the rest does not.
    assert rich["mismatch_tokens"] > scarce["mismatch_tokens"]
    assert {"mismatch_kl_age_0"} == {name for name in scarce if name.startswith("mismatch_kl_age")}
    other = ("seconds", "flops", "mismatch_kl", "mismatch_tokens")
    assert all(rich[name] == value for name, value in scarce.items() if name not in other)
    for each in (without, compared):
        each.update(random_batch(4, seed=9))
    assert equal_states(without, compared)


@pytest.mark.parametrize(("every", "compared"), [(UPDATES + 1, True), (UPDATES, False)])
def test_adapters_are_compared_once_in_a_while_and_under_every_version(every, compared, monkeypatch):
    monkeypatch.setattr(version_scoring, "ADAPTERS_EVERY", every)
    trainer, batch = aged(GrpoOptions(), lora=True, mismatch_samples=4)
    watch = Watch(trainer, monkeypatch)
    trainer.update(batch)
    versions = {batch.samples[index].version for samples in watch.scored for index in samples}
    assert len(versions) == (min(4, UPDATES) if compared else 0)


@pytest.mark.parametrize(("every", "passes"), [(UPDATES + 1, 1), (UPDATES, 0)])
def test_full_weights_are_compared_once_in_a_while_and_under_one_version(every, passes, monkeypatch):
    monkeypatch.setattr(version_scoring, "FULL_WEIGHTS_EVERY", every)
    trainer, batch = aged(GrpoOptions(), lora=False, mismatch_samples=4)
    watch = Watch(trainer, monkeypatch)
    trainer.update(batch)
    assert len(watch.scored) == passes
    assert len({batch.samples[index].version for samples in watch.scored for index in samples}) == passes


@pytest.mark.parametrize("micro_tokens", [10_000, 30])
def test_an_update_that_nobody_asks_anything_of_makes_no_pass_but_its_own(micro_tokens, monkeypatch):
    trainer, batch = aged(GrpoOptions(), mismatch_samples=0, micro_tokens=micro_tokens)
    watch = Watch(trainer, monkeypatch)
    metrics = trainer.update(batch).metrics
    assert watch.scored == []
    assert len(watch.trained) == metrics["micro_batches"]
    assert watch.tokens[0]["sampled"] is None
    assert metrics["mismatch_tokens"] == sum(len(s.completion.tokens) for s in batch.samples if s.version == UPDATES)


@pytest.mark.parametrize("algorithm", [DoraOptions(), HispoOptions(), GrpoOptions(anchor="sampled"), GrpoOptions()])
def test_fresh_tokens_cost_no_pass(algorithm, monkeypatch):
    trainer = make(algorithm)
    batch = Batch(0, recorded(trainer, random_batch(0).samples))
    watch = Watch(trainer, monkeypatch)
    metrics = trainer.update(batch).metrics
    assert watch.scored == []
    assert metrics["mismatch_tokens"] == lengths_of(batch).sum()
    if algorithm.needs_sampled:
        assert np.array_equal(watch.all("sampled"), watch.all("logprobs"))


def test_fresh_tokens_of_several_steps_cost_the_pass_that_the_steps_cost(monkeypatch):
    """Of the policy before the first step, which is the version that sampled them."""
    trainer = make(DoraOptions(), optimizer_steps=2)
    batch = Batch(0, recorded(trainer, random_batch(0).samples))
    watch = Watch(trainer, monkeypatch)
    trainer.update(batch)
    assert sorted(index for part in watch.scored for index in part) == list(range(len(batch.samples)))
    assert np.array_equal(watch.all("sampled"), watch.all("proximal"))
    np.testing.assert_allclose(watch.all("sampled"), watch.all("behaviour"), atol=1e-12)
    assert np.abs(watch.all("sampled") - watch.all("logprobs")).max() > 1e-3


@POLICIES
def test_each_older_version_costs_one_pass_over_its_own_sequences(lora, monkeypatch):
    trainer, batch = aged(DoraOptions(), lora=lora)
    watch = Watch(trainer, monkeypatch)
    flops = trainer.update(batch).metrics["flops"]
    assert len(watch.scored) == UPDATES
    by_version = {version: {i for i, s in enumerate(batch.samples) if s.version == version} for version in AGES}
    assert sorted(map(sorted, watch.scored)) == sorted(sorted(by_version[version]) for version in range(UPDATES))
    assert len(watch.trained) == 1
    older = dataclasses.replace(batch, samples=[s for s in batch.samples if s.version < UPDATES])
    plain, _ = aged(GrpoOptions(), lora=lora, mismatch_samples=0)
    assert flops - plain.update(batch).metrics["flops"] == pytest.approx(trainer.costs.forward(older))


def test_a_comparison_scores_no_more_sequences_than_it_is_allowed(monkeypatch):
    for allowed in (1, 4, 5, 100):
        compared, batch = aged(GrpoOptions(), mismatch_samples=allowed)
        with monkeypatch.context() as patch:
            watch = Watch(compared, patch)
            metrics = compared.update(batch).metrics
        scored = [index for part in watch.scored for index in part]
        older = [i for i, s in enumerate(batch.samples) if s.version < UPDATES]
        assert len(set(scored)) == len(scored) == min(allowed, len(older))
        assert set(scored) <= set(older)
        fresh = [i for i, s in enumerate(batch.samples) if s.version == UPDATES]
        assert metrics["mismatch_tokens"] == lengths_of(batch)[[*scored, *fresh]].sum()
        assert metrics["mismatch_kl"] < 1e-9


def test_a_comparison_does_without_the_versions_that_are_gone():
    without, batch = aged(GrpoOptions())
    metrics = without.update(dataclasses.replace(batch, versions={})).metrics
    assert metrics["mismatch_tokens"] == lengths_of(batch)[[s.version == UPDATES for s in batch.samples]].sum()
    other, _ = aged(GrpoOptions())
    partly = other.update(dataclasses.replace(batch, versions={1: batch.versions[1]})).metrics
    assert {name for name in partly if name.startswith("mismatch_kl_age")} == {"mismatch_kl_age_0", "mismatch_kl_age_2"}


@dataclasses.dataclass
class Elsewhere:
    """Weights that are fetched."""

    weights: object
    fetched: int = 0

    @property
    def version(self):
        return self.weights.version

    @property
    def kind(self):
        return self.weights.kind

    @property
    def checksum(self):
        return self.weights.checksum

    def fetch(self):
        self.fetched += 1
        return self.weights


def test_weights_that_lie_elsewhere_are_fetched_only_where_they_are_needed():
    trainer, batch = aged(DoraOptions())
    (held, _), (plain, _) = aged(DoraOptions()), aged(GrpoOptions(), mismatch_samples=0)
    refs = {version: Elsewhere(weights) for version, weights in batch.versions.items()}
    fetched = dataclasses.replace(batch, versions={**refs, 17: Elsewhere(None)})
    trainer.update(fetched)
    held.update(batch)
    assert [ref.fetched for ref in refs.values()] == [1] * UPDATES
    assert equal_states(trainer, held)
    plain.update(fetched)
    assert [ref.fetched for ref in refs.values()] == [1] * UPDATES


class Lost(Elsewhere):
    """Weights that cannot be fetched."""

    def fetch(self):
        raise LostObjectError("its file is gone")


class Damaged(Elsewhere):
    """Weights that arrive as others."""

    def fetch(self):
        return dataclasses.replace(self.weights, scale=self.weights.scale + 1)


@POLICIES
@pytest.mark.parametrize(("kind", "why"), [(Lost, "its file is gone"), (Damaged, "another checksum")])
def test_weights_that_cannot_be_read_end_an_update_that_needs_them_and_no_comparison(lora, kind, why, caplog):
    trainer, batch = aged(DoraOptions(), lora=lora)
    untouched, _ = aged(DoraOptions(), lora=lora)
    lost = dataclasses.replace(batch, versions={v: kind(weights) for v, weights in batch.versions.items()})
    with pytest.raises(LostObjectError, match=rf"update {UPDATES} .*version 0.*{why}.*`--resume`"):
        trainer.update(lost)
    assert equal_states(trainer, untouched)
    compared, _ = aged(GrpoOptions(), lora=lora)
    plain, _ = aged(GrpoOptions(), lora=lora, mismatch_samples=0)
    assert compared.update(lost).metrics["mismatch_tokens"] == plain.update(batch).metrics["mismatch_tokens"]
    assert equal_states(compared, plain)
    assert why in caplog.text


@pytest.mark.parametrize(("missing", "steps", "lora"), [(0, 1, True), (1, 2, True), (1, 1, False), (2, 2, False)])
def test_a_version_that_is_missing_is_named_and_nothing_has_changed(missing, steps, lora):
    trainer, batch = aged(DoraOptions(), lora=lora, optimizer_steps=steps)
    untouched, _ = aged(DoraOptions(), lora=lora, optimizer_steps=steps)
    without = {version: weights for version, weights in batch.versions.items() if version != missing}
    with pytest.raises(TrainerError, match=rf"update {UPDATES} .*version {missing}\b"):
        trainer.update(dataclasses.replace(batch, versions=without))
    assert trainer.version == UPDATES
    assert equal_states(trainer, untouched)
    trainer.update(batch)
    untouched.update(batch)
    assert equal_states(trainer, untouched)


@POLICIES
def test_weights_of_another_policy_are_refused_and_nothing_has_changed(lora):
    trainer, batch = aged(DoraOptions(), lora=lora)
    untouched, _ = aged(DoraOptions(), lora=lora)
    other = make(DoraOptions(), lora=not lora).weights(0)
    with pytest.raises(TrainerError, match="version 1 are of another policy"):
        trainer.update(
            dataclasses.replace(batch, versions={**batch.versions, 1: dataclasses.replace(other, version=1)})
        )
    assert equal_states(trainer, untouched)


@POLICIES
def test_a_pass_that_fails_leaves_the_policy_as_it_was(lora, monkeypatch):
    trainer, batch = aged(DoraOptions(), lora=lora)
    untouched, _ = aged(DoraOptions(), lora=lora)
    held = {name: parameter.data_ptr() for name, parameter in trainer.model.named_parameters()}
    logprobs, calls = trainer.packed.logprobs, []

    def second_fails(*arguments, **options):
        calls.append(None)
        if len(calls) == 2:
            raise RuntimeError("out of memory")
        return logprobs(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(trainer.packed, "logprobs", second_fails)
        with pytest.raises(RuntimeError, match="out of memory"):
            trainer.update(batch)
    assert equal_states(trainer, untouched)
    assert {name: parameter.data_ptr() for name, parameter in trainer.model.named_parameters()} == held
    trainer.update(batch)
    untouched.update(batch)
    assert equal_states(trainer, untouched)


@POLICIES
def test_the_weights_of_older_versions_are_only_read(lora):
    trainer, batch = aged(DoraOptions(), lora=lora)
    kept = {v: {name: t.clone() for name, t in weights.tensors.items()} for v, weights in batch.versions.items()}
    trainer.update(batch)
    for version, tensors in kept.items():
        assert all(torch.equal(batch.versions[version].tensors[name], tensor) for name, tensor in tensors.items())


def test_weights_of_another_precision_are_copied_in_and_the_policy_comes_back(monkeypatch):
    """As where an engine holds them in half precision."""
    trainer, batch = aged(DoraOptions(), dtype=torch.float32, lora=False)
    rounded = {
        version: dataclasses.replace(
            weights, tensors={name: tensor.to(torch.bfloat16) for name, tensor in weights.tensors.items()}
        )
        for version, weights in batch.versions.items()
    }
    batch = dataclasses.replace(batch, versions=rounded)
    expected = stock_sampled(batch, trainer.weights(UPDATES))
    plain, _ = aged(GrpoOptions(), dtype=torch.float32, lora=False, mismatch_samples=0)
    compared, _ = aged(GrpoOptions(), dtype=torch.float32, lora=False)
    watch = Watch(trainer, monkeypatch)
    trainer.update(batch)
    for index, own in enumerate(expected):
        np.testing.assert_allclose(watch.tokens[index]["sampled"], own, atol=1e-4)
    plain.update(batch)
    compared.update(batch)
    assert equal_states(plain, compared)


def test_a_micro_batch_of_scores_is_no_larger_than_one_of_training(monkeypatch):
    trainer, batch = aged(DoraOptions(), micro_tokens=25)
    watch = Watch(trainer, monkeypatch)
    trainer.update(batch)
    zeros = np.zeros(len(batch.samples))
    for part in watch.scored:
        tokens = len(micro_batch(batch.samples, part, zeros, zeros).input_ids)
        assert tokens <= 25 or len(part) == 1
        assert len({batch.samples[index].version for index in part}) == 1
