"""The policy gradient as if all data were fresh, to show what a correction is for."""

from __future__ import annotations

from typing import ClassVar, Literal

from stretto.objectives.base import Loss, ObjectiveOptions, Tokens, policy_gradient


class NaiveOptions(ObjectiveOptions):
    """The policy gradient without any correction: no ratio, no clip, however old the data."""

    formula: ClassVar[str] = "A log pi"
    when: ClassVar[str] = "As the baseline of a comparison, or under `synchronous`, where there is nothing to correct."

    type: Literal["naive"] = "naive"

    def loss(self, tokens: Tokens) -> Loss:
        return policy_gradient(tokens), {}
