"""Every objective through the trainer, with everything on that can stand beside it."""

import dataclasses

import numpy as np
import pytest
import torch
from training_cases import UNSTEPPED, VOCABULARY, random_batch, reference_logprobs, tiny

from stretto.errors import ModelError, TrainerError
from stretto.models.loading import second_tree
from stretto.objectives import OBJECTIVES
from stretto.objectives.custom import CustomOptions
from stretto.objectives.grpo import GrpoOptions
from stretto.objectives.naive import NaiveOptions
from stretto.training.advantages import outcome_advantages
from stretto.training.trainer import LocalTrainer, LoraOptions, TrainingOptions
from stretto.types import Batch

TERMS = {
    "kl": {"coefficient": 0.3, "estimator": "k3"},
    "entropy": {"coefficient": 0.2},
    "supervised": {"coefficient": 0.4, "threshold": 1.0},
}


def user_objective(tokens, options):
    """A user's own: the plain policy gradient."""
    return -tokens.advantages * tokens.logprobs * options.get("factor", 1.0), {}


def changing(tokens, options):
    """The name of its diagnostic is another for an odd number of sequences, or one that is given."""
    name = "odd" if tokens.num_sequences % 2 else "even"
    return -tokens.advantages * tokens.logprobs, {name if options["change"] else options["name"]: tokens.advantages}


def broken(tokens, options):
    """A loss that is not a number, or whose gradient is not."""
    zero = tokens.logprobs - tokens.logprobs.detach()
    return (zero / zero if options["how"] == "loss" else zero.abs().sqrt()), {}


def objectives(**beside):
    """Each objective as it comes, and anchored on the proximal policy where it can be, with a correction that it may
    have."""
    for name, kind in OBJECTIVES.items():
        needed = {}
        if name == "custom":
            needed["function"] = f"{__name__}:user_objective"
        if name == "hispo":  # random data lies outside of its usual bounds
            needed.update(sequence_bound=10.0, token_bound=50.0)
        if kind.model_fields["average"].default == "constant":
            needed["average_tokens"] = 20
        for anchor in ({}, {"anchor": "proximal"}):
            if anchor and "anchor" not in kind.model_fields:
                continue
            try:
                plain = kind(**needed, **anchor)
            except ValueError:
                continue  # an objective whose anchor is fixed
            correction = {
                "mode": "filter" if plain.corrects_off_policy else "cap",
                "level": "segment",
                "segment_tokens": 3,
            }
            made = kind(**needed, **anchor, correction={**correction, "high": 3.0}, **beside)
            yield pytest.param(made, id=name + ("-proximal" if anchor else ""))


def gradients(trainer, batch):
    """The sum of the gradients that the steps of an update would be taken along, without stepping."""
    taken = {}

    def take(*_, **__):
        for name, parameter in trainer.model.named_parameters():
            if parameter.grad is not None:
                taken[name] = taken.get(name, 0) + parameter.grad.clone()
                parameter.grad = None
        return 0.0, 0.0

    trainer.optimizer.step = take
    trainer.update(batch)
    return taken


def relative_error(got, expected):
    assert got.keys() == expected.keys()
    difference = sum(float((got[n] - expected[n]).square().sum()) for n in got) ** 0.5
    return difference / sum(float(g.square().sum()) for g in expected.values()) ** 0.5


def made(algorithm, *, micro_tokens=10_000, lora=True, reference=None, **options):
    model = tiny(dtype=torch.float64)
    trainer = LocalTrainer(
        model,
        lora=LoraOptions(rank=4) if lora else None,
        options=TrainingOptions(micro_tokens=micro_tokens, **options),
        algorithm=algorithm,
        temperature=0.8,
        max_tokens=20,
        reference=reference,
    )
    if lora:  # adapters that do something: B starts at zero
        draw = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("lora_B"):
                    parameter.copy_(0.1 * torch.randn(parameter.shape, generator=draw, dtype=torch.float64))
    return trainer


@pytest.mark.parametrize("algorithm", objectives(**TERMS))
def test_gradients_depend_neither_on_micro_batches_nor_on_the_order_of_samples(algorithm):
    batch = random_batch(groups=2, members=3)
    shuffled = Batch(0, [batch.samples[i] for i in np.random.default_rng(0).permutation(len(batch.samples))])
    expected = gradients(made(algorithm), batch)
    assert any(gradient.abs().max() > 0 for gradient in expected.values())
    assert relative_error(gradients(made(algorithm, micro_tokens=1), batch), expected) < 1e-6
    assert relative_error(gradients(made(algorithm, micro_tokens=40), shuffled), expected) < 1e-6


