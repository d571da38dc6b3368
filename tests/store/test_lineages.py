"""Trajectories of several lineages in the journal: read back as recorded, and `verify` names what is wrong."""

from __future__ import annotations

import sqlite3
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from journal_cases import FACTS, Recorder

from stretto.errors import JournalError
from stretto.store.journal import JOURNAL_NAME
from stretto.store.reader import JournalReader
from stretto.store.verify import exit_code, format_findings, verify
from stretto.types import Completion, Lineage

BRANCHED = 12  # of group 4, version 1, in the batch of update 2: three lineages, the second of which is not trained
OTHERS = 13  # two lineages, both trained


def completion(id: int, *tokens: int, turns: list[list[int]] | None = None) -> Completion:
    logprobs = np.full(len(tokens), -0.5, dtype=np.float32)
    for (_, end), (start, _) in zip(turns or [], (turns or [])[1:], strict=False):
        logprobs[end:start] = 0.0
    return Completion(
        id=id,
        version=1,
        tokens=np.array(tokens, dtype=np.int32),
        logprobs=logprobs,
        finish="stop",
        checksum="sum1",
        turns=None if turns is None else np.array(turns, dtype=np.int32),
    )


def lineages(id: int) -> list[Lineage]:
    first = Lineage((1, 2, 4), completion(id, 5, 6, 90, 7, turns=[[0, 2], [3, 4]]), turn_numbers=(0, 3))
    if id == OTHERS:
        made = completion(id, 9, 91, 10, turns=[[0, 1], [2, 3]])
        return [first, Lineage((60, 61), made, turn_numbers=(1, 2))]
    title = Lineage((50,), completion(id, 8), train=False, turn_numbers=(1,))
    return [first, title, Lineage((60, 61), completion(id, 9, 10), turn_numbers=(2,))]


class Branches(Recorder):
    """The run of `Recorder`, in which two trajectories have several lineages."""

    def generate(self, id: int, token_versions: list[int] | None = None) -> None:
        if id == BRANCHED:
            texts = ["one", "title", "agent"]
            self.journal.generated(id, lineages(id), texts, at=self.now(), contexts=[None, "t:", "a:"])
        elif id == OTHERS:
            self.journal.generated(id, lineages(id), ["one", "two"], at=self.now(), contexts=[None, "a:"])
        else:
            super().generate(id, token_versions)

    def finish(self, group: int) -> list[int]:
        for id in self.ids(group):
            self.generate(id)
            by_turn = {BRANCHED: (0.0, 0.5, 0.0, 0.25), OTHERS: (1.0, 0.0, 0.0, 0.0)}.get(id)
            self.journal.scored(id, float(id % 2) if by_turn is None else sum(by_turn), at=self.now(), turns=by_turn)
        return self.ids(group)

    def take(self, update: int) -> list[int]:
        groups = sorted(range(update * self.facts.batch, (update + 1) * self.facts.batch), key=self.version_of)
        rows = {BRANCHED: (0, 2), OTHERS: (0, 1)}
        members = [(id, each) for group in groups for id in self.ids(group) for each in rows.get(id, (0,))]
        ids = [id for id, _ in members]
        self.journal.batch_taken(update, ids, at=self.now(), lineages=[each for _, each in members])
        return ids


@pytest.fixture
def branched(tmp_path: Path) -> Path:
    Branches(tmp_path, FACTS).run()
    return tmp_path


def damage(folder: Path, *statements: str) -> str:
    with sqlite3.connect(folder / JOURNAL_NAME) as db:
        for statement in statements:
            assert db.execute(statement).rowcount != 0, f"changed nothing: {statement}"
    findings = verify(folder)
    assert exit_code(findings) == 1
    return format_findings(findings)


def test_lineages_are_read_back_as_recorded(branched: Path) -> None:
    with JournalReader(branched) as reader:
        found, reward, turn_rewards = reader.load_lineages(BRANCHED)
        samples = [sample for sample in reader.batch(2) if sample.trajectory == BRANCHED]
        assert [sample.lineage for sample in reader.trained_samples(BRANCHED)] == [0, 2]
        assert reader.members(2).count(BRANCHED) == reader.trained().count(BRANCHED) == 1
    assert (reward, turn_rewards) == (0.75, (0.0, 0.5, 0.0, 0.25))
    for before, after in zip(lineages(BRANCHED), found, strict=True):
        assert replace(after, completion=before.completion) == before
        assert after.completion.tokens.tolist() == before.completion.tokens.tolist()
    assert [(tuple(each.prompt), each.lineage, each.turn_numbers) for each in samples] == [
        ((1, 2, 4), 0, (0, 3)),
        ((60, 61), 2, (2,)),
    ]
    assert [each.rewards_by_turn for each in samples] == [(0.5, 0.25), (0.25,)]


