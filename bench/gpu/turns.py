"""Turns: tokens that conversations prefill, and the time that they take, with and without KV between turns.

    python -m bench.gpu.turns --out RESULTS --resume

`--episodes` conversations of `--turns` turns run at once. Each turn brings as many new tokens as the others and samples
`--tokens`, so that a conversation ends with `--context` tokens. The world takes no time. One cell for each way:

- `retained`: the engine retains the KV of a turn for the next one. A token should be prefilled once.
- `again`: nothing is retained, as in an engine that serves single requests. Every turn prefills its whole context.
- `host`: half of the conversations have a row and KV on the device at a time; KV of the others goes to host memory.
- `dropped`: as `host`, but KV that has no room is dropped and prefilled again.

`prefilled_share` is over the tokens that have to be prefilled at least: all that were not sampled. A retained turn
prefills a few more, because whole pages are retained and the last sampled token has no KV yet.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np
import torch

from bench.gpu.cells import Cell, add_options, from_options, words
from bench.gpu.native_side import NativeSide, num_captured
from bench.gpu.shapes import config_of
from stretto.engines.native import host_kv
from stretto.engines.threaded import Failed
from stretto.types import Completion, Request, Sampling

MARGIN = 64  # tokens a row beyond what is asked for: pages are whole
WAYS = ("retained", "again", "host", "dropped")


def cells_of(options: argparse.Namespace) -> list[Cell]:
    shared = {name: getattr(options, name) for name in ("size", "episodes", "turns", "context", "tokens")}
    return [Cell("turns", "native", {**shared, "way": way}) for way in options.ways]


class Conversations:
    """Conversations of one length, played by one engine."""

    def __init__(self, side: NativeSide, options: argparse.Namespace, *, keep: bool, seed: int) -> None:
        self._engine, self._options, self._keep = side.engine, options, keep
        self._random = np.random.default_rng(seed)
        self._vocabulary = config_of(options.size).vocab_size
        self._new = options.context // options.turns - options.tokens  # tokens that a turn brings
        self._contexts: dict[int, tuple[int, ...]] = {}
        self._turns: dict[int, int] = {}
        self._first_id = seed * options.episodes

    def play(self) -> dict[str, Any]:
        """Plays all conversations to their end."""
        engine, episodes = self._engine, self._options.episodes
        before, captured, began = engine.report(), num_captured(engine), time.perf_counter()
        most_on_host = 0
        for id in range(self._first_id, self._first_id + episodes):
            self._contexts[id], self._turns[id] = (), 0
            self._ask(id)
        while engine.has_work:
            for each in engine.step():
                if isinstance(each, Failed):
                    raise each.error
                self._ended(each)
            most_on_host = max(most_on_host, engine.report().kv_on_host)
        seconds, after = time.perf_counter() - began, engine.report()
        least = episodes * self._options.turns * self._new
        prefilled = after.prefilled - before.prefilled
        return {
            "seconds": seconds,
            "tokens_per_s": (after.tokens - before.tokens) / seconds,
            "prefilled": prefilled,
            "prefilled_share": prefilled / least,
            "kv_on_host": most_on_host,
            "preemptions": after.preemptions - before.preemptions,
            "captured": num_captured(engine) - captured,
        }

    def _ask(self, id: int) -> None:
        self._turns[id] += 1
        self._contexts[id] += tuple(self._random.integers(0, self._vocabulary, self._new).tolist())
        keep = self._keep and self._turns[id] < self._options.turns
        sampling = Sampling(self._options.tokens)
        self._engine.add(Request(id, 0, self._contexts[id], id + self._turns[id], sampling, keep=keep))

    def _ended(self, completion: Completion) -> None:
        id = completion.id
        self._contexts[id] += tuple(completion.tokens.tolist())
        if self._turns[id] < self._options.turns:
            self._ask(id)


def measure(way: str, side: NativeSide, options: argparse.Namespace) -> dict[str, Any]:
    """Plays the conversations of one way, once to compile and capture, and then `--repeats` times."""
    short = way in ("host", "dropped")
    rows = options.episodes // 2 if short else options.episodes
    side.prepare(rows, rows * (options.context + MARGIN), options.context + MARGIN)
    host_kv.USED_ON_GPUS = way != "dropped"
    side.engine._schedule.host.limit_bytes = 0 if way == "dropped" else 1 << 40
    runs = [
        Conversations(side, options, keep=way != "again", seed=1 + repeat).play()
        for repeat in range(1 + options.repeats)
    ]
    best = min(runs[1:], key=lambda run: run["seconds"])
    return {**best, "all_seconds": [run["seconds"] for run in runs[1:]]}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--size", default="1.7B")
    parser.add_argument("--ways", type=words, default=list(WAYS))
    parser.add_argument("--episodes", type=int, default=32)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--context", type=int, default=8_192, help="tokens at the end of a conversation")
    parser.add_argument("--tokens", type=int, default=128, help="sampled in a turn")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--prefill-tokens", type=int, default=8_192)
    options = parser.parse_args(arguments)
    if unknown := sorted(set(options.ways) - set(WAYS)):
        parser.error(f"`--ways` has {unknown}: it takes {', '.join(WAYS)}")
    if options.tiny:
        options.size, options.episodes, options.turns, options.context, options.tokens = "tiny", 4, 3, 192, 16
        options.prefill_tokens, options.repeats = 64, 1
    cells = from_options(options)
    pending = cells.pending(cells_of(options))
    if not pending:
        return 0
    side = NativeSide(options.size, lora=False, device=options.device, prefill_tokens=options.prefill_tokens)
    usual = host_kv.USED_ON_GPUS
    try:
        for cell in pending:
            cells.measure(cell, lambda cell=cell: measure(str(cell.parameters["way"]), side, options))
            if torch.device(options.device).type == "cuda":
                torch.cuda.empty_cache()
    finally:
        host_kv.USED_ON_GPUS = usual
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
