"""The forward of transformers' own modules over packed tokens, for the engine and the trainer."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def run_modules(module: Any, tokens: Tensor, positions: Tensor, **options: Any) -> Any:
    """Calls a module of transformers with one row of tokens [T] at `positions` [T]; returns its output."""
    return module(input_ids=tokens[None], position_ids=positions[None], use_cache=False, **options)
