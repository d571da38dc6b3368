"""Loading a Hugging Face causal LM, sharing its Parameters between module trees, and the checksum of weights.

Attention is chosen by a module's config at call time, so two threads on one tree race. The trainer and the engine
therefore have a tree each; with LoRA both trees hold the *same* frozen Parameters, so the base is in memory once.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from stretto.errors import ModelError

CHECKSUM_CHUNK = (1 << 20, 1 << 26)  # elements folded at once, on a processor and on a GPU
MADE_BY = {"models/smollm2-135m": "make smollm2"}  # folders that this repository's Makefile makes
ODD = 0x9E3779B97F4A7C1


def load_model(path: str, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """Load a causal LM from a folder or by hub name, in evaluation mode; raises `ModelError` by name."""
    _refuse_other_folders(path)
    try:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    except (OSError, ValueError, KeyError) as error:
        raise _cannot(path, "cannot be loaded as a causal LM", error) from error
    result: nn.Module = model.to(device).eval()
    return result


def load_tokenizer(path: str) -> Any:
    """The tokenizer that belongs to a model."""
    _refuse_other_folders(path)
    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError, KeyError) as error:
        raise _cannot(path, "has no tokenizer that can be loaded", error) from error


def load_config(path: str) -> Any:
    """The model's configuration alone, without its weights."""
    _refuse_other_folders(path)
    try:
        return AutoConfig.from_pretrained(path)
    except (OSError, ValueError, KeyError) as error:
        raise _cannot(path, "has no configuration that can be loaded", error) from error


def _refuse_other_folders(path: str) -> None:
    """Refuse a folder that is no model, and a path that can only be a folder where there is none."""
    if not Path(path).exists():
        if path in MADE_BY:
            raise ModelError(f"`model.path = {path!r}`: there is no folder `{path}`; `{MADE_BY[path]}` makes it")
        if path.startswith((".", "/", "~")) or path.count("/") > 1:  # a hub name has one slash at most
            hint = "; `~` is not expanded, write the whole path" if path.startswith("~") else ""
            raise ModelError(f"`model.path = {path!r}`: there is no folder `{path}` (seen from {Path.cwd()}){hint}")
    elif not (Path(path) / "config.json").exists():
        raise ModelError(f"`model.path = {path!r}` is no model: the folder has no `config.json`")


def _cannot(path: str, what: str, error: Exception) -> ModelError:
    """What to say of a model that could not be loaded, its being no folder first."""
    if Path(path).exists():
        return ModelError(f"`model.path = {path!r}` {what}: {error}")
    said = str(error).strip().partition("\n")[0]
    return ModelError(f"`model.path = {path!r}`: there is no folder `{path}`, and as a hub name it {what}: {said}")


def second_tree(model: nn.Module, *, share: bool) -> nn.Module:
    """Another module tree of `model`: over the same Parameters (`share`), or over copies of them.

    Buffers and the config are always the copy's own, so that each tree can choose its own attention.
    """
    memo: dict[int, Any] = {id(p): p for p in model.parameters()} if share else {}
    return copy.deepcopy(model, memo)


def checksum(tensors: Mapping[str, torch.Tensor], scale: float = 1.0) -> str:
    """A checksum of names, shapes, types and every bit of the values, computed on the device where they are.

    The tensors of one type, in the order of their names, are one row of integers `x_i`, folded into
    `sum (x_i + 1) * (2 i + 1) * odd` modulo 2**64: positions matter, so an exchange of two values shows, and only 8
    bytes a type leave the device. The same on every device.
    """
    digest = hashlib.blake2b(repr(float(scale)).encode(), digest_size=16)
    by_type: dict[torch.dtype, list[torch.Tensor]] = {}
    for name in sorted(tensors):
        tensor = tensors[name].detach()
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} ".encode())
        by_type.setdefault(tensor.dtype, []).append(tensor)
    for dtype in sorted(by_type, key=str):
        digest.update(_fold(by_type[dtype]).to_bytes(8, "little", signed=True))
    return digest.hexdigest()


_VIEWS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _fold(tensors: Sequence[torch.Tensor]) -> int:
    """The fold of tensors of one type, as if they were one."""
    device = tensors[0].device
    total = torch.zeros((), dtype=torch.int64, device=device)
    place = torch.arange(1, 2 * CHECKSUM_CHUNK[device.type == "cuda"], 2, device=device)
    start = 0
    for part in _pieces(tensors, CHECKSUM_CHUNK[device.type == "cuda"]):
        count = part.numel()
        values = part.view(_VIEWS[part.element_size()]).to(torch.int64)
        # Wrapping arithmetic; the multiplier spreads small integers over all 64 bits.
        total += ((values + 1) * ODD * (place[:count] + 2 * start)).sum()
        start += count
    return int(total)


def _pieces(tensors: Sequence[torch.Tensor], size: int) -> Iterator[torch.Tensor]:
    """The values in order, flat, in pieces of up to `size`: small tensors together, because each fold costs a dozen
    operations, large ones a part at a time, so that the integers in flight stay few."""
    gathered: list[torch.Tensor] = []
    held = 0
    for tensor in tensors:
        flat = tensor.reshape(-1)
        if gathered and held + flat.numel() > size:
            yield torch.cat(gathered)
            gathered, held = [], 0
        if flat.numel() > size:
            yield from torch.split(flat, size)
        else:
            gathered.append(flat)
            held += flat.numel()
    if gathered:
        yield gathered[0] if len(gathered) == 1 else torch.cat(gathered)
