"""The plain policy gradient, as if all data were fresh: a baseline for corrections."""

from __future__ import annotations

from typing import ClassVar, Literal

from stretto.objectives.base import Loss, ObjectiveOptions, Tokens, policy_gradient


class NaiveOptions(ObjectiveOptions):
    """The policy gradient without any correction: no ratio and no clip, whatever the age of the data."""

    formula: ClassVar[str] = "A log pi"
    when: ClassVar[str] = "As the baseline of a comparison, or under `synchronous`, which needs no correction."
    zero_without_advantage: ClassVar[bool] = True

    type: Literal["naive"] = "naive"

    def loss(self, tokens: Tokens) -> Loss:
        return policy_gradient(tokens), {}
