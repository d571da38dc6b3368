"""Python in a sandbox: what it prints, and code that prints a megabyte, forks, or never ends."""

from __future__ import annotations

import asyncio

import pytest

from stretto.environments.sandbox import Limits
from stretto.environments.sandbox_processes import held_parts
from stretto.environments.tools.python import python_tool
from stretto.errors import RewardError

LIMITS = Limits(memory=1 << 30, disk=16 << 20, processes=301)
needs_namespaces = pytest.mark.skipif("processes" not in held_parts(LIMITS), reason="this kernel makes no namespaces")


def run(code: str, *, seconds: float = 60.0, output_chars: int = 1_000) -> str:
    tool = python_tool(seconds=seconds, output_chars=output_chars, limits=LIMITS, strict=False)
    return asyncio.run(tool.call({"code": code}))


def test_it_returns_what_is_printed_and_the_value_of_the_last_line() -> None:
    assert run("a = 3\nprint(a)\na * 'é'") == "3\n'ééé'\n"
    assert run("a = 3") == "(no output)"


def test_an_error_is_text_with_its_line() -> None:
    said = run("a = 1\nb = a / 0\n")
    assert 'File "<code>", line 2' in said
    assert said.endswith("ZeroDivisionError: division by zero\n\nError: the code ended with exit code 1")
    assert "SyntaxError" in run("a = (")
    assert "exit code 3" in run("import sys; sys.exit(3)")
    assert "at most 100,000" in run("#" * 100_001)


def test_a_megabyte_is_cut_and_code_that_never_ends_is_killed() -> None:
    said = run("print('x' * 1_000_000)", output_chars=100)
    assert said == "x" * 100 + "\n[cut: only the first 100 characters are shown]"
    said = run("import time\nprint('begun', flush=True)\ntime.sleep(1e6)", seconds=1.0)
    assert said.endswith("the code did not end within 1 s and was killed")


@needs_namespaces
def test_code_that_forks_for_ever_ends_with_its_sandbox() -> None:
    said = run("import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass", seconds=1.0)
    assert said.endswith("the code did not end within 1 s and was killed")


def test_a_machine_whose_sandbox_has_gaps_fails_the_episode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stretto.environments.sandbox_processes.held_parts", lambda limits: frozenset())
    with pytest.raises(RewardError, match="gaps"):
        asyncio.run(python_tool(limits=LIMITS).call({"code": "1"}))
