"""Whole runs through the real loop, core, engine, trainer and journal, with everything around them made up.

Prompts are random tokens, rewards are coins, and lengths are forced at the seam of the engine: `ForcedLengths` gives
every request the `max_tokens` of its trajectory. Draws hang on the trajectory's id alone, so that every paradigm is
given the same work, token for token. Nothing else of a run is changed.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.gpu.lengths import Tail as Lengths
from bench.gpu.native_side import num_captured
from bench.gpu.shapes import RANK, SHAPES, make_model
from bench.gpu.timeline import Timeline, Watched
from stretto.assembly.train import SWITCH_S
from stretto.core.controller import Controller
from stretto.core.plan import Plan
from stretto.engines.native.engine import NativeEngine
from stretto.engines.threaded import ThreadedEngine
from stretto.environments.prompt_order import Draw
from stretto.environments.protocol import Policy
from stretto.local.trainer import ThreadedTrainer
from stretto.models.lora_options import LoraOptions
from stretto.observe.metrics import JsonLines, Tally
from stretto.observe.progress import Silent
from stretto.run.loop import Loop, Settings
from stretto.run.task_play import TaskPlay
from stretto.store.journal import Journal
from stretto.store.schema import RunFacts
from stretto.training.options import TrainingOptions
from stretto.training.trainer import LocalTrainer
from stretto.types import (
    Batch,
    Capacity,
    Completion,
    EngineStats,
    Prompt,
    Request,
    Sample,
    Sampling,
    Suspended,
    Weights,
)

EPOCH = 1 << 20  # prompts before one comes again


class SyntheticPrompts:
    """An endless stream of random prompts of one length; a group's prompt hangs on its place in the stream alone."""

    num_rows = EPOCH

    def __init__(self, size: str, length: int, seed: int) -> None:
        self._vocabulary, self._length, self._seed = SHAPES[size].vocab_size, length, seed

    def prompt(self, index: int, row_number: int | None = None, task: str | None = None) -> Prompt:
        drawn = np.random.default_rng([self._seed, index]).integers(0, self._vocabulary, self._length)
        return Prompt(index, "", tuple(drawn.tolist()), {})

    def epoch(self, index: int) -> int:
        return index // EPOCH

    def row_number(self, index: int) -> int:
        return index % EPOCH

    def draw(self, index: int) -> Draw:
        return Draw(self.row_number(index), self.epoch(index), "shuffled")

    def scored(self, row_number: int, reward: float, task: str | None = None) -> None:
        """Rewards are coins: they change nothing."""

    def settle(self, update: int) -> None:
        """Rows come in their order, whatever was scored."""


class Coin:
    """An environment that asks once and rewards 0 or 1 by the trajectory's id."""

    async def episode(self, prompt: Prompt, policy: Policy) -> float:
        completion = await policy.generate(prompt.tokens)
        return float(np.random.default_rng([11, completion.id]).integers(0, 2))


class ForcedLengths:
    """An engine whose every trajectory has the length that `lengths` holds at its id, and no stop token.

    Without `lengths` trajectories end as they do. What is handed over has the sampling that was asked for, as the loop
    expects. `admitted_at` is when the last one so far was asked for.
    """

    def __init__(self, engine: ThreadedEngine, lengths: Sequence[int]) -> None:
        self._engine, self._lengths = engine, lengths
        self._asked: dict[int, Sampling] = {}  # of what may still be handed over
        self.admitted_at = 0.0

    @property
    def capacity(self) -> Capacity:
        return self._engine.capacity

    def report(self) -> EngineStats:
        return self._engine.report()

    def _forced(self, request: Request) -> Request:
        if not self._lengths:
            return request
        # Trajectories beyond the planned ones replace those that a paradigm dropped.
        tokens = self._lengths[request.id % len(self._lengths)]
        return replace(request, sampling=replace(request.sampling, max_tokens=tokens, stop_tokens=()))

    async def generate(self, request: Request) -> Completion:
        self.admitted_at = time.time()
        self._asked[request.id] = request.sampling
        return await self._engine.generate(self._forced(request))

    async def resume(self, suspended: Suspended) -> Completion:
        self._asked[suspended.request.id] = suspended.request.sampling
        return await self._engine.resume(replace(suspended, request=self._forced(suspended.request)))

    async def load(self, weights: Weights) -> None:
        await self._engine.load(weights)

    async def swap(self, old: int, weights: Weights) -> None:
        await self._engine.swap(old, weights)

    async def unload(self, version: int) -> None:
        await self._engine.unload(version)

    async def suspend(self, ids: Sequence[int], *, kv: bool) -> list[Suspended]:
        return [
            replace(each, request=replace(each.request, sampling=self._asked[each.request.id]))
            for each in await self._engine.suspend(ids, kv=kv)
        ]

    async def abort(self, ids: Sequence[int]) -> None:
        await self._engine.abort(ids)

    async def close(self) -> None:
        await self._engine.close()


