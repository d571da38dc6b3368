"""The protocol between the run loop and a task: an episode asks a policy for completions and returns the reward.

Contract:

- An episode asks for one turn after another. Each time it passes the whole context: the prompt, all tokens sampled and
  observed so far, then the new tokens that the policy observes before it continues. Anything else is a `RewardError`.
  An episode asks at least once, and at most as often as its task allows (`turns`). It awaits each turn before it asks
  for the next one or returns.
- A trajectory may have several *lineages*: rows of tokens, each with a context of its own and the turns behind it. A
  turn belongs to lineage 0 unless the episode names another. The next number that is not taken opens a lineage, with
  any context; for lineage 0 that need not begin with the prompt. Later turns of a lineage begin with everything that it
  has so far. A task limits their number (`lineages`). Turns are numbered over all lineages, in the order in which they
  are asked for. A lineage that is opened with `train=False` is recorded and never trained on; at least one is trained.
- `rollout.max_tokens` limits all tokens after the prompt or after a lineage's own first context, sampled and observed.
  A lineage with a context of its own also ends at the length of the longest prompt plus `rollout.max_tokens`, context
  included. `Policy.left` is the number of tokens that may follow in lineage 0. A turn that reaches the limit finishes
  as `length`. If no sampled token fits after an observation, `generate` raises `RoomError`: the observation is not part
  of the trajectory, and its lineage is recorded as cut at the limit. The episode catches the error and opens another
  lineage or returns the reward; an episode that lets it through fails.
- A trajectory's reward is what `episode` returns: a finite number, earned at the last turn, or an `Outcome` with one
  number for each turn. The magnitude of each, and of their sum, is at most `MAX_REWARD` (`reward_range.py`). An episode
  that fails raises `RewardError`; the error is recorded with its trajectory, and the run continues.
- An episode may run again for the same trajectory: after it moves between instances, after a failure, and when the run
  is resumed. The policy then returns, in order, the turns that it generated before, so nothing is sampled twice.
  Therefore an episode must be deterministic in what it asks for. Programs that are no environments (`serve/agents.py`)
  need not be: from the first turn that differs on, the turns that were done are discarded (`is_deterministic`).
- An episode may have a budget (`task.budget`). The environment calls `Policy.spend` before it spends anything; an
  amount beyond the budget raises `BudgetError`, which the episode may catch to return what was earned.
- An episode may have a limit of seconds (`task.episode_seconds`), which counts while it waits for no token. At the
  limit it is cancelled. Its trajectory gets the reward that the environment last passed to `Policy.report`, and ends
  with the turns that are done; without a report or a turn the episode fails.
- Episodes run concurrently on one event loop, of a worker process or of the driver: they await and never block it.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from operator import index
from typing import NamedTuple, Protocol

from stretto.environments.grades import Grade
from stretto.environments.reward_range import BEYOND, is_trainable
from stretto.errors import RewardError
from stretto.types import Completion, Prompt, RewardPart


@dataclass(frozen=True, slots=True)
class Outcome:
    """The reward of each turn of an episode. The reward of the trajectory is their sum."""

    turns: tuple[float, ...]


class Policy(Protocol):
    """The version of the policy that one trajectory was started with."""

    @property
    def left(self) -> int:
        """The number of tokens, observed or sampled, that may follow the current context of lineage 0."""
        ...

    async def generate(self, tokens: Sequence[int], *, lineage: int = 0, train: bool = True) -> Completion:
        """Continues `tokens`, the whole context, to a stop token, a stop string or the token limit.

        `lineage` is the one that the turn belongs to, or the next number, which opens one. `train` is fixed when a
        lineage is opened. Raises `RoomError` if no token fits.
        """
        ...

    @property
    def budget_left(self) -> float:
        """The amount that the episode may still spend; infinite without `task.budget`."""
        ...

    def spend(self, amount: float, what: str = "") -> None:
        """Counts an amount that the episode is about to spend. Raises `BudgetError` if it has less left."""
        ...

    def report(self, reward: float | Outcome) -> None:
        """Says what the episode has earned so far: its reward if it is cut at `task.episode_seconds`."""
        ...


class Environment(Protocol):
    """Plays the episodes of a task."""

    async def episode(self, prompt: Prompt, policy: Policy) -> float | Outcome | Grade:
        """Runs one episode to its end and returns its reward."""
        ...


def is_deterministic(environment: Environment) -> bool:
    """True if an episode that is run again must ask for the same turns."""
    return bool(getattr(environment, "deterministic", True))


class Earned(NamedTuple):
    """The reward of an episode, and what it is made of."""

    reward: float
    turns: tuple[float, ...] | None = None  # of each turn, if the episode returned an `Outcome`
    parts: tuple[RewardPart, ...] | None = None  # if it returned a `Grade`


def earned(outcome: object, num_turns: int) -> Earned:
    """Returns what an episode of `num_turns` turns has earned.

    Raises `RewardError` if the episode returned anything that cannot be trained on.
    """
    if not num_turns:
        raise RewardError("the environment returned without asking for a token: call `policy.generate`")
    if isinstance(outcome, Grade):
        return Earned(outcome.reward, parts=outcome.parts)
    if not isinstance(outcome, Outcome):
        return Earned(trainable(outcome))
    if len(outcome.turns) != num_turns:
        raise RewardError(
            f"the environment returned an outcome of {len(outcome.turns)} turns, but the episode had {num_turns}: "
            "return one reward for each turn"
        )
    rewards = tuple(trainable(reward) for reward in outcome.turns)
    total = math.fsum(rewards)
    if not is_trainable(total):
        raise RewardError(f"the rewards of the environment's {num_turns} turns add up to {total:g}, {BEYOND}")
    return Earned(total, turns=rewards)


def trainable(reward: object) -> float:
    """Returns a reward as a number. Raises `RewardError` if it cannot be trained on."""
    number = math.nan
    if isinstance(reward, Real):
        try:
            number = float(reward)
        except OverflowError as error:  # an integer or a fraction beyond the range of a float
            said = f"the environment returned a number ({type(reward).__name__}) for a reward that is"
            raise RewardError(f"{said} {BEYOND}") from error
    if not math.isfinite(number):
        raise RewardError(
            f"the environment returned {reprlib.repr(reward)} for a reward: return a finite number, or an `Outcome` "
            "with one for each turn"
        )
    if not is_trainable(number):
        raise RewardError(f"the environment returned {number:g} for a reward, {BEYOND}")
    return number


def token_ids(tokens: Sequence[int]) -> tuple[int, ...]:
    """Returns a context that an environment handed over. Raises `RewardError` if it is not all token ids."""
    try:
        return tuple(map(index, tokens))
    except TypeError as error:
        raise RewardError(
            f"the environment asked for a turn with a context that is not all token ids: {error}; hand over integers, "
            "as `tokenizer.encode` returns them"
        ) from error


def other_tokens(number: int) -> RewardError:
    """Returns the error for a turn that was asked for with another context before."""
    return RewardError(
        f"the environment asked for turn {number} with other tokens than the first time: an episode may be run again, "
        "so what it asks for must follow from the prompt and the turns before"
    )
