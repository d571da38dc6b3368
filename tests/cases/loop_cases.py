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

from stretto.core import messages as core
from stretto.core.controller import Controller
from stretto.core.ledger import TrajectoryState
from stretto.core.paradigms import PARADIGMS
from stretto.core.plan import Plan, resolve_plan
from stretto.core.snapshots import Snapshot
from stretto.engines.fake import FakeEngine
from stretto.engines.protocol import Engine
from stretto.engines.threaded import SteppedEngine
from stretto.environments.data import PromptStream, Row
from stretto.environments.prompt_order import PassRates
from stretto.environments.protocol import Policy
from stretto.environments.single_turn import SingleTurn
from stretto.local.pool import LocalPool
from stretto.local.trainer import ThreadedTrainer
from stretto.observe.metrics import JsonLines, Tally, Totals
from stretto.observe.progress import Silent
from stretto.run.evaluation import Evaluator
from stretto.run.loop import Loop, Settings
from stretto.run.rollout import Rollout, RolloutState
from stretto.run.task_play import TaskPlay
from stretto.store.journal import Journal
from stretto.store.resume_point import progress_of
from stretto.store.schema import RunFacts
from stretto.store.verify import Finding, exit_code, verify
from stretto.training.fake import FakeTrainer
from stretto.types import Completion, EvaluationResult, Prompt, Request, Sampling, Weights


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


def direct(score: Callable[[str], float] | None = None) -> SingleTurn:
    """An environment of one turn, scored in the loop's own thread: rollouts take the direct path."""

    class Scores:
        async def score(self, prompt: str, completion: str, row: Mapping[str, Any], details: object = None) -> float:
            return float(sum(map(ord, completion)) % 5) if score is None else score(completion)

    return SingleTurn(Scores(), lambda tokens: " ".join(map(str, tokens)))


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


class CheckedLoop(Loop):
    """A loop that compares its rollouts with the core's ledger after each event."""

    def _handle(self, event: core.Event) -> None:
        super()._handle(event)
        check_against_ledger(self)


_AHEAD = {RolloutState.SCORING, RolloutState.SCORED}  # the event that says so is still in the loop's queue
STATES_OF = {  # what a rollout may be while the core has its trajectory as this
    TrajectoryState.RUNNING: {
        RolloutState.PLACED,
        RolloutState.GENERATING,
        RolloutState.BETWEEN_TURNS,
        RolloutState.WAITING,  # it failed, or its instance is lost: that event is queued too
        RolloutState.SUSPENDING,  # the same, before the instance that it came from has handed it over
        *_AHEAD,
    },
    TrajectoryState.BETWEEN_TURNS: {
        RolloutState.PLACED,
        RolloutState.BETWEEN_TURNS,
        RolloutState.GENERATING,  # it has asked: that event is queued
        RolloutState.WAITING,
        RolloutState.SUSPENDING,
        *_AHEAD,
    },
    TrajectoryState.SCORING: _AHEAD,
    TrajectoryState.SCORED: {RolloutState.SCORED},
}
WITHOUT_INSTANCE = {RolloutState.WAITING, RolloutState.SUSPENDING, *_AHEAD}


def check_against_ledger(loop: Loop) -> None:
    """The core's ledger decides which trajectories exist; the loop has a rollout for each, and for no other.

    The ledger keeps what has failed until its group ends, which needs nothing of the loop any more.
    """
    known = {
        id: each for id, each in loop.controller.ledger.trajectories.items() if each.state is not TrajectoryState.FAILED
    }
    assert loop.rollouts.keys() == known.keys()
    for id, trajectory in known.items():
        rollout = loop.rollouts[id]
        waits = trajectory.state < TrajectoryState.RUNNING
        trains = trajectory.state > TrajectoryState.SCORED
        expected = WITHOUT_INSTANCE if waits else {RolloutState.SCORED} if trains else STATES_OF[trajectory.state]
        assert rollout.state in expected, (rollout.state, trajectory.state)
        if trajectory.state is TrajectoryState.BETWEEN_TURNS and rollout.state is RolloutState.GENERATING:
            assert core.TurnAsked(id) in loop._events, "a trajectory that generates takes a row"
        if rollout.instance is not None and trajectory.instance is not None:
            assert rollout.instance == trajectory.instance.id


