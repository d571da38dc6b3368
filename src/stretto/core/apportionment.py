"""Divides a number in proportion to needs, within bounds. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction


def exact_shares(needs: Sequence[int], total: int, least: Sequence[int], most: Sequence[int]) -> list[Fraction]:
    """Returns parts of `total` in proportion to `needs`, none below its `least` or above its `most`.

    They add up to `total` if the bounds allow it; otherwise each is at the bound that prevents it. If none of those
    within bounds needs anything, the rest is divided evenly among them.
    """
    fixed: dict[int, int] = {}
    while True:
        free = [each for each in range(len(needs)) if each not in fixed]
        rest = total - sum(fixed.values())
        weight = sum(needs[each] for each in free)
        shares = {each: Fraction(rest * needs[each], weight) if weight else Fraction(rest, len(free)) for each in free}
        over = {each: most[each] for each in free if shares[each] > most[each]}
        under = {each: least[each] for each in free if shares[each] < least[each]}
        if not over and not under:
            return [shares[each] if each in shares else Fraction(fixed[each]) for each in range(len(needs))]
        # Fix those on the side that is further outside its bounds; the others may still come within theirs.
        excess = sum(shares[each] - bound for each, bound in over.items())
        lack = sum(bound - shares[each] for each, bound in under.items())
        if excess >= lack:
            fixed |= over
        if lack >= excess:
            fixed |= under


def whole_shares(shares: Sequence[Fraction], total: int, most: Sequence[int]) -> list[int]:
    """Returns shares rounded by largest remainder; of equal remainders, the later one is rounded up."""
    whole = [int(share) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda each: (shares[each] - whole[each], each), reverse=True)
    left = total - sum(whole)
    for each in by_remainder:
        if left > 0 and whole[each] < most[each]:
            whole[each] += 1
            left -= 1
    return whole
