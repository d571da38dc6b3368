"""The metrics of an update. Token values stay on the device until the last micro-batch is done.

There are two ratios. The *ratio* is that of the objective: the policy in training over its anchor. The *weight* is the
policy at the start of the update over the policy that sampled: it measures how far off policy the data is, whatever the
objective does with it. `docs/metrics.md` lists every name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from stretto.errors import TrainerError
from stretto.objectives.base import MAX_LOG_RATIO
from stretto.training.advantages import Advantages
from stretto.training.packing import MicroBatch, sampled_lengths
from stretto.types import Batch, by_trajectory

Values = NDArray[np.float64]


TEACHER_KL, TEACHER_AGREEMENT = PARTIAL = ("teacher_kl", "teacher_agreement")  # diagnostics that not every token has
QUANTILES = (("p01", 0.01), ("p50", 0.5), ("p99", 0.99))


@dataclass(frozen=True, slots=True)
class TokenValues:
    """Values of the completion tokens of a batch, in the order in which they were trained. All are [C]."""

    samples: NDArray[np.int64]  # index of the token's sample in the batch
    log_ratios: Values  # log-probability of the trainer minus that of the engine, at the start of the update
    entropies: Values
    diagnostics: Mapping[str, Values]
    # Log-probability of the policy minus that of the anchor, at the token's step; and the derivative of the scaled loss
    # by the token's log-probability. Empty if `TokenCollector.watch` was not called.
    anchor_log_ratios: Values = field(default_factory=lambda: np.zeros(0))
    gradients: Values = field(default_factory=lambda: np.zeros(0))
    # Log-probability of the trainer minus that of the engine, both under the version that sampled the token: counts
    # where `is_scored` is 1. Empty if nothing was scored.
    discrepancies: Values = field(default_factory=lambda: np.zeros(0))
    is_scored: Values = field(default_factory=lambda: np.zeros(0))


def concatenate(parts: Sequence[TokenValues]) -> TokenValues:
    """Joins the token values of several optimizer steps or ranks, in order."""
    if len(parts) == 1:
        return parts[0]
    values: dict[str, Any] = {}
    for each in fields(TokenValues):
        found = [getattr(part, each.name) for part in parts]
        if isinstance(found[0], Mapping):
            values[each.name] = {name: np.concatenate([one[name] for one in found]) for name in found[0]}
        else:
            values[each.name] = np.concatenate(found)
    return TokenValues(**values)


def merge(diagnostics: Mapping[str, Any], metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Returns both together. Raises `TrainerError` if a diagnostic of the objective has the name of another metric."""
    if taken := diagnostics.keys() & metrics.keys():
        raise TrainerError(
            f"the objective returns a diagnostic `{min(taken)}`, which is the name of another metric of the update: "
            "rename the diagnostic"
        )
    return {**diagnostics, **metrics}