@pytest.mark.parametrize("algorithm", objectives())
def test_every_objective_makes_an_update_whose_measures_are_finite(algorithm):
    trainer = LocalTrainer(tiny(), options=TrainingOptions(optimizer_steps=3, learning_rate=1e-2), algorithm=algorithm)
    before = trainer.weights(0).checksum
    report = trainer.update(random_batch())
    assert trainer.version == 1
    assert (trainer.weights(1).checksum != before) == algorithm.uses_rewards, "without a teacher nothing else trains it"
    assert all(np.isfinite(value) for value in report.metrics.values())


def definition(model, reference, batch, algorithm, temperature):
    """The loss of plain policy gradient with every term, from its definition, one sequence at a time."""
    rewards, groups = [s.reward for s in batch.samples], [s.group for s in batch.samples]
    kl, logs, refs = algorithm.kl, [], []
    for sample in batch.samples:
        logs.append(reference_logprobs(model, sample, temperature))
        refs.append(reference_logprobs(reference, sample, temperature).detach())
    if kl is not None and kl.place == "reward":
        apart = [
            float((torch.tensor(s.completion.logprobs.astype(np.float64)) - r).sum())
            for s, r in zip(batch.samples, refs, strict=True)
        ]
    advantages = outcome_advantages(algorithm.advantage, rewards, groups).values
    if kl is not None and kl.place == "reward":
        means = {group: np.mean([a for a, g in zip(apart, groups, strict=True) if g == group]) for group in set(groups)}
        advantages = advantages - [
            kl.coefficient * (each - means[group]) for each, group in zip(apart, groups, strict=True)
        ]
    total, count = 0.0, sum(len(each) for each in logs)
    good = sum(len(each) for each, s in zip(logs, batch.samples, strict=True) if s.reward > 1.0)
    for sample, ours, theirs, advantage in zip(batch.samples, logs, refs, advantages, strict=True):
        total = total - advantage * ours.sum() / count
        if kl is not None and kl.place == "loss":
            sampled = torch.tensor(sample.completion.logprobs.astype(np.float64))
            weights = (ours.detach() - sampled).exp().clamp(max=2.0)
            total = total + kl.coefficient * (weights * (ours - theirs) ** 2 / 2).sum() / count
        if algorithm.supervised is not None and sample.reward > 1.0:
            total = total - algorithm.supervised.coefficient * ours.sum() / good
        if algorithm.entropy is not None:
            total = total - algorithm.entropy.coefficient * entropy(model, sample, temperature).sum() / count
    return total


def entropy(model, sample, temperature):
    ids = torch.tensor([*sample.prompt, *sample.completion.tokens.tolist()])
    logits = model(input_ids=ids[None], use_cache=False).logits[0, len(sample.prompt) - 1 : -1] / temperature
    logs = logits.log_softmax(-1)
    return -(logs.exp() * logs).sum(-1)


@pytest.mark.parametrize(
    "beside",
    [
        {"kl": {"coefficient": 0.3, "estimator": "k2"}},
        {"kl": {"coefficient": 0.3, "estimator": "k1", "place": "reward"}},
        {"entropy": {"coefficient": 0.2}},
        {"supervised": {"coefficient": 0.4, "threshold": 1.0}},
    ],
    ids=["kl in the loss", "kl in the reward", "entropy", "supervised"],
)
def test_the_gradient_of_a_term_is_that_of_its_definition_with_a_model_of_its_own_as_the_reference(beside):
    algorithm, batch = NaiveOptions(**beside), random_batch()
    other = tiny(dtype=torch.float64)
    with torch.no_grad():
        other.model.layers[0].mlp.up_proj.weight.mul_(1.3)
    model = tiny(dtype=torch.float64).requires_grad_(True)
    loss = definition(model, second_tree(other, share=False), batch, algorithm, 0.8)
    loss.backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    reference = other if algorithm.kl is not None else None
    got = gradients(made(algorithm, lora=False, micro_tokens=40, reference=reference), batch)
    assert relative_error(got, expected) < 1e-6


def test_the_reference_without_adapters_is_the_base_and_the_adapters_come_back_bit_for_bit():
    algorithm = GrpoOptions(kl={"coefficient": 0.1})
    trainer = made(algorithm, learning_rate=UNSTEPPED)
    before = trainer.weights(0)
    with torch.no_grad():
        base = [reference_logprobs(tiny(dtype=torch.float64), s, 0.8) for s in random_batch().samples]
    trainer.reference.logprobs = []
    forward = trainer.packed.logprobs

    def watched(micro, temperature, **options):
        logprobs, entropies = forward(micro, temperature, **options)
        if not torch.is_grad_enabled():
            trainer.reference.logprobs.append((micro.samples, logprobs))
        return logprobs, entropies

    trainer.packed.logprobs = watched
    trainer.update(random_batch())
    ((samples, got),) = trainer.reference.logprobs
    assert torch.allclose(got, torch.cat([base[index] for index in samples]), atol=1e-12)
    assert trainer.weights(1).checksum == before.checksum


