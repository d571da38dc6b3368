"""Rewards on a cluster: an actor with a pool of reward processes (`worker_host.py`).

If the actor or its machine dies, another actor replaces it and scores again what had no score. That is not the fault of
a trajectory, and costs it none of its retries. If no machine has room for another, scoring halts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from stretto.cluster.actor_calls import ActorCalls
from stretto.cluster.worker_host import Handlers, HostActor, HostLostError, WorkerHost, WorkerPool
from stretto.environments.grades import Grade
from stretto.environments.reward_calls import Columns, Details, RewardSpec
from stretto.environments.reward_pipes import Scores
from stretto.environments.reward_pool import RewardPool, longest_reward_s
from stretto.environments.sandbox import Limits
from stretto.environments.worker_process import START_S
from stretto.errors import RecipeError, RewardError, ScoringHaltedError

log = logging.getLogger(__name__)

RESCORES = 3  # of one completion, each because its actor was lost
RESUME = "see that the cluster has a machine for it, then continue with `--resume`"


@dataclass(frozen=True, slots=True)
class RewardOptions:
    """The options of the `RewardPool`, wherever it runs."""

    rewards: tuple[RewardSpec, ...]
    workers: int
    deadline_s: float
    columns: Columns | None
    folder: str  # the driver's working directory, where its modules are
    passed: Mapping[str, str] = field(default_factory=dict, repr=False)  # variables of the driver that a reward sees
    sandbox: Limits | None = None
    strict_sandbox: bool = False


class RewardActor(HostActor):
    """The actor of rewards."""

    _options: RewardOptions

    def make_pool(self) -> tuple[WorkerPool, Handlers]:
        options = self._options
        pool = RewardPool(
            options.rewards,
            workers=options.workers,
            deadline_s=options.deadline_s,
            columns=options.columns,
            on_output=self.keep,
            extra_environment=options.passed,
            sandbox=options.sandbox,
            strict_sandbox=options.strict_sandbox,
        )
        return pool, {"score": pool.score, "scores": pool.scores}


class RayRewards:
    """The `Rewards` of a cluster. For one event loop."""

    def __init__(
        self,
        options: RewardOptions,
        *,
        said: Callable[[str], None],
        instance_seconds: float,
        notice: Callable[[str], None] = log.error,
    ) -> None:
        """`said` gets every line that the function prints. `notice` gets a sentence for every actor that is lost.

        An actor that does not answer for `instance_seconds` is lost.
        """
        self._options = options
        self._built = built = options.rewards[0].built
        self._host = WorkerHost(
            RewardActor, options, options.folder,
            what="rewards", said=said, instance_seconds=instance_seconds, notice=notice,
            start_s=START_S if built is None else built.start_s, gpus=0.0 if built is None else built.gpus,
        )  # fmt: skip

    @property
    def replaced(self) -> int:
        """Actors that were lost."""
        return self._host.replaced

    @property
    def longest_s(self) -> float:
        """The longest that a reward takes if its actor is not lost on the way; if it is, twice as long."""
        deadline_s = self._options.deadline_s if self._built is None else self._built.deadline_s
        start_s = START_S if self._built is None else self._built.start_s
        return longest_reward_s(len(self._options.rewards), deadline_s, batched=self._built is None) + start_s

    @property
    def waiting(self) -> str:
        """Empty: the processes are elsewhere. What they wait for is printed."""
        return ""

    async def start(self) -> None:
        """Starts the actor. Raises `RecipeError` if the function cannot be imported or called."""
        await self._host.ready()

    async def score(
        self, prompt: str, completion: str, row: Mapping[str, Any], details: Details | None = None
    ) -> float | Grade:
        """Returns the reward of one completion, or raises `RewardError`."""
        reward: float | Grade = await self._ask("score", prompt, completion, row, details)
        return reward

    async def scores(
        self, prompt: str, completion: str, row: Mapping[str, Any], details: Details | None = None
    ) -> Scores:
        """Returns what each reward says of one completion, in their order. Raises `RewardError` as `score` does."""
        scores: Scores = await self._ask("scores", prompt, completion, row, details)
        return scores

    @property
    def forms(self) -> tuple[str, ...]:
        """Empty for each reward: how they are called is known to their actor."""
        return ("",) * len(self._options.rewards)

    async def _ask(self, call: str, *given: Any) -> Any:
        shown = ", ".join(spec.shown for spec in self._options.rewards)
        lost: ActorCalls | None = None
        for _ in range(RESCORES + 1):
            try:
                remote = await self._host.ready(lost)
            except RecipeError as error:
                if lost is None or self._built is None:
                    raise
                raise ScoringHaltedError(str(error)) from error  # such as a judge that is away now
            except RewardError as error:  # no machine has room for another actor
                if self._host.closed:
                    raise
                raise ScoringHaltedError(f"{error}; {RESUME}") from error
            try:
                return await remote.call(call, *given, bounded=False)
            except HostLostError as error:
                lost = remote
                if self._host.closed:
                    raise RewardError(f"{shown} was stopped before it returned") from error
        text = f"{shown} lost its process {RESCORES + 1} times while it computed one reward"
        if self._built is not None:  # it runs no code of a completion, so that none is to blame
            raise ScoringHaltedError(f"{text}; {RESUME}")
        raise RewardError(text)

    async def close(self) -> None:
        """Ends the actor. Pending calls raise `RewardError`. Safe to call twice."""
        await self._host.close()
