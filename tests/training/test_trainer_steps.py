"""Several optimizer steps an update: what each trains on, what the ratio is taken against, and how it is undone."""

import dataclasses

import numpy as np
import pytest
import torch
from training_cases import random_batch, tiny

from stretto.errors import TrainerError
from stretto.objectives.grpo import GrpoOptions
from stretto.training.mini_batches import split_groups
from stretto.training.optimizer import Optimizer
from stretto.training.trainer import LocalTrainer, LoraOptions, TrainingOptions
from stretto.types import Batch


def trainer(optimizer_steps=1, algorithm=None, **options):
    made = TrainingOptions(**{"learning_rate": 1e-2, "optimizer_steps": optimizer_steps, **options})
    return LocalTrainer(tiny(dtype=torch.float64), lora=LoraOptions(rank=4), options=made, algorithm=algorithm)


@pytest.mark.parametrize(
    ("groups", "parts", "expected"),
    [
        ([7, 7, 3, 3, 5, 5], 1, [[0, 1, 2, 3, 4, 5]]),
        ([7, 7, 3, 3, 5, 5], 2, [[0, 1, 2, 3], [4, 5]]),
        ([7, 3, 3, 5], 3, [[0], [1, 2], [3]]),
        ([7, 3, 7], 5, [[0, 2], [1]]),
    ],
)
def test_parts_are_whole_groups_in_the_order_of_the_batch(groups, parts, expected):
    assert split_groups(groups, parts) == expected


