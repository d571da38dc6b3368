"""The preparation of GSM8K, which is an example that recipes name."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))  # the examples are no part of the package

from examples import gsm8k
from stretto.environments.rewards.mathematics import reward

# -- the files ---------------------------------------------------------------------------------------------------------

PUBLISHED = {"question": "What is 6 * 200?", "answer": "6 * 200 = <<6*200=1200>>1200\n#### 1,200"}


def published(folder: Path, **lines: str) -> Path:
    folder.mkdir()
    for split in ("train", "test"):
        (folder / f"{split}.jsonl").write_text(lines.get(split, json.dumps(PUBLISHED) + "\n"), encoding="utf-8")
    return folder


def test_problems_become_rows_that_a_task_takes(tmp_path: Path) -> None:
    source = published(tmp_path / "source", train=2 * (json.dumps(PUBLISHED) + "\n"))
    assert gsm8k.main(["--from", str(source), "--out", str(tmp_path / "out")]) == 0
    counts = {}
    for split in ("train", "test"):
        rows = [json.loads(line) for line in (tmp_path / "out" / f"{split}.jsonl").read_text().splitlines()]
        counts[split] = len(rows)
        (message,) = rows[0]["messages"]
        assert message["role"] == "user"
        assert message["content"] == PUBLISHED["question"] + (
            "\nPlease reason step by step, and put your final answer within \\boxed{}."
        )
        assert rows[0]["answer"] == "1200"
        assert reward("", PUBLISHED["answer"], answer=rows[0]["answer"]) == 1.0
    assert counts == {"train": 2, "test": 1}


def test_a_problem_may_have_characters_at_which_some_programs_end_a_line(tmp_path: Path) -> None:
    question = "How many\u2028eggs\u2029are\x85there?"
    line = json.dumps({**PUBLISHED, "question": question}, ensure_ascii=False) + "\n"
    source = published(tmp_path / "source", train=2 * line)
    assert gsm8k.main(["--from", str(source), "--out", str(tmp_path / "out")]) == 0
    rows = [json.loads(row) for row in (tmp_path / "out" / "train.jsonl").read_text(encoding="utf-8").split("\n")[:-1]]
    assert [row["messages"][0]["content"].startswith(question) for row in rows] == [True, True]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("[1]\n", "line 1: no JSON object"),
        ("{\n", "line 1: no JSON"),
        ('{"question": "?"}\n', "line 1: there is no text `answer`"),
        ('{"question": "?", "answer": "12"}\n', "`answer` has no number after `####`"),
        ("", "the file is empty"),
    ],
)
def test_a_file_that_is_something_else_is_refused(
    line: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = published(tmp_path / "source", test=line)
    assert gsm8k.main(["--from", str(source), "--out", str(tmp_path / "out")]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_published_files_are_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = published(tmp_path / "source")
    assert gsm8k.main(["--from", str(source), "--out", str(source)]) == 2
    assert "choose another one" in capsys.readouterr().err
    assert json.loads((source / "train.jsonl").read_text()) == PUBLISHED


def test_a_file_in_the_place_of_the_folder_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = published(tmp_path / "source")
    (tmp_path / "out").write_text("mine")
    assert gsm8k.main(["--from", str(source), "--out", str(tmp_path / "out")]) == 2
    assert "out` cannot be written (File exists); name a folder" in capsys.readouterr().err


def test_a_missing_folder_and_a_missing_package_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert gsm8k.main(["--from", str(tmp_path / "nowhere"), "--out", str(tmp_path / "out")]) == 2
    assert "train.jsonl` cannot be read" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert gsm8k.main(["--out", str(tmp_path / "out")]) == 2
    assert "`pip install datasets`, or give the folder" in capsys.readouterr().err


def test_without_a_hub_the_other_way_is_named_for_problems_and_for_the_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def load_dataset(*_: str, split: str) -> None:
        raise ConnectionError("no network")

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    assert gsm8k.main(["--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert "(ConnectionError: no network); give the folder" in said
    assert '`make qwen FROM="--packages --from FOLDER"`' in said


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_one_variable_of_make_takes_model_and_problems_from_elsewhere() -> None:
    asked = ["make", "-B", "-n", "qwen", "FROM=--packages --from published"]
    said = subprocess.run(asked, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True).stdout
    assert "examples/qwen.py 1.5B --packages\n" in said
    assert "examples/gsm8k.py --from published\n" in said


def test_the_hub_is_asked_for_both_splits_of_the_main_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load_dataset(name: str, config: str, *, split: str) -> list[dict[str, str]]:
        asked.append((name, config, split))
        return [PUBLISHED]

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    assert gsm8k.main(["--out", str(tmp_path / "out")]) == 0
    assert asked == [("openai/gsm8k", "main", "train"), ("openai/gsm8k", "main", "test")]
    assert len((tmp_path / "out" / "test.jsonl").read_text().splitlines()) == 1
