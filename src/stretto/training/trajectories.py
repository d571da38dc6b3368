"""The trajectories of a batch, which has a sample for each lineage. Pure.

A trajectory is compared with others once, and weighs as one sequence, however many lineages it has. So rewards are
taken from its first sample, and what is computed for it goes back to all of its samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stretto.types import Sample

Reals = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Trajectories:
    """The trajectory of each of `n` samples. If each has one lineage, these are the samples themselves."""

    owners: NDArray[np.int64]  # [n], numbered from 0 in the order of the batch
    first: NDArray[np.int64]  # [m], the first sample of each trajectory

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> Trajectories:
        """Finds the trajectories of samples. One that is used again is another trajectory."""
        numbers: dict[tuple[int, int], int] = {}
        owners = [numbers.setdefault((sample.trajectory, sample.use), len(numbers)) for sample in samples]
        return cls.of_owners(np.array(owners, dtype=np.int64))

    @classmethod
    def of_owners(cls, owners: NDArray[np.int64]) -> Trajectories:
        """Makes it from any numbers that are equal for the samples of one trajectory [n]."""
        _, first, inverse = np.unique(owners, return_index=True, return_inverse=True)
        return cls(inverse.astype(np.int64), first.astype(np.int64))

    def __len__(self) -> int:
        return len(self.first)

    def part(self, chosen: NDArray[np.int64]) -> Trajectories:
        """Those of some of the samples."""
        return self.of_owners(self.owners[chosen])

    def summed(self, values: Reals) -> Reals:
        """The sum over the samples of each trajectory [m]."""
        return np.bincount(self.owners, values, minlength=len(self)).astype(np.float64)

    def lengths(self, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        """The tokens of each trajectory [m], from those of each sample [n]."""
        found = np.zeros(len(self), dtype=np.int64)
        np.add.at(found, self.owners, lengths)
        return found

    def longest(self, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        """The tokens of the longest sample of each trajectory [m]."""
        found = np.zeros(len(self), dtype=np.int64)
        np.maximum.at(found, self.owners, lengths)
        return found
