"""The parts that every dialect has, and the checks of requests that they share."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from stretto.serve.call_errors import CallError, InvalidCallError
from stretto.serve.sessions import AS_POLICY, Answer, Message, RequestedSampling

UNTRAINED = "-untrained"  # at the end of a model's name: the call does not train

_T = TypeVar("_T")

Body = Mapping[str, Any]
Event = tuple[str | None, Mapping[str, Any] | str]
"""An event of a stream: its name, if the dialect names its events, and its data."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A request in any dialect, read and checked."""

    model: str
    messages: Sequence[Message] = ()
    tools: Sequence[Mapping[str, Any]] | None = None
    tokens: tuple[int, ...] | None = None
    sampling: RequestedSampling = AS_POLICY
    train: bool = True
    stream: bool = False
    wanted: frozenset[str] = field(default_factory=frozenset)  # parts of the answer that a dialect leaves out otherwise


@dataclass(frozen=True, slots=True)
class Dialect:
    """A protocol: its address, and its translation in both directions."""

    path: str
    read: Callable[[Body], Asked]  # raises `InvalidCallError`
    write: Callable[[Answer, Asked, Callable[[int], str]], dict[str, Any]]  # given the text of a token
    stream: Callable[[Answer, Asked, Callable[[int], str]], Iterator[Event]] | None
    error: Callable[[CallError], dict[str, Any]]


# -- requests ----------------------------------------------------------------------------------------------------------


def read_json(raw: bytes) -> Body:
    """Returns the object that a request consists of. Raises `InvalidCallError`."""
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise InvalidCallError(f"the request is no JSON: {error}") from error
    if not isinstance(body, dict):
        raise InvalidCallError(f"the request is a JSON {_kind(body)}: send an object")
    return body


def text(body: Body, key: str, default: str) -> str:
    return _typed(body, key, default, str, "a string")


def flag(body: Body, key: str, default: bool = False) -> bool:
    return _typed(body, key, default, bool, "true or false")


def objects(body: Body, key: str) -> list[Mapping[str, Any]]:
    """Returns a list of objects. Raises `InvalidCallError`."""
    values: list[Any] = _typed(body, key, [], list, "a list of objects")
    for number, value in enumerate(values):
        if not isinstance(value, dict):
            raise InvalidCallError(f"`{key}[{number}]` is a JSON {_kind(value)}: send an object")
    return values


def number(body: Body, key: str) -> float | None:
    value = body.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not -1e9 <= value <= 1e9:
        raise InvalidCallError(f"`{key}` is {value!r:.80}: send a number")
    return float(value)


def count(body: Body, key: str) -> int | None:
    value = body.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 1_000_000_000:
        raise InvalidCallError(f"`{key}` is {value!r:.80}: send a whole number of at least 1")
    return value


def stop_strings(body: Body, key: str) -> tuple[str, ...]:
    value = body.get(key) or ()
    values = (value,) if isinstance(value, str) else value
    if not isinstance(values, list | tuple) or not all(isinstance(each, str) and each for each in values):
        raise InvalidCallError(f"`{key}` is {value!r:.80}: send a string or a list of strings")
    return tuple(values)


def sampling(body: Body, *, max_tokens: Sequence[str], stop: str = "stop") -> RequestedSampling:
    """Returns the sampling that a request asks for. `max_tokens` are the names of that key, the first found counts."""
    seed = body.get("seed")
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
        raise InvalidCallError(f"`seed` is {seed!r:.80}: send a whole number")
    most = next((found for key in max_tokens if (found := count(body, key)) is not None), None)
    temperature, top_p = number(body, "temperature"), number(body, "top_p")
    if temperature is not None and temperature < 0:
        raise InvalidCallError(f"`temperature` is {temperature:g}: send a number of at least 0")
    if top_p is not None and not 0 < top_p <= 1:
        raise InvalidCallError(f"`top_p` is {top_p:g}: send a number above 0 and at most 1")
    return RequestedSampling(most, temperature, top_p, stop_strings(body, stop), seed)


def trains(body: Body, model: str) -> bool:
    """Tells if a call is to be trained: it says so itself, or by the name of its model."""
    return flag(body, "train", True) and not model.endswith(UNTRAINED)


def refuse(body: Body, key: str, why: str, *allowed: Any) -> None:
    """Raises `InvalidCallError` if a request has a key with a value that is not one of those `allowed`."""
    value = body.get(key)
    if value is not None and value not in allowed:
        raise InvalidCallError(f"`{key}` is {value!r:.80}: {why}")


def plain_text(content: Any, where: str, kinds: Sequence[str] = ("text",)) -> str:
    """Returns the text of a content that is a string, or a list of parts of these `kinds`.

    Raises `InvalidCallError` for anything else, such as an image; `where` names the content.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidCallError(f"`{where}` is {content!r:.80}: send a string or a list of parts")
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") not in kinds or not isinstance(part.get("text"), str):
            raise InvalidCallError(f"`{where}` has {part!r:.80}: only text can be rendered")
    return "".join(part["text"] for part in content)


def _typed(body: Body, key: str, default: _T, kind: type[_T], said: str) -> _T:
    value = body.get(key)
    if value is None:
        return default
    if not isinstance(value, kind):
        raise InvalidCallError(f"`{key}` is {value!r:.80}: send {said}")
    return value


def _kind(value: object) -> str:
    return {list: "list", str: "string", bool: "boolean", type(None): "null"}.get(type(value), "number")


# -- answers -----------------------------------------------------------------------------------------------------------


def openai_error(error: CallError) -> dict[str, Any]:
    """Returns an error as OpenAI writes it."""
    kind = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}.get(error.status)
    kind = kind or ("invalid_request_error" if error.status < 500 else "server_error")
    return {"error": {"message": str(error), "type": kind, "param": None, "code": error.code}}


def logprobs(answer: Answer, token_text: Callable[[int], str]) -> dict[str, Any]:
    """Returns the log-probabilities of the sampled tokens as OpenAI writes them."""
    content = []
    for token, logprob in zip(answer.tokens.tolist(), answer.logprobs.tolist(), strict=True):
        said = token_text(token)
        entry = {"token": said, "logprob": logprob, "bytes": list(said.encode()), "top_logprobs": []}
        content.append(entry)
    return {"content": content}


def pieces(said: str, size: int = 256) -> Iterator[str]:
    """Yields a text in pieces, as a stream carries it."""
    for start in range(0, len(said), size):
        yield said[start : start + size]
