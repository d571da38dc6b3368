"""Who is suspected to kill instances, and who is cleared of it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from stretto.core import messages as core
from stretto.errors import EngineError
from stretto.suspects import LOSSES, PAST, Suspects

GONE = EngineError("gone")


def three() -> tuple[Suspects, dict[int, Any], list[core.Event]]:
    """Three trajectories that have lost as many instances as make suspects of them, at 100 tokens."""
    flights: dict[int, Any] = {id: SimpleNamespace(id=id, losses=0, lost_at=0) for id in range(3)}
    posted: list[core.Event] = []
    suspects = Suspects(flights, posted.append)
    for number in range(LOSSES):
        suspects.lost(number, GONE, {0: 100, 1: 80, 2: 60 + number})
    return suspects, flights, posted


async def ran(suspects: Suspects, flight: Any, running: list[int], ends: asyncio.Event) -> None:
    async with suspects.alone(flight):
        running.append(flight.id)
        await ends.wait()


def test_suspects_run_one_at_a_time_until_one_is_past_the_token_at_which_instances_were_lost() -> None:
    async def main() -> None:
        suspects, flights, _ = three()
        running: list[int] = []
        ends = [asyncio.Event() for _ in flights]
        tasks = [asyncio.create_task(ran(suspects, flights[id], running, ends[id])) for id in flights]
        await asyncio.sleep(0.01)
        assert running == [0]
        suspects.seen({0: 100 + PAST})
        await asyncio.sleep(0.01)
        assert running == [0], "that may be no further than what was not heard of"
        suspects.seen({0: 101 + PAST})
        await asyncio.sleep(0.01)
        assert running == [0, 1], "it runs on, as any other"
        assert flights[0].losses == 0
        ends[1].set()
        await asyncio.sleep(0.01)
        assert running == [0, 1, 2]
        assert flights[1].losses == 0, "it has got to its end"
        for each in ends:
            each.set()
        await asyncio.gather(*tasks)

    asyncio.run(main())


def test_the_loss_under_a_suspect_is_its_own_failure_and_it_lets_the_next_one_run() -> None:
    async def main() -> None:
        suspects, flights, posted = three()

        async def dies() -> None:
            async with suspects.alone(flights[0]):
                suspects.lost(9, GONE, {0: 90, 1: 1})
                raise GONE

        with pytest.raises(EngineError):
            await dies()
        (failed,) = posted
        assert isinstance(failed, core.GenerationFailed)
        assert (failed.trajectory, failed.instance) == (0, 9)
        assert flights[0].losses == flights[1].losses == LOSSES + 1
        assert flights[0].lost_at == 100
        async with suspects.alone(flights[1]):
            pass
        suspects.failed_for_good(flights[0])
        assert [flight.losses for flight in flights.values()] == [0, 0, 0]

    asyncio.run(main())


def test_one_that_is_no_suspect_is_not_the_reason_and_clears_nobody() -> None:
    suspects, flights, posted = three()
    flights[2].losses = 1
    suspects.failed_for_good(flights[2])
    assert flights[0].losses == LOSSES
    suspects.lost(9, GONE, {2: 5})
    assert posted == []
