"""`show` is readable in a plain terminal, also while a run goes on, and whatever a model wrote."""

from __future__ import annotations

import io
import json
import sqlite3
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console, RenderableType

from stretto.cli import main
from stretto.errors import RunError
from stretto.observe.show import show
from stretto.store.journal import JOURNAL_NAME, Journal, RunFacts
from stretto.types import Completion, Lineage, Prompt

REWARDS = {0: 0.0, 1: 1.0, 2: 0.5, 3: 0.25}


def render(what: RenderableType) -> str:
    stream = io.StringIO()
    Console(file=stream, width=160, color_system=None).print(what)
    return stream.getvalue()


def test_a_run_has_the_name_of_its_folder_however_it_is_named(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run_folder)
    assert render(show(Path("."))).startswith(f"{run_folder.name}: multi-version")


@pytest.fixture
def run_folder(tmp_path: Path):
    """Two updates of one group of two; the second one is still training, and a group is running."""
    journal = Journal.open(tmp_path / JOURNAL_NAME)
    journal.begin(RunFacts("multi-version", 1, False, 1, 2, 3, 0, 9, 0), at=1.0)
    journal.version_published(0, "sum0", at=1.0)
    journal.evaluation(0, "before", at=2.0, reward=0.125, num=16, seconds=1.5)
    for group in range(3):
        journal.group_admitted(
            group,
            version=0,
            deadline=1,
            staleness=1,
            prompt=Prompt(group, f"what is [bold]{group}[/bold]?", (1, 2), {}),
            epoch=0,
            row_number=group,
            trajectories=[2 * group, 2 * group + 1],
            seeds=[2 * group, 2 * group + 1],
            at=2.0,
        )
    for id, reward in REWARDS.items():
        tokens = np.arange(5 + id, dtype=np.int32)
        completion = Completion(id, 0, tokens, np.zeros(len(tokens), np.float32), "stop", "sum0")
        journal.generated(
            id, [Lineage((1, 2), completion)], [f"line one of {id}\n[red]\x1b[2J wipes the screen"], at=3.0
        )
        journal.scored(id, reward, at=3.5)
    journal.batch_taken(0, [0, 1], at=4.0)
    journal.update_done(0, {"loss": 0.1}, at=6.5)
    journal.version_published(1, "sum1", at=6.5)
    journal.batch_taken(1, [2, 3], at=7.0)
    journal.evaluation(1, "skipped", at=7.0)
    journal.note("wait", "trainer idle 38 s: group [8123], version 17", at=7.0)
    journal.flush()
    yield tmp_path
    journal.close()


def test_the_overview_has_a_line_an_update_and_every_count(run_folder):
    text = render(show(run_folder))
    lines = [line.split() for line in text.splitlines()]
    assert ["0", "0.5000", "2", "5.5", "0.00", "0", "2.5"] in lines
    assert ["1", "0.3750", "2", "7.5", "1.00", "1", "training"] in lines
    assert ["before", "0", "0.1250", "16", "1.5"] in lines
    assert ["skipped", "1", "-", "0", "0.0"] in lines
    assert "multi-version, staleness 1, 1 prompts x 2; 1 of 3 updates, running" in text
    assert "6 started; 2 trained, 0 failed, 0 filtered, 0 dropped; in progress: 2 running, 2 training" in text
    assert "trainer idle 38 s: group [8123], version 17" in text


def test_the_overview_has_greedy_scores_where_an_evaluation_has_them(tmp_path):
    greedy = {"score": 0.75, "num_scored": 15, "num_failed": 1, "mean_tokens": 3.0}
    unscored = {"score": None, "num_scored": 0, "num_failed": 16, "mean_tokens": 0.0}
    with Journal.open(tmp_path / JOURNAL_NAME) as journal:
        journal.begin(RunFacts("multi-version", 1, False, 1, 2, 3, 0, 9, 0), at=1.0)
        journal.evaluation(0, "before", at=2.0, reward=0.5, num=16, seconds=1.5, line={"greedy": greedy})
        journal.evaluation(1, "skipped", at=3.0)
        journal.evaluation(2, "after", at=4.0, reward=0.5, num=16, seconds=1.5, line={"greedy": unscored})
    lines = [line.split() for line in render(show(tmp_path)).splitlines()]
    assert ["evaluation", "version", "reward", "greedy", "prompts", "seconds"] in lines
    assert ["before", "0", "0.5000", "0.7500", "16", "1.5"] in lines
    assert ["skipped", "1", "-", "-", "0", "0.0"] in lines
    assert ["after", "2", "0.5000", "-", "16", "1.5"] in lines


