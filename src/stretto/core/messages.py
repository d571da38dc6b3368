"""What goes into the core and what comes out. Everything that happens to a run is one of these."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# -- events: what happened ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Joined:
    """An instance is there, empty."""

    instance: int
    slots: int  # versions that it can hold at once


@dataclass(frozen=True, slots=True)
class Lost:
    """An instance is gone with everything on it. Its trajectories go on elsewhere under their own version."""

    instance: int


@dataclass(frozen=True, slots=True)
class Leaving:
    """An instance is asked to go: nothing new starts there, its trajectories go on elsewhere, then `Release`."""

    instance: int


@dataclass(frozen=True, slots=True)
class Surveyed:
    """How far the running trajectories are, and which instances are short of KV memory. Comes on a timer."""

    tokens: Mapping[int, int]  # trajectory -> context, prompt included; those that are not named count as 0
    crowded: frozenset[int] = frozenset()  # instances that cannot hold the KV of all that they run
    ending: frozenset[int] = frozenset()  # trajectories that have nearly all tokens that they may have


@dataclass(frozen=True, slots=True)
class Loaded:
    """An instance confirmed the checksum of a version that it was told to load."""

    instance: int
    version: int


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
    """A request failed on an instance that lives on. Retried on the same version with the same seed, bounded.

    One that failed on an instance that it has been told to leave since goes on as it was told.
    """

    trajectory: int
    reason: str
    instance: int | None = None  # where it failed; None: where it runs


@dataclass(frozen=True, slots=True)
class ScoringFailed:
    """A reward failed. Scored again without generating again, bounded."""

    trajectory: int
    reason: str


@dataclass(frozen=True, slots=True)
class Updated:
    """The trainer finished update `update`; the weights of version `update + 1` exist."""

    update: int


@dataclass(frozen=True, slots=True)
class Measured:
    """The tail of generation (seconds from the start of a group to its end, a high quantile) and of one update."""

    tail_s: float
    update_s: float


@dataclass(frozen=True, slots=True)
class Evaluated:
    """The evaluation that `Evaluate` asked for has ended."""

    version: int


@dataclass(frozen=True, slots=True)
class StopRequested:
    """End at the next update boundary: at once if no update is running."""


Event = (
    Joined
    | Lost
    | Leaving
    | Surveyed
    | Loaded
    | Generated
    | Scored
    | GenerationFailed
    | ScoringFailed
    | Updated
    | Measured
    | Evaluated
    | StopRequested
)

# -- commands: what to do about it -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Load:
    """Put a version on an instance; answer with `Loaded`."""

    instance: int
    version: int


@dataclass(frozen=True, slots=True)
class Swap:
    """`partial` only: overwrite a version by a newer one under the work that is running; answer with `Loaded`."""

    instance: int
    old: int
    version: int


@dataclass(frozen=True, slots=True)
class Unload:
    """Free a version's slot on an instance; nothing runs there under it."""

    instance: int
    version: int


@dataclass(frozen=True, slots=True)
class Start:
    """Admit a group: all of its trajectories start under `version` on `instance`."""

    group: int
    version: int
    deadline: int  # the update whose batch it must be in at the latest
    instance: int
    trajectories: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Resume:
    """Generate a trajectory on `instance` under its own version, going on from what is left of it.

    Where its `Suspend` is not yet answered, it goes on as soon as that is; from its prompt, if its source died first.
    """

    trajectory: int
    version: int
    instance: int
    reason: str = ""  # why there, where it is there by choice


@dataclass(frozen=True, slots=True)
class Suspend:
    """Take trajectories out of an instance, with their KV. They are given a place by a `Resume`, now or later.

    One that had ended there before reports `Generated` all the same; nothing else is reported from there about any.
    One that never got there, because an earlier `Suspend` is not yet answered, is not resumed there any more.
    """

    instance: int
    trajectories: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Release:
    """An instance that was asked to go may go: nothing runs there. It is not used again as an id."""

    instance: int


@dataclass(frozen=True, slots=True)
class Keep:
    """An instance that was asked to go stays, as if nobody had asked: there is no other that does."""

    instance: int


@dataclass(frozen=True, slots=True)
class Rescore:
    """Score a trajectory once more."""

    trajectory: int


@dataclass(frozen=True, slots=True)
class Fail:
    """A trajectory has failed for good; `reason` is the last of its failures."""

    trajectory: int
    reason: str


@dataclass(frozen=True, slots=True)
class Drop:
    """`drop` only: throw a group away, finished or not."""

    group: int
    trajectories: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Filter:
    """Where the plan filters only: a scored group has no signal; the next prompt takes its place."""

    group: int
    trajectories: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Spare:
    """A scored group has no signal and is trained all the same: the plan's limit of filtered ones is reached."""

    group: int
    update: int  # the next whose batch is not yet taken


@dataclass(frozen=True, slots=True)
class Train:
    """Run update `update` on these trajectories, in this order: (version, group, member).

    After them come those that are used again, in the same order, each with the number of its use; 1 is the first after
    the use that law 2 speaks of.
    """

    update: int
    trajectories: tuple[int, ...]
    again: tuple[tuple[int, int], ...] = ()  # (trajectory, use)


@dataclass(frozen=True, slots=True)
class Forget:
    """Where the plan replays only: these trained trajectories are not used again."""

    trajectories: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Publish:
    """Version `version` is now the newest."""

    version: int


@dataclass(frozen=True, slots=True)
class Retire:
    """Nothing needs the weights of `version` any more."""

    version: int


@dataclass(frozen=True, slots=True)
class Evaluate:
    """Evaluate `version` on `instance`, at low priority; answer with `Evaluated`."""

    version: int
    instance: int


@dataclass(frozen=True, slots=True)
class SkipEvaluation:
    """The evaluation of `version`, which was due or had begun, does not happen."""

    version: int
    reason: str


@dataclass(frozen=True, slots=True)
class Finish:
    """Nothing is left to do: all updates are done (`stopped` false) or the run was asked to stop."""

    stopped: bool


Command = (
    Load
    | Swap
    | Unload
    | Start
    | Suspend
    | Resume
    | Release
    | Keep
    | Rescore
    | Fail
    | Drop
    | Filter
    | Spare
    | Train
    | Forget
    | Publish
    | Retire
    | Evaluate
    | SkipEvaluation
    | Finish
)
