"""A learned critic: a linear head on the policy's last hidden state.

The value of the state before a token is computed from the hidden state that predicts the token, so a critic needs no
forward pass of its own. The hidden state is normalized first: the head then learns at the same speed whatever the
model's width and scale. By default the head reads a detached state and the policy is trained as if there were no
critic; `shared` lets the critic's gradient into the model.

A trainer calls it as follows, for an objective with `uses_critic`:

1. Once, after the model is prepared: `make_critic(algorithm, packed.head.in_features, ...)`.
2. At the start of an update, for every micro-batch, without gradient: `plan.values = values(hidden, micro.predicts)`.
   Then `assess(batch, plans, rewards)` returns the advantages and fills in `plan.returns`.
3. For each micro-batch: `micro_batch_loss(hidden, micro, plan)` is added to the policy's loss, with the same weights,
   and one backward pass serves both.
4. At each optimizer step: `unscale()` if the loss was scaled, `check()` before anything is stepped, `step()` after the
   policy's step; `discard()` whenever the policy's gradient is discarded.
5. `state()` is part of the trainer's state, `restore()` takes the whole of it, `export()` follows the policy's.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from stretto.errors import RecipeError, TrainerError
from stretto.objectives.base import ObjectiveOptions
from stretto.objectives.critic_options import CriticOptions
from stretto.training.advantages import Advantages, Groups, Reals, gae, gae_advantages, token_rewards
from stretto.training.mini_batches import MicroBatchPlan
from stretto.training.optimizer import Optimizer
from stretto.training.options import TrainingOptions
from stretto.training.packing import MicroBatch, sampled_lengths
from stretto.training.turn_credit import turn_rewards
from stretto.types import Batch

PREFIX = "critic/"  # of the critic's tensors in a trainer's state
EXPORT_FILE = "critic.safetensors"


@dataclass(frozen=True, slots=True)
class Estimate:
    """Advantages and returns of a batch. Tokens are in the order of the batch's samples."""

    advantages: Advantages
    returns: Reals  # [C], the targets of the critic's values
    metrics: Mapping[str, float]


