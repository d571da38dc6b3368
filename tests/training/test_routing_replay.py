"""The trainer replays the experts that the engine recorded."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from stretto.engines.native.engine import NativeEngine
from stretto.errors import ModelError, RecipeError, TrainerError
from stretto.models import decoder, routing
from stretto.models.lora_options import LoraOptions
from stretto.models.routing import routing_shape
from stretto.models.tiny import random_mixture, random_model
from stretto.training.forward import PackedModel
from stretto.training.options import TrainingOptions
from stretto.training.packing import micro_batch
from stretto.training.recorded_logprobs import rescore
from stretto.training.trainer import LocalTrainer
from stretto.types import Batch, Completion, Request, Sample, Sampling

PROMPT = tuple(range(10, 22))


def sample_of(trajectory: int, length: int, *, routing: np.ndarray | None, reward: float = 0.0) -> Sample:
    tokens = np.random.default_rng(trajectory).integers(3, 99, length).astype(np.int32)
    made = Completion(trajectory, 0, tokens, np.full(length, -1.0, np.float32), "stop", "", routing=routing)
    return Sample(trajectory, 0, 0, PROMPT, made, reward)


def random_record(length: int, seed: int) -> np.ndarray:
    """Experts that no router would choose: two different ones for each token and layer, at random."""
    random = np.random.default_rng(seed)
    return np.argsort(random.random((len(PROMPT) + length - 1, 2, 8)))[..., :2].astype(np.uint8)


def generated(model: Any, count: int, length: int) -> list[Sample]:
    engine = NativeEngine(model, kind="full", slots=1, rows=16, kv_tokens=4096, max_context=256)
    engine.load(LocalTrainer(copy.deepcopy(model)).policy.weights(0))
    for index in range(count):
        engine.add(Request(index, 0, PROMPT, index, Sampling(length), group=0))
    done: list[Completion] = []
    while engine.has_work:
        done += [each for each in engine.step() if isinstance(each, Completion)]
    return [Sample(each.id, 0, 0, PROMPT, each, float(each.id % 2)) for each in done]


def fixed_routing_logprobs(model: Any, sample: Sample) -> torch.Tensor:
    """Log-probabilities in float64 by all experts of every token, with gates that are zero where not chosen."""
    record = sample.completion.routing
    assert record is not None
    wide = copy.deepcopy(model).double()
    wide.config._attn_implementation = "eager"
    for place, layer in enumerate(wide.model.layers):
        layer.__dict__.pop("forward", None)
        chosen = torch.zeros(len(record), 8, dtype=torch.bool)
        chosen.scatter_(1, torch.from_numpy(record[:, place].astype(np.int64)), True)

        def mlp(x: torch.Tensor, block: Any = layer.mlp, chosen: torch.Tensor = chosen) -> torch.Tensor:
            logits = x[0] @ block.gate.weight.T
            gates = logits.masked_fill(~chosen, -torch.inf).softmax(-1)
            total = torch.zeros_like(x[0])
            for expert in range(8):
                gate, up = (x[0] @ block.experts.gate_up_proj[expert].T).chunk(2, -1)
                total = total + gates[:, expert, None] * ((F.silu(gate) * up) @ block.experts.down_proj[expert].T)
            return total[None]

        layer.mlp.forward = mlp
    tokens = torch.tensor([*PROMPT, *sample.completion.tokens.tolist()])
    logits = wide(tokens[None, :-1]).logits[0, len(PROMPT) - 1 :]
    fixed_routing_logprobs.model = wide  # type: ignore[attr-defined]
    return logits.log_softmax(-1).gather(1, tokens[len(PROMPT) :, None])[:, 0]


@pytest.mark.parametrize("plain", [False, True], ids=["modules", "lean"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_flow_through_the_gates_of_recorded_experts(checkpointing: bool, plain: bool) -> None:
    model = random_mixture(1)
    own = copy.deepcopy(model)
    packed = PackedModel(model)
    packed.prepare(compiled=False, checkpointing=checkpointing, plain=plain)
    assert (packed.plain is not None) == plain
    samples = [sample_of(each, 5 + each, routing=random_record(5 + each, each)) for each in range(2)]
    zeros = np.zeros(2)
    micro = micro_batch(samples, [0, 1], zeros, zeros, flash=packed.flash, routing=routing_shape(own))
    logprobs, _ = packed.logprobs(micro, 1.0)
    logprobs.sum().backward()
    expected: dict[str, torch.Tensor] = {}
    values = []
    for sample in samples:
        found = fixed_routing_logprobs(own, sample)
        found.sum().backward()
        values.append(found.detach())
        for name, parameter in fixed_routing_logprobs.model.named_parameters():  # type: ignore[attr-defined]
            expected[name] = expected.get(name, torch.zeros_like(parameter)) + parameter.grad
    assert torch.allclose(logprobs.detach().double(), torch.cat(values), atol=1e-4)
    for name, parameter in model.named_parameters():
        scale = expected[name].abs().max()
        assert scale > 0, name
        assert (parameter.grad.double() - expected[name]).abs().max() < 1e-4 * scale, name


def test_the_experts_of_engine_and_trainer_are_equal_with_replay_and_their_mismatch_falls_in_bfloat16(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = random_mixture(0, num_hidden_layers=4).to(torch.bfloat16)
    samples = generated(model, 12, 64)
    trainer = LocalTrainer(model)
    used: list[np.ndarray] = []

    def gates(logits: torch.Tensor, ids: torch.Tensor, *, normalized: bool) -> torch.Tensor:
        used.append(ids[: sum(len(sample.completion.routing) for sample in samples)].numpy())
        return routing.gates(logits, ids, normalized=normalized)

    monkeypatch.setattr(decoder, "gates", gates)
    recorded = np.concatenate([sample.completion.logprobs for sample in samples])

    def mismatch() -> float:
        used.clear()
        return float(np.abs(np.concatenate(rescore(trainer, samples)) - recorded).mean())

    replayed = mismatch()
    record = np.concatenate([sample.completion.routing for sample in samples])
    assert np.array_equal(np.sort(np.stack(used, 1)), np.sort(record))  # one micro-batch has them all, in their order
    trainer.routing = None
    free = mismatch()
    assert not np.array_equal(np.sort(np.stack(used, 1)), np.sort(record))
    assert free >= 1.5 * replayed


def test_an_update_replays_and_reports_the_load_of_experts() -> None:
    model = random_mixture(2)
    samples = generated(model, 4, 8)
    trainer = LocalTrainer(model)
    report = trainer.update(Batch(0, samples))
    assert report.metrics["expert_imbalance_max"] >= report.metrics["expert_imbalance"] >= 1
    assert 0 < report.metrics["expert_entropy"] <= 1


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("checkpointing", [True, False])
def test_without_records_the_load_of_experts_is_that_of_the_trainers_own_forward(
    plain: bool, checkpointing: bool
) -> None:
    """In float32 trainer and engine choose the same experts, so counted loads are the recorded ones."""
    samples = generated(random_mixture(2), 4, 8)
    recorded = LocalTrainer(random_mixture(2)).update(Batch(0, samples)).metrics
    options = TrainingOptions(routing="free", checkpointing=checkpointing)
    free = LocalTrainer(random_mixture(2), options=options)
    if plain:
        free.packed.prepare(compiled=False, checkpointing=checkpointing, plain=True)
    without = tuple(replace(each, completion=replace(each.completion, routing=None)) for each in samples)
    names = ("expert_imbalance", "expert_imbalance_max", "expert_entropy")
    for update in range(2):  # counts begin again
        found = free.update(Batch(update, without)).metrics
        if not update:
            assert {name: found[name] for name in names} == pytest.approx({name: recorded[name] for name in names})
    assert 1 <= found["expert_imbalance"] <= 8


def test_a_record_is_the_load_also_if_it_is_not_replayed() -> None:
    samples = generated(random_mixture(2), 4, 8)
    recorded = LocalTrainer(random_mixture(2)).update(Batch(0, samples)).metrics
    free = LocalTrainer(random_mixture(2), options=TrainingOptions(routing="free")).update(Batch(0, samples)).metrics
    assert free["expert_entropy"] == recorded["expert_entropy"]


def test_a_sample_without_a_record_or_with_one_of_another_shape_is_refused() -> None:
    trainer = LocalTrainer(random_mixture(2))
    good = sample_of(0, 5, routing=random_record(5, 0), reward=1.0)
    with pytest.raises(TrainerError, match="trajectory 1 has no record of its routing"):
        trainer.update(Batch(0, [good, sample_of(1, 5, routing=None)]))
    with pytest.raises(TrainerError, match="trajectory 1 has a record of routing of"):
        trainer.update(Batch(0, [good, sample_of(1, 5, routing=random_record(6, 0))]))
    with pytest.raises(TrainerError, match="with experts below 8"):
        trainer.update(Batch(0, [good, sample_of(1, 5, routing=random_record(5, 0) + np.uint8(8))]))


def test_routing_has_no_meaning_for_a_dense_model() -> None:
    with pytest.raises(RecipeError, match="is for mixtures of experts, and `qwen3` is none"):
        LocalTrainer(random_model(), options=TrainingOptions(routing="replay"))


def test_a_mixture_is_not_compiled() -> None:
    with pytest.raises(ModelError, match=r"`training\.compile = true` is for plain decoders"):
        LocalTrainer(random_mixture(), options=TrainingOptions(compile=True))


def test_a_reference_routes_by_itself() -> None:
    trainer = LocalTrainer(random_mixture(4))
    sample = sample_of(0, 6, routing=random_record(6, 3))
    plan = type("Plan", (), {"samples": (0,)})()
    batch = Batch(0, [sample])
    assert trainer._pack(batch, plan).layout.routing is not None
    assert trainer._pack(batch, plan, trainer.packed).layout.routing is None


@pytest.mark.parametrize("checkpointing", [True, False])
def test_the_lean_decoder_trains_adapters_on_experts_as_the_modules_do(checkpointing: bool) -> None:
    samples = generated(random_mixture(2), 4, 8)
    lora = LoraOptions(rank=3, targets=("q_proj", "gate_up_proj", "down_proj"))
    found = []
    for plain in (True, False):
        options = TrainingOptions(learning_rate=1e-2, checkpointing=checkpointing)
        trainer = LocalTrainer(random_mixture(2), lora=lora, options=options)
        if plain:
            trainer.packed.prepare(compiled=False, checkpointing=checkpointing, plain=True)
        for update in range(2):
            report = trainer.update(Batch(update, samples))
        found.append((report.metrics["grad_norm"], trainer.policy.weights(2).tensors))
    (norm, tensors), (other_norm, other) = found
    assert norm == pytest.approx(other_norm, rel=1e-3)
    for name, tensor in tensors.items():
        assert torch.allclose(tensor, other[name], atol=1e-4), name
    trained = [name for name in tensors if name.endswith("gate_up_proj_adapter.lora_B")]
    assert len(trained) == 2
    assert all(tensors[name].any() for name in trained)
