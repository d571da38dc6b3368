"""The conversations of one episode, as lineages: rows of tokens that only ever grow.

A request continues a lineage if its messages are those of an earlier request, our answer to that, and whatever is new;
and if the chat template, given all of them, writes exactly the text of that lineage with something behind it. Then the
context is the lineage's own tokens, as they were sampled, and the template's tokens for what is new. What the model
wrote is never tokenized again.

Anything else opens a new lineage with a freshly rendered context: a sub-agent, a chat that was compacted, a call that
is asked for twice, or a template that rewrites history (it drops earlier thinking, or trims white space).

The template may see an answer in two ways: as the text that was sampled, or taken apart into content, reasoning and
tool calls. Either is right if it gives back the text. So a tool call keeps its own spacing and order of keys.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from stretto.chat.answers import PREFILL, split_reasoning
from stretto.chat.messages import AssistantMessage, Message, fingerprint, for_template, reasoning_of
from stretto.chat.rendering import Renderer
from stretto.chat.tool_calls import ParsedCalls, parse_tool_calls
from stretto.errors import ChatError
from stretto.types import FinishReason


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A call, ready for the policy. Nothing is recorded before `Conversations.answer`."""

    lineage: int
    tokens: tuple[int, ...]  # the whole context
    new: bool  # the lineage is opened by this request
    train: bool
    text: str  # of the context, as the template wrote it
    messages: tuple[Message, ...]  # as they were rendered
    seen: tuple[_Seen, ...]  # the same, to be recognized
    tools: tuple[Mapping[str, Any], ...]


