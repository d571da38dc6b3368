"""The backend of a run: instances, trainer and rewards, wherever they run."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from stretto.environments.protocol import Environment
from stretto.run.protocols import Pool, Rewards, TrainerBackend
from stretto.setup.factories import DriverInputs
from stretto.store.journal import Journal
from stretto.store.version_files import VersionFiles
from stretto.types import Weights, WeightsRef


async def _nothing_to_reserve() -> None:
    pass


@dataclass(slots=True)
class Backend:
    """The parts that `assembly/train.py` starts, gives to the loop, and closes. Making them starts nothing."""

    driver: DriverInputs
    rewards: Rewards
    environment: Environment  # plays the episodes of the task
    pool: Pool
    make_trainer: Callable[[Journal], TrainerBackend]
    # Brings weights that were read from a file to where instances load them from.
    place: Callable[[Weights], Weights | WeightsRef]
    # Finds room for the trainer before instances take it. `release` gives it back, also if no trainer was made.
    reserve: Callable[[], Awaitable[None]] = _nothing_to_reserve
    release: Callable[[], None] = lambda: None


MakeBackend = Callable[[Callable[[str], None], VersionFiles], Backend]
"""Makes a backend, from a function that gets every line that rewards print, and from the version files."""
