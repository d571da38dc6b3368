"""Triton, if it is installed. Modules of kernels import without it: builds of torch for a CPU do not include it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    triton: Any
    tl: Any
else:
    try:
        import triton
        import triton.language as tl
    except ModuleNotFoundError:
        triton = tl = None

__all__ = ["kernel", "power_of_two", "tl"]


class _Missing:
    """Takes the place of a kernel if Triton is not installed."""

    def __getitem__(self, grid: object) -> Any:
        raise ModuleNotFoundError("kernels on a GPU need the package `triton`: install it, or use the CPU")


def kernel(*unspecialized: str) -> Callable[[Callable[..., Any]], Any]:
    """Returns `triton.jit` that does not compile again for special values of the arguments named."""
    if triton is None:
        return lambda function: _Missing()
    return triton.jit(do_not_specialize=list(unspecialized))  # type: ignore[no-any-return]


def power_of_two(number: int, least: int = 1) -> int:
    """Returns the smallest power of two that is neither below `number` nor below `least`: the size of a block."""
    return max(least, 1 << (number - 1).bit_length())
