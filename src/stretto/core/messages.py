"""The events that the core handles and the commands that it gives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from stretto.core.spreading import GroupCosts

# -- events ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Joined:
    """An instance has joined. It holds no version."""

    instance: int
    slots: int  # the versions that it can hold at once


@dataclass(frozen=True, slots=True)
class Lost:
    """An instance is gone with everything on it. `Resume` commands say where its trajectories continue."""

    instance: int


@dataclass(frozen=True, slots=True)
class Leaving:
    """An instance was asked to leave. Its trajectories move to others, and then it gets `ReleaseInstance`."""

    instance: int


@dataclass(frozen=True, slots=True)
class LoadSampled:
    """A periodic report of how far the running trajectories are and which instances are short of KV memory."""

    tokens: Mapping[int, int]  # trajectory -> context, prompt included; 0 for those that are not named
    short_of_memory: frozenset[int] = frozenset()  # the instances that cannot hold the KV of all that they run
    ending: frozenset[int] = frozenset()  # the trajectories that have nearly all tokens that they may have
    costs: GroupCosts | None = None  # of starting a group, as far as they are measured
    speeds: Mapping[int, float] = field(default_factory=dict)  # instance -> how fast a row decodes there, as measured


@dataclass(frozen=True, slots=True)
class Loaded:
    """An instance has loaded a version and confirmed its checksum."""

    instance: int
    version: int


@dataclass(frozen=True, slots=True)
class TurnEnded:
    """A trajectory on an instance waits for its world, not for tokens: its row is free until `TurnAsked`.

    Ignored if the trajectory has been told to leave its instance since.
    """

    trajectory: int


@dataclass(frozen=True, slots=True)
class TurnAsked:
    """A trajectory wants tokens again. Ignored if the core counts its row anyway."""

    trajectory: int


@dataclass(frozen=True, slots=True)
class Generated:
    """A trajectory has its last token."""

    trajectory: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Scored:
    """A trajectory has its reward."""

    trajectory: int
    reward: float


@dataclass(frozen=True, slots=True)
class GenerationFailed:
    """A trajectory failed on an instance that still works. It is retried with the same version and seed, a few times.

    Ignored if the trajectory has been told to leave that instance since: it continues where it was told to.
    """

    trajectory: int
    reason: str
    instance: int | None = None  # where it failed; None: the instance that it runs on


@dataclass(frozen=True, slots=True)
class ScoringFailed:
    """The reward of a trajectory failed. It is scored again, a few times, without being generated again."""

    trajectory: int
    reason: str


@dataclass(frozen=True, slots=True)
class Updated:
    """The trainer finished update `update`; the weights of version `update + 1` exist."""

    update: int


@dataclass(frozen=True, slots=True)
class Measured:
    """Measured durations: from the start of a group to its end (a high quantile), and of one update."""

    tail_s: float
    update_s: float


@dataclass(frozen=True, slots=True)
class Evaluated:
    """The evaluation that `Evaluate` asked for has ended."""

    version: int


@dataclass(frozen=True, slots=True)
class StopRequested:
    """The run is to stop at the next update boundary: at once if no update is running."""


Event = (
    Joined
    | Lost
    | Leaving
    | LoadSampled
    | Loaded
    | TurnEnded
    | TurnAsked
    | Generated
    | Scored
    | GenerationFailed
    | ScoringFailed
    | Updated
    | Measured
    | Evaluated
    | StopRequested
)

# -- commands ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LoadVersion:
    """Load a version on an instance. Answered by `Loaded`."""

    instance: int
    version: int


@dataclass(frozen=True, slots=True)
class SwapVersion:
    """`partial` only: overwrite a version by a newer one while trajectories run. Answered by `Loaded`."""

    instance: int
    old: int
    version: int


@dataclass(frozen=True, slots=True)
class UnloadVersion:
    """Unload a version from an instance, where nothing runs under it."""

    instance: int
    version: int


@dataclass(frozen=True, slots=True)
class Start:
    """Admit a group: start all of its trajectories under `version`, each on its instance."""

    group: int
    version: int
    deadline: int  # the last update whose batch may hold it
    instances: tuple[int, ...]  # of its trajectories, in their order
    trajectories: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Resume:
    """Continue a trajectory on `instance` under its own version, from the tokens that it still has.

    `partial` only: the version may be newer than the one that it ran under before; it is never older. If its `Suspend`
    is not finished yet, it continues as soon as that is; from its prompt if the instance that it left died first.
    """

    trajectory: int
    version: int
    instance: int
    reason: str = ""  # of the move; empty if its instance was lost or its request failed


@dataclass(frozen=True, slots=True)
class Suspend:
    """Take trajectories out of an instance, with their KV. A `Resume` for each follows, now or later.

    One that had ended there before still reports `Generated`; nothing else is reported from there about any of them.
    One that has not arrived there yet, because an earlier `Suspend` is not finished, is not resumed there.
    """

    instance: int
    trajectories: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class ReleaseInstance:
    """An instance that was asked to leave may leave: nothing runs there. Its id is not used again."""

    instance: int


@dataclass(frozen=True, slots=True)
class KeepInstance:
    """An instance that was asked to leave stays after all, because no other instance would stay."""

    instance: int


@dataclass(frozen=True, slots=True)
class Rescore:
    """Score a trajectory again."""

    trajectory: int


@dataclass(frozen=True, slots=True)
class Fail:
    """End a trajectory as failed: it has used its retries. `reason` is that of its last failure."""

    trajectory: int
    reason: str


@dataclass(frozen=True, slots=True)
class Drop:
    """End trajectories as dropped, finished or not: under `drop`, or if the plan is redundant.

    They are all of a group that have not failed, or (`surplus`) those that a finished group did not need.
    """

    group: int
    trajectories: tuple[int, ...]
    reason: str
    surplus: bool = False


@dataclass(frozen=True, slots=True)
class Filter:
    """End a scored group as filtered: its rewards are all equal. The next prompt takes its place."""

    group: int
    trajectories: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SpareFromFilter:
    """Train a group although its rewards are all equal: the plan's limit of filtered groups is reached."""

    group: int
    update: int  # the next update whose batch is not yet taken


