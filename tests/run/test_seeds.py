"""Seeds depend on names alone."""

from __future__ import annotations

from stretto.run.seeds import derived_seed, trajectory_seed


def test_a_seed_is_63_bits_and_the_same_every_time_and_everywhere() -> None:
    assert derived_seed(7, "evaluation", 3) == 1162588347709337408
    assert all(0 <= trajectory_seed(run, id) < 1 << 63 for run in range(3) for id in range(100))


def test_no_two_names_share_a_seed() -> None:
    seeds = {trajectory_seed(run, id) for run in range(20) for id in range(500)}
    seeds |= {derived_seed(run, "evaluation", index) for run in range(20) for index in range(500)}
    assert len(seeds) == 20_000
    assert derived_seed(1, 23) != derived_seed(12, 3), "the parts of a name do not run together"
