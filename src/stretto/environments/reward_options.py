"""The tables `[[task.rewards]]` of a recipe: several rewards with weights.

Each kind of reward is a model with a key that no other kind has, by which the table is told apart. `spec` turns it into
what a reward process makes the reward from (`reward_calls.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

from pydantic import Discriminator, Field, Tag, model_validator

from stretto.environments.function_specs import SpecError, function_name
from stretto.environments.given import is_given, without_digest
from stretto.environments.reward_calls import DEFAULT_BATCH, RewardSpec, refuse_specs, refuse_targets, refuse_weightless
from stretto.environments.rewards.judge_options import JudgeOptions
from stretto.environments.rewards.reward_model_options import RewardModelOptions
from stretto.options import Options, formed

MAX_WEIGHT = 1e9
SCORERS = {
    "judge": "stretto.environments.rewards.judge:Judge",
    "reward_model": "stretto.models.reward_model:RewardModel",
}
"""The rewards of this package that are made from options, by their default names."""


class SharedRewardOptions(Options):
    """The options that every kind of reward has."""

    name: str | None = Field(
        None,
        pattern=formed(
            r"^[A-Za-z0-9_][A-Za-z0-9_. -]{0,63}$",
            "up to 64 letters, digits, `_`, `.`, `-` and spaces, and a letter, a digit or `_` first",
        ),
        description="Name in metrics and in the journal, unique; default: that of the function",
    )
    weight: float = Field(
        1.0,
        ge=-MAX_WEIGHT,
        le=MAX_WEIGHT,
        description="Factor in the sum of the rewards; negative: a penalty; 0: recorded, and does not count",
    )

    @model_validator(mode="before")
    @classmethod
    def _has_one_kind(cls, values: Any) -> Any:
        """Refuses a table that is told apart by no key, or by several."""
        if not isinstance(values, Mapping):
            return values
        *most, last = (f"`{kind}`" for kind in KINDS)
        kinds = f"{', '.join(most)} and {last}"
        given = [f"`{kind}`" for kind in KINDS if kind in values]
        if not given:
            raise ValueError(f"it has none of the keys {kinds}, of which a table `[[task.rewards]]` has exactly one")
        if len(given) > 1:
            raise ValueError(
                f"it has {' and '.join(given)}, and a table `[[task.rewards]]` has exactly one of the keys {kinds}: "
                "write a table for each"
            )
        return values

    def spec(self) -> RewardSpec:
        """Returns what a reward process makes this reward from."""
        raise NotImplementedError


class FunctionRewardOptions(SharedRewardOptions):
    """A reward function."""

    function: str = Field(description="`package.module:function`, or a class, which is made once in each process")
    options: dict[str, Any] | None = Field(
        None, description="Keyword arguments: the function is called with them once, and returns the reward function"
    )
    batched: bool | None = Field(
        None, description="True: called with lists of completions; default: told by the names of its parameters"
    )
    batch_size: int | None = Field(
        None, ge=1, le=65_536, description=f"Most completions of one call, if batched; default: {DEFAULT_BATCH}"
    )

    def spec(self) -> RewardSpec:
        options = self.model_dump(mode="json")["options"]  # arrays as lists: a recipe holds them as tuples
        target = without_digest(self.function)
        return RewardSpec(
            self.name or function_name(target), target, self.weight, options, self.batched, self.batch_size
        )


class JudgeRewardOptions(SharedRewardOptions):
    """A judge: a model behind an address."""

    judge: JudgeOptions = Field(description="The options of `[task.judge]`")

    def spec(self) -> RewardSpec:
        return RewardSpec(self.name or "judge", SCORERS["judge"], self.weight)


class ModelRewardOptions(SharedRewardOptions):
    """A reward model."""

    model: RewardModelOptions = Field(description="The options of `[task.reward_model]`")

    def spec(self) -> RewardSpec:
        return RewardSpec(self.name or "reward_model", SCORERS["reward_model"], self.weight)


KINDS: Mapping[str, type[SharedRewardOptions]] = {
    "function": FunctionRewardOptions,
    "judge": JudgeRewardOptions,
    "model": ModelRewardOptions,
}
"""The kinds of rewards, by the key that tells them."""


def _tag_of(value: Any) -> str:
    """Returns the tag of a table: the first key of `KINDS` that it has; a function if it has none."""
    if isinstance(value, Mapping):
        return f"[{next((kind for kind in KINDS if kind in value), 'function')}]"
    return f"[{next((kind for kind, model in KINDS.items() if isinstance(value, model)), 'function')}]"


# Pydantic puts the tag into the location of an error; in brackets it is left out of messages.
RewardTable = Annotated[
    Annotated[FunctionRewardOptions, Tag("[function]")]
    | Annotated[JudgeRewardOptions, Tag("[judge]")]
    | Annotated[ModelRewardOptions, Tag("[model]")],
    Discriminator(_tag_of),
]


def refused_rewards(reward: str | None, rewards: Sequence[SharedRewardOptions], task: str = "task") -> Iterator[str]:
    """Returns why a task cannot have these rewards: `task.reward` and `task.rewards`. `task` is its dotted name."""
    if not rewards:
        return
    if reward is not None:
        yield (
            f"`{task}.reward` and `{task}.rewards` are both given: add the first to the second, as the `function` of a "
            "table"
        )
    specs = [table.spec() for table in rewards]
    try:
        refuse_specs(specs)
        refuse_weightless(specs)
        refuse_targets([spec for spec in specs if not is_given(spec.target)])
    except SpecError as error:
        said = str(error).replace("`task.rewards`", f"`{task}.rewards`")
        yield said if f"`{task}.rewards`" in said else f"`{task}.rewards`: {said}"
