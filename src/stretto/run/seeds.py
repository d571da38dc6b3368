"""Seeds derived from names, so that no seed depends on the order of events."""

from __future__ import annotations

import hashlib


def derived_seed(*parts: int | str) -> int:
    """Returns 63 bits that depend on `parts` alone."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def trajectory_seed(run_seed: int, trajectory: int) -> int:
    """The seed of a trajectory, whatever its version, its instance and the number of attempts."""
    return derived_seed(run_seed, "trajectory", trajectory)


def turn_seed(seed: int, turn: int) -> int:
    """The seed of one turn of an episode; the first turn has the seed of the episode."""
    return seed if turn == 0 else derived_seed(seed, "turn", turn)
