"""The numbers of a run that are fixed before it starts."""

from __future__ import annotations

import math
from dataclasses import dataclass

from stretto.core.paradigms import PARADIGMS, Paradigm, slots_needed
from stretto.core.spreading import Spread

RESERVES = ("reserve_groups", "reserve_members")
BATCHES = 1.5  # in flight by default
BATCHES_AHEAD = 3  # the same in a run that starts ahead


@dataclass(frozen=True, slots=True)
class Plan:
    """The numbers that the core obeys. Numbers that do not fit together are refused, so every plan can be run."""

    paradigm: Paradigm
    batch: int  # B: groups per update
    group_size: int  # G: trajectories per group that an update trains on
    staleness: int  # K: the bound; with `auto`, its cap
    rows: int  # the number of trajectories that should want tokens at once, over all instances
    in_flight: int  # the most groups that may be outstanding
    updates: int  # N: the run ends with version N
    auto: bool  # K follows the measured tail
    retries: int  # of a trajectory: so many for generation, and so many for scoring
    evaluate_every: int  # in versions; 0: never
    filter_limit: int = 0  # the most groups without signal that are replaced before one batch; 0: all are trained
    replay_groups: int = 0  # groups that each update uses again, if there are so many
    replay_uses: int = 0  # the most uses of one group after its first
    reserve_groups: int = 0  # R: the most groups in reserve (`redundancy.py`)
    reserve_members: int = 0  # trajectories that a group starts with beyond `group_size`
    spread: Spread = "auto"  # over how many instances a group starts (`spreading.py`)
    ramps: bool = False  # until the first batch is taken, one batch of trajectories runs; then `rows`

    def __post_init__(self) -> None:
        for name, least in (("batch", 1), ("group_size", 1), ("staleness", 0), ("rows", 1), ("updates", 1)):
            _at_least(name, getattr(self, name), least)
        _at_least("retries", self.retries, 0)
        for name in ("evaluate_every", "filter_limit", "replay_groups", "replay_uses", *RESERVES):
            _at_least(name, getattr(self, name), 0)
        if bool(self.replay_groups) != bool(self.replay_uses):
            raise ValueError(
                f"`replay_groups` is {self.replay_groups} and `replay_uses` is {self.replay_uses}; "
                "using groups again needs both, or neither"
            )
        if self.replay_groups and self.staleness == 0:
            raise ValueError(
                f"`replay_groups` is {self.replay_groups}, but with `staleness` 0 a group is too old after its first "
                "update: allow staleness, or use no group again"
            )
        row = self.paradigm
        if self.redundant and not row.allows_redundancy:
            raise ValueError(
                f"redundancy is refused in the paradigm `{row.name}`, where no batch waits for a group and what is too "
                "old is dropped: raise `in_flight` instead"
            )
        if row.staleness is not None and (self.auto or self.staleness != row.staleness):
            got = "auto" if self.auto else self.staleness
            raise ValueError(f"`staleness` is {row.staleness} in the paradigm `{row.name}`, not {got!r}: leave it out")
        if self.in_flight < self.batch:
            raise ValueError(
                f"`in_flight` is {self.in_flight}; it must be at least {self.batch}, which is `batch`: an update "
                "takes one group for each prompt"
            )
        most = self.most_in_flight
        if most is not None and self.in_flight > most:
            raise ValueError(
                f"`in_flight` is {self.in_flight}, but the paradigm `{row.name}` with `staleness` {self.staleness} and "
                f"{self.batch} groups per update holds at most {most}: lower `in_flight` or raise `staleness`"
            )

    @property
    def most_in_flight(self) -> int | None:
        """The largest `in_flight` that can have an effect; None if there is no such bound."""
        return most_in_flight(self.paradigm, self.staleness, self.batch)

    @property
    def members(self) -> int:
        """The trajectories that a group starts with. Ids of trajectories are multiples of it."""
        return self.group_size + self.reserve_members

    @property
    def first_rows(self) -> int:
        """`rows` until the first batch is taken.

        If all of several batches started at once, the first batches would be sorted by length: the groups with the
        shortest answers are done first.
        """
        return min(self.rows, (self.batch + self.reserve_groups) * self.members) if self.ramps else self.rows

    @property
    def redundant(self) -> bool:
        """True if more is started than is trained on."""
        return self.reserve_groups > 0 or self.reserve_members > 0

    @property
    def drops(self) -> bool:
        """True if trajectories may end as dropped."""
        return self.paradigm.at_limit == "drop" or self.redundant

    @property
    def most_trajectories(self) -> int:
        """The trajectories of all groups that may be outstanding at once."""
        return (self.in_flight + self.reserve_groups) * self.members

    @property
    def slots(self) -> int:
        """The version slots that the instances must have together, including the one of evaluation."""
        return slots_needed(self.paradigm, self.staleness, evaluates=self.evaluate_every > 0)


