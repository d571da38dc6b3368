"""Slots: what live versions cost a decode step, as adapters and as full weights.

    python -m bench.gpu.slots --out RESULTS --resume

`step_ms` of `--rows` rows dealt round over 1, 2 and 3 versions, each kind with one engine that holds three. Adapters of
all versions share one pass over the base; full weights are read once a version, so a version more should cost a step
`weight bytes / bandwidth` more, 0.8 ms at 1.7B, less what small batches win by running side by side.
"""

from __future__ import annotations

import argparse
from typing import Any

from bench.gpu.cells import Cell, add_options, from_options, integers, release_memory, words
from bench.gpu.native_side import NativeSide
from bench.gpu.sides import Ask, prompts

MARGIN = 64  # tokens a row beyond what is asked for: pages are whole, and some steps warm up


def cells_of(kind: str, options: argparse.Namespace) -> list[Cell]:
    common = {"size": options.size, "kind": kind, "prompt": options.prompt, "tokens": options.steps}
    return [
        Cell("slots", "native", {**common, "batch": rows, "versions": versions})
        for rows in options.rows
        for versions in options.versions
    ]


def asks(cell: Cell) -> list[Ask]:
    """Rows dealt round over the versions of a cell."""
    batch, versions = int(cell.parameters["batch"]), int(cell.parameters["versions"])
    drawn = prompts(batch, int(cell.parameters["prompt"]), str(cell.parameters["size"]), seed=31)
    return [Ask(prompt, 0, i % versions) for i, prompt in enumerate(drawn)]


def measure(kind: str, options: argparse.Namespace) -> None:
    """All cells of one kind, with one engine."""
    cells = from_options(options)
    pending = cells.pending(cells_of(kind, options))
    if not pending:
        return
    side = NativeSide(
        options.size,
        lora=kind == "lora",
        device=options.device,
        prefill_tokens=options.prefill_tokens,
        versions=max(options.versions),
    )
    rows = max(options.rows)
    context = options.prompt + options.steps + MARGIN + side.steps_ahead([Ask((0,) * options.prompt, 0)] * rows)
    side.prepare(rows, rows * context, context)

    def one(cell: Cell) -> dict[str, Any]:
        outcomes = [side.filled_steps(asks(cell), options.steps) for _ in range(options.repeats)]
        best = min(outcomes, key=lambda outcome: outcome.seconds)  # the first may capture
        steps = [outcome.details["step_ms"] for outcome in outcomes]
        return {**best.details, "tokens_per_s": best.tokens / best.seconds, "all_step_ms": steps}

    for cell in pending:
        cells.measure(cell, lambda cell=cell: one(cell))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--size", default="1.7B")
    parser.add_argument("--kinds", type=words, default=["lora", "full"])
    parser.add_argument("--rows", type=integers, default=[256, 64])
    parser.add_argument("--versions", type=integers, default=[1, 2, 3], help="live ones, over which rows are dealt")
    parser.add_argument("--prompt", type=int, default=256, help="tokens of context that are there already")
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--prefill-tokens", type=int, default=8_192)
    options = parser.parse_args(arguments)
    if options.tiny:
        options.size, options.rows, options.prompt, options.steps = "tiny", [6, 3], 16, 4
        options.prefill_tokens, options.repeats = 64, 1
    options.sitting = from_options(options).sitting
    for kind in options.kinds:
        measure(kind, options)
        release_memory(options.device)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
