"""Trajectories scored again under the versions that sampled them: a journal that was rewritten as a whole is found."""

from __future__ import annotations

import asyncio
import json
import shutil
import sqlite3
from collections import Counter
from contextlib import aclosing
from pathlib import Path

import numpy as np
import pytest
from run_cases import assert_verifies, recipe, rows, run

from stretto.assembly.recompute import recompute
from stretto.assembly.retrain import made_trainer, recorded_recipe, retrain
from stretto.cli import main
from stretto.errors import RunError
from stretto.setup.trainer_recovery import SampledVersions, train_again
from stretto.store import data_checks, update_writes
from stretto.store.journal import JOURNAL_NAME
from stretto.store.reader import JournalReader
from stretto.store.version_files import write_file
from stretto.types import Weights

ONE_AHEAD = ["rollout.staleness=2", "rollout.in_flight=3", "training.steps=4", "evaluation.prompts=0"]


def forge(folder: Path, *statements: str) -> None:
    """Makes changes, and rewrites all that follows from them: batches, metrics, sums and the chain of digests."""
    with sqlite3.connect(folder / JOURNAL_NAME) as db:
        for statement in statements:
            assert db.execute(statement).rowcount != 0, f"changed nothing: {statement}"
        updates = [update for (update,) in db.execute("SELECT update_id FROM updates ORDER BY 1").fetchall()]
        sums: Counter[str] = Counter()
        for update in updates:
            order = "SELECT trajectory, ROW_NUMBER() OVER (ORDER BY version, trajectory) - 1 AS place FROM members"
            db.execute("UPDATE members SET position = position + 1000 WHERE update_id = ?", (update,))
            db.execute(
                f"UPDATE members SET position = (SELECT place FROM ({order} JOIN trajectories USING (trajectory) "
                "WHERE update_id = ?1) o WHERE o.trajectory = members.trajectory) WHERE update_id = ?1",
                (update,),
            )
            made = [data_checks.read_sample(update, row) for row in db.execute(data_checks.MEMBERS, (update,))]
            data_checks.add_sums(sums, update, made)
            texts = db.execute("SELECT metrics, totals FROM updates WHERE update_id = ?", (update,)).fetchone()
            line, totals = map(json.loads, texts)
            expected = data_checks.expected_metrics(update, made, line)
            line |= {name: value for name, value in expected.items() if name in line}
            totals |= {name: value for name, value in sums.items() if name in totals}
            totals["ages"] = {name[4:]: value for name, value in sums.items() if name.startswith("age ")}
            db.execute(
                "UPDATE updates SET metrics = ?, totals = ? WHERE update_id = ?",
                (json.dumps(line), json.dumps(totals), update),
            )
        db.commit()
        with JournalReader(folder) as reader:
            batches = {update: reader.batch(update) for update in updates}
        for update, samples in batches.items():
            columns = "SELECT checksum, advantages, metrics, totals FROM updates WHERE update_id = ?"
            update_writes._seal(db, update, samples, db.execute(columns, (update,)).fetchone())
    db.close()


@pytest.fixture
def one_ahead(model: Path, tmp_path: Path) -> Path:
    """A run whose groups are trained one update after the newest version that they could have, at most."""
    run(recipe(model, tmp_path, *ONE_AHEAD), tmp_path / "run")
    return tmp_path / "run"


def write_versions(folder: Path) -> None:
    """Writes the files of all versions, which a finished run has removed."""

    async def write() -> None:
        async with aclosing(train_again(trainer, folder / JOURNAL_NAME, 0, 4, SampledVersions(0))) as again:
            async for made in again:
                assert isinstance(made, Weights)
                write_file(folder / "versions", made)

    trainer = made_trainer(recorded_recipe(folder), lambda text: None)
    try:
        asyncio.run(write())
    finally:
        trainer.close()


