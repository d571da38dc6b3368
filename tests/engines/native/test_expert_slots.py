"""Versions with adapters on experts, side by side in one engine, against the trainer and against each other alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from engine_cases import drive

from stretto.engines.native.engine import NativeEngine
from stretto.engines.native.expert_slots import SlottedExperts
from stretto.engines.native.fused import fits
from stretto.engines.native.kernels.kernel_set import CPU
from stretto.engines.native.lora_slots import SlotMask
from stretto.errors import ModelError
from stretto.models.lora_options import LoraOptions
from stretto.models.tiny import random_mixture
from stretto.training.recorded_logprobs import TOLERANCES, rescore
from stretto.training.trainer import LocalTrainer
from stretto.types import Request, Sample, Sampling, Weights

TARGETS = ("q_proj", "gate_up_proj", "down_proj")
PROMPT = tuple(range(3, 24))


def trainer_of(version: int, dtype: torch.dtype, targets: tuple[str, ...] = TARGETS, rank: int = 4) -> LocalTrainer:
    trainer = LocalTrainer(random_mixture(0).to(dtype), lora=LoraOptions(rank=rank, targets=targets))
    generator = torch.Generator().manual_seed(version)
    for parameter in trainer.model.parameters():
        if parameter.requires_grad:
            parameter.data = (torch.randn(parameter.shape, generator=generator) * 0.15).to(parameter.dtype)
    return trainer


def engine_of(
    weights: list[Weights], dtype: torch.dtype, targets: tuple[str, ...] = TARGETS, rank: int = 4
) -> NativeEngine:
    engine = NativeEngine(
        random_mixture(0).to(dtype), kind="lora", slots=3, rows=16, kv_tokens=2048, max_context=128, lora_rank=rank,
        lora_targets=targets,
    )  # fmt: skip
    for each in weights:
        engine.load(each)
    return engine


def requests(version: int, count: int = 3) -> list[Request]:
    return [Request(10 * version + n, version, PROMPT, 10 * version + n, Sampling(20)) for n in range(count)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("targets", [TARGETS, ("gate_up_proj",), ("down_proj",)])
def test_versions_side_by_side_have_the_log_probabilities_of_their_trainers(
    dtype: torch.dtype, targets: tuple[str, ...]
) -> None:
    trainers = [trainer_of(version, dtype, targets, rank=3) for version in range(2)]
    engine = engine_of([each.policy.weights(n) for n, each in enumerate(trainers)], dtype, targets, rank=3)
    done = drive(engine, [*requests(0), *requests(1)])
    each, share, mean = TOLERANCES[dtype]
    for version, trainer in enumerate(trainers):
        samples = [Sample(id, 0, version, PROMPT, one, 0.0) for id, one in done.items() if one.version == version]
        assert len(samples) == 3
        for scored, sample in zip(rescore(trainer, samples), samples, strict=True):
            differences = np.abs(scored - sample.completion.logprobs)
            assert (differences <= each + share * np.abs(scored)).all()
            assert differences.mean() <= mean
        other = rescore(trainers[1 - version], samples)
        far = [np.abs(a - b.completion.logprobs).mean() for a, b in zip(other, samples, strict=True)]
        assert min(far) > 0.1, "the versions differ, so a mix-up would be seen"


def test_a_version_does_not_depend_on_those_beside_it() -> None:
    torch.set_num_threads(1)
    weights = [trainer_of(version, torch.float32).policy.weights(version) for version in range(3)]
    alone = drive(engine_of([weights[1]], torch.float32), requests(1))
    engine = engine_of(weights, torch.float32)
    together = drive(engine, [*requests(0), *requests(1), *requests(2)])
    for id, one in alone.items():
        assert np.array_equal(one.tokens, together[id].tokens)
        if engine.exact:
            assert np.array_equal(one.logprobs, together[id].logprobs)
        np.testing.assert_allclose(one.logprobs, together[id].logprobs, atol=1e-5)


def test_the_modules_of_transformers_serve_adapters_on_experts_too() -> None:
    """A mixture that is no plain decoder: its modules run, with the experts replaced."""
    fused, weights = random_mixture(0), trainer_of(0, torch.float32).policy.weights(0)
    stock: Any = random_mixture(0)
    stock.model.norm.register_forward_hook(lambda module, inputs, output: None)  # a hook makes it no plain decoder
    assert fits(fused, CPU)
    assert not fits(stock, CPU)
    done = []
    for model in (fused, stock):
        engine = NativeEngine(
            model, kind="lora", slots=2, rows=8, kv_tokens=1024, max_context=128, lora_rank=4, lora_targets=TARGETS
        )
        engine.load(weights)
        done.append(drive(engine, requests(0)))
    for id, one in done[0].items():
        assert np.array_equal(one.tokens, done[1][id].tokens)
        np.testing.assert_allclose(one.logprobs, done[1][id].logprobs, atol=1e-4)


def test_an_unloaded_version_leaves_nothing_behind() -> None:
    weights = [trainer_of(version, torch.float32).policy.weights(version) for version in range(2)]
    engine = engine_of(weights, torch.float32)
    engine.unload(0)
    slotted = [module for module in engine._slots.trees[0].modules() if isinstance(module, SlottedExperts)]
    for own in slotted[0].slots.values():
        assert not any(part.any() for part in own.resident(0))
        assert all(part.any() for part in own.resident(1))


def test_values_that_are_not_finite_are_refused_by_name() -> None:
    trainer = trainer_of(0, torch.float32)
    trainer.model.get_submodule("model.layers.0.mlp.experts.down_proj_adapter").lora_B.data[2, 0, 0] = float("nan")
    with pytest.raises(ModelError, match=r"down_proj_adapter\.lora_B` of version 0 has values that are not finite"):
        engine_of([trainer.policy.weights(0)], torch.float32)


def test_the_mask_gives_experts_the_slots_of_a_forward() -> None:
    mask = SlotMask(2, 4, torch.device("cpu"))
    experts: Any = random_mixture(0).model.layers[0].mlp.experts
    slotted = SlottedExperts(experts, ("down_proj",), 2, 4, mask)
    generator = torch.Generator().manual_seed(0)
    for part in slotted.slots["down_proj"].resident(1):
        part.copy_(torch.randn(part.shape, generator=generator))
    x = torch.randn(4, experts.down_proj.shape[1], generator=generator)
    ids, shares = torch.tensor([[0, 3]]).expand(4, 2), torch.full((4, 2), 0.5)
    with torch.inference_mode():
        plain = experts(x, ids, shares)
        mask.choose(torch.tensor([0, 1, 0, 1]))
        made = slotted(x, ids, shares)
    same = [torch.allclose(a, b, atol=1e-5) for a, b in zip(made, plain, strict=True)]
    assert same == [True, False, True, False]
