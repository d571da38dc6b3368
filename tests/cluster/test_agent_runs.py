"""Agents on a cluster: the driver has the endpoint and the programs, instances are elsewhere and may die."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from agent_cases import agents
from ray_cases import small_cluster
from run_cases import assert_verifies, rows, run

from stretto.cluster.pool import RayPool
from stretto.observe.progress import Silent

pytest.importorskip("aiohttp")


@pytest.mark.slow
def test_agents_go_on_when_an_instance_of_the_cluster_dies(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    add = RayPool.add

    async def remembered(self: RayPool) -> Any:
        instance, engine = await add(self)
        made.append(engine)
        return instance, engine

    class Kills(Silent):
        def updated(self, line: Any) -> None:
            if line["update"] == 0:
                os.kill(made[0].process, signal.SIGKILL)

    monkeypatch.setattr(RayPool, "add", remembered)
    ray_options = ('runtime.type="ray"', "runtime.instances=2", "runtime.instance_cpus=1.0", "runtime.trainer_cpus=1.0")
    with small_cluster():
        recipe = agents(
            model,
            tmp_path,
            *ray_options,
            "evaluation.prompts=0",
            "runtime.replacements=0",
            "runtime.engine_threads=",
            "runtime.trainer_threads=",
        )
        summary = run(recipe, tmp_path / "run", observer=Kills())
    assert summary["trained_trajectories"] == 24
    assert_verifies(tmp_path / "run")
    assert rows(tmp_path / "run", "SELECT COUNT(*) FROM instances WHERE outcome = 'lost'") == [(1,)]
    assert rows(tmp_path / "run", "SELECT reason FROM failures") == []
