"""What a run is going to do, fixed before it starts."""

from __future__ import annotations

import math
from dataclasses import dataclass

from stretto.core.paradigms import PARADIGMS, Paradigm, slots_needed


@dataclass(frozen=True, slots=True)
class Plan:
    """The numbers that the core obeys. Every instance of this class can be run: no combination in it deadlocks."""

    paradigm: Paradigm
    batch: int  # B: groups per update
    group_size: int  # G: trajectories per group
    staleness: int  # K: the bound, or its cap where `auto`
    rows: int  # target of running trajectories, over all instances
    in_flight: int  # groups outstanding at most
    updates: int  # N: the run ends with version N
    auto: bool  # K follows the measured tail
    retries: int  # per trajectory, for generation, and again for scoring
    evaluate_every: int  # versions; 0: never
    filter_limit: int = 0  # groups without signal that are replaced before one batch, at most; 0: all are trained
    replay_groups: int = 0  # groups that are used again in each update, where there are so many
    replay_uses: int = 0  # of one group, after its first, at most

    def __post_init__(self) -> None:
        for name, least in (("batch", 1), ("group_size", 1), ("staleness", 0), ("rows", 1), ("updates", 1)):
            _at_least(name, getattr(self, name), least)
        _at_least("retries", self.retries, 0)
        for name in ("evaluate_every", "filter_limit", "replay_groups", "replay_uses"):
            _at_least(name, getattr(self, name), 0)
        if bool(self.replay_groups) != bool(self.replay_uses):
            raise ValueError(
                f"`replay_groups` is {self.replay_groups} and `replay_uses` is {self.replay_uses}; "
                "a replay needs both, or neither"
            )
        if self.replay_groups and self.staleness == 0:
            raise ValueError(
                f"`replay_groups` is {self.replay_groups}, but with `staleness` 0 a group is too old after its first "
                "update: allow staleness, or replay nothing"
            )
        row = self.paradigm
        if row.staleness is not None and (self.auto or self.staleness != row.staleness):
            got = "auto" if self.auto else self.staleness
            raise ValueError(f"`staleness` is {row.staleness} in the paradigm `{row.name}`, not {got!r}: leave it out")
        _at_least("in_flight", self.in_flight, self.batch)
        most = self.most_in_flight
        if most is not None and self.in_flight > most:
            raise ValueError(
                f"`in_flight` is {self.in_flight}, but the paradigm `{row.name}` with `staleness` {self.staleness} and "
                f"{self.batch} groups per update holds at most {most}: lower `in_flight` or raise `staleness`"
            )

    @property
    def most_in_flight(self) -> int | None:
        """The largest `in_flight` that can have an effect; None where nothing else bounds it."""
        return most_in_flight(self.paradigm, self.staleness, self.batch)

    @property
    def most_running(self) -> int:
        """About how many trajectories run at most."""
        return min(self.rows, self.in_flight * self.group_size)

    @property
    def slots(self) -> int:
        """Version slots that the instances must have together, evaluation's included."""
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
) -> Plan:
    """A plan with what follows from the rest filled in: the paradigm's own `staleness`, `rows` and `in_flight`."""
    row = PARADIGMS.get(paradigm)
    if row is None:
        raise ValueError(
            f"`paradigm` is {paradigm!r}; it must be one of {', '.join(f'`{name}`' for name in PARADIGMS)}"
        )
    if staleness is None:
        if row.staleness is None:
            raise ValueError(f"`staleness` is missing: the paradigm `{row.name}` has none of its own")
        staleness = row.staleness
    if in_flight is None:
        most = (staleness + 1) * batch
        in_flight = batch if row.one_batch else min(math.ceil(1.5 * batch), most)
    return Plan(
        paradigm=row,
        batch=batch,
        group_size=group_size,
        staleness=staleness,
        rows=batch * group_size if rows is None else rows,
        in_flight=in_flight,
        updates=updates,
        auto=auto,
        retries=retries,
        evaluate_every=evaluate_every,
        filter_limit=filter_limit,
        replay_groups=replay_groups,
        replay_uses=replay_uses,
    )


def most_in_flight(paradigm: Paradigm, staleness: int, batch: int) -> int | None:
    """The largest `in_flight` of a paradigm; None: any."""
    if paradigm.bounded_by == "in_flight":
        return None
    return batch if paradigm.one_batch else (staleness + 1) * batch


def _at_least(name: str, got: int, least: int) -> None:
    if got < least:
        raise ValueError(f"`{name}` is {got}; it must be at least {least}")
