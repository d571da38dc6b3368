"""Weights in files that vLLM reads: a PEFT adapter folder, or one file of all parameters."""

from __future__ import annotations

import json
import math
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from stretto.engines.vllm.frames import WeightsKind
from stretto.errors import ChecksumError, EngineError
from stretto.models.adapter_config import CONFIG_FILE
from stretto.models.checksums import checksum
from stretto.models.lora import PREFIX, SUFFIX, WEIGHTS_FILE, write_adapter
from stretto.models.lora_options import LoraOptions
from stretto.types import Weights

FULL_FILE = "model.safetensors"


def write_folder(folder: Path, weights: Weights, base: str) -> None:
    """Writes weights into a new folder. `base` is the model that an adapter belongs to.

    Raises `EngineError` if they cannot be written.
    """
    try:
        _write(folder, weights, base)
    except (OSError, SafetensorError) as error:
        other = "" if folder.is_relative_to("/dev/shm") else ", or set `TMPDIR` to a folder that has some"
        raise EngineError(
            f"version {weights.version} cannot be written to `{folder}`: {error}; free space there{other}"
        ) from error


def _write(folder: Path, weights: Weights, base: str) -> None:
    if weights.kind == "full":
        folder.mkdir(parents=True)
        tensors = {name: tensor.cpu().contiguous() for name, tensor in weights.tensors.items()}
        save_file(tensors, folder / FULL_FILE, metadata={"format": "pt"})
        return
    names = sorted({name.rpartition(".")[0] for name in weights.tensors})
    rank = next(tensor.shape[0] for name, tensor in weights.tensors.items() if name.endswith(".lora_A"))
    options = LoraOptions(rank=rank, alpha=_alpha(weights.scale, rank))
    write_adapter(folder, weights.tensors, options=options, base=base, names=names)


def _alpha(scale: float, rank: int) -> float:
    """Returns the number that gives exactly `scale` when it is divided by `rank`."""
    about = scale * rank
    near = (float(round(about)), about, math.nextafter(about, math.inf), math.nextafter(about, 0.0))
    return next((each for each in near if each / rank == scale), about)


def checksum_of_folder(folder: Path, kind: WeightsKind) -> str:
    """Returns the checksum of the weights in a folder, from its files alone. Raises `ChecksumError` if they are bad."""
    try:
        with safe_open(folder / (FULL_FILE if kind == "full" else WEIGHTS_FILE), framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
        if kind == "full":
            return checksum(tensors)
        config = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
        scale = float(config["lora_alpha"]) / float(config["r"])
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        raise ChecksumError(f"the weights in `{folder}` cannot be read: {error}") from error
    return checksum({name.removeprefix(PREFIX).removesuffix(SUFFIX): t for name, t in tensors.items()}, scale)