def resolve_plan(
    paradigm: str,
    *,
    batch: int,
    group_size: int,
    updates: int,
    retries: int,
    staleness: int | None = None,
    auto: bool = False,
    rows: int | None = None,
    in_flight: int | None = None,
    evaluate_every: int = 0,
    filter_limit: int = 0,
    replay_groups: int = 0,
    replay_uses: int = 0,
    reserve_groups: int = 0,
    reserve_members: int = 0,
    spread: Spread = "auto",
    ahead: bool = False,
    rows_at_most: int | None = None,
) -> Plan:
    """Returns a plan, with defaults for `rows`, `in_flight` and, if the paradigm fixes it, `staleness`.

    By default `BATCHES` batches are in flight, and one batch of rows runs. With `ahead`, `BATCHES_AHEAD` batches are in
    flight and all of them run, or as many as `rows_at_most` rows hold, once the first batch is taken. A paradigm that
    drops what is too old never starts ahead: it would drop more.
    """
    row = PARADIGMS.get(paradigm)
    if row is None:
        raise ValueError(
            f"`paradigm` is {paradigm!r}; it must be one of {', '.join(f'`{name}`' for name in PARADIGMS)}"
        )
    if staleness is None:
        if row.staleness is None:
            raise ValueError(f"`staleness` is missing: the paradigm `{row.name}` needs a value for it")
        staleness = row.staleness
    members, one_batch = group_size + reserve_members, (batch + reserve_groups) * (group_size + reserve_members)
    usual = batch if row.one_batch else min(math.ceil(BATCHES * batch), (staleness + 1) * batch)
    ahead = ahead and not row.one_batch and row.bounded_by == "deadlines"
    if ahead:
        if in_flight is None:
            most = min(BATCHES_AHEAD, staleness + 1) * batch
            fitting = rows if rows is not None else rows_at_most
            held = most if fitting is None else -(-fitting // members) - reserve_groups
            in_flight = min(max(held, usual), most)
        if rows is None:
            rows = (in_flight + reserve_groups) * members
            rows = rows if rows_at_most is None else max(one_batch, min(rows, rows_at_most))
    in_flight = usual if in_flight is None else in_flight
    rows = one_batch if rows is None else rows
    return Plan(
        paradigm=row,
        batch=batch,
        group_size=group_size,
        staleness=staleness,
        rows=rows,
        in_flight=in_flight,
        updates=updates,
        auto=auto,
        retries=retries,
        evaluate_every=evaluate_every,
        filter_limit=filter_limit,
        replay_groups=replay_groups,
        replay_uses=replay_uses,
        reserve_groups=reserve_groups,
        reserve_members=reserve_members,
        spread=spread,
        ramps=ahead,
    )


def most_in_flight(paradigm: Paradigm, staleness: int, batch: int) -> int | None:
    """Returns the largest `in_flight` of a paradigm; None if any is allowed."""
    if paradigm.bounded_by == "in_flight":
        return None
    return batch if paradigm.one_batch else (staleness + 1) * batch


def _at_least(name: str, got: int, least: int) -> None:
    if got < least:
        raise ValueError(f"`{name}` is {got}; it must be at least {least}")
