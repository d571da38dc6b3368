"""Evaluations before and after a run survive the instance that makes them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from stretto.engines.fake import FakeEngine
from stretto.errors import ChecksumError, EngineError, RequestError
from stretto.observe.progress import Silent
from stretto.run.idle_evaluation import evaluate_alone
from stretto.run.protocols import FixedPool
from stretto.training.fake import FakeTrainer
from stretto.types import Completion, Request, Sampling


class Asks:
    """An evaluator that asks once, and a tally and an observer that remember."""

    def __init__(self, reward_s: float = 0.0) -> None:
        self.answers: list[Any] = []
        self.said: list[str] = []
        self._reward_s = reward_s

    num_ended = 0
    num_answers = 8

    async def evaluate(self, engine: Any, version: int, moment: str, checksum: str) -> Any:
        completion = await engine.generate(Request(-1, version, (1, 2), 0, Sampling(4)))
        await asyncio.sleep(self._reward_s)
        return completion

    def record(self, result: Any, line: Any) -> None:
        self.answers.append(result)

    def evaluated(self, result: Any) -> None:
        return None


class Heard(Silent):
    def __init__(self, said: list[str]) -> None:
        self.said = said

    def message(self, text: str) -> None:
        self.said.append(text)


def evaluate(engines: list[FakeEngine], *, closed: int = 0, takes_s: float = 0.0, reward_s: float = 0.0) -> Asks:
    """Evaluates with `engines`, of which the first `closed` are dead; a reward takes `takes_s`, and may `reward_s`."""
    asks = Asks(takes_s)
    pool = FixedPool(dict(enumerate(engines)))

    async def main() -> None:
        for engine in engines[:closed]:
            await engine.close()
        try:
            await evaluate_alone(
                pool,
                asks,  # type: ignore[arg-type]
                FakeTrainer().weights(0),
                "before",
                instance_s=0.3,
                reward_s=reward_s,
                tally=asks,  # type: ignore[arg-type]
                observer=Heard(asks.said),
            )
            assert asyncio.all_tasks() == {asyncio.current_task()}, "nothing watches any more"
        finally:
            await pool.close()

    asyncio.run(main())
    return asks


def test_another_instance_evaluates_if_one_is_lost() -> None:
    asks = evaluate([FakeEngine(), FakeEngine()], closed=1)
    assert len(asks.answers) == 1
    assert len(asks.said) == 1
    assert asks.said[0].startswith("instance 0 was lost while it evaluated")


class Hangs(FakeEngine):
    async def load(self, weights: Any) -> None:
        await asyncio.Event().wait()


class Refuses(FakeEngine):
    async def load(self, weights: Any) -> None:
        raise RequestError("no slot")


class Damages(FakeEngine):
    async def load(self, weights: Any) -> None:
        raise ChecksumError("other bits")


class Swallows(FakeEngine):
    """Takes a request and never answers, nor reports it."""

    async def generate(self, request: Request) -> Completion:
        await asyncio.Event().wait()
        raise AssertionError


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Hangs, "it has not answered `load` for 0.3 s (`runtime.instance_seconds`)"),
        (Refuses, "it answered `load` with RequestError: no slot"),
        (Damages, "version 0 arrived damaged: other bits"),
        (Swallows, "has made no progress for 0.3 s (`runtime.instance_seconds`)"),
    ],
)
def test_another_instance_evaluates_if_one_hangs_or_refuses(kind: type[FakeEngine], said: str) -> None:
    asks = evaluate([kind(), FakeEngine()])
    assert len(asks.answers) == 1
    assert said in asks.said[0]


def test_an_instance_may_be_idle_for_as_long_as_a_reward_may_take() -> None:
    asks = evaluate([FakeEngine(), FakeEngine()], takes_s=0.6, reward_s=2.0)
    assert (len(asks.answers), asks.said) == (1, [])
    with pytest.raises(EngineError, match="there is no other instance"):
        evaluate([FakeEngine()], takes_s=5.0, reward_s=0.1)


def test_the_last_try_raises_what_went_wrong() -> None:
    with pytest.raises(EngineError, match="no slot"):
        evaluate([Refuses(), Refuses(), Refuses(), FakeEngine()])


def test_it_says_so_if_no_instance_is_left_and_none_can_be_made() -> None:
    with pytest.raises(EngineError, match="there is no other instance"):
        evaluate([FakeEngine()], closed=1)


def test_a_long_evaluation_tells_its_progress_ever_more_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stretto.run.idle_evaluation.FIRST_TOLD_S", 0.05)
    asks = evaluate([FakeEngine()], takes_s=0.25, reward_s=5.0)
    assert asks.said == ["evaluating version 0: 0 of 8 answers"] * 2, "after 0.05 and 0.15 s, and not after 0.1"
