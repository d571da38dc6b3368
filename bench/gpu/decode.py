"""Decode: tokens a second of the native engine and of vLLM on the same shapes, log-probabilities on in both.

    python -m bench.gpu.decode --sizes 0.6B,1.7B,8B --out RESULTS --resume

Two kinds of cells. `decode`: `--batches` prompts of 128 tokens at once, 512 tokens each, prefill included, by the
host's clock. `filled`: 64 steps over prompts of 8,192 tokens whose KV is there, for the batches that fit. Each with
`--lora 0` (base weights), `1` (all rows one adapter) and `3` (three adapters mixed). Native cells hold the floor.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from bench.gpu import generation
from bench.gpu.cells import Cell, Cells, Parameter
from bench.gpu.floor import Rates, Traffic, describe, traffic
from bench.gpu.shapes import dtype_of, dtype_parameter
from bench.gpu.sides import Ask, Outcome, Side, prompts, show_kernels

WARM_TOKENS = 16
PROFILED_TOKENS = 64
MARGIN = 48  # tokens a row beyond what is asked for: pages are whole, and some steps warm up


def cells_of(side: str, size: str, loras: Sequence[int], options: argparse.Namespace) -> list[Cell]:
    """What there is to measure for one size on one side, in the order of the batches, filled contexts last."""
    same: dict[str, Parameter] = {
        "size": size,
        **dtype_parameter(options),
        **({"routing": 0} if options.no_routing else {}),
    }
    short = [
        Cell("decode", side, {**same, "batch": b, "lora": n, "prompt": options.prompt, "tokens": options.tokens})
        for b in options.batches
        for n in loras
    ]
    filled = [
        Cell("filled", side, {**same, "batch": b, "lora": n, "prompt": options.filled, "tokens": options.steps})
        for b in options.filled_batches
        for n in loras
    ]
    return short + (filled if options.filled else [])


def longest(options: argparse.Namespace) -> int:
    """The longest context that any cell needs."""
    return max(options.prompt + options.tokens, options.filled + options.steps) + MARGIN


def measure(
    side: Side, cells: Cells, pending: Sequence[Cell], rates: Rates | None, options: argparse.Namespace
) -> None:
    """Measure the pending cells of one side and size."""
    short = [cell for cell in pending if cell.bench == "decode"]
    if short:
        batch, context = max(_int(cell, "batch") for cell in short), options.prompt + options.tokens + MARGIN
        side.prepare(batch, batch * context, context)
        for cell in short:
            cells.measure(cell, lambda cell=cell: _short(side, cell, rates, options))
    for n in sorted({_int(cell, "lora") for cell in pending if cell.bench == "filled"}):
        _measure_filled(
            side, cells, [c for c in pending if c.bench == "filled" and c.parameters["lora"] == n], rates, options
        )


def _measure_filled(
    side: Side, cells: Cells, pending: Sequence[Cell], rates: Rates | None, options: argparse.Namespace
) -> None:
    """An engine for the largest batch that fits does for the smaller ones."""
    room = side.room()
    ahead = getattr(side, "steps_ahead", None)
    contexts, needs = {}, {}
    for cell in pending:
        batch = _int(cell, "batch")
        lead = 0 if ahead is None else ahead([Ask((0,) * options.filled, 0)] * batch)
        contexts[batch] = options.filled + options.steps + MARGIN + lead
        needs[batch] = batch * (contexts[batch] - lead // 2)  # the first row is `lead` steps ahead, the last is not
    fits = [cell for cell in pending if needs[_int(cell, "batch")] <= room]
    for cell in pending:
        if cell not in fits:
            said = f"{needs[_int(cell, 'batch')]:,} tokens of context where {room:,} fit"
            cells.measure(cell, lambda said=said: {"does_not_fit": said})
    if fits:
        batch = max(_int(cell, "batch") for cell in fits)
        side.prepare(batch, needs[batch], contexts[batch])
    for cell in fits:
        cells.measure(cell, lambda cell=cell: _filled(side, cell, rates, options))


def _int(cell: Cell, name: str) -> int:
    return int(cell.parameters[name])


def asks(cell: Cell, tokens: int, seed: int) -> list[Ask]:
    """Prompts of a cell, versions dealt round."""
    batch, versions = _int(cell, "batch"), max(1, _int(cell, "lora"))
    drawn = prompts(batch, _int(cell, "prompt"), str(cell.parameters["size"]), seed)
    return [Ask(prompt, tokens, i % versions) for i, prompt in enumerate(drawn)]


def _short(side: Side, cell: Cell, rates: Rates | None, options: argparse.Namespace) -> dict[str, Any]:
    tokens = _int(cell, "tokens")
    side.generate(asks(cell, min(WARM_TOKENS, tokens), seed=_int(cell, "batch")))
    outcomes = [side.generate(asks(cell, tokens, seed=10_000 + r)) for r in range(options.repeats)]
    results = results_of(outcomes)
    if options.profile:
        show_kernels(side, asks(cell, min(PROFILED_TOKENS, tokens), seed=30_000))
    if rates is not None:
        batch, prompt, lora = (_int(cell, name) for name in ("batch", "prompt", "lora"))
        needs = _traffic(cell, options)
        least = needs.generation_s(rates, batch, prompt, tokens, lora)
        middle = needs.step_s(rates, batch, batch * (prompt + tokens / 2), lora)
        results |= _floor(least, results["tokens"] / least, results["tokens_per_s"], rates)
        results["floor_step_ms"] = 1e3 * middle
    return results


def _filled(side: Side, cell: Cell, rates: Rates | None, options: argparse.Namespace) -> dict[str, Any]:
    steps = _int(cell, "tokens")
    work = asks(cell, steps, seed=20_000)
    outcomes = [side.filled_steps(work, steps) for _ in range(options.repeats)]
    results = results_of(outcomes)
    if rates is not None:
        context = results["context_mean"] * _int(cell, "batch")
        least = steps * _traffic(cell, options).step_s(rates, _int(cell, "batch"), context, _int(cell, "lora"))
        results |= _floor(least, results["tokens"] / least, results["tokens_per_s"], rates)
        results["floor_step_ms"] = 1e3 * least / steps
    return results


def _traffic(cell: Cell, options: argparse.Namespace) -> Traffic:
    return traffic(str(cell.parameters["size"]), dtype_of(options.device, options.dtype))


def results_of(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """The fastest of the repeats and what it told of itself, and the times of all.

    Repeats do the same work, so that the first captures whatever the others need; noise only slows.
    """
    best = min(outcomes, key=lambda outcome: outcome.seconds / outcome.tokens)
    return {
        "tokens_per_s": best.tokens / best.seconds,
        "tokens": best.tokens,
        "seconds": [outcome.seconds for outcome in outcomes],
        **best.details,
    }


def _floor(least_s: float, best: float, got: float, rates: Rates) -> dict[str, Any]:
    return {"floor_s": least_s, "floor_tokens_per_s": best, "share_of_floor": got / best, "rates": describe(rates)}


if __name__ == "__main__":
    raise SystemExit(generation.main(["decode"], __doc__))
