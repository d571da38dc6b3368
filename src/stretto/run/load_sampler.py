"""Load samples: how long the contexts of rollouts are, and which instances are short of KV memory.

They are estimated from what engines report anyway, so no engine is called for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from stretto.core import messages as core
from stretto.core.migration import MoveRates
from stretto.core.spreading import GroupCosts
from stretto.run.instance_membership import Instances
from stretto.run.rollout import Placement, Rollout
from stretto.types import EngineStats

CROWDED_SHARE = 0.9  # of an instance's KV memory; above it, queued requests wait for memory
ENDING_SHARE = 0.05  # of `max_tokens`; a rollout with no more than this left is not worth moving
LEAST_SPREAD = 0.1  # of the mean rows of a step: rows that vary less do not tell what a row costs
OLD_SHARE = 0.98  # the weight that steps keep with each later sample
OLD_SPEED_SHARE = 0.9  # the same in the speed of an instance
LEAST_STEPS = 32  # of an instance before its speed counts: the first ones compile, or capture graphs


class StepTimes:
    """Fits the time of a decode step to its rows, by least squares over load samples, the last ones first."""

    def __init__(self) -> None:
        self._sums = [0.0] * 5  # of weights, rows, seconds, rows * rows, rows * seconds

    def add(self, rows: float, seconds: float, steps: int) -> None:
        """Adds steps of so many rows and seconds each, on average."""
        new = (1.0, rows, seconds, rows * rows, rows * seconds)
        self._sums = [OLD_SHARE * old + steps * each for old, each in zip(self._sums, new, strict=True)]

    @property
    def per_row(self) -> float | None:
        """The seconds by which one more row lengthens a step; None while the rows hardly vary."""
        weight, rows, seconds, squares, products = self._sums
        if not weight:
            return None
        mean = rows / weight
        variance = squares / weight - mean * mean
        if variance <= (LEAST_SPREAD * mean) ** 2:
            return None
        return max(0.0, (products / weight - mean * seconds / weight) / variance)

    def expected(self, rows: float) -> float:
        """Returns the seconds that a step of so many rows takes, on all instances together."""
        weight, total_rows, seconds = self._sums[:3]
        return max(0.0, seconds / weight + (self.per_row or 0.0) * (rows - total_rows / weight)) if weight else 0.0


class InstanceSpeed:
    """The speed of one instance, over what is expected of a step of so many rows; later samples count more."""

    def __init__(self) -> None:
        self._expected_s = self._seconds = 0.0
        self._steps = 0

    def add(self, expected_s: float, seconds: float, steps: int) -> None:
        """Adds steps that took so many seconds each, on average."""
        self._expected_s = OLD_SPEED_SHARE * self._expected_s + steps * expected_s
        self._seconds = OLD_SPEED_SHARE * self._seconds + steps * seconds
        self._steps += steps

    @property
    def value(self) -> float | None:
        """The speed: 1 if steps take as long as expected. None before it is measured."""
        if self._steps < LEAST_STEPS or not self._seconds > 0 or not self._expected_s > 0:
            return None
        return self._expected_s / self._seconds


class LoadSampler:
    """Samples the load of the rollouts in progress. For the loop's thread only."""

    def __init__(self, in_progress: Mapping[int, Rollout], instances: Instances, max_tokens: int) -> None:
        self.rates = MoveRates()  # of carrying KV and of prefilling
        self._in_progress = in_progress
        self._instances = instances
        self._max_tokens = max_tokens
        self._last: dict[int, EngineStats] = {}  # the report of each instance in the last sample
        self._prefill_rate = 0.0  # the highest so far
        self._steps = StepTimes()
        self._speeds: dict[int, InstanceSpeed] = {}

    def context(self, rollout: Rollout, placement: Placement, load: EngineStats) -> int:
        """Estimates the tokens of a rollout's context: while an instance generates for it, a step adds one token."""
        grown = 0 if placement.pending is None else max(0, load.steps - placement.pending.engine_steps)
        return min(rollout.context + grown, rollout.max_context)

    def sample(self) -> core.LoadSampled:
        """Returns a load sample, and measures the rate of prefilling since the last one."""
        tokens: dict[int, int] = {}
        now = {instance: engine.report() for instance, engine in self._instances.engines.items()}
        for rollout in self._in_progress.values():
            if (placement := rollout.placement) is not None and placement.instance in now and rollout.context:
                tokens[rollout.id] = self.context(rollout, placement, now[placement.instance])
        crowded = frozenset(instance for instance, load in now.items() if self._is_crowded(instance, load))
        for instance, load in now.items():
            if (before := self._last.get(instance)) is not None:
                self._measure_prefill(before, load)
                self._measure_steps(instance, before, load)
        self._last = now
        self._speeds = {instance: speed for instance, speed in self._speeds.items() if instance in now}
        ending = frozenset(
            id
            for id, context in tokens.items()
            if self._in_progress[id].max_context - context <= ENDING_SHARE * self._max_tokens
        )
        speeds = {instance: speed.value for instance, speed in self._speeds.items()}
        measured = {instance: value for instance, value in speeds.items() if value is not None}
        return core.LoadSampled(tokens, crowded, ending, self._costs(), measured)

    def _costs(self) -> GroupCosts | None:
        """The costs of starting a group; None before they are measured."""
        if not self._prefill_rate or (row_s := self._steps.per_row) is None or not self._in_progress:
            return None
        prompts = [len(rollout.prompt.tokens) for rollout in self._in_progress.values()]
        return GroupCosts(sum(prompts) / len(prompts) / self._prefill_rate, row_s)

    def _is_crowded(self, instance: int, load: EngineStats) -> bool:
        """True if requests wait there for KV memory, or some were preempted for it since the last sample."""
        if load.queued and load.kv_tokens > CROWDED_SHARE * self._instances.engines[instance].capacity.kv_tokens:
            return True
        before = self._last.get(instance)
        return before is not None and load.preemptions > before.preemptions

    def _measure_prefill(self, before: EngineStats, load: EngineStats) -> None:
        """Keeps the highest rate: decoding takes part of the time, so every measured rate is too low."""
        prefilled, busy_s = load.prefilled - before.prefilled, load.busy_s - before.busy_s
        if busy_s > 0 and prefilled / busy_s > self._prefill_rate:
            self._prefill_rate = prefilled / busy_s
            self.rates = replace(self.rates, prefill_tokens_per_s=self._prefill_rate)

    def _measure_steps(self, instance: int, before: EngineStats, load: EngineStats) -> None:
        """Adds the decode steps since the last sample, without the time of prefilling."""
        steps, busy_s = load.steps - before.steps, load.busy_s - before.busy_s
        if steps <= 0 or busy_s <= 0:
            return
        prefill_s = (load.prefilled - before.prefilled) / self._prefill_rate if self._prefill_rate else 0.0
        rows, seconds = (load.row_s - before.row_s) / busy_s, max(0.0, busy_s - prefill_s) / steps
        self._steps.add(rows, seconds, steps)
        self._speeds.setdefault(instance, InstanceSpeed()).add(self._steps.expected(rows), seconds, steps)
