"""Samples of an update as rows of a table, read from the journal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from stretto.store.reader import JournalReader
from stretto.store.records import SampleRecord

MOST_CHARACTERS = 4_000  # of a prompt or a completion

Row = dict[str, str | int | float | None]


class Samples:
    """Reads samples of a run while it goes on. For one thread."""

    def __init__(self, folder: Path, most: int) -> None:
        """Reads up to `most` trajectories of an update, spread over its batch."""
        self._folder = folder
        self._most = most
        self._reader: JournalReader | None = None  # opened once: that takes longer than to read

    def rows(self, update: int) -> list[Row]:
        """Returns samples of an update, all with the same columns. Long texts are cut in the middle.

        Each of several rewards has a column `reward/NAME`. One that does not apply, or that another task has, is None.
        """
        if self._reader is None:
            self._reader = JournalReader(self._folder)
        records = self._reader.samples(update, self._most)
        parts = list(dict.fromkeys(name for record in records for name in record.rewards))
        return [_row(update, record, parts) for record in records]

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()


def _row(update: int, record: SampleRecord, parts: Sequence[str]) -> Row:
    return {
        "update": update,
        "group": record.group,
        "trajectory": record.trajectory,
        "version": record.version,
        "age": record.age,
        "reward": record.reward,
        **{f"reward/{name}": record.rewards.get(name) for name in parts},
        "tokens": record.num_tokens,
        "finish": record.finish,
        "prompt": _cut(record.prompt if record.context is None else record.context),
        "completion": _cut(record.text),
    }


def _cut(text: str) -> str:
    if len(text) <= MOST_CHARACTERS:
        return text
    half = MOST_CHARACTERS // 2
    return f"{text[:half]} [... {len(text) - 2 * half} characters ...] {text[-half:]}"
