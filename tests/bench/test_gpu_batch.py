"""Jobs of a batch: limits, what is left out, and a copy of the tree that later files do not change."""

from __future__ import annotations

import shlex
import time
from pathlib import Path

import pytest

from bench.gpu import batch, gsm8k, shared_prompts, step_profile, trl_async_gsm8k, trl_gsm8k
from bench.gpu.batch import Job, copy_tree, parse_job, run_all


def test_a_line_is_a_job_a_comment_or_an_error() -> None:
    assert parse_job("one 30/10 echo a  b") == Job("one", 30.0, 10.0, "echo a  b")
    assert parse_job("  # later") is None
    assert parse_job("") is None
    with pytest.raises(ValueError, match="is no job"):
        parse_job("one 30")
    with pytest.raises(ValueError, match="`soon` are no seconds"):
        parse_job("one soon echo")


def test_a_failed_job_and_a_cut_one_do_not_stop_those_after_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "GRACE_S", 2.0)
    jobs = [
        Job("fails", 30, 0, "echo broken; exit 3"),
        Job("hangs", 0.3, 0, "sleep 60 & sleep 60"),
        Job("long", 30, 1e6, "echo never"),
        Job("works", 30, 0, "pwd"),
    ]
    began = time.monotonic()
    assert run_all(jobs, tmp_path, tmp_path / "log", until=60.0) == 3
    assert time.monotonic() - began < 30
    said = (tmp_path / "log" / "jobs.txt").read_text()
    assert "fails ends with status 3" in said
    assert "hangs ends with status 124" in said
    assert "long is left out" in said
    assert "works ends with status 0" in said
    assert (tmp_path / "log" / "works.txt").read_text().strip() == str(tmp_path)
    assert (tmp_path / "log" / "fails.txt").read_text() == "broken\n"


def test_a_copy_keeps_the_code_and_shares_models_and_results(tmp_path: Path) -> None:
    root = tmp_path / "root"
    for name in batch.COPIED:
        (root / name / "results").mkdir(parents=True)
        (root / name / "code.py").write_text("before")
    copy = copy_tree(root, tmp_path / "copy")
    (root / "src" / "code.py").write_text("after")
    (copy / "build" / "cell.json").write_text("{}")
    assert (copy / "src" / "code.py").read_text() == "before"
    assert not (copy / "bench" / "results").exists()
    assert (root / "build" / "cell.json").exists()


def test_a_file_without_jobs_that_can_be_read_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "jobs.txt").write_text("one thirty echo")
    with pytest.raises(SystemExit):
        batch.main([str(tmp_path / "jobs.txt")])
    assert "`thirty` are no seconds" in capsys.readouterr().err


@pytest.mark.parametrize(
    "path", sorted((Path(batch.__file__).parent / "batches").glob("*.txt")), ids=lambda path: path.stem
)
def test_the_batches_that_are_here_have_commands_that_their_benches_accept(path: Path) -> None:
    """A misspelled option would cost the time of a whole job."""
    modules = (gsm8k, trl_gsm8k, trl_async_gsm8k, step_profile, shared_prompts)
    parsers = {module.__name__: module.parser_of for module in modules}
    jobs = [job for line in path.read_text().splitlines() if (job := parse_job(line)) is not None]
    assert len({job.name for job in jobs}) == len(jobs)
    for job in jobs:
        words = shlex.split(job.command)
        assert words[:2] == ["python3", "-m"]
        options = parsers[words[2]]().parse_args(words[3:])
        if words[2] == "bench.gpu.gsm8k":
            assert [gsm8k.recipe_of(cell, options) for cell in gsm8k.cells_of(options)]
