"""The HTTP server of an endpoint.

    endpoint = Endpoint(sessions, Model("policy", tokenizer.decode))
    await endpoint.start()
    ...  # programs call `endpoint.url`
    await endpoint.close()

| address | |
|---|---|
| `POST /v1/chat/completions` | OpenAI's chat (`dialects/chat.py`) |
| `POST /v1/responses` | OpenAI's responses (`dialects/responses.py`) |
| `POST /v1/messages` | Anthropic's messages (`dialects/messages.py`) |
| `POST /inference/v1/generate` | token ids in and out (`dialects/generate.py`) |
| `GET /v1/models` | the model's name, and `max_model_len` |
| `POST /sessions/{id}/reward` | `{"reward": 1.0}` ends the session |
| `GET /health` | 200 while the server runs; needs no key |

A client sends the key of its session as `Authorization: Bearer KEY` or `x-api-key: KEY`. The key alone says which
policy answers: the name of the model in a request is any name.

A client that disconnects gives up its answer, not its call (`sessions.py`). An answer is streamed once all of it is
there. Until then a client that asked for a stream gets a comment now and then, so that its connection stays open.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import resource
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from stretto.errors import RecipeError
from stretto.serve.call_errors import CallError, InvalidCallError, RequestSizeError, ServerError, UnknownKeyError
from stretto.serve.dialects.chat import CHAT
from stretto.serve.dialects.dialect import Asked, Dialect, Event, openai_error, read_json
from stretto.serve.dialects.generate import GENERATE
from stretto.serve.dialects.messages import MESSAGES
from stretto.serve.dialects.responses import RESPONSES
from stretto.serve.sessions import Attempt, Call, Limits, Pending

if TYPE_CHECKING:
    from aiohttp import web

log = logging.getLogger(__name__)

DIALECTS = (CHAT, RESPONSES, MESSAGES, GENERATE)
REQUEST_S = 120.0  # for a client to send its request
ANSWER_S = 120.0  # for a client to take its answer, once that is there
IDLE_S = 600.0  # of a connection between two requests
KEEP_ALIVE_S = 10.0  # between two comments of a stream that waits for its answer
SHUTDOWN_S = 5.0  # for answers that are being written when the server closes
TOKEN_TEXTS = 1 << 16  # kept for log-probabilities: a tokenizer takes several microseconds for each
BACKLOG = 4_096  # connections that wait to be accepted: many agents may start at once
OPEN_FILES = 1 << 16  # many systems allow 1,024, and an agent takes up to five: its connection and its pipes


class Calls(Protocol):
    """Answers the calls of clients, by key: `Sessions`, or `stretto serve`."""

    limits: Limits

    def max_tokens(self, key: str) -> int:
        """Returns the most tokens of a context. Raises `UnknownKeyError` if nobody has this key."""
        ...

    def ask(self, key: str, call: Call) -> Pending:
        """Takes a call. Raises `CallError`."""
        ...

    def reward(self, key: str, id: str, reward: float) -> None:
        """Rewards a session. Raises `CallError`."""
        ...

    async def close_all(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Model:
    """The model behind an endpoint, as clients see it."""

    name: str
    token_text: Callable[[int], str]  # the text of one token


class Endpoint:
    """Serves the calls of sessions over HTTP, in the running event loop."""

    def __init__(
        self, calls: Calls, model: Model, *, host: str = "127.0.0.1", port: int = 0, socket: Path | None = None
    ) -> None:
        """`port` 0 is any free one. `socket`: a Unix socket that it listens on too."""
        self.on_call: Callable[[float], None] | None = (
            None  # gets the seconds of each answered call, from its arrival, outside of the policy
        )
        self._calls = calls
        self._model = replace(model, token_text=lru_cache(TOKEN_TEXTS)(model.token_text))
        self._host, self._port, self._socket = host, port, socket
        self._runner: web.AppRunner | None = None

    @property
    def port(self) -> int:
        """The port that it listens on, once it has started."""
        return self._port

    @property
    def url(self) -> str:
        """`http://host:port`, once it has started."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self._port}"

    async def start(self) -> None:
        """Listens. Raises `RecipeError` if it cannot."""
        web = _web()
        app = web.Application(client_max_size=self._calls.limits.request_bytes, middlewares=[web.middleware(_guard)])
        for dialect in DIALECTS:
            app.router.add_post(dialect.path, self._handler(dialect))
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/models/{name:.+}", self._one_model)
        app.router.add_post("/sessions/{id}/reward", self._reward)
        app.router.add_get("/health", self._health)
        runner = web.AppRunner(
            app,
            access_log=None,
            handler_cancellation=True,
            keepalive_timeout=IDLE_S,
            shutdown_timeout=SHUTDOWN_S,
        )
        _allow_connections()
        await runner.setup()
        place, remedy = f"{self._host}:{self._port}", "name another host or port"
        try:
            site = web.TCPSite(runner, self._host, self._port, backlog=BACKLOG)
            await site.start()
            place, remedy = f"{self._socket}", "set `TMPDIR` to a folder with a short path"
            if self._socket is not None:
                await web.UnixSite(runner, self._socket, backlog=BACKLOG).start()
        except OSError as error:
            await runner.cleanup()
            raise RecipeError(f"the endpoint cannot listen on `{place}`: {error}; {remedy}") from error
        self._runner = runner
        self._port = runner.addresses[0][1]

    async def close(self) -> None:
        """Ends every session, finishes what is being written, and stops listening. Safe to call twice."""
        await self._calls.close_all()
        if self._runner is not None:
            runner, self._runner = self._runner, None
            await runner.cleanup()

    # -- calls ---------------------------------------------------------------------------------------------------------

    def _handler(self, dialect: Dialect) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def handle(request: web.Request) -> web.StreamResponse:
            try:
                return await self._call(dialect, request)
            except CallError as error:
                return _json(dialect.error(error), error.status)

        return handle

    async def _call(self, dialect: Dialect, request: web.Request) -> web.StreamResponse:
        key = self._key(request)
        raw = await _body(request)
        arrived = time.monotonic()
        asked = dialect.read(read_json(raw))
        train = asked.train and request.headers.get("x-stretto-train", "").lower() not in ("0", "false", "no")
        call = Call(
            messages=asked.messages,
            tools=asked.tools,
            tokens=asked.tokens,
            train=train,
            sampling=asked.sampling,
            identity=hashlib.sha256(f"{dialect.path} {train} ".encode() + raw).digest(),
            attempt=_attempt(request),
            idempotency_key=request.headers.get("idempotency-key"),
            num_bytes=len(raw),
        )
        pending = self._calls.ask(key, call)
        asked_at = time.monotonic()
        if asked.stream:
            response, waited = await self._streamed(request, pending, dialect, asked)
        else:
            answer = await pending.answer()
            waited = time.monotonic() - asked_at
            response = _json(dialect.write(answer, asked, self._model.token_text))
        async with _taking(request):
            await _begin(response, request)
            await response.write_eof()
        if pending.future.exception() is None:
            pending.delivered = True
            if self.on_call is not None:
                self.on_call(time.monotonic() - arrived - min(waited, pending.future.result().policy_s))
        return response

    async def _streamed(
        self, request: web.Request, pending: Pending, dialect: Dialect, asked: Asked
    ) -> tuple[web.StreamResponse, float]:
        """Writes an answer as a stream, all but its end. Returns also the seconds that the answer took.

        An error that comes before the first comment has a status of its own.
        """
        assert dialect.stream is not None, "a dialect without streams refuses them"
        headers = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
        response: web.StreamResponse = _web().StreamResponse(headers=headers)
        began = time.monotonic()
        waiting = asyncio.create_task(pending.answer(), name="wait for an answer to stream")
        try:
            while not (await asyncio.wait([waiting], timeout=KEEP_ALIVE_S))[0]:
                async with _taking(request):
                    await _begin(response, request)
                    await response.write(b": waiting for tokens\n\n")
        finally:
            if not waiting.done():
                waiting.cancel()
                await asyncio.wait([waiting])
        waited = time.monotonic() - began
        try:
            events = [_event(event) for event in dialect.stream(waiting.result(), asked, self._model.token_text)]
        except Exception as error:
            if not response.prepared:
                raise
            if not isinstance(error, CallError):
                log.exception("a call of the endpoint failed")
            events = [_event(("error", dialect.error(_told(error))))]
        async with _taking(request):
            await _begin(response, request)
            for event in events:
                await response.write(event)
        return response, waited

    def _key(self, request: web.Request) -> str:
        """Returns the key of a request. Raises `UnknownKeyError` if it has none, or one that nobody has."""
        scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
        key = request.headers.get("x-api-key") or (bearer.strip() if scheme.lower() == "bearer" else "")
        if not key:
            raise UnknownKeyError("the request has no key: send `Authorization: Bearer KEY` or `x-api-key: KEY`")
        self._calls.max_tokens(key)
        return key

    # -- the rest ------------------------------------------------------------------------------------------------------

    async def _models(self, request: web.Request) -> web.Response:
        return _json({"object": "list", "data": [self._card(self._model.name, self._key(request))]})

    async def _one_model(self, request: web.Request) -> web.Response:
        return _json(self._card(request.match_info["name"], self._key(request)))

    def _card(self, name: str, key: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": 0,
            "owned_by": "stretto",
            "max_model_len": self._calls.max_tokens(key),
        }

    async def _reward(self, request: web.Request) -> web.Response:
        key = self._key(request)
        body = read_json(await _body(request))
        reward = body.get("reward")
        if isinstance(reward, bool) or not isinstance(reward, int | float):
            raise InvalidCallError(f"`reward` is {reward!r:.80}: send a number")
        try:
            value = float(reward)
        except OverflowError as error:
            raise InvalidCallError("`reward` is beyond the range of a float: scale the rewards") from error
        self._calls.reward(key, request.match_info["id"], value)
        return _json({"id": request.match_info["id"], "reward": value})

    async def _health(self, _: web.Request) -> web.Response:
        return _json({"status": "ok"})


