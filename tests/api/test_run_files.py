"""Reports, traces and lists from Python."""

from __future__ import annotations

import json
import shutil
import sqlite3
from pathlib import Path

import pytest
from view_cases import record_run

import stretto
from stretto.cli import main
from stretto.errors import RecipeError, RunError


def test_a_run_writes_its_report_and_its_trace(tmp_path: Path) -> None:
    record_run(tmp_path / "run")
    run = stretto.open_run(tmp_path / "run")
    report, trace = tmp_path / "report.html", tmp_path / "trace.json"
    assert run.report(report, verify=False) == report.stat().st_size
    assert run.trace(trace, trajectories=0) == len(json.loads(trace.read_text())["traceEvents"])
    for write in (lambda: run.report(report), lambda: run.trace(trace)):
        with pytest.raises(RunError, match="exists already"):
            write()
    run.trace(trace, force=True)
    with pytest.raises(RunError, match=r"has no `tokenizer.json`"):
        run.report(tmp_path / "other.html", tokenizer=tmp_path)
    with pytest.raises(RunError, match=r"needs `-o FOLDER`"):
        run.export()
    with pytest.raises(RunError, match="no effect without `--push NAME`"):
        run.export(tmp_path / "policy", public=True)


def test_runs_are_listed_and_one_of_another_version_is_not_called_damaged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record_run(tmp_path / "runs" / "a")
    shutil.copytree(tmp_path / "runs" / "a", tmp_path / "runs" / "older")
    db = sqlite3.connect(tmp_path / "runs" / "older" / "journal.sqlite")
    db.execute("PRAGMA user_version = 2")
    db.close()
    listed = stretto.list_runs(tmp_path / "runs")
    assert {Path(row["folder"]).name: row["state"] for row in listed} == {"a": "finished", "older": "other version"}
    assert main(["list", str(tmp_path / "runs")]) == 0
    assert "schema version 2" in capsys.readouterr().out
    with pytest.raises(RunError, match="not a folder"):
        stretto.list_runs(tmp_path / "none")


def test_a_named_recipe_that_needs_files_of_the_repository_says_so_before_it_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        RecipeError, match=r"needs `examples/problems.jsonl` \(`task.path`\), which is not in this folder"
    ):
        stretto.check("agent")
    assert main(["train", "agent", "--out", "run"]) == 2
    told = capsys.readouterr()
    assert "--set task.path=FILE" in told.err
    assert "run folder" not in told.out + told.err
    assert not (tmp_path / "run").exists()


def test_resume_without_a_folder_names_the_command_for_the_newest_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--resume", "--set", "training.steps=400"]) == 2
    assert capsys.readouterr().err.strip().endswith("the folder of the run to continue")
    record_run(tmp_path / "runs" / "a")
    assert main(["train", "--resume", "--set", "training.steps=400"]) == 2
    assert "`stretto train --out runs/a --resume --set training.steps=400`" in capsys.readouterr().err


def test_a_bad_override_on_resume_names_the_recipe_of_the_run() -> None:
    from stretto.recipe.reading import load_recipe

    with pytest.raises(RecipeError, match=r"`--set training.learning_rate=-1` on `run/config.toml`"):
        load_recipe("quickstart", ["training.learning_rate=-1"], source="run/config.toml")


def test_a_path_that_is_not_there_does_not_exist(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["view", str(tmp_path / "none")]) == 2
    assert "does not exist; give the folder that `stretto train` made" in capsys.readouterr().err
    assert main(["view", str(tmp_path)]) == 2
    assert "is no run folder: it has no `journal.sqlite`" in capsys.readouterr().err
