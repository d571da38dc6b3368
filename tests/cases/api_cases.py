"""A small recipe, rows and callbacks for tests of the Python interface."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from run_cases import SMALL

from stretto.observe.listeners import Callback, LiveRun

ROWS = [{"prompt": f"{number}+{number}=", "answer": number} for number in range(24)]


def tables(model: Path, **sections: Any) -> dict[str, Any]:
    """A recipe without a task: three updates of 3 groups of 4."""
    return {
        "seed": 5,
        "model": {"path": str(model), "lora": {"rank": 4}},
        **SMALL,
        "rollout": {**SMALL["rollout"], "max_tokens": 12},
        **sections,
    }


def letters(prompt: str, completion: str, answer: int) -> float:
    return sum(character in "aeiou0123456789" for character in completion) / 8


class Stops(Callback):
    """Stops its run after an update."""

    def __init__(self, after: int = 0) -> None:
        self.after = after
        self.messages: list[str] = []

    def on_start(self, run: LiveRun) -> None:
        self.run = run

    def on_update(self, line: dict[str, Any]) -> None:
        if line["update"] == self.after:
            self.run.stop()

    def on_message(self, text: str) -> None:
        self.messages.append(text)
