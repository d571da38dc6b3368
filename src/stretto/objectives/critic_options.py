"""The options of a learned critic, `[algorithm.critic]`. Torch-free; `training/critic.py` is the critic itself."""

from __future__ import annotations

from pydantic import Field, model_validator

from stretto.options import Options

DEFAULT_COEFFICIENT = 0.5


class CriticOptions(Options):
    """A linear head on the policy's last hidden state that predicts the reward still to come."""

    gamma: float = Field(1.0, gt=0, le=1, description="Discount of rewards, a token")
    lam: float = Field(0.95, ge=0, le=1, description="Lambda of GAE: 0 trusts the critic, 1 the observed rewards")
    whiten: bool = Field(
        True, description="Normalize advantages to mean 0 and standard deviation 1 over the tokens of a batch"
    )
    learning_rate: float = Field(5e-3, gt=0, description="Learning rate of the critic's head; constant")
    clip: float = Field(
        0.2,
        gt=0,
        description="Clip range of a value around its value before the update; acts from the second optimizer step of "
        "an update on",
    )
    shared: bool = Field(False, description="Let the critic's gradient train the policy's model too, not only the head")
    coefficient: float | None = Field(
        None, gt=0, description=f"Factor of the critic's loss; only with `shared`; default: {DEFAULT_COEFFICIENT}"
    )

    @model_validator(mode="after")
    def _a_head_alone_has_no_factor(self) -> CriticOptions:
        if self.coefficient is not None and not self.shared:
            raise ValueError(
                f"`algorithm.critic.coefficient = {self.coefficient}` has no effect without `shared`: use the critic's "
                "`learning_rate`; leave it out, or set `shared = true`"
            )
        return self

    @property
    def loss_factor(self) -> float:
        """The factor of the critic's loss in the loss of an update."""
        return 1.0 if not self.shared else DEFAULT_COEFFICIENT if self.coefficient is None else self.coefficient