class Critic:
    """The head, its optimizer, and the advantages from its values. Initially all values are 0."""

    def __init__(
        self,
        hidden_size: int,
        options: CriticOptions,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        max_grad_norm: float = 1.0,  # of the head's gradient, clipped apart from the policy's
    ) -> None:
        self.options = options
        self.last_norm = 0.0  # of the head's gradient at the last optimizer step
        self.weight = nn.Parameter(torch.zeros(hidden_size, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros((), device=device, dtype=dtype))
        self._optimizer = Optimizer(
            {"weight": self.weight, "bias": self.bias},
            TrainingOptions(learning_rate=options.learning_rate, max_grad_norm=max_grad_norm),
        )

    def values(self, hidden: torch.Tensor, predicts: torch.Tensor) -> torch.Tensor:
        """Returns the value of the state before each completion token [C], with the head's gradient.

        `hidden` [T, d] is the decoder's last state; `predicts` [C] are its rows that predict a completion token.
        """
        states = hidden.index_select(0, predicts)
        states = (states if self.options.shared else states.detach()).to(self.weight.dtype)
        normalized = F.layer_norm(states, states.shape[-1:])
        return torch.mv(normalized, self.weight) / math.sqrt(states.shape[-1]) + self.bias

    def loss(self, values: torch.Tensor, before: torch.Tensor, returns: torch.Tensor) -> torch.Tensor:
        """`max((v - R)^2, (clip(v, v0 - clip, v0 + clip) - R)^2) / 2` of each token [C].

        `before` are the values at the start of the update, `v0`.
        """
        clipped = before + (values - before).clamp(-self.options.clip, self.options.clip)
        return 0.5 * torch.maximum((values - returns).square(), (clipped - returns).square())

    def micro_batch_loss(
        self, hidden: torch.Tensor, micro: MicroBatch, plan: MicroBatchPlan
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns a micro-batch's share of the loss of its step, and the loss of each of its tokens [C], detached."""
        assert plan.values is not None, "computed by `values` at the start of the update"
        assert plan.returns is not None, "filled in by `assess`"
        losses = self.loss(self.values(hidden, micro.predicts), plan.values, plan.returns)
        return self.options.loss_factor * torch.dot(losses, micro.weights), losses.detach()

    def estimate(
        self,
        values: Reals,  # [C]
        rewards: Sequence[float] | NDArray[np.float64],  # [n], after shaping
        lengths: NDArray[np.int64],  # [n]
        groups: Groups,  # [n]
        turns: tuple[Sequence[Sequence[float]], Sequence[Sequence[int]]] | None = None,  # rewards and tokens of each
    ) -> Estimate:
        """Computes advantages and returns of a batch from the values of its tokens, in the order of its samples.

        A sample's reward is placed at its last token; with `turns`, the reward of a turn at the turn's last token.
        """
        if turns is None:
            earned = token_rewards(np.asarray(rewards, dtype=np.float64).tolist(), lengths)
        else:
            earned = token_rewards(turns[0], lengths, turns[1])
        raw, returns = gae(earned, values, lengths, gamma=self.options.gamma, lam=self.options.lam)
        spread = float(returns.var()) if len(returns) else 0.0
        metrics = {
            "value_mean": float(values.mean()) if len(values) else 0.0,
            "return_mean": float(returns.mean()) if len(returns) else 0.0,
            # 1: every return was predicted; 0: no better than their mean; below 0: worse than that
            "explained_variance": 1.0 - float((returns - values).var()) / spread if spread > 0 else 0.0,
        }
        return Estimate(gae_advantages(raw, lengths, groups, normalize=self.options.whiten), returns, metrics)

    def assess(
        self,
        batch: Batch,
        plans: Sequence[MicroBatchPlan],
        rewards: Reals,
        total: Callable[[Reals], Reals] = lambda own: own,
        *,
        by_turn: bool = False,
    ) -> Estimate:
        """Calls `estimate` for a batch whose micro-batches have their `values`, and fills in their `returns`.

        `plans` may be this rank's share of the batch: `total` then sums the values over the ranks. With `by_turn` the
        reward of a turn is placed at the turn's end.
        """
        lengths = sampled_lengths(batch.samples)
        ends = np.cumsum(lengths)
        order = [index for plan in plans for index in plan.samples]
        # The place of each value among the tokens of the batch: micro-batches have the samples in another order.
        nothing = np.zeros(0, dtype=np.int64)
        places = np.concatenate([nothing, *(np.arange(ends[i] - lengths[i], ends[i]) for i in order)])
        given = [plan.values for plan in plans if plan.values is not None]
        assert len(given) == len(plans), "a value for every token"
        values = np.zeros(int(lengths.sum()))
        if given:
            values[places] = torch.cat(given).double().cpu().numpy()
        turns = None
        if by_turn:
            turns = turn_rewards(batch, rewards), [sample.completion.turn_lengths for sample in batch.samples]
        found = self.estimate(total(values), rewards, lengths, [sample.group for sample in batch.samples], turns)
        returns = torch.from_numpy(found.returns[places]).to(self.weight)
        for plan, own in zip(plans, returns.split_with_sizes([len(each) for each in given]), strict=True):
            plan.returns = own
        return found

    # -- optimizer steps, called with the policy's ---------------------------------------------------------------------

    @property
    def stepped(self) -> Iterable[torch.Tensor]:
        """The tensors that the optimizer steps; their gradients are the sums so far."""
        return self._optimizer.stepped

    def unscale(self, scale: float) -> None:
        """Divides the gradient by the loss scale. Call after the last backward pass of a step."""
        self._optimizer.unscale(scale)

    def check(self) -> None:
        """Raises `TrainerError` if the head's gradient is not finite. Call before anything is stepped."""
        self.last_norm = float(self._optimizer.norm())
        if not math.isfinite(self.last_norm):
            raise TrainerError(f"the norm of the critic's gradient is {self.last_norm}: nothing was stepped")

    def step(self) -> None:
        """Steps and clears the gradient. Raises `TrainerError`, with nothing changed, if it is not finite."""
        self.check()
        self._optimizer.step(value=self.last_norm)

    def weight_norm(self) -> torch.Tensor:
        """The norm of the head's weights, on the device, without waiting for it."""
        return self._optimizer.weight_norm()

    def discard(self) -> None:
        """Discards the gradient summed so far."""
        self._optimizer.discard()

    # -- state ---------------------------------------------------------------------------------------------------------

    def state(self, device: str | None = None) -> dict[str, torch.Tensor]:
        """Returns a copy of everything that later updates depend on, under names that begin with `PREFIX`.

        It is made on `device`; None: where the tensors are.
        """
        return {f"{PREFIX}{name}": tensor for name, tensor in self._optimizer.state(device).items()}

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restores `state()` from the whole state of a trainer. Raises `TrainerError` with nothing changed."""
        self.prepare_restore(state)()

    def prepare_restore(self, state: Mapping[str, torch.Tensor]) -> Callable[[], None]:
        """Checks a state and returns the function that restores it, which cannot fail."""
        own = {name.removeprefix(PREFIX): tensor for name, tensor in state.items() if name.startswith(PREFIX)}
        if not own:
            raise TrainerError("the checkpoint has no critic: it is of an objective without one; start a new run")
        return self._optimizer.prepare_restore(own)

    def save(self, folder: Path) -> None:
        """Writes the head for other programs: `value = layer_norm(hidden) @ weight / sqrt(d) + bias`."""
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {"weight": self.weight.detach().cpu().contiguous(), "bias": self.bias.detach().cpu().reshape(1)}
        facts = {"format": "stretto-critic", "options": json.dumps(self.options.model_dump(mode="json"))}
        save_file(tensors, folder / EXPORT_FILE, metadata=facts)

    export = save

    def load(self, folder: Path) -> None:
        """Loads a head that `save` wrote, as the start of another run; the optimizer state is not restored."""
        path = folder / EXPORT_FILE
        if not path.exists():
            raise TrainerError(f"`{folder}` holds no critic: it has no `{EXPORT_FILE}`")
        with safe_open(path, framework="pt") as file:
            weight, bias = file.get_tensor("weight"), file.get_tensor("bias")
        if weight.shape != self.weight.shape:
            raise TrainerError(
                f"the critic in `{folder}` belongs to another model: its hidden size is {len(weight)}, and the model's "
                f"{len(self.weight)}"
            )
        with torch.no_grad():
            self.weight.copy_(weight)
            self.bias.copy_(bias.reshape(()))


def make_critic(
    algorithm: ObjectiveOptions,
    hidden_size: int,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    max_grad_norm: float,
) -> Critic | None:
    """Makes the critic of an objective from its table `critic`; None if the objective has none."""
    if not algorithm.uses_critic:
        return None
    options = getattr(algorithm, "critic", None)
    if not isinstance(options, CriticOptions):
        raise RecipeError(f'`algorithm.type = "{algorithm.type}"` uses a critic, and has no options `critic` for it')
    return Critic(hidden_size, options, device=device, dtype=dtype, max_grad_norm=max_grad_norm)
