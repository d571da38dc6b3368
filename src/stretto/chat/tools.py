"""Tools: plain Python functions with type hints and a docstring.

    def weather(city: str, days: int = 1) -> str:
        \"""Returns the weather forecast of a city.

        Args:
            city: Name of the city.
            days: Number of days.
        \"""

The type hints become a JSON schema, and arguments are checked against it. A call always returns text. An error of the
model's (wrong arguments) or of the tool's (it raises, or does not return in time) is text too, for the model to read;
long text is cut, with a note. Only a `RewardError` passes: the world failed, and the episode with it, not the model.

A function runs in a thread of its own, so it may block. One that never returns leaves that thread behind: code that the
model wrote belongs in a sandbox, which can be killed. An `async` function runs on the event loop and must not block it.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import os
import re
import threading
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, PydanticUserError, ValidationError, create_model
from pydantic.json_schema import GenerateJsonSchema

from stretto.errors import RecipeError, RewardError, describe

SECONDS = 10.0
OUTPUT_CHARS = 8_000
MAX_ABANDONED = 64  # threads that never came back
GRACE_S = 1.0  # for a cancelled tool to end

_ARGUMENTS = re.compile(r"^\s*(Args|Arguments|Parameters):\s*$", re.MULTILINE)
_ARGUMENT = re.compile(r"^\s*(\w+)\s*(?:\([^)]*\))?:\s*(.*)$")
_SECTION = re.compile(r"^\s*(Returns|Raises|Yields|Examples?|Notes?):")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")


@dataclass(frozen=True, slots=True, eq=False)
class Tool:
    """A function that a model may call."""

    name: str
    description: str
    parameters: Mapping[str, Any]  # JSON schema of an object
    function: Callable[..., Any]
    check: Callable[[Any], Mapping[str, Any]]  # returns what to call with; raises `ValueError` that says what is wrong
    seconds: float = SECONDS  # deadline of a call
    output_chars: int = OUTPUT_CHARS  # most characters of a result

    @property
    def spec(self) -> dict[str, Any]:
        """The description that the model is given."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}

    async def call(self, arguments: Mapping[str, Any] | str) -> str:
        """Returns the result as text, or an error as text. Raises `RewardError` if the function does."""
        try:
            given = self.check(arguments)
        except ValueError as error:
            return self._cut(f"Error: wrong arguments of `{self.name}`: {error}")
        try:
            is_async = inspect.iscoroutinefunction(self.function)
            text = await (self._awaited(given) if is_async else self._threaded(given))
        except TimeoutError:
            return f"Error: `{self.name}` did not return within {self.seconds:g} s and was given up"
        return self._cut(text)

    async def _awaited(self, given: Mapping[str, Any]) -> str:
        process = os.getpid()

        async def work() -> str:
            try:
                return _text(await self.function(**given))
            except RewardError:
                raise
            except asyncio.CancelledError:
                if (task := asyncio.current_task()) is None or task.cancelling():
                    raise
                return "Error: it was cancelled"
            except BaseException as error:
                return _failure(error)
            finally:
                _end_forked(process)

        task = asyncio.create_task(work(), name=f"tool {self.name}")
        try:
            done, _ = await asyncio.wait([task], timeout=self.seconds)
            if not done:
                raise TimeoutError
            return task.result()
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait([task], timeout=GRACE_S)

    async def _threaded(self, given: Mapping[str, Any]) -> str:
        """Calls the function in a daemon thread: one that hangs neither blocks others nor keeps the process alive."""
        if (count := num_abandoned()) >= MAX_ABANDONED:
            raise RewardError(
                f"the tool `{self.name}` was not called: {count} calls of tools have never returned; give "
                "what they wait for a deadline"
            )
        loop, process = asyncio.get_running_loop(), os.getpid()
        result: asyncio.Future[str] = loop.create_future()

        def work() -> None:
            text, fault = "", None
            try:
                text = _text(self.function(**given))
            except RewardError as error:
                fault = error
            except BaseException as error:
                text = _failure(error)
            _end_forked(process)
            with contextlib.suppress(RuntimeError):  # the loop is closed, so nobody waits any more
                loop.call_soon_threadsafe(_settle, result, text, fault)

        thread = threading.Thread(target=work, name=f"tool {self.name}", daemon=True)
        thread.start()
        try:
            async with asyncio.timeout(self.seconds):
                return await result
        finally:
            if not result.done() or result.cancelled():
                _abandoned.append(thread)

    def _cut(self, text: str) -> str:
        if len(text) <= self.output_chars:
            return text
        return f"{text[: self.output_chars]}\n[cut: only the first {self.output_chars:,} characters are shown]"


AnyTool = Tool | Callable[..., Any] | Mapping[str, Any]
"""A tool, a function, or a description in the shape of the OpenAI API: that is offered, and called by somebody else."""

_abandoned: list[threading.Thread] = []


def num_abandoned() -> int:
    """Returns the number of calls in this process that had to return by their deadline and have not done so yet."""
    _abandoned[:] = [thread for thread in _abandoned if thread.is_alive()]
    return len(_abandoned)


def tool(*, seconds: float = SECONDS, output_chars: int = OUTPUT_CHARS) -> Callable[[Callable[..., Any]], Tool]:
    """Decorates a function as a tool with limits of its own."""
    return lambda function: make_tool(function, seconds=seconds, output_chars=output_chars)