class TokenCollector:
    """Collects the token values of micro-batches on the device, and reads those of a step in one transfer."""

    def __init__(self) -> None:
        self._names: tuple[str, ...] | None = None  # of the diagnostics; the same in every micro-batch of an update
        self._rows: list[torch.Tensor] = []
        self._samples: list[NDArray[np.int64]] = []
        self._losses: list[torch.Tensor] = []
        self._num_watched = 0
        self._watched: list[torch.Tensor] = []  # of the current micro-batch: its log-ratios, then its gradients

    def watch(self, logprobs: torch.Tensor, anchor: torch.Tensor) -> None:
        """Records the ratio and the gradient of a micro-batch. Call before the backward pass, for all or for none."""
        self._watched = [logprobs.detach() - anchor]
        logprobs.register_hook(self._keep)  # type: ignore[no-untyped-call]

    def _keep(self, gradient: torch.Tensor) -> None:
        self._watched.append(gradient.detach())

    def add(
        self,
        micro: MicroBatch,
        loss: torch.Tensor,
        proximal: torch.Tensor,  # log-probabilities under the policy at the start of the update
        entropies: torch.Tensor,
        diagnostics: Mapping[str, torch.Tensor],
        *,
        sampled: torch.Tensor | None = None,  # log-probabilities under the versions that sampled, where `is_scored`
        is_scored: torch.Tensor | None = None,
    ) -> None:
        """Records a micro-batch. Call after the backward pass.

        Raises `TrainerError` if the names of the diagnostics differ from those of an earlier micro-batch.
        """
        names = self._checked(diagnostics)
        self._losses.append(loss.detach())
        log_ratios = proximal.detach() - micro.behaviour_logprobs
        if len(self._watched) == 1:  # the loss does not depend on the log-probabilities
            self._watched.append(torch.zeros_like(log_ratios))
        scored = [torch.zeros_like(log_ratios)] * 2
        if sampled is not None and is_scored is not None:
            scored = [sampled - micro.behaviour_logprobs, is_scored.to(log_ratios.dtype)]
        rows = [log_ratios, entropies.detach(), *scored, *(diagnostics[name] for name in names), *self._watched]
        self._rows.append(torch.stack(rows))
        self._samples.append(np.repeat(np.asarray(micro.samples), micro.num_targets))
        self._num_watched, self._watched = len(self._watched), []

    def _checked(self, diagnostics: Mapping[str, torch.Tensor]) -> tuple[str, ...]:
        """Returns the names of the diagnostics, in the order of the update's first micro-batch."""
        if self._names is None:
            self._names = tuple(diagnostics)
        if diagnostics.keys() != set(self._names):
            raise TrainerError(
                f"the objective returned the diagnostics {sorted(diagnostics)} for a micro-batch, and "
                f"{sorted(self._names)} for an earlier one of the same update: return the same names for every "
                "micro-batch, with zeros if there is nothing to report"
            )
        return self._names

    def finish(self, norm: torch.Tensor) -> tuple[float, float, TokenValues | None]:
        """Returns the loss of a step, the value of `norm` and the values of its tokens, with one wait for the device.

        The token values are None if there were no micro-batches, as on a rank whose share of the step is empty. Clears
        what was collected, for the next step of the update.
        """
        if self._names is None or not self._rows:
            return 0.0, float(norm), None
        rows = torch.cat(self._rows, dim=1).double()
        numbers = torch.stack([torch.stack(self._losses).double().sum(), norm.to(rows)])
        read = torch.cat([numbers, rows.reshape(-1)]).cpu().numpy()
        values = read[2:].reshape(rows.shape)
        end = 4 + len(self._names)
        tokens = TokenValues(
            np.concatenate(self._samples),
            log_ratios=values[0],
            entropies=values[1],
            discrepancies=values[2],
            is_scored=values[3],
            diagnostics=dict(zip(self._names, values[4:end], strict=True)),
            anchor_log_ratios=values[end] if self._num_watched else np.zeros(0),
            gradients=values[end + 1] if self._num_watched else np.zeros(0),
        )
        self._rows, self._samples, self._losses = [], [], []
        return float(read[0]), float(read[1]), tokens


def batch_metrics(batch: Batch, advantages: Advantages, *, uses_rewards: bool = True) -> dict[str, float]:
    """Metrics of the batch itself, before it is trained on. Rewards and turns are those of trajectories.

    An objective that does not use rewards has no advantages to measure.
    """
    rewards = np.array([own[0].reward for own in by_trajectory(batch.samples)])
    lengths = sampled_lengths(batch.samples)
    ages = batch.update - np.array([s.oldest_version for s in batch.samples])
    return {
        "reward_mean": float(rewards.mean()),
        "reward_std": float(rewards.std()),
        **(_advantage_metrics(advantages, ages) if uses_rewards else {}),
        "groups": float(advantages.num_groups),
        "tokens": float(lengths.sum()),
        "num_sequences": float(len(lengths)),
        "length_mean": float(lengths.mean()),
        "length_max": float(lengths.max()),
        "truncated": float(np.mean([s.completion.finish == "length" for s in batch.samples])),
        **_turn_metrics(batch),
        "staleness_mean": float(ages.mean()),
        "staleness_max": float(ages.max()),
    }


def _advantage_metrics(advantages: Advantages, ages: NDArray[np.int64]) -> dict[str, float]:
    return {
        "advantage_mean": float(advantages.values.mean()),
        "advantage_std": float(advantages.values.std()),
        "advantage_min": float(advantages.values.min()),
        "advantage_max": float(advantages.values.max()),
        "groups_without_signal": float(advantages.num_without_signal),
        **_metrics_by_age(ages, advantages.values),
    }


def _turn_metrics(batch: Batch) -> dict[str, float]:
    """The number of turns and lineages of episodes with several, and of tokens observed between turns."""
    several = any(s.turn_numbers is not None for s in batch.samples)
    if not several and all(s.completion.turns is None for s in batch.samples):
        return {}
    num_turns = sum(len(s.completion.turn_lengths) for s in batch.samples)
    num_trajectories = len(by_trajectory(batch.samples))
    return {
        "turns_mean": num_turns / num_trajectories,
        "observed_tokens": float(sum(len(s.completion.tokens) - s.completion.num_sampled for s in batch.samples)),
        **({"lineages_mean": len(batch.samples) / num_trajectories} if several else {}),
    }


def _metrics_by_age(ages: NDArray[np.int64], advantages: Values) -> dict[str, float]:
    """Statistics of the advantages by age: data of every age should be worth the same."""
    found = {}
    for age in np.unique(ages).tolist():
        chosen = advantages[ages == age]
        found[f"advantage_mean_age_{age}"] = float(chosen.mean())
        found[f"advantage_std_age_{age}"] = float(chosen.std())
        found[f"advantage_count_age_{age}"] = float(len(chosen))
    return found


