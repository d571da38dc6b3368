"""The bench of environments: it runs, and its ideal is what a closed form says."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))  # the benches are no part of the package

from bench import environments


@pytest.mark.slow
def test_the_quick_bench_measures_everything(tmp_path: Path) -> None:
    before = environments.rollout_runner.WORLD_S
    assert environments.main(["--quick", "--out", str(tmp_path / "found.json")]) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    assert set(found["floors"]) == {
        "against_lock_step", "against_its_closed_form", "against_ideal", "workers_against_lock_step",
        "workers_against_ideal", "turn_alone_ms", "thread_ms_per_turn", "workers_thread_ms_per_turn",
        "idle_freed_to_held",
    }  # fmt: skip
    assert all(floor["got"] > 0 for floor in found["floors"].values())
    assert before == environments.rollout_runner.WORLD_S


def test_the_ideal_is_that_of_a_closed_form_if_all_worlds_are_alike() -> None:
    """One group a batch and one episode a group: Little's law, with a row for each."""
    setting = replace(
        environments.Setting(), groups=8, group_size=1, batch=1, staleness=31, updates=120, turns=3, tokens=4,
        step_s=0.01, rows=8, mean_s=0.5, deviation_s=0.0,
    )  # fmt: skip
    episode_s = 3 * (4 * 0.01 + 0.5)
    assert environments.VirtualRun(setting).run() == pytest.approx(8 / episode_s, rel=0.1)


def test_freed_rows_are_used_by_others(monkeypatch: pytest.MonkeyPatch) -> None:
    setting = replace(environments.settings(quick=False)[1], updates=30)
    freed = environments.VirtualRun(setting).run()
    monkeypatch.setattr(environments.rollout_runner, "WORLD_S", environments.NEVER_S)
    assert freed > 5 * environments.VirtualRun(setting).run()


def test_a_world_takes_the_same_time_whoever_asks() -> None:
    setting = environments.Setting()
    times = [setting.world_s(trajectory, 0) for trajectory in range(2000)]
    assert times == [setting.world_s(trajectory, 0) for trajectory in range(2000)]
    assert min(times) >= 0
    assert sum(times) / len(times) == pytest.approx(1.2876, rel=0.05)  # of N(1, 1), truncated at 0
