"""Faults of an environment while it plays an episode: what it does to its task, and to the turns that it asks for.

The driver (`run/episodes.py`) and the worker processes (`episode_worker.py`) hold an environment to the same rules.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from stretto.environments.function_specs import last_line
from stretto.errors import RewardError

Earnings = TypeVar("Earnings")  # what an episode returns


async def in_own_task(work: Coroutine[Any, Any, Earnings]) -> Earnings:
    """Returns what an environment returns. Whatever it does to the current task, the caller's is untouched."""
    try:
        return await asyncio.create_task(contained(work), name="episode")
    finally:
        work.close()  # if the task was cancelled before it began


async def contained(work: Coroutine[Any, Any, Earnings]) -> Earnings:
    """Returns what an environment returns. If it would end the process or cancel the run, only its episode fails."""
    try:
        return await work
    except asyncio.CancelledError as error:
        if (task := asyncio.current_task()) is None or task.cancelling():
            raise
        raise RewardError(
            "the environment raised `CancelledError`, and nobody had cancelled it: it cancelled its own task, or "
            "something that it awaited was cancelled"
        ) from error
    except SystemExit as error:
        raise RewardError(f"the environment called `sys.exit({error.code!r})`: raise an error instead") from error
    except BaseException as error:
        if isinstance(error, Exception):
            raise
        raise RewardError(
            f"the environment raised `{last_line(error)}`, which is not an `Exception`: raise one that is"
        ) from error


def given_up() -> RewardError:
    return RewardError(
        "the environment gave up a turn that it had asked for, or returned before that was done: await every turn to "
        "its end, without a deadline of your own"
    )


def asked_early() -> RewardError:
    return RewardError("the environment asked for a turn before the last one was done: await one after the other")


def asked_after_end() -> RewardError:
    return RewardError("the environment asked for a turn, and its episode had ended: await every turn in it")
