"""Calls to one Ray actor that are never lost, never done twice and never waited for without a deadline.

    driver: ActorCalls                                          actor: CallServer
    call() -> outbox --deliver(numbered messages)-->  begun in the order of their numbers, each once
    future <---------- collect(acknowledged) <------  answers, kept until they are acknowledged; status

All calls of one turn of the driver's event loop go out as one message, and one pending `collect` brings back all
answers since the last one. So a call costs the driver a share of two remote calls, however long it takes. If a message
or an answer is lost on its way (`ActorUnavailableError`), it is sent again under the same number, and the actor does
not do it again.

`collect` is the heartbeat too. An actor that has died, or that has not answered for `deadline_s`, is lost: every
pending call raises, and so does every later one. A killed machine shows as unavailable first and as dead only later;
either ends the wait.

Plain Ray calls, one for each call, done once because of their ids, with a pending `status` as heartbeat, were measured
against this: 1.52 ms of the driver's processor time for a trajectory instead of 1.05 (`bench/ray_driver.py`, four
instances on two cores, means of three runs each), and 28 lines less. They also begin calls in another order if one has
to be sent again. So the numbered messages stay.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayError, RayTaskError

from stretto.errors import EngineError, StrettoError, describe, first_line

log = logging.getLogger(__name__)

IDLE_S = 5.0  # between two answers of an actor that has nothing to report, at most
HEARTBEATS = 3  # answers within the deadline, at least
RETRY_S = 0.25  # before something is sent again to an actor that could not be reached


@dataclass(frozen=True, slots=True)
class Message:
    """One call. Numbers are consecutive, from 0."""

    number: int
    name: str
    arguments: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of one call, or its error."""

    number: int
    value: Any
    error: BaseException | None


class CallServer:
    """The actor's side: begins calls in order, each in its own task. Made inside an asyncio actor.

    `handlers` are coroutine functions by name. Every `collect` returns `status()` beside the answers: every `report_s`
    while a call runs, and every `idle_s` otherwise.
    """

    def __init__(
        self,
        handlers: Mapping[str, Callable[..., Coroutine[Any, Any, Any]]],
        *,
        status: Callable[[], Any],
        report_s: float,
        idle_s: float,
    ) -> None:
        self._handlers = handlers
        self._status = status
        self._report_s = min(report_s, idle_s)
        self._idle_s = idle_s
        self._next = 0
        self._early: dict[int, Message] = {}  # arrived before one with a smaller number
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._answers: dict[int, Answer] = {}
        self._changed = asyncio.Event()

    def deliver(self, messages: Sequence[Message]) -> None:
        """Begins the calls that were not begun before. A message that arrives twice is recognised by its number."""
        self._early.update({message.number: message for message in messages if message.number >= self._next})
        while (message := self._early.pop(self._next, None)) is not None:
            self._next += 1
            # Tasks start in the order in which they are made, so an engine gets its calls in order.
            self._tasks[message.number] = asyncio.create_task(self._do(message), name=message.name)
        self._changed.set()

    async def _do(self, message: Message) -> None:
        try:
            answer = Answer(message.number, await self._handlers[message.name](*message.arguments), None)
        except Exception as error:
            answer = Answer(message.number, None, _portable(error))
        self._answers[message.number] = answer
        del self._tasks[message.number]
        self._changed.set()

    async def collect(self, acknowledged: Sequence[int]) -> tuple[list[Answer], Any]:
        """Forgets the acknowledged answers, waits a while for a new one, and returns all others and the status."""
        for number in acknowledged:
            self._answers.pop(number, None)
        if not self._answers and not self._tasks:
            await self._wait_for_change(self._idle_s)
        if not self._answers and self._tasks:
            await self._wait_for_change(self._report_s)
        return list(self._answers.values()), self._status()

    async def _wait_for_change(self, wait_s: float) -> None:
        """Waits until a call has begun or ended, or for `wait_s`."""
        self._changed.clear()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), wait_s)


class ServingActor:
    """The two methods of an actor that `ActorCalls` uses. A subclass sets `_server` before the first call."""

    _server: CallServer

    async def deliver(self, messages: Sequence[Message]) -> None:
        """Takes calls from the driver."""
        self._server.deliver(messages)

    async def collect(self, acknowledged: Sequence[int]) -> tuple[list[Answer], Any]:
        """Hands answers and status to the driver."""
        return await self._server.collect(acknowledged)


def idle_seconds(deadline_s: float) -> float:
    """Returns how long an actor may report nothing, if it is lost after `deadline_s` without an answer."""
    return min(IDLE_S, deadline_s / HEARTBEATS)


def _portable(error: Exception) -> Exception:
    """Returns the same error if it survives pickling, else one of ours with its text."""
    return error if isinstance(error, StrettoError) else EngineError(describe(error))