def test_an_update_counts_the_reward_of_a_trajectory_once(branched: Path) -> None:
    with JournalReader(branched) as reader:
        update = reader.updates()[2]
        records = reader.samples(2)
    assert update.num_samples == 8
    rewards = {record.trajectory: record.reward or 0.0 for record in records}
    assert update.reward == pytest.approx(sum(rewards.values()) / 6)
    own = [(r.lineage, r.num_lineages, r.train, r.context) for r in records if r.trajectory == BRANCHED]
    assert own == [(0, 3, True, None), (1, 3, False, "t:"), (2, 3, True, "a:")]


def test_a_run_of_several_lineages_verifies(branched: Path) -> None:
    findings = verify(branched)
    text = format_findings(findings)
    assert exit_code(findings) == 0, text
    assert "5 lineages of trajectories with more than one, 1 of them not to be trained" in text
    assert "24 trained, 0 failed" in text
    assert "27 completions" in text
    assert "26 trained once" in text


def test_the_file_refuses_to_train_a_lineage_twice(branched: Path) -> None:
    with sqlite3.connect(branched / JOURNAL_NAME) as db, pytest.raises(sqlite3.IntegrityError, match="UNIQUE"):
        db.execute("INSERT INTO members VALUES (3, 99, 12, 0, 2)")


def numbers(*values: int) -> str:
    return np.array(values, dtype="<i4").tobytes().hex()


OF_AGENT = "WHERE trajectory = 12 AND lineage = 2"
OF_TITLE = "WHERE trajectory = 12 AND lineage = 1"

