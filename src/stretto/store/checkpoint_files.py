"""Checkpoints: the state that a run needs to resume and that its journal does not hold, written atomically.

```
RUN/checkpoints/000042/           after 42 updates
  state.json                      the trajectories in the other files; the digest of every other file
  trainer/                        the trainer's state (in its own format)
  suspended.safetensors           tokens and log-probabilities so far of trajectories that were taken out of an engine
  turns.safetensors               those of the finished turns of episodes that continue, by lineage
```

A checkpoint is written into a folder with a temporary name and renamed when it is complete, so a folder with the final
name is complete; one with another name, such as a copy, is ignored (`numbered_names.py`). Digests are checked when it
is read. The last two are kept. If the newest is damaged, the run resumes from the one before; if there is none, from
its beginning: the journal has every batch that was trained on since. The rest of a run's state is in the journal
(`run/recovery.py`), and the weights are in version files (`version_files.py`).
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from stretto.errors import RunError
from stretto.store.numbered_names import CHECKPOINT, numbered, numbered_name
from stretto.store.version_files import sync
from stretto.types import Completion, Lineage, Request, Sampling, Supports, Suspended

FORMAT = 5
KEPT = 2  # checkpoints
STATE_FILE = "state.json"
ARRAYS = ("tokens", "logprobs", "token_versions", "turns", "routing")  # of a completion; a suspended one has no turns
TURN_FACTS = ("id", "version", "finish", "checksum", "started_at", "finished_at", "prefilled", "receipts")
SUSPENDED_FILE = "suspended.safetensors"
TURNS_FILE = "turns.safetensors"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint that was read. The trainer reads `folder / "trainer"` itself."""

    folder: Path
    updates: int  # finished before it
    suspended: Mapping[int, Suspended]
    turns: Mapping[int, tuple[Lineage, ...]] = field(default_factory=dict)  # the finished turns of each, by lineage


def begin_checkpoint(root: Path, updates: int) -> Path:
    """Creates a temporary folder. The trainer saves into its `trainer/`, then `complete_checkpoint` is called."""
    name = numbered_name(updates, CHECKPOINT)
    scratch = root / f".{name}.partial"
    try:
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
    except OSError as error:
        raise RunError(f"checkpoint `{root / name}` could not be started: {error}") from error
    return scratch


def complete_checkpoint(
    scratch: Path, suspended: Sequence[Suspended], turns: Mapping[int, Sequence[Lineage]] | None = None
) -> Path:
    """Completes the checkpoint that `begin_checkpoint` started, then removes old ones. Flush the journal before.

    `turns` has the finished turns of each episode that continues, as the lineages that they make.
    """
    root, name = scratch.parent, scratch.name.removeprefix(".").removesuffix(".partial")
    final = root / name
    try:
        lineages = [(id, number, each) for id, own in (turns or {}).items() for number, each in enumerate(own)]
        save_file(_joined(_tensors_of(each, f"{each.request.id}") for each in suspended), scratch / SUSPENDED_FILE)
        parts = (_tensors_of(each.completion, f"{id}/{number}") for id, number, each in lineages)
        save_file(_joined(parts), scratch / TURNS_FILE)
        files = sorted(path for path in scratch.rglob("*") if path.is_file())
        state = {
            "format": FORMAT,
            "updates": int(name),
            "suspended": [_facts_of(each) for each in suspended],
            "turns": [_facts_of_lineage(each) | {"trajectory": id, "lineage": number} for id, number, each in lineages],
            "files": {str(path.relative_to(scratch)): _digest(path) for path in files},
        }
        (scratch / STATE_FILE).write_text(json.dumps(state), encoding="utf-8")
        for path in sorted(scratch.rglob("*"), reverse=True):  # files before the folders that name them
            sync(path)
        sync(scratch)
        # A run that stops twice at one update replaces its checkpoint. If it is killed between these two calls, it
        # resumes from the checkpoint before and the journal.
        shutil.rmtree(final, ignore_errors=True)
        scratch.rename(final)
        sync(root)
    except (OSError, SafetensorError) as error:
        abandon_checkpoint(scratch)
        raise RunError(f"checkpoint `{final}` could not be written ({error}); the previous one is untouched") from error
    for older in complete_checkpoints(root)[KEPT:]:
        shutil.rmtree(older, ignore_errors=True)
    return final


def keep_newest_checkpoint(root: Path) -> None:
    """Removes all checkpoints but the newest. Nothing trains again from the others once a run is finished."""
    for older in complete_checkpoints(root)[1:]:
        shutil.rmtree(older, ignore_errors=True)


def abandon_checkpoint(scratch: Path) -> None:
    """Removes the folder of a checkpoint that could not be completed."""
    shutil.rmtree(scratch, ignore_errors=True)


