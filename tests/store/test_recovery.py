"""What a journal says a run was, against what the run itself says at the same moment."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from core_record import record
from loop_cases import Bench, InProcess, broken, plan
from stretto.core.brain import Brain
from stretto.core.plan import Plan
from stretto.engines.fake import FakeEngine
from stretto.environments.order import PassRates
from stretto.store.journal import Journal
from stretto.store.reader import JournalReader
from stretto.store.recovery import progress_of, recall_draws, snapshot

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
    """A run that was stopped after four of its updates."""
    bench = Bench(folder, asked, engines=[FakeEngine(slots=6, rows=12, step_s=0.001, sigma=1.5)], **options)
    bench.watcher.after_update = lambda line: bench.loop.stop() if line["update"] == 3 else None
    assert bench.run() is False
    return bench


def comparable(made: Mapping[str, Any], late: set[int]) -> dict[str, Any]:
    """A snapshot without what is only said differently; `late` ended after the core had stopped listening."""
    groups = [
        {
            **group,
            "trajectories": [{**each, "version": None} for each in group["trajectories"] if each["id"] not in late],
        }
        for group in sorted(made["outstanding"], key=lambda group: group["id"])
    ]
    told = {**made, "outstanding": groups, "counters": {**made["counters"], "interrupted": 0, "moved": 0}}
    ahead = {
        group["id"] for group in groups for each in group["trajectories"] if each["state"] in ("pending", "scoring")
    }
    ahead |= {group["id"] for group in made["outstanding"] for each in group["trajectories"] if each["id"] in late}
    told["finished"] = [group for group in made["finished"] if group not in ahead]
    del told["live"], told["staleness"]
    kept = sorted(made["replay"]["kept"], key=lambda each: each["id"])
    told["replay"] = {"kept": kept}
    return told


@pytest.mark.parametrize("name", MIXES)
def test_the_journal_says_what_the_core_was(tmp_path: Path, name: str) -> None:
    asked = plan(updates=8, **MIXES[name])
    score = InProcess(lambda prompt, completion, attempt: float(completion.tokens[-1] % 2))
    bench = stopped(tmp_path, asked, environment=score)
    own, told = record(bench.loop.brain), snapshot(tmp_path / "journal.sqlite", asked)
    late = {flight.id for flight in bench.loop.flights.values() if flight.completion is not None}
    assert comparable(told, late) == comparable(own, late)
    assert told["outstanding"] or not asked.staleness, "nothing was under way; the test shows nothing"
    Brain.restore(asked, told)


@pytest.mark.parametrize("name", MIXES)
def test_a_run_goes_on_from_what_the_journal_says(tmp_path: Path, name: str) -> None:
    asked = plan(updates=8, **MIXES[name])
    score = InProcess(lambda prompt, completion, attempt: float(completion.tokens[-1] % 2))
    first = stopped(tmp_path, asked, environment=score)
    second = Bench(
        tmp_path,
        asked,
        engines=[FakeEngine(slots=6)],
        trainer=first.trainer,
        environment=score,
        snapshot=snapshot(tmp_path / "journal.sqlite", asked),
        flights=first.loop.flights,
        kept=first.loop._updates._kept,
        weights=first.loop.weights,
    )
    assert second.run()
    assert broken(tmp_path) == []
    with JournalReader(tmp_path) as reader:
        assert reader.num_updates() == 8


def test_a_run_that_has_not_begun_has_no_progress_of(tmp_path: Path) -> None:
    Journal.open(tmp_path / "journal.sqlite").close()
    assert progress_of(tmp_path / "journal.sqlite") is None


def test_what_was_decided_and_recorded_in_part_is_carried_out(recorder: Any, tmp_path: Path) -> None:
    run = recorder()
    run.publish(0)
    for group in (0, 1, 2):
        run.admit(group)
    run.finish(0)
    run.journal.filtered(0, "no signal", at=5.0)  # of three
    for _ in range(2):  # one more than the recipe's retries
        run.journal.attempt_failed(3, "generation", "told to fail", at=5.0)
    run.generate(4)
    for _ in range(2):
        run.journal.attempt_failed(4, "scoring", "no idea", at=5.0)
    run.journal.attempt_failed(5, "generation", "once", at=5.0)
    for _ in range(2):
        run.journal.settle(1, drops=False, at=6.0)  # a second time changes nothing
    run.journal.flush()
    with JournalReader(tmp_path) as reader:
        states = [reader.trajectory(id).state for id in range(9)]
        assert states == ["filtered"] * 3 + ["failed", "failed", "running"] + ["running"] * 3
        assert [reader.trajectory(id).error for id in (2, 3, 4)] == ["no signal", "told to fail", "no idea"]


def test_a_group_whose_last_reward_is_recorded_and_not_what_follows_is_for_the_core_to_decide(
    recorder: Any, tmp_path: Path
) -> None:
    run = recorder()
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
    assert told["finished"] == [1]
    assert snapshot(tmp_path / "journal.sqlite", plan(batch=2, group_size=3, updates=4))["finished"] == [0, 1]


def test_an_update_that_is_finished_and_not_published_is_published_first(recorder: Any, tmp_path: Path) -> None:
    run = recorder()
    run.publish(0)
    for group in (0, 1):
        run.admit(group)
        run.finish(group)
    asked = plan(batch=2, group_size=3, updates=4, retries=1)
    run.take(0)
    run.journal.flush()
    told = snapshot(tmp_path / "journal.sqlite", asked)
    assert (told["next_update"], told["newest"], told["unpublished"]) == (1, 0, None)
    assert [group["id"] for group in told["training"]] == [0, 1]
    run.journal.update_done(0, {"kind": "update", "at": 1.0}, at=6.0, checksum="sum1", totals={"steps": 1})
    run.journal.flush()
    told = snapshot(tmp_path / "journal.sqlite", asked)
    assert (told["next_update"], told["newest"], told["unpublished"], told["training"]) == (1, 0, 1, [])
    progress = progress_of(tmp_path / "journal.sqlite")
    assert progress is not None
    assert (progress.updates, progress.checksums[1], progress.totals["steps"]) == (1, "sum1", 1)
    assert progress.totals["sampled"] == 6


def test_a_machine_whose_clock_is_behind_takes_up_the_last_sums_and_lines_all_the_same(
    recorder: Any, tmp_path: Path
) -> None:
    run = recorder()
    run.publish(0)

    def update(number: int, at: float) -> None:
        for group in (2 * number, 2 * number + 1):
            run.admit(group)
            run.finish(group)
        run.take(number)
        line, totals = {"kind": "update", "update": number, "at": at}, {"steps": number + 1, "wall_s": 10.0 * number}
        run.journal.update_done(number, line, at=at, checksum=f"sum{number + 1}", totals=totals)
        run.publish(number + 1)

    update(0, at=100.0)
    run.journal.evaluation(1, "during", 101.0, line={"kind": "evaluation", "at": 101.0})
    run.journal.finished(stopped=True, at=102.0, totals={"steps": 1, "wall_s": 7.0})
    for session in (2, 3):
        run.journal.begin(run.facts, at=50.0)
        if session == 2:
            run.journal.finished(stopped=True, at=51.0, totals={"steps": 1, "wall_s": 8.0})
    run.journal.flush()
    progress = progress_of(tmp_path / "journal.sqlite")
    assert progress is not None
    assert progress.totals["wall_s"] == 8.0, "the last stop after the last update"
    update(1, at=60.0)
    run.journal.flush()
    progress = progress_of(tmp_path / "journal.sqlite")
    assert progress is not None
    assert (progress.totals["steps"], progress.totals["wall_s"]) == (2, 10.0)
    assert [line["update"] for line in progress.lines if line["kind"] == "update"] == [0, 1]
    assert sum(line["kind"] == "evaluation" for line in progress.lines) == 1


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
