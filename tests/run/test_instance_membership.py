"""Instances that die, hang, lie, join and leave while a run goes on: what is done about each, and that it verifies."""

from __future__ import annotations

import asyncio
import random
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from loop_cases import Bench, InProcess, broken, direct, plan

from stretto.engines import threaded
from stretto.engines.fake import FakeSteppedEngine
from stretto.engines.threaded import Failed
from stretto.environments.protocol import Policy
from stretto.errors import ChecksumError, EngineError, RunError
from stretto.training.fake import FakeTrainer
from stretto.types import Completion, Prompt, Weights

FAST: dict[str, Any] = {"rows": 12, "step_s": 0.0005, "sigma": 1.3}


def rows(folder: Path, query: str) -> list[Any]:
    with sqlite3.connect(folder / "journal.sqlite") as db:
        return db.execute(query).fetchall()


def outcomes(folder: Path) -> list[tuple[int, str | None]]:
    return rows(folder, "SELECT instance, outcome FROM instances ORDER BY instance")


def notes(folder: Path, kind: str) -> list[str]:
    return [text for (text,) in rows(folder, f"SELECT text FROM notes WHERE kind = '{kind}' ORDER BY id")]


def dies_after(steps: int) -> Callable[[int], FakeSteppedEngine]:
    """The first instance dies; later ones live."""
    return lambda instance: FakeSteppedEngine(**FAST, die_after=steps if instance == 0 else None)


# -- one that dies -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("paradigm", ["multi-version", "partial", "drop", "synchronous"])
def test_one_that_dies_is_replaced_and_nothing_is_lost_but_its_kv(paradigm: str, tmp_path: Path) -> None:
    bench = Bench(tmp_path, plan(paradigm), make=dies_after(20), replacements=1)
    assert bench.run()
    assert bench.tasks_left == []
    assert broken(tmp_path) == []
    assert outcomes(tmp_path) == [(0, "lost"), (1, None)]
    assert notes(tmp_path, "instance replaced") == ["0 by 1"]
    assert "told to die after 20 steps" in notes(tmp_path, "instance lost")[0]
    totals = bench.tally.totals
    assert (totals.instances_lost, totals.instances_replaced, totals.failed) == (1, 1, 0)
    assert totals.moves == len(rows(tmp_path, "SELECT * FROM moves WHERE source = 0 AND target = 1")) > 0
    assert totals.prefilled_again == rows(tmp_path, "SELECT SUM(prefilled) FROM moves")[0][0] > 0


def test_the_run_ends_with_its_error_where_none_is_left_and_no_more_are_replaced(tmp_path: Path) -> None:
    bench = Bench(tmp_path, plan(), make=lambda instance: FakeSteppedEngine(**FAST, die_after=20), replacements=2)
    with pytest.raises(EngineError, match="told to die after 20 steps"):
        bench.run()
    assert bench.tasks_left == []
    assert [instance for instance, _ in outcomes(tmp_path)] == [0, 1, 2]


