"""The base class of every table of a recipe.

A package that has options defines them once, as a model with this base and without torch. The recipe's tables are these
models or extend them, so that a default, a bound and a description have one place.
"""

from __future__ import annotations

import re
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator
from pydantic_core import PydanticKnownError

_FORMS: dict[str, str] = {}  # regular expression of a text -> its form in words


def formed(expression: str, form: str) -> str:
    """Returns the regular expression of a text option, whose `form` in words is shown to a user who misses it."""
    _FORMS[expression] = form
    return expression


def form_of(expression: str) -> str:
    """Returns in words the texts that a regular expression of an option takes."""
    return _FORMS[expression]


VARIABLE = formed(
    r"^[A-Za-z_][A-Za-z0-9_]*$", "the name of an environment variable: letters, digits and `_`, and no digit first"
)

_KEY = re.compile(r"(sk|pk|gsk|xai|hf|key)[-_].{8,}|(?=.*[a-z])(?=.*[0-9]).{20,}", re.DOTALL)


def looks_like_key(text: str) -> bool:
    """Tells if a text may be a key, which no message shows."""
    return _KEY.fullmatch(text) is not None


def shown_variable(name: str) -> str:
    """Returns the name of an environment variable for a message, unless a key was pasted there."""
    return "something that looks like a key" if looks_like_key(name) else f"`{name}`"


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
