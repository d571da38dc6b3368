"""The calculator: arithmetic, and nothing else."""

from __future__ import annotations

import asyncio

import pytest

from stretto.chat.tools import make_tool
from stretto.environments.tools.calculator import calculator, evaluate


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("1 + 2 * 3", 7),
        (" (1 + 2) * -3 ", -9),
        ("2 ** 10 % 1000 // 5", 4),
        ("2^3", 8),
        ("7 / 2", 3.5),
        ("sqrt(16) + abs(-1) + max(1, 2, 3)", 8.0),
        ("round(pi, 2)", 3.14),
        ("2 ** -1", 0.5),
        ("1_000 * 1e-3", 1.0),
    ],
)
def test_it_calculates(expression: str, value: float) -> None:
    assert evaluate(expression) == value


@pytest.mark.parametrize(
    "expression",
    ["", "x", "__import__('os')", "(1).__class__", "'a' * 9", "[1]", "1 if 1 else 2", "True", "1 < 2", "lambda: 1",
     "9 ** 9 ** 9", "2 ** 5000", "9 ** 99999999", "1e308 * 10", "(-8) ** 0.5", "1 / 0", "sqrt(-1)", "sqrt()",
     "min(1)", "round(1, ndigits=2)", "1j", "10 ** 1000 * 10 ** 1000", "(" * 240 + "1" + ")" * 240, "1" * 501, "1;2",
     "-" * 400 + "1+", "max(*[1, 2])", "floor(1e999)"],
)  # fmt: skip
def test_anything_else_is_an_error_for_the_model(expression: str) -> None:
    with pytest.raises((ValueError, ArithmeticError)):
        evaluate(expression)
    assert asyncio.run(make_tool(calculator).call({"expression": expression})).startswith("Error: ")
