"""Seeds derived from names, so that nothing depends on the order in which things happen."""

from __future__ import annotations

import hashlib


def derived_seed(*parts: int | str) -> int:
    """63 bits from whatever names a thing."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def trajectory_seed(run_seed: int, trajectory: int) -> int:
    """The seed of a trajectory: its own whatever the version, the instance or the number of tries."""
    return derived_seed(run_seed, "trajectory", trajectory)


def turn_seed(seed: int, turn: int) -> int:
    """The seed of one turn of an episode; that of the first is the episode's own."""
    return seed if turn == 0 else derived_seed(seed, "turn", turn)
