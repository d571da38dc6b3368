"""The configuration of a LoRA adapter in PEFT's format, and the features of it that are not supported. Torch-free."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stretto.errors import ModelError

CONFIG_FILE = "adapter_config.json"
BASE_FOLDER = "base"  # beside an adapter whose base exists nowhere else


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """An adapter in a folder: `scale * B (A x)` is added to some layers and experts of a base."""

    folder: Path
    base: str | None  # the name of the base, or its folder; None: it names none
    rank: int
    alpha: float
    targets: tuple[str, ...]  # ends of the names of the adapted layers and Parameters; empty: all layers but the head
    parameters: tuple[str, ...] = ()  # those of `targets` that name Parameters of experts

    @property
    def scale(self) -> float:
        """The factor of `B (A x)`."""
        return self.alpha / self.rank

    @property
    def base_path(self) -> str | None:
        """The base to load: the one beside the adapter if there is one, because the folder may have been moved."""
        beside = self.folder / BASE_FOLDER
        return str(beside) if beside.is_dir() else self.base


def adapter_folder(path: str | Path) -> Path:
    """Returns the folder of an adapter: `path`, or its folder `policy` if it is a run's."""
    folder = Path(path)
    return folder / "policy" if (folder / "policy" / CONFIG_FILE).is_file() else folder


def read_adapter_config(path: str | Path) -> AdapterConfig:
    """Reads the configuration of an adapter, or of a run's policy.

    Raises `ModelError` if there is none, or if the adapter has a feature that is not supported.
    """
    folder = adapter_folder(path)
    file = folder / CONFIG_FILE
    if not file.is_file():
        whole = "; it holds a whole model: give it as `model.path`" if (folder / "config.json").is_file() else ""
        raise ModelError(f"`{path}` holds no adapter: there is no `{file}`{whole}")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise ValueError("it is no object")
        if features := list(_unsupported(config)):
            raise ModelError(f"the adapter in `{folder}` cannot be used: {'; '.join(features)}")
        targets, parameters = config["target_modules"] or (), config.get("target_parameters") or ()
        base = config.get("base_model_name_or_path")
        made = AdapterConfig(
            folder,
            None if base is None else str(base),
            int(config["r"]),
            float(config["lora_alpha"]),
            () if targets == "all-linear" else tuple(sorted({*map(str, targets), *map(str, parameters)})),
            tuple(sorted(map(str, parameters))),
        )
        if made.rank < 1 or not made.alpha > 0:
            raise ValueError(f"`r` is {made.rank} and `lora_alpha` is {made.alpha:g}")
        return made
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"`{file}` is no configuration of an adapter: {type(error).__name__}: {error}") from error


def lora_of_adapter(path: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of `model.lora` that an adapter is trained further with; `given` are those of the recipe.

    Raises `ValueError` if they are not those of the adapter. If `given` is complete, as in the recipe that a run has
    recorded, the adapter need not be there: whoever needs it reads it.
    """
    try:
        config = read_adapter_config(path)
    except ModelError as error:
        if {"rank", "alpha"} <= given.keys():
            return dict(given)
        raise ValueError(f"`model.adapter = {path!r}`: {error}") from error
    own: dict[str, Any] = {"rank": config.rank, "alpha": config.alpha, "targets": config.targets}
    for name, value in own.items():
        stated = given.get(name, value)
        if name == "targets" and isinstance(stated, tuple):
            stated = tuple(sorted(stated)) or value
        if stated != value:
            raise ValueError(
                f"`model.lora.{name} = {stated!r}`, and the adapter in `{config.folder}` has {value!r}; leave it out, "
                "or set `model.merge_adapter = true` to train a new adapter over it"
            )
    return {**own, **{name: value for name, value in given.items() if name not in own}}


def _unsupported(config: Mapping[str, Any]) -> Iterator[str]:
    """Returns a phrase for each feature of an adapter that this package does not compute."""
    if (kind := config.get("peft_type")) != "LORA":
        yield f"it is of type `{kind}`, and only `LORA` is supported"
        return
    for key, what in (
        ("use_dora", "DoRA scales the rows of the weights"),
        ("use_rslora", "its scale is alpha / sqrt(rank), not alpha / rank"),
        ("fan_in_fan_out", "its layers are transposed"),
        ("lora_bias", "its adapters have a bias"),
        ("modules_to_save", "it trains whole modules beside the adapters"),
        ("rank_pattern", "its layers have different ranks"),
        ("alpha_pattern", "its layers have different scales"),
        ("layers_to_transform", "it adapts a part of the layers"),
        ("layer_replication", "it repeats layers"),
        ("trainable_token_indices", "it trains embeddings of tokens"),
        ("exclude_modules", "it leaves out layers that its targets name"),
    ):
        if config.get(key):
            yield f"`{key}` is {config[key]!r}: {what}"
    if (bias := config.get("bias", "none")) != "none":
        yield f"`bias` is {bias!r}: it trains biases of the base"
    targets = config.get("target_modules")
    if isinstance(targets, str) and targets != "all-linear":
        yield f"`target_modules` is the pattern {targets!r}, and only a list of names is supported"
    if targets == "all-linear" and config.get("target_parameters"):
        yield "`target_modules` is `all-linear` beside `target_parameters`, and only a list of names is supported there"
