"""A learned critic: a linear head on the policy's own last hidden state.

The value of a token's state is that of the hidden state which predicts the token, so a critic costs no forward pass of
its own. The hidden state is normalized first: the head then learns at the same speed whatever the model's width and
scale. By default the head reads a detached state and the policy is trained as if there were no critic; `shared` lets
the critic's gradient into the model.

Where a trainer calls it, for an objective with `uses_critic`:

1. once, after the model is prepared: `Critic(packed.head.in_features, algorithm.critic, ...)`;
2. at the start of an update, over every micro-batch without gradient: `values(hidden, micro.predicts)`, gathered in the
   order of the batch's samples; then `estimate(...)`, which gives the advantages and the returns of every token;
3. for each micro-batch: `loss(values(hidden, micro.predicts), before, returns)`, weighted like the policy's loss and
   added to it times `loss_factor`, then one backward pass for both, then `collect()`;
4. at each optimizer step `norm()` before anything is stepped, then `step()`; `discard()` where the policy's is;
5. `state()` goes into the trainer's own, `restore()` is given the whole of it, `export()` follows the policy's.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from stretto.errors import TrainerError
from stretto.objectives.critic_options import CriticOptions
from stretto.training.advantages import Advantages, Groups, Reals, gae, gae_advantages, token_rewards
from stretto.training.optimizer import Optimizer, TrainerOptions

PREFIX = "critic/"  # of the critic's tensors in a trainer's state
EXPORT_FILE = "critic.safetensors"


@dataclass(frozen=True, slots=True)
class Estimate:
    """What the critic's values came to for a batch. Tokens are in the order of the batch's samples."""

    advantages: Advantages
    returns: Reals  # [C], what the critic is fitted to
    metrics: Mapping[str, float]


class Critic:
    """The head, its optimizer, and what is made of its values. Its first values are 0."""

    def __init__(
        self,
        hidden_size: int,
        options: CriticOptions,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.options = options
        self.weight = nn.Parameter(torch.zeros(hidden_size, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros((), device=device, dtype=dtype))
        self._optimizer = Optimizer(
            {"weight": self.weight, "bias": self.bias}, TrainerOptions(learning_rate=options.learning_rate)
        )

    @property
    def loss_factor(self) -> float:
        return self.options.loss_factor

    def values(self, hidden: torch.Tensor, predicts: torch.Tensor) -> torch.Tensor:
        """The value of the state before each completion token [C], with the head's gradient.

        `hidden` [T, d] is the decoder's last state, `predicts` [C] the rows of it that predict a completion token.
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

    def estimate(
        self,
        values: Reals,  # [C]
        rewards: Sequence[float] | NDArray[np.float64],  # [n], after shaping
        lengths: NDArray[np.int64],  # [n]
        groups: Groups,  # [n]
        per_token: Reals | None = None,  # [C], rewards of single tokens beside the one at the end
    ) -> Estimate:
        """Advantages and returns of a batch from the values of its tokens, in the order of its samples."""
        earned = token_rewards(np.asarray(rewards, dtype=np.float64).tolist(), lengths)
        if per_token is not None:
            earned = earned + per_token
        raw, returns = gae(earned, values, lengths, gamma=self.options.gamma, lam=self.options.lam)
        spread = float(returns.var()) if len(returns) else 0.0
        metrics = {
            "value_mean": float(values.mean()) if len(values) else 0.0,
            "return_mean": float(returns.mean()) if len(returns) else 0.0,
            # 1: every return was foreseen; 0: no better than their mean; below: worse than that
            "explained_variance": 1.0 - float((returns - values).var()) / spread if spread > 0 else 0.0,
        }
        return Estimate(gae_advantages(raw, lengths, groups, normalize=self.options.whiten), returns, metrics)

    # -- the optimizer's side, beside the policy's ---------------------------------------------------------------------

    def collect(self) -> None:
        """Call after each backward pass."""
        self._optimizer.collect()

    def norm(self) -> torch.Tensor:
        """The norm of the head's gradient, on the device: nothing waits for it."""
        return self._optimizer.norm()

    def step(self, norm: torch.Tensor | None = None, value: float | None = None) -> float:
        """Step and clear the gradient; returns its norm. Raises `TrainerError`, with nothing changed, if not finite."""
        stepped, _ = self._optimizer.step(norm, value)
        return stepped

    def discard(self) -> None:
        """Forget the gradient summed so far."""
        self._optimizer.discard()

    # -- what is kept --------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, torch.Tensor]:
        """A copy of everything that decides what later updates do, under names that begin with `PREFIX`."""
        return {f"{PREFIX}{name}": tensor for name, tensor in self._optimizer.state().items()}

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take over what `state` gave, out of the whole state of a trainer. Raises `TrainerError`, changing nothing."""
        own = {name.removeprefix(PREFIX): tensor for name, tensor in state.items() if name.startswith(PREFIX)}
        if not own:
            raise TrainerError("the checkpoint has no critic: it is of an objective without one; start a new run")
        self._optimizer.restore(own)

    def save(self, folder: Path) -> None:
        """Write the head for others to load: `value = layer_norm(hidden) @ weight / sqrt(d) + bias`."""
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {"weight": self.weight.detach().cpu().contiguous(), "bias": self.bias.detach().cpu().reshape(1)}
        facts = {"format": "stretto-critic", "options": json.dumps(self.options.model_dump(mode="json"))}
        save_file(tensors, folder / EXPORT_FILE, metadata=facts)

    export = save

    def load(self, folder: Path) -> None:
        """Take over the head that `save` wrote, as the start of another run: its optimizer begins anew."""
        path = folder / EXPORT_FILE
        if not path.exists():
            raise TrainerError(f"`{folder}` holds no critic: it has no `{EXPORT_FILE}`")
        with safe_open(path, framework="pt") as file:
            weight, bias = file.get_tensor("weight"), file.get_tensor("bias")
        if weight.shape != self.weight.shape:
            raise TrainerError(
                f"the critic in `{folder}` reads {len(weight)} numbers a token, and the model has {len(self.weight)}: "
                "it is of another model"
            )
        with torch.no_grad():
            self.weight.copy_(weight)
            self.bias.copy_(bias.reshape(()))
