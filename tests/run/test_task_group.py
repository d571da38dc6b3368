"""The tasks of a run: the first failure is kept, and so is a cancellation that the run did not ask for."""

from __future__ import annotations

import asyncio

from stretto.errors import TaskCancelledError
from stretto.run.task_group import TaskGroup


def test_a_task_that_somebody_else_cancelled_is_a_failure() -> None:
    async def run() -> None:
        woken = asyncio.Event()
        tasks = TaskGroup(woken.set)
        task = tasks.spawn(asyncio.sleep(60), "trajectory 7")
        await asyncio.sleep(0)
        task.cancel()
        async with asyncio.timeout(30):
            await woken.wait()
        assert isinstance(tasks.failure, TaskCancelledError)
        assert "`trajectory 7`" in str(tasks.failure)

    asyncio.run(run())


def test_a_task_that_ends_with_the_run_is_no_failure() -> None:
    async def run() -> None:
        tasks = TaskGroup(lambda: None)
        tasks.spawn(asyncio.sleep(60), "status")
        await asyncio.sleep(0)
        await tasks.end()
        assert tasks.failure is None

    asyncio.run(run())