class Marks(Silent):
    """What the engine had done when each update ended."""

    def __init__(self, engine: ThreadedEngine) -> None:
        self._engine = engine
        self.lines: list[dict[str, Any]] = []

    def updated(self, line: Mapping[str, Any]) -> None:
        load = self._engine.report()
        kept = ("update", "at", "tokens", "update_seconds", "cycle_seconds", "trainer_idle_seconds", "staleness_mean")
        done = {"generated": load.tokens, "steps": load.steps, "busy_s": load.busy_s, "row_s": load.row_s}
        self.lines.append({**{name: line[name] for name in kept}, **done, "prefilled": load.prefilled})
        print(
            f"  update {line['update']}: {line['tokens']:,} tokens, {line['cycle_seconds']:.1f} s, of which training "
            f"{line['update_seconds']:.1f} s; age {line['staleness_mean']:.2f}",
            flush=True,
        )


@dataclass(frozen=True, slots=True)
class Work:
    """What a run is given to do."""

    size: str
    plan: Plan
    prompt: int  # tokens
    lengths: Lengths | None  # None: `stop_tokens` end a completion
    max_tokens: int
    stop_tokens: tuple[int, ...] = ()
    kv_tokens: int = 0  # 0: what every row needs at its longest
    prefill_tokens: int = 8_192
    micro_tokens: int = 16_384
    seed: int = 0

    def drawn(self) -> list[int]:
        """The length of every planned trajectory, by its id."""
        count = self.plan.updates * self.plan.batch * self.plan.group_size
        return [] if self.lengths is None else self.lengths.draw(count, self.seed).tolist()


def build(work: Work, device: str) -> tuple[NativeEngine, LocalTrainer]:
    """Engine and trainer over one base, in the order of a real run: the trainer replaces layers of the loaded tree."""
    model, rows = make_model(work.size, device), work.plan.rows
    longest = work.prompt + work.max_tokens + 32
    engine = NativeEngine(
        model,
        kind="lora",
        slots=work.plan.slots,
        rows=rows,
        kv_tokens=work.kv_tokens or rows * longest,
        max_context=longest,
        lora_rank=RANK,
        prefill_tokens=work.prefill_tokens,
    )
    options = TrainingOptions(learning_rate=1e-5, steps=work.plan.updates, micro_tokens=work.micro_tokens)
    return engine, LocalTrainer(model, lora=LoraOptions(rank=RANK), options=options)


