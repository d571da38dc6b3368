"""The command line: fast, and clear about what is wrong."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import stretto.compare
from stretto.cli import main

RECIPE = '[model]\npath = "tiny"\nlora = { rank = 4 }\nwarm_start = { steps = 2 }\n[task]\ntype = "countdown-chain"\n'


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE)
    return path


def test_help_imports_neither_torch_nor_pydantic() -> None:
    code = (
        "import sys, contextlib, stretto.cli\n"
        "with contextlib.suppress(SystemExit): stretto.cli.main(['--help'])\n"
        "heavy = {'torch', 'transformers', 'numpy', 'pydantic', 'rich'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    started = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "train" in done.stdout
    assert time.perf_counter() - started < 5.0, "a generous bound; the import check above is the real one"


def test_check_prints_the_resolved_recipe_and_its_memory_and_starts_nothing(
    recipe: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["check", str(recipe), "--set", "rollout.staleness=3"]) == 0
    out = capsys.readouterr().out
    assert "staleness = 3" in out
    assert 'paradigm = "multi-version"' in out, "defaults are spelled out"
    assert "memory: base" in out
    assert "4 version slots" in out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["recipe.toml"]


def test_a_bad_recipe_is_an_error_on_one_line_without_a_traceback(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", str(recipe), "--set", "rollout.stalenes=3"]) == 2
    error = capsys.readouterr().err
    assert "did you mean `rollout.staleness`" in error
    assert "Traceback" not in error


def test_a_folder_that_is_no_model_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    path = tmp_path / "r.toml"
    path.write_text(f'[model]\npath = "{tmp_path / "empty"}"\n[task]\ntype = "countdown-chain"\n')
    assert main(["check", str(path)]) == 2
    assert "is no model" in capsys.readouterr().err
    assert main(["train", str(path), "--out", str(tmp_path / "run")]) == 2
    assert "is no model" in capsys.readouterr().err


def test_a_run_folder_that_exists_is_refused_and_left_alone(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "precious").write_text("data")
    assert main(["train", str(recipe), "--out", str(tmp_path / "run")]) == 2
    assert "exists already" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["precious"]


def test_there_must_be_a_run_to_resume(recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(recipe), "--out", str(tmp_path / "none"), "--resume"]) == 2
    assert "nothing to resume" in capsys.readouterr().err


def test_resume_needs_the_folder_of_the_run(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(recipe), "--resume"]) == 2
    assert "`--resume` needs `--out RUN`" in capsys.readouterr().err


def test_verify_and_show_of_something_else_say_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(tmp_path)]) == 2
    assert "no run folder" in capsys.readouterr().err
    assert main(["show", str(tmp_path)]) == 2


def test_compare_refuses_an_unknown_paradigm(recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", str(recipe), "--paradigms", "synchronous,sideways", "--out", str(tmp_path / "c")]) == 2
    assert "`--paradigms` names `sideways`" in capsys.readouterr().err


SHORT = ["training.steps=2", "rollout.prompts=2", "rollout.group=2", "rollout.max_tokens=8", "evaluation.prompts=2"]


def settings() -> list[str]:
    chosen = [*SHORT, "runtime.engine_threads=1", "runtime.trainer_threads=1"]
    return [word for setting in chosen for word in ("--set", setting)]


def test_train_verify_and_show_follow_one_another(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    run = tmp_path / "run"
    assert main(["train", str(recipe), *settings(), "--out", str(run)]) == 0
    said = capsys.readouterr().out
    assert "update 2/2" in said
    assert "what the run came to" in said
    assert f"try next: stretto verify {run}" in said
    assert main(["verify", str(run)]) == 0
    assert "law 3  nothing old   holds" in capsys.readouterr().out
    assert main(["show", str(run), "--update", "1", "--samples", "2"]) == 0
    assert capsys.readouterr().out
    assert main(["train", str(recipe), *settings(), "--out", str(run), "--resume"]) == 2
    assert "is finished" in capsys.readouterr().err


def test_compare_runs_one_recipe_under_several_paradigms(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def in_this_process(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        assert command[1:3] == ["-m", "stretto.cli"]
        return subprocess.CompletedProcess(command, main(command[3:]))

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(stretto.compare.subprocess, "run", in_this_process)
    recipe.write_text(recipe.read_text() + "[rollout]\nstaleness = 3\n[algorithm]\nclip_low = 0.3\n")
    folder = tmp_path / "compared"
    command = ["compare", str(recipe), *settings(), "--out", str(folder)]
    assert main([*command, "--paradigms", "synchronous,partial,multi-version"]) == 0
    said = capsys.readouterr().out
    assert "paradigms on the same recipe" in said
    rows = json.loads((folder / "compare.json").read_text())
    assert [(row["paradigm"], row["staleness_bound"]) for row in rows] == [
        ("synchronous", 0),
        ("partial", 3),
        ("multi-version", 3),
    ]
    assert {row["steps"] for row in rows} == {2}
    assert len({row["eval_before"] for row in rows}) == 1, "all begin with the same policy"
    for row in rows:
        assert main(["verify", str(folder / row["paradigm"])]) == 0
    assert main(command) == 2
    assert "holds a comparison already" in capsys.readouterr().err
