"""The lock of a run: one process at a time may run it. The operating system frees it when the process ends.

The lock is a file beside the journal. Imports nothing heavy.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from stretto.errors import RunError
from stretto.store.schema import JOURNAL_NAME


class Lock:
    """Keeps other processes from writing the run of a journal until it is closed.

    Raises `RunError` if another process has the lock.
    """

    def __init__(self, journal: Path) -> None:
        self._path = _path(journal)
        while True:
            self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            if not _locked(self._descriptor):
                self.close()
                raise RunError(f"`{journal}` is being written by another process: wait for it, or stop it")
            if self._is_in_place():
                return
            self.close()  # the process that had the lock has removed the file in between

    def remove(self) -> None:
        """Removes the file, then releases the lock: the run has left nothing."""
        if self._descriptor >= 0:
            os.unlink(self._path)
        self.close()

    def _is_in_place(self) -> bool:
        try:
            return os.path.samestat(os.fstat(self._descriptor), os.stat(self._path))
        except FileNotFoundError:
            return False

    def close(self) -> None:
        """Releases the lock. Safe to call twice."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def is_alive(run_folder: Path) -> bool:
    """Tells if a process runs the run in this folder now."""
    path = _path(run_folder / JOURNAL_NAME)
    writable = os.access(path, os.W_OK)  # some file systems lock only writable files; another user's are read-only
    try:
        descriptor = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise RunError(f"`{path}` cannot be read, so it is unknown if the run is alive: {error.strerror}") from error
    try:
        return not _locked(descriptor)
    finally:
        os.close(descriptor)


def _path(journal: Path) -> str:
    return f"{journal}.lock"


def _locked(descriptor: int) -> bool:
    """Locks the file; returns False if another process has locked it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
