"""Tools of an MCP server for environments that chat.

    class Notes(McpEnvironment):
        async def play(self, row, chat):
            answer = await chat.run_tools(row["messages"], self.tools, max_calls=4)
            return float(row["answer"] in answer.content)

The server is a program that speaks MCP over its standard input and output. It is started when the environment is
created, so a command that does not work is an error before the run. All episodes of a process share it. If its tools
change something that later calls see, use `per_episode = true`: each episode then has a server of its own.

An error of a tool is text for the model. A server that ends fails the episodes that call it, and is started again.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import os
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from itertools import islice
from typing import IO, Any

from stretto.chat.policy import TokenPolicy
from stretto.chat.tools import OUTPUT_CHARS, SECONDS, Tool
from stretto.environments.adapters.packages import optional_module
from stretto.environments.chat_environment import ChatEnvironment
from stretto.environments.protocol import Outcome
from stretto.errors import RecipeError, RewardError, describe
from stretto.types import Prompt

INSTALL = "pip install 'stretto[mcp]'"
START_S = 30.0
LOG_BYTES = 1 << 20  # of a server's standard error; older lines are thrown away


class McpEnvironment(ChatEnvironment):
    """Plays episodes whose `tools` are those of an MCP server. A subclass defines `play`."""

    def __init__(
        self,
        tokenizer: Any,
        *,
        command: Sequence[str],
        env: Mapping[str, str] | None = None,
        per_episode: bool = False,
        only: Sequence[str] = (),
        seconds: float = SECONDS,
        output_chars: int = OUTPUT_CHARS,
    ) -> None:
        """`command` starts the server; `python` is the one that runs Stretto. `env` are environment variables that it
        sees beside the usual ones.

        `only` names the tools to offer, in that order; without it, all of them. `seconds` and `output_chars` limit each
        call. Raises `RecipeError` if the server does not start.
        """
        if isinstance(command, str) or not command:
            raise RecipeError(f"`task.config.command = {command!r}`: write a list, such as `['python', 'server.py']`")
        self._make_server = partial(McpServer, tuple(command), env)
        self._server = self._make_server()
        self._own_server: ContextVar[McpServer] = ContextVar("own_server")
        found = {tool.name: tool for tool in self._server.start()}
        for name in only:
            if name not in found:
                self._server.close()
                raise RecipeError(f"`task.config.only` names `{name}`, and the server's tools are {sorted(found)}")
        self._per_episode = per_episode
        if per_episode:
            self._server.close()
        offered = [found[name] for name in only] if only else list(found.values())
        self.tools = tuple(self._tool(tool, seconds, output_chars) for tool in offered)
        super().__init__(tokenizer)

    async def episode(self, prompt: Prompt, policy: TokenPolicy) -> float | Outcome:
        if not self._per_episode:
            return await super().episode(prompt, policy)
        server = self._make_server()
        self._own_server.set(server)
        try:
            await asyncio.to_thread(server.start)
            return await super().episode(prompt, policy)
        finally:
            await asyncio.to_thread(server.close)

    async def close(self) -> None:
        """Ends the server."""
        await asyncio.to_thread(self._server.close)

    def _tool(self, tool: Any, seconds: float, output_chars: int) -> Tool:
        schema = dict(tool.input_schema)

        async def call(**arguments: Any) -> str:
            return await self._own_server.get(self._server).call(tool.name, arguments)

        check = partial(_checked, _validator(schema))
        return Tool(tool.name, tool.description or "", schema, call, check, seconds, output_chars)


class McpServer:
    """An MCP server as a program of its own. An event loop in a thread of its own speaks to it."""

    def __init__(self, command: tuple[str, ...], env: Mapping[str, str] | None = None) -> None:
        self._mcp = optional_module("mcp", package="mcp", install=INSTALL)
        self._stdio = optional_module("mcp.client.stdio", package="mcp", install=INSTALL)
        self._command = command
        self._env = dict(env or {})
        self._log: IO[str] = tempfile.TemporaryFile("a+", encoding="utf-8", errors="replace")  # noqa: SIM115
        self._starting = threading.Lock()
        self._connection: _Connection | None = None
        self._closed = False

    def start(self) -> list[Any]:
        """Starts the server if it does not run, and returns its tools. Blocks. Raises `RecipeError` if it fails."""
        with self._starting:
            if self._closed:
                raise RewardError(f"the MCP server {self._named} was closed")
            if self._connection is None or self._connection.is_lost:
                self._connection = None
                connection = _Connection(self._client)
                try:
                    connection.tools.result(START_S)
                except (Exception, concurrent.futures.CancelledError) as error:
                    connection.stop()
                    said = f"no answer within {START_S:g} s" if isinstance(error, TimeoutError) else _first(error)
                    raise RecipeError(
                        f"the MCP server {self._named} does not start: {said}{self._last_words()}"
                    ) from error
                self._connection = connection
            return list(self._connection.tools.result())

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Calls a tool and returns its text. Raises `RewardError` if the server has ended."""
        connection = self._connection
        if connection is None or connection.is_lost:
            try:
                await asyncio.to_thread(self.start)
            except RecipeError as error:
                raise RewardError(str(error)) from error
            connection = self._connection
            assert connection is not None
        self._shorten_log()
        try:
            return _text(await connection.call(name, arguments))
        except self._mcp.MCPError as error:
            if not connection.is_lost:
                return f"Error: {error}"
            raise RewardError(f"the MCP server {self._named} has ended{self._last_words()}") from error

    def close(self) -> None:
        """Ends the server. Blocks until it is gone."""
        with self._starting:
            self._closed = True
            if self._connection is not None:
                self._connection.stop()
                self._connection = None
            self._log.close()

    @property
    def _named(self) -> str:
        return f"`{' '.join(self._command)}`"

    def _client(self) -> Any:
        program, *rest = self._command
        program = sys.executable if program == "python" else program
        server = self._mcp.StdioServerParameters(command=program, args=rest, env=self._env)
        return self._mcp.Client(self._stdio.stdio_client(server, errlog=self._log))

    def _last_words(self) -> str:
        """Returns the last line that the server wrote to its standard error."""
        self._log.seek(max(0, self._log.seek(0, os.SEEK_END) - 4_096))
        lines = [line.strip() for line in self._log.read().splitlines() if line.strip()]
        return f" (its last line: {lines[-1]:.200})" if lines else ""

    def _shorten_log(self) -> None:
        if os.fstat(self._log.fileno()).st_size > LOG_BYTES:
            os.ftruncate(self._log.fileno(), 0)