@dataclass(frozen=True, slots=True)
class Train:
    """Run an update on these trajectories, in this order: (version, group, member).

    After them come those of groups that are used again, in the same order, each with the number of its use. Use 0 is
    the one of law 2.
    """

    update: int
    trajectories: tuple[int, ...]
    again: tuple[tuple[int, int], ...] = ()  # (trajectory, use)


@dataclass(frozen=True, slots=True)
class EndReuse:
    """Forget trained trajectories that were kept to be used again: they are not used any more."""

    trajectories: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Publish:
    """Publish a version: it is the newest from now on."""

    version: int


@dataclass(frozen=True, slots=True)
class Retire:
    """Remove the weights of a version: nothing needs them any more."""

    version: int


@dataclass(frozen=True, slots=True)
class Evaluate:
    """Evaluate a version on an instance, at low priority. Answered by `Evaluated`."""

    version: int
    instance: int


@dataclass(frozen=True, slots=True)
class SkipEvaluation:
    """Record that the evaluation of a version, which was due or had begun, is skipped."""

    version: int
    reason: str


@dataclass(frozen=True, slots=True)
class Finish:
    """End the run: all updates are done, or (`stopped`) it was asked to stop."""

    stopped: bool


Command = (
    LoadVersion
    | SwapVersion
    | UnloadVersion
    | Start
    | Suspend
    | Resume
    | ReleaseInstance
    | KeepInstance
    | Rescore
    | Fail
    | Drop
    | Filter
    | SpareFromFilter
    | Train
    | EndReuse
    | Publish
    | Retire
    | Evaluate
    | SkipEvaluation
    | Finish
)