def token_metrics(tokens: TokenValues, *, uses_rewards: bool = True) -> dict[str, float]:
    """Metrics of the ratios between the policy and those that sampled the batch, and the objective's diagnostics.

    If the objective does not use rewards, tokens learn by more than their own log-probabilities, whose gradient says
    nothing.
    """
    if len(tokens.log_ratios) == 0:
        return {}
    weights = _ratios(tokens.log_ratios)
    ratios = _ratios(tokens.anchor_log_ratios) if len(tokens.anchor_log_ratios) else weights
    _, owners = np.unique(tokens.samples, return_inverse=True)
    measured = {
        "ratio_mean": float(ratios.mean()),
        "ratio_min": float(ratios.min()),
        "ratio_max": float(ratios.max()),
        **_quantiles("ratio", ratios),
        "weight_mean": float(weights.mean()),
        "weight_max": float(weights.max()),
        **_quantiles("weight", weights),
        "entropy": float(tokens.entropies.mean()),
        "effective_sample_size": effective_sample_size(np.bincount(owners, tokens.log_ratios).astype(np.float64)),
        "token_effective_sample_size": effective_sample_size(tokens.log_ratios),
    }
    if len(tokens.gradients) and uses_rewards:
        measured["share_without_gradient"] = float(np.mean(tokens.gradients == 0.0))
    # Values of some tokens alone are NaN at the others; whoever measures them averages them.
    whole = {name: values for name, values in tokens.diagnostics.items() if name not in PARTIAL}
    return merge({name: float(values.mean()) for name, values in whole.items()}, measured)


def _ratios(log_ratios: Values) -> Values:
    return np.exp(np.clip(log_ratios, -MAX_LOG_RATIO, MAX_LOG_RATIO))


def _quantiles(name: str, values: Values) -> dict[str, float]:
    found = np.quantile(values, [share for _, share in QUANTILES])
    return {f"{name}_{suffix}": float(value) for (suffix, _), value in zip(QUANTILES, found, strict=True)}


def effective_sample_size(log_weights: Values) -> float:
    """`(sum w)^2 / (n sum w^2)` of importance weights, given as logarithms: from 1 if all are equal down to 1 / n."""
    weights = np.exp(log_weights - log_weights.max())
    return float(weights.sum() ** 2 / (len(weights) * np.square(weights).sum()))


def token_ages(batch: Batch, tokens: TokenValues) -> NDArray[np.int64]:
    """The age of each token [C]: the trainer's version minus the token's. A trajectory may have several versions."""
    versions = np.array([s.version for s in batch.samples])[tokens.samples]
    if any(s.completion.token_versions is not None for s in batch.samples):
        order = tokens.samples[np.flatnonzero(np.diff(tokens.samples, prepend=-1))].tolist()
        versions = np.concatenate([batch.samples[index].token_versions for index in order])
    ages: NDArray[np.int64] = batch.update - versions
    return ages


def divergences(log_ratios: Values) -> Values:
    """`exp(d) - 1 - d` of each token [C], with `d` the log-probability of the trainer minus that of the engine.

    Its mean estimates the divergence between the policy that sampled and the trainer's. It is never negative.
    """
    differences = np.clip(log_ratios, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    return np.expm1(differences) - differences


def staleness_metrics(batch: Batch, tokens: TokenValues) -> dict[str, float]:
    """The divergence of older versions from the trainer's, over all tokens of older versions and by age.

    It includes the `mismatch`, because the engine computed these log-probabilities.
    """
    ages, values = token_ages(batch, tokens), divergences(tokens.log_ratios)
    old = ages > 0
    found = {"staleness_kl": float(values[old].mean()) if old.any() else 0.0}
    for age in np.unique(ages[old]).tolist():
        found[f"staleness_kl_age_{age}"] = float(values[ages == age].mean())
    return found


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Engine against trainer under the same version: the sum of `divergences` over tokens, and their number."""

    kl_sum: float
    tokens: int
    metrics: Mapping[str, float]


def mismatch(batch: Batch, tokens: TokenValues) -> Mismatch:
    """Compares engine and trainer under the version that sampled each token, so the difference is purely numerical.

    Tokens of version `batch.update` always count, because the trainer holds that version. Older ones count where they
    were scored under their own version.
    """
    ages = token_ages(batch, tokens)
    measured, differences = ages == 0, tokens.log_ratios
    if len(tokens.is_scored):
        scored = tokens.is_scored > 0
        measured, differences = measured | scored, np.where(scored, tokens.discrepancies, differences)
    values, ages = divergences(differences[measured]), ages[measured]
    by_age = {f"mismatch_kl_age_{age}": float(values[ages == age].mean()) for age in np.unique(ages).tolist()}
    total, count = float(values.sum()), len(values)
    metrics = {"mismatch_kl": total / max(1, count), "mismatch_tokens": float(count), **by_age}
    return Mismatch(total, count, metrics)
