"""Reward functions that do what code written by a model may do."""

import os
from typing import Any


def run(prompt: str, completion: str, **row: Any) -> float:
    """Runs the completion as Python, and returns what it leaves in `result`."""
    scope: dict[str, Any] = {**row}
    exec(completion, scope)
    return float(scope["result"])


async def run_later(prompt: str, completion: str, **row: Any) -> float:
    return run(prompt, completion, **row)


def home_is_here(prompt: str, completion: str) -> float:
    return float(os.getcwd() == os.environ["HOME"] == os.environ["TMPDIR"] and os.listdir() == [])