def test_the_samples_of_an_update_come_best_first_under_their_prompt(run_folder):
    text = render(show(run_folder, update=0))
    assert "update 0: 2 of 2 samples, mean reward 0.5000" in text
    assert text.count("what is [bold]0[/bold]?") == 1
    first = text.index("trajectory 1: reward 1.0000, version 0, age 0, 6 tokens, stop")
    assert first < text.index("trajectory 0: reward 0.0000, version 0, age 0, 5 tokens, stop")
    assert "    line one of 1" in text


def test_what_a_model_wrote_is_neither_markup_nor_a_command_to_the_terminal(run_folder):
    text = render(show(run_folder, update=0))
    assert r"[red]\x1b[2J wipes the screen" in text
    assert "\x1b" not in text


def test_only_as_many_samples_as_asked_for_are_shown(run_folder):
    text = render(show(run_folder, update=1, samples=1))
    assert "1 of 2 samples, mean reward 0.3750" in text
    assert "trajectory 2: reward 0.5000, version 0, age 1" in text
    assert "trajectory 3" not in text


def test_a_very_long_completion_is_cut_in_the_middle(tmp_path):
    with Journal.open(tmp_path / JOURNAL_NAME) as journal:
        journal.begin(RunFacts("synchronous", 0, False, 1, 1, 1, 0, 9, 0), at=1.0)
        prompt = Prompt(0, "count", (1,), {})
        journal.group_admitted(
            0,
            version=0,
            deadline=0,
            staleness=0,
            prompt=prompt,
            epoch=0,
            row_number=0,
            trajectories=[0],
            seeds=[1],
            at=1.0,
        )
        completion = Completion(0, 0, np.zeros(3, np.int32), np.zeros(3, np.float32), "length", "sum0")
        text = "\n".join(f"<{i}>" for i in range(1000))
        journal.generated(0, [Lineage((1,), completion)], [text], at=1.0)
        journal.scored(0, 1.0, at=1.0)
        journal.batch_taken(0, [0], at=1.0)
    text = render(show(tmp_path, update=0))
    assert "<0>" in text
    assert "<999>" in text
    assert "<500>" not in text
    assert "[... 960 lines ...]" in text


