"""Evaluations before and after a run survive the instance that makes them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from stretto.engines.fake import FakeEngine
from stretto.errors import EngineError, RequestError
from stretto.observe.progress import Silent
from stretto.runtime.pool import FixedPool
from stretto.runtime.run import _evaluate_alone
from stretto.training.fake import FakeTrainer
from stretto.types import Request, Sampling


class Asks:
    """An evaluator that asks once, and a tally and an observer that remember."""

    def __init__(self) -> None:
        self.answers: list[Any] = []
        self.said: list[str] = []

    num_ended = 0

    async def evaluate(self, engine: Any, version: int, moment: str, checksum: str) -> Any:
        return await engine.generate(Request(-1, version, (1, 2), 0, Sampling(4)))

    def record(self, result: Any, line: Any) -> None:
        self.answers.append(result)

    def evaluated(self, result: Any) -> None:
        return None


class Heard(Silent):
    def __init__(self, said: list[str]) -> None:
        self.said = said

    def message(self, text: str) -> None:
        self.said.append(text)


def evaluate(engines: list[FakeEngine], closed: int) -> tuple[Asks, FixedPool]:
    asks = Asks()
    pool = FixedPool(dict(enumerate(engines)))

    async def main() -> None:
        for engine in engines[:closed]:
            await engine.close()
        try:
            await _evaluate_alone((0.3, 0.0), asks, pool, FakeTrainer().weights(0), "before", asks, Heard(asks.said))  # type: ignore[arg-type]
        finally:
            await pool.close()

    asyncio.run(main())
    return asks, pool


def test_another_instance_evaluates_where_one_is_lost() -> None:
    asks, _ = evaluate([FakeEngine(), FakeEngine()], closed=1)
    assert len(asks.answers) == 1
    assert len(asks.said) == 1
    assert asks.said[0].startswith("instance 0 was lost while it evaluated")


def test_another_instance_evaluates_where_one_hangs_or_refuses() -> None:
    class Hangs(FakeEngine):
        async def load(self, weights: Any) -> None:
            await asyncio.Event().wait()

    class Refuses(FakeEngine):
        async def load(self, weights: Any) -> None:
            raise RequestError("no slot")

    asks, _ = evaluate([Hangs(), Refuses(), FakeEngine()], closed=0)
    assert len(asks.answers) == 1
    assert "it made no progress for 0.3 s (`runtime.instance_seconds`)" in asks.said[0]
    assert "it refused version 0: no slot" in asks.said[1]


def test_where_no_instance_is_left_and_none_can_be_made_it_says_so() -> None:
    with pytest.raises(EngineError, match="there is no other instance"):
        evaluate([FakeEngine()], closed=1)
