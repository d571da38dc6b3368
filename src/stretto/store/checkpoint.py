"""Checkpoints: everything that a stopped run needs to go on, written atomically.

```
RUN/checkpoints/000042/           after 42 updates
  state.json                      the core's snapshot, the sums of the run, which trajectories were under way
  trainer/                        what the trainer needs (its own format)
  versions/000041.safetensors     weights that unfinished trajectories, or the next ones, still need
  suspended.safetensors           tokens and log-probabilities so far of trajectories that were running
```

A checkpoint is written into a folder with another name and renamed when it is complete, so a folder with the right name
is complete. Finished trajectories are not in it: the journal has them.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from stretto.checksums import checksum
from stretto.errors import RunError
from stretto.types import Request, Sampling, Supports, Suspended, Weights

FORMAT = 2
PREVIOUS = ".previous"  # ends the name of a checkpoint that another of the same update replaces


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint that was read back; `folder / "trainer"` is the trainer's own to read."""

    folder: Path
    snapshot: Mapping[str, Any]  # of the core
    totals: Mapping[str, Any]
    prompts: Mapping[str, Any]  # what later draws of prompts follow
    weights: Mapping[int, Weights]
    suspended: Mapping[int, Suspended]


def save_checkpoint(
    root: Path,
    *,
    updates: int,
    snapshot: Mapping[str, Any],
    totals: Mapping[str, Any],
    prompts: Mapping[str, Any],
    weights: Mapping[int, Weights],
    suspended: Sequence[Suspended],
    save_trainer: Callable[[Path], None],
) -> Path:
    """Write a checkpoint; the previous ones are removed only after it is complete."""
    root.mkdir(parents=True, exist_ok=True)
    final = root / f"{updates:06d}"
    scratch = root / f".{updates:06d}.partial"
    shutil.rmtree(scratch, ignore_errors=True)
    (scratch / "versions").mkdir(parents=True)
    try:
        save_trainer(scratch / "trainer")
        for version, item in weights.items():
            save_file(
                {k: t.contiguous() for k, t in item.tensors.items()},
                scratch / "versions" / f"{version:06d}.safetensors",
            )
        tensors: dict[str, torch.Tensor] = {}
        for item_ in suspended:
            tensors.update(_tensors_of(item_))
        save_file(tensors, scratch / "suspended.safetensors")
        state = {
            "format": FORMAT,
            "snapshot": snapshot,
            "totals": totals,
            "prompts": prompts,
            "versions": {
                str(v): {"kind": w.kind, "checksum": w.checksum, "scale": w.scale} for v, w in weights.items()
            },
            "suspended": [_facts_of(item_) for item_ in suspended],
        }
        (scratch / "state.json").write_text(json.dumps(state), encoding="utf-8")
        for path in sorted(scratch.rglob("*"), reverse=True):  # files before the folders that name them
            _sync(path)
        if final.exists():  # stopped twice at one update: there is a complete one at every moment
            previous = root / f"{final.name}{PREVIOUS}"
            if (final / "state.json").exists() and previous.exists():  # a crash left it behind
                shutil.rmtree(previous)
            final.rename(previous)
        scratch.rename(final)
        _sync(root)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(scratch, ignore_errors=True)
        raise RunError(f"checkpoint `{final}` could not be written ({error}); the previous one is untouched") from error
    for older in _complete(root):
        if older != final:
            shutil.rmtree(older, ignore_errors=True)
    return final


def load_checkpoint(root: Path) -> Checkpoint:
    """Read the newest complete checkpoint; raises `RunError` where there is none or its weights are damaged."""
    complete = _complete(root)
    if not complete:
        raise RunError(f"`{root}` holds no complete checkpoint, so there is nothing to resume")
    folder = complete[-1]
    try:
        return _read(folder)
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        raise RunError(f"checkpoint `{folder}` is damaged: {error}") from error


def _read(folder: Path) -> Checkpoint:
    state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    if state["format"] != FORMAT:
        raise RunError(f"checkpoint `{folder}` has format {state['format']}, this version reads {FORMAT}")
    weights = {}
    for name, facts in state["versions"].items():
        tensors = load_file(folder / "versions" / f"{int(name):06d}.safetensors")
        if checksum(tensors, facts["scale"]) != facts["checksum"]:
            raise RunError(f"version {name} in checkpoint `{folder}` is damaged: its checksum does not match")
        weights[int(name)] = Weights(int(name), facts["kind"], tensors, facts["checksum"], facts["scale"])
    tensors = load_file(folder / "suspended.safetensors")
    suspended = {facts["request"]["id"]: _suspended_from(facts, tensors) for facts in state["suspended"]}
    return Checkpoint(folder, state["snapshot"], state["totals"], state["prompts"], weights, suspended)


def _complete(root: Path) -> list[Path]:
    found = [path for path in root.glob("[0-9]*") if (path / "state.json").exists()]
    return sorted(found, key=lambda path: (path.stem, path.suffix != PREVIOUS))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _tensors_of(item: Suspended) -> dict[str, torch.Tensor]:
    name = str(item.request.id)
    tensors = {
        f"{name}.tokens": torch.from_numpy(np.ascontiguousarray(item.tokens)),
        f"{name}.logprobs": torch.from_numpy(np.ascontiguousarray(item.logprobs)),
    }
    if item.token_versions is not None:
        tensors[f"{name}.token_versions"] = torch.from_numpy(np.ascontiguousarray(item.token_versions))
    if item.supports is not None:
        tensors[f"{name}.support_counts"] = torch.from_numpy(np.ascontiguousarray(item.supports.counts))
        tensors[f"{name}.support_tokens"] = torch.from_numpy(np.ascontiguousarray(item.supports.tokens))
    return tensors


def _facts_of(item: Suspended) -> dict[str, Any]:
    request, sampling = item.request, item.request.sampling
    return {
        "request": {
            "id": request.id,
            "version": request.version,
            "prompt": list(request.prompt),
            "seed": request.seed,
            "group": request.group,
            "priority": request.priority,
        },
        "sampling": {name: getattr(sampling, name) for name in Sampling.__dataclass_fields__},
        "checksum": item.checksum,
        "started_at": item.started_at,
        "prefilled": item.prefilled,
    }


def _suspended_from(facts: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> Suspended:
    sampling = dict(facts["sampling"])
    for name in ("stop_tokens", "stop_strings"):
        sampling[name] = tuple(sampling[name])
    asked = dict(facts["request"])
    asked["prompt"] = tuple(asked["prompt"])
    name = str(asked["id"])
    versions, counts = tensors.get(f"{name}.token_versions"), tensors.get(f"{name}.support_counts")
    supports = None if counts is None else Supports(counts.numpy(), tensors[f"{name}.support_tokens"].numpy())
    return Suspended(
        request=Request(sampling=Sampling(**sampling), **asked),
        tokens=tensors[f"{name}.tokens"].numpy(),
        logprobs=tensors[f"{name}.logprobs"].numpy(),
        checksum=facts["checksum"],
        token_versions=None if versions is None else versions.numpy(),
        started_at=facts["started_at"],
        prefilled=facts["prefilled"],
        supports=supports,
    )