class Conversations:
    """The lineages of one episode or session."""

    def __init__(self, renderer: Renderer, *, prompt_tokens: Sequence[int] | None = None) -> None:
        """`prompt_tokens`: those of the group's prompt. A first context that spells the same text gets them, so that
        it shares the KV of its group."""
        self._renderer = renderer
        self._prompt_tokens = None if prompt_tokens is None else tuple(prompt_tokens)
        self._lineages: list[_Lineage | None] = []  # None: taken by somebody who speaks tokens
        self._num_calls = 0  # of tools

    @property
    def num_lineages(self) -> int:
        return len(self._lineages)

    def request(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None, *, train: bool = True
    ) -> ChatRequest:
        """Returns the context of a call: a new one, or that of the longest (then newest) lineage that it continues.

        A lineage that trains is not continued by a call that does not, nor the other way round. Raises `ChatError` if
        the messages cannot be rendered.
        """
        if not messages:
            raise ChatError("a chat has no messages: give at least one that the model answers")
        given = tuple(for_template(message) for message in messages)
        seen = tuple(_Seen(fingerprint(message), reasoning_of(message)) for message in given)
        offered = tuple(tools or ())
        known = [n for n, it in enumerate(self._lineages) if it is not None and it.train == train and it.within(seen)]
        for number in sorted(known, key=lambda number: (self._length(number), number), reverse=True):
            if (found := self._continued(number, given, seen, offered)) is not None:
                return found
        text = self._renderer.text(given, offered)
        return ChatRequest(self.num_lineages, self._first_tokens(text), True, train, text, given, seen, offered)

    def answer(self, request: ChatRequest, sampled_tokens: Sequence[int], finish: FinishReason) -> AssistantMessage:
        """Records what the policy answered, and returns it. Raises `ChatError` if another answer came in between."""
        sampled = tuple(int(token) for token in sampled_tokens)
        before = None if request.new else self._lineages[request.lineage]
        if request.lineage != self.num_lineages if request.new else before is None or before.is_past(request):
            raise ChatError("a request was answered after another one of its lineage: await one call after the other")
        stop = sampled[-1] if sampled and finish == "stop" and self._renderer.special(sampled[-1]) is not None else None
        written = self._renderer.decode(sampled if stop is None else sampled[:-1])
        prefill = self._prefill(request.text)
        answer = self._parsed(request, prefill + written, sampled, finish)
        structured = for_template(answer.message)
        lineage = _Lineage(
            messages=request.messages,
            seen=(*request.seen, _Seen(fingerprint(structured), answer.reasoning, own=True)),
            forms=({"role": "assistant", "content": prefill + written}, structured),
            text=request.text + written,
            tokens=request.tokens + sampled,
            stop=stop,
            train=request.train,
        )
        self._lineages[request.lineage : request.lineage + 1] = [lineage]
        return answer

    def take(self, lineage: int) -> None:
        """Notes that a lineage was opened or continued by somebody who speaks tokens. No chat continues it."""
        self._lineages[lineage : lineage + 1] = [None]

    def _prefill(self, context: str) -> str:
        """Returns what an answer begins with in its context: thinking that the template opens, and the task's prefill.

        It is part of the answer's message, because the template does not write it again for an earlier turn.
        """
        own = self._renderer.prefill if context.endswith(self._renderer.prefill) else ""
        opened = PREFILL.search(context.removesuffix(own))
        return (opened[0] if opened else "") + own

    def _length(self, number: int) -> int:
        lineage = self._lineages[number]
        return 0 if lineage is None else len(lineage.seen)

    def _first_tokens(self, text: str) -> tuple[int, ...]:
        prompt = self._prompt_tokens
        if prompt is not None and not self._lineages and self._renderer.decode(prompt) == text:
            return prompt
        return self._renderer.encode(text)

    def _continued(
        self,
        number: int,
        given: tuple[Message, ...],
        seen: tuple[_Seen, ...],
        tools: tuple[Mapping[str, Any], ...],
    ) -> ChatRequest | None:
        """Returns the request that continues a lineage; None if the template does not extend its text exactly."""
        lineage = self._lineages[number]
        assert lineage is not None
        for form in lineage.forms:
            messages = (*lineage.messages, form, *given[len(lineage.seen) :])
            try:
                text = self._renderer.text(messages, tools)
            except ChatError:  # a template may refuse one form of an answer
                continue
            if not text.startswith(lineage.text):
                continue
            new = self._behind_stop(text[len(lineage.text) :], lineage.stop)
            if new is not None:
                tokens = lineage.tokens + self._renderer.encode(new, behind=lineage.stop)
                seen = (*lineage.seen, *seen[len(lineage.seen) :])
                return ChatRequest(number, tokens, False, lineage.train, text, messages, seen, tools)
        return None

    def _behind_stop(self, text: str, stop: int | None) -> str | None:
        """Returns what the template writes behind the stop token that was sampled; None if it ends the turn otherwise.

        A template that ends turns with no special token has none to put in its place.
        """
        if stop is None:
            return text
        end = self._renderer.special(stop) or ""
        if text.startswith(end):
            return text[len(end) :]
        return None if self._renderer.begins_with_special(text) else text

    def _parsed(
        self, request: ChatRequest, text: str, sampled: tuple[int, ...], finish: FinishReason
    ) -> AssistantMessage:
        reasoning, content = split_reasoning(text)
        parsed = parse_tool_calls(content) if request.tools else ParsedCalls(content, ())
        first = self._num_calls
        self._num_calls += len(parsed.calls)  # nine letters and digits: some templates take no other ids
        calls = tuple(replace(call, id=f"call{first + n:05d}") for n, call in enumerate(parsed.calls))
        return AssistantMessage(parsed.content, reasoning, calls, sampled, finish, request.lineage)


@dataclass(frozen=True, slots=True)
class _Seen:
    """A message, as it is recognized when it comes again."""

    fingerprint: str
    reasoning: str | None
    own: bool = False  # our own answer: a client may leave its reasoning out

    def is_again(self, message: _Seen) -> bool:
        reasoned = message.reasoning == self.reasoning or (self.own and message.reasoning is None)
        return reasoned and message.fingerprint == self.fingerprint


@dataclass(frozen=True, slots=True)
class _Lineage:
    """A lineage whose last turn is an answer."""

    messages: tuple[Message, ...]  # as they were rendered, up to the answer
    seen: tuple[_Seen, ...]  # the answer included
    forms: tuple[Message, ...]  # of the answer
    text: str  # of the last context and the answer, without the stop token
    tokens: tuple[int, ...]  # of the last context and the answer
    stop: int | None  # the stop token that was sampled
    train: bool

    def within(self, seen: tuple[_Seen, ...]) -> bool:
        """Tells if messages begin with all of this lineage."""
        return len(seen) >= len(self.seen) and all(map(_Seen.is_again, self.seen, seen))

    def is_past(self, request: ChatRequest) -> bool:
        """Tells if a request for the next turn is out of date."""
        return request.tokens[: len(self.tokens)] != self.tokens
