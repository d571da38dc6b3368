"""`POST /v1/chat/completions`: the protocol of OpenAI that nearly every agent speaks.

With `logprobs` and `return_token_ids` the answer also has the tokens, where vLLM has them: `prompt_token_ids`,
`choices[0].token_ids` and `choices[0].logprobs`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from stretto.serve.call_errors import InvalidCallError
from stretto.serve.dialects import dialect
from stretto.serve.dialects.dialect import Asked, Body, Dialect, Event
from stretto.serve.sessions import Answer

FREE_TEXT = "the form of the answer cannot be enforced; ask for it in the messages"


def read(body: Body) -> Asked:
    """Reads a request. Raises `InvalidCallError`."""
    messages = dialect.objects(body, "messages")
    if not messages:
        raise InvalidCallError("`messages` is missing or empty: send at least one")
    dialect.refuse(body, "n", "one answer is given to a call; call several times", 1)
    dialect.refuse(body, "top_logprobs", "only log-probabilities of sampled tokens are recorded", 0)
    dialect.refuse(body, "response_format", FREE_TEXT, {"type": "text"})
    dialect.refuse(body, "functions", "send `tools`", [])
    dialect.refuse(body, "tool_choice", "a tool cannot be enforced; send `auto` or `none`", "auto", "none")
    tools = dialect.objects(body, "tools")
    for number, tool in enumerate(tools):
        function = tool.get("function")
        if tool.get("type") != "function" or not isinstance(function, Mapping) or not function.get("name"):
            raise InvalidCallError(f"`tools[{number}]` has no `function` with a `name`: only functions are tools")
    model = dialect.text(body, "model", "")
    options = body.get("stream_options") or {}
    wanted = {key for key in ("logprobs", "return_token_ids") if dialect.flag(body, key)}
    if isinstance(options, Mapping) and options.get("include_usage"):
        wanted.add("usage")
    return Asked(
        model=model,
        messages=[_normal(message, number) for number, message in enumerate(messages)],
        tools=None if not tools or body.get("tool_choice") == "none" else tools,
        sampling=dialect.sampling(body, max_tokens=("max_completion_tokens", "max_tokens")),
        train=dialect.trains(body, model),
        stream=dialect.flag(body, "stream"),
        wanted=frozenset(wanted),
    )


def _normal(message: Mapping[str, Any], number: int) -> Mapping[str, Any]:
    """Returns a message with a role that templates know. Raises `InvalidCallError`."""
    role = message.get("role")
    if not isinstance(role, str):
        raise InvalidCallError(f"`messages[{number}]` has no `role`")
    return {**message, "role": "system"} if role == "developer" else message


def message_of(answer: Answer) -> dict[str, Any]:
    """Returns the answer as an assistant message."""
    message: dict[str, Any] = dict(answer.message.message)
    if message.get("tool_calls") and not message.get("content"):
        message["content"] = None
    return message


def finish_reason(answer: Answer) -> str:
    return "tool_calls" if answer.finish == "stop" and answer.message.message.get("tool_calls") else answer.finish


def usage(answer: Answer) -> dict[str, int]:
    prompt, sampled = len(answer.prompt_tokens), len(answer.tokens)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def write(answer: Answer, asked: Asked, token_text: Callable[[int], str]) -> dict[str, Any]:
    choice = {"index": 0, "message": message_of(answer), "finish_reason": finish_reason(answer), "logprobs": None}
    body = {**_head(answer, asked, "chat.completion"), "choices": [choice], "usage": usage(answer)}
    return _with_tokens(body, choice, answer, asked, token_text)


def stream(answer: Answer, asked: Asked, token_text: Callable[[int], str]) -> Iterator[Event]:
    """Yields the answer in chunks. Tokens and their log-probabilities are with the last."""
    head = _head(answer, asked, "chat.completion.chunk")
    message = message_of(answer)

    def chunk(delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "finish_reason": reason, "logprobs": None}
        return {**head, "choices": [choice]}

    yield None, chunk({"role": "assistant", "content": ""})
    for key in ("reasoning_content", "content"):
        for piece in dialect.pieces(message.get(key) or ""):
            yield None, chunk({key: piece})
    for number, call in enumerate(message.get("tool_calls") or ()):
        yield None, chunk({"tool_calls": [{"index": number, **call}]})
    last = chunk({}, finish_reason(answer))
    yield None, _with_tokens(last, last["choices"][0], answer, asked, token_text)
    if "usage" in asked.wanted:
        yield None, {**head, "choices": [], "usage": usage(answer)}
    yield None, "[DONE]"


def _head(answer: Answer, asked: Asked, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{answer.id}", "object": kind, "created": answer.created, "model": asked.model}


def _with_tokens(
    body: dict[str, Any], choice: dict[str, Any], answer: Answer, asked: Asked, token_text: Callable[[int], str]
) -> dict[str, Any]:
    if "logprobs" in asked.wanted:
        choice["logprobs"] = dialect.logprobs(answer, token_text)
    if "return_token_ids" in asked.wanted:
        choice["token_ids"] = answer.tokens.tolist()
        body["prompt_token_ids"] = answer.prompt_tokens.tolist()
    return body


CHAT = Dialect("/v1/chat/completions", read, write, stream, dialect.openai_error)
