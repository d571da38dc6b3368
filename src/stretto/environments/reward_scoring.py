"""Scores completions with all rewards of a task, in a worker process or in a thread of the driver.

Batched rewards are called first, each with as many completions as have arrived together. A batch that raises, is late
or returns anything but one value for each completion is tried again, one completion at a time: one that is bad fails
alone. Then the other rewards are called with one completion after another or, if any reward is `async`, all at once.

A completion has the values of all rewards, or one error: that of the first reward that failed.

Imports only the standard library: reward workers load this module.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

from stretto.environments.function_specs import SpecError
from stretto.environments.reward_calls import Asked, Columns, Details, RewardCall, RewardSpec, late_text
from stretto.environments.reward_pipes import Item, Result
from stretto.environments.worker_child import marked

IN_BATCH = -2  # the mark of a call with several completions
Mark = Callable[[int], None]
"""Is told the id of the completion that is scored from now on, or `IN_BATCH`."""
Left = Callable[[BaseException | None], None]
"""Is told that the user's code has returned, or what it raised."""


def make_calls(
    specs: Sequence[RewardSpec],
    columns: Columns | None,
    functions: Mapping[str, Callable[..., Any]] | None = None,
    *,
    note: Callable[[str], None] | None = None,
) -> list[RewardCall]:
    """Makes the rewards of a task; `functions` has those that need no import, by name. Raises `SpecError`.

    `note` is told what a judge or a reward model waits for.
    """
    given, calls = functions or {}, []
    for spec in specs:
        try:
            function = given[spec.name] if spec.name in given else spec.make(columns, note)
            calls.append(RewardCall(spec, function, columns if spec.built is None else None))
        except SpecError as error:
            if not spec.name or spec.built is not None:
                raise
            raise SpecError(f"the reward `{spec.name}`, `{spec.target}`: {error}") from error
    return calls


def _details(item: Item) -> Details | None:
    return item[4]


class PlainScoring:
    """Scores with functions that are not `async`."""

    def __init__(self, calls: Sequence[RewardCall], *, mark: Mark, left: Left, done: Callable[[Result], None]) -> None:
        """`done` gets each result."""
        self._calls = calls
        self._batched = [(place, call) for place, call in enumerate(calls) if call.batched]
        self._single = [(place, call) for place, call in enumerate(calls) if not call.batched]
        self._mark = mark
        self._left = left
        self._done = done

    def score(self, items: Sequence[Item]) -> None:
        """Scores completions that have arrived together."""
        scores: dict[int, list[float]] = {item[0]: [0.0] * len(self._calls) for item in items}
        errors: dict[int, str] = {}
        for place, call in self._batched:
            alive = [item for item in items if item[0] not in errors] if errors else items
            for chunk in call.chunks(alive, _details):
                for identity, outcome in self._score_batch(call, chunk):
                    if isinstance(outcome, str):
                        errors[identity] = outcome
                    else:
                        scores[identity][place] = outcome
        for item in items:
            identity = item[0]
            error = errors.get(identity) if errors else None
            if error is None:
                error = self._score_single(item, scores[identity])
            self._done((identity, tuple(scores[identity]), None) if error is None else (identity, None, error))

    def _score_single(self, item: Item, scores: list[float]) -> str | None:
        """Fills in the rewards of the single form. Returns the error of the first that fails."""
        for place, call in self._single:
            self._mark(item[0])
            try:
                value = call.call(item[1:])
            except BaseException as error:  # also `sys.exit()`: the reward fails, not the process
                self._left(error)
                return call.failure(error, [item[1:]])
            self._left(None)
            outcome = _number(call, value)
            if isinstance(outcome, str):
                return outcome
            scores[place] = outcome
        return None

    def _score_batch(self, call: RewardCall, chunk: Sequence[Item]) -> list[tuple[int, float | str]]:
        self._mark(chunk[0][0] if len(chunk) == 1 else IN_BATCH)
        try:
            returned = call.call_batch([item[1:] for item in chunk])
        except BaseException as error:
            self._left(error)
            return self._one_by_one(call, chunk, call.failure(error, [item[1:] for item in chunk]))
        self._left(None)
        try:
            values = call.values(returned, len(chunk))
        except Exception as error:
            return self._one_by_one(call, chunk, call.failure(error))
        return [(item[0], _number(call, value)) for item, value in zip(chunk, values, strict=True)]

    def _one_by_one(self, call: RewardCall, chunk: Sequence[Item], reason: str) -> list[tuple[int, float | str]]:
        """Scores a batch that failed again. One that has a single completion has failed for this reason."""
        if len(chunk) == 1:
            return [(chunk[0][0], reason)]
        return [outcome for item in chunk for outcome in self._score_batch(call, [item])]


