"""Checks of runs with redundancy: what is dropped was not needed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from journal_cases import FACTS, Recorder

from stretto.store.reader import JournalReader
from stretto.store.schema import RunFacts
from stretto.store.verify import Finding, exit_code, format_findings, verify

REDUNDANT = replace(
    FACTS, paradigm="synchronous", staleness=0, batch=2, group=2, updates=2, reserve_groups=1, reserve_members=1
)
STARTED = 3  # groups for an update


class Redundant(Recorder):
    """Two updates of 2 x 2 from 3 x 3. In each the second group, and the last member of the others, come too late."""

    def version_of(self, group: int) -> int:
        return group // STARTED

    def score(self, id: int) -> None:
        self.generate(id)
        self.journal.scored(id, float(id % 2), at=self.now())

    def drop(self, *ids: int) -> None:
        for id in ids:
            self.journal.dropped(id, "not needed", at=self.now(), num_tokens=3)

    def start(self, update: int) -> tuple[list[int], list[int], list[int]]:
        for group in range(update * STARTED, (update + 1) * STARTED):
            self.admit(group)
        first, slow, last = (self.ids(update * STARTED + number) for number in range(STARTED))
        return first, slow, last

    def update(self, update: int) -> None:
        first, slow, last = self.start(update)
        for own in (first, last):
            self.score(own[0])
            self.score(own[1])
            self.drop(own[2])
        self.journal.batch_taken(update, [*first[:2], *last[:2]], at=self.now())
        self.drop(*slow)
        self.done(update)

    def end(self, stopped: bool = False) -> list[Finding]:
        self.journal.finished(stopped=stopped, at=self.now())
        self.journal.close()
        return verify(self.folder)


@pytest.fixture
def redundant(tmp_path: Path) -> Redundant:
    made = Redundant(tmp_path, REDUNDANT)
    made.publish(0)
    return made


def broken(findings: list[Finding]) -> list[str]:
    assert exit_code(findings) == 1
    return [detail for finding in findings for detail in finding.details]


def test_what_a_recipe_starts_too_much_of_is_counted_as_broken_by_recipe(redundant: Redundant) -> None:
    redundant.update(0)
    redundant.update(1)
    findings = redundant.end()
    text = format_findings(findings)
    assert exit_code(findings) == 0, text
    assert "broken by recipe: 10;" in text
    assert [finding.by_recipe for finding in findings] == [None, 10, None, None, None]
    assert "8 trained, 0 failed, 0 filtered, 10 dropped" in text


def test_a_member_that_is_dropped_before_enough_others_have_rewards_is_an_error(redundant: Redundant) -> None:
    first, slow, last = redundant.start(0)
    redundant.score(first[0])
    redundant.drop(first[2])
    redundant.score(first[1])
    redundant.score(last[0])
    redundant.score(last[1])
    redundant.drop(last[2])
    redundant.journal.batch_taken(0, [*first[:2], *last[:2]], at=redundant.now())
    redundant.drop(*slow)
    redundant.done(0)
    assert broken(redundant.end(stopped=True)) == [
        "trajectory 2 was dropped before 2 others of its group 0 had rewards"
    ]


def test_a_group_that_is_dropped_before_its_last_batch_is_taken_is_an_error(redundant: Redundant) -> None:
    first, slow, last = redundant.start(0)
    redundant.drop(*slow)
    for own in (first, last):
        redundant.score(own[0])
        redundant.score(own[1])
        redundant.drop(own[2])
    redundant.journal.batch_taken(0, [*first[:2], *last[:2]], at=redundant.now())
    redundant.done(0)
    sentence = "trajectory {} was dropped before the batch of update 0 was taken"
    assert broken(redundant.end(stopped=True)) == [sentence.format(id) for id in slow]


def test_more_dropped_groups_than_there_are_in_reserve_are_an_error(redundant: Redundant) -> None:
    redundant.admit(3, version=0)
    first, slow, last = (redundant.admit(group) or redundant.ids(group) for group in range(STARTED))
    for own in (first, last):
        redundant.score(own[0])
        redundant.score(own[1])
        redundant.drop(own[2])
    redundant.journal.batch_taken(0, [*first[:2], *last[:2]], at=redundant.now())
    redundant.drop(*slow, *redundant.ids(3))
    redundant.done(0)
    assert broken(redundant.end(stopped=True)) == [
        "2 groups were dropped with the batch of update 0, the recipe has 1 in reserve"
    ]


@pytest.mark.parametrize("facts", [replace(REDUNDANT, reserve_groups=0), replace(REDUNDANT, reserve_members=0)])
def test_each_kind_of_redundancy_excuses_its_own_drops_alone(tmp_path: Path, facts: RunFacts) -> None:
    run = Redundant(tmp_path, facts)
    run.publish(0)
    first, slow, last = run.start(0)
    for own in (first, last):
        run.score(own[0])
        run.score(own[1])
        if facts.reserve_members:
            run.drop(own[2])
    run.journal.batch_taken(0, [*first[:2], *last[:2]], at=run.now())
    if facts.reserve_groups:
        run.drop(*slow)
        run.done(0)
        assert exit_code(run.end(stopped=True)) == 0
        return
    run.drop(*slow)
    run.done(0)
    assert len(broken(run.end(stopped=True))) == 4, "each trajectory, and the number of groups"


def test_an_update_that_trains_on_more_of_a_group_than_the_recipe_wants_is_an_error(redundant: Redundant) -> None:
    first, slow, last = redundant.start(0)
    for id in (*first, *last[:2]):
        redundant.score(id)
    redundant.drop(last[2])
    redundant.journal.batch_taken(0, [*first, *last[:2]], at=redundant.now())
    redundant.drop(*slow)
    redundant.done(0)
    assert broken(redundant.end(stopped=True)) == ["update 0 trains on 3 trajectories of group 0, the recipe on 2"]


def test_a_killed_run_verifies_before_its_drops_are_recorded_and_settles_them_when_it_goes_on(
    redundant: Redundant, tmp_path: Path
) -> None:
    redundant.update(0)
    first, slow, last = redundant.start(1)
    for id in (first[1], first[2], first[0], *last[1:], slow[0]):
        redundant.score(id)
    redundant.journal.batch_taken(1, [*first[1:], *last[1:]], at=redundant.now())
    redundant.journal.close()  # killed here
    findings = verify(tmp_path)
    assert exit_code(findings) == 0, format_findings(findings)
    again = Redundant(tmp_path, REDUNDANT, resume=True)
    for _ in range(2):  # a second time changes nothing
        again.journal.settle(again.facts.retries, drops=True, at=again.now(), wanted=2, last_update=1)
    again.done(1)
    findings = again.end()
    assert exit_code(findings) == 0, format_findings(findings)
    with JournalReader(tmp_path) as reader:
        states = {id: reader.trajectory(id).state for id in (*first, *slow, *last)}
    assert {id for id, state in states.items() if state == "dropped"} == {first[0], last[0], *slow}


def test_of_more_rewards_than_a_group_needs_the_first_are_kept(redundant: Redundant, tmp_path: Path) -> None:
    first, slow, _ = redundant.start(0)
    for id in (first[2], first[0], first[1], slow[0]):
        redundant.score(id)
    redundant.journal.settle(1, drops=True, at=redundant.now(), wanted=2, last_update=1)
    redundant.journal.close()
    with JournalReader(tmp_path) as reader:
        assert [reader.trajectory(id).state for id in first] == ["scored", "dropped", "scored"]
        assert [reader.trajectory(id).state for id in slow] == ["scored", "running", "running"]


def test_groups_that_the_end_of_a_phase_left_over_were_not_needed_if_the_run_goes_on_after_it(tmp_path: Path) -> None:
    late = replace(REDUNDANT, paradigm="multi-version", staleness=2, reserve_members=0, updates=1)
    longer = replace(late, updates=2)
    run = Redundant(tmp_path, late)
    run.publish(0)
    for update, facts in enumerate((late, longer)):
        run.journal.begin(facts, at=run.now(), recipe=f"[training]\nsteps = {facts.updates}\n")
        first, slow, last = run.start(update)
        for id in (*first, *last):
            run.score(id)
        run.journal.batch_taken(update, [*first, *last], at=run.now())
        run.drop(*slow)  # before its deadline, but no later update was planned
        run.done(update)
        run.journal.finished(stopped=False, at=run.now())
    findings = run.end()
    assert exit_code(findings) == 0, format_findings(findings)


def test_a_group_that_is_dropped_before_the_last_update_of_its_phase_is_an_error(tmp_path: Path) -> None:
    late = replace(REDUNDANT, paradigm="multi-version", staleness=2, reserve_members=0, updates=1)
    run = Redundant(tmp_path, late)
    run.publish(0)
    run.journal.begin(late, at=run.now(), recipe="seed = 7")
    first, _, last = run.start(0)
    for id in (*first, *last):
        run.score(id)
    run.journal.begin(replace(late, updates=2), at=run.now(), recipe="seed = 7")
    run.admit(3, version=0)
    run.journal.batch_taken(0, [*first, *last], at=run.now())
    run.drop(*run.ids(3))
    run.done(0)
    sentence = "trajectory {} was dropped before the batch of update 1 was taken"
    assert broken(run.end(stopped=True)) == [sentence.format(id) for id in run.ids(3)]
