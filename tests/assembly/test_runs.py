"""Whole runs: memory that runs out on the way, and one process on one GPU."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from run_cases import assert_verifies, equal, policy, recipe, run, story

import stretto.assembly.train as module
import stretto.setup.factories as parts_module
from stretto.assembly.retrain import retrain
from stretto.engines.native.engine import NativeEngine
from stretto.errors import RecipeError, TrainerError
from stretto.observe.progress import Silent
from stretto.store.reader import JournalReader
from stretto.training.trainer import LocalTrainer
from stretto.types import Batch

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


class Listener(Silent):
    """Keeps what is said."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def message(self, text: str) -> None:
        self.said.append(text)


def run_out_of_memory(monkeypatch: pytest.MonkeyPatch, *, update: int, times: int) -> None:
    """Update `update` finds no memory for its first `times` tries, after it has made its gradients."""
    original, tries = LocalTrainer._backward, [0]

    def short(self: LocalTrainer, batch: Batch, *args: Any) -> None:
        original(self, batch, *args)
        if batch.update == update and tries[0] < times:
            tries[0] += 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")

    monkeypatch.setattr(LocalTrainer, "_backward", short)


@pytest.fixture
def small_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """A context that leaves an engine something to give back: the tiny model's own is larger than any cache here."""
    monkeypatch.setattr(parts_module, "context_length", lambda config: 32)


@pytest.mark.usefixtures("small_context")
def test_a_run_goes_on_after_an_update_ran_out_of_memory_and_ends_the_same(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = recipe(model, tmp_path, "rollout.paradigm=synchronous", "rollout.kv_tokens=400", "rollout.retries=0")
    calm = run(made, tmp_path / "calm")
    run_out_of_memory(monkeypatch, update=1, times=2)
    listener = Listener()
    summary = run(made, tmp_path / "run", observer=listener)
    assert (calm["kv_given_back"], summary["kv_given_back"]) == (0, 400 - 196)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["kv_given_back"] == 204
    said = [text for text in listener.said if "ran out of memory" in text]
    assert len(said) == 2
    assert "the engine keeps 280 of 400 tokens of KV; try 2 of 4" in said[0]
    assert "the engine keeps 196 of 280 tokens of KV; try 3 of 4" in said[1]
    assert equal(policy(tmp_path / "calm"), policy(tmp_path / "run"))
    assert story(tmp_path / "calm") == story(tmp_path / "run")
    assert_verifies(tmp_path / "run")


@pytest.mark.usefixtures("small_context")
def test_trajectories_that_run_while_memory_is_given_back_are_all_trained_on(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_out_of_memory(monkeypatch, update=1, times=3)
    made = recipe(model, tmp_path, "rollout.staleness=2", "rollout.in_flight=6", "rollout.kv_tokens=400")
    summary = run(made, tmp_path / "run")
    assert summary["kv_given_back"] > 200
    assert (summary["steps"], summary["failed_trajectories"], summary["dropped_trajectories"]) == (3, 0, 0)
    assert_verifies(tmp_path / "run")


def test_a_run_whose_micro_batches_became_smaller_is_trained_again_with_the_same(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stretto.training.sequence_sizes.LEAST_MICRO_TOKENS", 8)
    run_out_of_memory(monkeypatch, update=1, times=1)
    run(recipe(model, tmp_path), tmp_path / "run")
    with JournalReader(tmp_path / "run" / "journal.sqlite") as reader:
        recorded = [reader.update_metrics(update)["micro_tokens"] for update in range(3)]
    assert recorded[0] == 8_192
    assert recorded[1] == recorded[2] != recorded[0]
    used, original = list[int | None](), LocalTrainer.update

    def watched(self: LocalTrainer, batch: Batch) -> Any:
        used.append(batch.micro_tokens)
        return original(self, batch)

    monkeypatch.setattr(LocalTrainer, "update", watched)
    assert retrain(tmp_path / "run").difference is None
    assert used == recorded


def test_memory_that_never_suffices_ends_the_run_by_name(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_out_of_memory(monkeypatch, update=1, times=10)
    with pytest.raises(TrainerError, match=r"update 1 ran out of memory 4 times.*Tried to allocate 20.00 MiB"):
        run(recipe(model, tmp_path), tmp_path / "run")
    assert_verifies(tmp_path / "run")


def test_memory_that_runs_out_while_the_run_is_built_is_refused_with_the_plan(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: NativeEngine, *args: Any, **options: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB")

    monkeypatch.setattr(NativeEngine, "__init__", full)
    with pytest.raises(RecipeError, match=r"Tried to allocate 9.00 GiB.*Planned were base .*`training.micro_tokens`"):
        run(recipe(model, tmp_path), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_what_auto_came_to_is_recorded(model: Path, tmp_path: Path) -> None:
    run(recipe(model, tmp_path, "training.steps=1", "evaluation.prompts=0"), tmp_path / "run")
    recorded = tomllib.loads((tmp_path / "run" / "config.toml").read_text())
    assert (recorded["model"]["dtype"], recorded["runtime"]["device"]) == ("float32", "cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_gpu_that_is_not_there_is_refused_before_anything_is_written(model: Path, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r'`runtime.device = "cuda"`'):
        run(recipe(model, tmp_path, "runtime.device=cuda"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


# -- on a GPU ----------------------------------------------------------------------------------------------------------


@needs_gpu
@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
def test_a_run_on_one_gpu_trains_and_verifies(model: Path, tmp_path: Path, lora: bool) -> None:
    made = recipe(model, tmp_path, "runtime.device=cuda", "rollout.staleness=2", "rollout.in_flight=6", lora=lora)
    summary = run(made, tmp_path / "run")
    assert summary["steps"] == 3
    assert summary["mismatch_kl"] < 0.05
    assert_verifies(tmp_path / "run")
    recorded = tomllib.loads((tmp_path / "run" / "config.toml").read_text())
    assert (recorded["model"]["dtype"], recorded["runtime"]["device"]) == ("bfloat16", "cuda")
    assert all(torch.isfinite(tensor.float()).all() for tensor in policy(tmp_path / "run").values())


@needs_gpu
def test_a_run_on_a_gpu_stops_and_resumes(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loops: list[Any] = []

    class Kept(module.Loop):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            loops.append(self)

    monkeypatch.setattr(module, "Loop", Kept)

    class StopsOnce(Silent):
        def updated(self, line: Any) -> None:
            if line["update"] == 0 and len(loops) == 1:
                loops[0].stop()

    made = recipe(model, tmp_path, "runtime.device=cuda", "rollout.staleness=2", "rollout.in_flight=6")
    assert run(made, tmp_path / "run", observer=StopsOnce())["stopped"]
    assert not run(made, tmp_path / "run", resume=True)["stopped"]
    assert_verifies(tmp_path / "run")


@needs_gpu
@pytest.mark.usefixtures("small_context")
def test_a_run_on_a_gpu_survives_an_update_that_ran_out_of_memory(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_out_of_memory(monkeypatch, update=1, times=2)
    summary = run(
        recipe(model, tmp_path, "runtime.device=cuda", "rollout.kv_tokens=400", "rollout.in_flight=6"), tmp_path / "run"
    )
    assert summary["kv_given_back"] == 204
    assert summary["failed_trajectories"] == 0
    assert_verifies(tmp_path / "run")
