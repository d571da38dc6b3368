"""Trajectories that end without being trained: failed for good, dropped, filtered. Each is recorded and counted."""

from __future__ import annotations

import logging
from collections.abc import Coroutine
from typing import Any

from stretto import clock
from stretto.core import messages as core
from stretto.core.plan import Plan
from stretto.errors import StalledError
from stretto.observe.metrics import Tally
from stretto.observe.repeated_warnings import Repeats
from stretto.observe.tail_latency import Tail
from stretto.run.rollout_runner import Rollouts
from stretto.store.journal import Journal

log = logging.getLogger(__name__)

MIN_FAILURES = 64  # trajectories that must fail in a row, at least, before a run gives up


class Terminations:
    """Carries out the core's commands that end trajectories. For the loop's thread only."""

    def __init__(self, plan: Plan, rollouts: Rollouts, *, journal: Journal, tally: Tally, tail: Tail) -> None:
        self._plan = plan
        self._rollouts = rollouts
        self._journal = journal
        self._tally = tally
        self._tail = tail
        self._warnings = Repeats(log)

    def fail(self, command: core.Fail) -> None:
        """Ends a trajectory that failed for good. Raises `StalledError` if too many failed in a row."""
        rollout = self._rollouts.remove(command.trajectory)
        self._tally.failed(rollout.num_sampled, rollout.prompt.task)
        lost = 0 if rollout.is_generated else rollout.num_sampled
        self._journal.failed(rollout.id, command.reason, at=clock.now(), num_tokens=lost)
        self._tail.member_ended(rollout.group, scored=False)
        self._warnings.warn(f"trajectory {rollout.id} failed for good: {command.reason}")
        self._rollouts.note_failure(rollout)
        if self._rollouts.failed_in_a_row >= max(MIN_FAILURES, 4 * self._plan.batch * self._plan.group_size):
            # Groups that fail are replaced, so a reward that can only fail would draw prompts for ever.
            of_task = "" if rollout.prompt.task is None else f", of task `{rollout.prompt.task}`"
            raise StalledError(
                f"the last {self._rollouts.failed_in_a_row} trajectories all failed, and none got a reward in "
                f"between; the last of them{of_task}: {command.reason}"
            )

    def drop(self, command: core.Drop) -> Coroutine[Any, Any, None]:
        """Calls trajectories of a group back; the coroutine that is returned records each with its tokens."""
        if command.surplus:
            self._tail.completed(command.group)
        else:
            self._tail.dropped(command.group)
        rollouts = self._rollouts
        dropped = [rollouts.remove(id) for id in command.trajectories if id in rollouts.in_progress]
        return rollouts.suspensions.discard(dropped, command.reason)

    def filter(self, command: core.Filter) -> None:
        """Ends a scored group without signal."""
        rollouts = [self._rollouts.remove(id) for id in command.trajectories]
        reason = f"no signal: every reward of the group is {rollouts[0].reward:g}"
        for rollout in rollouts:
            self._journal.filtered(rollout.id, reason, at=clock.now())
        lengths = [rollout.num_sampled for rollout in rollouts]
        self._tally.filtered(lengths, rollouts[0].reward or 0.0, rollouts[0].prompt.task)

    def spare(self, command: core.SpareFromFilter) -> None:
        """Records that a group without signal is trained, because too many were filtered before it."""
        text = (
            f"group {command.group} has no signal and is trained as it is: {self._plan.filter_limit} groups "
            f"(`rollout.filter_limit`) were filtered before update {command.update}, and hardly any had a signal"
        )
        self._journal.group_spared(command.group, command.update, text, at=clock.now())
        self._warnings.warn(text)

    def close(self) -> None:
        """Logs how often each warning was repeated."""
        self._warnings.close()
