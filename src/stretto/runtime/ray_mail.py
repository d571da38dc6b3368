"""Calls to one actor that are never lost, never done twice and never waited for without a deadline.

    driver: Remote                                          actor: Served
    call() -> outbox --deliver(numbered messages)-->  begun in the order of their numbers, each once
    future <---------- collect(acknowledged) <------  answers, kept until they are acknowledged; status

Everything that is asked for in one turn of the driver's loop goes out as one message, and one pending `collect` brings
back whatever has ended since: a call costs the driver a share of two remote calls, however long it takes. Where a
message or an answer is lost on its way (`ActorUnavailableError`), it is sent again under the same number, and the actor
does not do it again.

`collect` is the heartbeat too. An actor that has died, or that has not answered for `deadline_s`, is lost: every
pending call raises, and so does every later one. A killed node shows as unavailable first and as dead only later, so
whichever comes first ends the wait.
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

from stretto.errors import EngineError, StrettoError

log = logging.getLogger(__name__)

IDLE_S = 5.0  # between two answers of an actor that has nothing to say, at most
BEATS = 3  # answers within the deadline, at least
AGAIN_S = 0.25  # before something is sent again to an actor that could not be reached


@dataclass(frozen=True, slots=True)
class Message:
    """One call. Numbers are consecutive, from 0."""

    number: int
    name: str
    arguments: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """What one call came to: a value, or an error."""

    number: int
    value: Any
    error: BaseException | None


class Served:
    """The actor's side: what is asked for is begun in order, each in a task of its own. Made in an asyncio actor.

    `handlers` are coroutines by name. `status` is what every `collect` says beside the answers: every `every_s` while
    anything is being done, and every `idle_s` otherwise.
    """

    def __init__(
        self,
        handlers: Mapping[str, Callable[..., Coroutine[Any, Any, Any]]],
        *,
        status: Callable[[], Any],
        every_s: float,
        idle_s: float,
    ) -> None:
        self._handlers = handlers
        self._status = status
        self._every_s = min(every_s, idle_s)
        self._idle_s = idle_s
        self._next = 0
        self._early: dict[int, Message] = {}  # arrived before one with a smaller number
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._answers: dict[int, Answer] = {}
        self._changed = asyncio.Event()

    def deliver(self, messages: Sequence[Message]) -> None:
        """Begin what has not been begun. What arrives again is known by its number."""
        self._early.update({message.number: message for message in messages if message.number >= self._next})
        while (message := self._early.pop(self._next, None)) is not None:
            self._next += 1
            # Tasks start in the order in which they are made, so an engine hears of calls in order.
            self._tasks[message.number] = asyncio.create_task(self._do(message), name=f"{message.name}")
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
        """Forget what has arrived; wait for something new, for a while; all answers that have not been acknowledged."""
        for number in acknowledged:
            self._answers.pop(number, None)
        if not self._answers and not self._tasks:
            await self._change(self._idle_s)
        if not self._answers and self._tasks:
            await self._change(self._every_s)
        return list(self._answers.values()), self._status()

    async def _change(self, wait_s: float) -> None:
        """Wait until something was asked for or has ended, or for so long."""
        self._changed.clear()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), wait_s)


def idle_seconds(deadline_s: float) -> float:
    """How long an actor may say nothing, if one that has not answered for `deadline_s` counts as lost."""
    return min(IDLE_S, deadline_s / BEATS)


def _portable(error: Exception) -> Exception:
    """The same error, where it can cross to another process; otherwise what it says."""
    return error if isinstance(error, StrettoError) else EngineError(f"{type(error).__name__}: {error}")


class Remote:
    """The driver's side of one actor, for one event loop.

    `lost` makes the error that pending and later calls raise, out of why; `told` is called with every status.
    """

    def __init__(
        self,
        actor: Any,
        name: str,
        *,
        deadline_s: float,
        told: Callable[[Any], None] = lambda status: None,
        lost: Callable[[str], StrettoError] = EngineError,
    ) -> None:
        self.actor = actor
        self.failure: StrettoError | None = None  # why it is over
        self._name = name
        self._deadline_s = deadline_s
        self._told = told
        self._lost = lost
        self._numbers = 0
        self._outbox: list[Message] = []
        self._pending: dict[int, asyncio.Future[Any]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._collecting = False

    async def call(self, name: str, *arguments: Any, bounded: bool = True) -> Any:
        """Have the actor do something. With `bounded` it is lost if that takes longer than the deadline; otherwise
        only if it stops answering, so whoever calls so watches the status."""
        future = self.begin(name, *arguments)
        if not bounded:
            return await future
        done, _ = await asyncio.wait({future}, timeout=self._deadline_s)
        if not done:
            self.lose(f"`{name}` has not ended after {self._deadline_s:g} s (`runtime.instance_seconds`)")
        return await future

    def begin(self, name: str, *arguments: Any) -> asyncio.Future[Any]:
        """Send a call on its way; a later one is begun later. Cancelling the future does not undo it."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if self.failure is not None:
            future.set_exception(self._again())
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
    def forget(future: asyncio.Future[Any]) -> None:
        """Nobody waits for this call: whatever it comes to is heard of."""
        future.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def arrived(self, reference: Any, what: str) -> Any:
        """The result of a task of the actor's that is no message; bounded like one."""
        try:
            return await asyncio.wait_for(_result(reference), self._deadline_s)
        except (RayError, TimeoutError) as error:
            self.lose(f"did not hand over {what}: {type(error).__name__}: {_first_line(error)}")
            raise self._again() from error

    def lose(self, why: str) -> None:
        """Give the actor up: its process is ended, and everybody who waits for it hears why."""
        if self.failure is not None:
            return
        self.failure = self._lost(f"{self._name} {why}")
        pending, self._pending = self._pending, {}
        for future in pending.values():
            if not future.done():
                future.set_exception(self._again())
                self.forget(future)
        self._outbox.clear()
        end(self.actor)

    async def close(self, why: str = "is closed") -> None:
        """End the actor. Safe to call twice, and after it was lost."""
        self.lose(why)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _again(self) -> StrettoError:
        """An exception of its own for everybody, because each is given a traceback."""
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
            self._told(status)
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
        """Call until the actor has answered. One that is dead, or has not answered by the deadline, is lost."""
        late_at = time.monotonic() + self._deadline_s
        late = f"has not answered for {self._deadline_s:g} s (`runtime.instance_seconds`)"
        while self.failure is None:
            left_s = late_at - time.monotonic()
            if left_s <= 0:
                self.lose(late)  # and nothing is sent that nobody would wait for
                break
            try:
                return await asyncio.wait_for(_result(method.remote(argument)), left_s)
            except TimeoutError:
                self.lose(late)
            except ActorDiedError as error:
                self.lose(f"has died: {_first_line(error)}")
            except ActorUnavailableError as error:
                late = f"could not be reached for {self._deadline_s:g} s: {_first_line(error)}"
                await asyncio.sleep(min(AGAIN_S, left_s))
            except RayTaskError as error:
                self.lose(f"failed: {_first_line(error.cause)}")
            except RayError as error:  # such as a lost object: an answer that died with its node
                self.lose(f"cannot be talked to: {type(error).__name__}: {_first_line(error)}")
        return [], None


def end(actor: Any) -> None:
    """End the process of an actor, whatever it is doing. Returns at once."""
    ray.kill(actor, no_restart=True)


async def _result(reference: Any) -> Any:
    return await reference


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
