"""Environments of gymnasium as episodes of text.

Observations become text, and text becomes actions:

| observation | text |
|---|---|
| a string (`gymnasium.spaces.Text`) | the string |
| any other, of an environment with `render_mode = "ansi"` | what it renders; a highlighted letter stands in brackets |
| any other | what `observe(env, observation, info)` returns |

| action space | action |
|---|---|
| `Text` | the policy's text |
| `Discrete` with names (`actions`) | the name that stands last in the text |
| any other | what `act(env, text)` returns |

If no action can be read (`act` raises `ValueError`), the environment is not stepped: the policy reads the error, and
has used a turn.

The columns `seed` and `options` of a row go to `reset`. An episode may be run again, so an environment must be
deterministic for a seed; those of gymnasium are.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from stretto.environments.adapters.packages import function_option, optional_module
from stretto.environments.adapters.text_worlds import Observation, TextWorld, WorldEnvironment
from stretto.errors import RecipeError, RewardError, describe

INSTALL = "pip install 'stretto[gymnasium]'"
THREADS = 64  # asyncio's own are a few for each core, and steps that wait for a network hold theirs

_HIGHLIGHTED = re.compile(r"\x1b\[[0-9;]*4[0-7]m(.*?)\x1b\[0m", re.DOTALL)
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")

Observe = Callable[[Any, Any, Mapping[str, Any]], str]
Act = Callable[[Any, str], Any]
Result = TypeVar("Result")


class GymnasiumEnvironment(WorldEnvironment):
    """Plays episodes of an environment of gymnasium, a new one for each episode."""

    def __init__(
        self,
        tokenizer: Any,
        *,
        id: str,
        turns: int,
        options: Mapping[str, Any] | None = None,
        observe: str | None = None,
        act: str | None = None,
        actions: Sequence[str] = (),
        threads: int = THREADS,
    ) -> None:
        """`id` and `options` go to `gymnasium.make`; `module:Name-v0` imports the module first.

        `threads` is the most calls of environments at once. Raises `RecipeError` if observations or actions cannot be
        text.
        """
        super().__init__(tokenizer, turns=turns)
        if threads < 1:
            raise RecipeError(f"`task.config.threads = {threads}`: environments need at least one thread")
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="gymnasium")
        gymnasium = optional_module("gymnasium", package="gymnasium", install=INSTALL)
        self._make = partial(gymnasium.make, id, disable_env_checker=True, **dict(options or {}))
        try:
            env = self._make()
        except Exception as error:  # an environment may raise anything
            raise RecipeError(f"`gymnasium.make({id!r})` failed: {describe(error)}") from error
        try:
            self._observe = function_option("observe", observe) or _default_observe(gymnasium, id, env)
            self._act = function_option("act", act) or _default_act(gymnasium, id, env, actions)
        finally:
            env.close()

    def world(self, row: Mapping[str, Any]) -> TextWorld:
        return _GymnasiumWorld(self._make, self._observe, self._act, row, self._threads)


class _GymnasiumWorld:
    """One environment. Its calls may block, so they run in threads, one after the other."""

    def __init__(
        self,
        make: Callable[[], Any],
        observe: Observe,
        act: Act,
        row: Mapping[str, Any],
        threads: ThreadPoolExecutor,
    ) -> None:
        self._make, self._observe, self._act = make, observe, act
        self._threads = threads
        self._seed, self._options = row.get("seed"), row.get("options")
        self._env: Any = None
        self._closed = False
        self._one_at_a_time = threading.Lock()

    async def reset(self) -> Observation:
        return await self._threaded(self._reset)

    async def step(self, action: str) -> Observation:
        return await self._threaded(partial(self._step, action))

    async def close(self) -> None:
        await self._threaded(self._close)

    async def _threaded(self, work: Callable[[], Result]) -> Result:
        def locked() -> Result:
            with self._one_at_a_time:
                return work()

        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, locked)
        except RewardError:
            raise
        except Exception as error:
            raise RewardError(f"the environment of gymnasium raised {describe(error)}") from error

    def _reset(self) -> Observation:
        if self._closed:
            raise RewardError("the episode has ended")
        self._env = self._make()
        observation, info = self._env.reset(seed=self._seed, options=self._options)
        return Observation(self._observe(self._env, observation, info))

    def _step(self, text: str) -> Observation:
        try:
            action = self._act(self._env, text)
        except ValueError as error:
            return Observation(f"Error: {error}")
        observation, reward, terminated, truncated, info = self._env.step(action)
        over = bool(terminated or truncated)
        return Observation("" if over else self._observe(self._env, observation, info), float(reward), over)

    def _close(self) -> None:
        self._closed = True
        if self._env is not None:
            self._env.close()
            self._env = None


def _default_observe(gymnasium: Any, id: str, env: Any) -> Observe:
    if isinstance(env.observation_space, gymnasium.spaces.Text):
        return lambda env, observation, info: str(observation)
    if env.render_mode == "ansi":
        return lambda env, observation, info: plain(str(env.render()))
    raise RecipeError(
        f"the observations of `{id}` are no text but {env.observation_space}: set `task.config.observe` to a function "
        "`observe(env, observation, info)` that returns text, or `task.config.options = { render_mode = 'ansi' }` if "
        "it has that"
    )


def _default_act(gymnasium: Any, id: str, env: Any, actions: Sequence[str]) -> Act:
    space = env.action_space
    if isinstance(space, gymnasium.spaces.Text):
        return lambda env, text: text
    if isinstance(space, gymnasium.spaces.Discrete) and actions:
        if len(actions) != int(space.n) or len({name.lower() for name in actions}) != len(actions):
            raise RecipeError(
                f"`task.config.actions = {list(actions)}` has {len(actions)} names, and `{id}` has {int(space.n)} "
                "actions: give each one a name of its own, in their order"
            )
        return partial(_named_action, names=tuple(actions), first=int(space.start))
    raise RecipeError(
        f"the actions of `{id}` are no text but {space}: set `task.config.act` to a function `act(env, text)` that "
        "returns an action"
        + (", or name them in `task.config.actions`" if isinstance(space, gymnasium.spaces.Discrete) else "")
    )


def _named_action(env: Any, text: str, *, names: tuple[str, ...], first: int) -> int:
    """Returns the action whose name stands last in a text."""
    longest_first = sorted(names, key=len, reverse=True)
    pattern = r"(?<!\w)(?:" + "|".join(map(re.escape, longest_first)) + r")(?!\w)"
    found = re.findall(pattern, text, flags=re.IGNORECASE)
    if not found:
        raise ValueError(f"name one of these actions: {', '.join(names)}")
    lowered = [name.lower() for name in names]
    return first + lowered.index(found[-1].lower())


def plain(text: str) -> str:
    """Returns a text of a terminal without colours. What has a background colour stands in brackets."""
    return _COLOUR.sub("", _HIGHLIGHTED.sub(r"[\1]", text)).strip("\n")
