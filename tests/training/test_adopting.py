"""Recorded weights in the place of the trainer's own."""

from __future__ import annotations

import pytest
import torch
from training_cases import random_batch, tiny

from stretto.errors import TrainerError
from stretto.training.trainer import LocalTrainer, LoraOptions
from stretto.types import Weights


def test_adopting_what_a_trainer_holds_keeps_what_it_holds_more_finely() -> None:
    torch.set_num_threads(1)
    trainer = LocalTrainer(tiny(dtype=torch.bfloat16), lora=LoraOptions(rank=2))
    trainer.update(random_batch())
    before, own = trainer.state(), trainer.weights(1)
    trainer.adopt(own)
    assert all(torch.equal(trainer.state()[name], tensor) for name, tensor in before.items())
    other = Weights(1, "lora", {name: tensor + 1 for name, tensor in own.tensors.items()}, "another", own.scale)
    trainer.adopt(other)
    assert all(torch.equal(tensor, other.tensors[name]) for name, tensor in trainer.weights(1).tensors.items())
    assert all(torch.equal(trainer.state()[name], before[name]) for name in before if not name.startswith("value/"))
    with pytest.raises(TrainerError, match="are of another policy"):
        trainer.adopt(Weights(1, "lora", {}, "nothing"))
