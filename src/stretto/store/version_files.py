"""The weights of every version that a run may still need, on disk: `RUN/versions/000041.safetensors`.

A version is on disk before a group starts on it, so its trajectories can continue after any failure. `write` starts in
a thread as soon as the trainer has made the version, and the version loader awaits `durable` before an engine loads it.
A file is written under a temporary name and renamed when it is complete and synced, so a file with the final name is
complete; its checksum is checked again when it is read. A file is removed when neither a trajectory nor an update needs
its version, and only after the journal has recorded that on disk. A checkpoint can hold files longer: those that the
updates after it were trained with and that training again from it does not make.

On a cluster, the host that holds the weights writes them, or they are fetched and written here. If they are lost before
that, the trainer is asked for them again.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from stretto.errors import LostObjectError, RunError, StalledError
from stretto.models.checksums import checksum
from stretto.store.numbered_names import VERSION, numbered, numbered_name
from stretto.types import Probe, Weights, WeightsRef

log = logging.getLogger(__name__)

WAIT_S = 1_800.0  # a disk that takes longer for one version ends the run
MAX_ATTEMPTS = 3  # to write a version whose weights are lost before they are written


class VersionFiles:
    """The version files of a run. Used from the thread of the run loop; slow work is done in a second thread."""

    def __init__(self, folder: Path, *, durable: bool = True) -> None:
        """If `durable` is False, `write` does nothing and only `keep`, for a checkpoint, writes versions."""
        self.folder = folder
        self._always = durable
        self._writes: dict[int, Future[None]] = {}
        self._elsewhere: dict[int, WeightsRef] = {}  # remote weights that may be lost before they are written
        self._held: dict[int, frozenset[int]] = {}  # versions that each checkpoint holds
        self._unneeded: set[int] = set()  # removed by the run, and held by a checkpoint
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="versions")

    def path(self, version: int) -> Path:
        return _path(self.folder, version)

    def versions(self) -> list[int]:
        """Returns the versions on disk, in order."""
        return list(numbered(self.folder, VERSION))

    def write(self, weights: Weights | WeightsRef) -> None:
        """Starts to write a version that was just made. A second call for the same version changes nothing."""
        if self._always:
            self.keep(weights)

    def keep(self, weights: Weights | WeightsRef) -> None:
        """Starts to write a version even if the run is not `durable`."""
        if weights.version not in self._writes:
            if not isinstance(weights, Weights):
                self._elsewhere[weights.version] = weights
            self._writes[weights.version] = self._writer.submit(self._write, weights)

    def keeps(self, version: int) -> bool:
        """Tells if a version is on disk or being written, and has not been removed."""
        return version in self._writes

    async def durable(self, version: int) -> None:
        """Waits until a version that was passed to `write` or `keep` is on disk. Raises `RunError` if that failed."""
        for attempt in range(MAX_ATTEMPTS):
            write = self._writes.get(version)
            if write is None:
                assert not self._always, f"version {version} must be durable and was never written"
                return
            try:
                await self._written(version, write)
                self._elsewhere.pop(version, None)
                return
            except LostObjectError as error:
                try:
                    if attempt + 1 == MAX_ATTEMPTS:
                        raise
                    await self._take_again(version, write)
                except LostObjectError as lost:
                    raise RunError(
                        f"version {version} was lost before it was written to `{self.path(version)}` ({error}; "
                        f"{lost}), and nothing has started on it; continue with `--resume`"
                    ) from lost

    async def _written(self, version: int, write: Future[None]) -> None:
        try:
            await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(write)), WAIT_S)
        except TimeoutError:
            raise StalledError(f"`{self.path(version)}` is not written after {WAIT_S:g} s: the disk hangs") from None

    async def _take_again(self, version: int, write: Future[None]) -> None:
        """Starts again to write a version that was lost, unless another waiting task has done so."""
        asked = self._elsewhere[version]
        await asked.recreate()
        if self._writes.get(version) is write:
            self._writes[version] = self._writer.submit(self._write, asked)

    def remove(self, version: int) -> None:
        """Removes a version that nothing needs, after the journal has recorded that on disk.

        A version that a checkpoint holds is removed when no checkpoint holds it any more.
        """
        if any(version in held for held in self._held.values()):
            self._unneeded.add(version)
            return
        self._writes.pop(version, None)
        self._elsewhere.pop(version, None)
        self._writer.submit(self.path(version).unlink, missing_ok=True)

    def hold(self, checkpoint: int, versions: Iterable[int]) -> None:
        """Keeps the files of versions for as long as there is a checkpoint of version `checkpoint`."""
        self._held[checkpoint] = frozenset(versions)

    def keep_holds(self, checkpoints: Collection[int]) -> None:
        """Ends the holds of other checkpoints than these, and removes what was waiting for that."""
        self._held = {checkpoint: held for checkpoint, held in self._held.items() if checkpoint in checkpoints}
        waiting, self._unneeded = self._unneeded, set()
        for version in waiting:
            self.remove(version)

    def reference(self, weights: Weights | WeightsRef) -> VersionFile | None:
        """Returns a reference by which a version can be read from its file; None if it has none, or none yet."""
        write = self._writes.get(weights.version)
        if write is None or not write.done() or write.exception() is not None:
            return None
        return VersionFile(weights.version, weights.kind, weights.checksum, self.folder.resolve())

    def read(self, version: int, recorded: str) -> Weights | None:
        """Reads a version. Returns None if there is no file, or if it is damaged or not of the `recorded` checksum."""
        try:
            found = _read(self.path(version), version)
        except (OSError, SafetensorError, KeyError, ValueError):
            return None
        if found.checksum != recorded or checksum(found.tensors, found.scale) != recorded:
            return None
        self._writes.setdefault(version, _done())
        return found

    def prune(self, needed: Callable[[int], bool]) -> None:
        """Removes the versions that are not needed and incomplete files. Later writes are not affected."""

        def remove() -> None:
            unneeded = [self.path(version) for version in self.versions() if not needed(version)]
            for path in (*self.folder.glob(".*.partial"), *unneeded):
                try:
                    path.unlink(missing_ok=True)
                except OSError as error:  # the others are removed nevertheless
                    log.warning("`%s` is not needed and cannot be removed: %s", path, error)

        self._writer.submit(remove)

    def close(self) -> None:
        """Waits for pending writes. Safe to call twice."""
        self._writer.shutdown(wait=True)

    def _write(self, asked: Weights | WeightsRef) -> None:
        try:
            if isinstance(asked, Weights):
                write_file(self.folder, asked)
            elif not (asked.store(self.folder) and self.path(asked.version).exists()):
                write_file(self.folder, asked.fetch())
        except (OSError, SafetensorError) as error:
            raise RunError(
                f"version {asked.version} could not be written to `{self.path(asked.version)}` ({error}), and nothing "
                "may start on it before it is; make room on the disk, and continue with `--resume`"
            ) from error


@dataclass(frozen=True, slots=True)
class VersionFile:
    """A `WeightsRef` to the file of a version. It can be read on every machine that sees the run folder."""

    version: int
    kind: Literal["lora", "full"]
    checksum: str
    folder: Path  # absolute, because another process may have another working directory

    def fetch(self) -> Weights:
        """Reads the file. The caller compares the checksum."""
        try:
            return _read(_path(self.folder, self.version), self.version)
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            raise LostObjectError(
                f"version {self.version} cannot be read from `{_path(self.folder, self.version)}`: {error}"
            ) from error

    def store(self, folder: Path) -> bool:
        return folder.resolve() == self.folder

    async def recreate(self) -> None:
        raise LostObjectError(f"`{_path(self.folder, self.version)}` is the only copy of version {self.version}")


def _read(path: Path, version: int) -> Weights:
    with safe_open(path, framework="pt") as file:
        facts = file.metadata() or {}
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
    kind = cast(Literal["lora", "full"], facts["kind"])
    return Weights(version, kind, tensors, facts["checksum"], float(facts["scale"]), _probe_from(facts.get("probe")))


def _probe_from(text: str | None) -> Probe | None:
    """Returns a probe from the text that `write_file` makes of it."""
    if text is None:
        return None
    values = json.loads(text)
    return Probe(tuple(values["tokens"]), np.array(values["logprobs"], dtype=np.float32))


def _path(folder: Path, version: int) -> Path:
    return folder / numbered_name(version, VERSION)


def write_file(folder: Path, weights: Weights, writer: str = "") -> None:
    """Writes a version into the folder of a run's versions. Raises `OSError` or `SafetensorError`. Blocks.

    `writer` is part of the temporary name: two processes may write the same version if one took the other for lost.
    """
    scratch = folder / f".{weights.version:06d}{writer}.partial"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        facts = {"kind": weights.kind, "checksum": weights.checksum, "scale": repr(float(weights.scale))}
        if (probe := weights.probe) is not None:
            facts["probe"] = json.dumps({"tokens": probe.tokens, "logprobs": probe.logprobs.tolist()})
        save_file({name: tensor.cpu().contiguous() for name, tensor in weights.tensors.items()}, scratch, facts)
        sync(scratch)
        scratch.rename(_path(folder, weights.version))
        sync(folder)
    except (OSError, SafetensorError):
        scratch.unlink(missing_ok=True)
        raise


def sync(path: Path) -> None:
    """Syncs a file, or the names in a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _done() -> Future[None]:
    future: Future[None] = Future()
    future.set_result(None)
    return future
