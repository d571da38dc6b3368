"""Supervised training on demonstrations, before a run: the loss is that of the completions' tokens alone."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from stretto.environments.demonstrations import Demonstration, batches_of
from stretto.models.length_batches import length_batches

Progress = Callable[[int, int, float], None]
"""Called after every step with its number, the number of steps and the loss."""

WARM_UP = 0.1  # share of the steps in which the learning rate rises


@dataclass(frozen=True, slots=True)
class SupervisedOptions:
    """The options of supervised training."""

    steps: int
    batch: int  # demonstrations of a step
    learning_rate: float  # its peak; then it falls as a cosine to a tenth
    seed: int
    micro_tokens: int  # of one forward and backward pass, padding included
    max_grad_norm: float = 1.0


def fit(
    model: nn.Module,
    demonstrations: Sequence[Demonstration],
    options: SupervisedOptions,
    *,
    autocast: torch.dtype | None = None,
    progress: Progress | None = None,
) -> list[float]:
    """Trains the parameters of a causal LM that require a gradient, in place. Returns the loss of every step.

    With `autocast`, products are computed in that type.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    device = parameters[0].device
    optimizer = torch.optim.AdamW(parameters, lr=options.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    losses: list[float] = []
    order = batches_of(len(demonstrations), options.batch, options.steps, options.seed)
    for step, rows in enumerate(order):
        for group in optimizer.param_groups:
            group["lr"] = options.learning_rate * _share(step, options.steps)
        chosen = [demonstrations[row] for row in rows]
        num_tokens = sum(len(each.completion) for each in chosen)
        optimizer.zero_grad(set_to_none=True)
        loss = 0.0
        for places in length_batches({place: len(each) for place, each in enumerate(chosen)}, options.micro_tokens):
            part = _loss([chosen[place] for place in places], model, device, autocast) / num_tokens
            part.backward()  # type: ignore[no-untyped-call]
            loss += float(part.detach())
        nn.utils.clip_grad_norm_(parameters, options.max_grad_norm)
        optimizer.step()
        losses.append(loss)
        if progress is not None:
            progress(step + 1, options.steps, loss)
    return losses


def _share(step: int, steps: int) -> float:
    """Returns the learning rate of a step as a share of its peak."""
    rising = max(1, math.ceil(WARM_UP * steps))
    if step < rising:
        return (step + 1) / rising
    done = (step - rising) / max(1, steps - rising)
    return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * done))


def _loss(
    rows: Sequence[Demonstration], model: nn.Module, device: torch.device, autocast: torch.dtype | None
) -> torch.Tensor:
    """Returns the summed negative log-probability of the completions' tokens of some rows."""
    length = max(map(len, rows))
    tokens = torch.zeros((len(rows), length), dtype=torch.int64)
    targets = torch.full((len(rows), length), -100, dtype=torch.int64)  # of each token the next one; -100: no loss
    mask = torch.zeros((len(rows), length), dtype=torch.int64)
    for place, row in enumerate(rows):
        first, end = len(row.prompt), len(row)
        tokens[place, :end] = torch.tensor([*row.prompt, *row.completion])
        targets[place, first - 1 : end - 1] = torch.tensor(row.completion)
        mask[place, :end] = 1
    kept = length - min(len(row.prompt) for row in rows) + 1  # the last places, of which some have a loss
    calculated: Any = contextlib.nullcontext() if autocast is None else torch.autocast(device.type, autocast)
    with calculated:
        logits = model(
            input_ids=tokens.to(device), attention_mask=mask.to(device), use_cache=False, logits_to_keep=kept
        ).logits
    targets = targets[:, -logits.shape[1] :].to(device)
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=-100, reduction="sum")
