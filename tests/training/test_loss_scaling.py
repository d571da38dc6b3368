"""The scale of the loss in float16: gradients follow float32, the scale falls where it must, and nothing is lost."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from training_cases import random_batch, tiny

from stretto.errors import TrainerError
from stretto.models.loading import second_tree
from stretto.objectives.base import ObjectiveOptions
from stretto.objectives.critic_options import CriticOptions
from stretto.objectives.grpo import GrpoOptions
from stretto.objectives.ppo import PpoOptions
from stretto.objectives.reinforce import ReinforceOptions
from stretto.training.loss_scaling import FLOOR, PATIENCE, START, LossScale, initial_loss_scale
from stretto.training.trainer import LocalTrainer, LoraOptions, TrainingOptions
from stretto.types import Batch

HALF = tiny(dtype=torch.float16)


def make(
    dtype: torch.dtype, algorithm: ObjectiveOptions | None = None, *, lora: bool = True, lean: bool = False, **more: Any
) -> LocalTrainer:
    """A trainer of the same values in every type; its adapters are not at zero, where half of the gradient is."""
    trainer = LocalTrainer(
        second_tree(HALF, share=False).to(dtype),
        lora=LoraOptions(rank=4) if lora else None,
        options=TrainingOptions(learning_rate=1e-3, **more),
        algorithm=algorithm,
    )
    if lora:
        generator = torch.Generator().manual_seed(7)
        state = trainer.state()
        for name in sorted(state):
            if name.startswith("value/"):
                drawn = 0.2 * torch.randn(state[name].shape, generator=generator)
                state[name] = drawn.half().to(state[name].dtype)
        trainer.restore(state)
    if lean:
        trainer.packed.prepare(compiled=False, checkpointing=False, plain=True)
    return trainer


def step(trainer: LocalTrainer, batch: Batch) -> tuple[torch.Tensor, dict[str, float]]:
    """The whole gradient that an update of one step was made along, and what is told of it."""
    found, own = list[torch.Tensor](), trainer.optimizer.step

    def keep(*arguments: Any, **named: Any) -> Any:
        found.extend(tensor.grad.flatten().clone() for tensor in trainer.optimizer.stepped if tensor.grad is not None)
        return own(*arguments, **named)

    trainer.optimizer.step = keep  # type: ignore[method-assign]
    metrics = dict(trainer.update(batch).metrics)
    trainer.optimizer.step = own  # type: ignore[method-assign]
    return torch.cat(found), metrics


def rewarded(batch: Batch, factor: float) -> Batch:
    samples = [dataclasses.replace(sample, reward=factor * sample.reward) for sample in batch.samples]
    return Batch(batch.update, samples)


def error(ours: torch.Tensor, truth: torch.Tensor) -> float:
    return float((ours - truth).norm() / truth.norm())


def same(one: LocalTrainer, other: LocalTrainer) -> bool:
    ours, theirs = one.state(), other.state()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


# -- the scale alone ---------------------------------------------------------------------------------------------------


def test_only_float16_has_a_scale() -> None:
    assert initial_loss_scale(torch.float16) == LossScale(START)
    assert (
        initial_loss_scale(torch.bfloat16)
        is initial_loss_scale(torch.float32)
        is initial_loss_scale(torch.float64)
        is None
    )
    for dtype in (torch.bfloat16, torch.float32):
        trainer = make(dtype)
        assert "loss_scale" not in trainer.state()
        assert "loss_scale" not in trainer.update(random_batch()).metrics


@given(st.lists(st.booleans(), max_size=60), st.integers(0, 3 * PATIENCE))
def test_the_scale_is_a_power_of_two_between_its_floor_and_its_start(falls: list[bool], updates: int) -> None:
    scale = LossScale()
    for fall in falls:
        scale = (scale.lowered() or scale) if fall else scale.after_update()
        assert FLOOR <= scale.value <= START
        assert torch.frexp(torch.tensor(scale.value)).mantissa == 0.5
        assert LossScale.of_state(scale.state()) == scale
    before = scale.value
    for _ in range(updates):
        scale = scale.after_update()
    assert scale.value >= min(START, before * 2 ** (updates // PATIENCE))


def test_the_scale_grows_after_as_many_updates_as_it_should() -> None:
    scale = LossScale().lowered()
    assert scale is not None
    for _ in range(PATIENCE - 1):
        scale = scale.after_update()
        assert scale.value == START / 2
    assert scale.after_update() == LossScale(START)
    assert LossScale(FLOOR).lowered() is None


# -- gradients ---------------------------------------------------------------------------------------------------------


@settings(max_examples=8)
@given(seed=st.integers(0, 1_000), lora=st.booleans(), lean=st.booleans(), micro_tokens=st.sampled_from([40, 8_192]))
def test_the_gradient_in_float16_is_that_of_float32(seed: int, lora: bool, lean: bool, micro_tokens: int) -> None:
    batch, algorithm = random_batch(seed=seed), ReinforceOptions()  # without a clip, which rounding may fall behind
    truth, expected = step(make(torch.float32, algorithm, lora=lora, micro_tokens=micro_tokens), batch)
    ours, told = step(make(torch.float16, algorithm, lora=lora, lean=lean, micro_tokens=micro_tokens), batch)
    assert error(ours, truth) < 2e-2
    assert told["loss"] == pytest.approx(expected["loss"], abs=5e-3), "it is told unscaled"
    assert told["grad_norm"] == pytest.approx(expected["grad_norm"], rel=2e-2)


@pytest.mark.parametrize("lora", [False, True])
def test_a_gradient_that_float16_would_lose_is_kept_by_the_scale(lora: bool) -> None:
    algorithm = ReinforceOptions(average="constant", average_tokens=20_000_000)
    truth, _ = step(make(torch.float32, algorithm, lora=lora), random_batch())
    ours, told = step(make(torch.float16, algorithm, lora=lora), random_batch())
    assert told["loss_scale"] == START
    assert error(ours, truth) < 2e-2
    unscaled = make(torch.float16, algorithm, lora=lora)
    unscaled.scale = LossScale(1.0)
    lost, _ = step(unscaled, random_batch())
    assert error(lost, truth) > 0.2


@pytest.mark.parametrize("lora", [False, True])
def test_the_scale_falls_where_the_loss_is_large_and_the_step_is_made_once(lora: bool) -> None:
    algorithm, batch = ReinforceOptions(), rewarded(random_batch(), 1e4)
    truth, _ = step(make(torch.float32, algorithm, lora=lora), batch)
    trainer = make(torch.float16, algorithm, lora=lora)
    ours, told = step(trainer, batch)
    assert FLOOR <= told["loss_scale"] < START
    assert error(ours, truth) < 2e-2
    assert (trainer.version, trainer.optimizer.step_count) == (1, 1)
    # As if it had begun with that scale: nothing is left of what was tried before.
    other = make(torch.float16, algorithm, lora=lora)
    other.scale = LossScale(told["loss_scale"])
    other.update(batch)
    assert same(trainer, other)


def test_a_gradient_beyond_every_scale_is_an_error_that_changes_nothing() -> None:
    trainer = make(torch.float16, ReinforceOptions(), lora=False)
    before = trainer.state()
    with pytest.raises(TrainerError, match=r"gradient's norm is (inf|nan) at update 0, even with a loss scale of 1:"):
        trainer.update(rewarded(random_batch(), 1e20))
    after = trainer.state()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert trainer.update(rewarded(random_batch(), 0.1)).metrics["loss_scale"] == START


def test_each_step_of_an_update_finds_its_own_scale() -> None:
    batch = random_batch()
    late = [dataclasses.replace(s, reward=s.reward * (1e4 if s.group == 2 else 1)) for s in batch.samples]
    trainer = make(torch.float16, ReinforceOptions(), optimizer_steps=3)
    told = trainer.update(Batch(0, late)).metrics
    assert told["loss_scale"] < START
    assert trainer.optimizer.step_count == 3
    truth = make(torch.float32, ReinforceOptions(), optimizer_steps=3)
    assert truth.update(Batch(0, late)).metrics["grad_norm"] == pytest.approx(told["grad_norm"], rel=2e-2)


# -- over updates ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lora", [False, True])
def test_a_training_in_float16_follows_float32_more_closely_than_bfloat16_does(lora: bool) -> None:
    ends = {}
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        trainer = make(dtype, GrpoOptions(), lora=lora)
        for update in range(4):
            trainer.update(random_batch(update, seed=update))
        state = trainer.state()
        ends[dtype] = torch.cat([state[n].flatten().float() for n in sorted(state) if n.startswith("value/")])
    began = make(torch.float32, lora=lora).state()
    start = torch.cat([began[n].flatten() for n in sorted(began) if n.startswith("value/")])
    truth = ends[torch.float32] - start
    assert error(ends[torch.float16] - start, truth) < 0.1
    assert error(ends[torch.float16] - start, truth) < 0.5 * error(ends[torch.bfloat16] - start, truth)


@pytest.mark.parametrize("shared", [False, True])
def test_the_critics_gradient_is_divided_too(shared: bool) -> None:
    algorithm = PpoOptions(critic=CriticOptions(shared=shared))
    norms = {}
    for dtype in (torch.float32, torch.float16):
        trainer = make(dtype, algorithm)
        told = [trainer.update(rewarded(random_batch(n, seed=n), 1e3)).metrics for n in range(2)]
        norms[dtype] = [each["critic_grad_norm"] for each in told]
    assert told[-1]["loss_scale"] <= START
    assert norms[torch.float16] == pytest.approx(norms[torch.float32], rel=2e-2)


def test_a_resumed_trainer_goes_on_with_the_same_scale_and_the_same_bits(tmp_path: Path) -> None:
    whole = make(torch.float16, ReinforceOptions())
    fell = whole.update(rewarded(random_batch(0), 1e4)).metrics["loss_scale"]
    assert fell < START
    whole.save(tmp_path)
    resumed = make(torch.float16, ReinforceOptions())
    resumed.load(tmp_path)
    assert resumed.scale == whole.scale == LossScale(fell, 1)
    for trainer in (whole, resumed):
        assert trainer.update(random_batch(1, seed=1)).metrics["loss_scale"] == fell
    assert same(whole, resumed)


def test_a_state_without_a_scale_begins_anew_and_one_that_is_none_is_refused() -> None:
    trainer = make(torch.float16)
    trainer.scale = LossScale(4.0, 3)
    state = trainer.state()
    trainer.restore({name: tensor for name, tensor in state.items() if name != "loss_scale"})
    assert trainer.scale == LossScale()
    with pytest.raises(TrainerError, match="`loss_scale` has 3 numbers"):
        trainer.restore({**state, "loss_scale": torch.zeros(3)})
