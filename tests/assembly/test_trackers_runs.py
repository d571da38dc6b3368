"""Whole runs that report to trackers."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from run_cases import assert_verifies, recipe
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from stretto.assembly.check import check
from stretto.assembly.train import train
from stretto.errors import RecipeError
from stretto.observe.listeners import Callback, Listeners, LiveRun
from stretto.observe.run_list import runs_below


class StopsAfter(Callback):
    def __init__(self, update: int) -> None:
        self.update = update

    def on_start(self, run: LiveRun) -> None:
        self.run = run

    def on_update(self, line: dict[str, Any]) -> None:
        if line["update"] == self.update:
            self.run.stop()


def lines(folder: Path, kind: str) -> list[dict[str, Any]]:
    made = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in made if line["kind"] == kind]


@pytest.mark.usefixtures("task")
def test_a_run_that_is_stopped_and_resumed_is_one_curve_with_its_samples(model: Path, tmp_path: Path) -> None:
    made = recipe(model, tmp_path, "training.steps=4", 'observe.sinks=["tensorboard"]', "observe.samples=2")
    folder = tmp_path / "run"
    assert "# reports to tensorboard, `tensorboard --logdir RUN/tensorboard`" in str(check(made))
    assert train(made, folder, listeners=Listeners([StopsAfter(0)]))["stopped"]
    assert not train(made, folder, resume=True)["stopped"]
    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0}).Reload()
    drawn = [(event.step, event.value) for event in events.Scalars("update/reward_mean")]
    assert drawn == [(line["update"], pytest.approx(line["reward_mean"])) for line in lines(folder, "update")]
    assert len(drawn) == 4
    assert [event.step for event in events.Scalars("evaluation/score")] == [0, 4]
    tables = [event.tensor_proto.string_val[0].decode() for event in events.Tensors("samples/text_summary")]
    assert [len(table.splitlines()) for table in tables] == [4] * 4
    assert "+" in tables[0], "the prompts are sums"
    assert_verifies(folder)

    (listed,) = runs_below(tmp_path)
    summary = json.loads((folder / "summary.json").read_text())
    assert (listed.state, listed.updates, listed.sessions) == ("finished", 4, 2)
    assert (listed.score_before, listed.score_after) == (summary["eval_before"], summary["eval_after"])
    assert listed.tokens_per_second == pytest.approx(summary["tokens_per_second"])
    assert listed.age == pytest.approx(summary["staleness"]["mean"])


@pytest.mark.usefixtures("task")
def test_a_tracker_and_a_callback_are_told_the_recipe_of_the_phase_that_begins(model: Path, tmp_path: Path) -> None:
    folder, steps = tmp_path / "run", list[int]()

    class Reads(Callback):
        def on_start(self, run: LiveRun) -> None:
            steps.append(tomllib.loads((run.folder / "config.toml").read_text())["training"]["steps"])

    for number in (1, 2):
        options = f"training.steps={number}", 'observe.sinks=["tensorboard"]', "evaluation.prompts=0"
        train(recipe(model, tmp_path, *options), folder, resume=number > 1, listeners=Listeners([Reads()]))
    assert steps == [1, 2]
    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"tensors": 0}).Reload()
    recipes = [event.tensor_proto.string_val[0].decode() for event in events.Tensors("recipe/text_summary")]
    assert ["training.steps = 1\n" in recipes[0], "training.steps = 2\n" in recipes[-1]] == [True, True]


@pytest.mark.usefixtures("task")
def test_a_tracker_that_cannot_be_made_is_refused_before_anything_is_built(model: Path, tmp_path: Path) -> None:
    made = recipe(model, tmp_path, 'observe.sinks=["no_such_module:Tracker"]')
    for attempt in (lambda: check(made), lambda: train(made, tmp_path / "run")):
        with pytest.raises(RecipeError, match="there is no module `no_such_module`"):
            attempt()
    assert not (tmp_path / "run").exists()
