"""Rewards of several parts in the journal: read back as recorded, and `verify` names what is wrong."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
from journal_cases import FACTS, Recorder

from stretto.store.blobs import parts_text, read_parts
from stretto.store.journal import JOURNAL_NAME
from stretto.store.reader import JournalReader
from stretto.store.verify import exit_code, format_findings, verify
from stretto.types import RewardPart


def parts(id: int) -> tuple[RewardPart, ...]:
    return (RewardPart("correct", 1.0, float(id % 2)), RewardPart("format", 0.2, None if id % 3 else 0.5))


def reward(id: int) -> float:
    return id % 2 + (0.0 if id % 3 else 0.1)


class Weighted(Recorder):
    """The run of `Recorder`, whose rewards have two parts."""

    def finish(self, group: int) -> list[int]:
        for id in self.ids(group):
            self.generate(id)
            self.journal.scored(id, reward(id), at=self.now(), parts=parts(id))
        return self.ids(group)


@pytest.fixture
def weighted(tmp_path: Path) -> Path:
    Weighted(tmp_path, FACTS).run()
    return tmp_path


def test_parts_are_read_back_as_recorded(weighted: Path) -> None:
    with JournalReader(weighted) as reader:
        assert [sample.reward_parts for sample in reader.batch(1)] == [parts(id) for id in reader.members(1)]
        assert reader.trajectory(3).reward_parts == parts(3)
        records = {record.trajectory: record for record in reader.samples(1)}
    assert records[7].rewards == {"correct": 1.0, "format": None}
    assert records[9].rewards == {"correct": 1.0, "format": 0.5}


def test_a_run_with_parts_verifies_and_says_how_many_sums_were_checked(weighted: Path) -> None:
    findings = verify(weighted)
    assert exit_code(findings) == 0, format_findings(findings)
    assert "weighted sums of rewards: 24" in format_findings(findings)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("reward = 0.9", "trajectory 1 has a reward of 0.9, and the weighted sum of its 1 parts is 1.0"),
        (
            """reward_parts = '[["correct", 1.0, 1.0], ["format", 0.3, null]]'""",
            "trajectory 1 is not what update 0 trained on",
        ),
        ("""reward_parts = '[["correct", 2.0, 1.0]]'""", "the weighted sum of its 1 parts is 2.0"),
        ("reward_parts = NULL", "trajectory 1 is not what update 0 trained on"),
        ("reward_parts = '[]'", "the weighted sum of its 0 parts"),
        ("reward_parts = '{'", "has parts of a reward that cannot be read"),
        ("""reward_parts = '[["correct", "1", 1.0]]'""", "has parts of a reward that cannot be read"),
    ],
)
def test_verify_names_a_reward_that_is_not_the_weighted_sum_of_its_parts(
    weighted: Path, change: str, words: str
) -> None:
    with sqlite3.connect(weighted / JOURNAL_NAME) as db:
        assert db.execute(f"UPDATE trajectories SET {change} WHERE trajectory = 1").rowcount == 1
    findings = verify(weighted)
    assert exit_code(findings) == 1
    assert words in format_findings(findings)


def test_verify_names_a_mean_of_a_part_that_is_not_that_of_the_samples(tmp_path: Path) -> None:
    class Wrong(Weighted):
        def done(self, update: int) -> None:
            self.journal.flush()
            with JournalReader(self.folder) as reader:
                samples = reader.batch(update)
            metrics = {"reward/correct": 0.5, "reward/format": 0.5 if update != 2 else 0.4}
            self.journal.update_done(
                update, metrics, at=self.now(), checksum=f"sum{update + 1}", samples=samples, advantages="none"
            )
            self.publish(update + 1)

    Wrong(tmp_path, FACTS).run()
    said = format_findings(verify(tmp_path))
    assert "update 2 has `reward/format` 0.4 in its metrics, and its samples give 0.5" in said
    assert said.count("reward/") == 1


def test_a_reward_that_is_taken_back_takes_its_parts_along(tmp_path: Path) -> None:
    made = Weighted(tmp_path, FACTS)
    made.publish(0)
    made.admit(0)
    made.finish(0)
    made.journal.score_again(1, "too large", at=made.now())
    made.journal.flush()
    with JournalReader(tmp_path) as reader:
        assert reader.trajectory(1).reward_parts is None
        assert reader.trajectory(2).reward_parts == parts(2)
    made.journal.close()


def test_parts_have_one_text_whatever_the_sign_of_a_zero() -> None:
    text = parts_text([RewardPart("a", -0.0, -0.0), RewardPart("b", 1.0, None)])
    assert text == parts_text([RewardPart("a", 0.0, 0.0), RewardPart("b", 1.0, None)])
    assert read_parts(text) == (RewardPart("a", 0.0, 0.0), RewardPart("b", 1.0, None))
