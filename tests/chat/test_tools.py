"""Tools: schemas from functions, checked arguments, and tools that misbehave."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import pytest

from stretto.chat import tools as tools_module
from stretto.chat.tools import as_tools, make_tool, tool, tool_specs
from stretto.errors import RecipeError, RewardError


def weather(city: str, days: int = 1, unit: Literal["C", "F"] = "C", json: Annotated[bool, "Raw data."] = False) -> str:
    """Returns the forecast
    of a city.

    Args:
        city: Name of the city,
            with its country.
        days (int): Number of days.

    Returns:
        Text.
    """
    return f"{city} {days} {unit} {json}"


def call(function: Any, arguments: Any = None, **options: Any) -> str:
    return asyncio.run(make_tool(function, **options).call({} if arguments is None else arguments))


def test_hints_and_docstring_become_a_schema() -> None:
    assert make_tool(weather).spec == {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Returns the forecast of a city.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "Name of the city, with its country."},
                    "days": {"type": "integer", "default": 1, "description": "Number of days."},
                    "unit": {"type": "string", "enum": ["C", "F"], "default": "C"},
                    "json": {"type": "boolean", "default": False, "description": "Raw data."},
                },
                "required": ["city"],
            },
        },
    }


def test_arguments_are_checked_and_defaults_are_those_of_the_function() -> None:
    assert call(weather, {"city": "Oslo"}) == "Oslo 1 C False"
    assert call(weather, {"city": "Oslo", "days": "3", "json": True}) == "Oslo 3 C True"
    for arguments, said in (
        ({}, "`city`: Field required"),
        ({"city": "Oslo", "days": "many"}, "`days`: Input should be a valid integer"),
        ({"city": "Oslo", "town": 1}, "`town`: Extra inputs are not permitted"),
        ({"city": "Oslo", "unit": "K"}, "`unit`: Input should be 'C' or 'F'"),
        ("Oslo", "valid dictionary"),
    ):
        assert call(weather, arguments).startswith("Error: wrong arguments of `weather`: ")
        assert said in call(weather, arguments)


def test_results_become_text() -> None:
    def one(value: Any) -> Any:
        return value if value != "object" else {1, 2}

    for value, text in (
        (None, "null"),
        (3, "3"),
        ("a", "a"),
        ([1, {"é": None}], '[1, {"é": null}]'),
        ("object", "{1, 2}"),
    ):
        assert call(one, {"value": value}) == text


def broken(*values: int) -> None: ...
def open_ended(**values: int) -> None: ...
def bare(value) -> None: ...  # type: ignore[no-untyped-def]
def odd(value: threading.Lock) -> None: ...  # type: ignore[valid-type]
def unknown(value: Nowhere) -> None: ...  # type: ignore[name-defined] # noqa: F821


@pytest.mark.parametrize("function", [broken, open_ended, bare, odd, unknown, lambda value: value])
def test_a_function_that_is_no_tool_is_an_error_before_it_is_offered(function: Any) -> None:
    with pytest.raises(RecipeError, match="tool"):
        make_tool(function)


def test_functions_tools_and_descriptions_may_be_mixed_and_names_are_unique() -> None:
    described = {"type": "function", "function": {"name": "theirs", "parameters": {}}}
    limited = tool(seconds=1.0, output_chars=5)(weather)
    assert [each["function"]["name"] for each in tool_specs([limited, described])] == ["weather", "theirs"]
    assert as_tools([limited, described]) == [limited]
    assert as_tools([weather])[0] is as_tools([weather])[0], "made once"
    with pytest.raises(RecipeError, match="two tools have the name `weather`"):
        as_tools([weather, limited])


# -- tools that misbehave ----------------------------------------------------------------------------------------------


class SilentError(Exception):
    def __str__(self) -> str:
        raise ValueError


@pytest.mark.parametrize(
    "error", [ValueError("no"), SystemExit(3), KeyboardInterrupt(), RecursionError("deep"), SilentError()]
)
def test_whatever_a_tool_raises_is_text_for_the_model(error: BaseException) -> None:
    def raises() -> None:
        raise error

    async def raises_too() -> None:
        raise error

    for function in (raises, raises_too):
        assert call(function).startswith(f"Error: {type(error).__name__}")


def test_a_failure_of_the_world_fails_the_episode() -> None:
    def fails() -> None:
        raise RewardError("the disk is gone")

    async def fails_too() -> None:
        raise RewardError("the disk is gone")

    for function in (fails, fails_too):
        with pytest.raises(RewardError, match="the disk is gone"):
            call(function)


def test_a_megabyte_is_cut_with_a_note() -> None:
    def long() -> str:
        return "x" * 1_000_000

    def long_error() -> str:
        raise ValueError("x" * 1_000_000)

    assert call(long, output_chars=10) == "x" * 10 + "\n[cut: only the first 10 characters are shown]"
    assert len(call(long)) < 9_000
    assert len(call(long_error)) < 9_000


@pytest.fixture
def release() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


def test_a_tool_that_sleeps_for_ever_is_given_up_and_blocks_no_other(release: threading.Event) -> None:
    def hangs() -> None:
        release.wait()

    async def hangs_too() -> None:
        await asyncio.Event().wait()

    async def play() -> list[str]:
        stuck = make_tool(hangs, seconds=0.05), make_tool(hangs_too, seconds=0.05)
        said = [await each.call({}) for each in stuck for _ in range(3)]
        return [*said, await make_tool(weather).call({"city": "Oslo"})]

    *stuck, last = asyncio.run(play())
    assert len(stuck) == 6
    assert all("did not return within 0.05 s" in text for text in stuck)
    assert last == "Oslo 1 C False"


def test_calls_that_never_return_are_bounded(release: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tools_module, "MAX_ABANDONED", 2)
    monkeypatch.setattr(tools_module, "_abandoned", [])

    def hangs() -> None:
        release.wait()

    for _ in range(2):
        call(hangs, seconds=0.01)
    with pytest.raises(RewardError, match="2 calls of tools have never returned"):
        call(hangs, seconds=0.01)
    release.set()
    for thread in tools_module._abandoned:
        thread.join()
    assert call(weather, {"city": "Oslo"}) == "Oslo 1 C False"


@pytest.mark.skipif(sys.platform == "win32", reason="no fork")
def test_a_process_that_a_tool_forks_ends_where_it_would_come_back() -> None:
    children: list[int] = []

    def forks() -> str:
        if child := os.fork():
            children.append(child)
        return "forked"

    async def forks_too() -> str:
        return forks()

    for function in (forks, forks_too):
        assert call(function) == "forked"
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [1, 1]
