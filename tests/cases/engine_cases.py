"""Tiny models, their adapters, and a core driven to its end."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from stretto.engines.native.engine import NativeEngine
from stretto.models.checksums import checksum
from stretto.types import Completion, Request, Supports, Suspended, Weights

VOCABULARY, RANK, SCALE = 40, 4, 2.0
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 96,
    "initializer_range": 0.08,
    "max_position_embeddings": 1024,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def build(architecture: str, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    if architecture == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**SHAPE, tie_word_embeddings=True)).eval()
    if architecture == "llama":
        return LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=False)).eval()
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "decoder_sparse_step": 1}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SHAPE, **experts, tie_word_embeddings=True)).eval()


def adapter(model: Any, version: int, *, rank: int = RANK, zero: bool = False) -> Weights:
    generator = torch.Generator().manual_seed(1000 + version)
    tensors = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            tensors[f"{name}.lora_A"] = torch.randn(rank, module.in_features, generator=generator) * 0.1
            b = torch.randn(module.out_features, rank, generator=generator) * 0.1
            tensors[f"{name}.lora_B"] = torch.zeros_like(b) if zero else b
    return Weights(version, "lora", tensors, checksum(tensors, SCALE), SCALE)


def full(model: Any, version: int) -> Weights:
    generator = torch.Generator().manual_seed(2000 + version)
    tensors = {
        name: p.detach() + 0.02 * version * torch.randn(p.shape, generator=generator)
        for name, p in model.named_parameters()
    }
    return Weights(version, "full", tensors, checksum(tensors))


def weights_of(kind: str, model: Any, version: int) -> Weights:
    return adapter(model, version) if kind == "lora" else full(model, version)


def native(model: Any, kind: str = "lora", versions: Iterable[int] = (0,), **options: Any) -> NativeEngine:
    options = {"slots": 3, "rows": 16, "kv_tokens": 16 * 256, "max_context": 256, **options}
    if kind == "lora":
        options.setdefault("lora_rank", RANK)
    engine = NativeEngine(model, kind=kind, **options)  # type: ignore[arg-type]
    for version in versions:
        engine.load(weights_of(kind, model, version))
    return engine


def drive(
    engine: Any, work: Iterable[Request | Suspended] = (), until: Callable[[], bool] | None = None
) -> dict[int, Any]:
    """Add work and step until nothing is left, or until `until`."""
    for one in work:
        engine.add(one)
    done: dict[int, Any] = {}
    for _ in range(20_000):
        if not engine.has_work or (until is not None and until()):
            return done
        done.update({c.id: c for c in engine.step()})
    raise AssertionError("the engine does not come to an end")


def prompt_of(length: int, seed: int = 0) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(0, VOCABULARY, (length,), generator=generator).tolist())


def assert_same_supports(one: Completion, other: Completion) -> None:
    """The same sets of tokens to draw from; equally likely ones may be ranked differently."""
    assert (one.supports is None) == (other.supports is None)
    if one.supports is not None and other.supports is not None:
        assert sets_of(one.supports) == sets_of(other.supports)


def sets_of(supports: Supports) -> list[set[int]]:
    """The tokens of each support; none stands twice in one."""
    ends = np.cumsum(supports.counts)
    assert ends[-1] == len(supports.tokens)
    parts = [part.tolist() for part in np.split(supports.tokens, ends[:-1])]
    assert all(len(set(part)) == len(part) for part in parts)
    return [set(part) for part in parts]
