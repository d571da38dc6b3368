"""Whole runs with listeners, and runs that their handle stops."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from run_cases import assert_verifies, recipe, run

from stretto.assembly.train import train
from stretto.errors import StrettoError
from stretto.observe.listeners import Callback, Listeners, LiveRun
from stretto.run.folder_checks import standing
from stretto.run.handle import RunHandle


class Recorder(Callback):
    def __init__(self, stop_after: int | None = None) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.stop_after = stop_after

    def on_start(self, run: LiveRun) -> None:
        assert (run.folder / "config.toml").is_file()
        self.run = run
        self.calls.append(("start", run.outcome))

    def on_update(self, line: dict[str, Any]) -> None:
        self.calls.append(("update", line))
        if line["update"] == self.stop_after:
            self.run.stop()

    def on_evaluation(self, line: dict[str, Any]) -> None:
        self.calls.append(("evaluation", line))

    def on_message(self, text: str) -> None:
        self.calls.append(("message", text))

    def on_end(self, run: LiveRun) -> None:
        self.calls.append(("end", run.outcome))

    def lines(self) -> list[dict[str, Any]]:
        return [what for kind, what in self.calls if kind in ("update", "evaluation")]


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.usefixtures("task")
def test_listeners_get_the_lines_of_metrics_and_may_stop_a_run_that_resumes(model: Path, tmp_path: Path) -> None:
    made, folder = recipe(model, tmp_path, "training.steps=40"), tmp_path / "run"
    first = Recorder(stop_after=0)
    summary = train(made, folder, listeners=Listeners([first]))
    assert summary["stopped"]
    assert standing(folder) == "stopped"
    assert [kind for kind, _ in first.calls][:2] == ["start", "message"]
    assert ("message", f"run folder: {folder}") in first.calls
    assert ("message", "stopping at the next update boundary") in first.calls
    assert first.calls[-1] == ("end", "stopped")
    assert first.lines() == metrics(folder)
    done = summary["steps"]
    assert 1 <= done < 40

    second = Recorder(stop_after=done)
    summary = train(made, folder, resume=True, listeners=Listeners([second]))
    assert summary["steps"] > done
    assert first.lines() + second.lines() == metrics(folder)
    assert_verifies(folder)


@pytest.mark.usefixtures("task")
def test_a_run_that_fails_tells_its_listeners_the_end(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder()

    async def fails(*_: Any, **__: Any) -> None:
        raise StrettoError("the disk is full")

    monkeypatch.setattr("stretto.assembly.train.export_policy", fails)
    with pytest.raises(StrettoError, match="the disk is full"):
        train(recipe(model, tmp_path), tmp_path / "run", listeners=Listeners([recorder]))
    assert recorder.calls[-1] == ("end", "failed")
    assert [line["update"] for line in recorder.lines() if line["kind"] == "update"] == [0, 1, 2]


@pytest.mark.usefixtures("task")
def test_a_run_in_a_thread_is_interrupted_as_by_ctrl_c(model: Path, tmp_path: Path) -> None:
    made, folder = recipe(model, tmp_path, "training.steps=40"), tmp_path / "run"
    handle, trained = RunHandle(folder), threading.Event()
    summaries: list[dict[str, Any]] = []
    listeners = Listeners([lambda line: trained.set()])
    thread = threading.Thread(
        target=lambda: summaries.append(train(made, folder, listeners=listeners, handle=handle)), daemon=True
    )
    thread.start()
    assert trained.wait(60)
    handle.interrupt()
    thread.join(60)
    assert summaries[0]["stopped"]
    assert handle.outcome == "stopped"

    early = RunHandle(folder)
    early.interrupt()
    with pytest.raises(KeyboardInterrupt):
        train(made, folder, resume=True, handle=early)
    assert early.interrupted
    assert early.outcome == "stopped"
    steps = summaries[0]["steps"] + 4  # groups may be in progress for the next ones
    assert not run(recipe(model, tmp_path, f"training.steps={steps}"), folder, resume=True)["stopped"]
    assert_verifies(folder)
