"""A run over the fakes: a real core, a real journal, engines and a trainer without a model."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from stretto.core.brain import Brain
from stretto.core.paradigms import PARADIGMS
from stretto.core.plan import Plan, resolve_plan
from stretto.engines.fake import FakeEngine
from stretto.engines.protocol import Engine
from stretto.engines.threaded import Core
from stretto.environments.data import PromptStream, Row
from stretto.environments.order import PassRates
from stretto.environments.protocol import Policy
from stretto.evaluation import EvaluationResult, Evaluator
from stretto.flight import Flight
from stretto.loop import Loop, Settings
from stretto.observe.metrics import JsonLines, Tally, Totals
from stretto.observe.progress import Silent
from stretto.runtime.pool import LocalPool
from stretto.runtime.roles import TrainerRole
from stretto.store.journal import Journal
from stretto.store.schema import RunFacts
from stretto.store.verify import Finding, exit_code, verify
from stretto.training.fake import FakeTrainer
from stretto.types import Completion, Prompt, Request, Sampling, Weights


class Characters:
    """A tokenizer: one token a character."""

    chat_template = None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(character) for character in text]

    def __call__(self, texts: Sequence[str], add_special_tokens: bool = True) -> dict[str, list[list[int]]]:
        return {"input_ids": [self.encode(text) for text in texts]}


class InProcess:
    """An environment that scores in the loop's own thread; `score` sees the prompt, the completion and the try."""

    def __init__(self, score: Callable[[Prompt, Completion, int], float] | None = None) -> None:
        self.score = score or (lambda prompt, completion, attempt: float(completion.tokens[-1] % 5))
        self.attempts: Counter[int] = Counter()

    async def episode(self, prompt: Prompt, policy: Policy) -> float:
        completion = await policy.generate(prompt.tokens)
        self.attempts[completion.id] += 1
        return self.score(prompt, completion, self.attempts[completion.id])


