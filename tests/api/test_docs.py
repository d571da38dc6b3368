"""`docs/python.md` is complete. `tests/docs` runs its snippets."""

from __future__ import annotations

import inspect
from pathlib import Path

import stretto

PAGE = Path(__file__).parents[2] / "docs" / "python.md"


def test_the_page_names_every_argument_of_train_and_every_part_of_a_run() -> None:
    text = PAGE.read_text(encoding="utf-8")
    missing = [name for name in inspect.signature(stretto.train).parameters if f"`{name}`" not in text]
    parts = [name for name in vars(stretto.Run) if not name.startswith("_")]
    missing += [name for name in parts if f"`run.{name}" not in text]
    missing += [
        name for name in stretto.__all__ if name[0] != "_" and name not in ("verify", "Table") and name not in text
    ]
    assert not missing
