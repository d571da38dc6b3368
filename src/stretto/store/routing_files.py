"""Records of routing, in files beside the journal: `RUN/routing/<thousand>/<trajectory>-<lineage>.bin`.

A record (`models/routing.py`) takes layers x k bytes a token: 384 bytes for 48 layers of 8 experts, a hundred times as
much as the token itself. So it is a file of its own, and the journal has its *stamp*: its digest and its shape. The
digests of samples and updates cover the stamp. A file is written before the row that has its stamp, is on disk before
an update trains on it, and is deleted once no update can need it, unless `training.keep_routing` keeps it.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

FOLDER = "routing"
DIGEST_BYTES = 16
PER_FOLDER = 1000  # trajectories
KINDS: dict[int, np.dtype[Any]] = {1: np.dtype("u1"), 2: np.dtype("<i2")}  # of an expert's id, by its bytes


def stamp(record: NDArray[Any]) -> bytes:
    """Returns digest and shape of a record [tokens, layers, k], as the journal stores them: 32 bytes."""
    shape = np.array([*record.shape, record.dtype.itemsize], dtype="<i4").tobytes()
    return blake2b(_bytes(record), digest_size=DIGEST_BYTES).digest() + shape


def stamp_size(stamped: bytes) -> int:
    """Returns the bytes of the record that a stamp is of. Raises `ValueError` if it is no stamp."""
    *shape, width = _shape(stamped)
    return int(np.prod(shape)) * width


def run_folder(db: sqlite3.Connection) -> Path:
    """Returns the folder of the journal that a connection is open on."""
    return Path(db.execute("PRAGMA database_list").fetchone()[2]).parent


def write_record(run: Path, trajectory: int, lineage: int, record: NDArray[Any]) -> None:
    """Writes a record. It may not be on disk yet when this returns: see `sync_records`."""
    path = _path(run, trajectory, lineage)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(_bytes(record))


def sync_records(run: Path, members: Iterable[tuple[int, int]]) -> None:
    """Returns once the records of (trajectory, lineage) are on disk; those without a file have none."""
    for trajectory, lineage in members:
        with contextlib.suppress(FileNotFoundError):
            descriptor = os.open(_path(run, trajectory, lineage), os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


def read_record(run: Path, trajectory: int, lineage: int, stamped: bytes) -> NDArray[Any] | None:
    """Returns the record of a stamp; None if its file is gone. Raises `ValueError` if it is not the one stamped."""
    tokens, layers, chosen, width = _shape(stamped)
    try:
        data = _path(run, trajectory, lineage).read_bytes()
    except FileNotFoundError:
        return None
    if blake2b(data, digest_size=DIGEST_BYTES).digest() != stamped[:DIGEST_BYTES]:
        raise ValueError(f"its record of routing in `{FOLDER}/` is not the one that the journal has the digest of")
    record: NDArray[Any] = np.frombuffer(data, KINDS[width]).reshape(tokens, layers, chosen)
    return record.astype(record.dtype.newbyteorder("="), copy=False)


def remove_records(run: Path, members: Iterable[tuple[int, int]]) -> None:
    """Deletes the records of (trajectory, lineage) that are there, and folders that are empty then."""
    folders = set()
    for trajectory, lineage in members:
        path = _path(run, trajectory, lineage)
        path.unlink(missing_ok=True)
        folders.add(path.parent)
    for folder in folders | {run / FOLDER}:
        with contextlib.suppress(OSError):  # it is not empty, or not there
            folder.rmdir()


def _bytes(record: NDArray[Any]) -> bytes:
    return np.ascontiguousarray(record, dtype=KINDS[record.dtype.itemsize]).tobytes()


def _shape(stamped: bytes) -> tuple[int, ...]:
    shape = tuple(np.frombuffer(stamped[DIGEST_BYTES:], "<i4").tolist())
    if len(stamped) != DIGEST_BYTES + 16 or min(shape) < 0 or shape[3] not in KINDS:
        raise ValueError(f"its stamp of routing has {len(stamped)} bytes and the shape {list(shape)}")
    return shape


def _path(run: Path, trajectory: int, lineage: int) -> Path:
    return run / FOLDER / str(trajectory // PER_FOLDER) / f"{trajectory}-{lineage}.bin"