class CountingEngine(FakeEngine):
    """Remembers every request that it was given."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.requests: list[Request] = []

    async def generate(self, request: Request) -> Completion:
        self.requests.append(request)
        return await super().generate(request)


class Watcher(Silent):
    """Calls back after each update."""

    def __init__(self) -> None:
        self.after_update: Callable[[Mapping[str, Any]], None] = lambda line: None
        self.evaluations: list[EvaluationResult] = []

    def updated(self, line: Mapping[str, Any]) -> None:
        self.after_update(line)

    def evaluated(self, result: EvaluationResult) -> None:
        self.evaluations.append(result)


@dataclass
class Bench:
    """A run of fakes in a folder; `run` once."""

    folder: Path
    plan: Plan
    engines: Sequence[Engine] = field(default_factory=lambda: [FakeEngine()])
    trainer: FakeTrainer = field(default_factory=FakeTrainer)
    environment: InProcess = field(default_factory=InProcess)
    stall_s: float = 20.0
    reward_s: float = 0.0
    update_s: float = 20.0
    snapshot: Mapping[str, Any] | None = None
    flights: Mapping[int, Flight] = field(default_factory=dict)
    weights: Mapping[int, Weights] | None = None
    watcher: Watcher = field(default_factory=Watcher)
    kept: Mapping[int, Flight] | None = None
    pass_rates: PassRates | None = None
    rows: Sequence[Row] = tuple(Row(text=f"{n}+{n}=", columns={"answer": 2 * n}) for n in range(64))
    prepare: Callable[[Bench], None] = lambda bench: None
    make: Callable[[int], Core] | None = None  # makes the core of an instance, where there is a pool of them
    instances: int = 1  # of that pool
    replacements: int = 0
    instance_s: float = 20.0
    max_turns: int = 1
    rebalance_s: float = 5.0
    beside: Callable[[Bench], Coroutine[Any, Any, None]] | None = None  # runs beside the loop

    def run(self) -> bool:
        return asyncio.run(self._run())

    async def _run(self) -> bool:
        role = TrainerRole(self.trainer, 1, deadline_s=self.update_s)
        journal = Journal.open(self.folder / "journal.sqlite", resume=self.snapshot is not None, interval_s=0.01)
        self.journal = journal
        prompts = PromptStream(self.rows, Characters(), seed=0, max_prompt_tokens=64, pass_rates=self.pass_rates)
        sampling = Sampling(max_tokens=64)
        plan = self.plan
        facts = RunFacts(
            plan.paradigm.name,
            plan.staleness,
            plan.auto,
            plan.batch,
            plan.group_size,
            plan.updates,
            seed=0,
            data_rows=prompts.num_rows,
            retries=plan.retries,
            filter_limit=plan.filter_limit,
            order="shuffled" if self.pass_rates is None else "pass-rate",
            replay_groups=plan.replay_groups,
            replay_uses=plan.replay_uses,
        )
        weights = self.weights
        pool = None if self.make is None else LocalPool(map(self.make, count()).__next__)
        try:
            for _ in range(0 if pool is None else self.instances):
                assert pool is not None
                await pool.add()
            journal.begin(facts, at=time.time())
            if self.snapshot is None:
                brain = Brain(plan)
                weights = {0: self.trainer.weights(0)}
                journal.version_published(0, weights[0].checksum, at=time.time())
            else:
                brain = Brain.restore(plan, self.snapshot)
            self.tally = Tally(rows=plan.rows, sink=JsonLines(self.folder / "metrics.jsonl"), totals=Totals())
            evaluator = Evaluator(prompts, 4, environment=InProcess(), sampling=sampling, seed=0, journal=journal)
            self.loop = Loop(
                brain,
                engines=dict(enumerate(self.engines)) if pool is None else pool,
                trainer=role,
                environment=self.environment,
                prompts=prompts,
                decode=lambda tokens: " ".join(map(str, tokens)),
                evaluator=evaluator,
                journal=journal,
                tally=self.tally,
                observer=self.watcher,
                settings=Settings(
                    seed=0,
                    sampling=sampling,
                    stall_s=self.stall_s,
                    reward_s=self.reward_s,
                    episode_s=self.stall_s + self.reward_s,
                    instance_s=self.instance_s,
                    replacements=self.replacements,
                    rebalance_s=self.rebalance_s,
                    vocabulary=100,
                    max_turns=self.max_turns,
                ),
                weights=weights or {},
                flights={id: _anew(flight) for id, flight in self.flights.items()},
                kept=self.kept,
            )
            self.prepare(self)
            beside = None if self.beside is None else asyncio.create_task(self.beside(self))
            try:
                done = await self.loop.run()
            finally:
                if beside is not None:
                    beside.cancel()
                    await asyncio.gather(beside, return_exceptions=True)
                left = asyncio.all_tasks() - {asyncio.current_task()}
                self.tasks_left = sorted(task.get_name() for task in left)
            journal.finished(stopped=not done, at=time.time())
            await journal.durable()
            return done
        finally:
            if pool is not None:
                await pool.close()
            for engine in self.engines:
                await engine.close()
            role.close()
            journal.close()


def _anew(flight: Flight) -> Flight:
    """What a run that is taken up knows of a trajectory: nothing of where it was and what was asked for it."""
    again = Flight(
        flight.id, flight.group, flight.version, flight.seed, flight.prompt, flight.row_number,
        completion=flight.completion, reward=flight.reward, suspended=flight.suspended,
        turn_rewards=flight.turn_rewards,
    )  # fmt: skip
    again.turns = flight.turns
    return again


def plan(paradigm: str = "multi-version", **options: Any) -> Plan:
    if PARADIGMS[paradigm].staleness is None:
        options.setdefault("staleness", 2)
    return resolve_plan(paradigm, **{"batch": 3, "group_size": 4, "updates": 6, "retries": 2, **options})


def broken(folder: Path) -> list[str]:
    """What `verify` finds, and it must agree with its own exit status."""
    findings: list[Finding] = verify(folder)
    details = [detail for finding in findings for detail in finding.details]
    assert (exit_code(findings) == 0) == (not details)
    return details
