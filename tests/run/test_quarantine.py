"""Which rollouts are quarantined because they may kill instances, and which are cleared."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from stretto.core import messages as core
from stretto.errors import EngineError
from stretto.run.quarantine import MARGIN, QUARANTINE_AFTER, Quarantine

GONE = EngineError("gone")


def three() -> tuple[Quarantine, dict[int, Any], list[core.Event]]:
    """Three trajectories that have lost as many instances as it takes to be quarantined, at 100 tokens."""
    rollouts: dict[int, Any] = {id: SimpleNamespace(id=id, losses=0, lost_at=0) for id in range(3)}
    posted: list[core.Event] = []
    quarantine = Quarantine(rollouts, posted.append)
    for number in range(QUARANTINE_AFTER):
        quarantine.note_loss(number, GONE, {0: 100, 1: 80, 2: 60 + number})
    return quarantine, rollouts, posted


async def ran(quarantine: Quarantine, rollout: Any, running: list[int], ends: asyncio.Event) -> None:
    async with quarantine.generating(rollout):
        running.append(rollout.id)
        await ends.wait()


def test_quarantined_rollouts_run_one_at_a_time_until_one_is_past_the_token_at_which_instances_were_lost() -> None:
    async def main() -> None:
        quarantine, rollouts, _ = three()
        running: list[int] = []
        ends = [asyncio.Event() for _ in rollouts]
        tasks = [asyncio.create_task(ran(quarantine, rollouts[id], running, ends[id])) for id in rollouts]
        await asyncio.sleep(0.01)
        assert running == [0]
        quarantine.note_progress({0: 100 + MARGIN})
        await asyncio.sleep(0.01)
        assert running == [0], "that may be no further than what was not heard of"
        quarantine.note_progress({0: 101 + MARGIN})
        await asyncio.sleep(0.01)
        assert running == [0, 1], "it runs on, as any other"
        assert rollouts[0].losses == 0
        ends[1].set()
        await asyncio.sleep(0.01)
        assert running == [0, 1, 2]
        assert rollouts[1].losses == 0, "it has got to its end"
        for each in ends:
            each.set()
        await asyncio.gather(*tasks)

    asyncio.run(main())


def test_a_loss_under_a_quarantined_rollout_is_its_failure_and_the_next_one_runs() -> None:
    async def main() -> None:
        quarantine, rollouts, posted = three()

        async def dies() -> None:
            async with quarantine.generating(rollouts[0]):
                quarantine.note_loss(9, GONE, {0: 90, 1: 1})
                raise GONE

        with pytest.raises(EngineError):
            await dies()
        (failed,) = posted
        assert isinstance(failed, core.GenerationFailed)
        assert (failed.trajectory, failed.instance) == (0, 9)
        assert rollouts[0].losses == rollouts[1].losses == QUARANTINE_AFTER + 1
        assert rollouts[0].lost_at == 100
        async with quarantine.generating(rollouts[1]):
            pass
        quarantine.note_failure(rollouts[0])
        assert [rollout.losses for rollout in rollouts.values()] == [0, 0, 0]

    asyncio.run(main())


def test_one_that_is_not_quarantined_is_not_the_cause_and_clears_no_other() -> None:
    quarantine, rollouts, posted = three()
    rollouts[2].losses = 1
    quarantine.note_failure(rollouts[2])
    assert rollouts[0].losses == QUARANTINE_AFTER
    quarantine.note_loss(9, GONE, {2: 5})
    assert posted == []
