"""Sessions: each is the policy of one trajectory, behind a key. No HTTP here.

    session = sessions.open(generate, conversations, ...) the owner: an environment, or `stretto serve`
    pending = sessions.ask(session.key, call)             a client
    answer = await pending.answer()
    sessions.reward(session.key, session.id, 1.0)         a client, if the program itself knows its reward
    await session.ended                                   the owner, beside the end of its program
    await sessions.close(session)

- *Calls of a session are answered in the order in which they came*, one at a time.
- *A call that has begun is finished*, also if its client is gone: the tokens are part of the trajectory. A client that
  asks again for the same gets the same answer, so a retry samples nothing (`Call.attempt` says how it is recognised).
- *A call continues a row of tokens* (a lineage), or opens one. Its messages decide (`chat/conversations.py`), or its
  tokens: they continue the longest row that they begin with. A row is trained or not, as the call that opened it.
- *A session ends* by its reward, at its deadline, by an error of its policy, or when its owner closes it. Then calls
  that wait are refused, and no call is taken any more. `close` waits for the call that is being generated.
- *Nothing is left* of a session that was closed: no task, no timer, no entry.

| wait | of | until |
|---|---|---|
| its turn | a call | the calls before it are answered, or the session ends |
| tokens | a call | the policy answers or raises: the policy has deadlines of its own |
| the last call | `close` | the same |
"""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from stretto.environments.reward_range import BEYOND, is_trainable
from stretto.errors import RewardError, RoomError, describe
from stretto.serve.call_errors import (
    BusyError,
    CallError,
    ContextLengthError,
    InvalidCallError,
    OtherRequestError,
    OtherSessionError,
    RefusedCallError,
    RequestSizeError,
    SessionEndedError,
    UnknownKeyError,
)
from stretto.types import Completion, FinishReason

RENDERED_AT_ONCE = 1 << 14  # bytes of a request; larger ones are rendered in a thread, and hold nobody up

Message = Mapping[str, Any]
Attempt = Literal["first", "retry", "unknown"]