class ActorCalls:
    """The driver's side of one actor, for one event loop.

    `make_error` makes the error that pending and later calls raise once the actor is lost. `on_status` gets every
    status.
    """

    def __init__(
        self,
        actor: Any,
        name: str,
        *,
        deadline_s: float,
        on_status: Callable[[Any], None] = lambda status: None,
        make_error: Callable[[str], StrettoError] = EngineError,
    ) -> None:
        self.actor = actor
        self.failure: StrettoError | None = None  # why the actor is lost or closed
        self._name = name
        self._deadline_s = deadline_s
        self._on_status = on_status
        self._make_error = make_error
        self._numbers = 0
        self._outbox: list[Message] = []
        self._pending: dict[int, asyncio.Future[Any]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._collecting = False

    async def call(self, name: str, *arguments: Any, bounded: bool = True) -> Any:
        """Has the actor do something, and returns the result.

        With `bounded` the actor is lost if the call takes longer than the deadline. Without, it is lost only if it
        stops answering, so the caller has to watch the status.
        """
        future = self.begin(name, *arguments)
        if not bounded:
            return await future
        done, _ = await asyncio.wait({future}, timeout=self._deadline_s)
        if not done:
            self.lose(f"`{name}` has not ended after {self._deadline_s:g} s (`runtime.instance_seconds`)")
        return await future

    def begin(self, name: str, *arguments: Any) -> asyncio.Future[Any]:
        """Sends a call on its way; a later one is begun later. Cancelling the future does not undo it."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if self.failure is not None:
            future.set_exception(self._new_failure())
            return future
        if not self._outbox:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outbox.append(Message(self._numbers, name, arguments))
        self._pending[self._numbers] = future
        self._numbers += 1
        if not self._collecting:
            self._collecting = True
            self._spawn(self._collect(), f"{self._name}: answers")
        return future

    @staticmethod
    def ignore(future: asyncio.Future[Any]) -> None:
        """Marks a call whose result nobody waits for, so that asyncio does not complain about its error."""
        future.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def await_result(self, reference: Any, name: str) -> Any:
        """Returns the result of a plain Ray call to the actor, by the same deadline. `name` says what it is."""
        try:
            return await asyncio.wait_for(reference, self._deadline_s)
        except (RayError, TimeoutError) as error:
            self.lose(f"did not hand over {name}: {type(error).__name__}: {first_line(error)}")
            raise self._new_failure() from error

    def lose(self, why: str) -> None:
        """Gives the actor up: kills its process, and raises `why` from every pending and later call."""
        if self.failure is not None:
            return
        self.failure = self._make_error(f"{self._name} {why}")
        pending, self._pending = self._pending, {}
        for future in pending.values():
            if not future.done():
                future.set_exception(self._new_failure())
                self.ignore(future)
        self._outbox.clear()
        kill(self.actor)

    async def close(self, why: str = "is closed") -> None:
        """Ends the actor. Safe to call twice, and after it was lost."""
        self.lose(why)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _new_failure(self) -> StrettoError:
        """Returns another exception for each caller, because each gets a traceback."""
        assert self.failure is not None
        return type(self.failure)(str(self.failure))

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.lose(f"cannot be talked to: {type(error).__name__}: {error}")

    def _flush(self) -> None:
        messages, self._outbox = self._outbox, []
        if messages:
            self._spawn(self._deliver(messages), f"{self._name}: messages")

    async def _deliver(self, messages: list[Message]) -> None:
        await self._reach(self.actor.deliver, messages)

    async def _collect(self) -> None:
        acknowledged: list[int] = []
        while True:
            answers, status = await self._reach(self.actor.collect, acknowledged)
            if self.failure is not None:
                return
            self._on_status(status)
            acknowledged = [answer.number for answer in answers]
            for answer in answers:
                future = self._pending.pop(answer.number, None)
                if future is None or future.done():
                    continue
                if answer.error is None:
                    future.set_result(answer.value)
                else:
                    future.set_exception(answer.error)

    async def _reach(self, method: Any, argument: Sequence[Any]) -> Any:
        """Calls until the actor has answered. An actor that is dead, or has not answered by the deadline, is lost."""
        late_at = time.monotonic() + self._deadline_s
        late = f"has not answered for {self._deadline_s:g} s (`runtime.instance_seconds`)"
        while self.failure is None:
            left_s = late_at - time.monotonic()
            if left_s <= 0:
                self.lose(late)  # without sending a call that nobody would wait for
                break
            try:
                return await asyncio.wait_for(method.remote(argument), left_s)
            except TimeoutError:
                self.lose(late)
            except ActorDiedError as error:
                self.lose(f"has died: {first_line(error)}")
            except ActorUnavailableError as error:
                late = f"could not be reached for {self._deadline_s:g} s: {first_line(error)}"
                await asyncio.sleep(min(RETRY_S, left_s))
            except RayTaskError as error:
                self.lose(f"failed: {first_line(error.cause)}")
            except RayError as error:  # such as a lost object: an answer that died with its machine
                self.lose(f"cannot be talked to: {type(error).__name__}: {first_line(error)}")
        return [], None


def kill(actor: Any) -> None:
    """Ends the process of an actor, in whatever state it is. Returns at once."""
    ray.kill(actor, no_restart=True)
