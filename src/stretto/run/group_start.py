"""Admissions: a group that the core starts gets a prompt, and a rollout for each of its trajectories."""

from __future__ import annotations

import logging
from collections import Counter

from stretto import clock
from stretto.core import messages as core
from stretto.environments.mixed_prompts import Prompts
from stretto.observe.tail_latency import Tail
from stretto.run.rollout import Rollout
from stretto.run.seeds import trajectory_seed
from stretto.store.journal import Journal

log = logging.getLogger(__name__)


class Admissions:
    """Draws the prompts of a run. For the loop's thread only."""

    def __init__(self, prompts: Prompts, *, seed: int, journal: Journal, tail: Tail) -> None:
        self.prompts = prompts
        self._seed = seed
        self._journal = journal
        self._tail = tail
        self._admitted: Counter[int] = Counter()  # version -> groups since `log_admitted`

    def admit(self, command: core.Start) -> list[Rollout]:
        """Draws a prompt for a group, records the group, and returns its rollouts."""
        draw = self.prompts.draw(command.group)
        prompt = self.prompts.prompt(command.group, draw.row_number, draw.task)
        seeds = [trajectory_seed(self._seed, id) for id in command.trajectories]
        self._journal.group_admitted(
            command.group,
            version=command.version,
            deadline=command.deadline,
            staleness=command.deadline - command.version,
            prompt=prompt,
            epoch=draw.epoch,
            row_number=draw.row_number,
            draw=draw.reason,
            trajectories=command.trajectories,
            seeds=seeds,
            instances=command.instances,
            task_index=draw.place,
            at=clock.now(),
        )
        self._admitted[command.version] += 1
        self._tail.admitted(command.group, len(command.trajectories))
        return [
            Rollout(id, command.group, command.version, seed, prompt, draw.row_number)
            for id, seed in zip(command.trajectories, seeds, strict=True)
        ]

    def log_admitted(self) -> None:
        """Logs the groups that were admitted since the last call, by version."""
        if log.isEnabledFor(logging.DEBUG):
            versions = ", ".join(f"{count} of version {version}" for version, count in sorted(self._admitted.items()))
            log.debug("%d groups admitted since the last batch: %s", self._admitted.total(), versions or "none")
        self._admitted.clear()
