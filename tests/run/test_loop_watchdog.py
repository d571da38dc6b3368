"""A loop whose thread is held up: it is told of, it can be interrupted, and it does not last for ever."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from stretto.run.episodes import Episode
from stretto.run.interrupts import stopped_by_interrupts
from stretto.run.loop_watchdog import place_of, warn_when_blocked
from stretto.run.turns import Turns


def hold_up(seconds: float) -> None:
    time.sleep(seconds)


@pytest.mark.slow
def test_a_thread_that_is_held_up_is_told_of_once_and_where(caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        with warn_when_blocked(900.0, warn_after_s=1.0):
            await asyncio.sleep(1.5)  # it answers
            assert not caplog.records
            hold_up(2.5)
            await asyncio.sleep(1.0)
            hold_up(2.5)
            await asyncio.sleep(0.1)

    with caplog.at_level(logging.WARNING):
        asyncio.run(story())
    assert len(caplog.records) == 2, caplog.text
    assert "at test_loop_watchdog.py:" in caplog.text
    assert "(`hold_up`)" in caplog.text
    assert "`asyncio.to_thread`" in caplog.text


def test_a_process_that_was_stopped_for_long_goes_on(tmp_path: Path) -> None:
    process = run(tmp_path, "warn_when_blocked(1.5, warn_after_s=1.2, least_s=0.1)", "await asyncio.sleep(4)")
    process.send_signal(signal.SIGSTOP)
    time.sleep(2.5)
    process.send_signal(signal.SIGCONT)
    _, said = process.communicate(timeout=30)
    assert (process.returncode, said) == (0, "")


def test_the_place_is_the_line_of_others_code_that_ours_has_called() -> None:
    found: list[str] = []

    def inner() -> None:
        found.append(place_of(sys._getframe()))

    class Blocks:
        async def episode(self, prompt: Any, policy: Any) -> float:
            inner()
            return 1.0

    episode = Episode(Turns(()), None, max_tokens=1, deadline_s=None)  # type: ignore[arg-type]
    asyncio.run(episode.play(Blocks(), None))  # type: ignore[arg-type]
    assert [place.split(" ")[1] for place in found] == ["(`episode`)"]


def run(tmp_path: Path, body: str, then: str = "time.sleep(60)") -> subprocess.Popen[str]:
    """A process whose loop is held up behind what a run has around it; it says `blocked` first."""
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            """
            import asyncio, signal, time
            from stretto.run.loop_watchdog import warn_when_blocked
            from stretto.run.interrupts import stopped_by_interrupts

            signal.signal(signal.SIGINT, signal.default_int_handler)  # as in a terminal

            async def main():
                with BODY:
                    print("blocked", flush=True)
                    THEN

            asyncio.run(main())
            """
        )
        .replace("BODY", body)
        .replace("THEN", then)
    )
    process = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "blocked\n"
    return process


def test_a_second_interrupt_ends_a_run_that_is_held_up(tmp_path: Path) -> None:
    process = run(tmp_path, "stopped_by_interrupts(lambda: None)")
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert process.poll() is None, "the first one waits for an update boundary"
    process.send_signal(signal.SIGINT)
    assert process.wait(10) == 130
    process.communicate()


def test_a_run_that_is_held_up_for_too_long_ends_and_says_how_to_go_on(tmp_path: Path) -> None:
    process = run(tmp_path, "warn_when_blocked(0.5, warn_after_s=0.2, least_s=0.1)")
    _, said = process.communicate(timeout=30)
    assert process.returncode == 2
    assert "script.py:" in said
    assert "`runtime.stall_seconds = 0.5`" in said
    assert "`--resume`" in said


def test_an_interrupt_stops_a_loop_that_answers_at_once() -> None:
    async def story() -> float:
        stopped = asyncio.Event()
        with stopped_by_interrupts(stopped.set):
            began = time.monotonic()
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.wait_for(stopped.wait(), 10)
            return time.monotonic() - began

    before = signal.getsignal(signal.SIGTERM)
    assert asyncio.run(story()) < 5
    assert signal.getsignal(signal.SIGTERM) is before
