"""Prefill: prompt tokens a second of the native engine and of vLLM, one sampled token a prompt.

    python -m bench.gpu.prefill --sizes 1.7B --lora 0 --out RESULTS
    python -m bench.gpu.prefill --side native --lora 0 --out RESULTS --profile       # also where the device's time goes

Prompts of `--prefills` (tokens x prompts) come at once and share nothing. Each makes a single token, so nearly all of
the work is prefill. Prompts differ from repeat to repeat, because vLLM keeps prefixes.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from bench.gpu import generation
from bench.gpu.cells import Cell, Cells
from bench.gpu.decode import results_of
from bench.gpu.floor import Rates
from bench.gpu.shapes import dtype_parameter
from bench.gpu.sides import Ask, Outcome, Side, prompts, show_kernels

MARGIN = 48  # tokens a row beyond what is asked for: pages are whole


def cells_of(side: str, size: str, loras: Sequence[int], options: argparse.Namespace) -> list[Cell]:
    """A cell for each kind of prompts."""
    same = {"size": size, **dtype_parameter(options)}
    return [
        Cell("prefill", side, {**same, "batch": batch, "lora": lora, "prompt": prompt})
        for prompt, batch in options.prefills
        for lora in loras
    ]


def longest(options: argparse.Namespace) -> int:
    """The longest context that any cell needs."""
    return max(prompt for prompt, _ in options.prefills) + MARGIN


def measure(
    side: Side, cells: Cells, pending: Sequence[Cell], rates: Rates | None, options: argparse.Namespace
) -> None:
    """Measures the pending cells of one side and size, with one engine for all."""
    batch = max(int(cell.parameters["batch"]) for cell in pending)
    most = max(int(cell.parameters["batch"]) * (int(cell.parameters["prompt"]) + MARGIN) for cell in pending)
    side.prepare(batch, most, longest(options))
    for cell in pending:
        cells.measure(cell, lambda cell=cell: _cell(side, cell, rates, options))


def _cell(side: Side, cell: Cell, rates: Rates | None, options: argparse.Namespace) -> dict[str, Any]:
    def once(seed: int) -> Outcome:
        return side.generate(_asks(cell, seed))

    once(1)
    outcomes = [once(10_000 + repeat) for repeat in range(options.repeats)]
    if options.profile:
        show_kernels(side, _asks(cell, 20_000))
    results = results_of(outcomes)
    tokens = int(cell.parameters["batch"]) * int(cell.parameters["prompt"])
    results["prompt_tokens_per_s"] = tokens / min(results["seconds"])
    if rates is not None:
        results["peak_flops"] = rates.peak
    return results


def _asks(cell: Cell, seed: int) -> list[Ask]:
    """Prompts of a cell, versions dealt round."""
    batch, versions = int(cell.parameters["batch"]), max(1, int(cell.parameters["lora"]))
    drawn = prompts(batch, int(cell.parameters["prompt"]), str(cell.parameters["size"]), seed)
    return [Ask(prompt, 1, i % versions) for i, prompt in enumerate(drawn)]


if __name__ == "__main__":
    raise SystemExit(generation.main(["prefill"], __doc__))
