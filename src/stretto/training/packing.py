"""Cutting a batch into micro-batches of flat tensors without padding. Pure.

A sequence of `p` prompt and `c` completion tokens enters the model as its first `p + c - 1` tokens: the last one
predicts nothing. Completion token `j` is predicted at position `p - 1 + j`. Of an episode with several turns only the
tokens that were sampled are targets; what was observed in between is context like the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from stretto.errors import TrainerError
from stretto.training.attention import PackedLayout, layout_of
from stretto.training.logit_supports import PackedSupports, pack_supports
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
    num_targets: tuple[int, ...]  # completion tokens of each of them that were sampled; their sum is `C`
    input_ids: torch.Tensor  # [T] int64
    position_ids: torch.Tensor  # [T] int64, from 0 in every sequence
    layout: PackedLayout  # where each sequence lies, for attention
    predicts: torch.Tensor  # [C] int64: the inputs whose hidden state predicts a completion token
    targets: torch.Tensor  # [C] int64: the token that each of them predicts
    behaviour_logprobs: torch.Tensor  # [C]
    advantages: torch.Tensor  # [C]
    weights: torch.Tensor  # [C], of each token in the batch's loss
    sequences: torch.Tensor  # [C] int64: which of `samples`, from 0
    supports: PackedSupports | None = None  # of the targets, where they were drawn from a part of the vocabulary


def input_lengths(samples: Sequence[Sample]) -> NDArray[np.int64]:
    """How many tokens of each sample the model sees [n]."""
    return np.array([max(1, len(s.prompt) + len(s.completion.tokens) - 1) for s in samples], dtype=np.int64)


def sampled_lengths(samples: Sequence[Sample]) -> NDArray[np.int64]:
    """How many tokens of each sample were sampled, which are those that it is trained on [n]."""
    return np.array([s.completion.num_sampled for s in samples], dtype=np.int64)


def micro_batch(
    samples: Sequence[Sample],
    chosen: Sequence[int],
    advantages: NDArray[np.float64],
    weights: NDArray[np.float64],
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    flash: bool = False,
    multiple: int = 1,
) -> MicroBatch:
    """Lay the chosen samples side by side. `advantages` and `weights` are those of the whole batch, one a sample.

    With `flash` the layout is for flash attention, and one more sequence that predicts nothing fills the inputs up to a
    `multiple` of tokens. Everything reaches the device in two transfers that the host does not wait for.
    """
    if multiple > 1 and not flash:
        raise ValueError(f"`multiple = {multiple}` needs `flash`: buckets of padding are not padded again")
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

    sampled = [samples[index].completion.sampled for index in chosen]
    num_targets = np.array([len(places) for places in sampled], dtype=np.int64)
    within = np.concatenate(sampled)
    owner = np.repeat(np.arange(len(chosen)), num_targets)
    rows = np.asarray(chosen, dtype=np.int64)
    behaviour = np.concatenate(
        [
            np.asarray(samples[index].completion.logprobs, dtype=np.float64)[places]
            for index, places in zip(chosen, sampled, strict=True)
        ]
    )
    inputs = whole[np.repeat(starts, lengths) + ragged_arange(lengths)]
    filling = -len(inputs) % multiple
    if filling:
        inputs, lengths = np.append(inputs, np.zeros(filling, np.int64)), np.append(lengths, filling)
    layout = layout_of(lengths, flash=flash)
    predicts = (offsets + prompts - 1)[owner] + within
    targets = whole[(starts + prompts)[owner] + within]
    indices = [inputs, ragged_arange(lengths), predicts, targets, owner, layout.gather, layout.scatter, layout.ends]
    input_ids, position_ids, on_predicts, on_targets, sequences, gather, scatter, ends = _transfer(
        indices, torch.int64, device
    )
    reals = [behaviour, advantages[rows][owner], weights[rows][owner]]
    behaviour_logprobs, token_advantages, token_shares = _transfer(reals, dtype, device)
    return MicroBatch(
        samples=tuple(chosen),
        num_targets=tuple(num_targets.tolist()),
        input_ids=input_ids,
        position_ids=position_ids,
        layout=replace(layout, gather=gather, scatter=scatter, ends=ends.int()),
        predicts=on_predicts,
        targets=on_targets,
        behaviour_logprobs=behaviour_logprobs,
        advantages=token_advantages,
        weights=token_shares,
        sequences=sequences,
        supports=_supports([samples[index] for index in chosen], targets, device),
    )


def _supports(
    chosen: Sequence[Sample], targets: NDArray[np.int64], device: torch.device | str
) -> PackedSupports | None:
    """What the targets were drawn from; None where that was the whole vocabulary."""
    recorded = [(sample, sample.completion.supports) for sample in chosen if sample.completion.supports is not None]
    if not recorded:
        return None
    if len(recorded) < len(chosen):
        other = next(sample for sample in chosen if sample.completion.supports is None)
        raise TrainerError(
            f"trajectory {other.trajectory} was drawn from the whole vocabulary and trajectory "
            f"{recorded[0][0].trajectory} from a part of it: one update cannot have both"
        )
    for sample, supports in recorded:
        length = len(sample.completion.tokens)
        if len(supports) != length:
            raise TrainerError(f"trajectory {sample.trajectory} has {length} tokens and {len(supports)} supports")
    try:
        own = [
            supports if sample.completion.turns is None else supports.at(sample.completion.sampled)
            for sample, supports in recorded
        ]
        return pack_supports(own, targets, device)
    except ValueError as error:
        first, last = chosen[0].trajectory, chosen[-1].trajectory
        raise TrainerError(f"among trajectories {first} to {last}: {error}") from error


def _transfer(
    parts: Sequence[NDArray[Any] | torch.Tensor], dtype: torch.dtype, device: torch.device | str
) -> tuple[torch.Tensor, ...]:
    """Vectors as views of one tensor on the device; to a GPU they go out of pinned memory, while the host goes on."""
    joined = torch.cat([torch.as_tensor(part).to(dtype) for part in parts])
    if torch.device(device).type == "cuda":
        joined = joined.pin_memory()
    return joined.to(device, non_blocking=True).split_with_sizes([len(part) for part in parts])


def ragged_arange(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """`0 .. n - 1` for each length `n`, one after the other."""
    ends = np.cumsum(lengths)
    return np.arange(int(ends[-1]) if len(ends) else 0) - np.repeat(ends - lengths, lengths)