class _Connection:
    """A running server and the thread that speaks to it."""

    def __init__(self, make_client: Any) -> None:
        self.tools: concurrent.futures.Future[list[Any]] = concurrent.futures.Future()
        self.is_lost = False
        self._make_client = make_client
        self._loop = asyncio.new_event_loop()
        self._stopping = asyncio.Event()
        self._client: Any = None
        self._thread = threading.Thread(target=self._run, name="mcp server", daemon=True)
        self._thread.start()

    async def call(self, name: str, arguments: Mapping[str, Any]) -> Any:
        if self.is_lost:
            raise RewardError("the MCP server has ended")
        calling = asyncio.run_coroutine_threadsafe(self._called(name, dict(arguments)), self._loop)
        return await asyncio.wrap_future(calling)

    async def _called(self, name: str, arguments: dict[str, Any]) -> Any:
        try:
            return await self._client.call_tool(name, arguments)
        except Exception as error:
            if not _is_answer(error):
                self.is_lost = True
            raise

    def stop(self) -> None:
        self.is_lost = True
        if not self._loop.is_closed():
            try:
                self._loop.call_soon_threadsafe(self._stopping.set)
            except RuntimeError:  # it was closed just now
                return
        self._thread.join(timeout=START_S)

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        except BaseException as error:
            if not self.tools.done():
                self.tools.set_exception(RuntimeError(_first(error)))
        finally:
            self.is_lost = True
            if not self.tools.done():
                self.tools.set_exception(RuntimeError("it ended"))
            self._loop.close()

    async def _serve(self) -> None:
        async with self._make_client() as client:
            self._client = client
            found, cursor = [], None
            while True:
                page = await client.list_tools(cursor=cursor)
                found += page.tools
                cursor = page.next_cursor
                if cursor is None:
                    break
            self.tools.set_result(found)
            await self._stopping.wait()


def _is_answer(error: BaseException) -> bool:
    """Tells if an error is one that the server answered with; others mean that it is gone."""
    from mcp_types import CONNECTION_CLOSED

    return getattr(error, "code", CONNECTION_CLOSED) != CONNECTION_CLOSED


def _first(error: BaseException) -> str:
    """Returns the first error of a group of errors, as text."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return describe(error)


def _validator(schema: Mapping[str, Any]) -> Any:
    validators = optional_module("jsonschema.validators", package="mcp", install=INSTALL)
    return validators.validator_for(schema)(schema)


def _checked(validator: Any, arguments: Any) -> Mapping[str, Any]:
    if not isinstance(arguments, Mapping):
        raise ValueError("they are no JSON object")
    faults = [
        f"`{'.'.join(map(str, fault.absolute_path))}`: {fault.message}" if fault.absolute_path else fault.message
        for fault in islice(validator.iter_errors(dict(arguments)), 5)
    ]
    if faults:
        raise ValueError("; ".join(faults))
    return arguments


def _text(result: Any) -> str:
    parts = [getattr(part, "text", None) or f"[{part.type}]" for part in result.content]
    if not parts and result.structured_content is not None:
        parts = [json.dumps(result.structured_content, ensure_ascii=False)]
    text = "\n".join(parts)
    return f"Error: {text}" if result.is_error else text
