"""The learning rate of every update. This is its only definition: trainer, resumed runs and `replay` use it.

The rate of update `n` is a function of `n` and of the options of its phase alone. A phase is a part of a run with one
recipe (`run/phases.py`): options that changed at a `--resume` hold from the first update of the new phase on, as if
the run had always had them. So warm-up and schedule count updates from the beginning of the run, in every phase:

| update `n`                               | learning rate                                                            |
|------------------------------------------|--------------------------------------------------------------------------|
| `n < warmup_steps`                       | `learning_rate * (n + 1) / (warmup_steps + 1)`                           |
| otherwise, `constant`                    | `learning_rate`                                                          |
| otherwise, before `schedule_start`       | `learning_rate`                                                          |
| otherwise, `linear` or `cosine`          | `learning_rate * (final_fraction + (1 - final_fraction) * shape)`        |

`shape` falls from 1 at `schedule_start` to 0 at `schedule_end`, and stays there: `1 - done`, or `(1 + cos(pi * done)) /
2`, where `done = (n - schedule_start) / (schedule_end - schedule_start)`. By default the schedule starts where the
warm-up ends, and ends with the run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from stretto.training.options import TrainingOptions


def learning_rate(step: int, options: TrainingOptions) -> float:
    """Returns the learning rate of update `step`, from 0, under one set of options."""
    if step < options.warmup_steps:
        return options.learning_rate * (step + 1) / (options.warmup_steps + 1)
    start, end = options.schedule_bounds
    if options.schedule == "constant" or step <= start:
        return options.learning_rate
    done = min(1.0, (step - start) / (end - start))
    shape = 1.0 - done if options.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return options.learning_rate * (options.final_fraction + (1.0 - options.final_fraction) * shape)


@dataclass(frozen=True, slots=True)
class LearningRates:
    """The learning rates of a run: the first update of each phase, in order, and its options."""

    phases: tuple[tuple[int, TrainingOptions], ...]

    def __post_init__(self) -> None:
        firsts = [first for first, _ in self.phases]
        assert firsts
        assert firsts[0] == 0
        assert firsts == sorted(firsts)

    def at(self, update: int) -> float:
        """Returns the learning rate of an update, by the last phase that has begun with it or before."""
        return learning_rate(update, next(options for first, options in reversed(self.phases) if first <= update))

    @property
    def largest(self) -> float:
        """The largest peak of all phases."""
        return max(options.learning_rate for _, options in self.phases)
