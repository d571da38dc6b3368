"""Three kills of real runs, each at another moment; `make chaos` makes fifty runs of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from machines import machines

from chaos import survive


@pytest.mark.parametrize("seed", [2, 8])  # before its first update, and in the middle
def test_a_run_that_is_killed_at_a_random_moment_comes_to_its_end_and_is_whole(
    model: Path, tmp_path: Path, seed: int
) -> None:
    assert len(survive(model, tmp_path / "life", seed).kills) == 1


@pytest.mark.slow
def test_a_run_on_a_cluster_whose_trainer_is_killed_goes_on_and_is_whole(model: Path, tmp_path: Path) -> None:
    with machines(workers=0) as on:
        assert len(survive(model, tmp_path / "life", seed=10, victim="trainer", on=on).kills) == 1
