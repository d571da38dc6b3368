"""The backend of a run: instances, trainer and rewards, wherever they run."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from stretto.environments.protocol import Environment
from stretto.run.protocols import Pool, Rewards, TrainerBackend
from stretto.setup.factories import DriverInputs
from stretto.store.journal import Journal
from stretto.store.version_files import VersionFiles
from stretto.types import Weights, WeightsRef


async def _nothing_to_reserve() -> None:
    pass


@dataclass(frozen=True, slots=True)
class TaskBackend:
    """The processes of one task."""

    rewards: Rewards
    environment: Environment  # plays its episodes


@dataclass(slots=True)
class Backend:
    """The parts that `assembly/train.py` starts, gives to the loop, and closes. Making them starts nothing."""

    driver: DriverInputs
    tasks: Mapping[str | None, TaskBackend]  # by label
    pool: Pool
    make_trainer: Callable[[Journal], TrainerBackend]
    # Brings weights that were read from a file to where instances load them from.
    place: Callable[[Weights], Weights | WeightsRef]
    # Finds room for the trainer before instances take it. `release` gives it back, also if no trainer was made.
    reserve: Callable[[], Awaitable[None]] = _nothing_to_reserve
    release: Callable[[], None] = lambda: None

    @property
    def longest_reward_s(self) -> float:
        """The most seconds that one reward may take, of all tasks."""
        return max(each.rewards.longest_s for each in self.tasks.values())

    def longest_answer_s(self, of_environment: float) -> float:
        """The most seconds that an answer takes outside of generation, of all tasks; `of_environment`: if one plays."""
        return max(each.rewards.longest_s or of_environment for each in self.tasks.values())

    @property
    def scoring_wait(self) -> str:
        """A sentence on what scoring waits for, such as a judge that is away; empty if it waits for nothing."""
        return next((each.rewards.waiting for each in self.tasks.values() if each.rewards.waiting), "")


MakeBackend = Callable[[Callable[[str], None], VersionFiles], Backend]
"""Makes a backend, from a function that gets every line that rewards print, and from the version files."""
