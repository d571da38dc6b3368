"""The fake beyond the contract: failures on demand, and lengths with a tail."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from stretto.engines.fake import FakeEngine
from stretto.errors import EngineError, RequestError
from stretto.types import Request, Sampling, Weights

WEIGHTS = Weights(0, "lora", {}, "none")


def request_of(number: int, tokens: int = 1000) -> Request:
    return Request(number, 0, (1, 2, 3), number, Sampling(tokens, stop_tokens=(7,)))


def test_lengths_have_a_long_tail_and_end_with_the_stop_token() -> None:
    async def main() -> None:
        engine = FakeEngine(rows=512, median_tokens=20.0, sigma=1.0)
        await engine.load(WEIGHTS)
        done = await asyncio.gather(*(engine.generate(request_of(i)) for i in range(500)))
        lengths = np.array([len(c.tokens) for c in done])
        assert 16 < np.median(lengths) < 25
        assert lengths.max() > 150
        assert all(c.tokens[-1] == 7 and 7 not in c.tokens[:-1] for c in done if c.finish == "stop")
        await engine.close()

    asyncio.run(main())


def test_a_request_fails_as_often_as_it_was_told_to() -> None:
    async def main() -> None:
        engine = FakeEngine(failures={5: 2})
        await engine.load(WEIGHTS)
        for _ in range(2):
            with pytest.raises(RequestError, match="request 5"):
                await engine.generate(request_of(5))
        assert (await engine.generate(request_of(5))).id == 5
        await engine.close()

    asyncio.run(main())


def test_an_engine_that_dies_takes_every_call_with_it() -> None:
    async def main() -> None:
        engine = FakeEngine(die_after=10, median_tokens=500.0, sigma=0.0)
        await engine.load(WEIGHTS)
        ended = await asyncio.gather(*(engine.generate(request_of(i)) for i in range(9)), return_exceptions=True)
        assert all(isinstance(e, EngineError) and e.__cause__ is not None for e in ended)
        with pytest.raises(EngineError, match="die after 10 steps"):
            await engine.generate(request_of(20))
        with pytest.raises(EngineError):
            await engine.load(Weights(1, "lora", {}, "none"))
        await engine.close()

    asyncio.run(main())
