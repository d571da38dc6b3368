"""What is printed for the user to run next runs as it stands."""

import sys
from pathlib import Path

import pytest

from stretto.run.command_hint import command, program


@pytest.fixture
def venv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program in a folder that is not on the path, seen from the folder above."""
    path = tmp_path / ".venv" / "bin" / "stretto"
    path.parent.mkdir(parents=True)
    path.write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/usr/bin")
    return path


@pytest.mark.parametrize("absolute", [True, False])
def test_it_is_named_as_it_was_called_where_it_is_not_on_the_path(
    venv: Path, monkeypatch: pytest.MonkeyPatch, absolute: bool
) -> None:
    monkeypatch.setattr(sys, "argv", [str(venv) if absolute else ".venv/bin/stretto", "train"])
    assert program() == ".venv/bin/stretto"
    assert command("verify", Path("runs/my run")) == ".venv/bin/stretto verify 'runs/my run'"
    (elsewhere := venv.parent.parent.parent / "elsewhere").mkdir()
    monkeypatch.chdir(elsewhere)
    monkeypatch.setattr(sys, "argv", [str(venv)])
    assert program() == str(venv)


def test_on_the_path_its_name_is_enough(venv: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"/usr/bin:{venv.parent}")
    monkeypatch.setattr(sys, "argv", [str(venv)])
    assert program() == "stretto"


def test_as_a_module_it_is_called_as_a_module(venv: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/somewhere/stretto/__main__.py"])
    assert program().endswith(" -m stretto")
