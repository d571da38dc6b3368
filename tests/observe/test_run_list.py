"""The list of runs below a folder."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from journal_cases import FACTS, Recorder

from stretto.cli import main
from stretto.errors import RunError
from stretto.observe.run_list import lines_of, readable_size, runs_below
from stretto.store.schema import JOURNAL_NAME


@pytest.fixture(scope="module")
def journal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    Recorder(folder, FACTS).run()
    return folder / JOURNAL_NAME


def put(journal: Path, *folders: Path) -> None:
    for folder in folders:
        folder.mkdir(parents=True)
        shutil.copy(journal, folder)


def test_runs_are_found_below_a_folder_and_not_inside_of_each_other(journal: Path, tmp_path: Path) -> None:
    put(journal, tmp_path / "b", tmp_path / "compare" / "drop", tmp_path / "b" / "policy", tmp_path / ".hidden" / "c")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "config.toml").write_text("")
    os.symlink(tmp_path / "b", tmp_path / "link")
    found = runs_below(tmp_path)
    assert [str(run.folder.relative_to(tmp_path)) for run in found] == ["b", "compare/drop"]
    assert [run.folder for run in runs_below(tmp_path / "b")] == [tmp_path / "b"]


def test_a_run_is_one_line_and_a_damaged_one_too(journal: Path, tmp_path: Path) -> None:
    put(journal, tmp_path / "good", tmp_path / "bad\x1b[31m")
    (tmp_path / "bad\x1b[31m" / JOURNAL_NAME).write_bytes(b"no database" * 500)
    head, *lines = lines_of(runs_below(tmp_path), tmp_path)
    for name in ("run", "state", "updates", "held-out score", "tokens/s", "age", "paradigm", "started", "size"):
        assert name in head
    assert len(lines) == 2
    assert lines[0].split()[0] == "bad\\x1b[31m", "control characters are escaped"
    assert "damaged" in lines[0]
    assert "its journal cannot be read: file is not a database" in lines[0]
    assert lines[1].split()[:5] == ["good", "finished", "4", "of", "4"]
    assert all(len(line) <= 40 for line in lines_of(runs_below(tmp_path), tmp_path, 40))


def test_the_command_prints_lines_or_json(journal: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    put(journal, tmp_path / "good")
    assert main(["list", str(tmp_path)]) == 0
    assert "good" in capsys.readouterr().out
    assert main(["list", str(tmp_path), "--json"]) == 0
    (run,) = json.loads(capsys.readouterr().out)
    assert (run["name"], run["state"], run["updates"], run["paradigm"]) == ("good", "finished", 4, "multi-version")
    (tmp_path / "empty").mkdir()
    assert main(["list", str(tmp_path / "empty")]) == 0
    assert "no run in" in capsys.readouterr().out
    assert main(["list", str(tmp_path / "empty"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []
    assert main(["list", str(tmp_path / "nowhere")]) == 2
    with pytest.raises(RunError, match="is not a folder"):
        runs_below(tmp_path / "nowhere")


def test_sizes_are_for_people() -> None:
    assert [readable_size(size) for size in (0, 1_023, 1_024, 20_480, 5 * 2**30, 3 * 2**40)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "20 KiB",
        "5.0 GiB",
        "3.0 TiB",
    ]
