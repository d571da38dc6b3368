"""What is said of a place that no run can begin in."""

from __future__ import annotations

from pathlib import Path

import pytest

from stretto.errors import RunError
from stretto.run.folder_checks import default_run_folder, refuse_occupied


def test_a_place_that_cannot_be_written_to_is_refused_before_a_run_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_occupied(tmp_path / "new" / "run")
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"nothing can be written to `.*/file`; choose another `--out`"):
        refuse_occupied(tmp_path / "file" / "run")
    monkeypatch.setattr("os.access", lambda path, mode: False)
    with pytest.raises(RunError, match="nothing can be written to"):
        refuse_occupied(tmp_path / "new" / "run")


def test_two_runs_of_one_second_have_folders_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("stretto.run.folder_checks.time.strftime", lambda form: "20260102-030405")
    made = []
    for _ in range(3):
        made.append(default_run_folder(Path("recipes/sums.toml")))
        made[-1].mkdir(parents=True)
    assert [str(each) for each in made] == [f"runs/sums-20260102-030405{end}" for end in ("", "-2", "-3")]
