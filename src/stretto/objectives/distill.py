"""On-policy distillation alone: teachers, and no reward."""

from __future__ import annotations

from typing import ClassVar, Literal

from stretto.objectives.base import Loss, ObjectiveOptions, Tokens

REWARD_OPTIONS = (
    "advantage",
    "whiten_over",
    "correction",
    "discrepancy_correction",
    "staleness_correction",
    "length",
    "turns",
)


class DistillOptions(ObjectiveOptions):
    """On-policy distillation: the policy imitates `[[algorithm.teachers]]` on its own samples. Rewards train nothing.

    A reward is then only measured, and a task of type `file` needs none.
    """

    formula: ClassVar[str] = "-KL(pi || teacher), by `[[algorithm.teachers]]`"
    when: ClassVar[str] = "A better model with the same tokenizer exists: it tells more about each token than a reward."
    zero_without_advantage: ClassVar[bool] = True
    uses_rewards: ClassVar[bool] = False

    type: Literal["distill"] = "distill"

    def without_effect(self) -> dict[str, str]:
        reasons = {
            name: f'`algorithm.{name}` has no effect with `algorithm.type = "distill"`, which no reward trains; leave '
            "it out, or choose another type beside `[[algorithm.teachers]]`"
            for name in REWARD_OPTIONS
        }
        return super().without_effect() | reasons

    def loss(self, tokens: Tokens) -> Loss:
        return tokens.logprobs * 0.0, {}
