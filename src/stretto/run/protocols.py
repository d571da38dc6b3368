"""The protocols of the run loop: what it needs of trainer, instance pool, rewards and version files.

This module imports no torch. Implementations: `local/` (threads of one process) and `cluster/` (actors on Ray).

Contract of a pool:

- `add` makes an instance under an id that the pool never used before. It raises `EngineError` by a deadline if none
  can be made, and the pool is then as it was before.
- `remove` ends an instance and forgets it, in whatever state it is, by a deadline. An unknown id is not an error, so
  that a lost instance can be removed twice.
- `engines` are those that were made and not removed. The pool does not say which of them are still alive.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from stretto.engines.protocol import Engine
from stretto.environments.grades import Grade
from stretto.environments.reward_calls import Details
from stretto.errors import EngineError
from stretto.run.pool_base import InstancePool
from stretto.types import Batch, UpdateReport, Weights, WeightsRef


class TrainerBackend(Protocol):
    """One policy in training, for the loop's thread. Every method ends by a deadline, whatever hangs.

    Calls are carried out one after the other, in their order, so a state that is saved between two updates is that of
    the version between them. An update that fails raises a `StrettoError` that names it.
    """

    @property
    def kv_given_back(self) -> int:
        """Tokens of KV cache that the engines gave up because updates needed the memory."""
        ...

    async def update(self, batch: Batch) -> tuple[UpdateReport, Weights | WeightsRef]:
        """Runs one update. Returns its report and a copy of its weights, version `batch.update + 1`."""
        ...

    async def weights(self, version: int) -> Weights | WeightsRef:
        """Returns a copy of the weights that the trainer holds, which are those of `version`."""
        ...

    async def base_checksum(self) -> str | None:
        """Returns the checksum of the frozen weights under the policy's adapters; None: every weight is trained."""
        ...

    async def save(self, folder: Path) -> None:
        """Writes all state that later updates depend on. `load` of any backend of the same policy reads it."""
        ...

    async def load(self, folder: Path) -> None:
        """Reads what `save` wrote, so that later updates are the same."""
        ...

    async def adopt(self, weights: Weights | WeightsRef) -> None:
        """Replaces the policy by `weights`, of the version that it is at. The optimizer stays as it is.

        If they are the same, nothing changes. Raises `TrainerError` for another version or other tensors.
        """
        ...

    async def export(self, folder: Path) -> None:
        """Writes the policy as a Hugging Face model folder, or as a PEFT adapter folder."""
        ...

    def close(self) -> None:
        """Ends all that runs. Safe to call twice, and after a failure."""
        ...


class Pool(Protocol):
    """Makes and ends instances. For the loop's thread, which no method blocks."""

    @property
    def engines(self) -> Mapping[int, Engine]:
        """The instances by their ids; a live view."""
        ...

    async def add(self) -> tuple[int, Engine]:
        """Makes an instance and returns its id and engine."""
        ...

    async def remove(self, instance: int) -> None:
        """Ends an instance."""
        ...

    async def close(self) -> None:
        """Ends all of them. Safe to call twice."""
        ...


class FixedPool(InstancePool):
    """A pool of instances that the caller made. It cannot make others."""

    async def add(self) -> tuple[int, Engine]:
        raise EngineError("there is no other instance: those that there are were made elsewhere")


class Rewards(Protocol):
    """Scores completions, within its own deadlines."""

    @property
    def longest_s(self) -> float:
        """The most seconds that one reward may take."""
        ...

    @property
    def waiting(self) -> str:
        """A sentence on what scoring waits for, such as a judge that is away; empty if it waits for nothing."""
        ...

    async def start(self) -> None:
        """Imports the reward functions. Raises `RecipeError` if one cannot be called."""
        ...

    async def score(
        self, prompt: str, completion: str, row: Mapping[str, Any], details: Details | None = None
    ) -> float | Grade:
        """Returns the reward of one completion, or raises `RewardError`."""
        ...

    async def close(self) -> None:
        """Ends. Safe to call twice."""
        ...


class NoRewards:
    """The rewards of a task whose environment returns them itself."""

    longest_s = 0.0
    waiting = ""

    async def start(self) -> None:
        pass

    async def score(
        self, prompt: str, completion: str, row: Mapping[str, Any], details: Details | None = None
    ) -> float | Grade:
        raise AssertionError("an environment of its own scores this task")

    async def close(self) -> None:
        pass


class VersionStore(Protocol):
    """Durable storage for the weights of policy versions. `store/version_files.py` implements it."""

    def write(self, weights: Weights | WeightsRef) -> None:
        """Starts to write a version that was just made. Calling it again for the same version changes nothing."""
        ...

    async def durable(self, version: int) -> None:
        """Returns once the version is on disk. Raises `RunError` if it could not be written."""
        ...

    def reference(self, weights: Weights | WeightsRef) -> WeightsRef | None:
        """Returns a reference by which a version on disk can be read; None if it is not kept there."""
        ...

    def remove(self, version: int) -> None:
        """Deletes a version that nothing needs any more, after the journal recorded that on disk."""
        ...
