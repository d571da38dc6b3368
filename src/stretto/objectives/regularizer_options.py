"""The options of the terms that can be added to any objective: divergence, entropy, likelihood of good answers.

Torch-free; `training/regularizers.py` computes them.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from stretto.options import Options


class KlOptions(Options):
    """Keeps the policy near a reference. `d` is `log pi - log reference` of a sampled token."""

    coefficient: float = Field(gt=0, description="Factor of the divergence")
    place: Literal["loss", "reward"] = Field(
        "loss",
        description="`loss`: add the divergence to each token's loss, weighted by `sg(min(pi / mu, 2))` because `mu` "
        "sampled the token. `reward`: subtract the divergence of the policy that sampled, summed over the trajectory, "
        "from the reward; an advantage that divides by a standard deviation (`group`, `whiten`) does not divide the "
        "divergence, so that `coefficient` keeps its scale",
    )
    estimator: Literal["k1", "k2", "k3"] | None = Field(
        None,
        description="`k1`: d, unbiased; only for the reward, because in the loss its gradient is zero on average. "
        "`k2`: d^2 / 2, with the gradient of KL(pi || reference). `k3`: exp(-d) - 1 + d, unbiased and never negative, "
        "with the gradient of KL(reference || pi); default: `k2` in the loss, `k1` in the reward",
    )
    reference: str | None = Field(
        None,
        min_length=1,
        description="The reference model: a folder, a hub name or the `model.path` itself; default: the policy with "
        "its LoRA adapters switched off, which needs no second model",
    )

    @property
    def estimate(self) -> Literal["k1", "k2", "k3"]:
        """`estimator`, or its default."""
        return self.estimator or ("k2" if self.place == "loss" else "k1")


class EntropyOptions(Options):
    """Rewards a policy for high entropy."""

    coefficient: float = Field(
        gt=0, description="Factor of the entropy of each token's distribution, which is subtracted from its loss"
    )


class SupervisedOptions(Options):
    """Imitates the policy's own good answers: the negative log-likelihood of trajectories above a reward."""

    coefficient: float = Field(gt=0, description="Factor of the mean negative log-likelihood of the imitated tokens")
    threshold: float = Field(0.0, description="Imitate trajectories with an unshaped reward above this")