DAMAGES = {
    "a trained lineage is missing": (
        [f"DELETE FROM completions {OF_AGENT}"],
        "law 2",
        "lineage 2 of trajectory 12 is missing: it has 3",
    ),
    "the rows of a trained lineage are missing": (
        [f"DELETE FROM completions {OF_AGENT}"],
        "law 2",
        "trajectory 12 was in a batch without its tokens of lineage 2",
    ),
    "an untrained lineage is missing": (
        [f"DELETE FROM completions {OF_TITLE}"],
        "law 2",
        "lineage 1 of trajectory 12 is missing: it has 3",
    ),
    "the last lineage and its count are missing": (
        [
            f"DELETE FROM completions {OF_AGENT}",
            f"DELETE FROM members {OF_AGENT}",
            "UPDATE trajectories SET num_lineages = 2 WHERE trajectory = 12",
        ],
        "law 2",
        "trajectory 12 has 3 turns in 2 lineages, and they have the numbers [0, 1, 3]",
    ),
    "a lineage was never trained": (
        [f"DELETE FROM members {OF_AGENT}"],
        "law 2",
        "lineage 2 of trajectory 12 is missing from the batch of update 2, which has others of that trajectory",
    ),
    "a lineage is trained in another update": (
        [f"UPDATE members SET update_id = 3, position = 99 {OF_AGENT}"],
        "law 2",
        "lineage 2 of trajectory 12 is missing from the batch of update 2",
    ),
    "a lineage is trained twice": (
        ["DROP INDEX members_train_once", "INSERT INTO members VALUES (3, 99, 12, 0, 2)"],
        "exactly once",
        "lineage 2 of trajectory 12 is trained 2 times as use 0, in updates 2 and 3",
    ),
    "an untrained lineage is trained": (
        ["INSERT INTO members VALUES (2, 99, 12, 0, 1)"],
        "law 2",
        "lineage 1 of trajectory 12 is in the batch of update 2, and is not to be trained",
    ),
    "a trained lineage is said not to be trained": (
        [f"UPDATE completions SET train = 0 {OF_AGENT}"],
        "law 2",
        "lineage 2 of trajectory 12 is in the batch of update 2, and is not to be trained",
    ),
    "an untrained lineage is said to be trained": (
        [f"UPDATE completions SET train = 1 {OF_TITLE}"],
        "law 2",
        "lineage 1 of trajectory 12 is missing from the batch of update 2",
    ),
    "a lineage too many": (
        ["UPDATE trajectories SET num_lineages = 2 WHERE trajectory = 12"],
        "law 2",
        "trajectory 12 has a lineage 2, and it has 2",
    ),
    "lineages in another order": (
        [
            f"UPDATE members SET position = 99 {OF_AGENT}",
        ],
        "law 2",
        "in the batch of update 2 trajectory 12 does not follow by version, group and member",
    ),
    "another number of a turn": (
        [f"UPDATE completions SET turn_numbers = x'{numbers(3)}' {OF_AGENT}"],
        "law 2",
        "trajectory 12 has 4 turns in 3 lineages, and they have the numbers [0, 1, 3, 3]",
    ),
    "too many numbers": (
        [f"UPDATE completions SET turn_numbers = x'{numbers(2, 4)}' {OF_AGENT}"],
        "law 2",
        "trajectory 12 has 1 turns in lineage 2, and they have the numbers [2, 4]",
    ),
    "rewards of fewer turns": (
        ["UPDATE trajectories SET turn_rewards = SUBSTR(turn_rewards, 1, 24) WHERE trajectory = 12"],
        "law 2",
        "trajectory 12 has 4 turns and rewards of 3",
    ),
    "another context": (
        [f"UPDATE completions SET context = x'{numbers(60, 62)}' {OF_AGENT}"],
        "recorded data",
        "lineage 2 of trajectory 12 is not what update 2 trained on",
    ),
    "no context": (
        [f"UPDATE completions SET context = x'' {OF_AGENT}"],
        "recorded data",
        "the context of lineage 2 of trajectory 12 is empty",
    ),
    "a context of three bytes": (
        [f"UPDATE completions SET context = x'010203' {OF_AGENT}"],
        "recorded data",
        "lineage 2 of trajectory 12 has `context` of 3 bytes, no multiple of 4",
    ),
    "a context outside of the vocabulary": (
        [f"UPDATE completions SET context = x'{numbers(60, -1)}' {OF_AGENT}"],
        "recorded data",
        "the context of lineage 2 of trajectory 12 has tokens from -1 to 60, outside of the vocabulary",
    ),
    "other tokens of a lineage": (
        [f"UPDATE completions SET tokens = x'{numbers(9, 11)}' {OF_AGENT}"],
        "recorded data",
        "lineage 2 of trajectory 12 is not what update 2 trained on",
    ),
    "other tokens of an untrained lineage": (
        [f"UPDATE completions SET tokens = x'{numbers(11)}' {OF_TITLE}"],
        "recorded data",
        "the digest of update 2 does not follow",
    ),
    "another version's weights": (
        [f"UPDATE completions SET checksum = 'sum2' {OF_TITLE}"],
        "law 1",
        "lineage 1 of trajectory 12 was generated by weights sum2",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_named_with_its_lineage(branched: Path, name: str) -> None:
    statements, law, sentence = DAMAGES[name]
    text = damage(branched, *statements)
    found = [line for line in text.splitlines() if sentence in line]
    assert found, text
    section = text[: text.index(sentence)].splitlines()
    assert law in [line for line in section if not line.startswith("   " * 6)][-1], text


@pytest.mark.parametrize(
    ("statement", "words"),
    [
        (f"DELETE FROM completions {OF_TITLE}", "it has 3 lineages, and those recorded are \\[0, 2\\]"),
        (f"UPDATE completions SET turn_numbers = x'{numbers(3)}' {OF_AGENT}", "have the numbers \\[0, 1, 3, 3\\]"),
        (
            f"UPDATE completions SET turn_numbers = x'{numbers(2, 4)}' {OF_AGENT}",
            "1 turns in a lineage",
        ),
        (f"UPDATE completions SET train = 2 {OF_AGENT}", "`train` is 2"),
    ],
)
def test_a_damaged_lineage_is_not_read(branched: Path, statement: str, words: str) -> None:
    damage(branched, statement)
    with JournalReader(branched) as reader, pytest.raises(JournalError, match=f"trajectory 12: .*{words}"):
        reader.load_lineages(BRANCHED)


def test_a_lineage_that_is_not_to_be_trained_is_no_sample(branched: Path) -> None:
    damage(branched, f"UPDATE completions SET train = 0 {OF_AGENT}")
    with JournalReader(branched) as reader, pytest.raises(JournalError, match="its lineage 2 is not to be trained"):
        reader.batch(2)


def test_a_batch_that_is_given_back_returns_each_trajectory_once(tmp_path: Path) -> None:
    run = Branches(tmp_path, FACTS)
    run.publish(0)
    run.update(0)
    run.update(1)
    for group in (4, 5):
        run.admit(group)
        run.finish(group)
    run.take(2)
    run.journal.score_again(14, "its reward is wrong", at=run.now())
    run.journal.scored(14, 0.5, at=run.now())
    run.take(2)
    run.done(2)
    run.journal.close()
    findings = verify(tmp_path)
    assert exit_code(findings) == 0, format_findings(findings)
    with sqlite3.connect(tmp_path / JOURNAL_NAME) as db:
        query = "SELECT to_state FROM transitions WHERE trajectory = 12 ORDER BY seq"
        states = [state for (state,) in db.execute(query)]
    assert states == ["running", "scoring", "scored", "training", "scored", "training", "trained"]


def test_failed_attempts_of_a_trajectory_count_once_in_the_digest_of_its_update(tmp_path: Path) -> None:
    """The journal and `verify` agree on a trajectory of several lineages that failed before."""
    run = Branches(tmp_path, FACTS)
    run.publish(0)
    run.update(0)
    run.update(1)
    run.journal.flush()
    for group in (4, 5):
        run.admit(group)
    run.journal.attempt_failed(BRANCHED, "generation", "out of memory", at=run.now())
    for group in (4, 5):
        run.finish(group)
    run.take(2)
    run.done(2)
    run.journal.close()
    findings = verify(tmp_path)
    assert exit_code(findings) == 0, format_findings(findings)
