"""The backend of a run in one process: instances and trainer are threads, rewards have processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from stretto.environments.given import of_task
from stretto.local.components import LocalComponents
from stretto.local.pool import LocalPool
from stretto.local.trainer import ThreadedTrainer
from stretto.observe.progress import Observer
from stretto.recipe.schema import Recipe
from stretto.run.protocols import NoRewards, Rewards, TrainerBackend
from stretto.setup.backend import Backend, TaskBackend
from stretto.setup.device import on_device
from stretto.setup.environments import local_environment
from stretto.setup.inputs import TaskInputs, make_rewards
from stretto.setup.memory_sizes import longest_trajectory
from stretto.store.journal import Journal
from stretto.store.version_files import VersionFiles


def local_backend(
    recipe: Recipe,
    parts: LocalComponents,
    folder: Path,
    observer: Observer,
    said: Callable[[str], None],
    versions: VersionFiles,
) -> Backend:
    """Makes the backend of a run in `folder` from its components. Starts nothing."""
    driver = parts.driver
    pool = LocalPool(
        parts.next_engine,
        threads=driver.threads.engine,
        longest=longest_trajectory(recipe, driver.inputs.longest_prompt),
    )

    def make_trainer(journal: Journal) -> TrainerBackend:
        return ThreadedTrainer(
            parts.trainer,
            driver.threads.trainer,
            deadline_s=recipe.runtime.update_seconds,
            engine_s=recipe.runtime.instance_seconds,
            engines=pool.engines.values(),
            notice=observer.message,
            is_warm=parts.is_warm,
        )

    def task_backend(own: TaskInputs) -> TaskBackend:
        with of_task(own.label if len(driver.inputs.tasks) > 1 else None):
            rewards: Rewards = make_rewards(own.recipe, own.task, said, folder) if own.task.rewards else NoRewards()
            return TaskBackend(rewards, local_environment(own, driver, rewards, said))

    tasks = {own.label: task_backend(own) for own in driver.inputs.tasks}
    return Backend(driver, tasks, pool, make_trainer, lambda weights: on_device(weights, parts.trainer.device))
