"""Several tasks on a cluster: each has its own hosts of rewards and episodes."""

from __future__ import annotations

from pathlib import Path

import pytest
from mixture_cases import KINDS, mixture, write_kinds
from ray_cases import small_cluster
from run_cases import assert_verifies, run

from stretto.cluster.episodes import RayEpisodes
from stretto.cluster.rewards import RayRewards

pytest.importorskip("aiohttp")

RAY = ('runtime.type="ray"', "runtime.instance_cpus=0.5", "runtime.trainer_cpus=0.5")


@pytest.mark.slow
def test_every_kind_of_task_is_mixed_on_a_cluster(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_kinds(tmp_path)
    made: list[type] = []
    for kind in (RayRewards, RayEpisodes):
        start = kind.start
        monkeypatch.setattr(kind, "start", lambda self, start=start: (made.append(type(self)), start(self))[1])
    options = (*RAY, "training.steps=5", "runtime.engine_threads=", "runtime.trainer_threads=")
    with small_cluster():
        run(mixture(model, tmp_path, *options, tasks=KINDS), tmp_path / "run")
    assert sorted(each.__name__ for each in made) == ["RayEpisodes", "RayRewards"]
    assert "scored 35.00%, played 30.00%, called 20.00%, guess 15.00%" in assert_verifies(tmp_path / "run")