def test_what_was_recorded_is_scored_the_same_again(one_ahead: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(one_ahead), "--recompute", "5"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[-1].startswith("recomputed: 5 of 48 trained trajectories, ")
    assert said[-1].endswith("all are of the versions that sampled them")
    assert "0 versions from their files" in said[-1]
    result = recompute(one_ahead, 5)
    assert 0 < result.largest < 1e-4
    assert result.trained_again[0] == 0
    assert recompute(one_ahead, 100).num_checked == 48


def test_a_version_is_read_from_its_file_if_there_is_one(one_ahead: Path) -> None:
    write_versions(one_ahead)
    (one_ahead / "versions" / "000000.safetensors").unlink()
    result = recompute(one_ahead, 48)
    assert (result.trained_again, result.breaks, result.num_checked) == ([0], [], 48)
    assert result.from_files == [version for (version,) in versions_that_sampled(one_ahead) if version > 0]


def versions_that_sampled(folder: Path) -> list[tuple[int]]:
    return list(rows(folder, "SELECT DISTINCT version FROM completions ORDER BY 1"))


@pytest.mark.parametrize("files", [True, False], ids=["files", "trained again"])
def test_a_group_that_is_said_to_be_older_is_found_although_everything_else_agrees(
    one_ahead: Path, capsys: pytest.CaptureFixture[str], files: bool
) -> None:
    if files:
        write_versions(one_ahead)
    found = "SELECT MAX(group_id) FROM groups WHERE version > 0"
    ((group,),) = rows(one_ahead, found)
    forge(
        one_ahead,
        f"UPDATE groups SET version = version - 1, deadline = deadline - 1 WHERE group_id = {group}",
        f"UPDATE trajectories SET version = version - 1 WHERE group_id = {group}",
        "UPDATE completions SET version = version - 1, "
        "checksum = (SELECT v.checksum FROM versions v WHERE v.version = completions.version - 1) "
        f"WHERE trajectory / 4 = {group}",
    )
    assert_verifies(one_ahead)
    assert main(["verify", str(one_ahead), "--recompute", "48"]) == 1
    said = capsys.readouterr().out
    assert "BROKEN" in said
    assert f"trajectory {4 * group} does not have the log-probabilities of version" in said


@pytest.mark.parametrize(
    ("column", "kind", "value"), [("tokens", "<i4", 7), ("logprobs", "<f4", -2.5)], ids=["token", "log-probability"]
)
def test_a_token_or_its_probability_is_found_although_everything_else_agrees(
    one_ahead: Path, column: str, kind: str, value: float
) -> None:
    blob = np.array([value], dtype=kind).tobytes().hex()
    forge(
        one_ahead,
        f"UPDATE completions SET {column} = CAST(x'{blob}' || SUBSTR({column}, 5) AS BLOB) WHERE trajectory = 40",
    )
    assert_verifies(one_ahead)
    (broken,) = recompute(one_ahead, 48).breaks
    assert broken.startswith("trajectory 40 does not have the log-probabilities of version")


def test_a_reward_is_found_by_replay_although_everything_else_agrees(one_ahead: Path) -> None:
    shutil.copy(one_ahead / JOURNAL_NAME, one_ahead / "kept")
    forge(one_ahead, "UPDATE trajectories SET reward = reward + 0.5 WHERE trajectory = 0")
    assert_verifies(one_ahead)
    difference = retrain(one_ahead).difference
    assert difference is not None
    assert difference.startswith("version 1 differs: ")
    assert difference.endswith("; the advantages of update 0 differ too")
    shutil.copy(one_ahead / "kept", one_ahead / JOURNAL_NAME)
    forge(one_ahead, "UPDATE updates SET advantages = 'others' WHERE update_id = 1")
    assert_verifies(one_ahead)
    assert retrain(one_ahead).difference == "version 2 agrees, and the advantages of update 1 differ"


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
def test_tokens_of_several_versions_are_scored_under_their_own(model: Path, tmp_path: Path, lora: bool) -> None:
    overrides = ['rollout.paradigm="partial"', "rollout.in_flight=6", "rollout.max_tokens=40", "evaluation.prompts=0"]
    run(recipe(model, tmp_path, *overrides, lora=lora), tmp_path / "run")
    result = recompute(tmp_path / "run", 36)
    assert (result.num_checked, result.breaks) == (36, [])


def test_a_broken_journal_is_not_recomputed(one_ahead: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with sqlite3.connect(one_ahead / JOURNAL_NAME) as db:
        db.execute("UPDATE trajectories SET reward = reward + 1 WHERE trajectory = 3")
    db.close()
    assert main(["verify", str(one_ahead), "--recompute", "1"]) == 1
    assert "nothing was recomputed: the journal has to agree with itself first" in capsys.readouterr().out


def test_what_cannot_be_recomputed_is_refused_by_name(one_ahead: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number, words in (
        ("0", "is no number of trajectories: give 1 or more"),
        ("-1", "is no number of trajectories: give 1 or more"),
        ("many", "'many' is not a whole number"),
        ("9" * 301, "999999...999999 (301 digits) is too large: give at most 1000000000000"),
    ):
        with pytest.raises(SystemExit):
            main(["verify", str(one_ahead), f"--recompute={number}"])
        assert words in capsys.readouterr().err
    (one_ahead / "config.toml").unlink()
    with pytest.raises(RunError, match=r"it has no `config.toml`"):
        recompute(one_ahead, 1)
