"""Passes of the packed model whose gradient nobody wants."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from training_cases import random_batch, tiny

from stretto.objectives.base import ObjectiveOptions
from stretto.objectives.grpo import GrpoOptions
from stretto.objectives.ppo import PpoOptions
from stretto.training.forward import PackedModel
from stretto.training.recorded_logprobs import rescore
from stretto.training.trainer import LocalTrainer, LoraOptions, TrainingOptions


class Activations:
    """Lives as long as what a pass keeps for its gradient."""


def compiled_trainer(algorithm: ObjectiveOptions, steps: int = 1) -> LocalTrainer:
    options = TrainingOptions(micro_tokens=40, optimizer_steps=steps)
    trainer = LocalTrainer(tiny(dtype=torch.float64), lora=LoraOptions(rank=4), algorithm=algorithm, options=options)
    trainer.packed.prepare(compiled=True, checkpointing=False, plain=True, backend="eager")
    return trainer


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of earlier passes whose activations were alive when a pass began."""
    made: list[weakref.ref[Any]] = []
    alive: list[int] = []
    original = PackedModel.hidden

    def hidden(self: PackedModel, *arguments: Any) -> torch.Tensor:
        alive.append(sum(each() is not None for each in made))
        result = original(self, *arguments)
        if result.grad_fn is not None:  # compiled layers run with gradients enabled
            held = Activations()
            result.grad_fn.metadata["held"] = held
            made.append(weakref.ref(held))
        return result

    monkeypatch.setattr(PackedModel, "hidden", hidden)
    return alive


def test_scoring_samples_again_holds_the_activations_of_one_micro_batch(graphs: list[int]) -> None:
    trainer = compiled_trainer(GrpoOptions())
    graphs.clear()
    rescore(trainer, random_batch().samples)
    assert len(graphs) > 2
    assert set(graphs) == {0}


@pytest.mark.parametrize(
    ("algorithm", "steps"), [(GrpoOptions(kl={"coefficient": 0.1}), 1), (GrpoOptions(), 2), (PpoOptions(), 1)]
)
def test_an_update_holds_the_activations_of_one_micro_batch(
    graphs: list[int], algorithm: ObjectiveOptions, steps: int
) -> None:
    trainer = compiled_trainer(algorithm, steps)
    graphs.clear()
    trainer.update(random_batch())
    assert len(graphs) > 4, "a pass before the first step, and that of the step"
    assert set(graphs) == {0}