def _number(call: RewardCall, value: Any) -> float | str:
    """Returns a value as a number, or why it is no reward."""
    try:
        return call.number(value)
    except Exception as error:
        return call.failure(error)


_Share = Callable[[], Awaitable[float | str]]  # begins to compute one reward of a completion


class AsyncScoring:
    """Scores with functions of which one or more are `async`, on the running event loop."""

    def __init__(
        self,
        calls: Sequence[RewardCall],
        *,
        deadline_s: float,
        mark: Mark,
        left: Left,
        done: Callable[[Result], None],
    ) -> None:
        """`done` gets each result. Every `async` call is cancelled after `deadline_s`."""
        self._calls = calls
        self._deadline_s = deadline_s
        self._mark = mark
        self._left = left
        self._done = done
        self._tasks: set[asyncio.Task[Any]] = set()

    def begin(self, items: Sequence[Item]) -> None:
        """Starts to score completions that have arrived together."""
        shares: dict[int, list[_Share]] = {item[0]: [] for item in items}
        for call in self._calls:
            if call.batched:
                for chunk in call.chunks(items, _details):
                    batch = self._start(self._batch(call, chunk), f"rewards of {len(chunk)} completions")
                    for item in chunk:
                        shares[item[0]].append(partial(_share, batch, item[0]))
            else:
                for item in items:
                    shares[item[0]].append(partial(self._single, call, item))
        for identity, own in shares.items():
            self._start(self._finish(identity, own), f"reward {identity}")

    def cancel(self) -> None:
        """Cancels all that is not done."""
        for task in self._tasks:
            task.cancel()

    def _start(self, work: Any, name: str) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _finish(self, identity: int, shares: Sequence[_Share]) -> None:
        outcomes = [await shares[0]()] if len(shares) == 1 else await asyncio.gather(*(share() for share in shares))
        scores = tuple(outcome for outcome in outcomes if not isinstance(outcome, str))
        error = next((outcome for outcome in outcomes if isinstance(outcome, str)), None)
        self._done((identity, scores, None) if error is None else (identity, None, error))

    async def _single(self, call: RewardCall, item: Item) -> float | str:
        try:
            return call.number(await self._called(call, lambda: call.call(item[1:]), item[0]))
        except BaseException as error:
            return self._failure(call, error, [item[1:]])

    async def _batch(self, call: RewardCall, chunk: Sequence[Item]) -> dict[int, float | str]:
        alone, asked = len(chunk) == 1, [item[1:] for item in chunk]
        try:
            returned = await self._called(call, lambda: call.call_batch(asked), chunk[0][0] if alone else IN_BATCH)
            values = call.values(returned, len(chunk))
        except BaseException as error:
            if alone:
                return {chunk[0][0]: self._failure(call, error, asked)}
            parts = await asyncio.gather(*(self._batch(call, [item]) for item in chunk))
            return {identity: outcome for part in parts for identity, outcome in part.items()}
        return {item[0]: _number(call, value) for item, value in zip(chunk, values, strict=True)}

    async def _called(self, call: RewardCall, begin: Callable[[], Any], mark: int) -> Any:
        """Calls a reward and awaits it if it is `async`. Raises `_LateError` if it is late."""
        if not call.asynchronous:
            self._mark(mark)
            try:
                returned = begin()
            except BaseException as error:
                self._left(error)
                raise
            self._left(None)
            return returned
        try:
            async with asyncio.timeout(self._deadline_s) as limit:
                return await marked(begin(), lambda: self._mark(mark), self._left)
        except TimeoutError as error:
            if limit.expired():
                raise _LateError from error
            raise

    def _failure(self, call: RewardCall, error: BaseException, asked: Sequence[Asked]) -> str:
        if isinstance(error, _LateError):
            return late_text([call.spec], self._deadline_s)
        return call.failure(error, asked)


class _LateError(Exception):
    """A call was cancelled at its deadline."""


async def _share(batch: asyncio.Task[dict[int, float | str]], identity: int) -> float | str:
    return (await batch)[identity]