@dataclass(frozen=True, slots=True)
class RequestedSampling:
    """The way of sampling that a client asks for. None: as the policy does it."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None


AS_POLICY = RequestedSampling()


class Policy(Protocol):
    """The policy of a trajectory, as far as an endpoint needs it (`environments/protocol.py` has the contract)."""

    async def generate(self, tokens: Sequence[int], *, lineage: int = 0, train: bool = True) -> Completion: ...


Generate = Callable[[tuple[int, ...], int, bool, RequestedSampling], Awaitable[Completion]]
"""Continues tokens in a row (lineage) of this number, which is trained or not."""


def as_trained(policy: Policy) -> Generate:
    """Returns the calls of a policy that is being trained. The recipe says how it samples, and clients do not."""

    async def generate(tokens: tuple[int, ...], lineage: int, train: bool, _: RequestedSampling) -> Completion:
        return await policy.generate(tokens, lineage=lineage, train=train)

    return generate


class Conversations(Protocol):
    """Turns the messages of one session into tokens, and sampled tokens into messages (`stretto.chat`)."""

    def request(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None, *, train: bool = True
    ) -> Any:
        """Returns a request: the `tokens` to continue, and the `lineage` that they continue or open."""
        ...

    def answer(self, request: Any, sampled_tokens: Sequence[int], finish: FinishReason) -> Any:
        """Records what was sampled and returns it: its `message` is one in the shape of OpenAI."""
        ...

    def take(self, lineage: int) -> None:
        """Notes that a lineage was opened or continued by a call that has tokens."""
        ...


@dataclass(frozen=True, slots=True)
class Limits:
    """The most that one client can hold."""

    calls: int = 4_096  # of a session, all together
    waiting: int = 64  # calls of a session that are not answered yet
    request_bytes: int = 32 << 20  # of one request
    waiting_bytes: int = 128 << 20  # of all requests of a session that are not answered yet


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a client: messages, or tokens that are continued as they are."""

    messages: Sequence[Message] = ()
    tools: Sequence[Mapping[str, Any]] | None = None
    tokens: tuple[int, ...] | None = None
    train: bool = True
    sampling: RequestedSampling = AS_POLICY
    # A repeated call has the same identity. `first`: the client says that it is none. `retry`: the client says that it
    # is one. `unknown`: a call is repeated if there was one like it. With an idempotency key that alone decides.
    identity: bytes | None = None
    attempt: Attempt = "unknown"
    idempotency_key: str | None = None
    num_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a call."""

    id: str
    created: int  # seconds since 1970
    lineage: int
    prompt_tokens: NDArray[np.int32]
    tokens: NDArray[np.int32]  # sampled
    logprobs: NDArray[np.float32]
    finish: FinishReason
    version: int
    policy_s: float  # that the policy took
    message: Any  # an `AssistantMessage`; None if the call had tokens


@dataclass(slots=True, eq=False)
class Pending:
    """A call that was taken, and its answer once it is there. Clients that repeat a call share one."""

    call: Call | None  # None once it is answered: only the answer is kept
    future: asyncio.Future[Answer]
    delivered: bool = False  # a client had all of the answer
    num_waiting: int = 0  # clients that wait for it
    abandoned: Callable[[], None] | None = None  # called if no client waits any more, and there is no answer

    async def answer(self) -> Answer:
        """Waits for the answer. A caller that is cancelled leaves the call as it is. Raises `CallError`."""
        self.num_waiting += 1
        try:
            return await asyncio.shield(self.future)
        finally:
            self.num_waiting -= 1
            if self.abandoned is not None and not self.num_waiting and not self.future.done():
                self.abandoned()


@dataclass(slots=True, eq=False)
class _Row:
    """The tokens of a lineage so far."""

    tokens: tuple[int, ...]
    train: bool

    def begins(self, tokens: tuple[int, ...]) -> bool:
        return tokens[: len(self.tokens)] == self.tokens


EndedBy = Literal["reward", "deadline", "failure", "owner"]


class Session:
    """One trajectory's policy behind a key. `Sessions.open` makes it; all in one event loop."""

    def __init__(
        self,
        id: str,
        generate: Generate,
        conversations: Conversations | None,
        *,
        limits: Limits,
        vocabulary: int | None,
        deadline_s: float | None,
        max_tokens: int,
    ) -> None:
        self.id = id
        self.max_tokens = max_tokens  # of the longest context, as clients are told
        self.key = f"sk-{secrets.token_urlsafe(24)}"
        self.reward: float | None = None
        self.failure: BaseException | None = None  # that the policy raised, and that no client can do anything about
        loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[EndedBy] = loop.create_future()
        self.num_calls = 0  # that were taken; a repeated one counts once
        self.num_answered = 0  # of them, by the policy
        self.last_refusal: CallError | None = None  # the error of the last call that was refused
        self._generate = generate
        self._conversations = conversations
        self._limits = limits
        self._vocabulary = vocabulary
        self._queue: deque[Pending] = deque()
        self._waiting_bytes = 0
        self._num_waiting = 0
        self._worker: asyncio.Task[None] | None = None  # answers the queue; None while it is empty
        self._by_identity: dict[bytes, list[Pending]] = {}
        self._by_idempotency_key: dict[str, tuple[bytes | None, Pending]] = {}
        self._rows: list[_Row] = []
        self._deadline_s = deadline_s
        self._timer = None if deadline_s is None else loop.call_later(deadline_s, self.end, "deadline")

    # -- calls ---------------------------------------------------------------------------------------------------------

    def ask(self, call: Call) -> Pending:
        """Takes a call, or finds the one that it repeats. Raises `CallError`."""
        if (repeated := self._repeated(call)) is not None:
            return repeated
        self._refuse_beyond_limits(call)
        pending = Pending(call, asyncio.get_running_loop().create_future())
        pending.future.add_done_callback(_retrieved)
        self.num_calls += 1
        self._num_waiting += 1
        self._waiting_bytes += call.num_bytes
        if call.idempotency_key is not None:
            self._by_idempotency_key[call.idempotency_key] = (call.identity, pending)
        if call.identity is not None:
            self._by_identity.setdefault(call.identity, []).append(pending)
        self._queue.append(pending)
        if self._worker is None:
            self._worker = asyncio.create_task(self._work(), name=f"calls of session {self.id}")
            self._worker.add_done_callback(self._forget_worker)
        return pending

    def _repeated(self, call: Call) -> Pending | None:
        if call.idempotency_key is not None:
            identity, pending = self._by_idempotency_key.get(call.idempotency_key, (None, None))
            if pending is not None and identity != call.identity:
                raise OtherRequestError(
                    f"the idempotency key {call.idempotency_key!r} was used for another request: use one key for one "
                    "request"
                )
            return pending
        if call.identity is None or call.attempt == "first":
            return None
        same = self._by_identity.get(call.identity, [])
        # Equal calls may be meant as several draws. The one that a retry stands for is one that nobody got.
        lost = [pending for pending in same if not pending.delivered and not pending.num_waiting]
        return next(iter(lost or same[-1:]), None)

    def _refuse_beyond_limits(self, call: Call) -> None:
        limits = self._limits
        if self.ended.done():
            raise self._ended_error()
        if call.num_bytes > limits.request_bytes:
            raise RequestSizeError(f"the request has {call.num_bytes:,} bytes; {limits.request_bytes:,} are the most")
        if self.num_calls >= limits.calls:
            raise RefusedCallError(f"the session has had {limits.calls:,} calls, which are the most")
        if self._num_waiting >= limits.waiting:
            raise BusyError(
                f"{self._num_waiting} calls of the session are not answered yet, which are the most at once"
            )
        if self._waiting_bytes + call.num_bytes > limits.waiting_bytes:
            raise BusyError(
                f"the requests of the session that are not answered yet have {self._waiting_bytes:,} bytes; "
                f"{limits.waiting_bytes:,} are the most, with the new one"
            )

    async def _work(self) -> None:
        """Answers the queue, one call after another."""
        try:
            while self._queue:
                pending = self._queue.popleft()
                assert pending.call is not None
                try:
                    answer = await self._answered(pending.call)
                except CallError as error:
                    self._finish(pending, error)
                except (asyncio.CancelledError, Exception) as error:
                    # The trajectory moves, its engine failed or its episode is over: the owner knows what to do.
                    self._finish(pending, self._fail(error))
                else:
                    self._finish(pending, answer)
        finally:
            self._worker = None  # at once: the next call needs another

    def _forget_worker(self, worker: asyncio.Task[None]) -> None:
        if self._worker is worker:  # cancelled before its first step
            self._worker = None

    def _finish(self, pending: Pending, result: Answer | CallError) -> None:
        call, pending.call = pending.call, None
        assert call is not None
        self._num_waiting -= 1
        self._waiting_bytes -= call.num_bytes
        if isinstance(result, Answer):
            self.num_answered += 1
            pending.future.set_result(result)
            return
        if call.idempotency_key is not None:  # an error is not recorded: the call may be made again
            del self._by_idempotency_key[call.idempotency_key]
        if call.identity is not None:
            self._by_identity[call.identity].remove(pending)
            if not self._by_identity[call.identity]:
                del self._by_identity[call.identity]
        self.last_refusal = result
        pending.future.set_exception(result)

    async def _answered(self, call: Call) -> Answer:
        request = None if call.tokens is not None else await self._rendered(call)
        if request is not None:
            tokens, lineage = tuple(request.tokens), request.lineage
        else:
            tokens = self._checked(call.tokens or ())
            lineage = self._lineage(tokens, call.train)
        began = time.monotonic()
        try:
            made = await self._generate(tokens, lineage, call.train, call.sampling)
        except RoomError as error:
            raise ContextLengthError(
                f"the context of this call has {len(tokens):,} tokens, and no token fits behind them: {error}"
            ) from error
        except RewardError as error:
            raise RefusedCallError(str(error)) from error
        policy_s = time.monotonic() - began
        sampled = made.tokens.tolist()
        self._rows[lineage : lineage + 1] = [_Row((*tokens, *sampled), call.train)]
        message = None
        if request is not None:
            assert self._conversations is not None
            message = self._conversations.answer(request, sampled, made.finish)
        elif self._conversations is not None:
            self._conversations.take(lineage)
        return Answer(
            id=f"{self.id}-{secrets.token_hex(6)}",
            created=int(time.time()),
            lineage=lineage,
            prompt_tokens=np.asarray(tokens, dtype=np.int32),
            tokens=made.tokens,
            logprobs=made.logprobs,
            finish=made.finish,
            version=made.version,
            policy_s=policy_s,
            message=message,
        )

    async def _rendered(self, call: Call) -> Any:
        """Returns the request of the conversations for the messages of a call. Raises `InvalidCallError`."""
        if self._conversations is None:
            raise InvalidCallError("the model has no chat template, so it takes no messages; send token ids")
        render = partial(self._conversations.request, call.messages, call.tools, train=call.train)
        try:
            return render() if call.num_bytes <= RENDERED_AT_ONCE else await asyncio.to_thread(render)
        except Exception as error:  # a template, which is part of the model, may raise anything
            raise InvalidCallError(f"the messages cannot be rendered: {describe(error)}") from error

    def _checked(self, tokens: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the tokens of a call. Raises `InvalidCallError`."""
        if not tokens:
            raise InvalidCallError("the request has no tokens: there must be at least one to continue")
        if self._vocabulary is not None and max(tokens) >= self._vocabulary:
            raise InvalidCallError(
                f"the request has the token {max(tokens)}; the model knows those below {self._vocabulary:,}"
            )
        return tokens

    def _lineage(self, tokens: tuple[int, ...], train: bool) -> int:
        """Returns the number of the longest row that `tokens` continue, or of a new one."""
        found, longest = len(self._rows), 0
        for number, row in enumerate(self._rows):
            if row.train is train and len(row.tokens) > longest and row.begins(tokens):
                found, longest = number, len(row.tokens)
        return found

    # -- its end -------------------------------------------------------------------------------------------------------

    def end(self, by: EndedBy) -> None:
        """Takes no more calls, and refuses those that wait. Does nothing if it has ended."""
        if self.ended.done():
            return
        self.ended.set_result(by)
        if self._timer is not None:
            self._timer.cancel()
        while self._queue:
            self._finish(self._queue.popleft(), self._ended_error())

    def _fail(self, error: BaseException) -> CallError:
        if self.failure is None:
            self.failure = error
        self.end("failure")
        return SessionEndedError(f"the session ended before the call was answered: {describe(error)}")

    def _ended_error(self) -> CallError:
        match self.ended.result():
            case "reward":
                why = "it has its reward"
            case "deadline":
                why = f"its {self._deadline_s:g} s are over"
            case "failure":
                why = "its policy is gone; the program starts again if there is another try"
            case "owner":
                why = "its program is over"
        return SessionEndedError(f"the session takes no more calls: {why}")

    def give_reward(self, reward: float) -> None:
        """Sets the reward and ends the session. The same again changes nothing. Raises `CallError`."""
        if not math.isfinite(reward) or not is_trainable(reward):
            raise InvalidCallError(
                f"`reward` is {reward}: send a finite number" + f", not {BEYOND}" * math.isfinite(reward)
            )
        if self.reward is not None:
            if self.reward != reward:
                raise OtherRequestError(
                    f"the session has the reward {self.reward:g} already, and {reward:g} is another"
                )
            return
        if self.ended.done():
            raise self._ended_error()
        self.reward = reward
        self.end("reward")

    def cancel(self) -> None:
        """Ends the session and gives up the call that is being generated, which fails its policy's episode."""
        self.end("owner")
        if self._worker is not None:
            self._worker.cancel()

    async def finished(self) -> None:
        """Waits until no call is being generated any more."""
        while self._worker is not None:
            await asyncio.wait([self._worker])


class Sessions:
    """The open sessions of an endpoint, by key."""

    def __init__(self, limits: Limits | None = None, *, vocabulary: int | None = None) -> None:
        """`vocabulary`: the tokens that the model knows are those below; None: any."""
        self.limits = limits or Limits()
        self._vocabulary = vocabulary
        self._by_key: dict[str, Session] = {}
        self._numbers = count()
        self._label = secrets.token_hex(3)  # ids of another process differ

    @property
    def num_open(self) -> int:
        """Sessions that are not closed."""
        return len(self._by_key)

    def open(
        self,
        generate: Generate,
        conversations: Conversations | None,
        *,
        max_tokens: int,
        deadline_s: float | None = None,
    ) -> Session:
        """Opens a session whose contexts have at most `max_tokens`. The owner bounds how many there are."""
        id = f"s{self._label}-{next(self._numbers)}"
        session = Session(
            id,
            generate,
            conversations,
            limits=self.limits,
            vocabulary=self._vocabulary,
            deadline_s=deadline_s,
            max_tokens=max_tokens,
        )
        self._by_key[session.key] = session
        return session

    def find(self, key: str) -> Session:
        """Returns the session of a key. Raises `UnknownKeyError`."""
        session = self._by_key.get(key)
        if session is None:
            raise UnknownKeyError(
                "no open session has this key: it is closed, or never was one; programs get theirs as `OPENAI_API_KEY`"
            )
        return session

    def max_tokens(self, key: str) -> int:
        """Returns the most tokens of a context of the session that has this key. Raises `UnknownKeyError`."""
        return self.find(key).max_tokens

    def ask(self, key: str, call: Call) -> Pending:
        """Takes a call of the session that has this key. Raises `CallError`."""
        return self.find(key).ask(call)

    async def call(self, key: str, call: Call) -> Answer:
        """Returns the answer to a call, delivered. Raises `CallError`."""
        pending = self.ask(key, call)
        answer = await pending.answer()
        pending.delivered = True
        return answer

    def reward(self, key: str, id: str, reward: float) -> None:
        """Gives the session `id`, which must have this key, its reward. Raises `CallError`."""
        session = self.find(key)
        if session.id != id:
            raise OtherSessionError(f"the key is not that of session {id!r}: a session is rewarded with its own key")
        session.give_reward(reward)

    async def close(self, session: Session) -> None:
        """Ends a session, waits for the call that is being generated, and forgets the session."""
        session.end("owner")
        try:
            await session.finished()
        finally:
            self._by_key.pop(session.key, None)

    async def close_all(self) -> None:
        """Ends every session."""
        sessions = list(self._by_key.values())
        for session in sessions:
            session.end("owner")
        for session in sessions:
            await self.close(session)


def _retrieved(future: asyncio.Future[Answer]) -> None:
    """Marks an error as seen: the client that it was for may be gone."""
    if not future.cancelled():
        future.exception()
