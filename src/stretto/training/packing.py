"""Packs samples into micro-batches of flat tensors without padding. Pure.

A sequence of `p` prompt and `c` completion tokens enters the model as its first `p + c - 1` tokens: the last one
predicts nothing. Completion token `j` is predicted at position `p - 1 + j`. In an episode with several turns, only the
sampled tokens are targets; tokens observed between turns are context, like the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from stretto.errors import TrainerError
from stretto.models.packed_attention import PackedLayout, layout_of
from stretto.models.routing import RoutingShape
from stretto.training.logit_supports import PackedSupports, pack_supports
from stretto.types import Sample


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


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Sequences side by side: `T` model inputs, of which `C` predict a completion token."""

    samples: tuple[int, ...]  # indices into the batch, in their order here
    num_targets: tuple[int, ...]  # sampled tokens of each sample; their sum is `C`
    input_ids: torch.Tensor  # [T] int64
    position_ids: torch.Tensor  # [T] int64, from 0 in every sequence
    layout: PackedLayout  # positions of the sequences, for attention
    predicts: torch.Tensor  # [C] int64: the inputs whose hidden state predicts a completion token
    targets: torch.Tensor  # [C] int64: the completion tokens
    behaviour_logprobs: torch.Tensor  # [C]
    advantages: torch.Tensor  # [C]
    weights: torch.Tensor  # [C], of each token in the loss of the step
    sequences: torch.Tensor  # [C] int64: index into `samples`
    supports: PackedSupports | None = None  # of the targets; None: drawn from the whole vocabulary


def input_lengths(samples: Sequence[Sample]) -> NDArray[np.int64]:
    """The number of input tokens of each sample [n]."""
    return np.array([max(1, len(s.prompt) + len(s.completion.tokens) - 1) for s in samples], dtype=np.int64)


def sampled_lengths(samples: Sequence[Sample]) -> NDArray[np.int64]:
    """The number of sampled tokens of each sample [n], which are those that it is trained on."""
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
    routing: RoutingShape | None = None,
) -> MicroBatch:
    """Packs the chosen samples. `advantages` and `weights` have one entry for each sample of the whole batch.

    With `routing` the layout has the experts that the samples recorded. With `flash` it is for flash attention, and a
    further sequence that predicts nothing pads the inputs to a `multiple` of tokens. Everything goes to the device in
    a few transfers that the host does not wait for.
    """
    if multiple > 1 and not flash:
        raise ValueError(f"`multiple = {multiple}` needs `flash`: other layouts are padded already")
    whole, prompts, completions = _concatenate([samples[index] for index in chosen])
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
    experts = None
    if routing is not None:
        experts = _routing([samples[index] for index in chosen], lengths[: len(chosen)], filling, routing).to(device)
    reals = [behaviour, advantages[rows][owner], weights[rows][owner]]
    behaviour_logprobs, token_advantages, token_shares = _transfer(reals, dtype, device)
    return MicroBatch(
        samples=tuple(chosen),
        num_targets=tuple(num_targets.tolist()),
        input_ids=input_ids,
        position_ids=position_ids,
        layout=replace(layout, gather=gather, scatter=scatter, ends=ends.int(), routing=experts, filling=filling),
        predicts=on_predicts,
        targets=on_targets,
        behaviour_logprobs=behaviour_logprobs,
        advantages=token_advantages,
        weights=token_shares,
        sequences=sequences,
        supports=_supports([samples[index] for index in chosen], targets, device),
    )


def _concatenate(samples: Sequence[Sample]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """All tokens, prompts and completions in turn, and the lengths of the prompts and of the completions."""
    tokens: list[NDArray[np.int64]] = []
    prompts = np.array([len(sample.prompt) for sample in samples], dtype=np.int64)
    completions = np.array([len(sample.completion.tokens) for sample in samples], dtype=np.int64)
    for sample in samples:
        if len(sample.prompt) == 0:
            raise TrainerError(f"trajectory {sample.trajectory} has an empty prompt: nothing predicts its first token")
        if len(sample.completion.logprobs) != len(sample.completion.tokens):
            raise TrainerError(
                f"trajectory {sample.trajectory} has {len(sample.completion.tokens)} tokens and "
                f"{len(sample.completion.logprobs)} log-probabilities"
            )
        tokens.append(np.asarray(sample.prompt, dtype=np.int64))
        tokens.append(np.asarray(sample.completion.tokens, dtype=np.int64))
    return np.concatenate(tokens), prompts, completions


def _supports(
    chosen: Sequence[Sample], targets: NDArray[np.int64], device: torch.device | str
) -> PackedSupports | None:
    """The supports that the targets were drawn from; None for the whole vocabulary."""
    recorded = [(sample, sample.completion.supports) for sample in chosen if sample.completion.supports is not None]
    if not recorded:
        return None
    if len(recorded) < len(chosen):
        other = next(sample for sample in chosen if sample.completion.supports is None)
        raise TrainerError(
            f"trajectory {other.trajectory} was drawn from the whole vocabulary and trajectory "
            f"{recorded[0][0].trajectory} from a part of it: an update cannot mix them"
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


def _routing(chosen: Sequence[Sample], lengths: NDArray[np.int64], filling: int, shape: RoutingShape) -> torch.Tensor:
    """The experts [T, layers, k] that the inputs were routed to; those of `filling` are the first ones."""
    records = []
    for sample, length in zip(chosen, lengths.tolist(), strict=True):
        record = sample.completion.routing
        if record is None:
            raise TrainerError(
                f"trajectory {sample.trajectory} has no record of its routing, which `training.routing` replays. A run "
                "deletes records that its own updates no longer need; one that is to be trained again from its journal "
                "needs `training.keep_routing = true` from its start"
            )
        expected = (length, shape.layers, shape.chosen)
        if record.shape != expected or (record.size and int(record.max()) >= shape.experts):
            raise TrainerError(
                f"trajectory {sample.trajectory} has a record of routing of {record.shape}, expected {expected} with "
                f"experts below {shape.experts}"
            )
        records.append(record.astype(np.int64))
    if filling:
        records.append(np.broadcast_to(np.arange(shape.chosen), (filling, shape.layers, shape.chosen)))
    return torch.from_numpy(np.concatenate(records))


def _transfer(
    parts: Sequence[NDArray[Any] | torch.Tensor], dtype: torch.dtype, device: torch.device | str
) -> tuple[torch.Tensor, ...]:
    """Moves vectors to the device as views of one tensor; to a GPU through pinned memory, without waiting."""
    joined = torch.cat([torch.as_tensor(part).to(dtype) for part in parts])
    if torch.device(device).type == "cuda":
        joined = joined.pin_memory()
    return joined.to(device, non_blocking=True).split_with_sizes([len(part) for part in parts])


def ragged_arange(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """`0 .. n - 1` for each length `n`, one after the other."""
    ends = np.cumsum(lengths)
    return np.arange(int(ends[-1]) if len(ends) else 0) - np.repeat(ends - lengths, lengths)