def abandon_checkpoints(root: Path) -> None:
    """Removes the incomplete checkpoints of killed processes. No process may be writing one now."""
    for scratch in root.glob(".*.partial"):
        abandon_checkpoint(scratch)


def complete_checkpoints(root: Path) -> list[Path]:
    """Returns the folders of complete checkpoints, the newest first."""
    return [path for path in reversed(numbered(root, CHECKPOINT).values()) if (path / STATE_FILE).exists()]


def find_checkpoint(root: Path, most: int) -> tuple[Checkpoint | None, list[str]]:
    """Returns the newest undamaged checkpoint after at most `most` updates, and the errors of damaged newer ones."""
    problems: list[str] = []
    for folder in complete_checkpoints(root):
        if int(folder.name) > most:
            continue
        try:
            return load_checkpoint(folder), problems
        except RunError as error:
            problems.append(str(error))
    return None, problems


def load_checkpoint(folder: Path) -> Checkpoint:
    """Reads a checkpoint. Raises `RunError` if it is damaged."""
    try:
        state = json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))
        if state["format"] != FORMAT:
            raise RunError(f"checkpoint `{folder}` has format {state['format']}, this version reads {FORMAT}")
        if state["updates"] != int(folder.name):
            raise RunError(f"checkpoint `{folder}` is damaged: it was written after {state['updates']} updates")
        for name, digest in state["files"].items():
            if _digest(folder / name) != digest:
                raise RunError(f"checkpoint `{folder}` is damaged: `{name}` has changed since it was written")
        tensors = load_file(folder / SUSPENDED_FILE)
        suspended = {facts["request"]["id"]: _suspended_from(facts, tensors) for facts in state["suspended"]}
        tensors = load_file(folder / TURNS_FILE)
        turns: dict[int, tuple[Lineage, ...]] = {}
        for facts in state["turns"]:
            id, number = facts["trajectory"], facts["lineage"]
            if number != len(turns.get(id, ())):
                raise ValueError(f"lineage {number} of trajectory {id} does not follow the one before")
            turns[id] = (*turns.get(id, ()), _lineage_from(facts, _arrays(f"{id}/{number}", tensors)))
        return Checkpoint(folder, state["updates"], suspended, turns)
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise RunError(f"checkpoint `{folder}` is damaged: {error}") from error


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _joined(parts: Iterable[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: tensor for part in parts for name, tensor in part.items()}


def _tensors_of(item: Suspended | Completion, name: str) -> dict[str, torch.Tensor]:
    arrays: dict[str, Any] = {what: getattr(item, what, None) for what in ARRAYS}
    if item.supports is not None:
        arrays |= {"support_counts": item.supports.counts, "support_tokens": item.supports.tokens}
    return {
        f"{name}.{what}": torch.from_numpy(np.ascontiguousarray(each))
        for what, each in arrays.items()
        if each is not None
    }


def _arrays(name: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Returns the arrays of an item from the tensors that `_tensors_of` made."""
    found: dict[str, Any] = {what: tensors[f"{name}.{what}"].numpy() for what in ARRAYS if f"{name}.{what}" in tensors}
    if f"{name}.support_counts" in tensors:
        found["supports"] = Supports(*(tensors[f"{name}.support_{each}"].numpy() for each in ("counts", "tokens")))
    return found


def _facts_of_lineage(lineage: Lineage) -> dict[str, Any]:
    return {
        "completion": {name: getattr(lineage.completion, name) for name in TURN_FACTS},
        "context": list(lineage.context),
        "train": lineage.train,
        "turn_numbers": lineage.turn_numbers,
    }


def _lineage_from(facts: Mapping[str, Any], arrays: Mapping[str, Any]) -> Lineage:
    numbers = facts["turn_numbers"]
    return Lineage(
        tuple(facts["context"]),
        Completion(**{**facts["completion"], "receipts": tuple(facts["completion"].get("receipts", ()))}, **arrays),
        facts["train"],
        None if numbers is None else tuple(numbers),
    )


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
        "receipts": item.receipts,
    }


def _suspended_from(facts: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> Suspended:
    sampling = dict(facts["sampling"])
    for name in ("stop_tokens", "stop_strings"):
        sampling[name] = tuple(sampling[name])
    asked = dict(facts["request"])
    asked["prompt"] = tuple(asked["prompt"])
    return Suspended(
        request=Request(sampling=Sampling(**sampling), **asked),
        checksum=facts["checksum"],
        started_at=facts["started_at"],
        prefilled=facts["prefilled"],
        receipts=tuple(facts.get("receipts", ())),
        **_arrays(f"{asked['id']}", tensors),
    )
