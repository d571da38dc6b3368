"""What is asked of a cluster before anything runs on it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from run_cases import recipe

from stretto.cluster.connection import join, remove_leftovers, shortage
from stretto.errors import RecipeError

RAY = ('runtime.type="ray"', "runtime.instances=2", "runtime.instance_cpus=0.5", "runtime.trainers=3")


def test_a_cluster_that_has_too_little_is_told_by_the_options_that_ask_for_it(model: Path, tmp_path: Path) -> None:
    made = recipe(model, tmp_path, *RAY, "runtime.trainer_cpus=2", "runtime.trainer_gpus=1")
    assert shortage(made, {"CPU": 7.0, "GPU": 3.0}) is None
    short = shortage(made, {"CPU": 6.0, "GPU": 3.0})
    assert short is not None
    assert "`trainers = 3` with `trainer_cpus = 2` ask for 7 CPUs, and there are 6" in short
    short = shortage(made, {"CPU": 7.0})
    assert short is not None
    assert "`trainer_gpus = 1` ask for 3 GPUs, and there are 0" in short


def test_what_killed_processes_left_of_their_clusters_is_removed_and_nothing_else(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    names = [f"stretto-ray-{gone.pid}-a", f"stretto-ray-{os.getpid()}-b", "stretto-ray-12ab-c", f"other-{gone.pid}-d"]
    for name in names:
        (tmp_path / name / "session").mkdir(parents=True)
    remove_leftovers(tmp_path)
    assert sorted(path.name for path in tmp_path.glob("*-*")) == sorted(names[1:])


def test_an_address_where_nobody_listens_is_refused_at_once_by_its_option() -> None:
    with pytest.raises(RecipeError, match=r"`runtime.address`: the cluster at 127\.0\.0\.1:1 cannot be joined"):
        join("127.0.0.1:1")
