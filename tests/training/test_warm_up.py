"""A pass before the first update: it changes nothing, and what it compiles is not compiled again."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounter
from training_cases import random_batch, tiny

from stretto.training import warm_up as module
from stretto.training.trainer import LocalTrainer, LoraOptions, TrainingOptions
from stretto.training.warm_up import compiles, warm_up


def trainer_of(kind: str, **changes: object) -> LocalTrainer:
    lora = LoraOptions(rank=2, alpha=4.0) if kind == "lora" else None
    return LocalTrainer(tiny(), lora=lora, options=TrainingOptions(learning_rate=1e-2, **changes))  # type: ignore[arg-type]


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("kind", ["full", "lora"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_it_leaves_the_trainer_and_random_numbers_as_they_were(
    kind: str, checkpointing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LENGTH", 48)
    warm, cold = (trainer_of(kind, checkpointing=checkpointing) for _ in range(2))
    before, numbers = warm.state(), torch.get_rng_state()
    assert warm_up(warm, 192) == 192
    assert same(warm.state(), before)
    assert torch.equal(torch.get_rng_state(), numbers)
    assert all(parameter.grad is None for parameter in warm.model.parameters())
    assert warm.version == 0
    for update in range(2):
        reports = [trainer.update(random_batch(update)) for trainer in (warm, cold)]
        assert reports[0].metrics["grad_norm"] == reports[1].metrics["grad_norm"]
    assert same(warm.state(), cold.state())


def test_updates_do_not_compile_what_it_has_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LENGTH", 48)
    trainer, backend = trainer_of("lora"), CompileCounter()
    trainer.packed.prepare(compiled=True, checkpointing=False, plain=True, backend=backend)  # type: ignore[arg-type]
    assert compiles(trainer)
    warm_up(trainer, 192)
    made = backend.frame_count
    assert made > 0
    for update in range(3):
        trainer.update(random_batch(update, seed=update, prompt_tokens=(1, 7) if update == 1 else (20, 40)))
    assert backend.frame_count == made


def test_it_takes_fewer_tokens_if_memory_runs_out(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []
    most = 4

    def run(trainer: LocalTrainer, count: int) -> None:
        tried.append(count)
        if count > most:
            raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(module, "_run_pass", run)
    trainer = trainer_of("full", micro_tokens=16 * module.LENGTH)
    assert warm_up(trainer, 1_000_000) == 4 * module.LENGTH
    assert tried == [16, 8, 4]
    most = 0
    assert warm_up(trainer, 1_000_000) == 0
    assert tried[-1] == 2  # a single sequence would be compiled for single ones alone
    most = 99
    assert warm_up(trainer, 100) == 2 * module.LENGTH


def test_on_a_cpu_nothing_compiles_by_default() -> None:
    assert not compiles(trainer_of("full"))
    assert np.isfinite(warm_up(trainer_of("full"), 1_024))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("kind", ["full", "lora"])
def test_on_a_gpu_it_leaves_everything_as_it_was(kind: str) -> None:
    model = tiny(dtype=torch.bfloat16, hidden_size=64, head_dim=16).cuda()
    lora = LoraOptions(rank=8, alpha=16.0) if kind == "lora" else None
    trainer = LocalTrainer(model, lora=lora)
    before = trainer.state()
    numbers = torch.get_rng_state(), torch.cuda.get_rng_state()
    assert compiles(trainer)
    assert warm_up(trainer, 1 << 20) == min(trainer.micro_tokens, module.MOST_TOKENS)
    assert same(trainer.state(), before)
    assert torch.equal(torch.get_rng_state(), numbers[0])
    assert torch.equal(torch.cuda.get_rng_state(), numbers[1])
    trainer.update(random_batch())
