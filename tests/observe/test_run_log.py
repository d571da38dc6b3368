"""The log of a run."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tracker_cases import update

from stretto.observe.progress import Silent
from stretto.observe.run_log import Logged, RunLog

STAMP = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ", re.MULTILINE)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.toml").write_text("")
    return tmp_path


@pytest.fixture(autouse=True)
def _info() -> Iterator[None]:
    ours = logging.getLogger("stretto")
    before = ours.level
    ours.setLevel(logging.INFO)
    yield
    ours.setLevel(before)


def text(folder: Path) -> str:
    return STAMP.sub("", (folder / "run.log").read_text(encoding="utf-8"))


def test_debug_lines_of_this_package_alone_are_in_the_log_if_they_are_on(folder: Path) -> None:
    another = logging.getLogger("another")
    logging.getLogger("stretto").setLevel(logging.DEBUG)
    another.setLevel(logging.DEBUG)
    with RunLog(folder).attached():
        logging.getLogger("stretto.run.loop").debug("a batch")
        another.debug("noise")
        another.info("news")
    another.setLevel(logging.NOTSET)
    assert text(folder).splitlines() == ["DEBUG stretto.run.loop: a batch", "INFO another: news"]


def test_everything_that_a_run_says_is_in_the_log_with_the_time(folder: Path) -> None:
    made = RunLog(folder)
    with made.attached():
        observer = Logged(Silent(), made, steps=4)
        observer.message("run folder: here")
        logging.getLogger("stretto.run.loop").info("trajectory 3 goes to instance 1")
        logging.getLogger("stretto.run.loop").debug("not this")
        logging.getLogger("another").warning("a library warns")
        line = update(0, num_sequences=4, replayed_sequences=0, tokens=8, staleness_max=2, filtered_groups=0)
        observer.updated({**line, "warnings": ["update 0: something"]})
    logging.getLogger("stretto").warning("after the run")
    assert text(folder).splitlines() == [
        "INFO run folder: here",
        "INFO stretto.run.loop: trajectory 3 goes to instance 1",
        "WARNING another: a library warns",
        "WARNING update 0: something",
        "INFO 1 of 4 updates done  reward 0.000  1,000 tok/s  age 1.50 (max 2)  length 2",
    ]
    assert len(STAMP.findall((folder / "run.log").read_text())) == 5


def test_nothing_is_written_before_the_folder_is_that_of_a_run(tmp_path: Path) -> None:
    made = RunLog(tmp_path)
    with made.attached():
        made.say("early")
        assert list(tmp_path.iterdir()) == []
        (tmp_path / "config.toml").write_text("")
        made.say("late")
    assert text(tmp_path) == "INFO early\nINFO late\n"


def test_a_resumed_run_appends_and_the_error_that_ended_it_is_there_with_its_traceback(folder: Path) -> None:
    with pytest.raises(ValueError, match="boom"), RunLog(folder).attached():
        raise ValueError("boom \x1b[31m")
    again = RunLog(folder)
    with again.attached():
        again.say("goes on")
    first, *middle, error, last = text(folder).splitlines()
    assert first == "ERROR the run ended with Traceback (most recent call last):"
    assert all(line.startswith("    ") for line in middle), "one entry is told from the next"
    assert error == "    ValueError: boom \\x1b[31m", "control characters are escaped"
    assert last == "INFO goes on"


def test_the_log_has_a_bounded_size(folder: Path) -> None:
    made = RunLog(folder, most_bytes=1_000)
    with made.attached():
        for number in range(100):
            made.say(f"line {number}")
    sizes = {path.name: path.stat().st_size for path in folder.iterdir() if path.name.startswith("run.log")}
    assert sizes.keys() == {"run.log", "run.log.1"}
    assert all(size < 1_100 for size in sizes.values())
    lines = (folder / "run.log.1").read_text() + (folder / "run.log").read_text()
    assert lines.endswith("line 99\n")


def test_a_log_that_cannot_be_written_is_told_once_and_ends_nothing(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "run.log").mkdir()
    made = RunLog(folder)
    with made.attached():
        made.say("one")
        made.say("two")
    (record,) = caplog.records
    assert "cannot be written, and is left out" in record.getMessage()


def test_a_program_without_logging_still_sees_warnings_on_its_standard_error(folder: Path) -> None:
    code = (
        "import logging, sys\n"
        "from pathlib import Path\n"
        "from stretto.observe.run_log import RunLog\n"
        "with RunLog(Path(sys.argv[1])).attached():\n"
        "    logging.getLogger('stretto.run').warning('watch out')\n"
        "    logging.getLogger('stretto.run').info('not shown')\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=True)
    assert done.stderr == "watch out\n"
    assert "WARNING stretto.run: watch out" in text(folder)