def test_steps_over_parts_are_updates_on_the_parts_one_after_the_other():
    batch = random_batch()
    whole = trainer(3)
    whole.update(batch)
    apart = trainer(1)
    for update, group in enumerate((0, 1, 2)):
        apart.update(Batch(update, [s for s in batch.samples if s.group == group]))
    assert whole.version == 1
    assert whole.optimizer.step_count == apart.optimizer.step_count == 3
    # The ratio of GRPO is anchored on the behaviour policy, so that both ways take the very same steps.
    for one, other in zip(whole.weights(1).tensors.values(), apart.weights(3).tensors.values(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


def test_the_rate_follows_updates_and_not_steps():
    made = trainer(3, schedule="linear", steps=4)
    rates = [made.update(random_batch(update)).metrics["learning_rate"] for update in range(4)]
    assert rates == pytest.approx([1e-2, 7.5e-3, 5e-3, 2.5e-3])


def test_the_proximal_policy_is_the_one_before_the_first_step():
    seen = []

    class Watching(GrpoOptions):
        def loss(self, tokens):
            seen.append((tokens.logprobs.detach() - tokens.proximal).abs().max().item())
            return super().loss(tokens)

    trainer(3, Watching(anchor="proximal"), learning_rate=0.1).update(random_batch())
    assert seen[0] == 0.0
    assert min(seen[1:]) > 1e-4


def test_a_restored_trainer_knows_its_version_and_goes_on_bit_for_bit(tmp_path):
    whole, resumed = trainer(2, algorithm=GrpoOptions(anchor="proximal")), trainer(2, GrpoOptions(anchor="proximal"))
    whole.update(random_batch())
    whole.save(tmp_path)
    resumed.load(tmp_path)
    assert (resumed.version, resumed.optimizer.step_count) == (1, 2)
    for each in (whole, resumed):
        each.update(random_batch(1, seed=1))
    assert whole.weights(2).checksum == resumed.weights(2).checksum


def test_a_checkpoint_that_does_not_say_its_version_has_one_step_an_update():
    first, second = trainer(), trainer()
    first.update(random_batch())
    state = first.state()
    del state["version"]
    second.restore(state)
    assert second.version == 1


def test_a_later_step_that_fails_leaves_nothing_changed(monkeypatch):
    made = trainer(3)
    made.update(random_batch())
    before = made.state()
    step, calls = Optimizer.step, []

    def third_fails(self, *arguments, **options):
        calls.append(None)
        if len(calls) == 3:
            raise TrainerError("no more")
        return step(self, *arguments, **options)

    monkeypatch.setattr(Optimizer, "step", third_fails)
    with pytest.raises(TrainerError, match="no more"):
        made.update(random_batch(1, seed=1))
    after = made.state()
    assert made.version == 1
    assert all(torch.equal(before[name], after[name]) for name in before)
    monkeypatch.undo()
    fresh = trainer(3)
    fresh.restore(before)
    for each in (made, fresh):
        each.update(random_batch(1, seed=1))
    assert made.weights(2).checksum == fresh.weights(2).checksum


def test_mismatch_is_measured_before_the_first_step():
    batch = random_batch()
    one = trainer(1, learning_rate=0.1).update(batch)
    several = trainer(3, learning_rate=0.1).update(batch)
    assert several.mismatch_tokens == one.mismatch_tokens == sum(len(s.completion.tokens) for s in batch.samples)
    assert several.mismatch_kl_sum == pytest.approx(one.mismatch_kl_sum, rel=1e-9)
    assert (one.metrics["optimizer_steps"], several.metrics["optimizer_steps"]) == (1, 3)


def test_fewer_groups_than_steps_make_a_step_for_each():
    batch = random_batch(groups=2)
    assert trainer(5).update(batch).metrics["optimizer_steps"] == 2


def test_a_sample_that_cannot_be_trained_on_leaves_nothing_changed_in_several_steps():
    made, batch = trainer(3), random_batch()
    before = made.weights(0).checksum
    samples = list(batch.samples)
    logprobs = np.full_like(samples[-1].completion.logprobs, np.nan)
    samples[-1] = dataclasses.replace(
        samples[-1], completion=dataclasses.replace(samples[-1].completion, logprobs=logprobs)
    )
    with pytest.raises(TrainerError, match="loss of update 0 is nan"):
        made.update(Batch(0, samples))
    assert made.weights(0).checksum == before


@pytest.mark.parametrize("optimizer_steps", [1, 3])
@pytest.mark.parametrize("options", [{"learning_rate": 1e20}, {"learning_rate": 1e38, "weight_decay": 10.0}])
def test_an_update_whose_weights_are_not_finite_fails_and_changes_nothing(optimizer_steps, options):
    made = LocalTrainer(
        tiny(), options=TrainingOptions(optimizer_steps=optimizer_steps, **options), algorithm=GrpoOptions()
    )
    before = made.state()
    with pytest.raises(TrainerError, match=r"update 0 makes weights .* Lower `training\.learning_rate`") as caught:
        made.update(random_batch())
    assert "--give-up" not in str(caught.value)
    after = made.state()
    assert made.version == 0
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_policy_without_finite_log_probabilities_is_not_blamed_on_a_trajectory():
    made = trainer()
    with torch.no_grad():
        made.packed.head.weight.fill_(1e300)  # finite, and the logits are not
    with pytest.raises(TrainerError, match=r"no sample has .* under version 0: .*`training\.learning_rate`") as caught:
        made.update(random_batch())
    assert "--give-up" not in str(caught.value)


def test_the_norm_of_weights_in_half_precision_is_computed_in_float32():
    parameters = {"half": torch.nn.Parameter(torch.full((4,), 6e4, dtype=torch.float16)), "full": _full(3.0)}
    assert float(Optimizer(parameters, TrainingOptions()).weight_norm()) == pytest.approx(120_000.0, rel=1e-3)
    parameters["full"] = _full(float("nan"))
    assert not np.isfinite(float(Optimizer(parameters, TrainingOptions()).weight_norm()))


def _full(value):
    return torch.nn.Parameter(torch.full((2, 2), value))


@pytest.mark.parametrize("steps", [1, 3])
def test_an_update_that_runs_out_of_memory_after_its_step_is_undone_or_not_tried_again(steps, monkeypatch):
    """Its weights have changed: a second try on top of them would train its samples twice."""
    made = trainer(steps)
    before = made.state()

    def fails(self):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Optimizer, "weight_norm", fails)
    if steps == 1:  # there is no copy to go back to
        with pytest.raises(TrainerError, match=r"update 0 failed after its optimizer step had begun.*out of memory"):
            made.update(random_batch())
        return
    with pytest.raises(torch.OutOfMemoryError):
        made.update(random_batch())
    after = made.state()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_an_update_that_runs_out_of_memory_before_its_step_may_be_tried_again(monkeypatch):
    made = trainer()
    before = made.state()

    def fails(self):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(Optimizer, "norm", fails)
        with pytest.raises(torch.OutOfMemoryError):
            made.update(random_batch())
    after = made.state()
    assert all(torch.equal(before[name], after[name]) for name in before)
    made.update(random_batch())
    fresh = trainer()
    fresh.update(random_batch())
    assert made.weights(1).checksum == fresh.weights(1).checksum
