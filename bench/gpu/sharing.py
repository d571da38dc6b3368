"""Sharing: decode and training on one device, in four ways.

    python -m bench.gpu.sharing --rows 128,256 --out RESULTS --resume

`decode`: rows kept full for `--seconds`, by groups of 8 that share their prompt. `training`: `--updates` updates on one
batch. `both`: the two at once in two threads, the engine on its stream of high priority, the trainer on the default
one. `turns`: the two threads pass the device to each other, which is idle when it changes hands; a turn of decode is
`--steps` steps, a turn of training one micro-batch, so a turn of decode is smaller where `--micro-tokens` is larger.

A share is a rate over the rate alone. Shares that sum to 1 gain nothing over one after the other; what they sum to
beyond it is what running side by side is worth, and what they lack is what passing the device costs.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from bench.gpu.cells import Cell, Cells, add_options, from_options, integers, read_cells, words
from bench.gpu.lengths import TAILS
from bench.gpu.native_side import NativeSide, lengths, num_captured
from bench.gpu.rollout import GROUP
from bench.gpu.runs import synthetic_batch
from bench.gpu.shapes import RANK
from bench.gpu.sides import SLOTS, Ask, prompts
from bench.gpu.timeline import Timeline
from stretto.assembly.train import SWITCH_S
from stretto.models.lora_options import LoraOptions
from stretto.training.options import TrainingOptions
from stretto.training.trainer import LocalTrainer
from stretto.types import Batch, Sample

MODES = ("decode", "training", "both", "turns")
MARGIN = 64  # tokens a row beyond what is asked for: pages are whole


class Turns:
    """Those who have entered hold the device one at a time and pass it on in a circle; who has left is passed over."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._present: list[str] = []
        self._holder: str | None = None

    def enter(self, name: str) -> None:
        """Join the circle, and wait for the first turn."""
        with self._changed:
            self._present.append(name)
            if self._holder is None:
                self._holder = name
            self._changed.wait_for(lambda: self._holder == name)

    def pass_on(self, name: str) -> None:
        """End a turn, and wait for the next one."""
        with self._changed:
            assert self._holder == name, f"it is the turn of {self._holder}"
            self._holder = self._present[(self._present.index(name) + 1) % len(self._present)]
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._holder == name)

    def leave(self, name: str) -> None:
        """End the last turn."""
        with self._changed:
            place = self._present.index(name)
            self._present.remove(name)
            if self._holder == name:
                self._holder = self._present[place % len(self._present)] if self._present else None
            self._changed.notify_all()


