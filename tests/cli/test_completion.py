"""Completion, in a real bash; in zsh and fish where they are installed."""

from __future__ import annotations

import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from stretto.cli import main, make_parser
from stretto.cli.completion_tables import command_tables, recipe_keys

PATIENCE_S = 60.0


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a recipe and two runs, one of them deeper."""
    (tmp_path / "mine.toml").write_text("")
    (tmp_path / "notes.txt").write_text("")
    for run in ("runs/one", "runs/compare/drop"):
        (tmp_path / run).mkdir(parents=True)
        (tmp_path / run / "journal.sqlite").write_text("")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def script(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["completion", shell]) == 0
    return capsys.readouterr().out


class Terminal:
    """An interactive bash, in which `stretto` prints its arguments."""

    def __init__(self, completion: Path) -> None:
        self.process, self.descriptor = pty.fork()
        if self.process == 0:
            os.environ.update(TERM="dumb", PS1="$ ", INPUTRC="/dev/null", HISTFILE="/dev/null")
            os.execvp("bash", ["bash", "--norc", "--noprofile", "-i"])
        self.type(f"source {completion}; stretto() {{ printf '<%s>' \"$@\"; echo '<end>'; }}; echo 'rea''dy'\n")
        self.read("ready")

    def type(self, text: str) -> None:
        os.write(self.descriptor, text.encode())

    def read(self, until: str) -> str:
        said, deadline = "", time.monotonic() + PATIENCE_S
        while until not in said:
            assert time.monotonic() < deadline, said
            if select.select([self.descriptor], [], [], 0.1)[0]:
                said += os.read(self.descriptor, 4_096).decode(errors="replace")
        return said

    def completed(self, typed: str) -> list[str]:
        """Returns the arguments after `typed` was completed by the tabulator, and entered."""
        self.type(f"stretto {typed}\t\n")
        return re.findall(r"<([^>]*)>", self.read("<end>"))[:-1]

    def close(self) -> None:
        os.close(self.descriptor)
        os.waitpid(self.process, 0)


@pytest.fixture
def terminal(folder: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Terminal]:
    path = folder / "completion.bash"
    path.write_text(script("bash", capsys))
    made = Terminal(path)
    yield made
    made.close()


def test_bash_completes_commands_options_recipes_runs_and_keys(terminal: Terminal) -> None:
    for typed, expected in (
        ("ver", ["verify"]),
        ("train --res", ["train", "--resume"]),
        ("train quickst", ["train", "quickstart"]),
        ("train min", ["train", "mine.toml"]),
        ("check no", ["check", "no"]),  # a file, but no recipe
        ("show runs/o", ["show", "runs/one"]),
        ("show runs/compare/d", ["show", "runs/compare/drop"]),
        ("verify em", ["verify", "em"]),  # a folder, but neither a run nor one that can hold runs
        ("train quickstart --set rollout.paradi", ["train", "quickstart", "--set", "rollout.paradigm="]),
        ("train x --set rollout.paradigm=mul", ["train", "x", "--set", "rollout.paradigm=multi-version"]),
        ("train x --set algorithm.type=ds", ["train", "x", "--set", "algorithm.type=ds"]),
        ("train x --log-level de", ["train", "x", "--log-level", "debug"]),
        ("train x --log-level=de", ["train", "x", "--log-level=debug"]),
        ("completion f", ["completion", "fish"]),
    ):
        assert terminal.completed(typed) == expected, typed


def test_bash_offers_all_that_fits(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "completion.bash").write_text(script("bash", capsys))

    def offered(*words: str) -> set[str]:
        code = 'source completion.bash; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _stretto; echo "${COMPREPLY[@]}"'
        done = subprocess.run(["bash", "-c", code, "x", *words], capture_output=True, text=True, check=True)
        return set(done.stdout.split())

    assert {"train", "list", "doctor", "--version"} <= offered("stretto", "")
    assert {"quickstart", "dapo", "mine.toml", "runs"} <= offered("stretto", "train", "")
    assert "notes.txt" not in offered("stretto", "train", "")
    assert {"--set", "--out", "--resume", "-q"} <= offered("stretto", "train", "mine.toml", "-")
    assert offered("stretto", "show", "runs/") == {"runs/one", "runs/compare/"}
    assert offered("stretto", "train", "x", "--set", "rollout.stale") == {
        "rollout.staleness=",
        "rollout.staleness_cap=",
    }
    assert offered("stretto", "train", "x", "--set", "evaluation.greedy", "=", "") == {"true", "false"}


def test_every_command_and_key_is_in_the_tables_and_torch_is_not_needed() -> None:
    tables = {table.name: table for table in command_tables(make_parser())}
    assert {"train", "check", "verify", "completion"} <= tables.keys()
    assert all("--help" in [name for option in table.options for name in option.names] for table in tables.values())
    assert not any("--part-of-compare" in option.names for option in tables["train"].options), "it is not for people"
    keys = recipe_keys()
    assert keys["model.dtype"] == ("auto", "float32", "bfloat16", "float16")
    assert "grpo" in keys["algorithm.type"]
    assert {"observe.wandb.project", "seed", "training.replay.ratio"} <= keys.keys()
    assert "model.lora" not in keys, "a table has no value"
    code = "import sys; from stretto.cli import main; main(['completion', 'bash']); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_the_scripts_of_other_shells_have_the_same_words(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = script(shell, capsys)
    for word in ("quickstart", "rollout.paradigm=", "multi-version", "resume", "verify", "doctor"):
        assert word in text
    if (program := shutil.which(shell)) is not None:
        subprocess.run([program, "-n", "/dev/stdin"], input=text, text=True, check=True)
