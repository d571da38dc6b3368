"""The base class of every table of a recipe.

A package that has options defines them once, as a model with this base and without torch. The recipe's tables are these
models or extend them, so that a default, a bound and a description have one place.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator
from pydantic_core import PydanticKnownError

MAX_INTEGER = 10**12  # of an option that has no bound of its own: SQLite, TOML and tensors end at 2**63 - 1


class Options(BaseModel):
    """Immutable and strict: an unknown key, a value of another type, an infinity or a NaN is an error.

    An integer without an upper bound of its own is at most `MAX_INTEGER`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    @field_validator("*", mode="after")
    @classmethod
    def _bound_integers(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, int) and value > MAX_INTEGER:
            field = cls.model_fields[str(info.field_name)]
            if not any(hasattr(bound, "le") for bound in field.metadata):
                raise PydanticKnownError("less_than_equal", {"le": MAX_INTEGER})
        return value
