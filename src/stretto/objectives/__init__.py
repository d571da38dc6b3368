"""The objectives: each is a file of this package with its options (the table `[algorithm]`) and its loss.

`OBJECTIVES` maps the `type` in a recipe to the class. The type is the name of the file with `-` for `_`. To add an
objective, add a file that defines a subclass of `ObjectiveOptions` with a `type`.
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
    """Imports the files of this package and returns the objectives by type: the default first, then by name."""
    found: dict[str, type[ObjectiveOptions]] = {}
    for name in sorted(module.name for module in pkgutil.iter_modules(__path__)):
        tag = name.replace("_", "-")
        for value in vars(importlib.import_module(f"{__name__}.{name}")).values():
            objective = isinstance(value, type) and issubclass(value, ObjectiveOptions)
            if objective and value.model_fields["type"].default == tag:
                found[tag] = value
    return {DEFAULT_TYPE: found.pop(DEFAULT_TYPE), **found}


OBJECTIVES: dict[str, type[ObjectiveOptions]] = _find_objectives()


def _with_type(value: Any) -> Any:
    """Adds the default type to an `[algorithm]` without one."""
    return {"type": DEFAULT_TYPE, **value} if isinstance(value, Mapping) else value


if TYPE_CHECKING:
    AlgorithmOptions = ObjectiveOptions
else:
    _union = Union[tuple(OBJECTIVES.values())]  # noqa: UP007
    if len(OBJECTIVES) > 1:
        _union = Annotated[_union, Field(discriminator="type")]
    AlgorithmOptions = Annotated[_union, BeforeValidator(_with_type)]

__all__ = ["DEFAULT_TYPE", "OBJECTIVES", "AlgorithmOptions", "ObjectiveOptions", "Tokens"]
