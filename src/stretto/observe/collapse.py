"""Warns when a run is collapsing. Pure: metrics of updates in, sentences out.

An update is compared with the past of the same run, never with absolute limits: the medians of the last `RECENT`
updates against those of up to `PAST` updates before them. The mismatch between engine and trainer changes slowly and
only grows, so it is compared with the start of the run. Each kind of sign is reported once in a run, and listed with
every update while it holds. While the reward clearly rises or the task is learnt (`reward_trend.py`), the run does not
collapse, whatever its weights and its entropy do; a mismatch is a sign even then.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from stretto.observe.reward_trend import Outlook

RECENT = 3  # updates whose median stands for the present, so that one bad batch is no sign
PAST = 20  # updates before them that they are compared with
LEAST = 8  # updates of the past that are needed for a comparison

TOKEN_SIZE_FALL = 0.5  # of the effective sample size of tokens, which changes little in a healthy run
SIZE_FALL = 0.2  # of the effective sample size of sequences, which is noisy
SIZE_FLOOR = 0.2  # below it, the effective sample size of sequences is all noise
ENTROPY_FALL = 0.25  # learning lowers it too, but then the reward rises
REWARD_RISE = 0.1  # of a batch's standard deviation; a smaller change is no rise
MISMATCH_GROWTH = 10.0
MISMATCH_FLOOR = 1e-4  # of the divergence; below it, the mismatch does not matter

KEYS = (
    "token_effective_sample_size",
    "effective_sample_size",
    "entropy",
    "reward_mean",
    "reward_std",
    "mismatch_kl",
    "teacher_kl",
)

Row = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Sign:
    """One sign of a collapse."""

    kind: str
    text: str


@dataclass(slots=True)
class History:
    """The metrics of a run's updates that are needed for comparisons, of bounded size."""

    first: list[dict[str, float]] = field(default_factory=list)  # updates of the run with a measured mismatch
    last: list[dict[str, float]] = field(default_factory=list)
    seen: dict[str, int] = field(default_factory=dict)  # kind -> the update at which it was first seen

    def add(self, line: Mapping[str, Any], outlook: Outlook = "flat") -> tuple[list[str], list[str]]:
        """Adds the line of an update. Returns the kinds of signs that hold now, and sentences for the new ones."""
        row = _row(line)
        self.last = [*self.last, row][-(RECENT + PAST) :]
        if "mismatch_kl" in row and len(self.first) < PAST:
            self.first = [*self.first, row]
        learns = outlook in ("rising", "learnt")
        found = [sign for sign in signs(self.first, self.last) if not learns or sign.kind == "mismatch"]
        new = [sign for sign in found if sign.kind not in self.seen]
        update = int(line["update"])
        self.seen.update({sign.kind: update for sign in new})
        sentences = [f"update {update}: the run may be collapsing: {sign.text}" for sign in new]
        return [sign.kind for sign in found], sentences


def signs(first: Sequence[Row], last: Sequence[Row]) -> list[Sign]:
    """The signs that hold now, at most one of a kind. `last` are the latest updates, `first` the first of the run.

    Both are in order. A row has those of `KEYS` that were measured.
    """
    found = (_sample_size(last), _entropy(last), _mismatch(first, last))
    return [sign for sign in found if sign is not None]


def _row(line: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a line that signs depend on, without those that were not measured or are not finite."""
    row = {key: float(line[key]) for key in KEYS if key in line and math.isfinite(line[key])}
    if not line.get("mismatch_tokens", row.get("mismatch_kl")):
        row.pop("mismatch_kl", None)
    return row


def _compared(last: Sequence[Row], key: str) -> tuple[float, float] | None:
    """The medians of `key` in the past and now; None if there are too few numbers."""
    now = [row[key] for row in last[-RECENT:] if key in row]
    before = [row[key] for row in last[:-RECENT] if key in row]
    if len(now) < RECENT or len(before) < LEAST:
        return None
    return statistics.median(before), statistics.median(now)


def _sample_size(last: Sequence[Row]) -> Sign | None:
    for key, unit, fall, floor in (
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
                f"the effective sample size of its {unit} fell from {before:.2f} to {now:.2f}, so a few {unit} "
                "dominate each update; lower `rollout.staleness` or `training.learning_rate`, or bound the weights "
                "with `[algorithm.correction]`",
            )
    return None


def _entropy(last: Sequence[Row]) -> Sign | None:
    compared, rewards, deviations = (_compared(last, key) for key in ("entropy", "reward_mean", "reward_std"))
    if compared is None or rewards is None:
        return None
    before, now = compared
    taught = _compared(last, "teacher_kl")
    if taught is not None and taught[1] <= taught[0]:
        return None  # a policy that comes nearer to its teacher becomes as certain as that
    rise = rewards[1] - rewards[0]
    if now >= ENTROPY_FALL * before or rise > REWARD_RISE * (deviations[0] if deviations else 0.0):
        return None
    return Sign(
        "entropy",
        f"entropy fell from {before:.3g} to {now:.3g} while the reward did not rise ({rewards[0]:.3f} before, "
        f"{rewards[1]:.3f} now), so the policy explores no more; lower `training.learning_rate`, raise "
        "`algorithm.clip_high`, or add `[algorithm.entropy]`",
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
        f"engine and trainer compute the same version differently: their divergence grew from {before:.1e} to "
        f"{now:.1e} a token, and distorts every ratio; bound the weights with `[algorithm.correction]`, or set "
        '`model.dtype = "float32"`',
    )
