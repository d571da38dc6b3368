"""What the benches of generation ask of either side, and the prompts that both are given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from bench.gpu.shapes import SHAPES

SLOTS = 3  # adapters that either side can hold at once, as many as a recipe with K = 2 needs
SHOWN = 30  # kernels of a profile


@dataclass(frozen=True, slots=True)
class Ask:
    """One completion: `tokens` of it, no more and no fewer."""

    prompt: tuple[int, ...]
    tokens: int
    version: int = 0  # 0, 1, ... among the adapters that are mixed; without LoRA always 0
    group: int = -1  # those of one group have one prompt and one version; -1: alone


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a piece of generation took. `details` holds what only one side can tell."""

    seconds: float
    tokens: int
    details: dict[str, Any] = field(default_factory=dict)


class Side(Protocol):
    """Whoever generates. The timed region begins with the first request and ends with the last completion."""

    name: str

    def room(self) -> int:
        """Tokens of context that fit at once."""
        ...

    def prepare(self, rows: int, kv_tokens: int, max_context: int) -> None:
        """Get ready for work of that extent, outside of any timing."""
        ...

    def generate(self, asks: Sequence[Ask]) -> Outcome:
        """Everything at once, until the last has ended."""
        ...

    def filled_steps(self, asks: Sequence[Ask], steps: int) -> Outcome:
        """The time of `steps` decode steps over prompts whose KV is there already; `tokens` of an ask is not used."""
        ...


def show_kernels(side: Side, asks: Sequence[Ask]) -> None:
    """Prints the kernels of one generation by their time. vLLM's run in a process of their own."""
    if side.name != "native" or not torch.cuda.is_available():
        return
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        side.generate(asks)
    print(profile.key_averages().table(sort_by="cuda_time_total", row_limit=SHOWN, max_name_column_width=60))


def prompts(count: int, length: int, size: str, seed: int) -> list[tuple[int, ...]]:
    """Random prompts that share no beginning, also with those of another count, so that no cache of prefixes helps."""
    drawn = np.random.default_rng([seed, length, count]).integers(0, SHAPES[size].vocab_size, (count, length))
    return [tuple(row) for row in drawn.tolist()]


def expect(made: int, asks: Sequence[Ask]) -> None:
    """A bench whose lengths were not what it asked for measured something else."""
    wanted = sum(ask.tokens for ask in asks)
    if made != wanted:
        raise RuntimeError(f"{made} tokens were made where {wanted} were asked for")
