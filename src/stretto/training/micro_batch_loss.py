"""The loss of a micro-batch: the tokens as an objective sees them, and the terms that are added to its loss."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from stretto.objectives.base import ObjectiveOptions, Tokens
from stretto.training.advantages import Advantages
from stretto.training.correction import correction_weights
from stretto.training.mini_batches import MicroBatchPlan, MiniBatch, trained_tokens
from stretto.training.packing import MicroBatch, sampled_lengths
from stretto.training.regularizers import weighted_divergence
from stretto.training.update_metrics import merge
from stretto.types import Batch


def objective_tokens(
    algorithm: ObjectiveOptions,
    batch: Batch,
    plan: MicroBatchPlan,
    micro: MicroBatch,
    advantages: Advantages,
    logprobs: torch.Tensor,  # [C], with gradient
) -> Tokens:
    """Returns the tokens of a micro-batch with everything that the objective asks for."""
    proximal = logprobs.detach() if plan.proximal is None else plan.proximal
    rewards = [batch.samples[index].reward for index in plan.samples]
    return Tokens(
        logprobs=logprobs,
        behaviour=micro.behaviour_logprobs,
        proximal=proximal,
        advantages=_token_advantages(batch, plan, advantages, micro),
        rewards=_like(micro.weights, rewards)[micro.sequences],
        sequences=micro.sequences,
        num_sequences=len(plan.samples),
        lengths=_like(micro.sequences, micro.num_targets),
        sampled=_sampled(plan, proximal) if algorithm.needs_sampled else None,
        turns=_turn_indices(batch, plan, micro) if algorithm.needs_turns else None,
    )


def micro_batch_loss(
    algorithm: ObjectiveOptions,
    tokens: Tokens,
    entropies: torch.Tensor,
    micro: MicroBatch,
    mini_batch: MiniBatch,
    plan: MicroBatchPlan,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Returns a micro-batch's share of the loss of its step, with the diagnostics of its tokens."""
    losses, diagnostics = algorithm.loss(tokens)
    if any(table is not None for table in algorithm.corrections):
        weights, measured = correction_weights(algorithm, tokens)
        losses, diagnostics = losses * weights, merge(diagnostics, measured)
    if algorithm.kl is not None:
        assert plan.reference is not None
        divergences = weighted_divergence(algorithm.kl.estimate, tokens.logprobs, plan.reference, tokens.behaviour)
        diagnostics = merge(diagnostics, {"reference_kl": divergences.detach()})
        if algorithm.kl.place == "loss":
            losses = losses + algorithm.kl.coefficient * divergences
    if algorithm.entropy is not None:
        losses = losses - algorithm.entropy.coefficient * entropies
    loss = torch.dot(losses, micro.weights)
    if algorithm.supervised is not None:
        assert mini_batch.imitation is not None
        imitation = _like(micro.weights, mini_batch.imitation[list(plan.samples)])[micro.sequences]
        imitation = imitation * (micro.weights != 0)  # tokens that are masked are not imitated
        loss = loss - algorithm.supervised.coefficient * torch.dot(tokens.logprobs, imitation)
        diagnostics = merge(diagnostics, {"imitated_fraction": (imitation > 0).to(imitation.dtype)})
    return loss, diagnostics


def masked(algorithm: ObjectiveOptions, batch: Batch, micro: MicroBatch) -> MicroBatch:
    """Returns the micro-batch without a weight in the loss for tokens that the objective does not train on."""
    masks = [trained_tokens(batch.samples[index], algorithm) for index in micro.samples]
    if all(mask is None for mask in masks):
        return micro
    whole = [
        np.ones(count, dtype=np.bool_) if mask is None else mask
        for mask, count in zip(masks, micro.num_targets, strict=True)
    ]
    return replace(micro, weights=micro.weights * _like(micro.weights, np.concatenate(whole)))


def _sampled(plan: MicroBatchPlan, proximal: torch.Tensor) -> torch.Tensor:
    """The trainer's log-probabilities under the versions that sampled [C]; of the newest these are `proximal`."""
    if plan.sampled is None or plan.is_scored is None:
        return proximal
    return torch.where(plan.is_scored, plan.sampled.to(proximal.dtype), proximal)


def _turn_indices(batch: Batch, plan: MicroBatchPlan, micro: MicroBatch) -> torch.Tensor:
    """The turn of each token [C], numbered over all turns of the micro-batch that have tokens."""
    lengths = [length for index in plan.samples for length in batch.samples[index].completion.turn_lengths if length]
    return _like(micro.sequences, np.repeat(np.arange(len(lengths)), lengths))


def _token_advantages(batch: Batch, plan: MicroBatchPlan, advantages: Advantages, micro: MicroBatch) -> torch.Tensor:
    """The advantage of each token [C]."""
    if advantages.tokens is None:
        return micro.advantages
    ends = np.cumsum(sampled_lengths(batch.samples))
    slices = np.split(advantages.tokens, ends[:-1])
    return _like(micro.weights, np.concatenate([slices[index] for index in plan.samples]))


def _like(tensor: torch.Tensor, values: Any) -> torch.Tensor:
    """Returns numbers as a tensor of the same device and type as `tensor`."""
    return torch.as_tensor(np.asarray(values)).to(tensor.device, tensor.dtype)
