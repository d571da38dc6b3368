"""The model on the machines of a cluster: the same files everywhere, or an error.

A model folder is used on another machine if it lies there too, with the same files; a small folder is sent along. A hub
name must stand for the same revision on every machine, whatever is in its cache. Otherwise instances could generate
with another base than the one that is trained.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from huggingface_hub import hf_hub_download
from transformers.utils import logging as transformers_logging

from stretto.engines.threaded import SteppedEngine
from stretto.errors import ModelError
from stretto.models.hub import hub_answers
from stretto.recipe.schema import Recipe
from stretto.setup.factories import make_instance_engine

SENT_BYTES = 256 << 20  # a folder of at most this size is sent to machines that do not have it
PROBED_BYTES = 1 << 20  # compared at both ends of a file


@dataclass(frozen=True, slots=True)
class ModelSource:
    """The origin of a model, for any machine of the cluster."""

    path: str  # a folder of the driver's machine, or a hub name
    fingerprint: str = ""  # of the folder's files; empty for a hub name
    revision: str = ""  # of a hub name, as the driver sees it; empty for a folder
    files: Any = None  # a reference to the folder's files, if they are small enough to be sent
    option: str = "model.path"  # the key of the recipe that names it

    @classmethod
    def of(cls, path: str, option: str = "model.path") -> ModelSource:
        """Describes the model at `path` on the driver's machine. Blocks while it reads the files."""
        folder = Path(path)
        if not folder.is_dir():
            return cls(path, revision=revision_of(path), option=option)
        folder = folder.resolve()
        files = _files(folder)
        small = sum(file.stat().st_size for file in files.values()) <= SENT_BYTES
        sent = ray.put({name: file.read_bytes() for name, file in files.items()}) if small else None
        return cls(str(folder), _fingerprint(files), files=sent, option=option)

    def here(self) -> str:
        """Returns what to load on this machine. Raises `ModelError` if the model is not here and was not sent."""
        if self.revision:
            return self._hub_name()
        folder = Path(self.path)
        if not self.fingerprint or (folder.is_dir() and _fingerprint(_files(folder)) == self.fingerprint):
            return self.path
        if self.files is None:
            there = "has other files" if folder.is_dir() else "is not there"
            raise ModelError(
                f"`{self.option} = {self.path!r}` {there} on the machine `{os.uname().nodename}`; put the same folder "
                "at the same place on every machine of the cluster, or on a file system that they share"
            )
        return str(self._unpack(ray.get(self.files, timeout=600)))

    def _hub_name(self) -> str:
        """Returns the hub name. Raises `ModelError` if it stands for another revision on this machine."""
        if (found := revision_of(self.path)) != self.revision:
            raise ModelError(
                f"`model.path = {self.path!r}` is revision {found} on the machine `{os.uname().nodename}` and "
                f"{self.revision} where the run was started; download the same one on every machine, or give a folder"
            )
        return self.path

    def _unpack(self, files: Mapping[str, bytes]) -> Path:
        """Writes the files that were sent, once for each machine and model."""
        root = Path(tempfile.gettempdir()) / f"stretto-models-{os.getuid()}"
        folder = root / self.fingerprint
        if not folder.is_dir():
            root.mkdir(mode=0o700, exist_ok=True)
            scratch = Path(tempfile.mkdtemp(dir=root))
            for name, data in files.items():
                (scratch / name).parent.mkdir(parents=True, exist_ok=True)
                (scratch / name).write_bytes(data)
            try:
                scratch.rename(folder)
            except OSError:  # another process was faster
                shutil.rmtree(scratch, ignore_errors=True)
        if _fingerprint(_files(folder)) != self.fingerprint:
            raise ModelError(f"`{folder}` is not the model that was sent; remove it, and start again")
        return folder


def revision_of(name: str) -> str:
    """Returns the revision of a hub name: that of the hub, or that of the cache if the hub cannot be reached."""
    return Path(hf_hub_download(name, "config.json", local_files_only=not hub_answers(name, "model.path"))).parent.name


def _files(folder: Path) -> dict[str, Path]:
    found = (path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("."))
    return {path.relative_to(folder).as_posix(): path for path in sorted(found)}


def _fingerprint(files: Mapping[str, Path]) -> str:
    """Returns a hash of the names, the sizes, and both ends of every file: all of a file that is small."""
    digest = hashlib.blake2b(digest_size=16)
    for name, path in files.items():
        size = path.stat().st_size
        digest.update(f"{name} {size} ".encode())
        with path.open("rb") as file:
            digest.update(file.read(PROBED_BYTES))
            if size > PROBED_BYTES:
                file.seek(max(PROBED_BYTES, size - PROBED_BYTES))
                digest.update(file.read())
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class InstanceEngineFactory:
    """Makes the engine of a rollout instance on the machine where it is called."""

    recipe: Recipe
    source: ModelSource
    longest_prompt: int

    def __call__(self) -> SteppedEngine:
        transformers_logging.disable_progress_bar()
        return make_instance_engine(self.recipe, self.source.here(), self.longest_prompt)
