"""Cutting a batch into micro-batches of flat tensors without padding. Pure.

A sequence of `p` prompt and `c` completion tokens enters the model as its first `p + c - 1` tokens: the last one
predicts nothing. Completion token `j` is predicted at position `p - 1 + j`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from stretto.errors import TrainerError
from stretto.training.attention import PackedLayout, layout_of
from stretto.types import Sample


def first_fit_decreasing(lengths: Sequence[int] | NDArray[np.int64], budget: int) -> list[list[int]]:
    """Put sequences into bins of at most `budget` tokens, longest first, each into the first bin with room for it.

    Every index appears exactly once; a sequence longer than the budget has a bin of its own; equal lengths keep their
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


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Sequences side by side: `T` model inputs, of which `C` predict a completion token."""

    samples: tuple[int, ...]  # indices into the batch, in the order in which they lie here
    num_targets: tuple[int, ...]  # completion tokens of each of them; their sum is `C`
    input_ids: torch.Tensor  # [T] int64
    position_ids: torch.Tensor  # [T] int64, from 0 in every sequence
    layout: PackedLayout  # where each sequence lies, for attention
    predicts: torch.Tensor  # [C] int64: the inputs whose hidden state predicts a completion token
    targets: torch.Tensor  # [C] int64: the token that each of them predicts
    behaviour_logprobs: torch.Tensor  # [C]
    advantages: torch.Tensor  # [C]
    weights: torch.Tensor  # [C], of each token in the batch's loss
    sequences: torch.Tensor  # [C] int64: which of `samples`, from 0


def input_lengths(samples: Sequence[Sample]) -> NDArray[np.int64]:
    """How many tokens of each sample the model sees [n]."""
    return np.array([max(1, len(s.prompt) + len(s.completion.tokens) - 1) for s in samples], dtype=np.int64)


def micro_batch(
    samples: Sequence[Sample],
    chosen: Sequence[int],
    advantages: NDArray[np.float64],
    weights: NDArray[np.float64],
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> MicroBatch:
    """Lay the chosen samples side by side. `advantages` and `weights` are those of the whole batch, one a sample."""
    tokens: list[NDArray[np.int64]] = []
    prompts = np.empty(len(chosen), dtype=np.int64)
    completions = np.empty(len(chosen), dtype=np.int64)
    for place, index in enumerate(chosen):
        sample = samples[index]
        prompts[place], completions[place] = len(sample.prompt), len(sample.completion.tokens)
        if prompts[place] == 0:
            raise TrainerError(f"trajectory {sample.trajectory} has an empty prompt: nothing predicts its first token")
        if len(sample.completion.logprobs) != completions[place]:
            raise TrainerError(
                f"trajectory {sample.trajectory} has {completions[place]} tokens and "
                f"{len(sample.completion.logprobs)} log-probabilities"
            )
        tokens.append(np.asarray(sample.prompt, dtype=np.int64))
        tokens.append(np.asarray(sample.completion.tokens, dtype=np.int64))
    whole = np.concatenate(tokens)
    totals = prompts + completions
    starts = np.cumsum(totals) - totals  # of each sequence in `whole`
    lengths = np.maximum(totals - 1, 1)
    offsets = np.cumsum(lengths) - lengths  # of each sequence among the inputs

    position = ragged_arange(lengths)
    within = ragged_arange(completions)
    owner = np.repeat(np.arange(len(chosen)), completions)
    rows = np.asarray(chosen, dtype=np.int64)
    behaviour = np.concatenate([np.asarray(samples[i].completion.logprobs, dtype=np.float64) for i in chosen])

    def integers(values: NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int64)).to(device, non_blocking=True)

    def reals(values: NDArray[np.float64]) -> torch.Tensor:
        return torch.from_numpy(values).to(device, dtype, non_blocking=True)

    return MicroBatch(
        samples=tuple(chosen),
        num_targets=tuple(completions.tolist()),
        input_ids=integers(whole[np.repeat(starts, lengths) + position]),
        position_ids=integers(position),
        layout=layout_of(lengths, device),
        predicts=integers((offsets + prompts - 1)[owner] + within),
        targets=integers(whole[(starts + prompts)[owner] + within]),
        behaviour_logprobs=reals(behaviour),
        advantages=reals(advantages[rows][owner]),
        weights=reals(weights[rows][owner]),
        sequences=integers(owner),
    )


def ragged_arange(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """`0 .. n - 1` for each length `n`, one after the other."""
    ends = np.cumsum(lengths)
    return np.arange(int(ends[-1]) if len(ends) else 0) - np.repeat(ends - lengths, lengths)
