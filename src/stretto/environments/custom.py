"""An environment by its name: `package.module:Class`, of yours or of this package.

The class is called with the model's tokenizer and the options of the recipe. Its objects play episodes in the loop's
own thread (`protocol.py` has the contract), so whatever blocks belongs in `asyncio.to_thread`.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from stretto.environments.protocol import Environment
from stretto.environments.reward_worker import SpecError, last_line, resolve
from stretto.errors import RecipeError


@dataclass(frozen=True, slots=True)
class EnvironmentSpec:
    """Which environment plays a task's episodes."""

    name: str  # `package.module:Class`
    max_turns: int  # of one episode
    config: Mapping[str, Any] = field(default_factory=dict)  # the class's own options


def load_environment(spec: EnvironmentSpec, tokenizer: Any) -> Environment:
    """The environment, made. Raises `RecipeError` where it cannot be, or has no episodes."""
    said = f"`task.environment = {spec.name!r}`"
    module, _, name = spec.name.partition(":")
    if not all(part.isidentifier() for part in [*module.split("."), *name.split(".")]):
        raise RecipeError(f"{said} is no class: write it as `package.module:Class`")
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.append(os.getcwd())  # for good: the class may import from there when it is used
    try:
        kind = resolve(spec.name)
    except SpecError as error:
        raise RecipeError(f"{said}: {error}") from error
    try:
        inspect.signature(kind).bind(tokenizer, **spec.config)
    except TypeError as error:
        raise RecipeError(
            f"{said} cannot be called with the tokenizer and `task.config = {dict(spec.config)}`: {error}; it is "
            f"defined as `{name}{inspect.signature(kind)}`"
        ) from error
    try:
        made = kind(tokenizer, **spec.config)
    except Exception as error:
        raise RecipeError(f"{said} could not be made: {last_line(error)}") from error
    if not inspect.iscoroutinefunction(getattr(made, "episode", None)):
        raise RecipeError(f"{said} has no episodes: define `async def episode(self, prompt, policy)`")
    environment: Environment = made
    return environment
