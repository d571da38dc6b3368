"""Whole runs over several real instances in one process, which come and go by `stretto pool`."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from run_cases import assert_verifies, recipe, rows, run, story

from stretto.cli import main
from stretto.engines.native.engine import NativeEngine
from stretto.engines.threaded import ThreadedEngine
from stretto.errors import RunError, SuspendedError
from stretto.local.components import LocalComponents
from stretto.models.loading import load_model
from stretto.models.lora_options import LoraOptions
from stretto.run import pool_requests
from stretto.training.trainer import LocalTrainer
from stretto.types import Request, Sampling

POOL = ("runtime.instances=3", "runtime.slots=1", "runtime.rebalance_seconds=0.2")


@pytest.mark.parametrize("lora", [True, False])
def test_instances_of_one_slot_each_serve_all_versions_together(lora: bool, model: Path, tmp_path: Path) -> None:
    made = recipe(model, tmp_path, *POOL, "training.steps=4", lora=lora)
    summary = run(made, tmp_path / "run")
    assert_verifies(tmp_path / "run")
    assert summary["steps"] == 4
    assert summary["instances_lost"] == 0
    assert rows(tmp_path / "run", "SELECT instance, slots FROM instances") == [(0, 1), (1, 1), (2, 1)]
    moved = rows(tmp_path / "run", "SELECT COUNT(*), SUM(num_bytes), SUM(prefilled) FROM moves")[0]
    assert (summary["moves"], summary["moved_bytes"], summary["prefilled_again_tokens"]) == tuple(n or 0 for n in moved)


def test_adapted_instances_share_the_base_and_so_does_one_that_comes_later(model: Path, tmp_path: Path) -> None:
    parts = LocalComponents.build(recipe(model, tmp_path, "runtime.instances=2"), str(model))
    late = parts.make_engine()
    trees = [core._slots.trees[0] for core in (*parts.engines, late)]
    places = [{name: p.data_ptr() for name, p in tree.named_parameters()} for tree in trees]
    assert places[0] == places[1] == places[2]
    trained = {parameter.data_ptr() for parameter in parts.trainer.model.parameters()}
    assert set(places[0].values()) <= trained
    for core in (*parts.engines, late):
        core.close()


def test_full_weights_that_are_trained_are_not_what_a_later_instance_begins_with(model: Path, tmp_path: Path) -> None:
    parts = LocalComponents.build(recipe(model, tmp_path, lora=False), str(model))
    with torch.no_grad():
        for parameter in parts.trainer.model.parameters():
            parameter.add_(1.0)
    parts.make_engine().close()  # compared with the model's own forward as it is made
    parts.engines[0].close()


# -- a trajectory that moves -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["lora", "full"])
@pytest.mark.parametrize("kv", [True, False])
def test_a_trajectory_goes_on_elsewhere_token_for_token(kind: Any, kv: bool, model: Path) -> None:
    loaded = load_model(str(model), torch.float32, torch.device("cpu"))
    options: dict[str, Any] = {"slots": 1, "rows": 4, "kv_tokens": 2048, "max_context": 512}
    if kind == "lora":
        options["lora_rank"] = 4
    cores = [NativeEngine(loaded, kind=kind, **options) for _ in range(2)]
    weights = LocalTrainer(loaded, lora=LoraOptions(rank=4) if kind == "lora" else None).weights(0)
    request = Request(3, 0, tuple(range(20, 60)), seed=11, sampling=Sampling(160))

    async def story() -> None:
        first, second = ThreadedEngine(lambda: cores[0], threads=1), ThreadedEngine(lambda: cores[1], threads=1)
        await first.load(weights)
        await second.load(weights)
        whole = await first.generate(request)
        task = asyncio.create_task(first.generate(request))
        while first.report().longest.get(0, 0) < 20:
            await asyncio.sleep(0.001)
        (taken,) = await first.suspend([3], kv=kv)
        with pytest.raises(SuspendedError):
            await task
        assert 0 < len(taken.tokens) < len(whole.tokens)
        carried = 0 if taken.kv is None else taken.kv.nbytes
        assert carried == kv * first.capacity.kv_bytes_per_token * (40 + len(taken.tokens) - 1)
        before = second.report().prefilled
        moved = await second.resume(taken)
        assert moved.tokens.tolist() == whole.tokens.tolist()
        if kv:
            assert moved.logprobs.tolist() == whole.logprobs.tolist(), "bit for bit"
            assert second.report().prefilled == before
        else:
            assert abs(moved.logprobs - whole.logprobs).max() < 1e-4
            assert second.report().prefilled > before
        await first.close()
        await second.close()

    asyncio.run(story())


# -- `stretto pool` ----------------------------------------------------------------------------------------------------


def beside(folder: Path, work: Callable[[], None]) -> threading.Thread:
    """Do something to a run from the outside once its first update is done; what it raised is kept."""

    def main() -> None:
        try:
            while not _updates(folder):
                time.sleep(0.02)
            work()
        except BaseException as error:
            thread.error = error  # type: ignore[attr-defined]

    thread = threading.Thread(target=main, daemon=True)
    thread.error = None  # type: ignore[attr-defined]
    thread.start()
    return thread


def _updates(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


@pytest.mark.parametrize("lora", [True, False])
def test_a_run_whose_instances_come_and_go_generates_what_one_instance_does(
    lora: bool, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pool_requests, "POLL_S", 0.02)
    options = ("rollout.paradigm=synchronous", "training.steps=6", "rollout.max_tokens=96", "evaluation.prompts=0")
    run(recipe(model, tmp_path, *options, lora=lora), tmp_path / "one")
    folder = tmp_path / "many"

    def come_and_go() -> None:
        assert main(["pool", str(folder), "--add", "1"]) == 0
        assert main(["pool", str(folder), "--remove", "1"]) == 0
        assert main(["pool", str(folder), "--remove", "0"]) == 0
        assert main(["pool", str(folder), "--list"]) == 0
        with pytest.raises(RunError, match="instance 2 is the last one"):
            pool_requests.ask(folder, {"do": "remove", "instance": 2})
        with pytest.raises(RunError, match="there is no instance 7; there are: 2"):
            pool_requests.ask(folder, {"do": "remove", "instance": 7})

    thread = beside(folder, come_and_go)
    run(recipe(model, tmp_path, *options, "runtime.instances=2", lora=lora), folder)
    thread.join(30)
    assert thread.error is None, thread.error  # type: ignore[attr-defined]
    assert_verifies(folder)
    assert story(folder) == story(tmp_path / "one")
    assert rows(folder, "SELECT instance, outcome FROM instances") == [(0, "removed"), (1, "removed"), (2, None)]
    said = capsys.readouterr().out
    assert "added instance 2\n" in said
    assert "instance 1 has handed its trajectories over and is gone" in said
    with pytest.raises(RunError, match="is finished, so it has no instances"):
        pool_requests.ask(folder, {"do": "list"})


def test_a_run_that_dies_before_it_answers_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.toml").touch()
    (tmp_path / "pool").mkdir()
    alive = iter([True, True, False])
    monkeypatch.setattr(pool_requests, "is_alive", lambda folder: next(alive))
    with pytest.raises(RunError, match="ended before it answered"):
        pool_requests.ask(tmp_path, {"do": "list"})
    monkeypatch.setattr(pool_requests, "is_alive", lambda folder: True)
    with pytest.raises(RunError, match=r"has not answered for 0\.2 s"):
        pool_requests.ask(tmp_path, {"do": "list"}, longest_s=0.2)


def test_an_instance_that_dies_in_a_real_run_is_replaced(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, died = NativeEngine.step, list[NativeEngine]()

    def dies(self: NativeEngine) -> Any:
        if self.report().steps >= 30 and not died:
            died.append(self)
            raise MemoryError("gone")
        return step(self)

    monkeypatch.setattr(NativeEngine, "step", dies)
    # Enough updates that the other instance does not finish the run before the replacement has started.
    summary = run(recipe(model, tmp_path, "runtime.instances=2", "training.steps=16"), tmp_path / "run")
    assert died
    assert (summary["instances_lost"], summary["instances_replaced"], summary["failed_trajectories"]) == (1, 1, 0)
    assert_verifies(tmp_path / "run")
    with sqlite3.connect(tmp_path / "run" / "journal.sqlite") as db:
        ((reason,),) = db.execute("SELECT reason FROM instances WHERE outcome = 'lost'").fetchall()
    assert "MemoryError: gone" in reason
