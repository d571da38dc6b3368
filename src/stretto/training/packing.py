"""Packs samples into micro-batches of flat tensors without padding. Pure.

A sequence of `p` prompt and `c` completion tokens enters the model as its first `p + c - 1` tokens: the last one
predicts nothing. Completion token `j` is predicted at position `p - 1 + j`. In an episode with several turns, only the
sampled tokens are targets; tokens observed between turns are context, like the prompt.

Samples with the same prompt may share it (`sequence_sizes.py`): its tokens but the last are then a sequence of their
own, before the first of them.
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
from stretto.models.varlen_layout import ragged_arange
from stretto.training.logit_supports import PackedSupports, pack_supports
from stretto.training.sequence_sizes import prompt_families
from stretto.types import Sample


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Sequences side by side: `T` model inputs, of which `C` predict a completion token."""

    samples: tuple[int, ...]  # indices into the batch, in their order here
    num_targets: tuple[int, ...]  # sampled tokens of each sample; their sum is `C`
    input_ids: torch.Tensor  # [T] int64
    position_ids: torch.Tensor  # [T] int64, from 0 in every sample
    layout: PackedLayout  # positions of the sequences, for attention
    predicts: torch.Tensor  # [C] int64: the inputs whose hidden state predicts a completion token
    targets: torch.Tensor  # [C] int64: the completion tokens
    behaviour_logprobs: torch.Tensor  # [C]
    advantages: torch.Tensor  # [C]
    weights: torch.Tensor  # [C], of each token in the loss of the step
    sequences: torch.Tensor  # [C] int64: index into `samples`
    supports: PackedSupports | None = None  # of the targets; None: drawn from the whole vocabulary


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
    shares_prompts: bool = False,
    routing: RoutingShape | None = None,
) -> MicroBatch:
    """Packs the chosen samples. `advantages` and `weights` have one entry for each sample of the whole batch.

    With `routing` the layout has the experts that the samples recorded. With `flash` it is for flash attention: samples
    may share their prompts, and a further sequence that predicts nothing pads the inputs to a `multiple` of tokens.
    Everything goes to the device in a few transfers that the host does not wait for.
    """
    if (multiple > 1 or shares_prompts) and not flash:
        raise ValueError(
            f"`multiple = {multiple}` and `shares_prompts = {shares_prompts}` need `flash`: other layouts are padded"
        )
    own = [samples[index] for index in chosen]
    whole, prompts, completions = _concatenate(own)
    pieces = _pieces(prompts, completions, prompt_families(own) if shares_prompts else None)
    sources = np.repeat(pieces.starts, pieces.lengths) + ragged_arange(pieces.lengths)

    sampled = [sample.completion.sampled for sample in own]
    num_targets = np.array([len(places) for places in sampled], dtype=np.int64)
    within = np.concatenate(sampled)
    owner = np.repeat(np.arange(len(chosen)), num_targets)
    rows = np.asarray(chosen, dtype=np.int64)
    behaviour = np.concatenate(
        [
            np.asarray(sample.completion.logprobs, dtype=np.float64)[places]
            for sample, places in zip(own, sampled, strict=True)
        ]
    )
    targets = whole[(np.cumsum(prompts + completions) - completions)[owner] + within]
    inputs, positions = whole[sources], np.repeat(pieces.positions, pieces.lengths) + ragged_arange(pieces.lengths)
    lengths, prefixes = pieces.lengths, pieces.prefixes
    filling = -len(inputs) % multiple
    if filling:
        inputs, positions = np.append(inputs, np.zeros(filling, np.int64)), np.append(positions, np.arange(filling))
        lengths, prefixes = np.append(lengths, filling), np.append(prefixes, -1)
    layout = layout_of(lengths, flash=flash, prefixes=prefixes if (prefixes >= 0).any() else None)
    varlen = layout.varlen
    indices = [  # copies first: there they are aligned, which kernels and graphs are compiled for
        varlen.copies, inputs, positions, pieces.first_predicting[owner] + within, targets, owner, layout.gather,
        layout.scatter, varlen.ends.view(-1),
    ]  # fmt: skip
    copies, input_ids, position_ids, predicts, on_targets, sequences, gather, scatter, ends = _transfer(
        indices, torch.int64, device
    )
    experts = None if routing is None else _routing(own, sources, filling, routing).to(device)
    reals = [behaviour, advantages[rows][owner], weights[rows][owner]]
    behaviour_logprobs, token_advantages, token_shares = _transfer(reals, dtype, device)
    varlen = varlen._replace(ends=ends.int().view(2, -1), copies=copies)
    return MicroBatch(
        samples=tuple(chosen),
        num_targets=tuple(num_targets.tolist()),
        input_ids=input_ids,
        position_ids=position_ids,
        layout=replace(layout, gather=gather, scatter=scatter, varlen=varlen, routing=experts, filling=filling),
        predicts=predicts,
        targets=on_targets,
        behaviour_logprobs=behaviour_logprobs,
        advantages=token_advantages,
        weights=token_shares,
        sequences=sequences,
        supports=_supports(own, targets, device),
    )


