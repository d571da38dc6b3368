"""`verify` proves what was trained on: each of these edits of the journal of a real run is named."""

from __future__ import annotations

import os
import shutil
import sqlite3
from pathlib import Path

import numpy as np
import pytest
import torch
from run_cases import recipe, run, write_task

from stretto.environments.reward_range import MAX_REWARD
from stretto.models.tiny import WarmStart, tiny_model
from stretto.run import seeds
from stretto.store import data_checks
from stretto.store.journal import JOURNAL_NAME
from stretto.store.verify import conclusion, exit_code, format_findings, verify

LAST = 3  # the last update


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run over the real engine and trainer."""
    folder, before = tmp_path_factory.mktemp("recorded"), Path.cwd()
    torch.set_num_threads(1)
    model = tiny_model(folder / "tiny", warm_start=WarmStart(steps=2))
    write_task(folder)
    os.chdir(folder)
    try:
        overrides = ["rollout.staleness=2", "rollout.in_flight=6", "training.steps=4", "evaluation.prompts=0"]
        run(recipe(model, folder, *overrides), folder / "run")
    finally:
        os.chdir(before)
    return folder / "run"


@pytest.fixture
def copied(recorded: Path, tmp_path: Path) -> Path:
    for name in (JOURNAL_NAME, "config.toml", "metrics.jsonl"):
        shutil.copy(recorded / name, tmp_path / name)
    return tmp_path


def change(folder: Path, statements: list[str]) -> dict[str, int]:
    """Makes changes that speak of `{t}`, a trajectory of the last batch, its group `{g}` and another `{other}`."""
    with sqlite3.connect(folder / JOURNAL_NAME) as db:
        rows = db.execute(f"SELECT trajectory FROM members WHERE update_id = {LAST} ORDER BY position").fetchall()
        t = rows[0][0]
        (unlike,) = db.execute(
            "SELECT MIN(b.trajectory) FROM trajectories a JOIN trajectories b USING (group_id) "
            f"WHERE a.trajectory = {t} AND b.reward <> a.reward"
        ).fetchone()
        names = {"t": t, "g": t // 4, "other": t if unlike is None else unlike}
        for statement in statements:
            assert db.execute(statement.format(**names)).rowcount != 0, f"changed nothing: {statement}"
    db.close()
    return names


def first(values: list[float], kind: str) -> str:
    return np.array(values, dtype=kind).tobytes().hex()


OF_T = "WHERE trajectory = {t}"
CHANGED = "trajectory {t} is not what update 3 trained on"
UNCHAINED = "the digest of update 3 does not follow from the update before it and its own records"


def begun_with(column: str, value: str) -> str:
    return f"CAST(x'{value}' || SUBSTR({column}, 5) AS BLOB)"


def tokens(value: int) -> str:
    return f"UPDATE completions SET tokens = {begun_with('tokens', first([value], '<i4'))} {OF_T}"


def logprobs(value: float) -> str:
    return f"UPDATE completions SET logprobs = {begun_with('logprobs', first([value], '<f4'))} {OF_T}"


def metric(name: str, value: str = "0.123") -> str:
    return f"""UPDATE updates SET metrics = json_set(metrics, '$."{name}"', {value}) WHERE update_id = 3"""


REMOVED = [
    "UPDATE trajectories SET state = 'scored', ended_at = NULL "
    "WHERE trajectory IN (SELECT trajectory FROM members WHERE update_id = 3)",
    "DELETE FROM transitions WHERE to_state IN ('training', 'trained') "
    "AND trajectory IN (SELECT trajectory FROM members WHERE update_id = 3)",
    "DELETE FROM members WHERE update_id = 3",
    "DELETE FROM updates WHERE update_id = 3",
    "DELETE FROM versions WHERE version = 4",
    "UPDATE sessions SET outcome = NULL, ended_at = NULL",
]

EDITS: dict[str, tuple[list[str], str]] = {
    "a reward": ([f"UPDATE trajectories SET reward = reward + 0.125 {OF_T}"], CHANGED),
    "two rewards exchanged": (
        [
            "CREATE TEMP TABLE old AS SELECT trajectory, reward FROM trajectories WHERE trajectory IN ({t}, {other})",
            "UPDATE trajectories SET reward = (SELECT reward FROM old WHERE old.trajectory <> trajectories.trajectory) "
            "WHERE trajectory IN ({t}, {other})",
        ],
        CHANGED,
    ),
    "a reward that cannot be trained on": (
        [f"UPDATE trajectories SET reward = 2e9 {OF_T}"],
        "trajectory {t} has the reward 2e+09, beyond 1e+09",
    ),
    "a token": ([tokens(5)], CHANGED),
    "a token below all": ([tokens(-7)], "trajectory {t} has tokens from -7 to"),
    "a token beyond the vocabulary": ([tokens(1 << 30)], "outside of the vocabulary"),
    "a log-probability": ([logprobs(-1.0)], CHANGED),
    "a log-probability that no draw has": ([logprobs(-1e30)], "trajectory {t} has a log-probability of -1e+30"),
    "a token of the prompt": (
        [f"UPDATE groups SET prompt_tokens = {begun_with('prompt_tokens', first([5], '<i4'))} WHERE group_id = {{g}}"],
        CHANGED,
    ),
    "a token of the prompt beyond the vocabulary": (
        [f"UPDATE groups SET prompt_tokens = x'{first([1 << 30], '<i4')}' WHERE group_id = {{g}}"],
        "the prompt of group {g} has tokens from",
    ),
    "no prompt": (
        ["UPDATE groups SET prompt_tokens = x'' WHERE group_id = {g}"],
        "group {g} has a prompt of 0 bytes, which is no row of tokens",
    ),
    "a prompt of three bytes": (
        ["UPDATE groups SET prompt_tokens = x'010203' WHERE group_id = {g}"],
        "group {g} has a prompt of 3 bytes, which is no row of tokens",
    ),
    "a group one version older, with its stamps": (
        [
            "UPDATE groups SET version = version - 1, deadline = deadline - 1 WHERE group_id = {g}",
            "UPDATE trajectories SET version = version - 1 WHERE group_id = {g}",
            "UPDATE completions SET version = version - 1, "
            "checksum = (SELECT v.checksum FROM versions v WHERE v.version = completions.version - 1) "
            "WHERE trajectory / 4 = {g}",
        ],
        CHANGED,
    ),
    "a member cut short": (
        [
            "UPDATE completions SET tokens = SUBSTR(tokens, 1, LENGTH(tokens) - 4), num_tokens = num_tokens - 1, "
            f"logprobs = SUBSTR(logprobs, 1, LENGTH(logprobs) - 4), num_sampled = num_sampled - 1 {OF_T}"
        ],
        CHANGED,
    ),
    "a trained trajectory that is said to have failed": (
        [
            *["INSERT INTO failures (trajectory, kind, at, reason) VALUES ({t}, 'scoring', 1, 'it hung')"] * 3,
            f"UPDATE trajectories SET state = 'failed', reward = NULL, error = 'it hung' {OF_T}",
            f"DELETE FROM members {OF_T}",
            f"DELETE FROM transitions {OF_T} AND to_state IN ('scored', 'training')",
            f"UPDATE transitions SET from_state = 'scoring', to_state = 'failed' {OF_T} AND to_state = 'trained'",
        ],
        "update 3 trained on 12 samples, and its batch has 11",
    ),
    "a failed attempt that never was": (
        ["INSERT INTO failures (trajectory, kind, at, reason) VALUES ({t}, 'scoring', 1, 'it hung')"],
        UNCHAINED,
    ),
    "a seed": ([f"UPDATE trajectories SET seed = seed + 1 {OF_T}"], "trajectory {t} has the seed"),
    "the seed of the run": (["UPDATE run SET value = '6' WHERE key = 'seed'"], "which does not follow from that of"),
    "a finish": ([f"UPDATE completions SET finish = iif(finish = 'stop', 'length', 'stop') {OF_T}"], CHANGED),
    "an unknown finish": (
        [f"UPDATE completions SET finish = 'done' {OF_T}"],
        "trajectory {t} has the unknown finish `done`",
    ),
    "an instance that never joined": (
        [f"UPDATE trajectories SET instance = 7 {OF_T}"],
        "trajectory {t} was on instance 7, which never joined",
    ),
    "no weights of an update": (
        ["UPDATE updates SET checksum = NULL WHERE update_id = 3"],
        "update 3 is finished and does not say which weights it made",
    ),
    "other weights of the last update": (
        [
            "UPDATE updates SET checksum = 'other' WHERE update_id = 3",
            "UPDATE versions SET checksum = 'other' WHERE version = 4",
        ],
        UNCHAINED,
    ),
    "the last update removed": (REMOVED, "metrics.jsonl` has a line of update 3"),
    "supports of three bytes": (
        [f"UPDATE completions SET supports = x'010203' {OF_T}"],
        "trajectory {t} has `supports` of 3 bytes",
    ),
    "turns of three bytes": ([f"UPDATE completions SET turns = x'010203' {OF_T}"], "has `turns` of 3 bytes"),
    "rewards of turns of one byte": (
        [f"UPDATE trajectories SET turn_rewards = x'01' {OF_T}"],
        "has `turn_rewards` of 1 bytes",
    ),
    "a number that is text": ([f"UPDATE completions SET num_sampled = 'many' {OF_T}"], "trajectory {t}"),
    "no digest": (["UPDATE updates SET digest = NULL WHERE update_id = 3"], "update 3 has no digest"),
    "no digests of samples": (["UPDATE updates SET samples = NULL WHERE update_id = 3"], "update 3 has no digest"),
    "a digest in the middle": (
        ["UPDATE updates SET digest = (SELECT digest FROM updates WHERE update_id = 1) WHERE update_id = 2"],
        UNCHAINED,
    ),
    "the digest of the advantages": (["UPDATE updates SET advantages = 'other' WHERE update_id = 3"], UNCHAINED),
    "a metric that only the trainer knows": ([metric("loss")], UNCHAINED),
    "a sum of the run": (
        ["UPDATE updates SET totals = json_set(totals, '$.tokens', 1) WHERE update_id = 3"],
        "update 3 has a sum of `tokens` of 1, and the updates so far give",
    ),
    "the ages in the sums of the run": (
        ["UPDATE updates SET totals = json_set(totals, '$.ages', json('{{\"0\": 48}}')) WHERE update_id = 3"],
        "update 3 has sums of `ages` of",
    ),
    "the sums at the end of the session": (
        ["UPDATE sessions SET totals = json_set(totals, '$.steps', 5)"],
        "session 1 ended after 5 updates, and 4 are recorded",
    ),
    **{
        f"the fact `{name}`": ([f"UPDATE run SET value = '{value}' WHERE key = '{name}'"], f"`{key} = ")
        for name, value, key in (
            ("staleness", 3, "rollout.staleness"),
            ("auto", "true", "rollout.staleness"),
            ("retries", 9, "rollout.retries"),
            ("filter_limit", 9, "rollout.filter"),
            ("batch", 4, "rollout.prompts"),
            ("group", 5, "rollout.group"),
            ("updates", 5, "training.steps"),
            ("order", '"pass-rate"', "task.order"),
        )
    },
    **{
        f"the metric `{name}`": ([metric(name)], f"update 3 has `{name}` 0.123 in its metrics, and its samples give ")
        for name in (
            *("reward_mean", "reward_std", "num_sequences", "groups", "length_mean", "length_max", "truncated"),
            *("tokens", "replayed_sequences", "replayed_tokens", "staleness_mean", "staleness_max"),
            *("staleness_histogram", "advantage_count_age_7"),
        )
    },
}


def test_the_run_as_it_was_recorded_holds(recorded: Path) -> None:
    findings = verify(recorded)
    assert exit_code(findings) == 0, format_findings(findings)
    assert "digests of 4 updates and 48 samples" in format_findings(findings)
    assert conclusion(findings).startswith("proved: ")
    assert "`stretto replay`" in conclusion(findings)
    assert "--recompute" in conclusion(findings)


@pytest.mark.parametrize("name", EDITS)
def test_an_edit_of_what_was_trained_is_named(copied: Path, name: str) -> None:
    statements, sentence = EDITS[name]
    names = change(copied, statements)
    findings = verify(copied)
    assert exit_code(findings) == 1
    details = [detail for finding in findings for detail in finding.details]
    assert any(sentence.format(**names) in detail for detail in details), format_findings(findings)
    assert conclusion(findings).startswith("not proved")


def test_the_last_update_removed_is_noticed_without_the_other_files_too(copied: Path) -> None:
    for name in ("config.toml", "metrics.jsonl"):
        (copied / name).unlink()
    change(copied, REMOVED)
    text = format_findings(verify(copied))
    assert "session 1 ended after 4 updates, and 3 are recorded" in text
    with sqlite3.connect(copied / JOURNAL_NAME) as db:
        db.execute("UPDATE sessions SET totals = NULL")
    db.close()
    assert "transitions were recorded, and there are" in format_findings(verify(copied))


def test_the_rest_of_the_journal_is_not_blamed(copied: Path) -> None:
    names = change(copied, [tokens(5)])
    (data,) = [finding for finding in verify(copied) if not finding.holds]
    assert data.details == (f"trajectory {names['t']} is not what update 3 trained on: its rows were changed",)


def test_what_verify_writes_down_apart_is_the_same() -> None:
    assert data_checks.MAX_REWARD == MAX_REWARD
    for trajectory in (0, 1, 4711):
        assert data_checks.trajectory_seed(5, trajectory) == seeds.trajectory_seed(5, trajectory)
