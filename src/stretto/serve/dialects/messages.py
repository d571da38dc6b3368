"""`POST /v1/messages`: the protocol of Anthropic, as a translation of chats.

A tool call whose arguments are no JSON object has its text in `input` under the key `invalid_json`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from stretto.serve.call_errors import CallError, ContextLengthError, InvalidCallError
from stretto.serve.dialects import dialect
from stretto.serve.dialects.dialect import Asked, Body, Dialect, Event
from stretto.serve.sessions import Answer

INVALID = "invalid_json"
ERRORS = {401: "authentication_error", 403: "permission_error", 413: "request_too_large", 429: "rate_limit_error"}


def read(body: Body) -> Asked:
    """Reads a request. Raises `InvalidCallError`."""
    given = dialect.objects(body, "messages")
    if not given:
        raise InvalidCallError("`messages` is missing or empty: send at least one")
    choice = body.get("tool_choice") or {}
    if not isinstance(choice, Mapping) or choice.get("type", "auto") not in ("auto", "none"):
        raise InvalidCallError(f"`tool_choice` is {choice!r:.80}: a tool cannot be enforced; send `auto` or `none`")
    tools = [_tool(tool, number) for number, tool in enumerate(dialect.objects(body, "tools"))]
    model = dialect.text(body, "model", "")
    messages: list[dict[str, Any]] = []
    if body.get("system"):
        messages.append({"role": "system", "content": dialect.plain_text(body["system"], "system")})
    for number, message in enumerate(given):
        messages += _messages(message, f"messages[{number}]")
    return Asked(
        model=model,
        messages=messages,
        tools=None if not tools or choice.get("type") == "none" else tools,
        sampling=dialect.sampling(body, max_tokens=("max_tokens",), stop="stop_sequences"),
        train=dialect.trains(body, model),
        stream=dialect.flag(body, "stream"),
    )


def _tool(tool: Mapping[str, Any], number: int) -> dict[str, Any]:
    if tool.get("type", "custom") != "custom" or not isinstance(tool.get("name"), str):
        raise InvalidCallError(f"`tools[{number}]` is no tool of the client with a `name`: there are no others here")
    function = {"name": tool["name"], "parameters": tool.get("input_schema") or {"type": "object"}}
    if isinstance(tool.get("description"), str):
        function["description"] = tool["description"]
    return {"type": "function", "function": function}


def _messages(message: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """Returns the messages that one of Anthropic's stands for: the result of each tool is one."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise InvalidCallError(f"`{where}.role` is {role!r:.80}: send `user` or `assistant`")
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(blocks, list) or not all(isinstance(block, Mapping) for block in blocks):
        raise InvalidCallError(f"`{where}.content` is {content!r:.80}: send a string or a list of blocks")
    if role == "assistant":
        return [_assistant(blocks, where)]
    made: list[dict[str, Any]] = []
    for number, block in enumerate(blocks):
        place = f"{where}.content[{number}]"
        if block.get("type") == "tool_result":
            said = dialect.plain_text(block.get("content") or "", place)
            made.append({"role": "tool", "tool_call_id": str(block.get("tool_use_id")), "content": said})
        elif made and made[-1]["role"] == role:
            made[-1]["content"] += dialect.plain_text([block], place)
        else:
            made.append({"role": role, "content": dialect.plain_text([block], place)})
    return made


def _assistant(blocks: list[Mapping[str, Any]], where: str) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    calls = []
    for number, block in enumerate(blocks):
        match block.get("type"):
            case "thinking":
                message["reasoning_content"] = message.get("reasoning_content", "") + str(block.get("thinking") or "")
            case "redacted_thinking":
                pass
            case "tool_use":
                function = {"name": str(block.get("name")), "arguments": _arguments(block.get("input"))}
                calls.append({"id": str(block.get("id")), "type": "function", "function": function})
            case _:
                message["content"] += dialect.plain_text([block], f"{where}.content[{number}]")
    return message | ({"tool_calls": calls} if calls else {})


def _arguments(given: object) -> str:
    if isinstance(given, Mapping) and set(given) == {INVALID}:
        return str(given[INVALID])
    return json.dumps(given or {}, ensure_ascii=False)


def _input(arguments: str) -> dict[str, Any]:
    try:
        decoded = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        decoded = None
    return decoded if isinstance(decoded, dict) else {INVALID: arguments}


# -- answers -----------------------------------------------------------------------------------------------------------


def _blocks(answer: Answer) -> list[dict[str, Any]]:
    message = answer.message.message
    blocks: list[dict[str, Any]] = []
    if message.get("reasoning_content"):
        blocks.append({"type": "thinking", "thinking": message["reasoning_content"], "signature": ""})
    calls = message.get("tool_calls") or ()
    if message.get("content") or not calls:
        blocks.append({"type": "text", "text": message.get("content") or ""})
    for call in calls:
        function = call["function"]
        given = _input(function["arguments"])
        blocks.append({"type": "tool_use", "id": call["id"], "name": function["name"], "input": given})
    return blocks


def _head(answer: Answer, asked: Asked, **other: Any) -> dict[str, Any]:
    return {"id": f"msg_{answer.id}", "type": "message", "role": "assistant", "model": asked.model, **other}


def _stop_reason(answer: Answer) -> str:
    if answer.finish == "length":
        return "max_tokens"
    return "tool_use" if answer.message.message.get("tool_calls") else "end_turn"


def write(answer: Answer, asked: Asked, _: Callable[[int], str]) -> dict[str, Any]:
    usage = {"input_tokens": len(answer.prompt_tokens), "output_tokens": len(answer.tokens)}
    reason = _stop_reason(answer)
    return _head(answer, asked, content=_blocks(answer), stop_reason=reason, stop_sequence=None, usage=usage)


def stream(answer: Answer, asked: Asked, _: Callable[[int], str]) -> Iterator[Event]:
    usage = {"input_tokens": len(answer.prompt_tokens), "output_tokens": 0}
    yield _named("message_start", message=_head(answer, asked, content=[], stop_reason=None, usage=usage))
    for number, block in enumerate(_blocks(answer)):
        match block["type"]:
            case "tool_use":
                empty, kind, key = {**block, "input": {}}, "input_json_delta", "partial_json"
                said = json.dumps(block["input"], ensure_ascii=False)
            case "thinking":
                empty, kind, key, said = {**block, "thinking": ""}, "thinking_delta", "thinking", block["thinking"]
            case _:
                empty, kind, key, said = {**block, "text": ""}, "text_delta", "text", block["text"]
        yield _named("content_block_start", index=number, content_block=empty)
        for piece in dialect.pieces(said):
            yield _named("content_block_delta", index=number, delta={"type": kind, key: piece})
        yield _named("content_block_stop", index=number)
    delta = {"stop_reason": _stop_reason(answer), "stop_sequence": None}
    yield _named("message_delta", delta=delta, usage={"output_tokens": len(answer.tokens)})
    yield _named("message_stop")


def _named(name: str, **data: Any) -> Event:
    return name, {"type": name, **data}


def error(error: CallError) -> dict[str, Any]:
    """Returns an error as Anthropic writes it."""
    kind = ERRORS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    # Programs look for these words to compact their context.
    said = f"prompt is too long: {error}" if isinstance(error, ContextLengthError) else str(error)
    return {"type": "error", "error": {"type": kind, "message": said}}


MESSAGES = Dialect("/v1/messages", read, write, stream, error)
