"""Says in words when a run is collapsing. Pure: the lines of updates in, sentences out.

An update is compared with the same run's own past, never with an absolute idea of what is good: the medians of the last
`RECENT` updates against those of up to `PAST` before them. What changes slowly on one side only, as engine and trainer
drifting apart does, is compared with how the run began. A kind is said once in a run, and listed while it holds.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

RECENT = 3  # updates whose median is what the run is like now: one bad batch is none
PAST = 20  # updates before them that it is compared with
LEAST = 8  # of those that are needed: a run that has just begun has no past

TOKEN_SIZE_FALL = 0.5  # of the effective sample size of tokens, which moves little in a healthy run
SIZE_FALL = 0.2  # of that of sequences, which is noisy
SIZE_FLOOR = 0.2  # below it, that of sequences is all noise
ENTROPY_FALL = 0.25  # learning lowers it too, but then the reward rises
REWARD_RISE = 0.1  # of a batch's standard deviation: less is no rise
MISMATCH_GROWTH = 10.0
MISMATCH_FLOOR = 1e-4  # of the divergence: below it, nobody notices the difference

KEYS = ("token_effective_sample_size", "effective_sample_size", "entropy", "reward_mean", "reward_std", "mismatch_kl")

Row = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Sign:
    """One thing that is wrong."""

    kind: str
    text: str


@dataclass(slots=True)
class History:
    """What is kept of a run's updates, bounded whatever its length; goes into checkpoints."""

    first: list[dict[str, float]] = field(default_factory=list)  # of the run, with a mismatch that was measured
    last: list[dict[str, float]] = field(default_factory=list)
    seen: dict[str, int] = field(default_factory=dict)  # kind -> the update at which it was first seen

    def add(self, line: Mapping[str, Any]) -> tuple[list[str], list[str]]:
        """Take in the line of an update; returns the kinds that hold now, and sentences for those that are new."""
        row = _row(line)
        self.last = [*self.last, row][-(RECENT + PAST) :]
        if "mismatch_kl" in row and len(self.first) < PAST:
            self.first = [*self.first, row]
        found = signs(self.first, self.last)
        new = [sign for sign in found if sign.kind not in self.seen]
        update = int(line["update"])
        self.seen.update({sign.kind: update for sign in new})
        said = [f"update {update}: the run may be collapsing: {sign.text}" for sign in new]
        return [sign.kind for sign in found], said


def signs(first: Sequence[Row], last: Sequence[Row]) -> list[Sign]:
    """What is wrong now, at most one of a kind. `last` are the latest updates, `first` those that the run began with.

    Both are in order, and a row holds those of `KEYS` that were measured.
    """
    found = (_sample_size(last), _entropy(last), _mismatch(first, last))
    return [sign for sign in found if sign is not None]


def _row(line: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a line that are looked at; one that was not measured, or is not finite, is left out."""
    row = {key: float(line[key]) for key in KEYS if key in line and math.isfinite(line[key])}
    if not line.get("mismatch_tokens", row.get("mismatch_kl")):
        row.pop("mismatch_kl", None)
    return row


def _compared(last: Sequence[Row], key: str) -> tuple[float, float] | None:
    """The medians of `key` before and now; None where there are too few numbers."""
    now = [row[key] for row in last[-RECENT:] if key in row]
    before = [row[key] for row in last[:-RECENT] if key in row]
    if len(now) < RECENT or len(before) < LEAST:
        return None
    return statistics.median(before), statistics.median(now)


def _sample_size(last: Sequence[Row]) -> Sign | None:
    for key, what, fall, floor in (
        ("token_effective_sample_size", "tokens", TOKEN_SIZE_FALL, 0.0),
        ("effective_sample_size", "sequences", SIZE_FALL, SIZE_FLOOR),
    ):
        compared = _compared(last, key)
        if compared is None:
            continue
        before, now = compared
        if before > floor and now < fall * before:
            return Sign(
                "effective-sample-size",
                f"the effective sample size of its {what} fell from {before:.2f} to {now:.2f}, so a few {what} decide "
                "each update; lower `rollout.staleness` or `training.learning_rate`, or bound the weights by "
                "`[algorithm.correction]`",
            )
    return None


def _entropy(last: Sequence[Row]) -> Sign | None:
    compared, rewards, deviations = (_compared(last, key) for key in ("entropy", "reward_mean", "reward_std"))
    if compared is None or rewards is None:
        return None
    before, now = compared
    rise = rewards[1] - rewards[0]
    if now >= ENTROPY_FALL * before or rise > REWARD_RISE * (deviations[0] if deviations else 0.0):
        return None
    return Sign(
        "entropy",
        f"entropy fell from {before:.3g} to {now:.3g} while the reward did not rise ({rewards[0]:.3f} before, "
        f"{rewards[1]:.3f} now), so it tries nothing new; lower `training.learning_rate`, raise `algorithm.clip_high`, "
        "or add `[algorithm.entropy]`",
    )


def _mismatch(first: Sequence[Row], last: Sequence[Row]) -> Sign | None:
    measured = [row["mismatch_kl"] for row in last if "mismatch_kl" in row]
    began = [row["mismatch_kl"] for row in first]
    if len(began) < LEAST or len(measured) < RECENT:
        return None
    before, now = statistics.median(began), statistics.median(measured[-RECENT:])
    if now < MISMATCH_FLOOR or now < MISMATCH_GROWTH * before:
        return None
    return Sign(
        "mismatch",
        f"engine and trainer disagree about the same version: their divergence grew from {before:.1e} to {now:.1e} a "
        "token, and every ratio is wrong by as much; bound the weights by `[algorithm.correction]`, or set "
        '`model.dtype = "float32"`',
    )
