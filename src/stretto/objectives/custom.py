"""An objective of the user's own."""

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
    """A function of yours, `(tokens: Tokens, options: dict) -> (loss, diagnostics)`.

    It gets the tokens of a micro-batch, whole sequences, and `options` as they stand in the recipe. It returns a loss
    for each token [C], to be minimized, and a dict of values of each token [C], which may be empty. It is imported when
    the recipe is read, from what is installed or from the working directory.
    """

    formula: ClassVar[str] = "function(tokens, options)"
    when: ClassVar[str] = "None of these is what you want: no change to this package is needed."

    type: Literal["custom"] = "custom"
    function: str = Field(description="`package.module:function`")
    options: dict[str, Any] = Field(default_factory=dict, description="Handed to the function as they are")

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
        """The function that is named."""
        from stretto.environments.reward_worker import SpecError, resolve

        module, _, name = self.function.partition(":")
        if not all(part.isidentifier() for part in [*module.split("."), *name.split(".")]):
            raise ValueError(
                f'`algorithm.function = "{self.function}"` is no function: write it as `package.module:function`'
            )
        if not {"", os.getcwd()} & set(sys.path):
            sys.path.append(os.getcwd())  # for good: the function may import from there when it is called
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
                    f"{'no shape' if shape is None else f'shape {list(shape)}'}; return one number a token, "
                    f"{list(tokens.logprobs.shape)}"
                )
        return losses, {name: value.detach() for name, value in diagnostics.items()}