def test_labels_are_whole_where_there_is_no_terminal(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    kind = "a-kind-of-note-with-a-very-long-name-" * 4
    with Journal.open(tmp_path / JOURNAL_NAME) as journal:
        journal.begin(RunFacts("multi-version", 1, False, 1, 2, 3, 0, 9, 0), at=1.0)
        journal.note(kind, "short", at=8.0)
    assert main(["show", str(tmp_path)]) == 0
    assert kind in capsys.readouterr().out


def test_what_is_not_there_is_said_by_name(run_folder, tmp_path):
    with pytest.raises(RunError, match=r"`--update 7` is not in .*: it has updates 0 to 1"):
        show(run_folder, update=7)
    with pytest.raises(RunError, match="`--samples 0` shows nothing"):
        show(run_folder, update=0, samples=0)
    with pytest.raises(RunError, match="nothing` does not exist"):
        show(tmp_path / "nothing")


def test_a_run_without_updates_has_an_overview(tmp_path):
    with Journal.open(tmp_path / JOURNAL_NAME) as journal:
        journal.begin(RunFacts("drop", 4, True, 1, 1, 3, 0, 9, 0, laws_broken=(2,)), at=1.0)
    text = render(show(tmp_path))
    assert "drop, gives up law 2, staleness auto, at most 4" in text
    assert "0 started" in text
    with pytest.raises(RunError, match="it has none yet"):
        show(tmp_path, update=0)


def test_reading_a_run_imports_no_torch():
    code = "import sys, stretto.observe.show, stretto.store.verify; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(("sessions", "words"), [(2, "resumed once"), (3, "resumed twice"), (4, "resumed 3 times")])
def test_how_often_a_run_was_resumed_is_said_in_words(tmp_path: Path, sessions: int, words: str) -> None:
    for session in range(sessions):
        with Journal.open(tmp_path / JOURNAL_NAME, resume=session > 0) as journal:
            journal.begin(RunFacts("multi-version", 1, False, 1, 2, 3, 0, 9, 0), at=float(session))
    assert words in render(show(tmp_path))


def test_the_overview_counts_what_was_used_again_and_what_was_filtered(run_folder):
    with sqlite3.connect(run_folder / JOURNAL_NAME) as db:
        db.execute("UPDATE updates SET metrics = ? WHERE update_id = 0", (json.dumps({"filtered_groups": 4}),))
        db.execute("INSERT INTO members VALUES (1, 2, 0, 1, 0), (1, 3, 1, 1, 0)")
    text = render(show(run_folder))
    (header,) = [line for line in text.splitlines() if "reused" in line]
    assert header.split()[:8] == ["update", "reward", "samples", "reused", "filtered", "groups", "tokens", "age"]
    lines = [line.split() for line in text.splitlines()]
    assert ["0", "0.5000", "2", "0", "4", "5.5", "0.00", "0", "2.5"] in lines
    assert any(line[:5] == ["1", "0.4375", "4", "2", "-"] for line in lines)
    assert "trajectory 1: reward 1.0000, version 0, age 1, 6 tokens, stop, use 1" in render(show(run_folder, update=1))


def test_turns_and_tools_are_told_apart_from_what_was_observed(tmp_path):
    record_lineages(tmp_path)
    words = ['<tool_call>{"name": "add", "arguments": {}}</tool_call><|im_end|>', "\n", "[4]", "It is 4."]
    text = render(show(tmp_path, update=0, decode=lambda tokens: "".join(words[token] for token in tokens)))
    lines = [line.strip() for line in text.splitlines()]
    start = lines.index("lineage 0: 2 tokens in 2 turns, stop")
    assert lines[start + 1 : start + 8] == [
        *("turn 0, calls `add`:", words[0], "observed:", "[4]", "turn 3:", "It is 4."),
        "lineage 1: 4 tokens, length, not trained",
    ]
    assert "turn 2, calls `add`:" in lines


def test_lineages_are_told_apart(tmp_path):
    record_lineages(tmp_path)
    text = render(show(tmp_path, update=0))
    assert "update 0: 1 of 1 samples, mean reward 1.0000" in text
    assert "trajectory 0: reward 1.0000, version 0, age 0, 10 tokens in 4 turns, 3 lineages" in text
    lines = [line.strip() for line in text.splitlines()]
    start = lines.index("lineage 0: 2 tokens in 2 turns, stop")
    assert lines[start + 1 :] == [
        *("the answer", "lineage 1: 4 tokens, length, not trained", "context:", "name it:", "completion:", "a title"),
        *("lineage 2: 4 tokens, stop", "context:", "you are [an agent]:", "completion:", "the agent's"),
    ]


def record_lineages(tmp_path):
    """A trajectory of four turns in three lineages."""
    logprobs = np.zeros(4, np.float32)
    with Journal.open(tmp_path / JOURNAL_NAME) as journal:
        journal.begin(RunFacts("synchronous", 0, False, 1, 1, 1, 0, 9, 0), at=1.0)
        journal.group_admitted(
            0,
            version=0,
            deadline=0,
            staleness=0,
            prompt=Prompt(0, "what is it?", (1, 2), {}),
            epoch=0,
            row_number=0,
            trajectories=[0],
            seeds=[1],
            at=1.0,
        )
        spans = np.array([[0, 1], [3, 4]], np.int32)
        lineages = [
            Lineage((1, 2), Completion(0, 0, np.arange(4), logprobs, "stop", "sum0", turns=spans), True, (0, 3)),
            Lineage((5,), Completion(0, 0, np.arange(4), logprobs, "length", "sum0"), False, (1,)),
            Lineage((6, 7), Completion(0, 0, np.arange(4), logprobs, "stop", "sum0"), True, (2,)),
        ]
        texts, contexts = ["the answer", "a title", "the agent's"], [None, "name it:", "you are [an agent]:"]
        journal.generated(0, lineages, texts, at=1.0, contexts=contexts)
        journal.scored(0, 1.0, at=1.0)
        journal.batch_taken(0, [0, 0], at=1.0, lineages=[0, 2])
