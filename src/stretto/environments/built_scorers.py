"""Scorers that a reward worker makes from options, instead of importing a function: judges and reward models.

Imports only the standard library: reward workers load this module.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class BuiltScorer:
    """A scorer, as a worker makes it: by calling `spec` with `arguments`, `columns`, `note` and `option`.

    It is a callable as a reward function is, `async` if it scores many completions at once. It may raise `ScoringError`
    and `HaltError` (`scoring_errors.py`).
    """

    spec: str  # `package.module:Class`
    option: str  # the table of the recipe that it is made from, for messages
    arguments: Mapping[str, Any]  # that can be pickled
    deadline_s: float  # of a completion, from when a worker has it
    start_s: float  # for a worker to make it
    most_at_once: int  # completions that a worker gets at once
    gpus: float = 0.0  # of a cluster, for its worker
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)  # variables that its worker sees too
