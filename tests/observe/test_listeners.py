"""Listeners of a run: each in its own thread, and none of them can hold the run up or end it."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

import pytest

from stretto.errors import RunError
from stretto.observe.listeners import Callback, Listeners, LiveRun, Outcome

PATIENCE_S = 30.0


class SomeRun:
    folder = Path("runs/some")
    outcome: Outcome = "running"

    def stop(self) -> None:
        self.outcome = "stopped"


class Recorder(Callback):
    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []

    def on_start(self, run: LiveRun) -> None:
        self.calls.append(("start", run.folder))

    def on_update(self, line: dict[str, Any]) -> None:
        self.calls.append(("update", line))

    def on_evaluation(self, line: dict[str, Any]) -> None:
        self.calls.append(("evaluation", line))

    def on_message(self, text: str) -> None:
        self.calls.append(("message", text))

    def on_end(self, run: LiveRun) -> None:
        self.calls.append(("end", run.outcome))


def update(number: int) -> dict[str, Any]:
    return {"kind": "update", "update": number, "ages": {"0": 1}}


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_a_listener_gets_all_events_in_the_order_of_the_run_and_the_start_first() -> None:
    recorder, run = Recorder(), SomeRun()
    listeners = Listeners([recorder])
    listeners.message("early")
    listeners.start(run)
    listeners.write(update(0))
    listeners.write({"kind": "evaluation", "score": 0.5})
    listeners.message("late")
    run.outcome = "finished"
    listeners.close(run)
    listeners.close(run)
    assert recorder.calls == [
        ("start", run.folder),
        ("message", "early"),
        ("update", update(0)),
        ("evaluation", {"kind": "evaluation", "score": 0.5}),
        ("message", "late"),
        ("end", "finished"),
    ]


def test_a_listener_hears_nothing_of_a_run_that_never_started() -> None:
    recorder = Recorder()
    listeners = Listeners([recorder])
    listeners.message("the recipe is bad")
    listeners.close(SomeRun())
    assert recorder.calls == []


def test_a_function_gets_the_updates_and_an_object_what_it_has_methods_for() -> None:
    seen: list[int] = []
    ends: list[str] = []

    class OnlyEnd:
        def on_end(self, run: LiveRun) -> None:
            ends.append(run.outcome)

    listeners = Listeners([lambda line: seen.append(line["update"]), OnlyEnd()])
    listeners.start(SomeRun())
    listeners.write(update(3))
    listeners.message("not for them")
    listeners.close(SomeRun())
    assert seen == [3]
    assert ends == ["running"]


def test_a_listener_that_changes_its_line_changes_nothing_else() -> None:
    def spoil(line: dict[str, Any]) -> None:
        line["ages"].clear()

    recorder, line = Recorder(), update(0)
    listeners = Listeners([spoil, recorder])
    listeners.start(SomeRun())
    listeners.write(line)
    listeners.close(SomeRun())
    assert line == update(0)
    assert ("update", update(0)) in recorder.calls


def test_a_listener_that_raises_is_named_once_and_counted_and_hears_the_rest(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Recorder):
        def on_update(self, line: dict[str, Any]) -> None:
            super().on_update(line)
            raise SystemExit("no more") if line["update"] else KeyError("reward")

    broken, other = Broken(), Recorder()
    listeners = Listeners([broken, other])
    listeners.start(SomeRun())
    for number in range(3):
        listeners.write(update(number))
    listeners.close(SomeRun())
    assert [kind for kind, _ in broken.calls] == ["start", *["update"] * 3, "end"]
    assert [kind for kind, _ in other.calls] == ["start", *["update"] * 3, "end"]
    first, total = warnings(caplog)
    assert first.startswith("`on_update` of the callback `Broken` raised KeyError: 'reward' (test_listeners.py:")
    assert total == "`on_update` of the callback `Broken` failed 3 times"


def test_a_listener_that_hangs_holds_up_neither_the_run_nor_the_others(caplog: pytest.LogCaptureFixture) -> None:
    release, entered, heard = threading.Event(), threading.Event(), threading.Event()

    class Hung(Recorder):
        def on_update(self, line: dict[str, Any]) -> None:
            entered.set()
            release.wait(PATIENCE_S)

    class Other(Recorder):
        def on_update(self, line: dict[str, Any]) -> None:
            super().on_update(line)
            heard.set()

    other = Other()
    listeners = Listeners([Hung(), other], most_queued=4, close_s=0.5)
    listeners.start(SomeRun())
    listeners.write(update(0))
    assert entered.wait(PATIENCE_S)
    assert heard.wait(PATIENCE_S)
    for number in range(1, 10):
        heard.clear()
        listeners.write(update(number))
        assert heard.wait(PATIENCE_S)
    listeners.close(SomeRun())
    release.set()
    assert [line["update"] for kind, line in other.calls if kind == "update"] == list(range(10))
    assert warnings(caplog) == [
        "the callback `Hung` is 4 events behind: what it has no room for is lost to it, and counted; the run does not "
        "wait",
        "the callback `Hung` was not done 0.5 s after the run; it is abandoned, with 5 events left",
        "the callback `Hung` has lost 5 events",
    ]


def test_the_end_is_never_lost_to_a_slow_listener() -> None:
    release, entered = threading.Event(), threading.Event()

    class Slow(Recorder):
        def on_update(self, line: dict[str, Any]) -> None:
            super().on_update(line)
            entered.set()
            release.wait(PATIENCE_S)

    slow = Slow()
    listeners = Listeners([slow], most_queued=2)
    listeners.start(SomeRun())
    listeners.write(update(0))
    assert entered.wait(PATIENCE_S)
    for number in range(1, 6):
        listeners.write(update(number))
    release.set()
    listeners.close(SomeRun())
    assert [kind for kind, _ in slow.calls] == ["start", "update", "update", "update", "end"]


def test_a_listener_may_stop_the_run() -> None:
    class Stops(Callback):
        def on_start(self, run: LiveRun) -> None:
            self.run = run

        def on_update(self, line: dict[str, Any]) -> None:
            self.run.stop()

    run = SomeRun()
    listeners = Listeners([Stops()])
    listeners.start(run)
    listeners.write(update(0))
    listeners.close(run)
    assert run.outcome == "stopped"


def test_an_object_that_nothing_would_call_is_refused_with_what_to_do() -> None:
    class Misspelt(Callback):
        def on_updates(self, line: dict[str, Any]) -> None: ...

    class Asynchronous(Callback):
        async def on_update(self, line: dict[str, Any]) -> None:  # type: ignore[override]
            ...

    def without_line() -> None: ...

    for listener, words in (
        (Recorder, "is a class; give an object of it, such as `Recorder()`"),
        (Misspelt(), "has a method `on_updates`, which nothing calls; did you mean `on_update`?"),
        (Asynchronous(), "is asynchronous in `on_update`; write it with `def`"),
        (object(), "is no function and has none of the methods `on_start`, `on_update`"),
        (without_line, "`without_line` cannot be called as `on_update` with one argument"),
    ):
        with pytest.raises(RunError) as raised:
            Listeners([listener])
        assert words in str(raised.value)


def test_a_base_class_alone_starts_no_call_and_methods_of_other_frameworks_do_not_disturb() -> None:
    class Both(Callback):
        def on_step_end(self, args: object, state: object) -> None: ...

        def on_update(self, line: dict[str, Any]) -> None: ...

    listeners = Listeners([Callback(), Both()])
    assert len(listeners) == 2
    listeners.start(SomeRun())
    listeners.close(SomeRun())