def make_tool(
    function: Callable[..., Any], *, name: str | None = None, seconds: float = SECONDS, output_chars: int = OUTPUT_CHARS
) -> Tool:
    """Makes a tool of a function. Raises `RecipeError` if it has parameters that no JSON object can give."""
    name = name if name is not None else getattr(function, "__name__", "")
    if not _NAME.fullmatch(name):
        raise RecipeError(f"a tool has the name {name!r}: use letters, digits and `_`, and at most 64 of them")
    description, described = _docstring(inspect.getdoc(function) or "")
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except Exception as error:  # a hint may be any expression
        raise RecipeError(f"the type hints of the tool `{name}` cannot be read: {describe(error)}") from error
    fields: dict[str, Any] = {}
    for number, (key, parameter) in enumerate(inspect.signature(function).parameters.items()):
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise RecipeError(f"the tool `{name}` has the parameter `{parameter}`: give each parameter a name")
        if key not in hints:
            raise RecipeError(
                f"the parameter `{key}` of the tool `{name}` has no type hint: add one, like `{key}: str`"
            )
        default = ... if parameter.default is parameter.empty else parameter.default
        said = described.get(key) or next((m for m in _metadata(hints[key]) if isinstance(m, str)), None)
        fields[f"field_{number}"] = (hints[key], Field(default, alias=key, description=said))
    try:
        arguments = create_model(name, __config__=ConfigDict(extra="forbid"), **fields)
        schema = arguments.model_json_schema(schema_generator=_Schema)
    except (PydanticUserError, TypeError) as error:
        raise RecipeError(f"the tool `{name}` has a parameter that JSON cannot give: {error}") from error
    parameters = {key: value for key, value in schema.items() if key not in ("title", "additionalProperties")}
    return Tool(
        name,
        description,
        {"properties": {}, **parameters},
        function,
        partial(_checked, arguments),
        seconds,
        output_chars,
    )


def as_tools(tools: Sequence[AnyTool]) -> list[Tool]:
    """Returns those of the tools that can be called. Raises `RecipeError` if two have one name."""
    made = [_cached(each) if callable(each) else each for each in tools]
    names = [_name(each) for each in made]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise RecipeError(f"two tools have the name `{twice}`: rename one of them")
    return [each for each in made if isinstance(each, Tool)]


def tool_specs(tools: Sequence[AnyTool]) -> list[Mapping[str, Any]]:
    """Returns the descriptions of tools, in their order."""
    made = [_cached(each) if callable(each) else each for each in tools]
    return [each.spec if isinstance(each, Tool) else each for each in made]


@lru_cache(maxsize=256)
def _cached(function: Callable[..., Any]) -> Tool:
    return make_tool(function)


def _name(made: Tool | Mapping[str, Any]) -> str:
    return made.name if isinstance(made, Tool) else str(made.get("function", made).get("name", ""))


class _Schema(GenerateJsonSchema):
    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def _metadata(hint: Any) -> Sequence[Any]:
    return getattr(hint, "__metadata__", ())


def _docstring(text: str) -> tuple[str, dict[str, str]]:
    """Returns the description of a function, and that of each parameter, from a docstring in Google's style."""
    head, *rest = _ARGUMENTS.split(text, maxsplit=1)
    description = " ".join(_until_section(head).split())
    described: dict[str, str] = {}
    last = ""
    for line in _until_section(rest[1] if len(rest) > 1 else "").splitlines():
        if found := _ARGUMENT.match(line):
            last = found[1]
            described[last] = found[2].strip()
        elif last and line.strip():
            described[last] = f"{described[last]} {line.strip()}"
    return description, described


def _until_section(text: str) -> str:
    lines = text.splitlines()
    end = next((n for n, line in enumerate(lines) if _SECTION.match(line)), len(lines))
    return "\n".join(lines[:end])


def _text(result: Any) -> str:
    if isinstance(result, str):
        return result
    try:
        return json.dumps(result, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        return str(result)


def _failure(error: BaseException) -> str:
    try:
        return f"Error: {describe(error)}"
    except Exception:  # the text of an error may raise too
        return f"Error: {type(error).__name__}"


def _checked(model: type[BaseModel], arguments: Any) -> dict[str, Any]:
    """Returns the arguments that were given, by the names of the parameters."""
    try:
        checked = model.model_validate(arguments)
    except ValidationError as error:
        raise ValueError(_faults(error)) from None
    return {str(model.model_fields[field].alias): getattr(checked, field) for field in checked.model_fields_set}


def _faults(error: ValidationError) -> str:
    return "; ".join(
        f"`{'.'.join(map(str, fault['loc']))}`: {fault['msg']}" if fault["loc"] else str(fault["msg"])
        for fault in error.errors(include_url=False, include_input=False, include_context=False)[:5]
    )


def _settle(result: asyncio.Future[str], text: str, fault: Exception | None) -> None:
    if result.done():
        return
    if fault is None:
        result.set_result(text)
    else:
        result.set_exception(fault)


def _end_forked(process: int) -> None:
    """Ends a process that the tool forked and that came back here: it would be a second driver."""
    if os.getpid() != process:
        os._exit(1)
