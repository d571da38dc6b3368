"""Whole runs on a cluster, and what happens to them when parts of it die."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster
from ray_cases import QUIET, small_cluster
from run_cases import assert_verifies, recipe, rows, run

from stretto.cluster.engine import RayEngine
from stretto.cluster.pool import RayPool
from stretto.observe.progress import Silent

RAY = ('runtime.type="ray"', "runtime.instances=2", "runtime.instance_cpus=1.0", "runtime.trainer_cpus=1.0")


class After(Silent):
    """Does something once, after an update."""

    def __init__(self, update: int, act: Callable[[], None]) -> None:
        self.update, self.act = update, act

    def updated(self, line: Any) -> None:
        if line["update"] == self.update:
            self.act()


@pytest.fixture
def instances(monkeypatch: pytest.MonkeyPatch) -> list[RayEngine]:
    """The instances that runs have made, in their order."""
    made: list[RayEngine] = []
    add = RayPool.add

    async def remembered(self: RayPool) -> Any:
        instance, engine = await add(self)
        assert isinstance(engine, RayEngine)
        made.append(engine)
        return instance, engine

    monkeypatch.setattr(RayPool, "add", remembered)
    return made


def lost(folder: Path) -> int:
    """How many instances a run has lost, by its journal."""
    return int(rows(folder, "SELECT count(*) FROM instances WHERE outcome = 'lost'")[0][0])


@pytest.mark.slow
def test_instances_that_are_killed_and_that_hang_are_replaced_and_nothing_is_lost(
    model: Path, tmp_path: Path, instances: list[RayEngine]
) -> None:
    def harm() -> None:
        os.kill(instances[0].process, signal.SIGKILL)
        os.kill(instances[1].process, signal.SIGSTOP)

    with small_cluster():
        made = recipe(model, tmp_path, *RAY, "runtime.instance_seconds=4", "training.steps=5")
        summary = run(made, tmp_path / "run", observer=After(1, harm))
    assert summary["steps"] == 5
    assert lost(tmp_path / "run") == 2
    assert len(instances) > 2, "neither of the first two could go on"
    assert_verifies(tmp_path / "run")


@pytest.mark.slow
def test_instances_are_added_and_removed_from_outside_while_a_run_goes_on(model: Path, tmp_path: Path) -> None:
    folder, said = tmp_path / "run", list[str]()

    def ask() -> None:
        for wanted in (("--add", "1"), ("--remove", "0"), ("--list",)):
            command = [sys.executable, "-m", "stretto", "pool", str(folder), *wanted]
            said.append(subprocess.run(command, capture_output=True, text=True, timeout=300).stdout)
        os.kill(os.getpid(), signal.SIGINT)

    asking = threading.Thread(target=ask)
    with small_cluster():
        made = recipe(model, tmp_path, *RAY, "runtime.instances=1", "training.steps=100000")
        summary = run(made, folder, observer=After(1, asking.start))
    asking.join()
    assert summary["stopped"]
    assert "added instance 1\n" in said[0]
    assert [line.split()[0] for line in said[2].splitlines()[1:]] == ["1"]
    assert rows(folder, "SELECT instance, outcome FROM instances ORDER BY 1") == [(0, "removed"), (1, None)]
    assert rows(folder, "SELECT count(*) FROM completions c JOIN trajectories USING (trajectory)")[0][0] > 24
    assert_verifies(folder)


@pytest.mark.slow
def test_a_run_goes_on_when_one_of_three_machines_dies(model: Path, tmp_path: Path, instances: list[RayEngine]) -> None:
    # The driver's machine has no room, so the instance is on one of the others; so is the trainer, maybe on the same.
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    nodes = [cluster.add_node(num_cpus=2) for _ in range(2)]
    gone: list[threading.Thread] = []

    def harm() -> None:
        node = next(node for node in nodes if node.node_id == instances[0].node)
        gone.append(threading.Thread(target=cluster.remove_node, args=(node,), kwargs={"allow_graceful": False}))
        gone[0].start()

    ray.shutdown()  # of another test's cluster
    ray.init(address=cluster.address, **{k: v for k, v in QUIET.items() if k != "include_dashboard"})
    try:
        made = recipe(model, tmp_path, *RAY, "runtime.instances=1", "runtime.instance_seconds=10", "training.steps=40")
        summary = run(made, tmp_path / "run", observer=After(1, harm))
        gone[0].join()
    finally:
        ray.shutdown()
        cluster.shutdown()
    assert summary["steps"] == 40
    assert lost(tmp_path / "run") == 1
    assert instances[1].node != instances[0].node
    assert_verifies(tmp_path / "run")
