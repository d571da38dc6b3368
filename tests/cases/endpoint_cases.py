"""A policy and conversations for tests of the endpoint: a token is a character."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from stretto.errors import RewardError, RoomError
from stretto.serve.http import Endpoint, Model
from stretto.serve.sessions import Session, Sessions, as_trained
from stretto.types import Completion

END = "\n"  # the stop token


def text_of(tokens: Sequence[int]) -> str:
    return "".join(map(chr, tokens))


def tokens_of(text: str) -> tuple[int, ...]:
    return tuple(map(ord, text))


@dataclass
class ScriptedPolicy:
    """Answers turn `n` with `reply(n, context)`, and checks that it is called as a policy may be called."""

    reply: Callable[[int, str], str] = lambda number, context: f"reply {number}"
    max_turns: int = 100
    max_context: int = 100_000
    gate: asyncio.Event | None = None  # a turn ends once it is set
    fault: Exception | None = None  # raised by the next turn
    rows: list[tuple[tuple[int, ...], bool]] = field(default_factory=list)
    num_turns: int = 0
    started: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))  # released as a turn begins
    busy: bool = False
    left: int = 1_000

    async def generate(self, tokens: Sequence[int], *, lineage: int = 0, train: bool = True) -> Completion:
        assert not self.busy, "one turn at a time"
        assert 0 <= lineage <= len(self.rows), lineage
        tokens = tuple(tokens)
        if lineage < len(self.rows):
            before, trained = self.rows[lineage]
            assert tokens[: len(before)] == before, "a row continues as it was"
            assert train is trained
        if self.num_turns >= self.max_turns:
            raise RewardError(f"the environment asked for more than {self.max_turns} turns")
        if len(tokens) >= self.max_context:
            raise RoomError("no token is left")
        number, self.num_turns, self.busy = self.num_turns, self.num_turns + 1, True
        self.started.release()
        try:
            if self.gate is not None:
                await self.gate.wait()
            if self.fault is not None:
                raise self.fault
        finally:
            self.busy = False
        said = tokens_of(self.reply(number, text_of(tokens)) + END)[: self.max_context - len(tokens)]
        row = ((*tokens, *said), train)
        self.rows[lineage : lineage + 1] = [row]
        finish = "stop" if said[-1] == ord(END) else "length"
        logprobs = -np.arange(1, len(said) + 1, dtype=np.float32) / 8
        return Completion(0, 3, np.array(said, np.int32), logprobs, finish, "")


@dataclass(frozen=True)
class FakeToolCall:
    id: str
    name: str
    arguments: str
    error: str | None = None


@dataclass(frozen=True)
class FakeAssistantMessage:
    content: str
    reasoning: str | None
    tool_calls: tuple[FakeToolCall, ...]
    tokens: tuple[int, ...]
    finish: str

    @property
    def message(self) -> dict[str, Any]:
        made: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.tool_calls:
            made["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.tool_calls
            ]
        return made


@dataclass(frozen=True)
class FakeChatRequest:
    tokens: tuple[int, ...]
    lineage: int
    train: bool


class FakeConversations:
    """Renders a message as `<role>content`, and reads `CALL name {arguments}` as a tool call."""

    def __init__(self) -> None:
        self.num_calls = 0
        self.rows: list[tuple[tuple[int, ...], bool] | None] = []

    def request(
        self, messages: Sequence[Mapping[str, Any]], tools: Any = None, *, train: bool = True
    ) -> FakeChatRequest:
        text = "".join(f"[{tool['function']['name']}]" for tool in tools or ())
        for message in messages:
            if message["role"] not in ("system", "user", "assistant", "tool", "developer"):
                raise ValueError(f"no role {message['role']!r}")
            text += f"<{message['role']}>{self._content(message)}{END}"
        tokens = tokens_of(text + "<assistant>")
        rows = enumerate(self.rows)
        known = [n for n, row in rows if row and row[1] is train and tokens[: len(row[0])] == row[0]]
        return FakeChatRequest(tokens, known[-1] if known else len(self.rows), train)

    def take(self, lineage: int) -> None:
        self.rows[lineage : lineage + 1] = [None]

    @staticmethod
    def _content(message: Mapping[str, Any]) -> str:
        content = message.get("content") or ""
        if not isinstance(content, str):
            content = "".join(part["text"] for part in content)
        for call in message.get("tool_calls") or ():
            content += f"CALL {call['function']['name']} {call['function']['arguments']}"
        return content

    def answer(self, request: FakeChatRequest, sampled_tokens: Sequence[int], finish: str) -> FakeAssistantMessage:
        self.rows[request.lineage : request.lineage + 1] = [((*request.tokens, *sampled_tokens), request.train)]
        text = text_of(sampled_tokens).removesuffix(END)
        content, mark, called = text.partition("CALL ")
        calls: tuple[FakeToolCall, ...] = ()
        if mark:
            name, _, arguments = called.partition(" ")
            calls = (FakeToolCall(f"call_{self.num_calls}", name, arguments),)
            self.num_calls += 1
        return FakeAssistantMessage(content, None, calls, tuple(sampled_tokens), finish)


@asynccontextmanager
async def serving(sessions: Sessions | None = None, **options: Any) -> AsyncIterator[Endpoint]:
    """An endpoint on a free port."""
    endpoint = Endpoint(Sessions() if sessions is None else sessions, Model("policy", chr), **options)
    await endpoint.start()
    try:
        yield endpoint
    finally:
        await endpoint.close()


def opened(sessions: Sessions, policy: ScriptedPolicy, **other: Any) -> Session:
    return sessions.open(as_trained(policy), FakeConversations(), max_tokens=1_000, **other)
