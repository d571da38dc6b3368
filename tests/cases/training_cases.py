"""Tiny models and batches that the tests of training share."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from stretto.types import Batch, Completion, Sample

VOCABULARY = 23
UNSTEPPED = 1e-30  # a learning rate whose steps vanish in rounding, so that weights stay as they are


def tiny(kind: str = "qwen3", dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    shape: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 48,
        "initializer_range": 0.3,  # far from uniform, so that a mistake in attention shows in the logits
        "tie_word_embeddings": kind == "qwen3",
        **changes,
    }
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**shape)) if kind == "qwen3" else LlamaForCausalLM(LlamaConfig(**shape))
    return model.to(dtype).eval()


def random_batch(
    update: int = 0,
    groups: int = 3,
    members: int = 4,
    seed: int = 0,
    version: int | None = None,
    longest: int = 20,
    prompt_tokens: tuple[int, int] = (1, 7),  # the shortest prompt, and one more than the longest
) -> Batch:
    draw = np.random.default_rng(seed)
    samples = []
    for group in range(groups):
        prompt = tuple(draw.integers(0, VOCABULARY, int(draw.integers(*prompt_tokens))).tolist())
        for member in range(members):
            length = int(draw.integers(1, longest))
            completion = Completion(
                id=group * members + member,
                version=update if version is None else version,
                tokens=draw.integers(0, VOCABULARY, length).astype(np.int32),
                logprobs=(-3 + draw.normal(0, 0.7, length)).astype(np.float32),
                finish="stop" if draw.random() < 0.8 else "length",
                checksum="",
            )
            # No reward is the mean of its group, so every sample has a gradient.
            reward = float(draw.integers(0, 3)) + 0.1 * member**2
            samples.append(Sample(completion.id, group, completion.version, prompt, completion, reward))
    return Batch(update, samples)


def reference_logprobs(model: Any, sample: Sample, temperature: float = 1.0) -> torch.Tensor:
    """The log-probability of each completion token by the model's own forward pass, one sequence alone."""
    ids = torch.tensor([*sample.prompt, *sample.completion.tokens.tolist()])
    logits = model(input_ids=ids[None], use_cache=False).logits[0, len(sample.prompt) - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(1, ids[len(sample.prompt) :, None])[:, 0]
