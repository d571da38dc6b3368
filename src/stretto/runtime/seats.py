"""Who does the work beside the loop: instances, trainer and rewards, wherever they run."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from stretto.config import Recipe
from stretto.observe.progress import Observer
from stretto.runtime.device import on_device
from stretto.runtime.inputs import reward_pool
from stretto.runtime.memory import longest_trajectory
from stretto.runtime.parts import Desk, Parts
from stretto.runtime.pool import LocalPool, Pool
from stretto.runtime.roles import TrainerRole, TrainerSeat
from stretto.store.journal import Journal
from stretto.store.versions import VersionFiles
from stretto.types import Weights


class Rewards(Protocol):
    """Whoever scores completions, within deadlines of its own."""

    @property
    def longest_s(self) -> float:
        """After so long at most a reward ends."""
        ...

    async def start(self) -> None:
        """Import the function; a `RecipeError` where it cannot be called."""
        ...

    async def score(self, prompt: str, completion: str, row: Mapping[str, Any]) -> float:
        """The reward of one completion, or a `RewardError`."""
        ...

    async def close(self) -> None:
        """End. Safe to call twice."""
        ...


class NoRewards:
    """Of a task whose environment says itself what its episodes earn."""

    longest_s = 0.0

    async def start(self) -> None:
        pass

    async def score(self, prompt: str, completion: str, row: Mapping[str, Any]) -> float:
        raise AssertionError("an environment of its own scores this task")

    async def close(self) -> None:
        pass


async def _nothing_to_reserve() -> None:
    pass


@dataclass(slots=True)
class Seats:
    """What `run.py` starts, hands to the loop, and closes whatever happens. Making them starts nothing."""

    desk: Desk
    rewards: Rewards
    pool: Pool
    make_trainer: Callable[[Journal], TrainerSeat]
    place: Callable[[Weights], Weights]  # brings weights that were read from a file to where instances load them from
    # Finds room for the trainer before instances take it; `release` gives it back, whether or not a trainer was made.
    reserve: Callable[[], Awaitable[None]] = _nothing_to_reserve
    release: Callable[[], None] = lambda: None


MakeSeats = Callable[[Callable[[str], None], VersionFiles], Seats]
"""From who hears what rewards print, and the files of the run's versions."""


def local_seats(
    recipe: Recipe, parts: Parts, observer: Observer, said: Callable[[str], None], versions: VersionFiles
) -> Seats:
    """All of it in threads of this process, but rewards, which have processes of their own."""
    longest = longest_trajectory(recipe, parts.inputs.longest_prompt)
    pool = LocalPool(parts.take_core, threads=parts.threads[0], longest=longest)

    def make_trainer(journal: Journal) -> TrainerSeat:
        return TrainerRole(
            parts.trainer,
            parts.threads[1],
            deadline_s=recipe.runtime.update_seconds,
            engine_s=recipe.runtime.instance_seconds,
            engines=pool.engines.values(),
            notice=observer.message,
        )

    task = parts.inputs.task
    rewards = NoRewards() if task.reward is None else reward_pool(recipe, task, said)
    return Seats(parts, rewards, pool, make_trainer, lambda weights: on_device(weights, parts.trainer.device))
