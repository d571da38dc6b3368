"""`POST /v1/responses`: the newer protocol of OpenAI, as a translation of chats.

Nothing is kept on this side: a request has all items, and `previous_response_id` is refused. With `return_token_ids`,
the last item of the answer has `prompt_token_ids`, `generation_token_ids` and `generation_log_probs`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import count
from typing import Any

from stretto.serve.call_errors import InvalidCallError
from stretto.serve.dialects import dialect
from stretto.serve.dialects.chat import FREE_TEXT
from stretto.serve.dialects.dialect import Asked, Body, Dialect, Event
from stretto.serve.sessions import Answer

TEXTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")


def read(body: Body) -> Asked:
    """Reads a request. Raises `InvalidCallError`."""
    dialect.refuse(body, "previous_response_id", "answers are not kept here; send all items as `input`")
    dialect.refuse(body, "conversation", "conversations are not kept here; send all items as `input`")
    dialect.refuse(body, "background", "answers are not kept here", False)
    dialect.refuse(body, "tool_choice", "a tool cannot be enforced; send `auto` or `none`", "auto", "none")
    form = body.get("text") or {}
    if isinstance(form, Mapping):
        dialect.refuse(form, "format", FREE_TEXT, {"type": "text"})
    items = body.get("input")
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    items = dialect.objects({"input": items}, "input")
    if not items:
        raise InvalidCallError("`input` is missing or empty: send a string or a list of items")
    messages: list[dict[str, Any]] = []
    if instructions := dialect.text(body, "instructions", ""):
        messages.append({"role": "system", "content": instructions})
    for number, item in enumerate(items):
        _add(messages, item, f"input[{number}]")
    tools = [_tool(tool, number) for number, tool in enumerate(dialect.objects(body, "tools"))]
    model = dialect.text(body, "model", "")
    return Asked(
        model=model,
        messages=messages,
        tools=None if not tools or body.get("tool_choice") == "none" else tools,
        sampling=dialect.sampling(body, max_tokens=("max_output_tokens",)),
        train=dialect.trains(body, model),
        stream=dialect.flag(body, "stream"),
        wanted=frozenset({"return_token_ids"} if dialect.flag(body, "return_token_ids") else ()),
    )


def _tool(tool: Mapping[str, Any], number: int) -> dict[str, Any]:
    if tool.get("type") != "function" or not isinstance(tool.get("name"), str):
        raise InvalidCallError(f"`tools[{number}]` is no function with a `name`: only functions are tools")
    return {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}


def _add(messages: list[dict[str, Any]], item: Mapping[str, Any], where: str) -> None:
    """Adds an item to the messages. Items of one answer are one message."""
    match item.get("type", "message"):
        case "message":
            role = item.get("role")
            if role not in ("user", "assistant", "system", "developer"):
                raise InvalidCallError(f"`{where}.role` is {role!r:.80}: send `user`, `assistant` or `system`")
            said = dialect.plain_text(item.get("content"), where, TEXTS)
            if role == "assistant":
                _answer(messages)["content"] += said
            else:
                messages.append({"role": "system" if role == "developer" else role, "content": said})
        case "reasoning":
            said = dialect.plain_text(item.get("content") or item.get("summary") or "", where, TEXTS)
            if said:
                message = _answer(messages)
                message["reasoning_content"] = message.get("reasoning_content", "") + said
        case "function_call":
            function = {"name": str(item.get("name")), "arguments": str(item.get("arguments") or "{}")}
            call = {"id": str(item.get("call_id")), "type": "function", "function": function}
            _answer(messages).setdefault("tool_calls", []).append(call)
        case "function_call_output":
            said = dialect.plain_text(item.get("output"), where, TEXTS)
            messages.append({"role": "tool", "tool_call_id": str(item.get("call_id")), "content": said})
        case kind:
            raise InvalidCallError(f"`{where}.type` is {kind!r:.80}: only messages and functions can be rendered")


def _answer(messages: list[dict[str, Any]]) -> dict[str, Any]:
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


# -- answers -----------------------------------------------------------------------------------------------------------


def _items(answer: Answer, asked: Asked) -> list[dict[str, Any]]:
    message = answer.message.message
    items: list[dict[str, Any]] = []
    if message.get("reasoning_content"):
        content = [{"type": "reasoning_text", "text": message["reasoning_content"]}]
        items.append({"id": f"rs_{answer.id}", "type": "reasoning", "summary": [], "content": content})
    calls = message.get("tool_calls") or ()
    status = "completed" if answer.finish == "stop" else "incomplete"
    if message.get("content") or not calls:
        said = message.get("content") or ""
        part: dict[str, Any] = {"type": "output_text", "text": said, "annotations": [], "logprobs": []}
        item = {"id": f"msg_{answer.id}", "type": "message", "role": "assistant", "status": status}
        items.append({**item, "content": [part]})
    for number, call in enumerate(calls):
        item = {"id": f"fc_{answer.id}_{number}", "type": "function_call", "call_id": call["id"], "status": status}
        items.append({**item, **call["function"]})
    if "return_token_ids" in asked.wanted:
        items[-1]["prompt_token_ids"] = answer.prompt_tokens.tolist()
        items[-1]["generation_token_ids"] = answer.tokens.tolist()
        items[-1]["generation_log_probs"] = answer.logprobs.tolist()
    return items


def _response(answer: Answer, asked: Asked, items: list[dict[str, Any]], status: str | None = None) -> dict[str, Any]:
    """Returns the response. With a `status` it is not over yet."""
    prompt, sampled = len(answer.prompt_tokens), len(answer.tokens)
    usage = {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": sampled,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + sampled,
    }
    cut = answer.finish == "length" and status is None
    return {
        "id": f"resp_{answer.id}",
        "object": "response",
        "created_at": answer.created,
        "status": status or ("incomplete" if cut else "completed"),
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "instructions": None,
        "metadata": {},
        "model": asked.model,
        "output": items,
        "parallel_tool_calls": True,
        "temperature": None,
        "top_p": None,
        "tool_choice": "auto",
        "tools": [],
        "usage": None if status else usage,
    }


def write(answer: Answer, asked: Asked, _: Callable[[int], str]) -> dict[str, Any]:
    return _response(answer, asked, _items(answer, asked))


def stream(answer: Answer, asked: Asked, _: Callable[[int], str]) -> Iterator[Event]:
    numbers = count()

    def event(kind: str, /, **data: Any) -> Event:
        return kind, {"type": kind, "sequence_number": next(numbers), **data}

    items = _items(answer, asked)
    yield event("response.created", response=_response(answer, asked, [], "in_progress"))
    yield event("response.in_progress", response=_response(answer, asked, [], "in_progress"))
    for index, item in enumerate(items):
        at = {"item_id": item["id"], "output_index": index}
        begun = {**item, "status": "in_progress"}
        if item["type"] == "message":
            part = item["content"][0]
            at["content_index"] = 0
            yield event("response.output_item.added", output_index=index, item={**begun, "content": []})
            yield event("response.content_part.added", **at, part={**part, "text": ""})
            for piece in dialect.pieces(part["text"]):
                yield event("response.output_text.delta", **at, delta=piece, logprobs=[])
            yield event("response.output_text.done", **at, text=part["text"], logprobs=[])
            yield event("response.content_part.done", **at, part=part)
        elif item["type"] == "function_call":
            yield event("response.output_item.added", output_index=index, item={**begun, "arguments": ""})
            for piece in dialect.pieces(item["arguments"]):
                yield event("response.function_call_arguments.delta", **at, delta=piece)
            name, arguments = item["name"], item["arguments"]
            yield event("response.function_call_arguments.done", **at, name=name, arguments=arguments)
        else:
            yield event("response.output_item.added", output_index=index, item={**item, "content": []})
        yield event("response.output_item.done", output_index=index, item=item)
    last = _response(answer, asked, items)
    yield event(f"response.{last['status']}", response=last)


RESPONSES = Dialect("/v1/responses", read, write, stream, dialect.openai_error)
