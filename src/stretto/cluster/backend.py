"""The backend of a run on a cluster: instances, the trainer's ranks and rewards are Ray actors.

The loop stays in this process, and nothing of the model's size passes through it: instances and ranks load the model
themselves, weights go from rank 0 to their file and to the object store and from there to every machine once, and KV
goes from instance to instance. Only a version whose object was lost passes through here once, from its file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from stretto import clock
from stretto.cluster.actor_calls import idle_seconds
from stretto.cluster.episodes import EpisodeOptions, RayEpisodes
from stretto.cluster.instance_actor import InstanceOptions
from stretto.cluster.model_files import InstanceEngineFactory, ModelSource
from stretto.cluster.pool import RayPool
from stretto.cluster.rank_group import rank_options
from stretto.cluster.rewards import RayRewards, RewardOptions
from stretto.cluster.trainer import RankedTrainer
from stretto.cluster.weights import WeightsStore
from stretto.environments.combined_rewards import combined_rewards
from stretto.environments.given import of_task
from stretto.environments.reward_calls import RewardSpec
from stretto.environments.task_options import ScoredTaskOptions
from stretto.observe.progress import Observer
from stretto.recipe.schema import Recipe
from stretto.run.phases import Phases
from stretto.run.protocols import NoRewards, Rewards, TrainerBackend
from stretto.setup.backend import Backend, TaskBackend
from stretto.setup.cluster_devices import instance_gpus
from stretto.setup.environments import local_environment
from stretto.setup.factories import DriverInputs
from stretto.setup.inputs import (
    TaskInputs,
    episode_pool_options,
    make_rewards,
    passed_variables,
    plays_in_workers,
    reward_columns,
    worker_options,
)
from stretto.setup.memory_sizes import longest_trajectory
from stretto.setup.scorers import reward_specs
from stretto.setup.trainer_recovery import make_restore
from stretto.store.journal import Journal
from stretto.store.version_files import VersionFiles

REPORT_S = 0.25  # between two reports of an instance that is busy


class FaultLog:
    """Shows what was done about a fault, and records it once there is a journal."""

    def __init__(self, show: Callable[[str], None]) -> None:
        self.journal: Journal | None = None
        self._show = show

    def note(self, kind: str, text: str) -> None:
        self._show(text)
        if self.journal is not None:
            self.journal.note(kind, text, at=clock.now())


def cluster_backend(
    recipe: Recipe,
    driver: DriverInputs,
    source: ModelSource,
    folder: Path,
    observer: Observer,
    phases: Phases,
    said: Callable[[str], None],
    versions: VersionFiles,
) -> Backend:
    """Makes the backend of a run in `folder`, on the cluster that this process is connected to."""
    runtime, faults = recipe.runtime, FaultLog(observer.message)
    options = InstanceOptions(
        make=InstanceEngineFactory(recipe, source, driver.inputs.longest_prompt),
        threads=runtime.engine_threads or max(1, int(runtime.instance_cpus)),
        longest=longest_trajectory(recipe, driver.inputs.longest_prompt),
        report_s=REPORT_S,
        idle_s=idle_seconds(runtime.instance_seconds),
        pull_s=runtime.instance_seconds / 2,
    )
    store = WeightsStore(
        lambda each: versions.read(each.version, each.checksum), partial(faults.note, "weights renewed")
    )
    pool = RayPool(
        options,
        cpus=runtime.instance_cpus,
        gpus=instance_gpus(recipe),
        store=store,
        instance_seconds=runtime.instance_seconds,
    )
    tasks: dict[str | None, TaskBackend] = {}
    for own in driver.inputs.tasks:
        with of_task(own.label if len(driver.inputs.tasks) > 1 else None):
            tasks[own.label] = _task_backend(own, driver, folder, said, faults)
    trainer = RankedTrainer(
        rank_options(recipe, source, folder, phases.learning_rates),
        deadline_s=runtime.update_seconds,
        notice=partial(faults.note, "trainer lost"),
        store=store,
    )

    def make_trainer(journal: Journal) -> TrainerBackend:
        faults.journal = journal
        trainer.restore = make_restore(
            folder, journal, versions, partial(faults.note, "trainer restored"), ages=phases.retrained_ages
        )
        return trainer

    return Backend(driver, tasks, pool, make_trainer, store.put, trainer.place, trainer.close)


def _task_backend(
    own: TaskInputs, driver: DriverInputs, folder: Path, said: Callable[[str], None], faults: FaultLog
) -> TaskBackend:
    """Makes what scores and plays one task: actors, or parts of this process for what cannot leave it."""
    recipe, task, runtime = own.recipe, own.task, own.recipe.runtime
    rewards: Rewards = NoRewards()
    if task.functions:
        rewards = make_rewards(recipe, task, said)  # it cannot leave this process
    elif isinstance(recipe.task, ScoredTaskOptions):
        options, columns, passed = recipe.task, reward_columns(task), passed_variables(recipe)

        def on_ray(specs: Sequence[RewardSpec]) -> RayRewards:
            return RayRewards(
                RewardOptions(
                    tuple(specs),
                    workers=options.reward_workers if specs[0].built is None else 1,
                    deadline_s=options.reward_seconds,
                    columns=columns,
                    folder=str(Path.cwd()),
                    passed=passed,
                    sandbox=None if options.sandbox is None else options.sandbox.limits,
                    strict_sandbox=options.sandbox is not None and options.sandbox.strict,
                ),
                said=said,
                instance_seconds=runtime.instance_seconds,
                notice=partial(faults.note, "reward host lost"),
            )

        rewards = combined_rewards(reward_specs(recipe, task, folder.resolve()), on_ray)
    if not plays_in_workers(recipe):
        return TaskBackend(rewards, local_environment(own, driver, rewards, said))
    processes = worker_options(recipe, said)
    environment = RayEpisodes(
        EpisodeOptions(
            episode_pool_options(recipe, task, own.tokenizer),
            folder=str(Path.cwd()),
            passed=processes.extra_environment,
            sandbox=processes.sandbox,
            strict_sandbox=processes.strict_sandbox,
        ),
        said=said,
        instance_seconds=runtime.instance_seconds,
        notice=partial(faults.note, "episode host lost"),
    )
    return TaskBackend(rewards, environment)
