"""A calculator that evaluates arithmetic itself: no `eval`, no names but its own, and no result of a million digits."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable

Number = int | float

MAX_LENGTH = 500  # characters of an expression
MAX_BITS = 4_096  # of an integer

FUNCTIONS: dict[str, Callable[..., Number]] = {
    **{name: getattr(math, name) for name in ("sqrt", "exp", "log", "log2", "log10", "floor", "ceil", "gcd")},
    **{name: getattr(math, name) for name in ("sin", "cos", "tan", "asin", "acos", "atan", "atan2", "radians")},
    **{"abs": abs, "round": round, "min": min, "max": max, "degrees": math.degrees},
}
CONSTANTS = {"pi": math.pi, "e": math.e}

_UNARY: dict[type[ast.unaryop], Callable[[Number], Number]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
_BINARY: dict[type[ast.operator], Callable[[Number, Number], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def calculator(expression: str) -> str:
    """Evaluates an arithmetic expression, such as `(3 + 4) * 2 ** 5` or `sqrt(2) / 3`.

    Args:
        expression: Numbers with + - * / // % ** and parentheses, functions such as sqrt, log, sin, min, max, round
            and abs, and the constants pi and e.
    """
    return str(evaluate(expression))


def evaluate(expression: str) -> Number:
    """Returns the value of an expression. Raises `ValueError` or `ArithmeticError` if it has none."""
    if len(expression) > MAX_LENGTH:
        raise ValueError(f"the expression has {len(expression)} characters; at most {MAX_LENGTH} are allowed")
    try:
        return _value(ast.parse(expression.strip().replace("^", "**"), mode="eval").body)
    except (SyntaxError, MemoryError, RecursionError) as error:
        raise ValueError(f"`{expression:.100}` is not an arithmetic expression") from error


def _value(node: ast.expr) -> Number:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return _bounded(number)
        case ast.Name(id=name) if name in CONSTANTS:
            return CONSTANTS[name]
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _UNARY:
            return _UNARY[type(op)](_value(operand))
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _bounded(_power(_value(left), _value(right)))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return _bounded(_BINARY[type(op)](_value(left), _value(right)))
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in FUNCTIONS:
            try:
                return _bounded(FUNCTIONS[name](*map(_value, arguments)))
            except TypeError as error:
                raise ValueError(f"`{name}` was called with wrong arguments: {error}") from error
    raise ValueError(f"`{ast.unparse(node):.100}` is not arithmetic")


def _power(base: Number, exponent: Number) -> Number:
    if isinstance(base, int) and isinstance(exponent, int) and base.bit_length() * abs(exponent) > 2 * MAX_BITS:
        raise OverflowError("the result is too large")
    result = base**exponent
    if isinstance(result, complex):
        raise ValueError("the result is not a real number")
    return result


def _bounded(number: Number) -> Number:
    if isinstance(number, int) and number.bit_length() > MAX_BITS:
        raise OverflowError("the result is too large")
    if not isinstance(number, int) and not math.isfinite(number):
        raise OverflowError("the result is not a finite number")
    return number
