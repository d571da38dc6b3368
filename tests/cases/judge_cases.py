"""A server on loopback that speaks chat completions, in a thread, and answers as a test wants."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web


@dataclass
class Reply:
    """The server's reaction to one call."""

    text: str = "7"
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    delay_s: float = 0.0
    body: Any = None  # instead of a chat completion
    usage: bool = True


@dataclass
class FakeJudge:
    """The server. `answer` is called with the body of each call; its thread may be slow."""

    answer: Callable[[dict[str, Any]], Reply] = lambda body: Reply()
    key: str | None = None
    models: tuple[str, ...] | None = ("judge",)  # None: a page instead of a list
    calls: list[dict[str, Any]] = field(default_factory=list)
    num_open: int = 0
    most_open: int = 0
    connections: set[Any] = field(default_factory=set)
    url: str = ""

    def _allowed(self, request: web.Request) -> bool:
        return self.key is None or request.headers.get("Authorization") == f"Bearer {self.key}"

    async def list_models(self, request: web.Request) -> web.Response:
        if not self._allowed(request):
            return _error(401, f"Incorrect API key provided: {request.headers.get('Authorization', '')[7:]}")
        if self.models is None:
            return web.Response(text="<html>welcome</html>", content_type="text/html")
        return web.json_response({"data": [{"id": name} for name in self.models]})

    async def chat(self, request: web.Request) -> web.Response:
        if not self._allowed(request):
            return _error(401, f"Incorrect API key provided: {request.headers.get('Authorization', '')[7:]}")
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        self.connections.add(request.transport.get_extra_info("peername"))
        try:
            body = await request.json()
            self.calls.append(body)
            reply = self.answer(body)
            await asyncio.sleep(reply.delay_s)
            if reply.status != 200:
                return _error(reply.status, reply.text, reply.headers)
            if reply.body is not None:
                return web.Response(text=reply.body if isinstance(reply.body, str) else json.dumps(reply.body))
            made: dict[str, Any] = {
                "choices": [{"message": {"role": "assistant", "content": reply.text}, "finish_reason": "stop"}]
            }
            if reply.usage:
                made["usage"] = {"prompt_tokens": 100, "completion_tokens": 10}
            return web.json_response(made)
        finally:
            self.num_open -= 1


def _error(status: int, message: str, headers: Mapping[str, str] | None = None) -> web.Response:
    return web.json_response({"error": {"message": message, "code": None}}, status=status, headers=headers)


@contextmanager
def running(judge: FakeJudge, port: int = 0) -> Iterator[FakeJudge]:
    """Serves until the end of the block."""
    loop = asyncio.new_event_loop()
    ready = threading.Event()
    stop = asyncio.Event()

    async def serve() -> None:
        app = web.Application()
        app.router.add_get("/v1/models", judge.list_models)
        app.router.add_post("/v1/chat/completions", judge.chat)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", port, reuse_address=True)
        await site.start()
        judge.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}/v1"  # type: ignore[union-attr]
        ready.set()
        await stop.wait()
        await runner.cleanup()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()), daemon=True)
    thread.start()
    assert ready.wait(10)
    try:
        yield judge
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)
        loop.close()
