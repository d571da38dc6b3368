"""A custom objective: a function of the user."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable
from functools import cached_property
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from stretto.errors import TrainerError
from stretto.objectives.base import Loss, ObjectiveOptions, Tokens

Function = Callable[[Tokens, dict[str, Any]], Loss]


class CustomOptions(ObjectiveOptions):
    """Your own function, `(tokens: Tokens, options: dict) -> (loss, diagnostics)`.

    It gets the tokens of the whole sequences of a micro-batch, and `options` from the recipe. It returns the loss of
    each token [C], to be minimized, and a dict of diagnostics of each token [C], which may be empty. It is imported
    when the recipe is read, from installed packages or from the working directory.
    """

    formula: ClassVar[str] = "function(tokens, options)"
    when: ClassVar[str] = "None of the built-in objectives fits; no change to this package is needed."

    type: Literal["custom"] = "custom"
    function: str = Field(description="`package.module:function`")
    options: dict[str, Any] = Field(default_factory=dict, description="Passed to the function unchanged")

    @model_validator(mode="after")
    def _refuse_what_cannot_be_called(self) -> CustomOptions:
        try:
            inspect.signature(self.resolved).bind(None, {})
        except TypeError:
            raise ValueError(
                f'`algorithm.function = "{self.function}"` cannot be called with (tokens, options): it is defined as '
                f"`{self.function.partition(':')[2]}{inspect.signature(self.resolved)}`"
            ) from None
        return self

    @cached_property
    def resolved(self) -> Function:
        """The function, imported."""
        from stretto.environments.reward_worker import SpecError, resolve

        module, _, name = self.function.partition(":")
        if not all(part.isidentifier() for part in [*module.split("."), *name.split(".")]):
            raise ValueError(
                f'`algorithm.function = "{self.function}"` does not name a function: write `package.module:function`'
            )
        if not {"", os.getcwd()} & set(sys.path):
            sys.path.append(os.getcwd())  # permanently: the function may import from there when it is called
        try:
            function: Function = resolve(self.function)
        except SpecError as error:
            raise ValueError(f'`algorithm.function = "{self.function}"`: {error}') from error
        return function

    def loss(self, tokens: Tokens) -> Loss:
        result = self.resolved(tokens, dict(self.options))
        if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[1], dict):
            raise TrainerError(
                f"`{self.function}` returned {type(result).__name__}; return (loss, diagnostics), a tensor and a dict"
            )
        losses, diagnostics = result
        for what, value in {"the loss": losses, **diagnostics}.items():
            shape = getattr(value, "shape", None)
            if shape != tokens.logprobs.shape:
                raise TrainerError(
                    f"`{self.function}` returned {what} with "
                    f"{'no shape' if shape is None else f'shape {list(shape)}'}; return one number for each token, "
                    f"{list(tokens.logprobs.shape)}"
                )
        return losses, {name: value.detach() for name, value in diagnostics.items()}
