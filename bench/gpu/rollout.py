"""Rollout: groups of 8 with forced lengths, prefill and scheduling included.

    python -m bench.gpu.rollout --sizes 1.7B --tails short,published --out RESULTS --resume

Two kinds of cells. `drain`: all groups of one update at once, until the longest has ended, in vLLM and in ours.
`sustained`: ours with every row always taken and three versions mixed, which is what multi-version rollout comes to;
the rows are met in the middle of a rollout that has long been going on, so that nothing has to settle first.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from bench.gpu import generation
from bench.gpu.cells import Cell, Cells
from bench.gpu.decode import results_of
from bench.gpu.floor import Rates
from bench.gpu.lengths import TAILS, Tail
from bench.gpu.native_side import NativeSide
from bench.gpu.shapes import dtype_parameter
from bench.gpu.sides import SLOTS, Ask, Side, prompts

GROUP = 8
PAGE = 16
GROUPS = {"short": (64,), "published": (32, 16), "tiny": (2,)}  # by tail: groups of an update


def cells_of(side: str, size: str, loras: Sequence[int], options: argparse.Namespace) -> list[Cell]:
    """What there is to measure for one size on one side."""
    found = []
    for tail in options.tails:
        for groups, lora in itertools.product(options.groups or GROUPS[tail], loras):
            parameters = {"size": size, "tail": tail, "groups": groups, "lora": lora, "prompt": options.prompt}
            parameters |= dtype_parameter(options)
            if lora < SLOTS:
                found.append(Cell("drain", side, parameters))
            elif side == "native":
                found.append(Cell("sustained", side, parameters))
    return found


def longest(options: argparse.Namespace) -> int:
    """The longest context that any cell needs."""
    return options.prompt + max(TAILS[tail].cap for tail in options.tails) + PAGE


def measure(
    side: Side, cells: Cells, pending: Sequence[Cell], rates: Rates | None, options: argparse.Namespace
) -> None:
    """Measure the pending cells of one side and size, each with an engine as large as it needs."""
    for cell in pending:
        work = _drain if cell.bench == "drain" else _sustained
        cells.measure(cell, lambda cell=cell, work=work: work(side, cell, options))


def groups(tail: Tail, count: int, prompt: int, size: str, seed: int, versions: int) -> list[list[Ask]]:
    """Groups of 8: one prompt and one version each, every member with a length of its own."""
    drawn = prompts(count, prompt, size, seed)
    lengths = tail.draw(count * GROUP, seed).reshape(count, GROUP).tolist()
    return [[Ask(drawn[g], n, g % versions, g) for n in lengths[g]] for g in range(count)]


def _drain(side: Side, cell: Cell, options: argparse.Namespace) -> dict[str, Any]:
    tail, size, count = _of(cell)
    prompt, versions = int(cell.parameters["prompt"]), max(1, int(cell.parameters["lora"]))
    work = [ask for group in groups(tail, count, prompt, size, seed=1, versions=versions) for ask in group]
    need = sum(prompt + ask.tokens + PAGE for ask in work)
    side.prepare(len(work), min(side.room(), need), longest(options))
    warm = [Ask(ask.prompt[::-1], min(ask.tokens, 24 + i % 8), ask.version, ask.group) for i, ask in enumerate(work)]
    side.generate(warm)
    outcomes = []
    for repeat in range(options.drain_repeats or options.repeats):
        # Other prompts each time, the same lengths: no cache of prefixes helps over repeats.
        fresh = prompts(count, prompt, size, seed=100 + repeat)
        outcomes.append(side.generate([Ask(fresh[a.group], a.tokens, a.version, a.group) for a in work]))
    return {
        **results_of(outcomes),
        "longest": max(ask.tokens for ask in work),
        "rows": len(work),
    }


def _sustained(side: Side, cell: Cell, options: argparse.Namespace) -> dict[str, Any]:
    assert isinstance(side, NativeSide)
    tail, size, count = _of(cell)
    prompt, rows = int(cell.parameters["prompt"]), count * GROUP
    made, left = tail.underway(rows, seed=2)
    first = [
        Ask(prompts(1, prompt + int(m), size, seed=3_000 + i)[0], int(n), i % SLOTS)
        for i, (m, n) in enumerate(zip(made, left, strict=True))
    ]
    # Room for rows that are all met later in their lives than on average; what is still too much is preempted.
    context = int(1.5 * (int(made.sum()) + rows * (prompt + PAGE))) + tail.cap
    side.prepare(rows, min(side.room(), context), longest(options))
    outcome = side.sustained(first, _endless(tail, prompt, size), rows // 2, int(options.sustained * rows))
    return {
        "tokens_per_s": outcome.tokens / outcome.seconds,
        "seconds": outcome.seconds,
        "tokens": outcome.tokens,
        "rows": rows,
        "context_mean_at_start": float(made.mean()) + prompt,
        **outcome.details,
    }


def _endless(tail: Tail, prompt: int, size: str) -> Iterator[list[Ask]]:
    for block in itertools.count():
        yield from groups(tail, 64, prompt, size, seed=5_000 + block, versions=SLOTS)


def _of(cell: Cell) -> tuple[Tail, str, int]:
    return TAILS[str(cell.parameters["tail"])], str(cell.parameters["size"]), int(cell.parameters["groups"])


if __name__ == "__main__":
    raise SystemExit(generation.main(["rollout"], __doc__))
