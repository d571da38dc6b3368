"""Batches of rows of similar length, so that little of them is padding."""

from __future__ import annotations

from collections.abc import Mapping


def length_batches(lengths: Mapping[int, int], max_tokens: int) -> list[list[int]]:
    """Cuts rows into batches, longest first, of at most `max_tokens` with padding, or of one row.

    `lengths` has the length of each row by its place.
    """
    made: list[list[int]] = []
    for place in sorted(lengths, key=lambda each: (-lengths[each], each)):
        if made and (len(made[-1]) + 1) * lengths[made[-1][0]] <= max_tokens:
            made[-1].append(place)
        else:
            made.append([place])
    return made