def test_a_reference_that_is_not_there_or_has_another_vocabulary_is_refused():
    algorithm = GrpoOptions(kl={"coefficient": 0.1})
    with pytest.raises(ModelError, match=r"no adapters to switch off.*`algorithm\.kl\.reference`"):
        LocalTrainer(tiny(), algorithm=algorithm)
    with pytest.raises(ModelError, match=r"`algorithm\.kl\.reference` has a vocabulary of 24"):
        LocalTrainer(tiny(), algorithm=algorithm, reference=tiny(vocab_size=VOCABULARY + 1))


def test_measures_say_how_much_is_imitated_corrected_and_how_far_the_reference_is():
    algorithm = GrpoOptions(anchor="proximal", correction={"high": 1.5}, **TERMS)
    batch = random_batch()
    metrics = made(algorithm).update(batch).metrics
    lengths = np.array([len(s.completion.tokens) for s in batch.samples])
    good = np.array([s.reward > 1.0 for s in batch.samples])
    assert metrics["imitated_fraction"] == pytest.approx(lengths[good].sum() / lengths.sum())
    assert 0 < metrics["correction_outside"] < 1
    assert 0 < metrics["correction_weight"] <= 1.5
    assert metrics["reference_kl"] > 0


def test_a_batch_without_a_good_answer_imitates_nothing():
    algorithm = NaiveOptions(supervised={"coefficient": 1.0, "threshold": 5.0})
    batch = random_batch()
    silent = Batch(0, [dataclasses.replace(sample, reward=1.0) for sample in batch.samples])
    assert made(algorithm).update(silent).metrics["grad_norm"] == 0.0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"micro_tokens": 40}, "for an earlier one of the same update"),
        ({"optimizer_steps": 2}, "for an earlier one of the same update"),
        ({"name": "loss"}, "returns a diagnostic `loss`"),
        ({"name": "entropy"}, "returns a diagnostic `entropy`"),
        ({"name": "imitated_fraction"}, "returns a diagnostic `imitated_fraction`"),
    ],
)
def test_diagnostics_that_change_or_take_the_name_of_another_measure_fail_before_anything_is_stepped(options, words):
    function = {"change": "name" not in options, "name": options.pop("name", "")}
    algorithm = CustomOptions(
        function=f"{__name__}:changing", options=function, supervised={"coefficient": 0.1, "threshold": 1.0}
    )
    trainer = made(algorithm, learning_rate=1e-2, **options)
    before = trainer.state()
    with pytest.raises(TrainerError, match=words):
        trainer.update(random_batch(groups=3, members=3))
    assert trainer.version == 0
    after = trainer.state()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_what_is_told_of_an_update_cannot_fail_when_it_is_done(monkeypatch):
    trainer = made(GrpoOptions(), learning_rate=1e-2)
    before = trainer.state()

    def failing(*_):
        raise ArithmeticError("no measure")

    monkeypatch.setattr("stretto.training.trainer.staleness_metrics", failing)
    with pytest.raises(ArithmeticError, match="no measure"):
        trainer.update(random_batch())
    assert trainer.version == 0
    assert all(torch.equal(before[name], tensor) for name, tensor in trainer.state().items())


def test_groups_without_signal_are_counted_by_their_own_rewards():
    batch = random_batch()
    equal = Batch(0, [dataclasses.replace(sample, reward=1.0) for sample in batch.samples])
    length = {"type": "relative"}
    for beside in ({"kl": {"coefficient": 0.01, "place": "reward"}}, {"length": length}):
        metrics = made(GrpoOptions(**beside)).update(equal).metrics
        assert metrics["groups_without_signal"] == metrics["groups"] == 3
        assert metrics["grad_norm"] > 0


@pytest.mark.parametrize("how", ["loss", "gradient"])
def test_a_custom_objective_that_is_not_finite_is_named_and_no_trajectory_is(how):
    algorithm = CustomOptions(function=f"{__name__}:broken", options={"how": how})
    trainer = LocalTrainer(tiny(), algorithm=algorithm)
    before = trainer.weights(0).checksum
    with pytest.raises(TrainerError, match=rf"`{__name__}:broken` \(test_trainer_objectives\.py:\d+\) .*nan"):
        trainer.update(random_batch())
    assert trainer.weights(0).checksum == before
