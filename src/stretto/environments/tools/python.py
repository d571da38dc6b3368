"""Python in a sandbox: code that the model writes runs without network, without secrets and with limits.

Each call is a process of its own, which is killed at the deadline with all that it has started.
"""

from __future__ import annotations

import sys

from stretto.chat.tools import OUTPUT_CHARS, Tool, make_tool
from stretto.environments.sandbox import Limits
from stretto.environments.sandbox_processes import DEFAULT_LIMITS, run_in_sandbox

SECONDS = 5.0
EXTRA_S = 30.0  # for the sandbox to start and to end, on a loaded machine
MAX_CODE = 100_000  # characters

# Runs the code on standard input, and prints the value of its last line if that is an expression.
_RUNNER = """
import ast, sys
code = ast.parse(sys.stdin.read(), "<code>")
scope = {"__name__": "__main__"}
last = code.body.pop() if code.body and isinstance(code.body[-1], ast.Expr) else None
exec(compile(code, "<code>", "exec"), scope)
if last is not None:
    value = eval(compile(ast.Expression(last.value), "<code>", "eval"), scope)
    if value is not None:
        print(repr(value))
"""


def python_tool(
    *,
    seconds: float = SECONDS,
    output_chars: int = OUTPUT_CHARS,
    limits: Limits = DEFAULT_LIMITS,
    strict: bool = True,
) -> Tool:
    """Returns a tool `python` that runs code for at most `seconds`.

    If `strict`, a call raises `RewardError` on a machine where a part of the sandbox does not hold.
    """

    async def python(code: str) -> str:
        """Runs Python code and returns what it prints, and the value of its last line.

        Args:
            code: A whole program. Nothing is kept from one call to the next.
        """
        if len(code) > MAX_CODE:
            return f"Error: the code has {len(code):,} characters; at most {MAX_CODE:,} are allowed"
        result = await run_in_sandbox(
            [sys.executable, "-I", "-c", _RUNNER],
            input_text=code,
            seconds=seconds,
            limits=limits,
            strict=strict,
            output_bytes=4 * output_chars + 4,  # so that `Tool` cuts it, with a note
        )
        if result.code is None:
            return f"{result.output}\nError: the code did not end within {seconds:g} s and was killed".lstrip()
        if result.code != 0:
            return f"{result.output}\nError: the code ended with exit code {result.code}".lstrip()
        return result.output or "(no output)"

    return make_tool(python, seconds=seconds + EXTRA_S, output_chars=output_chars)
