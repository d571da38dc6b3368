"""`verify` proves the laws from the journal alone: each kind of damage is named under the law that it breaks."""

from __future__ import annotations

import shutil
import sqlite3
from dataclasses import replace
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from stretto.core.ledger import TRANSITIONS, TrajectoryState
from stretto.core.paradigms import PARADIGMS
from stretto.errors import JournalError, RunError
from stretto.store.journal import JOURNAL_NAME, Journal, RunFacts
from stretto.store.law_checks import LEGAL_MOVES
from stretto.store.reader import JournalReader
from stretto.store.schema import ENDS, LAWS_GIVEN_UP, UNDER_WAY, State
from stretto.store.verify import Finding, exit_code, format_findings, verify

FACTS = RunFacts(
    paradigm="multi-version", staleness=2, auto=False, batch=2, group=3, updates=4, seed=7, data_rows=8, retries=1
)


def damage(folder: Path, *statements: str) -> list[Finding]:
    db = sqlite3.connect(folder / JOURNAL_NAME)
    for statement in statements:
        assert db.execute(statement).rowcount != 0, f"changed nothing: {statement}"
    db.commit()
    db.close()
    return verify(folder)


def broken(findings: list[Finding]) -> set[str]:
    return {finding.law for finding in findings if not finding.holds}


def laws(findings: list[Finding]) -> set[str]:
    """The broken laws. A row that was changed breaks its digest as well, whatever else it breaks."""
    return broken(findings) - {"data"}


def test_a_finished_run_keeps_every_law(finished_run):
    findings = verify(finished_run)
    assert broken(findings) == set(), format_findings(findings)
    assert exit_code(findings) == 0
    text = format_findings(findings)
    assert len(text.splitlines()) == 5
    assert "24 completions, 120 tokens, 5 versions" in text
    assert "24 trained, 0 failed, 0 filtered, 0 dropped, 0 in progress (run finished); 8 groups in 4 updates" in text
    assert "24 samples, age mean 0.62 max 2, bound 2" in text
    assert "24 trained once, 0 later uses" in text
    assert "digests of 4 updates and 24 samples" in text


def spans(*places: int) -> str:
    return np.array(places, dtype="<i4").tobytes().hex()


def rewards(*values: float) -> str:
    return np.array(values, dtype="<f8").tobytes().hex()


BLOB_OF_TWOS = np.array([2, 2, 2, 2], dtype="<i4").tobytes().hex()
NAN_LOGPROBS = np.array([-1, np.nan, -1, -1], dtype="<f4").tobytes().hex()
POSITIVE_LOGPROBS = np.array([-1, 0.5, -1, -1], dtype="<f4").tobytes().hex()

FAILED_TRY = "INSERT INTO failures (trajectory, kind, at, reason) VALUES (12, 'generation', 1, 'out of memory')"

