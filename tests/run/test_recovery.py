"""What a journal says a run was, against what the run itself says at the same moment."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from core_record import record
from journal_cases import FACTS, Recorder
from loop_cases import Bench, InProcess, broken, plan

from stretto.assembly.resume import rollouts_again, settle
from stretto.core.controller import Controller
from stretto.core.ledger import TrajectoryState
from stretto.core.plan import Plan
from stretto.core.snapshots import Snapshot
from stretto.engines.fake import FakeEngine
from stretto.environments.prompt_order import PassRates
from stretto.errors import RewardError, RunError, TrainerError
from stretto.run.recovery import recall_draws, snapshot
from stretto.run.rollout import Rollout
from stretto.store.journal import Journal
from stretto.store.reader import JournalReader
from stretto.store.resume_point import progress_of
from stretto.training.fake import FakeTrainer
from stretto.types import Completion, Prompt

MIXES: dict[str, dict[str, Any]] = {
    "synchronous": {"paradigm": "synchronous"},
    "one-step-off": {"paradigm": "one-step-off"},
    "partial": {"paradigm": "partial"},
    "drop": {"paradigm": "drop", "staleness": 1, "in_flight": 9, "rows": 36},
    "multi-version": {"staleness": 2, "in_flight": 9, "evaluate_every": 2},
    "auto": {"staleness": 4, "auto": True, "in_flight": 9},
    "filter": {"staleness": 2, "filter_limit": 2},
    "replay": {"staleness": 3, "replay_groups": 2, "replay_uses": 2},
}


def stopped(folder: Path, asked: Plan, **options: Any) -> Bench:
    """A run that was stopped after four of its updates or more, with trajectories under way if it ever has any then.

    A busy machine can hold an instance back until an update is over, and then nothing is under way: the run goes on.
    """
    bench = Bench(folder, asked, engines=[FakeEngine(slots=6, rows=12, step_s=0.001, sigma=1.5)], **options)

    def stop(line: Mapping[str, Any]) -> None:
        if line["update"] >= 3 and (not asked.staleness or record(bench.loop.controller).outstanding):
            bench.loop.stop()

    bench.watcher.after_update = stop
    assert bench.run() is False
    return bench


def second_run(
    first: Bench, folder: Path, asked: Plan, environment: InProcess, rollouts: Mapping[int, Rollout]
) -> Bench:
    """Continues a stopped run to its end, from what its journal says."""
    second = Bench(
        folder,
        asked,
        engines=[FakeEngine(slots=6)],
        trainer=first.trainer,
        environment=environment,
        snapshot=snapshot(folder / "journal.sqlite", asked),
        rollouts=rollouts,
        kept=first.loop._updates._kept,
        weights=first.loop.weights,
        pass_rates=first.pass_rates,
    )
    assert second.run()
    return second


def comparable(made: Snapshot, late: set[int]) -> Snapshot:
    """A snapshot without what core and journal say differently; `late` ended after the core had stopped listening."""
    groups = tuple(
        replace(
            group,
            trajectories=tuple(replace(each, version=-1) for each in group.trajectories if each.id not in late),
        )
        for group in sorted(made.outstanding, key=lambda group: group.id)
    )
    before = (TrajectoryState.WAITING, TrajectoryState.SCORING)
    ahead = {group.id for group in groups for each in group.trajectories if each.state in before}
    ahead |= {group.id for group in made.outstanding for each in group.trajectories if each.id in late}
    return replace(
        made,
        outstanding=groups,
        counters=replace(made.counters, interrupted=0, moved=0),
        finished=tuple(group for group in made.finished if group not in ahead),
        live=frozenset(),
        staleness=0,
        reusable=tuple(sorted(made.reusable, key=lambda each: each.id)),
        reused=(),
    )


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[Recorder]:
    made = Recorder(tmp_path, FACTS)
    yield made
    made.journal.close()


@pytest.mark.parametrize("name", MIXES)
def test_the_journal_says_what_the_core_was(tmp_path: Path, name: str) -> None:
    asked = plan(updates=8, **MIXES[name])
    score = InProcess(lambda prompt, completion, attempt: float(completion.tokens[-1] % 2))
    bench = stopped(tmp_path, asked, environment=score)
    own, told = record(bench.loop.controller), snapshot(tmp_path / "journal.sqlite", asked)
    late = {rollout.id for rollout in bench.loop.rollouts.values() if rollout.is_generated}
    assert comparable(told, late) == comparable(own, late)
    assert told.outstanding or not asked.staleness, "nothing was under way; the test shows nothing"
    Controller.restore(asked, told)


@pytest.mark.parametrize("name", MIXES)
def test_a_run_goes_on_from_what_the_journal_says(tmp_path: Path, name: str) -> None:
    asked = plan(updates=8, **MIXES[name])
    score = InProcess(lambda prompt, completion, attempt: float(completion.tokens[-1] % 2))
    first = stopped(tmp_path, asked, environment=score)
    second_run(first, tmp_path, asked, score, first.loop.rollouts)
    assert broken(tmp_path) == []
    with JournalReader(tmp_path) as reader:
        assert reader.num_updates() == 8


def test_a_group_whose_last_reward_is_recorded_and_not_what_follows_is_for_the_core_to_decide(
    recorder: Recorder, tmp_path: Path
) -> None:
    run = recorder
    run.publish(0)
    for group in (0, 1):
        run.admit(group)
        for id in run.ids(group):
            run.generate(id)
            run.journal.scored(id, 1.0, at=5.0)
    run.journal.group_spared(1, 0, "the limit is reached", at=5.0)
    run.journal.flush()
    asked = plan(batch=2, group_size=3, updates=4, retries=1, filter_limit=1)
    told = snapshot(tmp_path / "journal.sqlite", asked)
    assert told.finished == (1,)
    assert snapshot(tmp_path / "journal.sqlite", plan(batch=2, group_size=3, updates=4)).finished == (0, 1)


def test_an_update_that_is_finished_and_not_published_is_published_first(recorder: Recorder, tmp_path: Path) -> None:
    run = recorder
    run.publish(0)
    for group in (0, 1):
        run.admit(group)
        run.finish(group)
    asked = plan(batch=2, group_size=3, updates=4, retries=1)
    run.take(0)
    run.journal.flush()
    told = snapshot(tmp_path / "journal.sqlite", asked)
    assert (told.next_update, told.newest, told.unpublished) == (1, 0, None)
    assert [group.id for group in told.training] == [0, 1]
    run.journal.update_done(0, {"kind": "update", "at": 1.0}, at=6.0, checksum="sum1", totals={"steps": 1})
    run.journal.flush()
    told = snapshot(tmp_path / "journal.sqlite", asked)
    assert (told.next_update, told.newest, told.unpublished, told.training) == (1, 0, 1, ())
    progress = progress_of(tmp_path / "journal.sqlite")
    assert progress is not None
    assert (progress.updates, progress.checksums[1], progress.totals["steps"]) == (1, "sum1", 1)
    assert progress.totals["sampled"] == 6


def test_a_run_goes_on_only_with_the_batch_and_the_group_that_its_journal_records(
    recorder: Recorder, tmp_path: Path
) -> None:
    recorder.publish(0)
    recorder.journal.flush()
    for options, named in (({"batch": 3}, "`batch` is 3"), ({"group_size": 2}, "`group_size` is 2")):
        other = plan(**{"batch": 2, "group_size": 3, "updates": 4, **options})
        with pytest.raises(ValueError, match=f"{named}, but the run was begun with"):
            Controller.restore(other, snapshot(tmp_path / "journal.sqlite", other))


def test_draws_by_pass_rate_go_on_as_they_would_have(tmp_path: Path) -> None:
    asked = plan("synchronous", updates=8)
    rates = PassRates(64, seed=0, pass_reward=4.0)
    bench = stopped(tmp_path, asked, pass_rates=rates)
    told = PassRates(64, seed=0, pass_reward=4.0)
    bench.loop.prompts._pass_rates = told
    recall_draws(tmp_path / "journal.sqlite", bench.loop.prompts)
    for each in (told, rates):
        each.settle(99)  # what was scored since the last batch counts from the next on
    assert [told.draw(index) for index in range(50)] == [rates.draw(index) for index in range(50)]


# -- rewards that cannot be trained on ---------------------------------------------------------------------------------


def untrainable(folder: Path, asked: Plan, **options: Any) -> tuple[Bench, list[int]]:
    """A run that ended as its update 4 failed, with rewards as nobody records them nowadays; and whose they are."""
    bench = Bench(
        folder,
        asked,
        engines=[FakeEngine(slots=6, rows=12, step_s=0.001, sigma=1.5)],
        trainer=FakeTrainer(fail_at=4),
        **options,
    )
    with pytest.raises(TrainerError, match="update 4"):
        bench.run()
    bench.trainer._fail_at = None
    bench.journal.close()
    assert take_back(folder, asked) == [], "what was decided and not recorded is carried out, and no more"
    with JournalReader(folder) as reader:
        taken, scored = reader.ids("training"), reader.ids("scored")
    assert taken
    group = asked.group_size * (taken[0] // asked.group_size)
    wrong = [id for id in taken if id < group + asked.group_size]  # all of a group
    wrong += [taken[-1], *scored[-1:]]
    with sqlite3.connect(folder / "journal.sqlite") as db:
        for id in set(wrong):
            db.execute("UPDATE trajectories SET reward = 1e101 WHERE trajectory = ?", (id,))
        by_turn = np.array([1e10, -1e10], dtype="<f8").tobytes()
        db.execute("UPDATE trajectories SET reward = 0, turn_rewards = ? WHERE trajectory = ?", (by_turn, taken[-1]))
    return bench, sorted(set(wrong))


def take_back(folder: Path, asked: Plan, give_up: Sequence[int] = ()) -> list[str]:
    said: list[str] = []
    with Journal.open(folder / "journal.sqlite", resume=True) as journal:
        asyncio.run(settle(journal, asked, said.append, give_up))
    return said


def go_on(first: Bench, folder: Path, asked: Plan, environment: InProcess) -> Bench:
    with Journal.open(folder / "journal.sqlite", resume=True) as journal:
        rollouts = rollouts_again(first.loop.prompts, journal, None)
        if first.pass_rates is not None:
            recall_draws(journal.path, first.loop.prompts)
    return second_run(first, folder, asked, environment, rollouts)


@pytest.mark.parametrize("fails", [False, True], ids=["scored well", "failed"])
@pytest.mark.parametrize("name", MIXES)
def test_rewards_that_cannot_be_trained_on_are_scored_again_and_the_run_comes_to_its_end(
    tmp_path: Path, name: str, fails: bool
) -> None:
    asked = plan(updates=8, **MIXES[name])
    score = InProcess(lambda prompt, completion, attempt: float(completion.tokens[-1] % 2))
    first, wrong = untrainable(tmp_path, asked, environment=score)
    taken = [sample.trajectory for batch in first.trainer.batches for sample in batch.samples]
    said = take_back(tmp_path, asked)
    assert said[0].startswith(f"trajectory {wrong[0]}, and {len(wrong) - 1} more cannot be trained on and is scored")
    assert take_back(tmp_path, asked) == [], "a second time changes nothing"
    assert broken(tmp_path) == []
    with JournalReader(tmp_path) as reader:
        assert reader.num_updates() == len(reader.updates()) == 4, "its batch was given back"
        assert reader.ids("training") == []
        assert set(reader.ids("scoring")) >= set(wrong)
        assert {id for id, kind, reason in reader.failures() if "e+1" in reason and kind == "scoring"} == set(wrong)

    def again(prompt: Prompt, completion: Completion, attempt: int) -> float:
        if fails and completion.id in wrong:
            raise RewardError("again beyond any bound")
        return score.score(prompt, completion, attempt)

    go_on(first, tmp_path, asked, InProcess(again))
    assert broken(tmp_path) == []
    with JournalReader(tmp_path) as reader:
        assert reader.num_updates() == 8
        for id in wrong:
            record = reader.trajectory(id)
            assert record.state in (("failed",) if fails else ("trained", "filtered", "dropped")), record
            assert record.reward is None if fails else record.reward in (0.0, 1.0)
    trained = [sample.trajectory for batch in first.trainer.batches for sample in batch.samples if sample.use == 0]
    assert len(trained) == len(set(trained)), "each once"
    assert trained[: len(set(taken))] == list(dict.fromkeys(taken))
    assert all(abs(sample.reward) <= 1 for batch in first.trainer.batches for sample in batch.samples)


def test_a_trajectory_that_is_given_up_fails_and_its_batch_is_taken_anew(tmp_path: Path) -> None:
    asked = plan(updates=8)
    first = Bench(tmp_path, asked, trainer=FakeTrainer(fail_at=2))
    with pytest.raises(TrainerError):
        first.run()
    first.trainer._fail_at = None
    with JournalReader(tmp_path) as reader:
        taken, done = reader.members(2), reader.members(1)
    for id, state in ((done[0], "the trajectory is `trained`"), (10_000, "no such trajectory")):
        with pytest.raises(RunError, match=f"`--give-up {id}`: .*{state}"):
            take_back(tmp_path, asked, [id])
    assert take_back(tmp_path, asked, [taken[1]]) == [f"trajectory {taken[1]} is given up"]
    assert broken(tmp_path) == []
    go_on(first, tmp_path, asked, InProcess())
    assert broken(tmp_path) == []
    with JournalReader(tmp_path) as reader:
        assert reader.num_updates() == 8
        assert (reader.trajectory(taken[1]).state, reader.trajectory(taken[1]).error) == (
            "failed",
            "it was given up by `--give-up`",
        )
        assert reader.trajectory(taken[0]).state == "trained"


def test_draws_by_pass_rate_forget_a_reward_and_a_batch_that_were_taken_back(tmp_path: Path) -> None:
    asked = plan("synchronous", updates=8)
    first, _ = untrainable(tmp_path, asked, pass_rates=PassRates(64, seed=0, pass_reward=4.0))
    take_back(tmp_path, asked)
    recalled: list[tuple[str, float]] = []
    rates = PassRates(64, seed=0, pass_reward=4.0)
    for name in ("scored", "settle"):
        own = getattr(rates, name)
        setattr(rates, name, lambda *args, own=own, name=name: (recalled.append((name, args[-1])), own(*args)))
    first.loop.prompts._pass_rates = rates
    recall_draws(tmp_path / "journal.sqlite", first.loop.prompts)
    with JournalReader(tmp_path) as reader:
        counts = reader.counts()
    assert [update for name, update in recalled if name == "settle"] == [
        update for update in range(4) for _ in range(12)
    ]
    assert sum(name == "scored" for name, _ in recalled) == counts["trained"] + counts["scored"]
    assert max(reward for name, reward in recalled if name == "scored") <= 4.0
    first.pass_rates = first.loop.prompts._pass_rates = PassRates(64, seed=0, pass_reward=4.0)
    go_on(first, tmp_path, asked, InProcess())
    assert broken(tmp_path) == []
