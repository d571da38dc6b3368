"""The tokens that samples take in a micro-batch, where those with the same prompt share it. Pure.

All tokens of a prompt but the last are its *prefix*, which a micro-batch computes once for all of its samples
(`models/varlen_layout.py`). The last one belongs to each sample, because it predicts the sample's first token. So a
group of eight answers to a prompt of 100 tokens takes 99 tokens less seven times. Samples share by the tokens of their
prompts: it does not matter which group they are of.

Attention copies the keys of a prefix for each sample. A copy takes 16 to 32 KB for models of 1.7B to 8B, in one layer
at a time; a token takes 0.4 MB and more, since every layer keeps something of it. So a copy counts as a sixteenth of a
token: the budget of a micro-batch also bounds the copies of a long prompt that many samples have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stretto.training.options import LEAST_MICRO_TOKENS
from stretto.types import Sample

LEAST_PREFIX = 16  # tokens; a shorter one is not worth a sequence of its own
COPIES_PER_TOKEN = 16


def input_lengths(samples: Sequence[Sample]) -> NDArray[np.int64]:
    """The number of input tokens of each sample [n], its whole prompt included."""
    return np.array([max(1, len(s.prompt) + len(s.completion.tokens) - 1) for s in samples], dtype=np.int64)


def prompt_families(samples: Sequence[Sample]) -> NDArray[np.int64]:
    """Returns a number for each sample [n]: those with the same number may share the prefix of their prompts.

    -1 for a sample that shares nothing: its prefix is short, no other sample has it, or it has no completion. Samples
    that record the experts of their tokens have to agree on those of the prefix too.
    """
    keys = dict[int, bytes]()  # by the identity of the prompt, which the samples of a group have in common
    members = dict[bytes, list[list[int]]]()  # by prompt: samples that agree on their experts
    for index, sample in enumerate(samples):
        if len(sample.prompt) <= LEAST_PREFIX or not len(sample.completion.tokens):
            continue
        key = keys.get(id(sample.prompt))
        if key is None:
            key = keys[id(sample.prompt)] = np.asarray(sample.prompt, dtype=np.int64).tobytes()
        found = members.setdefault(key, [])
        for indices in found:
            if _same_experts(sample, samples[indices[0]]):
                indices.append(index)
                break
        else:
            found.append([index])
    families = np.full(len(samples), -1, dtype=np.int64)
    shared = (indices for found in members.values() for indices in found if len(indices) > 1)
    for family, indices in enumerate(shared):
        families[indices] = family
    return families


def _same_experts(one: Sample, other: Sample) -> bool:
    """True if two samples with one prompt record the same experts for its prefix, or none."""
    records = [sample.completion.routing for sample in (one, other)]
    if records[0] is None or records[1] is None:
        return records[0] is records[1]
    prefix = len(one.prompt) - 1
    return np.array_equal(records[0][:prefix], records[1][:prefix])


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
        """The tokens that each sample counts as in a micro-batch, beside its prefix [n]: its own, and its copies."""
        return self.own + np.where(self.prefix == 0, 0, -(-self.alone // COPIES_PER_TOKEN))

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

        Every index appears once. Families with the largest loads come first. A part of a family goes to the first bin
        with room for it, if its own tokens are as many as those of the prefix that is repeated there; what is left goes
        to new bins. A sample that exceeds the budget is alone. The result depends on the sizes alone.
        """
        if not self.prefix.any():
            return first_fit_decreasing(self.own, budget)
        load, bins, room = self.load, list[list[int]](), list[int]()
        families = self.families
        loads = [int(load[members].sum() + self.prefix[members[0]]) for members in families]
        for place in np.argsort(-np.array(loads), kind="stable").tolist():
            members, prefix = families[place], int(self.prefix[families[place][0]])
            left = members[np.argsort(-load[members], kind="stable")].tolist()
            for number, free in enumerate(room):
                taken = _fitting(left, load, free - prefix)
                if taken and (len(taken) == len(left) or int(self.own[taken].sum()) >= prefix):
                    bins[number] += taken
                    room[number] -= prefix + int(load[taken].sum())
                    left = [index for index in left if index not in taken]
                if not left:
                    break
            while left:
                taken = _fitting(left, load, budget - prefix) or left[:1]
                bins.append(taken)
                room.append(max(0, budget - prefix - int(load[taken].sum())))
                left = [index for index in left if index not in taken]
        return bins

    def smaller(self, budget: int) -> int | None:
        """Returns half of `budget` or of the load of all samples, or the longest sample, which is never cut.

        At least `LEAST_MICRO_TOKENS`. None if no micro-batch would become smaller.
        """
        half = max(min(budget, self.total_load) // 2, LEAST_MICRO_TOKENS, int(self.alone.max()))
        return half if self._largest(half) < self._largest(budget) else None

    def _largest(self, budget: int) -> int:
        """The load of the largest micro-batch."""
        return max(self[chosen].total_load for chosen in self.bins(budget))


def _fitting(indices: Sequence[int], load: NDArray[np.int64], room: int) -> list[int]:
    """Returns those of the samples, in their order, that fit into `room` tokens together."""
    taken = []
    for index in indices:
        if load[index] <= room:
            taken.append(index)
            room -= int(load[index])
    return taken


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
