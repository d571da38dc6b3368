"""The environment of a run that needs nothing but the machine of the driver."""

from __future__ import annotations

from collections.abc import Callable

from stretto.chat.templates import prefill_of
from stretto.environments.custom import load_environment
from stretto.environments.episode_pool import EpisodePool
from stretto.environments.protocol import Environment
from stretto.environments.single_turn import SingleTurn
from stretto.run.protocols import Rewards
from stretto.setup.factories import DriverInputs
from stretto.setup.inputs import TaskInputs, episode_pool_options, played_in_thread, plays_in_workers, worker_options


def local_environment(
    own: TaskInputs, driver: DriverInputs, rewards: Rewards, said: Callable[[str], None]
) -> Environment:
    """Makes the environment of the task: worker processes, one in this process, or one turn that `rewards` scores.

    One that was given from Python has a thread of this process.

    `said` gets every line that worker processes print.
    """
    recipe, task, tokenizer = own.recipe, own.task, own.tokenizer
    if task.environment is None:
        return SingleTurn(rewards, driver.decode, prefill_of(tokenizer.chat_template))
    if task.environment.given is not None:
        return played_in_thread(recipe, task.environment, tokenizer)
    if plays_in_workers(recipe):
        return EpisodePool(episode_pool_options(recipe, task, tokenizer), worker_options(recipe, said))
    return load_environment(task.environment, tokenizer)
