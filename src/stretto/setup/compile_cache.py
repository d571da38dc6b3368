"""Keeps what torch compiles between runs, so that the first update of a second run is quick.

Torch's own folder is in the temporary folder, which a restart of the machine or of a container empties. Ours is in the
user's cache folder, one for each combination of what the code was compiled for. `TORCHINDUCTOR_CACHE_DIR` and
`TRITON_CACHE_DIR`, if they are set, have precedence.

The time of a folder is when a process last began to use it, and a process has a shared lock on the folder that it uses.
One that was last used `UNUSED_S` ago, and that nobody has locked, is deleted by the next run.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import logging
import os
import platform
import re
import shutil
import tempfile
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import torch

from stretto.errors import first_line
from stretto.models.user_cache import user_cache

log = logging.getLogger(__name__)

COMPILER = "torch._inductor.compile_fx"  # its import takes seconds
VARIABLES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
UNUSED_S = 60 * 24 * 3600.0
DELETED = ".deleted-"  # begins the name of a folder that is being deleted


def keep_compiled(device: torch.device) -> None:
    """Makes torch and Triton keep compiled code in the user's cache folder. Does nothing on the CPU.

    Call before anything is compiled. If the folder cannot be written, both have their own, in the temporary folder.
    Folders that have not been used for a long time are deleted.
    """
    wanted = {variable: name for variable, name in VARIABLES.items() if variable not in os.environ}
    if device.type != "cuda" or not wanted:
        return
    device_name = torch.cuda.get_device_name(device)
    try:
        folder = cache_folder(device_name)
        _use(folder)
        for name in wanted.values():
            (folder / name).mkdir(exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=folder / name) as file:
                file.write(b"x")
    except (OSError, RuntimeError) as error:  # `RuntimeError`: the user has no home
        log.warning("compiled code is kept in the temporary folder alone: %s", first_line(error))
        return
    os.environ |= {variable: str(folder / name) for variable, name in wanted.items()}
    delete_unused(folder.parent)


def delete_unused(parent: Path) -> None:
    """Deletes the folders in `parent` that were last used `UNUSED_S` ago. For any number of processes at once.

    A folder is renamed before it is deleted: a process that begins to use it meanwhile makes a new one.
    """
    with contextlib.suppress(OSError):
        for folder in list(parent.iterdir()):
            with contextlib.suppress(OSError):  # in use, or gone
                # One that has the new name already was left behind by a process that ended.
                gone = folder if folder.name.startswith(DELETED) else _set_aside(folder)
                if gone is not None:
                    shutil.rmtree(gone, ignore_errors=True)


def import_compiler(device: torch.device) -> Callable[[], None]:
    """Starts to import torch's compiler in a thread; returns a function that waits for it. Nothing on the CPU.

    Nobody may import a part of it meanwhile.
    """
    if device.type != "cuda":
        return lambda: None

    def work() -> None:
        try:
            importlib.import_module(COMPILER)
        except Exception as error:  # whoever needs it meets the same, and says so
            log.info("`%s` cannot be imported: %s", COMPILER, error)

    thread = threading.Thread(target=work, name="import of the compiler", daemon=True)
    thread.start()
    return thread.join


def cache_folder(device_name: str) -> Path:
    """Returns the folder of code that was compiled for this device by this Python and torch.

    Raises `RuntimeError` if the user has no home.
    """
    versions = {"torch": torch.__version__, "cuda": torch.version.cuda, "python": platform.python_version()}
    parts = (device_name, *(f"{name}-{version}" for name, version in versions.items()))
    return user_cache() / "compiled" / re.sub(r"[^A-Za-z0-9.+_-]+", "-", "-".join(parts))


def _use(folder: Path) -> None:
    """Makes the folder if need be, sets its time, and locks it until the process ends. Raises `OSError`."""
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY)  # of the folder itself; stays open
        with contextlib.suppress(OSError):  # a file system without locks: nothing is ever deleted there
            fcntl.flock(handle, fcntl.LOCK_SH)
        if _is_in_place(handle, folder):
            os.utime(folder)
            return
        os.close(handle)  # it was deleted in between


def _set_aside(folder: Path) -> Path | None:
    """Renames a folder that has not been used for a long time, and returns its new path; None if it was used.

    Raises `OSError` if it is in use, or cannot be locked.
    """
    if not _is_old(folder.lstat()):
        return None
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not _is_in_place(handle, folder) or not _is_old(os.fstat(handle)):
            return None
        return folder.rename(folder.with_name(f"{DELETED}{uuid.uuid4().hex}"))
    finally:
        os.close(handle)


def _is_old(stat: os.stat_result) -> bool:
    return time.time() - stat.st_mtime > UNUSED_S


def _is_in_place(handle: int, folder: Path) -> bool:
    """True if the open folder still has its path."""
    try:
        return os.path.samestat(os.fstat(handle), os.stat(folder))
    except FileNotFoundError:
        return False