@dataclass(frozen=True, slots=True)
class _Pieces:
    """The sequences of a micro-batch, in order: one for each sample, and each shared prefix before its first sample."""

    starts: NDArray[np.int64]  # of their tokens among all tokens of the samples
    lengths: NDArray[np.int64]
    positions: NDArray[np.int64]  # of their first tokens in their samples
    prefixes: NDArray[np.int64]  # the piece that each continues; -1: none
    first_predicting: NDArray[np.int64]  # [samples]: the input that predicts the first token of a completion


def _pieces(prompts: NDArray[np.int64], completions: NDArray[np.int64], families: NDArray[np.int64] | None) -> _Pieces:
    """Divides samples, given by the lengths of their prompts and completions; `families` None: nothing is shared."""
    totals = prompts + completions
    starts, lengths = np.cumsum(totals) - totals, np.maximum(totals - 1, 1)
    count = len(prompts)
    if families is None or (families < 0).all():
        offsets = np.cumsum(lengths) - lengths
        return _Pieces(starts, lengths, np.zeros_like(starts), np.full(count, -1), offsets + prompts - 1)
    shared = np.where(families < 0, 0, prompts - 1)
    _, firsts = np.unique(families[families >= 0], return_index=True)
    firsts = np.flatnonzero(families >= 0)[firsts]  # the first sample of each family, family by family
    is_first = np.zeros(count, dtype=np.int64)
    is_first[firsts] = 1
    places = np.arange(count) + np.cumsum(is_first)  # of the samples among the pieces: behind all prefixes so far
    of_prefixes = places[firsts] - 1
    made = [np.empty(count + len(firsts), dtype=np.int64) for _ in range(4)]
    values = (starts + shared, lengths - shared, shared, np.where(families < 0, -1, of_prefixes[families]))
    of_shared = (starts[firsts], shared[firsts], np.zeros_like(firsts), np.full_like(firsts, -1))
    for whole, own, common in zip(made, values, of_shared, strict=True):
        whole[places], whole[of_prefixes] = own, common
    offsets = np.cumsum(made[1]) - made[1]
    return _Pieces(made[0], made[1], made[2], made[3], offsets[places] + prompts - 1 - shared)


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


def _routing(chosen: Sequence[Sample], sources: NDArray[np.int64], filling: int, shape: RoutingShape) -> torch.Tensor:
    """The experts [T, layers, k] that the inputs were routed to; those of `filling` are the first ones.

    `sources` are the inputs among all tokens of the samples. A record lacks the last of them, which is no input.
    """
    records = []
    for sample in chosen:
        record = sample.completion.routing
        if record is None:
            raise TrainerError(
                f"trajectory {sample.trajectory} has no record of its routing, which `training.routing` replays. A run "
                "deletes records that its own updates no longer need; one that is to be trained again from its journal "
                "needs `training.keep_routing = true` from its start"
            )
        total = len(sample.prompt) + len(sample.completion.tokens)
        expected = (max(1, total - 1), shape.layers, shape.chosen)
        if record.shape != expected or (record.size and int(record.max()) >= shape.experts):
            raise TrainerError(
                f"trajectory {sample.trajectory} has a record of routing of {record.shape}, expected {expected} with "
                f"experts below {shape.experts}"
            )
        records.append(record)
        if len(record) < total:
            records.append(record[-1:])  # in the place of the last token
    made = [np.concatenate(records)[sources].astype(np.int64)]
    if filling:
        made.append(np.broadcast_to(np.arange(shape.chosen), (filling, shape.layers, shape.chosen)))
    return torch.from_numpy(np.concatenate(made))


def _transfer(
    parts: Sequence[NDArray[Any] | torch.Tensor], dtype: torch.dtype, device: torch.device | str
) -> tuple[torch.Tensor, ...]:
    """Moves vectors to the device as views of one tensor; to a GPU through pinned memory, without waiting."""
    joined = torch.cat([torch.as_tensor(part).to(dtype) for part in parts])
    if torch.device(device).type == "cuda":
        joined = joined.pin_memory()
    return joined.to(device, non_blocking=True).split_with_sizes([len(part) for part in parts])
