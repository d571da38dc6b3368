"""The base class of every table of a recipe.

A package that has options defines them once, as a model with this base and without torch. The recipe's tables are these
models or extend them, so that a default, a bound and a description have one place.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Options(BaseModel):
    """Immutable and strict: an unknown key, a value of another type, an infinity or a NaN is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
