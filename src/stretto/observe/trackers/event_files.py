"""Event files of TensorBoard: one event for all numbers of a line.

The file is a sequence of records, each an `Event` in protocol buffers with its length and two checksums
(https://www.tensorflow.org/tutorials/load_data/tfrecord describes it). The messages are those of the package
tensorboard. The writer of torch makes an event of every number and takes ten times the CPU time.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any

VERSION = "brain.Event:2"
MASK = 0xA282EAD8  # is added to a checksum, which is then the checksum of no data that holds checksums
POLYNOMIAL = 0x82F63B78  # of CRC-32C, reversed

_numbers = count()  # of the files of this process, so that two of one second differ


class EventFile:
    """Appends events to a new file in a folder. Each is written to the operating system at once."""

    def __init__(self, folder: Path, *, purge_step: int | None = None) -> None:
        """`purge_step`: TensorBoard forgets the events of earlier files from this step on."""
        from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2, tensor_shape_pb2

        self._event, self._summary = event_pb2, summary_pb2
        self._tensor, self._shape = tensor_pb2, tensor_shape_pb2
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{next(_numbers)}"
        self._file = (folder / name).open("ab", buffering=0)
        self._write(event_pb2.Event(wall_time=time.time(), file_version=VERSION))
        if purge_step is not None:
            log = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._write(event_pb2.Event(wall_time=time.time(), step=purge_step, session_log=log))

    def numbers(self, step: int, numbers: Mapping[str, float]) -> None:
        """Writes numbers by tag."""
        value = self._summary.Summary.Value
        self._add(step, [value(tag=tag, simple_value=number) for tag, number in numbers.items()])

    def text(self, tag: str, text: str, step: int) -> None:
        """Writes a text in Markdown."""
        shape = self._shape.TensorShapeProto(dim=[self._shape.TensorShapeProto.Dim(size=1)])
        tensor = self._tensor.TensorProto(dtype="DT_STRING", string_val=[text.encode()], tensor_shape=shape)
        plugin = self._summary.SummaryMetadata.PluginData(plugin_name="text")
        metadata = self._summary.SummaryMetadata(plugin_data=plugin)
        self._add(step, [self._summary.Summary.Value(tag=tag, metadata=metadata, tensor=tensor)])

    def close(self) -> None:
        self._file.close()

    def _add(self, step: int, values: list[Any]) -> None:
        self._write(self._event.Event(wall_time=time.time(), step=step, summary=self._summary.Summary(value=values)))

    def _write(self, event: Any) -> None:
        data = event.SerializeToString()
        length = struct.pack("<Q", len(data))
        self._file.write(length + _masked(length) + data + _masked(data))


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
