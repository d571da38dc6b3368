"""Stop strings: the check that the engines share."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

TAIL = 8  # tokens decoded beyond the bytes of the longest stop string


def ends_in_string(
    decode: Callable[[Sequence[int]], str], tokens: Sequence[int] | NDArray[np.int32], strings: Sequence[str]
) -> bool:
    """Tells if the last tokens hold one of the strings. Called after every token, so that none is missed."""
    longest = max(len(string.encode()) for string in strings)  # a token may be no more than a byte
    tail = tokens[-(longest + TAIL) :]
    text = decode(tail.tolist() if isinstance(tail, np.ndarray) else list(tail))
    return any(string in text for string in strings)
