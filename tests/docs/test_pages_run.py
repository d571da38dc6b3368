"""Pages that a reader works through are carried out here, block by block, as they would type them.

Runs are shortened. With `STRETTO_FULL_TUTORIAL=1` (`make test-tutorial`) the tutorial runs as it stands, in processes
of its own, and has to reach the scores that it promises.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from doc_pages import ROOT, Block, blocks, commands, lines_of_shell, save

from stretto.cli import main

DOCS = ROOT / "docs"
TUTORIAL = DOCS / "tutorial.md"
# Pages that go on with the runs of the tutorial, in the order in which they are carried out.
AFTER_THE_TUTORIAL = (
    DOCS / "howto" / "debugging.md",
    DOCS / "reference" / "journal.md",
    DOCS / "howto" / "continue.md",
)
FULL = os.environ.get("STRETTO_FULL_TUTORIAL") == "1"

# What is replaced so that a run takes a second.
SHORTER_TUTORIAL = {
    'path = "tiny"': 'path = "tiny"\nwarm_start = { steps = 3 }',
    "prompts = 16 ": "prompts = 4 ",
    "steps = 60 ": "steps = 3 ",
    "prompts = 128": "prompts = 4",
    "every = 10 ": "every = 2 ",
    "--update 59": "--update 2",
}
SHORTER_AFTER = {
    "training.steps=20": "training.steps=2",
    "evaluation.every=10 ": "evaluation.every=1 ",
    "training.steps=120": "training.steps=4",
    "training.steps=140": "training.steps=5",
    "evaluation.every=20": "evaluation.every=3",
    "--until 30": "--until 2",
}
# Pages that stand alone.
SHORTER_PAGES: dict[str, dict[str, str]] = {
    "reference/exit-codes.md": {},
    "howto/rewards.md": {
        'path = "tiny"': 'path = "tiny"\nwarm_start = { steps = 3 }',
        "steps = 10\n": "steps = 2\n",
        "--update 9": "--update 1",
    },
    "howto/data.md": {
        'path = "tiny"     ': 'path = "tiny"\nwarm_start = { steps = 3 }  ',
        "steps = 5\n": "steps = 2\n",
    },
    "howto/turns.md": {"steps = 5\n": "steps = 2\n", "--update 4": "--update 1"},
    "howto/objective.md": {
        'path = "tiny"': 'path = "tiny"\nwarm_start = { steps = 3 }',
        "steps = 10\n": "steps = 2\n",
        "prompts = 64": "prompts = 4",
    },
}
SHORT_QUICKSTART = """
[model]
path = "tiny"
lora = { rank = 4 }
warm_start = { steps = 2 }
[task]
type = "countdown-chain"
[rollout]
prompts = 2
group = 2
max_tokens = 8
[evaluation]
prompts = 2
"""
INSTALLS = {"make", "pip", "."}  # a block with one of these makes the environment that the tests have
SERVES = {"view", "serve"}  # go on until they are interrupted


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory, with a cache of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    return tmp_path


def carry_out(page: list[Block], folder: Path, changes: Mapping[str, str], *, in_processes: bool) -> str:
    """Saves the files of a page and runs its blocks in order. Returns what the last block of Python printed."""
    printed = ""
    for block, following in zip(page, [*page[1:], None], strict=True):
        for before, after in changes.items():
            block = Block(block.page, block.line, block.language, block.title, block.code.replace(before, after))
        if block.title:
            save(block, folder)
        elif block.language == "python":
            printed = run([sys.executable, "-c", block.code], block) if in_processes else run_here(block)
        elif block.language == "sh":
            told = shell(block, in_processes=in_processes)
            if following and following.language == "text" and "head " in block.code:
                assert told.strip() == following.code.strip(), following.where
    return printed


def shell(block: Block, *, in_processes: bool) -> str:
    """Runs the commands of a block and returns what they printed.

    Commands that install, serve, or name no run (`RUN`) are left out; so is `compare` in the shortened form, which
    starts processes that each import torch and has tests of its own.
    """
    lines = lines_of_shell(block.code)
    if any(command[0] in INSTALLS for line in lines for command in commands(line)):
        return ""
    printed = ""
    for line in lines:
        ((program, *arguments),) = commands(line)
        if program != "stretto":
            printed += run(["bash", "-ec", line], block)
        elif arguments[0] in SERVES or "RUN" in arguments or (arguments[0] == "compare" and not in_processes):
            continue
        elif in_processes:
            printed += run([sys.executable, "-m", "stretto", *arguments], block)
        else:
            assert main(arguments) == 0, f"{block.where}: {line}"
    return printed


def run_here(block: Block) -> str:
    """Runs a block of Python in this process, which has imported torch already. Returns what it printed."""
    told = io.StringIO()
    with contextlib.redirect_stdout(told):
        exec(compile(block.code, f"<{block.where}>", "exec"), {"__name__": "__main__"})
    return told.getvalue()


def run(command: list[str], block: Block) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{block.where}: {shlex.join(command)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def score_of(run_folder: Path) -> tuple[float, float]:
    summary = json.loads((run_folder / "summary.json").read_text())
    return summary["eval_before"], summary["eval_after"]


def refuse_unused(changes: Mapping[str, str], *pages: Path) -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    unused = [words for words in changes if words not in text]
    assert not unused, "a replacement has no effect: bring it up to date"


def test_the_tutorial_and_what_follows_it_work_as_they_stand(folder: Path) -> None:
    refuse_unused(SHORTER_TUTORIAL, TUTORIAL)
    refuse_unused(SHORTER_AFTER, *AFTER_THE_TUTORIAL)
    printed = carry_out(blocks(TUTORIAL), folder, {} if FULL else SHORTER_TUTORIAL, in_processes=FULL)
    assert printed.startswith("4+3*7?")
    rows = (folder / "sums.jsonl").read_text().splitlines()
    assert len(set(rows)) == len(rows), "a problem that is held out and trained on tells nothing"
    assert (folder / "runs/short/policy").is_dir()
    if FULL:
        before, after = score_of(folder / "runs/first")
        assert before < 0.65
        assert after > 0.8
        assert printed.strip().endswith("=5")
        assert score_of(folder / "runs/short")[1] < after
    for page in AFTER_THE_TUTORIAL:
        carry_out(blocks(page), folder, {} if FULL else SHORTER_AFTER, in_processes=FULL)
    assert json.loads((folder / "runs/first/summary.json").read_text())["steps"] == (140 if FULL else 5)


@pytest.mark.parametrize("name", SHORTER_PAGES)
def test_a_page_that_stands_alone_works(name: str, folder: Path) -> None:
    page, changes = DOCS / name, SHORTER_PAGES[name]
    refuse_unused(changes, page)
    carry_out(blocks(page), folder, changes, in_processes=False)
    trained = re.findall(r"^stretto train .*--out (\S+)", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert all((folder / run_folder / "summary.json").is_file() for run_folder in trained)


def test_every_snippet_of_the_page_about_python_runs(folder: Path) -> None:
    (folder / "recipes").mkdir()
    (folder / "recipes" / "quickstart.toml").write_text(SHORT_QUICKSTART)
    snippets = blocks(DOCS / "python.md", "python")
    assert len(snippets) >= 7
    names: dict[str, object] = {"__name__": "__main__"}
    for block in snippets:
        shorter = block.code.replace('"training.steps": 40', '"training.steps": 13')
        exec(compile(shorter, f"<{block.where}>", "exec"), names)
