"""The options of `[algorithm.critic]`, which objectives with a learned critic have. Torch-free.

`training/critic.py` is the critic itself.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, model_validator

DEFAULT_COEFFICIENT = 0.5


class CriticOptions(BaseModel):
    """A linear head on the policy's last hidden state that says what reward is still to come."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    gamma: float = Field(1.0, gt=0, le=1, description="What a reward one token later is worth")
    lam: float = Field(
        0.95, ge=0, le=1, description="Generalized advantages: 0 trusts the critic, 1 the rewards that came"
    )
    whiten: bool = Field(True, description="Advantages have mean 0 and deviation 1 over the tokens of a batch")
    learning_rate: float = Field(5e-3, gt=0, description="Of the critic's head; constant")
    clip: float = Field(
        0.2,
        gt=0,
        description="A value that moved further than this from the one before the update gives no more gradient; acts "
        "from the second optimizer step of an update on",
    )
    shared: bool = Field(
        False, description="The critic's gradient also trains the policy's model; otherwise the head alone"
    )
    coefficient: float | None = Field(
        None, gt=0, description=f"Factor of the critic's loss, only where shared; default: {DEFAULT_COEFFICIENT}"
    )

    @model_validator(mode="after")
    def _a_head_alone_has_no_factor(self) -> CriticOptions:
        if self.coefficient is not None and not self.shared:
            raise ValueError(
                f"`algorithm.critic.coefficient = {self.coefficient}` has no effect: a head that trains alone has its "
                "`learning_rate`; leave it out, or set `shared = true`"
            )
        return self

    @property
    def loss_factor(self) -> float:
        """What the critic's loss is multiplied by in the loss of an update."""
        return 1.0 if not self.shared else DEFAULT_COEFFICIENT if self.coefficient is None else self.coefficient
