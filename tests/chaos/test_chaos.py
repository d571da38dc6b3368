"""Three kills of real runs, each at another moment; `make chaos` makes fifty runs of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from chaos import VICTIMS, survive
from stretto.tiny import WarmStart, tiny_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny", warm_start=WarmStart(steps=2))


@pytest.mark.parametrize("victim", sorted(VICTIMS))
@pytest.mark.parametrize(("seed", "kills"), [(0, 2), (1, 1)])
def test_a_run_that_is_killed_at_random_moments_comes_to_its_end_and_is_whole(
    model: Path, tmp_path: Path, victim: str, seed: int, kills: int
) -> None:
    survive(model, tmp_path / "life", seed, victim, kills)
