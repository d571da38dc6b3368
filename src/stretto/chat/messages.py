"""The messages of a chat, in the shape of the OpenAI API, and the answer of a policy."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stretto.errors import ChatError
from stretto.types import FinishReason

Message = Mapping[str, Any]
"""`role`, `content`, and whatever else the chat template reads: `tool_calls`, `tool_call_id`, `name`."""

TEXT_PARTS = ("text", "input_text", "output_text")
REASONING_KEYS = ("reasoning_content", "reasoning")
UNSEEN_KEYS = ("refusal", "annotations", "audio", "function_call")  # of an assistant message; clients send them back


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool, as the model wrote it."""

    id: str
    name: str  # empty: it could not be read
    arguments: Mapping[str, Any] | str  # text if they are no JSON object; `error` says why
    error: str | None = None

    @property
    def as_json(self) -> dict[str, Any]:
        """The call in an assistant message: its arguments are a JSON text there."""
        arguments = self.arguments
        text = arguments if isinstance(arguments, str) else json.dumps(dict(arguments), ensure_ascii=False)
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": text}}


@dataclass(frozen=True, slots=True)
class AssistantMessage:
    """The answer of a policy."""

    content: str  # without reasoning and tool calls; a call whose name could not be read stays in it
    reasoning: str | None
    tool_calls: tuple[ToolCall, ...]
    tokens: tuple[int, ...]  # as they were sampled, a stop token included
    finish: FinishReason
    lineage: int = 0

    @property
    def message(self) -> dict[str, Any]:
        """The answer as a message, to be put behind those that it answers."""
        made: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning is not None:
            made["reasoning_content"] = self.reasoning
        if calls := [call.as_json for call in self.tool_calls if call.name]:
            made["tool_calls"] = calls
        return made


def for_template(message: Message) -> dict[str, Any]:
    """Returns a message as chat templates read it: plain text for content, objects for the arguments of calls.

    Raises `ChatError` if it is no message, or has content that is no text.
    """
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ChatError(f"a message is an object with a `role`, this is {message!r:.80}")
    made = {key: value for key, value in message.items() if value is not None}
    made["content"] = _text(message.get("content"))
    reasoning = reasoning_of(message)
    for key in REASONING_KEYS:
        made.pop(key, None)
    if reasoning is not None:
        made["reasoning_content"] = reasoning
    if message["role"] == "assistant":
        for key in UNSEEN_KEYS:
            made.pop(key, None)
        if calls := made.pop("tool_calls", None):
            made["tool_calls"] = [_call(call) for call in calls]
    return made


def reasoning_of(message: Message) -> str | None:
    """Returns the reasoning of an assistant message, if it has one."""
    found = next((message[key] for key in REASONING_KEYS if message.get(key)), None)
    return found if isinstance(found, str) else None


def fingerprint(message: Message) -> str:
    """Returns a text that is equal for equal messages (`for_template`), whatever the reasoning and the ids of calls."""
    seen = {key: value for key, value in message.items() if key != "reasoning_content"}
    if "tool_calls" in seen:
        seen["tool_calls"] = [call["function"] for call in seen["tool_calls"]]
    return json.dumps(seen, sort_keys=True, default=repr)


def _text(content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise ChatError(f"the `content` of a message is text or a list of parts, this is {content!r:.80}")
    parts = []
    for part in content:
        text = part.get("text") if isinstance(part, Mapping) and part.get("type", "text") in TEXT_PARTS else part
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, Mapping) else None
            named = f" of type `{kind}`" if isinstance(kind, str) and kind not in TEXT_PARTS else ""
            raise ChatError(
                f"a part{named} of the `content` of a message is no text: {part!r:.80}; only text can be rendered"
            )
        parts.append(text)
    return "".join(parts)


def _call(call: Any) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ChatError(f"one of `tool_calls` has no `function` with a `name`: {call!r:.80}")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            decoded = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            decoded = None
        arguments = decoded if isinstance(decoded, dict) else arguments
    made = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    return {"id": call["id"], **made} if isinstance(call.get("id"), str) else made