DAMAGES = {
    # law 1: trajectory 12 has four tokens and the version 1 of its group 4; group 6 has version 3
    "1 a trajectory of another version than its group": (
        ["UPDATE trajectories SET version = 0 WHERE trajectory = 12"],
        "12",
    ),
    "1 a token of another version": (
        [f"UPDATE completions SET token_versions = x'{BLOB_OF_TWOS}' WHERE trajectory = 18"],
        "18",
    ),
    "1 other weights": (["UPDATE completions SET checksum = 'sum9' WHERE trajectory = 4"], "4"),
    "1 another version's weights": (["UPDATE completions SET checksum = 'sum1' WHERE trajectory = 18"], "18"),
    "1 another stamp": (["UPDATE completions SET version = 1 WHERE trajectory = 18"], "18"),
    "1 lengths that disagree": (["UPDATE completions SET num_tokens = 7 WHERE trajectory = 12"], "12"),
    "1 log-probabilities cut short": (["UPDATE completions SET logprobs = x'0000' WHERE trajectory = 12"], "12"),
    "1 one seed twice": (
        ["UPDATE trajectories SET seed = (SELECT seed FROM trajectories LIMIT 1) WHERE trajectory = 5"],
        "5",
    ),
    "1 started before its version was loaded": (
        ["UPDATE versions SET loaded_after = 9999 WHERE version = 3"],
        "trajectory 18 started before an engine held its version 3",
    ),
    "1 started under a version that was never loaded": (
        ["UPDATE versions SET loaded_after = NULL WHERE version = 3"],
        "trajectory 18 started before an engine held its version 3",
    ),
    "1 started before its version was published": (
        ["UPDATE versions SET loaded_after = 0, published_after = 99 WHERE version = 3"],
        "trajectory 18 started before its version 3 was published",
    ),
    "1 published before it was trained": (
        ["UPDATE versions SET published_after = 3 WHERE version = 2"],
        "version 2 was published before update 1 had trained it",
    ),
    "1 a version that no update made": (
        ["INSERT INTO versions VALUES (5, 'sum5', 99, 9999, NULL, NULL)"],
        "version 5 was published before update 4",
    ),
    "1 the last update's version was never published": (
        ["DELETE FROM versions WHERE version = 4"],
        "update 3 is finished and version 4 was never published",
    ),
    # law 2; trajectory 12 has four tokens
    "2 a turn beyond the tokens": (
        [f"UPDATE completions SET turns = x'{spans(0, 2, 3, 5)}' WHERE trajectory = 12"],
        "12",
    ),
    "2 turns that overlap": ([f"UPDATE completions SET turns = x'{spans(0, 3, 2, 4)}' WHERE trajectory = 12"], "12"),
    "2 turns that end before the tokens do": (
        [f"UPDATE completions SET turns = x'{spans(0, 1, 2, 3)}' WHERE trajectory = 12"],
        "trajectory 12 has turns at [[0, 1], [2, 3]], which do not lie one after the other in its 4 tokens",
    ),
    "2 turns that are not what was sampled": (
        [f"UPDATE completions SET turns = x'{spans(0, 1, 3, 4)}' WHERE trajectory = 12"],
        "trajectory 12 has 2 tokens in 2 turns, and 4 are recorded as sampled",
    ),
    "2 a turn of nothing": ([f"UPDATE completions SET turns = x'{spans(0, 0, 0, 4)}' WHERE trajectory = 12"], "12"),
    "2 a log-probability of what was observed": (
        [f"UPDATE completions SET turns = x'{spans(0, 1, 3, 4)}', num_sampled = 2 WHERE trajectory = 12"],
        "trajectory 12 has log-probabilities of tokens between its turns, which were observed and not sampled",
    ),
    "2 rewards of more turns than there are": (
        [f"UPDATE trajectories SET turn_rewards = x'{rewards(0.0, 0.0)}' WHERE trajectory = 12"],
        "trajectory 12 has 1 turns and rewards of 2",
    ),
    "2 rewards of turns that add up to something else": (
        [f"UPDATE trajectories SET turn_rewards = x'{rewards(0.5)}' WHERE trajectory = 12"],
        "trajectory 12 has a reward of 0.0, and those of its turns add up to 0.5",
    ),
    "2 a batch out of order": (
        ["UPDATE members SET position = 99 WHERE update_id = 2 AND position = 0"],
        "in the batch of update 2 trajectory 15",
    ),
    "2 a member deleted": (["DELETE FROM members WHERE trajectory = 12"], "12"),
    "2 a trajectory deleted": (["DELETE FROM trajectories WHERE trajectory = 12"], "12"),
    "2 a prompt skipped": (
        [
            "UPDATE groups SET group_id = 8, prompt_index = 8, epoch = 1 WHERE group_id = 7",
            "UPDATE trajectories SET trajectory = trajectory + 3, group_id = 8 WHERE group_id = 7",
            "UPDATE completions SET trajectory = trajectory + 3 WHERE trajectory >= 21",
            "UPDATE transitions SET trajectory = trajectory + 3 WHERE trajectory >= 21",
            "UPDATE members SET trajectory = trajectory + 3 WHERE trajectory >= 21",
        ],
        "group 7",
    ),
    "2 a prompt twice": (["UPDATE groups SET prompt_index = 3 WHERE group_id = 4"], "4"),
    "2 a row drawn twice in an epoch": (
        ["UPDATE groups SET row_number = (SELECT row_number FROM groups WHERE group_id = 3) WHERE group_id = 4"],
        "groups 3 and 4 are both drawn from row",
    ),
    "2 a row that the data set does not have": (["UPDATE groups SET row_number = 8 WHERE group_id = 4"], "row 8 of 8"),
    "2 an epoch begun too early": (["UPDATE groups SET epoch = 1 WHERE group_id = 4"], "group 4 is of epoch 1"),
    "2 more tries than the recipe allows": (
        [FAILED_TRY] * 3,
        "trajectory 12 failed 3 times in generation, the recipe allows 2",
    ),
    "2 trained after its last try failed": (
        [FAILED_TRY] * 2,
        "trajectory 12 is trained after its last try in generation failed",
    ),
    "2 no reward": (["UPDATE trajectories SET reward = NULL WHERE trajectory = 12"], "12"),
    "2 an endless reward": (["UPDATE trajectories SET reward = 9e999 WHERE trajectory = 12"], "12"),
    "2 a reward that is no number": (["UPDATE trajectories SET reward = 'good' WHERE trajectory = 12"], "12"),
    "2 a log-probability that is none": (
        [f"UPDATE completions SET logprobs = x'{NAN_LOGPROBS}' WHERE trajectory = 12"],
        "12",
    ),
    "2 a probability above one": (
        [f"UPDATE completions SET logprobs = x'{POSITIVE_LOGPROBS}' WHERE trajectory = 12"],
        "12",
    ),
    "2 no completion": (["DELETE FROM completions WHERE trajectory = 12"], "12"),
    "2 an illegal transition": (
        ["UPDATE transitions SET to_state = 'training' WHERE trajectory = 12 AND to_state = 'scored'"],
        "12",
    ),
    "2 a transition after the end": (
        [
            "INSERT INTO transitions (trajectory, from_state, to_state, at, reason) "
            "VALUES (12, 'trained', 'running', 99, '')"
        ],
        "12",
    ),
    "2 a transition left out": (["DELETE FROM transitions WHERE trajectory = 12 AND to_state = 'scoring'"], "12"),
    "2 a state without a transition": (["DELETE FROM transitions WHERE trajectory = 12"], "12"),
    "2 still running at the end": (
        [
            "UPDATE trajectories SET state = 'running' WHERE group_id = 7",
            "DELETE FROM members WHERE trajectory >= 21",
            "DELETE FROM transitions WHERE trajectory >= 21 AND to_state <> 'running'",
        ],
        "21",
    ),
    "2 dropped": (["UPDATE trajectories SET state = 'dropped' WHERE trajectory = 12"], "12"),
    "2 failed and in a batch": (["UPDATE trajectories SET state = 'failed' WHERE trajectory = 12"], "12"),
    "2 filtered though nothing filters": (["UPDATE trajectories SET state = 'filtered' WHERE trajectory = 12"], "12"),
    "2 an update left out": (["UPDATE run SET value = '5' WHERE key = 'updates'"], "4 of 5"),
    "2 an update without its end": (["UPDATE updates SET finished_at = NULL WHERE update_id = 3"], "update 3"),
    "2 a batch of another size": (["UPDATE run SET value = '3' WHERE key = 'batch'"], "not 3"),
    "2 a group of another size": (
        [
            "INSERT INTO groups SELECT 8, 1, 8, row_number, version, deadline, staleness, '', x'', '{}', 1, '', NULL, "
            "NULL, 8, NULL "
            "FROM groups WHERE group_id = 7"
        ],
        "group 8",
    ),
    "2 a member out of its place": (["UPDATE trajectories SET member = 5 WHERE trajectory = 12"], "12"),
    "2 a hole in the updates": (
        [
            "UPDATE updates SET update_id = 4, checksum = 'sum5' WHERE update_id = 3",
            "UPDATE members SET update_id = 4 WHERE update_id = 3",
            "INSERT INTO versions VALUES (5, 'sum5', 99, 9999, NULL, NULL)",
            "UPDATE versions SET published_after = 99 WHERE version = 4",
        ],
        "update 3 is missing",
    ),
    "2 an update in the middle without its end": (
        ["UPDATE updates SET finished_at = NULL WHERE update_id = 2"],
        "update 2",
    ),
    # law 3
    "3 trained too late": (
        [
            "UPDATE groups SET version = 0, deadline = 2 WHERE group_id = 6",
            "UPDATE trajectories SET version = 0 WHERE group_id = 6",
            "UPDATE completions SET version = 0, checksum = 'sum0' WHERE trajectory BETWEEN 18 AND 20",
            "UPDATE members SET position = position + 10 WHERE trajectory > 20",
        ],
        "18",
    ),
    "3 a batch taken before the version that it trains was published": (
        ["UPDATE versions SET published_after = 80, loaded_after = 80 WHERE version = 2"],
        "the batch of update 2 was taken before version 2, which it trains, was published",
    ),
    "3 a bound above the run's": (["UPDATE run SET value = '1' WHERE key = 'staleness'"], "2"),
    "3 a deadline that was moved": (["UPDATE groups SET deadline = deadline + 1 WHERE group_id = 4"], "4"),
    "3 a deadline before its update": (["UPDATE groups SET deadline = 1, staleness = -1 WHERE group_id = 4"], "4"),
    # exactly once
    "once a trajectory twice in a batch": (
        ["DROP INDEX members_train_once", "INSERT INTO members VALUES (2, 99, 14, 0, 0)"],
        "14",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_named_under_its_law(finished_run, name):
    statements, offender = DAMAGES[name]
    law = name.split()[0]
    findings = damage(finished_run, *statements)
    assert laws(findings) == {law}, format_findings(findings)
    assert exit_code(findings) == 1
    details = next(finding.details for finding in findings if finding.law == law)
    assert any(offender in detail for detail in details), details
    assert "BROKEN" in format_findings(findings)


def test_what_was_trained_before_its_version_existed_breaks_law_3_as_well(finished_run):
    findings = damage(
        finished_run,
        "UPDATE groups SET version = 4, deadline = 6 WHERE group_id = 6",
        "UPDATE trajectories SET version = 4 WHERE group_id = 6",
        "UPDATE completions SET version = 4, checksum = 'sum4' WHERE trajectory BETWEEN 18 AND 20",
        "UPDATE versions SET loaded_after = 0 WHERE version = 4",
    )
    assert laws(findings) == {"1", "3"}
    assert "trajectory 18 of version 4 is in the batch of update 3, -1 updates later" in format_findings(findings)


def test_a_trajectory_of_two_batches_breaks_exactly_once(finished_run):
    findings = damage(finished_run, "DROP INDEX members_train_once", "INSERT INTO members VALUES (3, 99, 12, 0, 0)")
    assert "once" in laws(findings)


def test_a_second_end_breaks_exactly_once_as_well(finished_run):
    again = (
        "INSERT INTO transitions (trajectory, from_state, to_state, at, reason) VALUES (12, 'trained', 'failed', 9, '')"
    )
    findings = damage(finished_run, again)
    assert laws(findings) == {"2", "once"}
    assert "trajectory 12 has 2 ends" in format_findings(findings)


def test_a_later_use_without_the_first_breaks_exactly_once_as_well(finished_run):
    findings = damage(finished_run, "UPDATE members SET use = 1 WHERE trajectory = 12")
    assert laws(findings) == {"2", "once"}
    assert "trajectory 12 was used again and never trained" in format_findings(findings)


def test_a_version_that_was_never_published_breaks_law_1(finished_run):
    findings = damage(finished_run, "DELETE FROM versions WHERE version = 3")
    assert laws(findings) == {"1"}
    assert "version 3 of group 6 was never published" in format_findings(findings)


def test_only_the_first_offenders_are_named_and_the_rest_counted(finished_run):
    findings = damage(finished_run, "UPDATE completions SET checksum = 'nothing'")
    assert findings[0].broken == 24
    assert len(findings[0].details) == 5
    assert "and 19 more" in format_findings(findings)


REPLAYS = [f"UPDATE run SET value = '1' WHERE key = '{key}'" for key in ("replay_groups", "replay_uses")]
AGAIN = "INSERT INTO members SELECT 3, trajectory + 90, trajectory, 1, 0 FROM trajectories WHERE group_id = "


def test_a_later_use_is_no_second_training(finished_run):
    findings = damage(finished_run, *REPLAYS, AGAIN + "4")
    assert laws(findings) == set(), format_findings(findings)
    assert "24 trained once, 3 later uses" in format_findings(findings)


@pytest.mark.parametrize(
    ("law", "statements", "offender"),
    [
        ("once", [AGAIN + "4"], "trajectory 12 is used again 1 times, the recipe allows 0"),
        ("3", [*REPLAYS, AGAIN + "0"], "trajectory 0 of version 0 is in the batch of update 3, 3 updates later"),
        ("once", [*REPLAYS, AGAIN + "4 AND member > 0"], "uses 2 of the 3 trajectories of group 4 again"),
        ("once", [*REPLAYS, AGAIN + "4", AGAIN + "5"], "update 3 uses 2 groups again, the recipe allows 1"),
        (
            "once",
            ["UPDATE run SET value = '9' WHERE key = 'replay_uses'", REPLAYS[0], AGAIN.replace("1", "2") + "4"],
            "trajectory 12 is used again in update 3 as use 2, and use 1 was not before it",
        ),
        ("once", [*REPLAYS, AGAIN + "6"], "trajectory 18 is used again in update 3 as use 1, and use 0 was not"),
        (
            "2",
            [*REPLAYS, AGAIN + "4", "UPDATE members SET position = 200 WHERE update_id = 3 AND position = 0"],
            "used again, comes before one that is not",
        ),
        (
            "2",
            [*REPLAYS, AGAIN + "4", "UPDATE members SET position = 200 WHERE trajectory = 12 AND use = 1"],
            "trajectory 12, used again, does not follow by version, group and member",
        ),
    ],
)
def test_a_later_use_obeys_the_recipe_and_law_3_and_is_of_a_whole_group(finished_run, law, statements, offender):
    findings = damage(finished_run, *statements)
    assert law in laws(findings), format_findings(findings)
    assert offender in format_findings(findings)


def test_a_group_trains_with_the_rest_of_its_members_when_some_failed(recorder, tmp_path):
    run = recorder(replace(FACTS, updates=1))
    run.publish(0)
    run.admit(0)
    run.admit(1)
    run.finish(0)
    run.generate(3)
    run.journal.attempt_failed(4, "generation", "out of memory", at=run.now())
    run.journal.state_changed(4, "running", at=run.now())
    run.journal.attempt_failed(4, "generation", "out of memory", at=run.now())
    run.journal.failed(4, "out of memory", at=run.now())
    run.journal.scored(3, 1.0, at=run.now())
    run.generate(5)
    run.journal.attempt_failed(5, "scoring", "the reward hung", at=run.now())
    run.journal.attempt_failed(5, "scoring", "the reward hung", at=run.now())
    run.journal.failed(5, "the reward hung", at=run.now())
    run.journal.batch_taken(0, [0, 1, 2, 3], at=run.now())
    run.done(0)
    run.journal.finished(stopped=False, at=run.now())
    run.journal.close()
    findings = verify(tmp_path)
    assert broken(findings) == set(), format_findings(findings)
    assert "4 trained, 2 failed" in format_findings(findings)
    findings = damage(tmp_path, "UPDATE failures SET kind = 'scoring' WHERE id = 2")
    assert laws(findings) == {"2"}
    assert "trajectory 4 is failed before its 1 retries were used" in format_findings(findings)


def test_part_of_a_group_cannot_train_without_the_rest(recorder, tmp_path):
    run = recorder()
    run.publish(0)
    run.admit(0)
    run.admit(1)
    run.finish(0)
    run.finish(1)
    run.journal.batch_taken(0, [0, 1, 3, 4, 5], at=run.now())
    run.done(0)
    run.journal.flush()
    findings = verify(tmp_path)
    assert broken(findings) == {"2"}
    assert "trajectory 2 is scored, but others of its group 0 are in the batch of update 0" in format_findings(findings)


def test_a_run_that_is_not_finished_may_have_trajectories_under_way(recorder, tmp_path):
    run = recorder()
    run.publish(0)
    run.update(0)
    run.admit(2)
    run.admit(3)
    run.finish(2)
    run.generate(9)
    run.journal.state_changed(10, "waiting", at=run.now())
    run.journal.flush()
    findings = verify(tmp_path)  # while the run goes on
    assert broken(findings) == set(), format_findings(findings)
    assert "6 in progress (run running)" in format_findings(findings)
    run.journal.finished(stopped=True, at=run.now())
    run.journal.close()
    assert "6 in progress (run stopped)" in format_findings(verify(tmp_path))


def test_a_batch_in_training_is_no_break(recorder, tmp_path):
    run = recorder()
    run.publish(0)
    run.admit(0)
    run.admit(1)
    run.finish(0)
    run.finish(1)
    run.take(0)
    run.journal.flush()
    findings = verify(tmp_path)
    assert broken(findings) == set()
    _, law_2, law_3, once, _ = format_findings(findings).splitlines()
    taken = "in the batch of an unfinished update"
    assert f"0 trained, 0 failed, 0 filtered, 0 dropped, 6 in progress, 6 of them {taken} (run running)" in law_2
    assert "6 samples" in law_3
    assert once.endswith(f"0 trained once, 0 later uses, 6 {taken}")


def test_a_group_that_missed_its_deadline_is_seen_before_it_is_trained(recorder, tmp_path):
    run = recorder(replace(FACTS, staleness=0))
    run.publish(0)
    run.update(0)
    run.admit(2)
    run.finish(2)
    run.journal.flush()
    assert broken(verify(tmp_path)) == set()
    late = damage(tmp_path, "UPDATE groups SET version = 0, deadline = 0 WHERE group_id = 2")
    assert "group 2 is under way and missed its deadline, update 0" in format_findings(late)


def test_partial_counts_mixed_trajectories_and_exits_0(recorder, tmp_path):
    run = recorder(replace(FACTS, paradigm="partial", laws_broken=(1,), updates=2))
    run.publish(0)
    run.admit(2)  # under version 0, as are the first two
    run.update(0)
    run.admit(3)
    for id in (*run.ids(2), *run.ids(3)):
        run.generate(id, token_versions=[0, 0, 0] + [1] * (1 + id % 3) if id in (6, 7) else None)
        run.journal.scored(id, 1.0, at=run.now())
    run.take(1)
    run.done(1)
    run.journal.finished(stopped=False, at=run.now())
    run.journal.close()
    findings = verify(tmp_path)
    assert exit_code(findings) == 0, format_findings(findings)
    assert "broken by paradigm: 2" in format_findings(findings).splitlines()[0]
    shutil.copy(tmp_path / JOURNAL_NAME, tmp_path / "kept")
    for versions, checksum, sentence in (
        ([1, 1, 0, 0], "sum0", "trajectory 6 of version 0 has a token of version 0 after one of version 1"),
        ([0, 0, 0, 1], "sum0", "was generated by weights sum0, version 1 is sum1"),
        ([0, 0, 0, 2], "sum2", "trajectory 6 has tokens of version 2, and update 1 trained on it"),
    ):
        blob = np.array(versions, dtype="<i4").tobytes().hex()
        change = f"UPDATE completions SET token_versions = x'{blob}', checksum = '{checksum}' WHERE trajectory = 6"
        findings = damage(tmp_path, change)
        assert laws(findings) == {"1"}, "that is nobody's paradigm"
        assert sentence in format_findings(findings)
        shutil.copy(tmp_path / "kept", tmp_path / JOURNAL_NAME)
    with pytest.raises(JournalError, match=r"paradigm `multi-version` gives up laws \[1\], and it gives up laws \[\]"):
        damage(tmp_path, "UPDATE run SET value = '\"multi-version\"' WHERE key = 'paradigm'")
    findings = damage(tmp_path, "UPDATE run SET value = '[]' WHERE key = 'laws_broken'")
    assert laws(findings) == {"1"}
    assert exit_code(findings) == 1


def test_the_age_of_a_trajectory_is_that_of_its_oldest_token(recorder, tmp_path):
    run = recorder(replace(FACTS, paradigm="partial", laws_broken=(1,), updates=2))
    run.publish(0)
    run.admit(2)  # under version 0, as are the first two
    run.update(0)
    run.admit(3)
    versions = {6: [0, 0, 0, 1], 7: [1, 1, 1, 1, 1]}  # 7 was admitted under version 0, and began under version 1
    for id in (*run.ids(2), *run.ids(3)):
        run.generate(id, token_versions=versions.get(id))
        run.journal.scored(id, 1.0, at=run.now())
    run.take(1)
    run.done(1)
    run.journal.finished(stopped=False, at=run.now())
    run.journal.close()
    findings = verify(tmp_path)
    assert exit_code(findings) == 0, format_findings(findings)
    assert "12 samples, age mean 0.17 max 1, bound 2" in format_findings(findings)
    with JournalReader(tmp_path) as reader:
        assert {sample.trajectory: sample.age for sample in reader.samples(1)} == {6: 1, 7: 0, 8: 1, 9: 0, 10: 0, 11: 0}
        assert [(update.age, update.oldest) for update in reader.updates()] == [(0.0, 0), (2 / 6, 1)]
        assert [sample.oldest_version for sample in reader.batch(1)] == [0, 1, 0, 1, 1, 1]


OLDER_TOKENS = {
    "after newer ones": ([3, 3, 0, 0], {"1", "3"}, "has a token of version 0 after one of version 3"),
    "for a while": ([3, 0, 0, 3], {"1", "3"}, "has a token of version 0 after one of version 3"),
    "all of them": ([0, 0, 0, 0], {"1", "3"}, "has tokens of version 0, which is older"),
    "within the bound": ([2, 3, 3, 3], {"1"}, "has tokens of version 2, which is older"),
}


@pytest.mark.parametrize("case", OLDER_TOKENS)
def test_a_token_older_than_one_before_it_or_than_its_group_is_nobodys_paradigm(case, finished_run):
    versions, expected, sentence = OLDER_TOKENS[case]
    blob = np.array(versions, dtype="<i4").tobytes().hex()
    findings = damage(
        finished_run,
        "UPDATE run SET value = '\"partial\"' WHERE key = 'paradigm'",
        "UPDATE run SET value = '[1]' WHERE key = 'laws_broken'",
        f"UPDATE completions SET token_versions = x'{blob}', checksum = 'sum{versions[-1]}', version = {versions[0]} "
        "WHERE trajectory = 18",
    )
    assert laws(findings) == expected
    assert exit_code(findings) == 1
    text = format_findings(findings)
    assert f"trajectory 18 of version 3 {sentence}" in text
    assert "BROKEN 1, broken by paradigm: 0;" in text.splitlines()[0]
    if "3" in expected:
        assert (
            "trajectory 18 of version 3 has a token of version 0 and is in the batch of update 3, 3 updates later; "
            "it was admitted under 2"
        ) in text


DROPPED_IN_PART = (
    "trajectory 0 is dropped, but others of its group 0 are in the batch of update 0",
    [
        "DELETE FROM members WHERE trajectory = 0",
        "DELETE FROM transitions WHERE to_state = 'training' AND trajectory = 0",
        "UPDATE transitions SET from_state = 'scored', to_state = 'dropped' WHERE to_state = 'trained' "
        "AND trajectory = 0",
        "UPDATE trajectories SET state = 'dropped' WHERE trajectory = 0",
    ],
)
DROPPED_TOO_SOON = (
    "group 2 was dropped before the batch of update 1, its deadline, was taken",
    [
        "UPDATE run SET value = '1' WHERE key = 'staleness'",
        "UPDATE groups SET staleness = 1, deadline = version + 1",
    ],
)
NEVER_ENDED = (
    "the run is finished, and trajectory 6 is still running",
    [
        "DELETE FROM transitions WHERE to_state = 'dropped' AND trajectory = 6",
        "UPDATE trajectories SET state = 'running', ended_at = NULL WHERE trajectory = 6",
    ],
)


def test_drop_counts_what_it_threw_away_and_exits_0(recorder, tmp_path):
    run = recorder(replace(FACTS, paradigm="drop", laws_broken=(2,), updates=1, staleness=0))
    run.publish(0)
    for group in (0, 1, 2):
        run.admit(group, version=0)
    run.finish(0)
    run.finish(1)
    run.take(0)
    for id in run.ids(2):
        run.journal.dropped(id, "past its age limit", at=run.now(), num_tokens=17)
    run.done(0)
    run.journal.finished(stopped=False, at=run.now())
    run.journal.close()
    findings = verify(tmp_path)
    assert exit_code(findings) == 0, format_findings(findings)
    assert "broken by paradigm: 3; 6 trained" in format_findings(findings).splitlines()[1]
    for sentence in DROPPED_IN_PART, DROPPED_TOO_SOON, NEVER_ENDED:
        shutil.copy(tmp_path / JOURNAL_NAME, tmp_path / "kept")
        findings = damage(tmp_path, *sentence[1])
        assert sentence[0] in format_findings(findings)
        assert laws(findings) == {"2"}
        assert exit_code(findings) == 1
        shutil.copy(tmp_path / "kept", tmp_path / JOURNAL_NAME)
    findings = damage(tmp_path, "DELETE FROM completions WHERE trajectory = 0")
    assert exit_code(findings) == 1, "the paradigm excuses what it dropped and nothing else"


FILTERED_WRONGLY = {
    "UPDATE trajectories SET reward = 1.0 WHERE trajectory = 7": "group 2 is filtered, and its rewards differ: 0.5 and",
    "UPDATE trajectories SET reward = NULL WHERE trajectory = 7": "group 2 is filtered, and not all of it was scored",
    "UPDATE trajectories SET state = 'scored' WHERE trajectory = 7": "group 2 is filtered, and others of it are not",
    "UPDATE run SET value = '0' WHERE key = 'filter_limit'": "trajectory 6 is filtered, and the recipe filters nothing",
}


def test_filtering_is_allowed_where_the_recipe_asks_for_it(recorder, tmp_path):
    run = recorder(replace(FACTS, updates=1, filter_limit=1))
    run.publish(0)
    for group in (0, 1, 2):
        run.admit(group)
        run.finish(group)
    for id in run.ids(2):
        run.journal.filtered(id, "all rewards are equal", at=run.now())
    run.take(0)
    run.done(0)
    run.journal.finished(stopped=False, at=run.now())
    run.journal.close()
    findings = damage(tmp_path, "UPDATE trajectories SET reward = 0.5 WHERE group_id = 2")
    assert exit_code(findings) == 0, format_findings(findings)
    assert "3 filtered" in format_findings(findings)
    for statement, offender in FILTERED_WRONGLY.items():
        shutil.copy(tmp_path / JOURNAL_NAME, tmp_path / "kept")
        findings = damage(tmp_path, statement)
        assert offender in format_findings(findings), statement
        assert exit_code(findings) == 1
        shutil.copy(tmp_path / "kept", tmp_path / JOURNAL_NAME)


def test_filtering_has_its_limit(recorder, tmp_path):
    run = recorder(replace(FACTS, batch=1, updates=1, filter_limit=1))
    run.publish(0)
    for group in range(3):
        run.admit(group)
        for id in run.ids(group):
            run.generate(id)
            run.journal.scored(id, 1.0, at=run.now())
    for id in (*run.ids(1), *run.ids(2)):
        run.journal.filtered(id, "no signal", at=run.now())
    run.journal.flush()
    findings = verify(tmp_path)
    assert "2 groups were filtered before the batch of update 0, the recipe allows 1" in format_findings(findings)
    assert broken(findings) == {"2"}


def test_every_batch_has_a_limit_of_its_own(recorder, tmp_path):
    run = recorder(replace(FACTS, batch=1, updates=2, filter_limit=1))
    run.publish(0)
    for group in range(3):
        run.admit(group)
        for id in run.ids(group):
            run.generate(id)
            run.journal.scored(id, 1.0, at=run.now())
    for id in run.ids(1):
        run.journal.filtered(id, "no signal", at=run.now())
    run.take(0)
    for id in run.ids(2):
        run.journal.filtered(id, "no signal", at=run.now())
    run.journal.group_spared(0, 0, "the limit is reached", at=run.now())
    run.journal.close()
    findings = verify(tmp_path)
    assert broken(findings) == set(), format_findings(findings)
    findings = damage(tmp_path, "UPDATE trajectories SET reward = 0.5 WHERE trajectory = 1")
    assert "group 0 was spared from being filtered, and its rewards differ" in format_findings(findings)


def test_rows_by_pass_rate_come_as_often_as_they_like_and_say_why(finished_run):
    by_rate = [
        "UPDATE run SET value = '\"pass-rate\"' WHERE key = 'order'",
        "UPDATE groups SET epoch = NULL, row_number = 3, draw = 'pass rate 0.25'",
    ]
    assert laws(damage(finished_run, *by_rate)) == set()
    findings = damage(finished_run, "UPDATE groups SET draw = '' WHERE group_id = 4")
    assert laws(findings) == {"2"}
    assert "group 4 does not say why its row was drawn" in format_findings(findings)
    findings = damage(finished_run, "UPDATE groups SET epoch = 0 WHERE group_id = 4")
    assert "group 4 is of epoch 0, and rows that come by their pass rate have none" in format_findings(findings)
    findings = damage(finished_run, "UPDATE run SET value = '\"shuffled\"' WHERE key = 'order'")
    assert "are both drawn from row 3" in format_findings(findings)


def test_a_run_that_was_killed_and_taken_up_keeps_every_law_and_says_so(recorder, tmp_path):
    run = recorder()
    run.publish(0)
    run.update(0)
    run.admit(2)
    run.admit(3)
    run.finish(2)
    run.finish(3)
    members = run.take(1)
    run.journal.close()  # killed here, while it trains
    run = recorder(resume=True)
    run.journal.settle(run.facts.retries, drops=False, at=run.now())
    assert run.take(1) == members
    run.done(1)
    run.update(2)
    run.update(3)
    run.journal.finished(stopped=False, at=run.now())
    run.journal.close()
    findings = verify(tmp_path)
    assert broken(findings) == set(), format_findings(findings)
    assert "resumed once" in format_findings(findings)
    held = Journal.open(tmp_path / "journal.sqlite", resume=True)
    assert "(run running)" in format_findings(verify(tmp_path))
    held.close()
    assert "(run finished)" in format_findings(verify(tmp_path))


def test_a_trajectory_moves_under_its_own_version_to_an_instance_that_is_there(finished_run):
    joined = "INSERT INTO instances (session, instance, slots, joined_at) VALUES (1, 5, 4, 2.0)"
    version = "(SELECT version FROM trajectories WHERE trajectory = {of})"
    move = f"INSERT INTO moves VALUES (NULL, {{at}}, {{trajectory}}, {version}, 0, 5, 9, 64, 0, '')"
    findings = damage(finished_run, joined, move.format(at=3.0, trajectory=20, of=20))
    assert laws(findings) == set(), format_findings(findings)
    findings = damage(finished_run, move.format(at=1.0, trajectory=20, of=20))
    assert "trajectory 20 went to instance 5, which was not there" in format_findings(findings)
    findings = damage(finished_run, move.format(at=3.0, trajectory=20, of=0))
    assert laws(findings) == {"1", "2"}
    assert "trajectory 20 of version 3 went to instance 5 under version 0" in format_findings(findings)


def test_a_version_that_was_made_again_has_two_checksums_and_no_third(finished_run):
    made_again = [
        "INSERT INTO remade VALUES (2, 'sum2', 1.0)",
        "UPDATE versions SET checksum = 'other' WHERE version = 2",
        "UPDATE updates SET checksum = 'other' WHERE update_id = 1",
        "UPDATE completions SET checksum = 'other' WHERE trajectory = (SELECT MAX(trajectory) FROM completions "
        "WHERE version = 2)",
    ]
    findings = damage(finished_run, *made_again)
    assert laws(findings) == set(), format_findings(findings)
    assert "1 of them made again with other bits" in format_findings(findings)
    assert laws(damage(finished_run, "UPDATE completions SET checksum = 'third' WHERE trajectory = 0")) == {"1"}


def test_digests_hold_after_a_version_was_made_again(recorder, tmp_path):
    run = recorder()
    run.publish(0)
    run.update(0)
    run.journal.version_made_again(1, "other", at=run.now())
    run.journal.version_made_again(1, "third", at=run.now())
    run.journal.flush()
    findings = verify(tmp_path)
    assert broken(findings) == set(), format_findings(findings)


def test_a_version_has_the_weights_that_its_update_made(finished_run):
    findings = damage(finished_run, "UPDATE updates SET checksum = 'another' WHERE update_id = 1")
    assert laws(findings) == {"1"}
    assert "version 2 was published as sum2, and update 1 had made another" in format_findings(findings)


@pytest.mark.parametrize("recorded", [True, False], ids=["dropped", "being dropped"])
def test_what_was_being_dropped_when_the_run_was_killed_is_dropped(recorder, tmp_path, recorded):
    run = recorder(replace(FACTS, paradigm="drop", laws_broken=(2,), updates=2, staleness=0))
    run.publish(0)
    run.update(0)
    for group in (2, 3, 4):
        run.admit(group, version=1)
    run.finish(2)
    run.finish(3)
    run.take(1)
    for id in run.ids(4) if recorded else ():
        run.journal.dropped(id, "past its age limit", at=run.now(), num_tokens=3)
    run.journal.close()  # killed here: the batch was taken, and with it group 4 was given up
    run = recorder(replace(FACTS, paradigm="drop", laws_broken=(2,), updates=2, staleness=0), resume=True)
    run.journal.settle(run.facts.retries, drops=True, at=run.now())
    run.take(1)
    run.done(1)
    run.journal.finished(stopped=False, at=run.now())
    run.journal.close()
    findings = verify(tmp_path)
    assert exit_code(findings) == 0, format_findings(findings)
    assert "12 trained, 0 failed, 0 filtered, 3 dropped, 0 in progress" in format_findings(findings)


def legal_moves() -> set[tuple[str | None, str]]:
    db = sqlite3.connect(":memory:")
    return set(db.execute(f"WITH legal(source, target) AS {LEGAL_MOVES} SELECT source, target FROM legal"))


def test_no_move_leaves_an_end():
    assert not {source for source, _ in legal_moves()} & {"trained", "failed", "filtered", "dropped"}


# To the journal, a trajectory that waits for its world is running.
IN_THE_JOURNAL = {state: state.name.lower() for state in TrajectoryState} | {TrajectoryState.BETWEEN_TURNS: "running"}


def test_core_and_journal_have_the_same_states_and_paradigms():
    assert list(dict.fromkeys(IN_THE_JOURNAL[state] for state in TrajectoryState)) == list(get_args(State))
    assert (*UNDER_WAY, *ENDS) == get_args(State)
    assert {each.name.lower() for each, following in TRANSITIONS.items() if not following} == set(ENDS)
    assert {name: row.breaks for name, row in PARADIGMS.items()} == LAWS_GIVEN_UP


def test_core_and_journal_have_the_same_moves_but_for_what_only_one_of_them_can_see():
    """Both tables are written down by hand. `verify` trusts nothing of the core, so it has a table of its own."""
    core = {
        (IN_THE_JOURNAL[source], IN_THE_JOURNAL[target])
        for source, following in TRANSITIONS.items()
        for target in following
        if TrajectoryState.BETWEEN_TURNS not in (source, target) or IN_THE_JOURNAL[source] != IN_THE_JOURNAL[target]
    }
    journal = legal_moves()
    assert core - journal == {
        ("waiting", "scoring"),  # it had ended on the instance before it was suspended: in the journal it never waited
    }
    assert journal - core == {
        (None, "running"),  # its admission
        ("running", "running"),  # its instance was lost, and another has it now
        ("waiting", "waiting"),  # the run was stopped while it waited
        ("waiting", "failed"),  # its last attempt had failed, and the run was killed before that was recorded
        ("scored", "scoring"),  # a resumed run takes back a reward that cannot be trained on
        ("training", "scored"),  # and gives back the batch that holds it
    }


def test_what_is_no_journal_is_an_error_by_name(tmp_path):
    with pytest.raises(RunError, match=r"no `journal\.sqlite`"):
        verify(tmp_path)
    (tmp_path / JOURNAL_NAME).write_bytes(b"not a database at all, " * 100)
    with pytest.raises(JournalError, match="file is not a database"):
        verify(tmp_path)


def test_a_damaged_file_is_an_error_by_name(finished_run):
    path = finished_run / JOURNAL_NAME
    data = bytearray(path.read_bytes())
    data[4096 * 4 : 4096 * 12] = b"\x5a" * (4096 * 8)
    path.write_bytes(data)
    with pytest.raises(JournalError, match=r"journal\.sqlite` (is damaged|cannot be read)"):
        verify(finished_run)


def test_a_journal_that_was_never_begun_is_an_error_by_name(recorder, tmp_path):
    run = recorder()
    run.journal.close()
    with pytest.raises(JournalError, match="lacks facts of its run"):
        damage(tmp_path, "DELETE FROM run WHERE key = 'paradigm'")


def test_a_batch_that_was_taken_back_for_a_reward_is_no_break_and_is_counted(recorder, tmp_path):
    run = recorder()
    run.publish(0)
    run.update(0)
    for group in (2, 3):
        run.admit(group)
        run.finish(group)
    taken = run.take(1)
    run.journal.score_again(taken[0], "beyond any bound", at=run.now())
    run.journal.flush()
    findings = verify(tmp_path)
    assert broken(findings) == set(), format_findings(findings)
    assert "returned and taken again: 1" in format_findings(findings)
    run.journal.scored(taken[0], 1.0, at=run.now())
    assert run.take(1) == taken
    run.done(1)
    run.journal.flush()
    findings = verify(tmp_path)
    assert broken(findings) == set(), format_findings(findings)
    assert "12 trained once" in format_findings(findings)


@pytest.mark.parametrize(
    ("statement", "sentence"),
    [
        ("DELETE FROM failures", "trajectory 6 lost its reward, and no failed try says why"),
        (
            "UPDATE transitions SET at = at + 1 WHERE from_state = 'scored' AND to_state = 'scoring'",
            "was taken into a batch that was given back, and no reward was why",
        ),
    ],
)
def test_a_reward_or_a_batch_that_was_taken_back_without_a_reason_is_a_break(recorder, tmp_path, statement, sentence):
    run = recorder()
    run.publish(0)
    run.update(0)
    for group in (2, 3):
        run.admit(group)
        run.finish(group)
    taken = run.take(1)
    run.journal.score_again(taken[0], "beyond any bound", at=run.now())
    run.journal.flush()
    findings = damage(tmp_path, statement)
    assert laws(findings) == {"2"}
    assert sentence in format_findings(findings)


def test_a_run_folder_without_its_configuration_is_proved_and_says_what_was_not_compared(finished_run):
    findings = verify(finished_run)
    assert "not the configuration: there is no `config.toml`" in format_findings(findings)
    assert exit_code(findings) == 0
    (finished_run / "config.toml").touch()
    assert "configuration" not in format_findings(verify(finished_run))


@pytest.mark.parametrize(
    ("statement", "sentence"),
    [
        ("UPDATE trajectories SET reward = 'abc'", "has 'abc' in its column `reward`, which is no REAL"),
        ("UPDATE completions SET tokens = 'abc'", "has 'abc' in its column `tokens`, which is no BLOB"),
        ("UPDATE completions SET num_sampled = 0.5", "has 0.5 in its column `num_sampled`, which is no INTEGER"),
        ("UPDATE completions SET finish = x'00'", r"has b'\x00' in its column `finish`, which is no TEXT"),
    ],
)
def test_a_column_that_holds_another_type_is_named_with_what_it_holds(finished_run, statement, sentence):
    findings = damage(finished_run, f"{statement} WHERE trajectory = 14")
    assert exit_code(findings) == 1
    assert f"trajectory 14 {sentence}" in [detail for finding in findings for detail in finding.details]


RECEIPTS = (
    "INSERT INTO receipts SELECT 'r' || version, 0, version, checksum, 64, 1e-6, 1e-5, 1e-4, 'vllm 0.32.0', 1.0, "
    "'1 x cpu', 'digest' FROM versions",
    "UPDATE completions SET receipts = '[\"r' || version || '\"]'",
    "INSERT INTO run VALUES ('engine', '\"vllm\"') ON CONFLICT DO UPDATE SET value = excluded.value",
)


def test_completions_with_receipts_are_counted(finished_run: Path) -> None:
    findings = damage(finished_run, *RECEIPTS)
    assert laws(findings) == set(), format_findings(findings)
    assert "; 24 of the completions by receipt (5 receipts of vllm 0.32.0)" in format_findings(findings)


def test_engines_that_lay_weights_out_otherwise_may_hold_other_bytes(finished_run: Path) -> None:
    again = "INSERT INTO receipts SELECT 's' || id, 1, version, checksum, 64, 1e-6, 1e-5, 1e-4, served_by, at, "
    others = (f"{again} '2 x cuda', 'other' FROM receipts", "UPDATE receipts SET held = NULL WHERE id = 'r1'")
    findings = damage(finished_run, *RECEIPTS, *others)
    assert laws(findings) == set(), format_findings(findings)


@pytest.mark.parametrize(
    ("statement", "told"),
    [
        (
            "UPDATE completions SET receipts = NULL WHERE trajectory = 12",
            "trajectory 12 has no receipt of the engine `vllm`",
        ),
        (
            'UPDATE completions SET receipts = \'["r1", "x"]\' WHERE trajectory = 12',
            "trajectory 12 has the receipt `x`, which was never given",
        ),
        (
            "UPDATE completions SET receipts = '[\"r2\"]' WHERE trajectory = 12",
            "trajectory 12 of version 1 and weights sum1 has the receipt `r2` of version 2 and weights sum2",
        ),
        (
            "UPDATE receipts SET mean_difference = 0.5 WHERE id = 'r3'",
            "receipt `r3` of version 3 has a difference of 0.5",
        ),
        ("UPDATE receipts SET checksum = 'sum9' WHERE id = 'r1'", "has the receipt `r1` of version 1 and weights sum9"),
        (
            "INSERT INTO receipts SELECT 's1', 1, 1, checksum, 64, 1e-6, 1e-5, 1e-4, served_by, at, layout, 'other' "
            "FROM receipts WHERE id = 'r1'",
            "receipts `r1` and `s1` of version 1 and weights sum1 are of engines that held different weights",
        ),
    ],
)
def test_a_receipt_that_proves_nothing_breaks_law_one(finished_run: Path, statement: str, told: str) -> None:
    findings = damage(finished_run, *RECEIPTS, statement)
    assert laws(findings) == {"1"}
    assert told in format_findings(findings)
