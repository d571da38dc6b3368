"""Samples of an update as rows of a table, read from the journal."""

from __future__ import annotations

from pathlib import Path

from stretto.store.reader import JournalReader

MOST_CHARACTERS = 4_000  # of a prompt or a completion

Row = dict[str, str | int | float | None]

COLUMNS = ("update", "group", "trajectory", "version", "age", "reward", "tokens", "finish", "prompt", "completion")


def sample_rows(folder: Path, update: int, most: int) -> list[Row]:
    """Returns up to `most` trajectories of an update, spread over its batch. Long texts are cut in the middle."""
    with JournalReader(folder) as reader:
        records = reader.samples(update, most)
    return [
        {
            "update": update,
            "group": record.group,
            "trajectory": record.trajectory,
            "version": record.version,
            "age": record.age,
            "reward": record.reward,
            "tokens": record.num_tokens,
            "finish": record.finish,
            "prompt": _cut(record.prompt if record.context is None else record.context),
            "completion": _cut(record.text),
        }
        for record in records
    ]


def _cut(text: str) -> str:
    if len(text) <= MOST_CHARACTERS:
        return text
    half = MOST_CHARACTERS // 2
    return f"{text[:half]} [... {len(text) - 2 * half} characters ...] {text[-half:]}"
