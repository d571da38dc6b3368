"""The loop over the fakes: a real core, a real journal, engines and a trainer without a model."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from loop_cases import Bench, Characters, CountingEngine, InProcess, broken, check_against_ledger, direct, plan

from stretto.core.controller import Controller
from stretto.core.ledger import TrajectoryState
from stretto.core.paradigms import PARADIGMS
from stretto.engines.fake import FakeEngine
from stretto.engines.protocol import Engine
from stretto.environments import data
from stretto.environments.data import PromptStream, Row
from stretto.environments.protocol import Environment, Policy
from stretto.errors import (
    EngineError,
    JournalError,
    RewardError,
    StalledError,
    StrettoError,
    TrainerError,
    TransitionError,
)
from stretto.run.evaluation import Evaluator
from stretto.run.recovery import snapshot
from stretto.run.rollout import RolloutState
from stretto.store.reader import JournalReader
from stretto.training.fake import FakeTrainer
from stretto.types import Batch, Completion, EvaluationResult, Prompt, Request, UpdateReport, Weights

# -- to the end --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("environment", [InProcess, direct])
@pytest.mark.parametrize("ahead", [False, True], ids=["", "ahead"])
@pytest.mark.parametrize("paradigm", list(PARADIGMS))
def test_every_paradigm_runs_to_its_end_and_verifies(
    paradigm: str, ahead: bool, environment: Callable[[], Environment], tmp_path: Path
) -> None:
    bench = Bench(
        tmp_path,
        plan(paradigm, evaluate_every=2, ahead=ahead),
        engines=[FakeEngine(rows=36 if ahead else 12, step_s=0.0005, sigma=1.3)],
        trainer=FakeTrainer(update_s=0.005),
        environment=environment(),
    )
    assert bench.run()
    assert bench.tasks_left == []
    assert broken(tmp_path) == []
    totals = bench.tally.totals
    assert (totals.steps, totals.trained) == (6, 6 * 3 * 4)
    with JournalReader(tmp_path) as reader:
        counts = reader.counts()
        evaluated = [(record.kind, record.version) for record in reader.evaluations()]
    assert set(counts) <= {"trained", "dropped"}, "every trajectory that started has an end"
    assert counts["trained"] == totals.trained
    assert counts.get("dropped", 0) == totals.dropped
    assert not totals.dropped or paradigm == "drop"
    assert not totals.mixed or paradigm == "partial"
    assert sorted(version for _, version in evaluated) == [2, 4], "each that was due is recorded, skipped or not"
    measured = [version for kind, version in evaluated if kind == "during"]
    assert [result.version for result in bench.watcher.evaluations] == measured
    assert len(evaluated) - len(measured) == bench.loop.controller.counters.evaluations_skipped


def test_with_several_versions_live_the_data_is_late_and_never_too_late(tmp_path: Path) -> None:
    bench = Bench(
        tmp_path,
        plan(staleness=3, updates=10),
        engines=[FakeEngine(rows=12, step_s=0.0005, sigma=1.5)],
        trainer=FakeTrainer(update_s=0.003),
    )
    assert bench.run()
    assert broken(tmp_path) == []
    ages = bench.tally.totals.ages
    assert max(ages) <= 3
    assert max(ages) > 0, "nothing overlapped"
    versions = [len({sample.version for sample in batch.samples}) for batch in bench.trainer.batches]
    assert max(versions) > 1, "no batch mixed versions"
    order = [[(s.version, s.trajectory) for s in batch.samples] for batch in bench.trainer.batches]
    assert order == [sorted(each) for each in order]


def test_every_update_says_what_it_waited_for_itself(tmp_path: Path) -> None:
    bench = Bench(
        tmp_path,
        plan(staleness=1, updates=8),
        engines=[FakeEngine(rows=12, step_s=0.001, sigma=1.3)],
        trainer=FakeTrainer(update_s=0.005),
    )
    assert bench.run()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    waited = [(line["update"], line["trainer_waited_for"]) for line in lines]
    assert [update for update, _ in waited] == list(range(8))
    assert all(reason == "" or reason.startswith(f"update {update}: ") for update, reason in waited), waited
    assert sum(reason != "" for _, reason in waited) > 2, "the trainer hardly waited; the test shows nothing"


@pytest.mark.parametrize("wrong", ["missing", "unknown", "behind"])
def test_the_rollouts_of_a_run_are_the_trajectories_of_its_ledger(wrong: str, tmp_path: Path) -> None:
    """`Bench` compares them after each event of every test; this shows that it would find a difference."""
    bench = Bench(tmp_path, plan(updates=8), engines=[FakeEngine(rows=12, step_s=0.001, sigma=1.5)])
    bench.watcher.after_update = lambda line: bench.loop.stop() if line["update"] == 2 else None
    assert bench.run() is False
    check_against_ledger(bench.loop)
    rollouts, ledger = bench.loop.rollouts, bench.loop.controller.ledger
    id = next(iter(rollouts))
    if wrong == "missing":
        del rollouts[id]
    elif wrong == "unknown":
        rollouts[9999] = rollouts[id]
    else:
        rollouts[id].state = RolloutState.WAITING
        ledger.trajectories[id].state = TrajectoryState.SCORED
    with pytest.raises(AssertionError):
        check_against_ledger(bench.loop)


@pytest.mark.parametrize("paradigm", ["multi-version", "partial"])
def test_a_version_may_be_retired_while_the_journal_is_made_durable_for_its_load(paradigm: str, tmp_path: Path) -> None:
    def retire_meanwhile(bench: Bench) -> None:
        durable = bench.journal.durable

        async def slow(timeout_s: float = 60.0) -> None:
            await durable(timeout_s)
            for version in [each for each in bench.loop.weights if each <= bench.loop.controller.newest]:
                del bench.loop.weights[version]

        bench.journal.durable = slow  # type: ignore[method-assign]

    bench = Bench(tmp_path, plan(paradigm, updates=3), prepare=retire_meanwhile)
    assert bench.run()
    assert broken(tmp_path) == []


def test_an_evaluation_that_ends_as_its_instance_is_lost_is_recorded_once(tmp_path: Path) -> None:
    class LostAsItEnds(Evaluator):
        async def evaluate(
            self, engine: Engine, version: int, moment: Any, checksum: str | None = None
        ) -> EvaluationResult:
            result = await super().evaluate(engine, version, moment, checksum)
            if engine is engines[0]:
                bench.loop.instances.lose(0, EngineError("gone"))
            return result

    engines = [FakeEngine(rows=12), LoadsLate(rows=12)]
    bench = Bench(tmp_path, plan(evaluate_every=2), engines=engines)
    bench.prepare = lambda made: setattr(made.loop._evaluations.evaluator, "__class__", LostAsItEnds)
    assert bench.run()
    with JournalReader(tmp_path) as reader:
        found = [(record.version, record.kind) for record in reader.evaluations()]
    assert found == [(2, "skipped"), (4, "during")]
    assert [result.version for result in bench.watcher.evaluations] == [4]
    assert [each["version"] for each in bench.tally.totals.evaluations] == [4]


@pytest.mark.parametrize("how", ["lost", "leaving"])
def test_partial_what_leaves_an_instance_never_goes_back_to_a_version_that_an_evaluation_holds(
    how: str, tmp_path: Path
) -> None:
    released = asyncio.Event()

    class Long(Evaluator):
        """Holds its instance at a version until it is released."""

        async def evaluate(
            self, engine: Engine, version: int, moment: Any, checksum: str | None = None
        ) -> EvaluationResult:
            await released.wait()
            return await super().evaluate(engine, version, moment, checksum)

    async def part(bench: Bench) -> None:
        controller, instances = bench.loop.controller, bench.loop.instances
        while (
            controller.evaluating is None
            or controller.newest < controller.evaluating[1] + 3
            or not other(controller).trajectories
        ):
            await asyncio.sleep(0.001)
        held, gone = controller.evaluating[1], other(controller)
        seen.append((held, max(gone.running)))
        if how == "lost":
            instances.lose(gone.id, EngineError("gone"))
            await asyncio.sleep(0.05)
            seen.extend(wait.reason for wait in controller.waits() if wait.owner == "trajectories")
            released.set()
        else:
            leaving = asyncio.create_task(instances.remove(gone.id))
            await asyncio.sleep(0.05)
            released.set()
            await leaving

    def other(controller: Controller) -> Any:
        assert controller.evaluating is not None
        (found,) = (each for each in controller.instances.values() if each.id != controller.evaluating[0])
        return found

    seen: list[Any] = []
    engines = [FakeEngine(rows=12, step_s=0.002, median_tokens=30), FakeEngine(rows=12, step_s=0.002, median_tokens=30)]
    bench = Bench(tmp_path, plan("partial", staleness=1, updates=9, evaluate_every=2), engines=engines, beside=part)
    bench.prepare = lambda made: setattr(made.loop._evaluations.evaluator, "__class__", Long)
    assert bench.run()
    assert broken(tmp_path) == []
    held, left = seen[0]
    assert left > held + 1
    if how == "lost":
        assert f"when its evaluation of version {held} has ended" in seen[1]
    with JournalReader(tmp_path) as reader:
        assert reader.counts() == {"trained": 108}


def test_synchronous_is_the_same_run_twice(tmp_path: Path) -> None:
    checksums = []
    for name, paradigm, options in (
        ("a", "synchronous", {}),
        ("b", "synchronous", {}),
        ("c", "multi-version", {"staleness": 0}),
    ):
        (tmp_path / name).mkdir()
        bench = Bench(tmp_path / name, plan(paradigm, **options), engines=[FakeEngine(rows=7)])
        assert bench.run()
        with JournalReader(tmp_path / name) as reader:
            checksums.append(reader.versions())
    assert checksums[0] == checksums[1] == checksums[2]
    assert len(set(checksums[0].values())) == 7


# -- what ends a run ---------------------------------------------------------------------------------------------------


def test_a_trainer_that_raises_ends_the_run_by_name(tmp_path: Path) -> None:
    bench = Bench(tmp_path, plan(), trainer=FakeTrainer(fail_at=2))
    with pytest.raises(TrainerError, match=r"update 2 failed: ValueError: the fake trainer was told"):
        bench.run()
    assert bench.tasks_left == []
    with JournalReader(tmp_path) as reader:
        assert reader.num_updates() == 2
    assert broken(tmp_path) == []


def test_a_journal_that_cannot_grow_ends_the_run_by_name_and_stays_readable(tmp_path: Path) -> None:
    def fill(bench: Bench) -> None:
        def limit(db: sqlite3.Connection) -> None:
            (pages,) = db.execute("PRAGMA page_count").fetchone()
            db.execute(f"PRAGMA max_page_count = {pages + 6}")

        bench.journal._writer.record(limit)

    bench = Bench(tmp_path, plan(updates=200), prepare=fill)
    with pytest.raises(JournalError, match="database or disk is full"):
        bench.run()
    assert bench.tasks_left == []
    assert broken(tmp_path) == []


def test_the_only_engine_that_dies_ends_the_run_by_name(tmp_path: Path) -> None:
    bench = Bench(tmp_path, plan(updates=50), engines=[FakeEngine(die_after=20)])
    with pytest.raises(EngineError, match="told to die after 20 steps"):
        bench.run()
    assert bench.tasks_left == []
    assert broken(tmp_path) == []


@pytest.mark.parametrize("environment", [InProcess, direct])
@pytest.mark.parametrize("paradigm", ["synchronous", "multi-version", "partial"])
def test_another_instance_takes_over_from_one_that_dies(
    paradigm: str, environment: Callable[[], Environment], tmp_path: Path
) -> None:
    engines = [FakeEngine(rows=6, step_s=0.0005, die_after=40), FakeEngine(rows=6, step_s=0.0005)]
    bench = Bench(tmp_path, plan(paradigm, evaluate_every=2), engines=engines, environment=environment())
    assert bench.run()
    assert bench.tasks_left == []
    assert broken(tmp_path) == []
    with JournalReader(tmp_path) as reader:
        assert reader.counts() == {"trained": 72}
        lost = [text for _, kind, text in reader.notes() if kind == "instance lost"]
    assert len(lost) == 1
    assert "told to die" in lost[0]


class DiesLoading(FakeEngine):
    """Dies when it is given version 2."""

    async def load(self, weights: Weights) -> None:
        if weights.version == 2:
            await self.close()
        await super().load(weights)


class DiesEvaluating(FakeEngine):
    """Dies at the first request of an evaluation."""

    async def generate(self, request: Request) -> Completion:
        if request.priority:
            await self.close()
        return await super().generate(request)


class DiesAnsweringGreedily(FakeEngine):
    """Dies at the first greedy answer of an evaluation, beside the sampled ones."""

    async def generate(self, request: Request) -> Completion:
        if request.sampling.temperature == 0.0:
            await self.close()
        return await super().generate(request)


class LoadsLate(FakeEngine):
    """Confirms a version after the other instance, so that the other evaluates it."""

    async def load(self, weights: Weights) -> None:
        await asyncio.sleep(0.05)
        await super().load(weights)


@pytest.mark.parametrize("kind", [DiesLoading, DiesEvaluating, DiesAnsweringGreedily])
def test_an_instance_may_die_at_any_command(kind: type[FakeEngine], tmp_path: Path) -> None:
    engines = [kind(rows=6, step_s=0.0005), LoadsLate(rows=6, step_s=0.0005)]
    bench = Bench(tmp_path, plan(evaluate_every=1), engines=engines, greedy=True)
    assert bench.run()
    assert bench.tasks_left == []
    assert broken(tmp_path) == []
    with JournalReader(tmp_path) as reader:
        assert reader.counts() == {"trained": 72}
        assert [kind for _, kind, _ in reader.notes() if kind != "evaluation skipped"] == ["instance lost"]
        assert all((each.greedy is None) == (each.kind == "skipped") for each in reader.evaluations())


def test_engines_that_cannot_hold_every_version_are_refused(tmp_path: Path) -> None:
    bench = Bench(tmp_path, plan(staleness=3), engines=[FakeEngine(slots=2), FakeEngine(slots=1)])
    with pytest.raises(EngineError, match=r"hold 3 versions at once, and `rollout.staleness` 3 needs 4"):
        bench.run()


def test_a_trainer_that_hangs_ends_the_run_by_name(tmp_path: Path) -> None:
    ended = threading.Event()

    class Hangs(FakeTrainer):
        def update(self, batch: Batch) -> UpdateReport:
            if batch.update == 2:
                ended.wait()
            return super().update(batch)

    bench = Bench(tmp_path, plan(), trainer=Hangs(), update_s=0.3)
    try:
        with pytest.raises(
            StalledError,
            match=r"update 2 has not ended after 0.3 s \(`runtime.update_seconds`\).* is at update 2, in `wait`",
        ):
            bench.run()
    finally:
        ended.set()
    assert bench.tasks_left == []
    assert broken(tmp_path) == []


def test_a_stall_says_who_waits_for_what(tmp_path: Path) -> None:
    class Stuck(FakeEngine):
        async def generate(self, request: Request) -> Completion:
            await asyncio.Event().wait()
            raise AssertionError

    bench = Bench(tmp_path, plan(), engines=[Stuck()], stall_s=0.2, rebalance_s=0.02)
    with pytest.raises(
        StalledError, match=r"nothing happened for 0.2 s .*trainer: update 0: 0 of 3 groups are finished"
    ):
        bench.run()
    assert bench.tasks_left == []


def test_a_long_trajectory_is_no_stall(tmp_path: Path) -> None:
    slow = FakeEngine(rows=12, step_s=0.03, median_tokens=30.0, sigma=0.0)  # about a second, and no event in between
    bench = Bench(tmp_path, plan(updates=1), engines=[slow], stall_s=0.3)
    assert bench.run()


def test_a_long_update_and_a_slow_reward_are_no_stall(tmp_path: Path) -> None:
    class Slow(InProcess):
        async def episode(self, prompt: Prompt, policy: Policy) -> float:
            reward = await super().episode(prompt, policy)
            await asyncio.sleep(0.5)
            return reward

    bench = Bench(
        tmp_path,
        plan("synchronous", updates=1),
        trainer=FakeTrainer(update_s=0.5),
        environment=Slow(),
        stall_s=0.15,
        reward_s=2.0,
    )
    assert bench.run()


@pytest.mark.parametrize("asks_first", [True, False])
def test_environments_that_never_return_fail_their_trajectories_and_then_the_run(
    asks_first: bool, tmp_path: Path
) -> None:
    class Hangs(InProcess):
        async def episode(self, prompt: Prompt, policy: Policy) -> float:
            if asks_first:
                await super().episode(prompt, policy)
            await asyncio.Event().wait()
            raise AssertionError

    bench = Bench(tmp_path, plan(retries=0, rows=64), environment=Hangs(), stall_s=0.4, reward_s=0.0)
    with pytest.raises(StalledError, match=r"first 16 did not return in time.* has not returned for 0\.4 s since"):
        bench.run()


def test_auto_staleness_measures_the_tail_of_generation_and_not_the_wait_for_the_trainer(tmp_path: Path) -> None:
    auto = plan(staleness=4, auto=True, updates=4)
    bench = Bench(tmp_path, auto, engines=[FakeEngine(slots=5)], trainer=FakeTrainer(update_s=0.8))
    assert bench.run()
    assert bench.loop.controller.staleness == 2, "a tail far shorter than an update"


def test_a_clock_that_is_set_back_changes_no_figure_and_no_decision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = time.time

    class SetsBack(FakeTrainer):
        def update(self, batch: Batch) -> UpdateReport:
            monkeypatch.setattr(time, "time", lambda: read() - 3600.0)
            return super().update(batch)

    bench = Bench(
        tmp_path,
        plan(staleness=4, auto=True, updates=4),
        engines=[FakeEngine(slots=5, step_s=0.001)],
        trainer=SetsBack(),
    )
    assert bench.run()
    assert broken(tmp_path) == []
    assert 0 < bench.tally.totals.wall_s < 60
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert all(line[name] >= 0 for line in lines for name in ("cycle_seconds", "trainer_idle_seconds"))


@pytest.mark.parametrize(
    "error", [StrettoError("the pool of reward workers failed"), JournalError("no"), TransitionError("no")]
)
def test_a_failure_of_the_pool_or_of_our_own_is_no_data_and_ends_the_run(error: StrettoError, tmp_path: Path) -> None:
    def score(prompt: Prompt, completion: Completion, attempt: int) -> float:
        if completion.id == 5:
            raise error
        return 1.0

    bench = Bench(tmp_path, plan(), environment=InProcess(score))
    with pytest.raises(type(error), match=str(error)):
        bench.run()
    assert bench.tasks_left == []
    assert broken(tmp_path) == []


# -- what is data ------------------------------------------------------------------------------------------------------


def test_a_reward_that_raises_is_tried_again_without_generating_again(tmp_path: Path) -> None:
    def flaky(prompt: Prompt, completion: Completion, attempt: int) -> float:
        if completion.id % 4 == 1 and attempt < 3:
            raise RewardError("not yet")
        return float(completion.id % 4)

    engine = CountingEngine()
    bench = Bench(tmp_path, plan(updates=2), engines=[engine], environment=InProcess(flaky))
    assert bench.run()
    assert len(engine.requests) == 24
    assert bench.environment.attempts[1] == 3
    assert bench.tally.totals.failed == 0
    assert bench.loop.controller.counters.scoring_retries == 2 * 6
    assert broken(tmp_path) == []


def test_a_reward_that_always_raises_fails_its_trajectory_and_the_group_trains_with_the_rest(tmp_path: Path) -> None:
    def never(prompt: Prompt, completion: Completion, attempt: int) -> float:
        if completion.id == 5:
            raise ZeroDivisionError("no")
        return float(completion.id % 4)

    engine = CountingEngine()
    bench = Bench(tmp_path, plan(updates=2), engines=[engine], environment=InProcess(never))
    assert bench.run()
    assert bench.environment.attempts[5] == 3, "one try and two retries"
    assert Counter(request.id for request in engine.requests)[5] == 1
    assert (bench.tally.totals.failed, bench.tally.totals.trained) == (1, 23)
    members = [sample.trajectory for batch in bench.trainer.batches for sample in batch.samples if sample.group == 1]
    assert members == [4, 6, 7]
    assert broken(tmp_path) == []
    with JournalReader(tmp_path) as reader:
        record = reader.trajectory(5)
    line = never.__code__.co_firstlineno + 2
    assert (record.state, record.error) == ("failed", f"ZeroDivisionError: no (test_loop.py:{line})")


def test_a_group_without_any_survivor_is_replaced_by_the_next_prompt(tmp_path: Path) -> None:
    def group_two(prompt: Prompt, completion: Completion, attempt: int) -> float:
        if completion.id // 4 == 2:
            raise RewardError("never")
        return float(completion.id % 4)

    bench = Bench(tmp_path, plan(updates=2), environment=InProcess(group_two))
    assert bench.run()
    trained = {sample.group for batch in bench.trainer.batches for sample in batch.samples}
    assert trained == {0, 1, 3, 4, 5, 6}
    assert bench.loop.controller.counters.replaced_groups == 1
    assert bench.loop._admissions._tail._spans == {}, "no group is remembered beyond its end"
    assert bench.tally.totals.failed == 4
    assert broken(tmp_path) == []


@pytest.mark.parametrize(
    ("worked", "said"),
    [(0, "no completion has got a reward yet.* first 64 failed"), (1, "the last 64 trajectories all failed")],
)
def test_a_reward_that_can_only_fail_ends_the_run_instead_of_drawing_prompts_for_ever(
    worked: int, said: str, tmp_path: Path
) -> None:
    def broken_reward(prompt: Prompt, completion: Completion, attempt: int) -> float:
        if completion.id < worked:
            return 1.0
        raise RewardError("`task.reward` is broken")

    bench = Bench(tmp_path, plan(), environment=InProcess(broken_reward))
    with pytest.raises(StalledError, match=rf"{said}.*`task.reward` is broken"):
        bench.run()
    assert bench.tasks_left == []


def test_a_prompt_that_is_too_long_and_was_not_checked_fails_is_counted_and_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data, "CHECK_S", 0.0)  # only the first are checked

    class Generated(Sequence[Row]):
        def __len__(self) -> int:
            return 64

        def __getitem__(self, index: Any) -> Row:
            return Row(text="x" * (100 if index == self.long else 4))

        long = PromptStream([Row(text="x")] * 64, Characters(), seed=0, max_prompt_tokens=64).row_number(17)

    bench = Bench(tmp_path, plan(), engines=[FakeEngine(max_context=128)], rows=Generated())
    assert bench.run()
    assert broken(tmp_path) == []
    assert bench.tally.totals.failed == 4
    assert bench.loop.controller.counters.replaced_groups == 1
    with JournalReader(tmp_path) as reader:
        assert {trajectory // 4 for trajectory, _, _ in reader.failures()} == {17}
        assert all("may grow to 164 tokens" in reason for _, _, reason in reader.failures())


def test_a_request_that_fails_is_tried_again_on_the_same_version_with_the_same_seed(tmp_path: Path) -> None:
    engine = CountingEngine(failures={6: 2, 9: 3})
    bench = Bench(tmp_path, plan(updates=2), engines=[engine])
    assert bench.run()
    tries = [request for request in engine.requests if request.id == 6]
    assert len(tries) == 3
    assert len(set(tries)) == 1, "prompt, version, seed and sampling stay"
    assert bench.tally.totals.failed == 1, "trajectory 9, after three tries"
    assert broken(tmp_path) == []
    with JournalReader(tmp_path) as reader:
        assert (reader.trajectory(6).state, reader.trajectory(6).failures) == ("trained", 2)
        assert reader.trajectory(9).state == "failed"
        assert "told to fail" in (reader.trajectory(9).error or "")


def test_a_retry_under_newer_weights_verifies_in_partial(tmp_path: Path) -> None:
    engine = FakeEngine(rows=12, step_s=0.0005, failures=dict.fromkeys(range(0, 72, 3), 1))
    bench = Bench(tmp_path, plan("partial"), engines=[engine])
    assert bench.run()
    assert broken(tmp_path) == []


# -- stopping ----------------------------------------------------------------------------------------------------------


def test_a_stopped_run_ends_at_an_update_boundary_and_goes_on_from_there(tmp_path: Path) -> None:
    first = Bench(tmp_path, plan(updates=8), engines=[FakeEngine(rows=12, step_s=0.001, sigma=1.5)])

    def stop_after_three(line: Mapping[str, Any]) -> None:
        if line["update"] == 2:
            first.loop.stop()
            first.loop.stop()

    first.watcher.after_update = stop_after_three
    assert first.run() is False
    assert first.tasks_left == []
    assert broken(tmp_path) == []
    controller = first.loop.controller
    assert controller.training is None
    assert first.tally.totals.steps == controller.next_update == controller.newest == first.trainer.version
    with JournalReader(tmp_path) as reader:
        under_way = set(reader.ids("waiting", "running", "scoring", "scored"))
        waiting = set(reader.ids("waiting"))
    assert under_way == set(first.loop.rollouts)
    # One that had not reached its engine yet has no tokens to keep.
    assert waiting >= {rollout.id for rollout in first.loop.rollouts.values() if rollout.suspended is not None}

    second = Bench(
        tmp_path,
        plan(updates=8),
        trainer=first.trainer,
        snapshot=snapshot(tmp_path / "journal.sqlite", first.plan),
        rollouts=first.loop.rollouts,
        weights=first.loop.weights,
    )
    assert second.run()
    assert broken(tmp_path) == []
    with JournalReader(tmp_path) as reader:
        assert reader.num_updates() == 8
        assert reader.counts() == {"trained": 8 * 3 * 4}
        assert [session.outcome for session in reader.sessions()] == ["stopped", "finished"]


def test_a_trajectory_that_ends_while_the_run_stops_is_neither_lost_nor_generated_twice(tmp_path: Path) -> None:
    class Finishing(FakeEngine):
        """Lets everything end before it suspends: the core has stopped listening by then."""

        async def suspend(self, ids: Sequence[int], *, kv: bool) -> list[Any]:
            while self.report().running or self.report().queued:
                await asyncio.sleep(0.002)
            await asyncio.sleep(0.02)
            return await super().suspend(ids, kv=kv)

    first = Bench(tmp_path, plan(updates=8), engines=[Finishing(rows=12, step_s=0.001, sigma=1.5)])
    first.watcher.after_update = lambda line: first.loop.stop() if line["update"] == 2 else None
    assert first.run() is False
    late = [rollout for rollout in first.loop.rollouts.values() if rollout.reward is not None]
    assert late, "nothing ended while the run stopped; the test shows nothing"
    engine = CountingEngine()
    second = Bench(
        tmp_path,
        plan(updates=8),
        engines=[engine],
        trainer=first.trainer,
        snapshot=snapshot(tmp_path / "journal.sqlite", first.plan),
        rollouts=first.loop.rollouts,
        weights=first.loop.weights,
    )
    assert second.run()
    assert broken(tmp_path) == []
    assert not {rollout.id for rollout in late} & {request.id for request in engine.requests}


def test_the_clock_of_a_resumed_run_starts_with_whatever_it_does_first(tmp_path: Path) -> None:
    class Killed(FakeTrainer):
        def update(self, batch: Batch) -> UpdateReport:
            self.rollouts = dict(first.loop.rollouts)
            raise ValueError("as if it were killed here")

    first = Bench(tmp_path, plan("synchronous", updates=1), trainer=Killed())
    with pytest.raises(TrainerError):
        first.run()

    second = Bench(
        tmp_path,
        plan("synchronous", updates=1),
        trainer=FakeTrainer(update_s=0.05),
        snapshot=snapshot(tmp_path / "journal.sqlite", first.plan),
        rollouts=first.trainer.rollouts,
        weights=first.loop.weights,
    )
    assert second.run()
    assert second.tally.totals.wall_s >= 0.05
    assert broken(tmp_path) == []
