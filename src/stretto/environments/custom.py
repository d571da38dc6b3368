"""Loads an environment by name: `package.module:Class`, the user's or one of this package.

The class is called with the model's tokenizer and the options of the recipe. If it has a parameter `turns` without a
default, that is `task.turns`. Its object plays episodes on the event loop of a worker process (`episode_pool.py`) or of
the driver (`protocol.py` has the contract), so blocking calls belong in `asyncio.to_thread`. It may have the methods
`async def start(self)` and `async def close(self)`, which are awaited before its first and after its last episode.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from stretto.environments.function_specs import SpecError, is_spec, last_line, resolve
from stretto.environments.protocol import Environment
from stretto.errors import RecipeError


@dataclass(frozen=True, slots=True)
class EnvironmentSpec:
    """The environment that plays a task's episodes."""

    name: str  # `package.module:Class`
    max_turns: int  # of one episode
    config: Mapping[str, Any] = field(default_factory=dict)  # keyword arguments of the class
    max_lineages: int = 1  # of one episode
    given: Any = None  # a class or an object that was given from Python; None: it is imported by its name


def load_environment(spec: EnvironmentSpec, tokenizer: Any) -> Environment:
    """Creates the environment. Raises `RecipeError` if that fails, or if it has no method `episode`."""
    said = f"`task.environment = {spec.name!r}`"
    if hasattr(spec.given, "episode") and not isinstance(spec.given, type):
        return _played_by_object(spec, said)
    kind = spec.given if spec.given is not None else _imported(spec, said)
    config = dict(spec.config)
    if _takes_turns(kind):
        config.setdefault("turns", spec.max_turns)
    try:
        inspect.signature(kind).bind(tokenizer, **config)
    except TypeError as error:
        if "template_options" in config:
            raise RecipeError(
                f"`task.config.template_options` is no option of {said}: write variables of the chat template into "
                "`task.template`, such as `task.template = { enable_thinking = false }`, and another template into "
                "`task.chat_template`"
            ) from error
        raise RecipeError(
            f"{said} cannot be called with the tokenizer and `task.config = {dict(spec.config)}`: {error}; it is "
            f"defined as `{spec.name.partition(':')[2]}{inspect.signature(kind)}`"
        ) from error
    try:
        made = kind(tokenizer, **config)
    except (KeyboardInterrupt, RecipeError):
        raise
    except BaseException as error:
        raise RecipeError(f"{said} could not be created: {last_line(error)}") from error
    if not inspect.iscoroutinefunction(getattr(made, "episode", None)):
        raise RecipeError(f"{said} has no episodes: define `async def episode(self, prompt, policy)`")
    environment: Environment = made
    return environment


def _imported(spec: EnvironmentSpec, said: str) -> Any:
    """Imports the class that a recipe names."""
    if not is_spec(spec.name):
        raise RecipeError(f"{said} is not a class: write it as `package.module:Class`")
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.append(os.getcwd())  # not removed later: the class may import from there when it is used
    try:
        return resolve(spec.name)
    except SpecError as error:
        raise RecipeError(f"{said}: {error}") from error


def _played_by_object(spec: EnvironmentSpec, said: str) -> Environment:
    """Checks an object that was given from Python, made by its owner."""
    if not inspect.iscoroutinefunction(getattr(spec.given, "episode", None)):
        raise RecipeError(f"{said} has no episodes: define `async def episode(self, prompt, policy)`")
    if spec.config:
        raise RecipeError(
            f"`task.config = {dict(spec.config)}` has no effect on {said}, which is an object: give its class, or "
            "leave `task.config` out"
        )
    environment: Environment = spec.given
    return environment


async def start_environment(environment: Environment) -> None:
    """Calls `async def start(self)` of an environment, if it has one: before its first episode."""
    if (start := getattr(environment, "start", None)) is not None:
        await start()


async def close_environment(environment: Environment) -> None:
    """Calls `async def close(self)` of an environment, if it has one: after its last episode."""
    if (close := getattr(environment, "close", None)) is not None:
        await close()


def _takes_turns(kind: Any) -> bool:
    """Tells if a class is to be told the most turns of an episode: it has a parameter `turns` without a default."""
    parameter = inspect.signature(kind).parameters.get("turns")
    return parameter is not None and parameter.default is parameter.empty
