"""Calls from the driver to an actor, over a line that loses some of them. No cluster is needed."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from call_cases import Line

import stretto.cluster.actor_calls as module
from stretto.cluster.actor_calls import ActorCalls, CallServer
from stretto.errors import EngineError, RequestError


@pytest.fixture(autouse=True)
def ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "kill", lambda line: setattr(line, "ended", True))
    monkeypatch.setattr(module, "RETRY_S", 0.001)


def counting() -> tuple[CallServer, list[int]]:
    done: list[int] = []

    async def add(number: int) -> int:
        done.append(number)
        await asyncio.sleep(0.001 * (number % 3))
        if number % 10 == 9:
            raise RequestError(f"{number} is refused")
        return 2 * number

    return CallServer({"add": add}, status=lambda: len(done), report_s=0.005, idle_s=0.02), done


@pytest.mark.parametrize("lossy", [0.0, 0.3])
def test_every_call_is_done_once_and_in_order_and_answered_whatever_gets_lost(lossy: float) -> None:
    async def main() -> None:
        served, done = counting()
        line, heard = Line(served, lossy), list[int]()
        remote = ActorCalls(line, "it", deadline_s=20.0, on_status=heard.append)
        answers = await asyncio.gather(*(remote.call("add", n) for n in range(60)), return_exceptions=True)
        for number, answer in enumerate(answers):
            if number % 10 == 9:
                assert isinstance(answer, RequestError)
                assert str(answer) == f"{number} is refused"
            else:
                assert answer == 2 * number
        assert done == list(range(60))
        assert await remote.call("add", 60) == 120
        assert heard[-1] == 61
        await remote.close()
        assert line.ended
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())


def test_what_is_asked_for_in_one_turn_goes_out_as_one_message() -> None:
    async def main() -> None:
        served, _ = counting()
        line, sizes = Line(served), list[int]()
        deliver = served.deliver
        served.deliver = lambda messages: (sizes.append(len(messages)), deliver(messages))[1]  # type: ignore[method-assign]
        remote = ActorCalls(line, "it", deadline_s=5.0)
        await asyncio.gather(*(remote.call("add", n) for n in range(8)))
        assert sizes == [8]
        await remote.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("fault", "said"),
    [({"hangs": True}, "not answered for 0.3 s"), ({"dead": True}, "has died"), ({"lossy": 1.0}, "be reached for")],
)
def test_an_actor_that_hangs_dies_or_cannot_be_reached_is_lost_within_its_deadline(
    fault: dict[str, Any], said: str
) -> None:
    async def main() -> None:
        served, _ = counting()
        line = Line(served)
        remote = ActorCalls(line, "it", deadline_s=0.3)
        assert await remote.call("add", 1) == 2
        for name, value in fault.items():
            setattr(line, name, value)
        with pytest.raises(EngineError, match=said):
            await asyncio.wait_for(remote.call("add", 2, bounded=False), 5.0)
        with pytest.raises(EngineError, match=said):
            await remote.call("add", 3)
        assert line.ended
        await remote.close()

    asyncio.run(main())


def test_a_call_that_takes_too_long_loses_the_actor_unless_it_may_take_long() -> None:
    async def main() -> None:
        served = CallServer({"sleep": asyncio.sleep}, status=lambda: None, report_s=0.01, idle_s=0.01)
        remote = ActorCalls(Line(served), "it", deadline_s=0.2)
        await remote.call("sleep", 0.5, bounded=False)
        with pytest.raises(EngineError, match=r"`sleep` has not ended after 0\.2 s"):
            await remote.call("sleep", 5.0)
        await remote.close()

    asyncio.run(main())
