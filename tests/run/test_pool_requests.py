"""What people ask of a live run, and that nothing they write can end it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stretto.errors import RunError
from stretto.run import pool_requests
from stretto.run.pool_requests import ANSWER, FOLDER, REQUEST, Control
from stretto.store.journal import Journal
from stretto.store.lock import Lock, is_alive
from stretto.store.schema import JOURNAL_NAME


class Instances:
    def describe(self) -> list[Any]:
        return []


def serve(folder: Path, until: Callable[[], bool]) -> None:
    """Serves until the condition holds; fails if serving ends by itself, or that takes too long."""

    async def main() -> None:
        serving = asyncio.create_task(Control(folder).serve(Instances()))  # type: ignore[arg-type]
        deadline = time.monotonic() + 30
        while not until():
            assert time.monotonic() < deadline
            done, _ = await asyncio.wait({serving}, timeout=0.01)
            assert not done, serving.exception()
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("request_text", "answer"),
    [
        ('{"do": "list"}', None),
        ("{", "the request is no JSON"),
        ("[]", "does not know the request"),
        ('{"do": "fly"}', "does not know the request"),
        ('{"do": "add", "count": "many"}', "does not know the request"),
        ("[" * 4_000, "the request is no JSON"),
        ("[" * 200_000, "longer than 4096 bytes"),
        ("9" * 4_000, "does not know the request"),
        (b"\xff\xfe\xfd", "the request is no JSON"),
    ],
)
def test_a_request_that_makes_no_sense_is_answered_and_the_run_goes_on(
    request_text: str | bytes, answer: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_requests, "POLL_S", 0.02)
    Control(tmp_path).open()
    data = request_text if isinstance(request_text, bytes) else request_text.encode()
    (tmp_path / FOLDER / f"1{REQUEST}").write_bytes(data)
    answered = tmp_path / FOLDER / f"1{ANSWER}"
    serve(tmp_path, answered.exists)
    found = json.loads(answered.read_text())
    assert found == {"done": "", "instances": []} if answer is None else answer in found["error"]
    assert len(str(found)) < 300, "a long request is not repeated in full"


def test_what_is_no_file_is_refused_by_name_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pool_requests, "POLL_S", 0.02)
    Control(tmp_path).open()
    os.mkfifo(tmp_path / FOLDER / f"1{REQUEST}")
    (tmp_path / FOLDER / f"2{REQUEST}").symlink_to(tmp_path)
    (tmp_path / FOLDER / f"3{REQUEST}").mkdir()
    (tmp_path / FOLDER / f"4{REQUEST}").write_text('{"do": "list"}')
    answers = [tmp_path / FOLDER / f"{number}{ANSWER}" for number in (1, 2, 4)]
    serve(tmp_path, lambda: all(path.exists() for path in answers))
    for number, path in enumerate(answers[:2], start=1):
        assert f"{number}{REQUEST}` is not a regular file" in json.loads(path.read_text())["error"]
    assert json.loads(answers[2].read_text()) == {"done": "", "instances": []}
    assert caplog.text.count(f"3{REQUEST}` cannot be read") == 1
    Control(tmp_path).open()  # a folder that somebody put there does not keep the run from being resumed
    assert [path.name for path in (tmp_path / FOLDER).iterdir()] == [f"3{REQUEST}"]


def test_the_name_of_a_request_cannot_control_the_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pool_requests, "POLL_S", 0.02)
    Control(tmp_path).open()
    for name, make in (("\x1b[2J\nWARNING", Path.touch), ("\x1b]0;title\x07", os.mkfifo), ("\x1bdir", Path.mkdir)):
        make(tmp_path / FOLDER / f"{name}{REQUEST}")
    serve(tmp_path, lambda: len(caplog.records) == 3)
    said = [record.getMessage() for record in caplog.records]
    assert all(line.isprintable() for line in said), said
    assert any(r"request `\x1b[2J\nWARNING` is refused" in line for line in said)


def test_requests_are_read_and_answered_outside_of_the_loops_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[threading.Thread] = []
    read, write = pool_requests._read, pool_requests._write

    def noted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            threads.append(threading.current_thread())
            return function(*args)

        return call

    monkeypatch.setattr(pool_requests, "POLL_S", 0.02)
    monkeypatch.setattr(pool_requests, "_read", noted(read))
    monkeypatch.setattr(pool_requests, "_write", noted(write))
    Control(tmp_path).open()
    (tmp_path / FOLDER / f"1{REQUEST}").write_text('{"do": "list"}')
    serve(tmp_path, (tmp_path / FOLDER / f"1{ANSWER}").exists)
    assert len(threads) == 2
    assert threading.main_thread() not in threads


def test_an_answer_that_cannot_be_written_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(path: Path, value: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pool_requests, "POLL_S", 0.02)
    monkeypatch.setattr(pool_requests, "_write", full)
    Control(tmp_path).open()
    (tmp_path / FOLDER / f"1{REQUEST}").write_text('{"do": "list"}')
    serve(tmp_path, lambda: "No space" in caplog.text)
    assert "No space left on device" in caplog.text


def test_what_is_asked_while_a_run_begins_is_done_and_what_was_asked_of_an_earlier_session_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_requests, "POLL_S", 0.02)
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / f"old{REQUEST}").write_text('{"do": "list"}')
    Control(tmp_path).open()
    with Journal.open(tmp_path / "journal.sqlite"):
        (tmp_path / FOLDER / f"new{REQUEST}").write_text('{"do": "list"}')
        Control(tmp_path).open()  # of a second process, which is about to be refused
        serve(tmp_path, (tmp_path / FOLDER / f"new{ANSWER}").exists)
    assert [path.name for path in (tmp_path / FOLDER).iterdir()] == [f"new{ANSWER}"]


def test_a_run_that_may_only_be_read_is_told_apart_from_one_that_ended_and_cannot_be_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Control(tmp_path).open()
    opened = os.open

    def read_only(path: str, flags: int, *rest: int) -> int:
        if flags & (os.O_RDWR | os.O_WRONLY):
            raise PermissionError(13, "Permission denied", path)
        return opened(path, flags, *rest)

    def refused(path: Path, value: Any) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    with contextlib.closing(Lock(tmp_path / JOURNAL_NAME)), monkeypatch.context() as patched:
        patched.setattr(os, "access", lambda path, mode: False)
        patched.setattr(os, "open", read_only)
        assert is_alive(tmp_path)
        patched.setattr(pool_requests, "_write", refused)
        with pytest.raises(RunError, match=r"cannot be asked: nothing can be written to .*: Permission denied"):
            pool_requests.ask(tmp_path, {"do": "list"})
    assert not is_alive(tmp_path)
