"""How long completions are made to be: the two published shapes of a tail, and draws that every side shares."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Tail:
    """Log-normal lengths with a cap, in tokens."""

    median: float
    sigma: float
    cap: int

    def draw(self, count: int, seed: int) -> NDArray[np.int64]:
        """Lengths [count], at least 1 and at most `cap`."""
        raw = np.random.default_rng([seed, 77]).lognormal(np.log(self.median), self.sigma, count)
        return np.clip(np.rint(raw), 1, self.cap).astype(np.int64)

    def underway(self, count: int, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(tokens made, tokens left) of `count` rows met at a random moment of a rollout that has long been going on.

        A row is met in proportion to its length, at a uniform point of it; at least one token is left.
        """
        draw = np.random.default_rng([seed, 78])
        pool = self.draw(max(100_000, count), seed + 1)
        length = draw.choice(pool, count, p=pool / pool.sum())
        made = np.floor(draw.random(count) * length).astype(np.int64)
        return made, length - made


TAILS = {
    "short": Tail(400, 1.0, 6_144),
    "published": Tail(600, 1.2, 16_384),
    "tiny": Tail(8, 0.8, 40),
}
