"""Loading a Hugging Face causal LM, what its configuration says, and sharing its Parameters between module trees.

Attention is chosen by a module's config at call time, so two threads on one tree race. The trainer and the engine
therefore have a tree each; with LoRA both trees hold the *same* frozen Parameters, so the base is in memory once.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from stretto.errors import ModelError
from stretto.models.float16_range import narrow_weights

MADE_BY = {"models/smollm2-135m": "make smollm2"}  # folders that this repository's Makefile makes
MOVING_ROTARY = ("dynamic", "longrope")  # their angles depend on the lengths in the batch


def load_model(path: str, dtype: torch.dtype, device: torch.device, *, option: str = "model.path") -> nn.Module:
    """Load a causal LM from a folder or by hub name, in evaluation mode; a `ModelError` names `option`.

    Weights that float16 cannot hold are refused, and a warning tells of a tensor that loses values to zero.
    """
    _refuse_other_folders(path, option)
    narrow = dtype == torch.float16
    try:
        # In their own type where they are narrowed after: what is lost shows in the difference.
        model = AutoModelForCausalLM.from_pretrained(path, dtype="auto" if narrow else dtype)
    except (OSError, ValueError, KeyError) as error:
        raise _cannot(path, "cannot be loaded as a causal LM", error, option) from error
    if narrow:
        narrow_weights(model, f"`{option} = {path!r}`")
    result: nn.Module = model.to(device).eval()
    return result


def load_tokenizer(path: str) -> Any:
    """The tokenizer that belongs to a model."""
    _refuse_other_folders(path)
    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError, KeyError) as error:
        raise _cannot(path, "has no tokenizer that can be loaded", error) from error


def load_config(path: str, *, option: str = "model.path") -> Any:
    """The model's configuration alone, without its weights."""
    _refuse_other_folders(path, option)
    try:
        return AutoConfig.from_pretrained(path)
    except (OSError, ValueError, KeyError) as error:
        raise _cannot(path, "has no configuration that can be loaded", error, option) from error


def moving_rotary(config: Any) -> str | None:
    """The `rope_type` of a model whose angles change with the longest sequence of a batch; None where they do not."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    found = set(_rotary_types(getattr(text, "rope_parameters", None)))
    return next((kind for kind in MOVING_ROTARY if kind in found), None)


def _rotary_types(parameters: Any) -> Iterator[str]:
    """The `rope_type`s of a configuration, which may have one for every type of layer."""
    if isinstance(parameters, Mapping):
        if isinstance(kind := parameters.get("rope_type"), str):
            yield kind
        for inner in parameters.values():
            yield from _rotary_types(inner)


def _refuse_other_folders(path: str, option: str = "model.path") -> None:
    """Refuse a folder that is no model, and a path that can only be a folder where there is none."""
    if not Path(path).exists():
        if path in MADE_BY:
            raise ModelError(f"`{option} = {path!r}`: there is no folder `{path}`; `{MADE_BY[path]}` makes it")
        if path.startswith((".", "/", "~")) or path.count("/") > 1:  # a hub name has one slash at most
            hint = "; `~` is not expanded, write the whole path" if path.startswith("~") else ""
            raise ModelError(f"`{option} = {path!r}`: there is no folder `{path}` (seen from {Path.cwd()}){hint}")
    elif not (Path(path) / "config.json").exists():
        raise ModelError(f"`{option} = {path!r}` is no model: the folder has no `config.json`")


def _cannot(path: str, what: str, error: Exception, option: str = "model.path") -> ModelError:
    """Returns the error for a model that could not be loaded; it says first if there is no such folder."""
    if Path(path).exists():
        return ModelError(f"`{option} = {path!r}` {what}: {error}")
    said = str(error).strip().partition("\n")[0]
    return ModelError(f"`{option} = {path!r}`: there is no folder `{path}`, and as a hub name it {what}: {said}")


def second_tree(model: nn.Module, *, share: bool) -> nn.Module:
    """Another module tree of `model`: over the same Parameters (`share`), or over copies of them.

    Buffers and the config are always the copy's own, so that each tree can choose its own attention.
    """
    memo: dict[int, Any] = {id(p): p for p in model.parameters()} if share else {}
    return copy.deepcopy(model, memo)
