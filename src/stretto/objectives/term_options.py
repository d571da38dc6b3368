"""The options of what is added to an objective, whichever it is: divergence, entropy, likelihood of good answers.

Torch-free; `training/terms.py` computes them.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class Term(BaseModel):
    """A table under `[algorithm]`."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class KlOptions(Term):
    """Keeps the policy near a reference. With `d = log pi - log reference` of a token that was sampled."""

    coefficient: float = Field(gt=0, description="Factor of the divergence")
    place: Literal["loss", "reward"] = Field(
        "loss",
        description="`loss`: added to each token's loss, weighted by `sg(min(pi / mu, 2))`, because `mu` sampled the "
        "token. `reward`: the divergence of the policy that sampled a trajectory, summed over its tokens, is taken "
        "from its reward; where an advantage divides rewards by a standard deviation (`group`, `whiten`), the "
        "divergence is compared alike and not divided, so that `coefficient` keeps its scale",
    )
    estimator: Literal["k1", "k2", "k3"] | None = Field(
        None,
        description="`k1`: d, unbiased; in the loss its gradient is zero on average, so it is for the reward alone. "
        "`k2`: d^2 / 2, whose gradient is that of KL(pi || reference). `k3`: exp(-d) - 1 + d, unbiased and never "
        "negative; its gradient is that of the other direction, KL(reference || pi). Default: `k2` in the loss, `k1` "
        "in the reward",
    )
    reference: str | None = Field(
        None,
        min_length=1,
        description="Model to stay near: a folder, a hub name or the `model.path` itself; default: the policy with "
        "its LoRA adapters switched off, which takes no second model",
    )

    @property
    def estimate(self) -> Literal["k1", "k2", "k3"]:
        """The estimator that is used."""
        return self.estimator or ("k2" if self.place == "loss" else "k1")


class EntropyOptions(Term):
    """Rewards a policy that stays undecided."""

    coefficient: float = Field(
        gt=0, description="Factor of the entropy of each token's distribution, taken off its loss"
    )


class SupervisedOptions(Term):
    """Imitates the policy's own good answers: negative log-likelihood of trajectories above a reward."""

    coefficient: float = Field(gt=0, description="Factor of the mean negative log-likelihood of their tokens")
    threshold: float = Field(0.0, description="Trajectories with a raw reward above this are imitated")
