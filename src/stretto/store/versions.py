"""The weights of every version that a run may still need, on the disk: `RUN/versions/000041.safetensors`.

A version is durable before a group starts on it, so that what runs under it can go on after anything: `write` begins as
soon as the trainer has made it, in a thread of its own, and whoever loads it into an engine awaits `durable` first. A
file is written under another name and renamed when it is complete and synced, so one with the right name is whole; its
checksum is checked again when it is read. It is removed when no trajectory needs the version any more, and only after
the journal has on the disk what says so.

Weights that are elsewhere are written by whoever holds them, or fetched and written here. Where they are lost before
that, whoever made them is asked for them again.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Literal, Protocol, cast

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from stretto.checksums import checksum
from stretto.errors import LostObjectError, RunError, StalledError
from stretto.types import Weights

WAIT_S = 1_800.0  # a disk that takes longer for one version ends the run
TAKES = 3  # tries of a version that is lost before it is written


class Fetched(Protocol):
    """Weights that are elsewhere, and come when they are asked for."""

    @property
    def version(self) -> int: ...
    @property
    def checksum(self) -> str: ...
    def store(self, folder: Path) -> bool:
        """Have whoever holds them write them with `write_file`; False where nobody has. May raise what that raises.

        Called in a thread that may wait.
        """
        ...

    def fetch(self) -> Weights:
        """The weights themselves, or `LostObjectError`; called in a thread that may wait for them."""
        ...

    async def again(self) -> None:
        """Have them where `fetch` finds them after they were lost; `LostObjectError` where nobody has them."""
        ...


class VersionFiles:
    """The files of a run's versions. For the loop's thread; what takes time is done in one of its own."""

    def __init__(self, folder: Path, *, durable: bool = True) -> None:
        """Without `durable`, versions are written only where `keep` asks for it: by a checkpoint."""
        self.folder = folder
        self._always = durable
        self._writes: dict[int, Future[None]] = {}
        self._elsewhere: dict[int, Fetched] = {}  # those of them that may be lost before they are written
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="versions")

    def path(self, version: int) -> Path:
        return _path(self.folder, version)

    def versions(self) -> list[int]:
        """Those that are on the disk, in order."""
        return sorted(int(path.stem) for path in self.folder.glob("[0-9]*.safetensors"))

    def write(self, weights: Weights | Fetched) -> None:
        """Begin to write a version that was just made. Once for each; a second time changes nothing."""
        if self._always:
            self.keep(weights)

    def keep(self, weights: Weights | Fetched) -> None:
        """Begin to write a version whatever the run's rule is."""
        if weights.version not in self._writes:
            if not isinstance(weights, Weights):
                self._elsewhere[weights.version] = weights
            self._writes[weights.version] = self._writer.submit(self._write, weights)

    def keeps(self, version: int) -> bool:
        """Whether a version is on the disk or on its way there; not once it is removed."""
        return version in self._writes

    async def durable(self, version: int) -> None:
        """Return once a version is on the disk, if it is to be there; raises `RunError` where it could not be."""
        for attempt in range(TAKES):
            write = self._writes.get(version)
            if write is None:
                assert not self._always, f"version {version} is to be durable and was never written"
                return
            try:
                await self._written(version, write)
                self._elsewhere.pop(version, None)
                return
            except LostObjectError as error:
                try:
                    if attempt + 1 == TAKES:
                        raise
                    await self._take_again(version, write)
                except LostObjectError as lost:
                    raise RunError(
                        f"version {version} was lost before it was written to `{self.path(version)}` ({error}; "
                        f"{lost}), and nothing has started on it; go on with `--resume`"
                    ) from lost

    async def _written(self, version: int, write: Future[None]) -> None:
        try:
            await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(write)), WAIT_S)
        except TimeoutError:
            raise StalledError(f"`{self.path(version)}` is not written after {WAIT_S:g} s: the disk hangs") from None

    async def _take_again(self, version: int, write: Future[None]) -> None:
        """Begin once more to write a version that was lost; whoever else waits for it finds that done."""
        asked = self._elsewhere[version]
        await asked.again()
        if self._writes.get(version) is write:
            self._writes[version] = self._writer.submit(self._write, asked)

    def remove(self, version: int) -> None:
        """Nothing needs a version any more, and the journal has on the disk what says so."""
        self._writes.pop(version, None)
        self._elsewhere.pop(version, None)
        self._writer.submit(self.path(version).unlink, missing_ok=True)

    def read(self, version: int, recorded: str) -> Weights | None:
        """A version as it was recorded; None where there is no such file, or it is damaged or of other weights."""
        try:
            with safe_open(self.path(version), framework="pt") as file:
                facts = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
            scale = float(facts["scale"])
        except (OSError, SafetensorError, KeyError, ValueError):
            return None
        if facts.get("checksum") != recorded or checksum(tensors, scale) != recorded:
            return None
        self._writes.setdefault(version, _done())
        return Weights(version, cast(Literal["lora", "full"], facts["kind"]), tensors, recorded, scale)

    def prune(self, needed: Callable[[int], bool]) -> None:
        """Remove all but what is needed, and what was never complete; what is being written now is."""

        def remove() -> None:
            for path in self.folder.glob(".*.partial"):
                path.unlink(missing_ok=True)
            for version in self.versions():
                if not needed(version):
                    self.path(version).unlink(missing_ok=True)

        self._writer.submit(remove)

    def close(self) -> None:
        """Wait for what is being written. Safe to call twice."""
        self._writer.shutdown(wait=True)

    def _write(self, asked: Weights | Fetched) -> None:
        try:
            if isinstance(asked, Weights):
                write_file(self.folder, asked)
            elif not (asked.store(self.folder) and self.path(asked.version).exists()):
                write_file(self.folder, asked.fetch())
        except (OSError, SafetensorError) as error:
            raise RunError(
                f"version {asked.version} could not be written to `{self.path(asked.version)}` ({error}), and nothing "
                "may start on it before it is; make room on the disk, and go on with `--resume`"
            ) from error


def _path(folder: Path, version: int) -> Path:
    return folder / f"{version:06d}.safetensors"


def write_file(folder: Path, weights: Weights, writer: str = "") -> None:
    """Write a version into the folder of a run's versions; raises `OSError` or `SafetensorError`. Blocks.

    Two writers may be at the same version, if one has given the other up: each has files of its own.
    """
    scratch = folder / f".{weights.version:06d}{writer}.partial"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        facts = {"kind": weights.kind, "checksum": weights.checksum, "scale": repr(float(weights.scale))}
        save_file({name: tensor.cpu().contiguous() for name, tensor in weights.tensors.items()}, scratch, facts)
        sync(scratch)
        scratch.rename(_path(folder, weights.version))
        sync(folder)
    except (OSError, SafetensorError):
        scratch.unlink(missing_ok=True)
        raise


def sync(path: Path) -> None:
    """Have a file, or the names in a folder, on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _done() -> Future[None]:
    future: Future[None] = Future()
    future.set_result(None)
    return future
