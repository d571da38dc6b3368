"""The objectives. Each is a file of this package: the table of the recipe, its options and its loss.

`OBJECTIVES` has them by the name that a recipe calls them by, which is the name of their file with `-` for `_`. A new
one is a new file that defines a subclass of `ObjectiveOptions` with a `type`.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Union

from pydantic import BeforeValidator, Field

from stretto.objectives.base import ObjectiveOptions, Tokens

DEFAULT_TYPE = "grpo"


def _find_objectives() -> dict[str, type[ObjectiveOptions]]:
    """The objectives by type: the default first, then by name."""
    found: dict[str, type[ObjectiveOptions]] = {}
    for name in sorted(module.name for module in pkgutil.iter_modules(__path__)):
        if name == "describe":  # a program
            continue
        tag = name.replace("_", "-")
        for value in vars(importlib.import_module(f"{__name__}.{name}")).values():
            objective = isinstance(value, type) and issubclass(value, ObjectiveOptions)
            if objective and value.model_fields["type"].default == tag:
                found[tag] = value
    return {DEFAULT_TYPE: found.pop(DEFAULT_TYPE), **found}


OBJECTIVES: dict[str, type[ObjectiveOptions]] = _find_objectives()


def _with_type(value: Any) -> Any:
    """An `[algorithm]` that does not say its type has the default one."""
    return {"type": DEFAULT_TYPE, **value} if isinstance(value, Mapping) else value


if TYPE_CHECKING:
    AlgorithmSection = ObjectiveOptions
else:
    _union = Union[tuple(OBJECTIVES.values())]  # noqa: UP007
    if len(OBJECTIVES) > 1:
        _union = Annotated[_union, Field(discriminator="type")]
    AlgorithmSection = Annotated[_union, BeforeValidator(_with_type)]

__all__ = ["DEFAULT_TYPE", "OBJECTIVES", "AlgorithmSection", "ObjectiveOptions", "Tokens"]
