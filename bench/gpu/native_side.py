"""Generation by the native engine, as the benches ask for it."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from bench.gpu.floor import traffic
from bench.gpu.shapes import RANK, SHAPES, adapter, base_weights, dtype_of, make_model
from bench.gpu.sides import SLOTS, Ask, Outcome, expect
from stretto.engines.native.engine import NativeEngine
from stretto.engines.threaded import Failed
from stretto.types import Request, Sampling

KV_SHARE = 0.88  # of the memory that is free beside the model; the rest is for graphs and activations
CPU_ROOM = 1 << 16  # tokens, where memory is not asked
QUEUED = 16  # that always wait for a row, so that several may end in one step
WARM_STEPS = 4  # before filled steps are timed, so that nothing is captured or compiled among them


class NativeSide:
    """The native engine over one model, with `versions` adapters loaded, or its base weights so many times.

    By default these are `SLOTS` adapters, or the base weights once.
    """

    name = "native"

    def __init__(
        self,
        size: str,
        *,
        lora: bool,
        device: str,
        prefill_tokens: int,
        versions: int | None = None,
        dtype: str | None = None,
        routing: bool = True,
    ) -> None:
        self.size, self.lora, self.device, self.prefill_tokens = size, lora, torch.device(device), prefill_tokens
        self.versions = (SLOTS if lora else 1) if versions is None else versions
        self.model = make_model(size, device, dtype=dtype)
        self.routing = routing and SHAPES[size].num_experts > 0  # requests ask for the experts of their tokens
        self.traffic = traffic(size, dtype_of(device, dtype))
        self._engine: NativeEngine | None = None
        self._next_id = 0

    @property
    def engine(self) -> NativeEngine:
        assert self._engine is not None, "`prepare` comes first"
        return self._engine

    def room(self) -> int:
        self._drop_engine()
        if self.device.type != "cuda":
            return CPU_ROOM
        free = torch.cuda.mem_get_info(self.device)[0]
        if not self.lora:
            free -= self.versions * self.traffic.all_bytes  # every slot has a copy of its own
        return int(KV_SHARE * free) // self.traffic.kv_bytes_per_token

    def prepare(self, rows: int, kv_tokens: int, max_context: int) -> None:
        self._drop_engine()
        engine = self._engine = NativeEngine(
            self.model,
            kind="lora" if self.lora else "full",
            slots=self.versions,
            rows=rows,
            kv_tokens=kv_tokens,
            max_context=max_context,
            lora_rank=RANK if self.lora else None,
            prefill_tokens=self.prefill_tokens,
            records_routing=self.routing,
        )
        make = adapter if self.lora else base_weights
        for version in range(self.versions):
            engine.load(make(self.model, version))

    def _drop_engine(self) -> None:
        if self._engine is not None:
            self._engine.close()
            self._engine = None
            gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def requests(self, asks: Sequence[Ask]) -> Iterator[Request]:
        """Requests under ids, groups and seeds that no earlier one had."""
        start = self._next_id
        self._next_id += len(asks)
        for id, ask in enumerate(asks, start):
            group = -1 if ask.group < 0 else start + ask.group
            yield Request(id, ask.version, ask.prompt, id, Sampling(ask.tokens, routing=self.routing), group=group)

    def generate(self, asks: Sequence[Ask]) -> Outcome:
        """Besides the whole, `step_ms`: from the end of the prefill to the first row that ends, when all rows decode.

        It is there only where every ask has a row at once.
        """
        engine, requests = self.engine, list(self.requests(asks))
        self.synchronize()
        before, captured, made = engine.report(), num_captured(engine), 0
        to_prefill = before.prefilled + _prompt_tokens(asks)
        full: list[tuple[float, int]] = []  # (time, steps) when all rows decode, and when the first ends
        began = time.perf_counter()
        for request in requests:
            engine.add(request)
        while engine.has_work:
            done = lengths(engine.step())
            made += sum(done)
            if (not full and (done or engine.report().prefilled >= to_prefill)) or (len(full) == 1 and done):
                full.append((time.perf_counter(), engine.report().steps))
        seconds = time.perf_counter() - began
        expect(made, asks)
        after = engine.report()
        details: dict[str, Any] = {
            "steps": after.steps - before.steps,
            "prefilled": after.prefilled - before.prefilled,
            "preemptions": after.preemptions - before.preemptions,
            "captured": num_captured(engine) - captured,
        }
        at_once = len(asks) <= engine.capacity.rows
        if at_once and len(full) == 2 and full[1][1] > full[0][1]:
            details["step_ms"] = 1e3 * (full[1][0] - full[0][0]) / (full[1][1] - full[0][1])
        return Outcome(seconds, made, details)

    def filled_steps(self, asks: Sequence[Ask], steps: int) -> Outcome:
        """Rows whose prefill came first are some steps ahead of the last; `context_mean` is what was really read."""
        engine, before = self.engine, self.engine.report()
        ahead = self.steps_ahead(asks)
        asked = [Ask(ask.prompt, steps + ahead + 2 * WARM_STEPS, ask.version) for ask in asks]
        requests = list(self.requests(asked))
        for request in requests:
            engine.add(request)
        to_prefill = before.prefilled + _prompt_tokens(asked)
        while engine.report().prefilled < to_prefill:
            _none(engine.step())
        for _ in range(WARM_STEPS):
            _none(engine.step())
        self.synchronize()
        load = engine.report()
        if load.running != len(asks) or load.preemptions > before.preemptions:
            raise RuntimeError(f"{load.running} of {len(asks)} rows run, {load.preemptions} were preempted")
        captured, began = num_captured(engine), time.perf_counter()
        for _ in range(steps):
            _none(engine.step())
        self.synchronize()
        seconds = time.perf_counter() - began
        made = engine.report().tokens - load.tokens
        tokens = (load.tokens - before.tokens) + made / 2  # decoded so far, in the middle of what was timed
        engine.abort([request.id for request in requests])
        context = sum(len(ask.prompt) for ask in asks) + tokens
        details = {"context_mean": context / len(asks), "step_ms": 1e3 * seconds / steps}
        return Outcome(seconds, made, {**details, "captured": num_captured(engine) - captured})

    def steps_ahead(self, asks: Sequence[Ask]) -> int:
        """Steps that prefilling prompts of one length takes, in which the first rows run ahead of the last."""
        longest = max(len(ask.prompt) for ask in asks)
        at_once = max(1, self.prefill_tokens // longest)
        return math.ceil(len(asks) / at_once) * math.ceil(longest / self.prefill_tokens)

    def sustained(self, first: Sequence[Ask], following: Iterator[Sequence[Ask]], warm: int, counted: int) -> Outcome:
        """Tokens and time while `counted` completions end, after `warm` of them, with every row always taken.

        `following` are whole groups, which enter when fewer than `QUEUED` wait for a row.
        """
        engine = self.engine
        for request in self.requests(first):
            engine.add(request)
        waiting = len(first) - engine.capacity.rows
        began, before, captured, ended = 0.0, engine.report(), 0, 0
        while ended < warm + counted:
            while waiting < QUEUED:
                group = next(following)
                for request in self.requests(group):
                    engine.add(request)
                waiting += len(group)
            done = len(lengths(engine.step()))
            ended, waiting = ended + done, waiting - done
            if not began and ended >= warm:
                self.synchronize()
                captured, began, before = num_captured(engine), time.perf_counter(), engine.report()
        self.synchronize()
        seconds, after = time.perf_counter() - began, engine.report()
        row_share = (after.row_s - before.row_s) / (seconds * engine.capacity.rows)
        details = {
            "steps": after.steps - before.steps,
            "prefilled": after.prefilled - before.prefilled,
            "preemptions": after.preemptions - before.preemptions,
            "captured": num_captured(engine) - captured,
            "rows_taken_share": row_share,
            "kv_tokens": after.kv_tokens,
        }
        engine.abort(list(range(self._next_id)))
        return Outcome(seconds, after.tokens - before.tokens, details)


def num_captured(engine: NativeEngine) -> int:
    """Captures so far. They should not grow in what is timed; on a CPU there are none."""
    return engine._steps._graphs.num_captured


def lengths(done: Sequence[Any]) -> list[int]:
    """Tokens of what has ended; a failure ends the bench."""
    for each in done:
        if isinstance(each, Failed):
            raise each.error
    return [len(each.tokens) for each in done]


def _none(done: Sequence[Any]) -> None:
    if lengths(done):
        raise RuntimeError("a row ended inside the timed steps: the tokens asked for were too few")


def _prompt_tokens(asks: Sequence[Ask]) -> int:
    """Tokens that have to be prefilled: a group's prompt once."""
    shared = {(ask.version, ask.group): len(ask.prompt) for ask in asks if ask.group >= 0}
    return sum(shared.values()) + sum(len(ask.prompt) for ask in asks if ask.group < 0)
