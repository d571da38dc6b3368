"""Loading a Hugging Face causal LM, sharing its Parameters between module trees, and the checksum of weights.

Attention is chosen by a module's config at call time, so two threads on one tree race. The trainer and the engine
therefore have a tree each; with LoRA both trees hold the *same* frozen Parameters, so the base is in memory once.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from stretto.errors import ModelError

CHECKSUM_CHUNK = 1 << 20  # elements hashed at once, so that the weights in flight stay small
SMALL = 1 << 16  # elements of a tensor that is hashed together with others


def load_model(path: str, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """Load a causal LM from a folder or by hub name, in evaluation mode; raises `ModelError` by name."""
    _refuse_other_folders(path)
    try:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"`model.path = {path!r}` cannot be loaded as a causal LM: {error}") from error
    result: nn.Module = model.to(device).eval()
    return result


def load_tokenizer(path: str) -> Any:
    """The tokenizer that belongs to a model."""
    _refuse_other_folders(path)
    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"`model.path = {path!r}` has no tokenizer that can be loaded: {error}") from error


def load_config(path: str) -> Any:
    """The model's configuration alone, without its weights."""
    _refuse_other_folders(path)
    try:
        return AutoConfig.from_pretrained(path)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"`model.path = {path!r}` has no configuration that can be loaded: {error}") from error


def _refuse_other_folders(path: str) -> None:
    if Path(path).exists() and not (Path(path) / "config.json").exists():
        raise ModelError(f"`model.path = {path!r}` is no model: the folder has no `config.json`")


def second_tree(model: nn.Module, *, share: bool) -> nn.Module:
    """Another module tree of `model`: over the same Parameters (`share`), or over copies of them.

    Buffers and the config are always the copy's own, so that each tree can choose its own attention.
    """
    memo: dict[int, Any] = {id(p): p for p in model.parameters()} if share else {}
    return copy.deepcopy(model, memo)


def checksum(tensors: Mapping[str, torch.Tensor], scale: float = 1.0) -> str:
    """A checksum of names, shapes, types and every bit of the values, computed on the device where they are.

    Values are folded as integers `x_i` into `sum (x_i + 1) * (2 i + 1) * odd` modulo 2**64: positions matter, so an
    exchange of two values shows, and only 8 bytes a fold leave the device. Small tensors of one type are folded as one,
    because an adapter has many of them and each fold costs a dozen operations.
    """
    digest = hashlib.blake2b(repr(float(scale)).encode(), digest_size=16)
    small: dict[torch.dtype, list[torch.Tensor]] = {}
    for name in sorted(tensors):
        tensor = tensors[name].detach()
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} ".encode())
        if tensor.numel() <= SMALL:
            small.setdefault(tensor.dtype, []).append(tensor.reshape(-1))
        else:
            digest.update(_fold(tensor).to_bytes(8, "little", signed=True))
    for dtype in sorted(small, key=str):
        digest.update(_fold(torch.cat(small[dtype])).to_bytes(8, "little", signed=True))
    return digest.hexdigest()


_VIEWS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _fold(tensor: torch.Tensor) -> int:
    flat = tensor.contiguous().view(-1).view(_VIEWS[tensor.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, flat.numel(), CHECKSUM_CHUNK):
        part = flat[start : start + CHECKSUM_CHUNK].to(torch.int64)
        place = torch.arange(start, start + part.numel(), dtype=torch.int64, device=tensor.device)
        # Wrapping arithmetic; the multiplier spreads small integers over all 64 bits.
        total += ((part + 1) * 0x9E3779B97F4A7C1 * (2 * place + 1)).sum()
    return int(total)
