"""The tokens that samples take in a micro-batch, where those with the same prompt share it. Pure.

All tokens of a prompt but the last are its *prefix*, which a micro-batch computes once for all of its samples
(`models/varlen_layout.py`). The last one belongs to each sample, because it predicts the sample's first token. So a
group of eight answers to a prompt of 100 tokens takes 99 tokens less seven times. Samples share by the tokens of their
prompts: it does not matter which group they are of.

Attention copies the keys of a prefix for each sample, one layer at a time. A key takes little memory beside a token, of
which every layer keeps its states; but a long prompt with many samples would have keys without end. So a micro-batch
has at most `KEYS_PER_TOKEN` times as many keys as its budget has tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stretto.training.options import LEAST_MICRO_TOKENS
from stretto.types import Sample

LEAST_PREFIX = 16  # tokens; a shorter one is not worth a sequence of its own
KEYS_PER_TOKEN = 4


def input_lengths(samples: Sequence[Sample]) -> NDArray[np.int64]:
    """The number of input tokens of each sample [n], its whole prompt included."""
    return np.array([max(1, len(s.prompt) + len(s.completion.tokens) - 1) for s in samples], dtype=np.int64)


def prompt_families(samples: Sequence[Sample]) -> NDArray[np.int64]:
    """Returns a number for each sample [n]: those with the same number may share the prefix of their prompts.

    -1 for a sample that shares nothing: its prefix is short, no other sample has it, or it has no completion. Samples
    that record the experts of their tokens have to agree on those of the prefix too.
    """
    keys = dict[int, bytes]()  # by the identity of the prompt, which the samples of a group have in common
    members = dict[tuple[bytes, bytes], list[int]]()
    for index, sample in enumerate(samples):
        prefix = len(sample.prompt) - 1
        if prefix < LEAST_PREFIX or not len(sample.completion.tokens):
            continue
        key = keys.get(id(sample.prompt))
        if key is None:
            key = keys[id(sample.prompt)] = np.asarray(sample.prompt, dtype=np.int64).tobytes()
        record = sample.completion.routing
        experts = b"" if record is None else record[:prefix].tobytes()
        members.setdefault((key, experts), []).append(index)
    families = np.full(len(samples), -1, dtype=np.int64)
    for family, indices in enumerate(each for each in members.values() if len(each) > 1):
        families[indices] = family
    return families


@dataclass(frozen=True, slots=True)
class SequenceSizes:
    """The tokens of some samples [n]. In one micro-batch they take `own` each, and `prefix` once for each family."""

    own: NDArray[np.int64]
    prefix: NDArray[np.int64]  # 0: it shares nothing
    family: NDArray[np.int64]  # as in `prompt_families`

    @classmethod
    def of(cls, samples: Sequence[Sample], *, shares_prompts: bool) -> SequenceSizes:
        """The sizes of samples; without `shares_prompts` nothing is shared."""
        whole = input_lengths(samples)
        if not shares_prompts:
            return cls(whole, np.zeros_like(whole), np.full_like(whole, -1))
        family = prompt_families(samples)
        prompts = np.array([len(sample.prompt) for sample in samples], dtype=np.int64)
        prefix = np.where(family < 0, 0, prompts - 1)
        return cls(whole - prefix, prefix, family)

    def __len__(self) -> int:
        return len(self.own)

    def __getitem__(self, chosen: NDArray[np.int64] | list[int]) -> SequenceSizes:
        """The sizes of some of the samples."""
        return SequenceSizes(self.own[chosen], self.prefix[chosen], self.family[chosen])

    @property
    def alone(self) -> NDArray[np.int64]:
        """The tokens of each sample in a micro-batch of its own [n]."""
        return self.own + self.prefix

    @property
    def load(self) -> NDArray[np.int64]:
        """The tokens of each sample beside its prefix, or more if its keys are too many for them [n]."""
        return np.where(self.prefix == 0, self.own, np.maximum(self.own, -(-self.alone // KEYS_PER_TOKEN)))

    @property
    def total_load(self) -> int:
        """The tokens that all samples in one micro-batch count as."""
        return int(self.load.sum() + self.family_prefixes.sum())

    @property
    def families(self) -> list[NDArray[np.int64]]:
        """The samples that share a prefix, family by family; one that shares nothing is a family of one."""
        shared = [np.flatnonzero(self.family == each) for each in np.unique(self.family[self.family >= 0])]
        return shared + list(np.flatnonzero(self.family < 0)[:, None])

    @property
    def family_prefixes(self) -> NDArray[np.int64]:
        """The tokens of each prefix that is shared."""
        shared = self.family >= 0
        _, first = np.unique(self.family[shared], return_index=True)
        return self.prefix[shared][first]

    @property
    def total(self) -> int:
        """The tokens of all samples in one micro-batch."""
        return int(self.own.sum() + self.family_prefixes.sum())

    def bins(self, budget: int) -> list[list[int]]:
        """Puts the samples into micro-batches whose loads are at most `budget`; returns the indices of each.

        Every index appears once. A family stays together, unless it exceeds the budget by itself: then its parts repeat
        the prefix. A sample that exceeds it is alone. The result depends on the sizes alone.
        """
        if not self.prefix.any():
            return first_fit_decreasing(self.own, budget)
        parts: list[list[int]] = []
        for members in self.families:
            prefix = int(self.prefix[members[0]])
            divided = first_fit_decreasing(self.load[members], max(0, budget - prefix))
            parts += [members[chosen].tolist() for chosen in divided]
        # In the order of the batch, so that equal sizes are packed in that order.
        parts.sort(key=lambda part: part[0])
        found = first_fit_decreasing([self[part].total_load for part in parts], budget)
        return [[index for place in each for index in parts[place]] for each in found]

    def smaller(self, budget: int) -> int | None:
        """Returns half of `budget`, or the tokens of the longest sample, which is never cut.

        At least `LEAST_MICRO_TOKENS`. None if no micro-batch would become smaller.
        """
        half = max(min(budget, self.total_load) // 2, LEAST_MICRO_TOKENS, int(self.alone.max()))
        return half if self._largest(half) < self._largest(budget) else None

    def _largest(self, budget: int) -> int:
        """The load of the largest micro-batch."""
        return max(self[chosen].total_load for chosen in self.bins(budget))


def first_fit_decreasing(lengths: Sequence[int] | NDArray[np.int64], budget: int) -> list[list[int]]:
    """Puts sequences into bins of at most `budget` tokens, longest first, each into the first bin with room for it.

    Every index appears exactly once. A sequence longer than the budget gets its own bin. Equal lengths keep their
    order, so the result depends on the arguments alone.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    bins: list[list[int]] = []
    room: list[int] = []
    for index in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[index])
        for place, free in enumerate(room):
            if size <= free:
                bins[place].append(index)
                room[place] -= size
                break
        else:
            bins.append([index])
            room.append(max(0, budget - size))
    return bins
