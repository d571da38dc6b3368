"""A few updates of the soak that `make chaos` makes hundreds of."""

from __future__ import annotations

from pathlib import Path

import pytest
import soak

from stretto.run import pool_requests


@pytest.mark.slow
def test_a_run_whose_instances_join_leave_and_die_is_whole(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_requests, "POLL_S", 0.02)
    monkeypatch.setattr(soak, "PAUSE_S", 0.2)
    monkeypatch.setattr(soak, "MORTAL_SHARE", 0.7)
    monkeypatch.setattr(soak, "LIFE_STEPS", (60, 260))
    said: list[str] = []
    done = soak.soak(model, tmp_path / "soak", updates=20, seed=1, say=said.append)
    assert done.updates == 20
    assert min(done.joins, done.leaves, done.losses, done.moves) > 0, done
    assert said[-1].startswith("soak: 20 of 20 updates")