@dataclass
class Bench:
    """A run of fakes in a folder; `run` once."""

    folder: Path
    plan: Plan
    engines: Sequence[Engine] = field(default_factory=lambda: [FakeEngine()])
    trainer: FakeTrainer = field(default_factory=FakeTrainer)
    environment: Any = field(default_factory=InProcess)
    stall_s: float = 20.0
    reward_s: float = 0.0
    update_s: float = 20.0
    snapshot: Snapshot | None = None
    rollouts: Mapping[int, Rollout] = field(default_factory=dict)
    weights: Mapping[int, Weights] | None = None
    watcher: Watcher = field(default_factory=Watcher)
    kept: Mapping[int, Rollout] | None = None
    pass_rates: PassRates | None = None
    rows: Sequence[Row] = tuple(Row(text=f"{n}+{n}=", columns={"answer": 2 * n}) for n in range(64))
    prepare: Callable[[Bench], None] = lambda bench: None
    make: Callable[[int], SteppedEngine] | None = None  # makes the core of an instance, where there is a pool of them
    instances: int = 1  # of that pool
    replacements: int = 0
    instance_s: float = 20.0
    max_turns: int = 1
    max_lineages: int = 1
    max_context: int | None = None
    greedy: bool = False  # evaluations answer greedily too
    rebalance_s: float = 5.0
    beside: Callable[[Bench], Coroutine[Any, Any, None]] | None = None  # runs beside the loop

    def run(self) -> bool:
        return asyncio.run(self._run())

    async def _run(self) -> bool:
        role = ThreadedTrainer(self.trainer, 1, deadline_s=self.update_s)
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
            laws_broken=plan.paradigm.breaks,
        )
        weights = self.weights
        pool = None if self.make is None else LocalPool(map(self.make, count()).__next__)
        try:
            for _ in range(0 if pool is None else self.instances):
                assert pool is not None
                await pool.add()
            journal.begin(facts, at=time.time())
            if self.snapshot is None:
                controller = Controller(plan)
                weights = {0: self.trainer.weights(0)}
                journal.version_published(0, weights[0].checksum, at=time.time())
            else:
                controller = Controller.restore(plan, self.snapshot)
            progress = progress_of(journal.path)
            totals = Totals() if progress is None else Totals.from_json(progress.totals, progress.lines)
            self.tally = Tally(rows=plan.rows, sink=JsonLines(self.folder / "metrics.jsonl"), totals=totals)
            evaluator = Evaluator(
                prompts, 4, tasks=TaskPlay(InProcess(), sampling), seed=0, journal=journal, greedy=self.greedy
            )
            self.loop = CheckedLoop(
                controller,
                engines=dict(enumerate(self.engines)) if pool is None else pool,
                trainer=role,
                tasks=TaskPlay(
                    self.environment,
                    sampling,
                    max_turns=self.max_turns,
                    max_lineages=self.max_lineages,
                    max_context=self.max_context,
                    episode_s=self.stall_s + self.reward_s,
                ),
                prompts=prompts,
                decode=lambda tokens: " ".join(map(str, tokens)),
                evaluator=evaluator,
                journal=journal,
                tally=self.tally,
                observer=self.watcher,
                settings=Settings(
                    seed=0,
                    stall_s=self.stall_s,
                    reward_s=self.reward_s,
                    instance_s=self.instance_s,
                    replacements=self.replacements,
                    rebalance_s=self.rebalance_s,
                    vocabulary=100,
                ),
                weights=weights or {},
                rollouts={id: _anew(rollout) for id, rollout in self.rollouts.items()},
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


def _anew(rollout: Rollout) -> Rollout:
    """What a run that is taken up knows of a trajectory: nothing of where it was and what was asked for it."""
    again = Rollout(
        rollout.id, rollout.group, rollout.version, rollout.seed, rollout.prompt, rollout.row_number,
        lineages=rollout.lineages, reward=rollout.reward, suspended=rollout.suspended,
        turn_rewards=rollout.turn_rewards,
    )  # fmt: skip
    again.turns = rollout.turns
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
