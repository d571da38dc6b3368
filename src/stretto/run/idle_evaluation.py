"""Evaluation while nothing else runs: of the first version before the run, and of the last one after it.

The loop evaluates the versions between these two (`run/evaluation.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from stretto.engines.protocol import Engine
from stretto.errors import EngineError
from stretto.observe.metrics import Tally
from stretto.observe.progress import Observer
from stretto.run.evaluation import Evaluator
from stretto.run.instance import Instance, unload_all, watch_progress
from stretto.run.protocols import Pool
from stretto.run.version_loader import send
from stretto.types import EvaluationResult, Moment, Weights, WeightsRef

TRIES = 3  # of one evaluation, each on another instance
FIRST_TOLD_S, LAST_TOLD_S = 20.0, 320.0  # between two messages on its progress; each wait is twice the one before


async def evaluate_alone(
    pool: Pool,
    evaluator: Evaluator,
    weights: Weights | WeightsRef,
    moment: Moment,
    *,
    instance_s: float,
    reward_s: float,
    tally: Tally,
    observer: Observer,
) -> None:
    """Evaluates `weights` on an instance of the pool; if that is lost, on another one. Raises `EngineError` at last.

    `instance_s`: for an instance that makes no progress. `reward_s`: how much longer an instance may have nothing to
    do, as rewards have a deadline that counts apart.
    """
    for attempt in range(TRIES):
        id, engine = next(iter(pool.engines.items()), None) or await pool.add()
        try:
            async with _told(evaluator, weights.version, observer):
                result = await _evaluate_on(id, engine, evaluator, weights, moment, instance_s, reward_s)
            break
        except EngineError as error:
            await pool.remove(id)
            if attempt + 1 == TRIES:
                raise
            observer.message(f"instance {id} was lost while it evaluated: {error}; another does it")
    evaluator.record(result, tally.evaluated(result))
    observer.evaluated(result)


@contextlib.asynccontextmanager
async def _told(evaluator: Evaluator, version: int, observer: Observer) -> AsyncIterator[None]:
    """Has the observer say every now and then how many answers there are."""
    before, answers = evaluator.num_ended, evaluator.num_answers

    async def tell() -> None:
        wait_s = FIRST_TOLD_S
        while True:
            await asyncio.sleep(wait_s)
            observer.message(f"evaluating version {version}: {evaluator.num_ended - before} of {answers} answers")
            wait_s = min(2 * wait_s, LAST_TOLD_S)

    telling = asyncio.create_task(tell(), name=f"tell the progress of evaluating version {version}")
    try:
        yield
    finally:
        telling.cancel()
        (ended,) = await asyncio.gather(telling, return_exceptions=True)
        if isinstance(ended, Exception):  # what it says could not be said; a cancellation is no `Exception`
            raise ended


async def _evaluate_on(
    id: int,
    engine: Engine,
    evaluator: Evaluator,
    weights: Weights | WeightsRef,
    moment: Moment,
    instance_s: float,
    reward_s: float,
) -> EvaluationResult:
    """One try. Raises `EngineError` if the instance is late, makes no progress, or refuses something."""
    instance = Instance(id, engine, deadline_s=instance_s)

    def check(now: float, held_up_s: float) -> None:
        error = instance.check_progress(now, held_up_s, also=evaluator.num_ended, idle_s=reward_s)
        if error is not None and not instance.is_gone:
            instance.end(error)

    watching = asyncio.create_task(watch_progress(check, instance_s), name=f"watch the evaluation {moment}")
    try:
        await instance.call_in_order("unload", unload_all)

        async def load() -> None:
            receipt = await instance.call_in_order("load", lambda engine: engine.load(weights))
            if receipt is not None:
                evaluator.record_receipt(id, receipt)

        await send(weights, load, lambda kind, text: None)
        result = await instance.call(
            lambda engine: evaluator.evaluate(engine, weights.version, moment, weights.checksum)
        )
        await instance.call_in_order("unload", lambda engine: engine.unload(weights.version))
        return result
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
