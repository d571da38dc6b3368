"""Decoupled PPO: clips around the policy before the update, and weights by the policy that sampled."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from stretto.objectives.base import Loss, Tokens, ratio
from stretto.objectives.clipping import CLIP_FORMULA, ClipOptions

if TYPE_CHECKING:
    from torch import Tensor


def truncated_weight(logprobs: Tensor, tokens: Tokens, cap: float) -> tuple[Tensor, dict[str, Tensor]]:
    """`min(exp(logprobs) / mu, cap)` of each token [C], without gradient, and a diagnostic of the capped tokens."""
    weights = ratio(logprobs, tokens.behaviour).detach()
    return weights.clamp(max=cap), {"weight_capped_fraction": (weights > cap).to(weights.dtype)}


class DecoupledPpoOptions(ClipOptions):
    """Clips the change of one update, whatever the age of the data; a capped weight corrects for the age."""

    formula: ClassVar[str] = f"sg(min(w, weight_cap)) times {CLIP_FORMULA}; r = pi / pi_n, w = pi_n / mu"
    when: ClassVar[str] = "Stale data with several optimizer steps an update: staleness does not use up the clip."

    type: Literal["decoupled-ppo"] = "decoupled-ppo"
    anchor: Literal["proximal"] = Field(
        "proximal", description="The ratio is always to the policy at the start of the update"
    )
    weight_cap: float = Field(2.0, ge=1, description="Upper bound of the weight, at least 1")

    @property
    def corrects_off_policy(self) -> bool:
        return True

    def loss(self, tokens: Tokens) -> Loss:
        weights, capped = truncated_weight(tokens.proximal, tokens, self.weight_cap)
        losses, diagnostics = super().loss(tokens)
        return weights * losses, {**diagnostics, **capped}