async def _guard(request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> Any:
    """Turns every error into one that a client understands. A fault of this package does not end the server."""
    web = _web()
    try:
        return await handler(request)
    except CallError as error:
        return _json(openai_error(error), error.status)
    except web.HTTPException as error:
        said = {404: f"there is no `{request.path}` here", 405: f"`{request.path}` takes no {request.method}"}
        refused = CallError(said.get(error.status, error.reason))
        body = openai_error(refused)
        body["error"]["code"] = "not_found" if error.status in (404, 405) else "invalid_request"
        return _json(body, error.status)
    except ConnectionError as error:
        log.debug("a client is gone: %s", error)
        return web.Response(status=499)  # which goes nowhere
    except Exception as error:
        log.exception("a call of the endpoint failed")
        failed = _told(error)
        return _json(openai_error(failed), failed.status)


def _told(error: Exception) -> CallError:
    """Returns the error that a client is told."""
    return error if isinstance(error, CallError) else ServerError(f"the server failed: {type(error).__name__}")


async def _body(request: web.Request) -> bytes:
    """Reads a request. Raises `CallError` if it is too large, or does not arrive."""
    try:
        async with asyncio.timeout(REQUEST_S):
            return await request.read()
    except TimeoutError as error:
        raise InvalidCallError(f"the request did not arrive within {REQUEST_S:g} s") from error
    except _web().HTTPRequestEntityTooLarge as error:
        raise RequestSizeError(f"the request has more than {request.client_max_size:,} bytes") from error


def _attempt(request: web.Request) -> Attempt:
    """Reads how often a client has made a call. The clients of OpenAI and Anthropic say so."""
    number = request.headers.get("x-stainless-retry-count")
    if number is None:
        return "unknown"
    return "first" if number.strip() == "0" else "retry"


@contextlib.asynccontextmanager
async def _taking(request: web.Request) -> AsyncIterator[None]:
    """Bounds the time that a client takes for its answer. One that takes longer is disconnected."""
    try:
        async with asyncio.timeout(ANSWER_S):
            yield
    except TimeoutError as error:
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionResetError(f"the client did not take its answer within {ANSWER_S:g} s") from error


async def _begin(response: web.StreamResponse, request: web.Request) -> None:
    if not response.prepared:
        await response.prepare(request)


def _allow_connections() -> None:
    """Raises the number of files that this process may have open, as far as the system lets it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _event(event: Event) -> bytes:
    name, data = event
    said = data if isinstance(data, str) else json.dumps(data)
    return (f"event: {name}\n" if name else "").encode() + f"data: {said}\n\n".encode()


def _json(body: Any, status: int = 200) -> web.Response:
    data = json.dumps(body).encode()
    response: web.Response = _web().Response(body=data, status=status, content_type="application/json")
    return response


def refuse_missing_library() -> None:
    """Raises `RecipeError` if the HTTP library is not installed; for callers that load a model first."""
    _web()


def _web() -> Any:
    """Returns the module of the HTTP library. Raises `RecipeError` if it is not installed."""
    try:
        from aiohttp import web
    except ImportError as error:
        raise RecipeError("the endpoint needs the package aiohttp: `pip install 'stretto[serve]'`") from error
    return web
