"""Environments behind an OpenEnv server: each episode is a session over a WebSocket.

An action is an object. `action` names the field of it that gets the policy's text; a function `act(text)` may make the
whole object instead. An observation is an object too: `observation` names the field that the policy reads, a function
`observe(observation)` may make the text, and without either the policy reads it as JSON.

The columns `seed` and `reset` (an object) of a row go to the server's `reset`. An episode may be run again, so the
environment must be deterministic for them.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

from stretto.environments.adapters.packages import function_option, optional_module
from stretto.environments.adapters.text_worlds import Observation, TextWorld, WorldEnvironment
from stretto.errors import RecipeError, RewardError, describe

INSTALL = "pip install 'stretto[openenv]'"
CONNECT_S = 10.0
SESSIONS = 16

Act = Callable[[str], Mapping[str, Any]]
Observe = Callable[[Mapping[str, Any]], str]


class OpenEnvEnvironment(WorldEnvironment):
    """Plays episodes on an OpenEnv server."""

    def __init__(
        self,
        tokenizer: Any,
        *,
        url: str,
        turns: int,
        action: str | None = None,
        observation: str | None = None,
        act: str | None = None,
        observe: str | None = None,
        sessions: int = SESSIONS,
        seconds: float = 60.0,
    ) -> None:
        """`url` is that of a server that runs. `seconds` is the deadline of each answer.

        `sessions` is the most episodes at once in this process; others wait. The server must allow those of all worker
        processes together (`max_concurrent_envs`).
        Raises `RecipeError` if nobody listens.
        """
        super().__init__(tokenizer, turns=turns)
        module = optional_module("openenv.core.generic_client", package="openenv", install=INSTALL)
        if (action is None) == (act is None):
            raise RecipeError(
                "set `task.config.action` to the field of an action that gets the policy's text, or `task.config.act` "
                "to a function that makes actions of texts, and not both"
            )
        self._act: Act = function_option("act", act) or (lambda text: {str(action): text})
        self._observe: Observe = function_option("observe", observe) or _observer(observation)
        self._sessions = asyncio.Semaphore(sessions)
        self._client = lambda: module.GenericEnvClient(
            base_url=url, connect_timeout_s=CONNECT_S, message_timeout_s=seconds
        )
        _refuse_silence(url)

    def world(self, row: Mapping[str, Any]) -> TextWorld:
        seed = {"seed": row["seed"]} if row.get("seed") is not None else {}
        return _Session(self._client, self._sessions, self._act, self._observe, {**seed, **(row.get("reset") or {})})


class _Session:
    """One episode on the server."""

    def __init__(
        self,
        make_client: Callable[[], Any],
        sessions: asyncio.Semaphore,
        act: Act,
        observe: Observe,
        options: Mapping[str, Any],
    ) -> None:
        self._make_client, self._sessions = make_client, sessions
        self._act, self._observe, self._options = act, observe, options
        self._client: Any = None

    async def reset(self) -> Observation:
        await self._sessions.acquire()
        self._client = self._make_client()
        return await self._observed(lambda: self._client.reset(**self._options))

    async def step(self, action: str) -> Observation:
        try:
            made = dict(self._act(action))
        except ValueError as error:
            return Observation(f"Error: {error}")
        return await self._observed(lambda: self._client.step(made))

    async def close(self) -> None:
        if self._client is None:
            return
        try:
            await self._client.close()
        except Exception:  # the session is over in any case
            pass
        finally:
            self._client = None
            self._sessions.release()

    async def _observed(self, ask: Callable[[], Any]) -> Observation:
        try:
            result = await ask()
        except Exception as error:  # of a connection, or of the server
            raise RewardError(f"the OpenEnv server failed: {describe(error)}") from error
        text = self._observe(result.observation or {})
        return Observation(str(text), float(result.reward or 0.0), bool(result.done))


def _observer(field: str | None) -> Observe:
    def observe(observation: Mapping[str, Any]) -> str:
        if field is None:
            return json.dumps(observation, ensure_ascii=False)
        if field not in observation:
            raise RewardError(
                f"`task.config.observation = {field!r}`, and the server's observations have {sorted(observation)}"
            )
        return str(observation[field])

    return observe


def _refuse_silence(url: str) -> None:
    """Raises `RecipeError` if nobody listens at a URL."""
    said = f"`task.config.url = {url!r}`"
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https", "ws", "wss") or parts.hostname is None:
        raise RecipeError(f"{said} is no URL of a server, such as `http://localhost:8000`")
    port = parts.port or (443 if parts.scheme in ("https", "wss") else 80)
    try:
        socket.create_connection((parts.hostname, port), CONNECT_S).close()
    except OSError as error:
        raise RecipeError(f"{said}: nobody listens there ({error}); start the server first") from error
