"""Imports of packages that are optional, and functions that a recipe names."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from stretto.environments.function_specs import SpecError, is_spec, resolve
from stretto.errors import RecipeError


def optional_module(name: str, *, package: str, install: str) -> Any:
    """Imports a module of a package. Raises `RecipeError` with the command that installs it if it is missing."""
    top = name.partition(".")[0]
    try:
        importlib.import_module(top)
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = (error.name or name).partition(".")[0]
        if missing != top:
            raise RecipeError(f"the package {package} needs `{missing}`: `pip install {missing}`") from error
        raise RecipeError(f"this environment needs the package {package}: `{install}`") from error


def function_option(option: str, spec: str | None) -> Callable[..., Any] | None:
    """Returns the function that an option names as `package.module:function`; None if the option is not given."""
    if spec is None:
        return None
    said = f"`task.config.{option} = {spec!r}`"
    if not isinstance(spec, str) or not is_spec(spec):
        raise RecipeError(f"{said} is not a function: write it as `package.module:function`")
    try:
        return resolve(spec)
    except SpecError as error:
        raise RecipeError(f"{said}: {error}") from error
