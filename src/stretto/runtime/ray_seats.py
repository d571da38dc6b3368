"""A run on a cluster: instances, the trainer's ranks and rewards are actors; the loop is all that is left here.

Nothing of the model's size passes through this process while all of them live: instances and ranks load the model
themselves, weights go from rank 0 to their file and to the object store, and from there to every machine once, KV from
instance to instance. A version whose object is lost passes through here once, from its file.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

from stretto import clock
from stretto.config import Recipe, ScoredSection
from stretto.observe.progress import Observer
from stretto.runtime.inputs import reward_columns
from stretto.runtime.memory import longest_trajectory
from stretto.runtime.parts import Desk
from stretto.runtime.ray_cluster import gpus_of
from stretto.runtime.ray_environment import RayRewards, RewardOptions
from stretto.runtime.ray_instance import InstanceOptions
from stretto.runtime.ray_mail import idle_seconds
from stretto.runtime.ray_model import InstanceCore, ModelSource
from stretto.runtime.ray_pool import RayPool
from stretto.runtime.ray_rank_group import rank_options
from stretto.runtime.ray_trainer import RankedTrainer
from stretto.runtime.ray_weights import WeightsHandle, WeightsStore
from stretto.runtime.roles import TrainerSeat
from stretto.runtime.seats import NoRewards, Rewards, Seats
from stretto.runtime.trainer_recovery import restoring
from stretto.store.journal import Journal
from stretto.store.versions import VersionFiles
from stretto.types import Weights

REPORT_S = 0.25  # between two reports of an instance that is busy


class Notes:
    """Says what was done about a fault, and records it once there is a journal."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.journal: Journal | None = None
        self._say = say

    def __call__(self, kind: str, text: str) -> None:
        self._say(text)
        if self.journal is not None:
            self.journal.note(kind, text, at=clock.now())


def ray_seats(
    recipe: Recipe,
    desk: Desk,
    source: ModelSource,
    folder: Path,
    observer: Observer,
    said: Callable[[str], None],
    versions: VersionFiles,
) -> Seats:
    """The seats of a run in `folder`, on the cluster that this process is connected to."""
    runtime, note = recipe.runtime, Notes(observer.message)
    options = InstanceOptions(
        make=InstanceCore(recipe, source, desk.inputs.longest_prompt),
        threads=runtime.engine_threads or max(1, int(runtime.instance_cpus)),
        longest=longest_trajectory(recipe, desk.inputs.longest_prompt),
        every_s=REPORT_S,
        idle_s=idle_seconds(runtime.instance_seconds),
        pull_s=runtime.instance_seconds / 2,
    )
    pool = RayPool(
        options,
        cpus=runtime.instance_cpus,
        gpus=gpus_of(runtime.instance_gpus, recipe),
        store=WeightsStore(
            lambda handle: versions.read(handle.version, handle.checksum), partial(note, "weights renewed")
        ),
        instance_seconds=runtime.instance_seconds,
    )
    rewards: Rewards = NoRewards()
    if isinstance(recipe.task, ScoredSection):
        assert desk.inputs.task.reward is not None
        rewards = RayRewards(
            RewardOptions(
                desk.inputs.task.reward,
                workers=recipe.task.reward_workers,
                deadline_s=recipe.task.reward_seconds,
                columns=reward_columns(desk.inputs.task),
                folder=str(Path.cwd()),
            ),
            said=said,
            instance_seconds=runtime.instance_seconds,
            notice=partial(note, "reward host lost"),
        )
    seat = RankedTrainer(
        rank_options(recipe, source, folder), deadline_s=runtime.update_seconds, notice=partial(note, "trainer lost")
    )

    def trainer(journal: Journal) -> TrainerSeat:
        note.journal = journal
        seat.restore = restoring(folder, journal, versions, partial(note, "trainer restored"))
        return seat

    return Seats(desk, rewards, pool, trainer, _put, seat.place, seat.close)


def _put(weights: Weights) -> Weights:
    """Weights that were read from a file, as the loop knows them: by version, kind, checksum and scale alone."""
    either: Any = weights
    return cast(Weights, either if isinstance(either, WeightsHandle) else WeightsHandle.put(weights))