def test_one_that_cannot_be_replaced_is_missed_while_others_live(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stretto.run.instance_membership.RETRY_S", (0.01, 0.02))

    def make(instance: int) -> FakeSteppedEngine:
        if instance > 1:
            raise MemoryError("none left")
        return dies_after(20)(instance)

    bench = Bench(tmp_path, plan(), make=make, instances=2, replacements=3)
    assert bench.run()
    assert broken(tmp_path) == []
    assert outcomes(tmp_path) == [(0, "lost"), (1, None)]
    assert len(notes(tmp_path, "instance not made")) == 3


def test_a_trajectory_that_kills_every_instance_fails_by_itself_and_the_run_goes_on(tmp_path: Path) -> None:
    class Poisoned(FakeSteppedEngine):
        def step(self) -> list[Completion | Failed]:
            if 5 in self._running or 5 in self._queue:
                raise MemoryError("too much for me")
            return super().step()

    bench = Bench(tmp_path, plan(updates=3), make=lambda _: Poisoned(**FAST), instances=2, replacements=16)
    assert bench.run()
    assert broken(tmp_path) == []
    ((state, error),) = rows(tmp_path, "SELECT state, error FROM trajectories WHERE trajectory = 5")
    assert state == "failed"
    assert "instances were lost while it ran on them, the last because" in error
    totals = bench.tally.totals
    assert (totals.trained, totals.failed) == (3 * 3 * 4 - 1, 1), "none of those beside it"
    assert totals.instances_lost == 4 + 3, "four until it is quarantined, and three tries"


def test_a_quarantined_trajectory_that_kills_the_last_instance_ends_the_run_with_its_error(tmp_path: Path) -> None:
    class Poisoned(FakeSteppedEngine):
        def step(self) -> list[Completion | Failed]:
            if 5 in self._running or 5 in self._queue:
                raise MemoryError("too much for me")
            return super().step()

    wanted = plan("synchronous", updates=1, retries=9)  # all of it runs from the start, so all are quarantined
    bench = Bench(tmp_path, wanted, make=lambda _: Poisoned(**FAST), replacements=6, stall_s=5.0)
    with pytest.raises(EngineError, match="too much for me"):
        bench.run()
    assert bench.tasks_left == []


# -- one that hangs ----------------------------------------------------------------------------------------------------


class Hangs(FakeSteppedEngine):
    """Stops for good in its tenth step, or when a version is loaded."""

    go_on = threading.Event()

    def __init__(self, where: str) -> None:
        super().__init__(**FAST)
        self._where = where

    def step(self) -> list[Completion | Failed]:
        if self._where == "step" and self._counters.steps == 10:
            self.go_on.wait()
        return super().step()

    def load(self, weights: Weights) -> None:
        if self._where == "load" and weights.version == 1:
            self.go_on.wait()
        super().load(weights)


@pytest.mark.parametrize("where", ["step", "load"])
def test_one_that_hangs_is_replaced_after_its_deadline(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threaded, "CLOSE_S", 0.1)
    Hangs.go_on.clear()

    def make(instance: int) -> FakeSteppedEngine:
        if instance == 0:
            return Hangs(where)
        bench.loop.instances._deadline_s = 60.0  # the one that replaces it may be slow, as the machine is
        return FakeSteppedEngine(**FAST)

    bench = Bench(tmp_path, plan(), make=make, replacements=1, instance_s=0.3)
    try:
        assert bench.run()
    finally:
        Hangs.go_on.set()
    assert broken(tmp_path) == []
    assert outcomes(tmp_path) == [(0, "lost"), (1, None)]
    (reason,) = notes(tmp_path, "instance lost")
    assert "0.3 s (`runtime.instance_seconds`)" in reason


@pytest.mark.slow
def test_one_that_is_slow_but_moves_is_not_lost(tmp_path: Path) -> None:
    bench = Bench(
        tmp_path,
        plan(updates=2),
        make=lambda _: FakeSteppedEngine(rows=12, step_s=0.15, median_tokens=20.0, sigma=0.3),
        instance_s=2.0,  # a generation takes longer, a step much less
    )
    assert bench.run()
    assert outcomes(tmp_path) == [(0, None)]


# -- one that lies -----------------------------------------------------------------------------------------------------


def _logprob(value: float) -> Callable[[Completion], Completion]:
    def change(done: Completion) -> Completion:
        return replace(done, logprobs=np.append(done.logprobs[:-1], np.float32(value)))

    return change


LIES: dict[str, Callable[[Completion], Completion]] = {
    "with weights `other`": lambda done: replace(done, checksum="other"),
    "with tokens of versions [7]": lambda done: replace(done, version=7),
    "with a log-probability of nan": _logprob(float("nan")),
    "with a log-probability of 0.5": _logprob(0.5),
    "outside of the vocabulary": lambda done: replace(done, tokens=done.tokens + 100),
    "tokens and": lambda done: replace(done, tokens=np.append(done.tokens, done.tokens[:1])),
    "with 0 tokens": lambda done: replace(done, tokens=done.tokens[:0], logprobs=done.logprobs[:0]),
}


@pytest.mark.parametrize("lie", LIES)
def test_one_that_answers_with_something_else_is_lost_and_nothing_of_that_is_trained_on(
    lie: str, tmp_path: Path
) -> None:
    class Lies(FakeSteppedEngine):
        def step(self) -> list[Completion | Failed]:
            ended = super().step()
            return [LIES[lie](each) if isinstance(each, Completion) and each.id == 5 else each for each in ended]

    def make(instance: int) -> FakeSteppedEngine:
        return Lies(**FAST) if instance == 0 else FakeSteppedEngine(**FAST)

    bench = Bench(tmp_path, plan(updates=3), make=make, replacements=1)
    assert bench.run()
    assert broken(tmp_path) == []
    (reason,) = notes(tmp_path, "instance lost")
    assert "was asked for trajectory 5 under version 0" in reason
    assert lie in reason
    assert bench.tally.totals.failed == 0


def test_a_version_that_arrives_damaged_is_sent_again_and_then_the_instance_is_lost(tmp_path: Path) -> None:
    class Damages(FakeSteppedEngine):
        def __init__(self, times: int) -> None:
            super().__init__(**FAST)
            self.times = times

        def load(self, weights: Weights) -> None:
            if weights.version == 1 and self.times:
                self.times -= 1
                raise ChecksumError("other bits")
            super().load(weights)

    times = [2, 3, 0]
    bench = Bench(tmp_path, plan(), make=lambda n: Damages(times[n]), instances=2, replacements=1)
    assert bench.run()
    assert broken(tmp_path) == []
    assert outcomes(tmp_path) == [(0, None), (1, "lost"), (2, None)]
    assert len(notes(tmp_path, "damaged transfer")) == 5


# -- an environment that never returns ---------------------------------------------------------------------------------


def test_an_environment_that_never_returns_fails_its_trajectory_alone(tmp_path: Path) -> None:
    class Sleeps(InProcess):
        async def episode(self, prompt: Prompt, policy: Policy) -> float:
            completion = await policy.generate(prompt.tokens)
            self.attempts[completion.id] += 1
            if completion.id in (2, 7) and self.attempts[2] < 2:
                await asyncio.sleep(60)
            return self.score(prompt, completion, self.attempts[completion.id])

    bench = Bench(tmp_path, plan(retries=1), environment=Sleeps(), stall_s=0.4, reward_s=0.2)
    began = time.monotonic()
    assert bench.run()
    assert time.monotonic() - began < 15
    assert broken(tmp_path) == []
    failures = rows(tmp_path, "SELECT trajectory, kind, reason FROM failures")
    assert {(trajectory, kind) for trajectory, kind, _ in failures} <= {(2, "scoring"), (7, "scoring")}
    assert "the environment has not returned for 0.6 s" in failures[0][2]


# -- joining and leaving -----------------------------------------------------------------------------------------------


def test_one_that_is_asked_to_go_hands_its_trajectories_over_first(tmp_path: Path) -> None:
    left: list[Any] = []

    async def remove_one(bench: Bench) -> None:
        while not bench.loop.instances.report_of(1).running:
            await asyncio.sleep(0.005)
        with pytest.raises(RunError, match="there is no instance 7; there are: 0, 1"):
            await bench.loop.instances.remove(7)
        left.append(await bench.loop.instances.remove(1))
        with pytest.raises(RunError, match="instance 0 is the last one"):
            await bench.loop.instances.remove(0)
        left.append(await bench.loop.instances.add())

    bench = Bench(
        tmp_path,
        plan(updates=12),
        make=lambda _: FakeSteppedEngine(rows=12, step_s=0.002, sigma=1.3),
        instances=2,
        beside=remove_one,
        trainer=FakeTrainer(update_s=0.02),
    )
    assert bench.run()
    assert left == [None, 2]
    assert broken(tmp_path) == []
    assert outcomes(tmp_path) == [(0, None), (1, "removed"), (2, None)]
    assert rows(tmp_path, "SELECT COUNT(*) FROM moves WHERE source = 1")[0][0] > 0
    assert bench.tally.totals.failed == 0


def test_the_last_one_stays_although_it_was_asked_to_go_and_says_so(tmp_path: Path) -> None:
    said: list[str] = []

    async def remove_the_other(bench: Bench) -> None:
        instances = bench.loop.instances
        while not instances.report_of(1).running:
            await asyncio.sleep(0.002)
        leaving = asyncio.create_task(instances.remove(1))
        await asyncio.sleep(0)  # it is asked, and the core has not heard of it yet
        instances.lose(0, EngineError("gone"))
        with pytest.raises(RunError) as refused:
            await leaving
        said.append(str(refused.value))

    bench = Bench(
        tmp_path, plan(updates=4), make=lambda _: FakeSteppedEngine(**FAST), instances=2, beside=remove_the_other
    )
    assert bench.run()
    assert broken(tmp_path) == []
    assert said == ["instance 1 stays, as all others were lost: add another before it goes"]
    assert outcomes(tmp_path) == [(0, "lost"), (1, None)]


def test_time_without_an_instance_is_not_idle_time_of_it(tmp_path: Path) -> None:
    async def add_late(bench: Bench) -> None:
        await asyncio.sleep(0.2)
        await bench.loop.instances.add()

    bench = Bench(tmp_path, plan(updates=20), make=lambda _: FakeSteppedEngine(**FAST), beside=add_late)
    assert bench.run()
    totals = bench.tally.totals
    assert totals.rollout_s < 2 * totals.wall_s - 0.1
    assert totals.rollout_busy_s < totals.rollout_s


# -- all of it at once -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.slow
def test_a_soak_of_hundreds_of_updates_with_instances_that_come_and_go_and_die(slots: int, tmp_path: Path) -> None:
    chance = random.Random(slots)

    def make(instance: int) -> FakeSteppedEngine:
        dies = chance.randrange(50, 600) if chance.random() < 0.5 else None
        return FakeSteppedEngine(rows=16, slots=slots, median_tokens=6.0, sigma=1.2, die_after=dies)

    async def come_and_go(bench: Bench) -> None:
        instances = bench.loop.instances
        while True:
            await asyncio.sleep(chance.uniform(0.01, 0.1))
            if len(instances.engines) < 4:
                await instances.add()
            elif len(instances.engines) > 6 or chance.random() < 0.5:
                there: Sequence[int] = sorted(set(instances.engines) - instances.leaving)
                await instances.remove(chance.choice(there))
            else:
                await instances.add()

    bench = Bench(
        tmp_path,
        plan(staleness=2, batch=4, group_size=2, updates=300),
        make=make,
        instances=4,
        replacements=10_000,
        rebalance_s=0.05,
        beside=come_and_go,
        environment=direct() if slots == 1 else InProcess(),
    )
    assert bench.run()
    assert broken(tmp_path) == []
    assert bench.tally.totals.trained == 300 * 4 * 2
    assert bench.tally.totals.failed == 0
    ended = [outcome for _, outcome in outcomes(tmp_path)]
    assert ended.count("lost") > 5
    assert ended.count("removed") > 5
