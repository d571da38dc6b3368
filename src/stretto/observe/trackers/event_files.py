"""Event files of TensorBoard: one event for all numbers of a line.

The file is a sequence of records, each an `Event` in protocol buffers with its length and two checksums
(https://www.tensorflow.org/tutorials/load_data/tfrecord describes it). Events are encoded here: few fields are needed,
and the import of the messages takes as much CPU time as the events of a thousand updates. The numbers of the fields are
those of `event.proto`, `summary.proto` and `tensor.proto` of the package tensorboard, and the tests read the files with
it.
"""

from __future__ import annotations

import math
import os
import socket
import struct
import time
from collections.abc import Iterator, Mapping
from itertools import count
from pathlib import Path

VERSION = "brain.Event:2"
SESSION_START = 1  # `SessionLog.START`
STRINGS = 7  # `DT_STRING`
MASK = 0xA282EAD8  # is added to a checksum, which is then the checksum of no data that holds checksums
POLYNOMIAL = 0x82F63B78  # of CRC-32C, reversed

_numbers = count()  # of the files of this process, so that two of one second differ


class EventFile:
    """Appends events to a new file in a folder. Each is written to the operating system at once."""

    def __init__(self, folder: Path, *, purge_step: int | None = None) -> None:
        """`purge_step`: TensorBoard forgets the events of earlier files from this step on."""
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{next(_numbers)}"
        self._file = (folder / name).open("ab", buffering=0)
        self._write(0, _bytes(3, VERSION.encode()))
        if purge_step is not None:
            self._write(purge_step, _bytes(7, _integer(1, SESSION_START)))

    def numbers(self, step: int, numbers: Mapping[str, float]) -> None:
        """Writes numbers by tag."""
        values = (_bytes(1, tag.encode()) + _float(2, number) for tag, number in numbers.items())
        self._write(step, _bytes(5, b"".join(_bytes(1, value) for value in values)))

    def text(self, tag: str, text: str, step: int) -> None:
        """Writes a text in Markdown."""
        shape = _bytes(2, _integer(1, 1))  # one dimension of size 1
        tensor = _integer(1, STRINGS) + _bytes(2, shape) + _bytes(8, text.encode())
        metadata = _bytes(1, _bytes(1, b"text"))  # the name of the plugin that shows it
        value = _bytes(1, tag.encode()) + _bytes(8, tensor) + _bytes(9, metadata)
        self._write(step, _bytes(5, _bytes(1, value)))

    def close(self) -> None:
        self._file.close()

    def _write(self, step: int, content: bytes) -> None:
        data = _double(1, time.time()) + _integer(2, step) + content
        length = struct.pack("<Q", len(data))
        self._file.write(length + _masked(length) + data + _masked(data))


# -- protocol buffers: a field is its number and kind, and its value ---------------------------------------------------


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)


def _integer(field: int, value: int) -> bytes:
    return bytes((field << 3,)) + _varint(value)


def _double(field: int, value: float) -> bytes:
    return struct.pack("<Bd", field << 3 | 1, value)


def _float(field: int, value: float) -> bytes:
    try:
        return struct.pack("<Bf", field << 3 | 5, value)
    except OverflowError:  # beyond a float of 32 bits
        return struct.pack("<Bf", field << 3 | 5, math.copysign(math.inf, value))


def _bytes(field: int, value: bytes) -> bytes:
    return bytes((field << 3 | 2,)) + _varint(len(value)) + value


# -- checksums ---------------------------------------------------------------------------------------------------------


def _masked(data: bytes) -> bytes:
    """Returns the masked CRC-32C of some bytes."""
    checksum = 0xFFFFFFFF
    for byte in data:
        checksum = _TABLE[(checksum ^ byte) & 0xFF] ^ (checksum >> 8)
    checksum ^= 0xFFFFFFFF
    return struct.pack("<I", (((checksum >> 15) | (checksum << 17)) + MASK) & 0xFFFFFFFF)


def _entries() -> Iterator[int]:
    for byte in range(256):
        for _ in range(8):
            byte = (byte >> 1) ^ POLYNOMIAL if byte & 1 else byte >> 1
        yield byte


_TABLE = tuple(_entries())