class Decoding:
    """An engine whose rows are kept full, by groups: for every eight that have ended, eight of one prompt begin."""

    def __init__(self, side: NativeSide, rows: int, options: argparse.Namespace) -> None:
        self._side, self._options = side, options
        self.timeline = Timeline()
        # So many prompts that none of those in flight is asked twice.
        self._prompts = itertools.cycle(prompts(rows, options.prompt, options.size, seed=41))
        self._versions = itertools.cycle(range(SLOTS))
        self._free = 0
        for first in range(0, rows, GROUP):  # as in the middle of a rollout: groups at all points of their lives
            self._add(max(1, options.tokens * (first + GROUP) // rows))

    def _add(self, tokens: int) -> None:
        """A group, whose members have that many tokens each."""
        prompt, version = next(self._prompts), next(self._versions)
        for request in self._side.requests([Ask(prompt, tokens, version, group=0)] * GROUP):
            self._side.engine.add(request)

    def step(self) -> None:
        engine = self._side.engine
        self._free += len(lengths(engine.step()))
        while self._free >= GROUP:
            self._free -= GROUP
            self._add(self._options.tokens)
        load = engine.report()
        self.timeline.note(time.perf_counter(), load.running, load.tokens)

    def run(self, stop: Callable[[], bool], turns: Turns | None = None, steps: int = 1) -> None:
        """Steps until `stop`; with `turns`, so many of them a turn."""
        with _in_turn(turns, "decode", self._side.synchronize) as boundary:
            for count in itertools.count(1):
                if stop():
                    return
                self.step()
                if count % steps == 0:
                    boundary()

    def close(self) -> None:
        engine = self._side.engine
        engine.abort(list(range(self._side._next_id)))


class Training:
    """Updates of a LoRA trainer on the same samples again and again."""

    def __init__(self, side: NativeSide, options: argparse.Namespace) -> None:
        drawn = TAILS[options.tail].draw(options.groups * GROUP, 0).tolist()
        self._samples: Sequence[Sample] = synthetic_batch(0, drawn, options.prompt, options.size).samples
        self.tokens = sum(drawn)  # of completions, an update
        self._side = side
        settings = TrainingOptions(micro_tokens=options.micro_tokens)
        self._trainer = LocalTrainer(side.model, lora=LoraOptions(rank=RANK), options=settings)

    def run(self, updates: int, turns: Turns | None = None) -> tuple[float, float, float]:
        """When the first update began and the last ended, and the micro-batches of an update."""
        packed = self._trainer.packed
        own = packed.logprobs
        with _in_turn(turns, "training", self._side.synchronize) as boundary:

            def logprobs(*arguments: Any, **named: Any) -> Any:
                boundary()  # everything of the micro-batch before has been launched
                return own(*arguments, **named)

            packed.logprobs = logprobs  # type: ignore[method-assign]
            try:
                began, micro_batches = time.perf_counter(), 0.0
                for _ in range(updates):
                    report = self._trainer.update(Batch(self._trainer.version, self._samples))
                    micro_batches = report.metrics["micro_batches"]
                return began, time.perf_counter(), micro_batches
            finally:
                packed.logprobs = own  # type: ignore[method-assign]


@contextmanager
def _in_turn(turns: Turns | None, name: str, synchronize: Callable[[], None]) -> Iterator[Callable[[], None]]:
    """Hold the device in turns; what is given is to be called where a turn may end. Without turns it does nothing."""
    if turns is None:
        yield lambda: None
        return

    def boundary() -> None:
        synchronize()
        turns.pass_on(name)

    turns.enter(name)
    try:
        yield boundary
        synchronize()
    finally:
        turns.leave(name)


class Bench:
    """One engine and one trainer over one model, for all modes."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.side = NativeSide(options.size, lora=True, device=options.device, prefill_tokens=options.prefill_tokens)
        rows, context = max(options.rows), options.prompt + options.tokens + MARGIN
        self.side.prepare(rows, rows * context, context)
        self.training = Training(self.side, options)
        self.training.run(1)  # compiles

    def measure(self, cell: Cell) -> dict[str, Any]:
        mode, rows, steps = (cell.parameters[name] for name in ("mode", "rows", "steps"))
        if mode == "training":
            return self._trained(*self.training.run(self.options.updates))
        decoding = Decoding(self.side, int(rows), self.options)
        try:
            # Every row has been replaced once, so that nothing is captured later.
            for _ in range(self.options.tokens):
                decoding.step()
            self.side.synchronize()
            captured = num_captured(self.side.engine)
            if mode == "decode":
                began = time.perf_counter()
                decoding.run(lambda: time.perf_counter() >= began + self.options.seconds)
                self.side.synchronize()
                results = self._decoded(decoding, began, time.perf_counter())
            else:
                results = self._both(decoding, Turns() if mode == "turns" else None, max(1, int(steps)))
            return {**results, "captured": num_captured(self.side.engine) - captured}
        finally:
            decoding.close()

    def _both(self, decoding: Decoding, turns: Turns | None, steps: int) -> dict[str, Any]:
        """The window is that of the updates; decode begins before it and ends after it."""
        done = threading.Event()
        with ThreadPoolExecutor(1, thread_name_prefix="engine") as pool:
            decoded = pool.submit(decoding.run, done.is_set, turns, steps)
            try:
                trained = self.training.run(self.options.updates, turns)
            finally:
                done.set()
            decoded.result()
        return {**self._trained(*trained), **self._decoded(decoding, trained[0], trained[1])}

    def _trained(self, began: float, ended: float, micro_batches: float) -> dict[str, Any]:
        rate = self.options.updates * self.training.tokens / (ended - began)
        return {"trained_per_s": rate, "training_s": ended - began, "micro_batches": micro_batches}

    def _decoded(self, decoding: Decoding, began: float, ended: float) -> dict[str, Any]:
        return {"decoded_per_s": decoding.timeline.tokens_between(began, ended) / (ended - began)}


# -- cells, and what they come to --------------------------------------------------------------------------------------


def cells_of(options: argparse.Namespace) -> list[Cell]:
    """Alone first; whatever does not depend on rows or steps has 0 of them."""
    common = {name: getattr(options, name) for name in ("size", "tail", "groups", "prompt", "tokens", "micro_tokens")}
    common["group"] = GROUP  # cells without it: every row with a prompt of its own

    def cell(mode: str, rows: int, steps: int) -> Cell:
        return Cell("sharing", "native", {**common, "mode": mode, "rows": rows, "steps": steps})

    found = [cell("training", 0, 0)] if "training" in options.modes else []
    for rows in options.rows:
        found += [cell(mode, rows, 0) for mode in ("decode", "both") if mode in options.modes]
        found += [cell("turns", rows, steps) for steps in options.steps if "turns" in options.modes]
    return found


def shares(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For every cell of two at once: `decode_share`, `training_share` and their `sum`, largest sum first by rows."""
    own = [r for r in records if r["bench"] == "sharing" and "does_not_fit" not in r["results"]]
    fixed = ("size", "tail", "groups", "prompt", "tokens", "micro_tokens", "group")

    def alone(mode: str, record: Mapping[str, Any], *names: str) -> Mapping[str, Any] | None:
        wanted = {"mode": mode, **{name: record["parameters"].get(name) for name in names}}
        return next((r for r in own if all(r["parameters"].get(name) == wanted[name] for name in wanted)), None)

    found = []
    for record in own:
        if record["parameters"]["mode"] not in ("both", "turns"):
            continue
        decode, training = alone("decode", record, *fixed, "rows"), alone("training", record, *fixed)
        if decode is None or training is None:
            continue
        decode_share = record["results"]["decoded_per_s"] / decode["results"]["decoded_per_s"]
        training_share = record["results"]["trained_per_s"] / training["results"]["trained_per_s"]
        found.append(
            {
                **record["parameters"],
                "decode_share": decode_share,
                "training_share": training_share,
                "sum": decode_share + training_share,
                "one_sitting": len({r["sitting"] for r in (record, decode, training)}) == 1,
            }
        )
    return sorted(found, key=lambda each: (each["size"], each["rows"], -each["sum"]))


def name_of(each: Mapping[str, Any]) -> str:
    return f"turns of {each['steps']} steps" if each["mode"] == "turns" else "both at once"


def sum_of(each: Mapping[str, Any]) -> str:
    """The sum of the shares; a star where they were not measured in one sitting."""
    return f"{each['sum']:.2f}{'' if each['one_sitting'] else '*'}"


def print_best(cells: Cells) -> None:
    for (size, rows), found in itertools.groupby(
        shares(read_cells([*cells.known, cells.folder])), key=lambda each: (each["size"], each["rows"])
    ):
        best, *others = found
        print(
            f"{size}, {rows} rows: best is {name_of(best)}, shares {best['decode_share']:.2f} + "
            f"{best['training_share']:.2f} = {sum_of(best)}"
            + "".join(f"; {name_of(each)} {sum_of(each)}" for each in others),
            flush=True,
        )


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--size", default="1.7B")
    parser.add_argument("--modes", type=words, default=list(MODES))
    parser.add_argument("--rows", type=integers, default=[256, 128])
    parser.add_argument("--steps", type=integers, default=[8, 32], help="decode steps of a turn")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=512, help="of a completion that is decoded")
    parser.add_argument("--tail", choices=list(TAILS), default="published", help="of the completions trained on")
    parser.add_argument("--groups", type=int, default=16, help="groups of 8 an update")
    parser.add_argument("--updates", type=int, default=2, help="timed ones")
    parser.add_argument("--seconds", type=float, default=5.0, help="of decode alone")
    parser.add_argument("--prefill-tokens", type=int, default=8_192)
    parser.add_argument("--micro-tokens", type=int, default=16_384)
    options = parser.parse_args(arguments)
    if options.tiny:
        options.size, options.rows, options.steps, options.prompt, options.tokens = "tiny", [16], [2], 8, 12
        options.tail, options.groups, options.seconds = "tiny", 2, 0.2
        options.prefill_tokens, options.micro_tokens = 64, 256
    if any(rows % GROUP for rows in options.rows):
        parser.error(
            f"`--rows {','.join(map(str, options.rows))}`: rows come in groups of {GROUP}; give multiples of it"
        )
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    sys.setswitchinterval(SWITCH_S)
    cells = from_options(options)
    pending = cells.pending(cells_of(options))
    if pending:
        bench = Bench(options)
        for cell in pending:
            cells.measure(cell, lambda cell=cell: bench.measure(cell))
    print_best(cells)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
