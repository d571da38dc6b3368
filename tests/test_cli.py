"""The command line: fast, and clear about what is wrong."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

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


def test_verify_and_show_of_something_else_say_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(tmp_path)]) == 2
    assert "no run folder" in capsys.readouterr().err
    assert main(["show", str(tmp_path)]) == 2


def test_compare_refuses_an_unknown_paradigm(recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", str(recipe), "--paradigms", "synchronous,sideways", "--out", str(tmp_path / "c")]) == 2
    assert "`--paradigms` names `sideways`" in capsys.readouterr().err
