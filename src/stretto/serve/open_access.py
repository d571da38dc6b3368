"""Calls of a policy that is not trained: every call stands alone, and one key is good for all of them.

A call that no client waits for any more is given up: its tokens are of no use to anybody.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from typing import Any

from stretto.serve.call_errors import BusyError, InvalidCallError, UnknownKeyError
from stretto.serve.conversations import MakeConversations
from stretto.serve.sessions import Call, Conversations, Generate, Limits, Pending, Session
from stretto.types import FinishReason


class _WithoutStops:
    """Conversations whose answers do not have the stop string at their end: clients do not expect it there."""

    def __init__(self, conversations: Conversations, stops: Sequence[str]) -> None:
        self.request, self.take = conversations.request, conversations.take
        self._conversations = conversations
        self._stops = stops

    def answer(self, request: Any, sampled_tokens: Sequence[int], finish: FinishReason) -> Any:
        answer = self._conversations.answer(request, sampled_tokens, finish)
        found = [answer.content.find(stop) for stop in self._stops if finish == "stop" and stop in answer.content]
        return replace(answer, content=answer.content[: min(found)]) if found else answer


class OpenAccess:
    """Answers calls with one policy, many at once."""

    def __init__(
        self,
        generate: Generate,
        conversations: MakeConversations | None,
        *,
        key: str,
        max_tokens: int,
        vocabulary: int | None = None,
        max_calls: int = 1_024,
    ) -> None:
        """`conversations` None: the model has no chat template. `max_calls`: at once."""
        self.limits = Limits()
        self._max_calls = max_calls
        self._generate = generate
        self._conversations = conversations
        self.key = key
        self._max_tokens = max_tokens
        self._vocabulary = vocabulary
        self._sessions: set[Session] = set()
        self._numbers = count()

    @property
    def num_open(self) -> int:
        """Calls that are not answered yet."""
        return len(self._sessions)

    def max_tokens(self, key: str) -> int:
        """Returns the most tokens of a context. Raises `UnknownKeyError` if the key is another one."""
        if not hmac.compare_digest(key.encode(errors="surrogateescape"), self.key.encode()):
            raise UnknownKeyError("this is not the key of the server: `stretto serve` prints it when it starts")
        return self._max_tokens

    def ask(self, key: str, call: Call) -> Pending:
        """Takes a call. Raises `CallError`."""
        self.max_tokens(key)
        if len(self._sessions) >= self._max_calls:
            raise BusyError(f"{self._max_calls:,} calls are not answered yet, which are the most at once")
        conversations = None if self._conversations is None else self._conversations(None)
        session = Session(
            f"c{next(self._numbers)}",
            self._generate,
            None if conversations is None else _WithoutStops(conversations, call.sampling.stop),
            limits=self.limits,
            vocabulary=self._vocabulary,
            deadline_s=None,
            max_tokens=self._max_tokens,
        )
        pending = session.ask(call)
        self._sessions.add(session)
        pending.abandoned = session.cancel
        pending.future.add_done_callback(lambda _: self._sessions.discard(session))
        return pending

    def reward(self, key: str, id: str, reward: float) -> None:
        """Raises `InvalidCallError`: nothing is trained."""
        self.max_tokens(key)
        raise InvalidCallError("this server trains nothing, so it takes no rewards")

    async def close_all(self) -> None:
        """Gives up every call."""
        sessions = list(self._sessions)
        for session in sessions:
            session.cancel()
        for session in sessions:
            await session.finished()