def synthetic_batch(update: int, lengths: Sequence[int], prompt: int, size: str, group: int = 8) -> Batch:
    """Samples of the given lengths with random tokens, rewards that are not all alike, log-probabilities as uniform."""
    vocabulary, draw = SHAPES[size].vocab_size, np.random.default_rng([5, update])
    samples = []
    for i, length in enumerate(lengths):
        tokens = draw.integers(0, vocabulary, length).astype(np.int32)
        completion = Completion(i, update, tokens, np.full(length, -np.log(vocabulary), np.float32), "length", "")
        asked = tuple(draw.integers(0, vocabulary, prompt).tolist())
        samples.append(Sample(i, i // group, update, asked, completion, float(i % 2)))
    return Batch(update, samples)


def warm_up(engine: NativeEngine, trainer: LocalTrainer, work: Work) -> None:
    """Let everything be compiled and captured that a run will use, and leave both as they were."""
    rows, initial = engine.capacity.rows, trainer.weights(0)
    engine.load(initial)
    prompts = SyntheticPrompts(work.size, work.prompt, seed=work.seed + 1)
    for i in range(rows):  # rows end one after another, so that every size of a batch occurs
        tokens = min(work.max_tokens, 4 + i // 4)
        engine.add(Request(i, 0, prompts.prompt(i // 8).tokens, i, Sampling(tokens), group=i // 8))
    while engine.has_work:
        engine.step()
    engine.unload(0)
    state = trainer.state()
    lengths = sorted(work.drawn()[:rows], reverse=True) or [min(work.max_tokens, 512)] * rows
    trainer.update(synthetic_batch(0, lengths[:: max(1, len(lengths) // 32)], work.prompt, work.size))
    trainer.restore(state)


async def run(work: Work, engine: NativeEngine, trainer: LocalTrainer, folder: Path) -> dict[str, Any]:
    """One run to its last update; its summary and what the engine had done when each update ended."""
    plan, timeline = work.plan, Timeline()
    threaded = ThreadedEngine(lambda: Watched(engine, timeline), name="engine")
    seam = ForcedLengths(threaded, work.drawn())
    role = ThreadedTrainer(trainer, torch.get_num_threads(), deadline_s=600.0)
    marks = Marks(threaded)
    at_start = threaded.report()
    try:
        with Journal.open(folder / "journal.sqlite", resume=False) as journal:
            journal.begin(_facts(plan, work.seed), at=time.time())
            weights = {0: trainer.weights(0)}
            journal.version_published(0, weights[0].checksum, at=time.time())
            tally = Tally(rows=plan.rows, sink=JsonLines(folder / "metrics.jsonl"))
            sampling = Sampling(work.max_tokens, stop_tokens=work.stop_tokens)
            loop = Loop(
                Controller(plan),
                engines={0: seam},  # type: ignore[dict-item]
                trainer=role,
                tasks=TaskPlay(Coin(), sampling),
                prompts=SyntheticPrompts(work.size, work.prompt, work.seed),  # type: ignore[arg-type]
                decode=lambda tokens: "",
                evaluator=None,
                journal=journal,
                tally=tally,
                observer=marks,
                settings=Settings(seed=work.seed, stall_s=600.0),
                weights=weights,
                rollouts={},
            )
            started = time.time()
            if not await loop.run():
                raise RuntimeError("the run was stopped before its last update")
            journal.finished(stopped=False, at=time.time())
            await journal.durable()
    finally:
        await threaded.close()
        role.close()
    after = threaded.report()
    totals = {
        "generated": after.tokens - at_start.tokens,
        "prefilled": after.prefilled - at_start.prefilled,
        "preemptions": after.preemptions - at_start.preemptions,
        "steps": after.steps - at_start.steps,
        "captured": num_captured(engine),  # graphs of steps, those of the warm-up included
    }
    return {
        "started": started,
        "admitted_at": seam.admitted_at,
        "timeline": timeline,
        "summary": tally.summary(),
        "marks": marks.lines,
        "engine": totals,
    }


def _facts(plan: Plan, seed: int) -> RunFacts:
    return RunFacts(
        paradigm=plan.paradigm.name,
        staleness=plan.staleness,
        auto=plan.auto,
        batch=plan.batch,
        group=plan.group_size,
        updates=plan.updates,
        seed=seed,
        data_rows=EPOCH,
        retries=plan.retries,
        laws_broken=plan.paradigm.breaks,
    )


def run_once(work: Work, device: str, folder: Path) -> dict[str, Any]:
    """Build, warm up, run, under the interpreter's settings of a real run."""
    sys.setswitchinterval(SWITCH_S)
    began = time.perf_counter()
    engine, trainer = build(work, device)
    warm_up(engine, trainer, work)
    ready = time.perf_counter() - began
    print(f"  {work.plan.paradigm.name}: ready after {ready:.1f} s", flush=True)
    return {"ready_s": ready, **asyncio.run(run(work, engine, trainer, folder))}
