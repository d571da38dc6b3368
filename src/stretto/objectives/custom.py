"""A custom objective: a function of the user."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, model_validator

from stretto.environments.function_specs import SpecError, defined_at, is_spec, last_line, resolve
from stretto.errors import RecipeError, TrainerError, first_line
from stretto.objectives.base import Loss, ObjectiveOptions, Tokens

if TYPE_CHECKING:
    from torch import Tensor

WITHOUT_GRADIENT = (
    "returned a loss without a gradient by `tokens.logprobs`, so nothing would be learned: compute it from them, "
    "without `detach()`, `torch.no_grad()` or numpy"
)

SET_SAMPLED = "; `tokens.sampled` is None without `algorithm.sampled = true`"

Function = Callable[[Tokens, dict[str, Any]], Loss]


class CustomOptions(ObjectiveOptions):
    """Your own function, `(tokens: Tokens, options: dict) -> (loss, diagnostics)`.

    It gets the tokens of the whole sequences of a micro-batch, and `options` from the recipe. It returns the loss of
    each token [C], to be minimized, and a dict of diagnostics of each token [C], which may be empty. It is imported
    when the recipe is read, from installed packages or from the working directory, and tried on a made-up batch before
    the run.
    """

    formula: ClassVar[str] = "function(tokens, options)"
    when: ClassVar[str] = "None of the built-in objectives fits; no change to this package is needed."

    type: Literal["custom"] = "custom"
    function: str = Field(description="`package.module:function`")
    options: dict[str, Any] = Field(default_factory=dict, description="Passed to the function unchanged")
    sampled: bool = Field(
        False,
        description="Score tokens of older versions under their own version first: `tokens.sampled` has the trainer's "
        "log-probabilities under the version that sampled; without it, that is None",
    )

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

    @property
    def needs_sampled(self) -> bool:
        return super().needs_sampled or self.sampled

    @cached_property
    def resolved(self) -> Function:
        """The function, imported."""
        if not is_spec(self.function):
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
        """Calls the function and checks what it returns. A `TrainerError` names the function, its file and its line."""
        import torch

        # A view, so that the gradient that passes through the function can be told from that of other terms.
        seen = replace(tokens, logprobs=tokens.logprobs.view_as(tokens.logprobs))
        try:
            result = self.resolved(seen, dict(self.options))
        except (torch.OutOfMemoryError, KeyboardInterrupt):
            raise  # the trainer makes room and tries again
        except BaseException as error:
            hint = SET_SAMPLED if self._misses_sampled(error) else ""
            raise TrainerError(f"`{self.function}` raised {last_line(error, self.resolved)}{hint}") from error
        losses, diagnostics = self._checked(result, tokens)
        if losses.requires_grad:
            seen.logprobs.register_hook(self._refuse_gradient)  # type: ignore[no-untyped-call]
        return losses, diagnostics

    def _misses_sampled(self, error: BaseException) -> bool:
        return not self.sampled and isinstance(error, TypeError | AttributeError) and "NoneType" in str(error)

    def try_out(self) -> None:
        """Calls the function with a few tokens that are made up. Raises `RecipeError` if a run would fail with it."""
        import torch

        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            tokens = _made_up_tokens(sampled=self.needs_sampled)
            failed = f'`algorithm.function = "{self.function}"` fails on a made-up batch: '
            try:
                losses, _ = self.loss(tokens)
                losses.sum().backward()  # type: ignore[no-untyped-call]
            except TrainerError as error:
                raise RecipeError(f"{failed}{error}") from error
            except RuntimeError as error:  # for example, a tensor that the gradient needs was changed in place
                reason = first_line(error)
                raise RecipeError(
                    f"{failed}`{self.function}`{defined_at(self.resolved)} returned a loss whose gradient cannot be "
                    f"computed: {reason}"
                ) from error
            if tokens.logprobs.grad is None:
                raise RecipeError(f"{failed}{self._refused(WITHOUT_GRADIENT)}")

    def _checked(self, result: Any, tokens: Tokens) -> Loss:
        import torch

        if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[1], dict):
            raise self._refused(f"returned {type(result).__name__}; return (loss, diagnostics), a tensor and a dict")
        losses, diagnostics = result
        if strange := [name for name in diagnostics if not isinstance(name, str)]:
            raise self._refused(f"returned a diagnostic with the name {strange[0]!r}; a name is a string")
        expected = tokens.logprobs
        for what, value in {"the loss": losses, **diagnostics}.items():
            shape = getattr(value, "shape", None)
            if not isinstance(value, torch.Tensor) or shape != expected.shape:
                raise self._refused(
                    f"returned {what} with {'no shape' if shape is None else f'shape {list(shape)}'}; return one "
                    f"number for each token, {list(expected.shape)}"
                )
            if value.device != expected.device:
                raise self._refused(
                    f"returned {what} on {value.device}; make it on the device of `tokens.logprobs`, {expected.device}"
                )
        if losses.dtype != expected.dtype:
            raise self._refused(
                f"returned the loss as {_name(losses.dtype)}; `tokens.logprobs` is {_name(expected.dtype)}: compute in "
                "that type, or return `loss.to(tokens.logprobs.dtype)`"
            )
        if expected.requires_grad and not losses.requires_grad:
            raise self._refused(WITHOUT_GRADIENT)
        given = (tokens.logprobs, tokens.behaviour, tokens.proximal, tokens.advantages)
        known = given if tokens.sampled is None else (*given, tokens.sampled)
        if not torch.isfinite(losses).all() and all(torch.isfinite(values).all() for values in known):
            token = int(torch.isfinite(losses).logical_not().nonzero()[0])
            raise self._refused(
                f"returned a loss of {losses[token].item()} for token {token}, whose log-probability is "
                f"{given[0][token].item():.4g} (when it was sampled {given[1][token].item():.4g}) and whose advantage "
                f"is {given[3][token].item():.4g}; return finite numbers"
            )
        return losses, {name: value.detach() for name, value in diagnostics.items()}

    def _refuse_gradient(self, gradient: Tensor) -> None:
        """Raises `TrainerError` for a gradient that is not finite although the loss was, as that of `sqrt` at 0."""
        import torch

        wrong = torch.isfinite(gradient).logical_not()
        if wrong.any():
            raise self._refused(
                f"returned finite losses whose gradient by `tokens.logprobs` is {gradient[wrong][0].item()} for "
                f"{int(wrong.sum())} of {wrong.numel()} tokens; keep the arguments of `sqrt`, `log` and divisions away "
                "from 0 before `torch.where` chooses"
            )

    def _refused(self, why: str) -> TrainerError:
        return TrainerError(f"`{self.function}`{defined_at(self.resolved)} {why}")


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _made_up_tokens(*, sampled: bool) -> Tokens:
    """Four sequences of two groups, with ratios around 1, advantages of both signs, and on-policy tokens."""
    import torch

    lengths = torch.tensor([3, 1, 5, 2])
    sequences = torch.repeat_interleave(torch.arange(4), lengths)
    steps = torch.arange(len(sequences), dtype=torch.float32)
    logprobs = -0.1 - 0.37 * (steps % 5)
    off_policy = torch.where(sequences < 2, 0.0, 0.2 * torch.sin(steps))  # the first two are on policy
    return Tokens(
        logprobs=logprobs.clone().requires_grad_(),
        behaviour=logprobs + off_policy,
        proximal=logprobs.clone(),
        advantages=torch.tensor([1.0, -1.0, 0.0, 0.5])[sequences],
        rewards=torch.tensor([1.0, 0.0, 0.5, 1.0])[sequences],
        sequences=sequences,
        num_sequences=4,
        lengths=lengths,
        sampled=logprobs + off_policy if sampled else None,
    )
