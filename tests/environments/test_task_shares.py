"""The assignment of groups to tasks: bounds at every prefix, and the same tasks for the same losses."""

from __future__ import annotations

import random
from fractions import Fraction

from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.environments.task_shares import Share, TaskShares, exact

weights = st.lists(st.floats(0.001, 1_000.0), min_size=2, max_size=6)


def drawn(shares: TaskShares, count: int) -> list[str]:
    labels = []
    for _ in range(count):
        labels.append(shares.next())
        shares.drawn(labels[-1])
    return labels


def mixture(*values: float, oversample: float | None = None) -> TaskShares:
    return TaskShares({f"t{place}": Share(value, oversample) for place, value in enumerate(values)})


@given(weights)
@settings(max_examples=60, deadline=None)
def test_every_prefix_is_near_the_shares(values: list[float]) -> None:
    count, total, k = 300, sum(map(exact, values)), len(values)
    labels = drawn(mixture(*values), count)
    counts = [0] * k
    for place, label in enumerate(labels, start=1):
        counts[int(label[1:])] += 1
        for value, number in zip(values, counts, strict=True):
            above = number - exact(value) / total * place
            assert above <= 1 - Fraction(1, k)
            assert above >= -Fraction((k - 1) ** 2, k)
            assert k > 2 or abs(above) <= Fraction(1, 2)


@given(weights, st.integers(0, 2**32), st.floats(0.0, 0.9))
@settings(max_examples=60, deadline=None)
def test_shares_of_what_is_kept_hold_whatever_is_lost(values: list[float], seed: int, rate: float) -> None:
    """Losses come a while after their draw, and of the first task alone: it is drawn more often for that."""
    rng, shares, kept, waiting = random.Random(seed), mixture(*values), dict[str, int](), list[str]()
    total, k, done = sum(map(exact, values)), len(values), 0
    while done < 200:
        label = shares.next()
        shares.drawn(label)
        waiting.append(label)
        if len(waiting) < 8:
            continue
        ended = waiting.pop(0)
        if ended == "t0" and rng.random() < rate:
            shares.lost(ended)
        else:
            kept[ended] = kept.get(ended, 0) + 1
            done += 1
    for label in waiting:  # the run trains what it has started
        kept[label] = kept.get(label, 0) + 1
    count = sum(kept.values())
    for place, value in enumerate(values):
        lacks = exact(value) / total * count - kept.get(f"t{place}", 0)
        assert abs(lacks) <= k + 8, "what is under way may be lost after the last draw"


@given(weights, st.integers(0, 2**32))
@settings(max_examples=30, deadline=None)
def test_the_same_draws_and_losses_give_the_same_tasks(values: list[float], seed: int) -> None:
    def story() -> list[str]:
        rng, shares, labels = random.Random(seed), mixture(*values), list[str]()
        for _ in range(80):
            labels += drawn(shares, 1)
            if rng.random() < 0.3:
                shares.lost(labels[-1])
        return labels

    assert story() == story()


def test_shares_are_the_decimals_that_were_written() -> None:
    counts = drawn(mixture(0.7, 0.2, 0.1), 1_000)
    assert [counts.count(f"t{place}") for place in range(3)] == [700, 200, 100]
    assert drawn(mixture(0.7, 0.3), 40) == drawn(mixture(7, 3), 40), "shares are relative"
    assert drawn(mixture(1.0, 1.0), 4) == ["t0", "t1", "t0", "t1"], "the first in the recipe, if both lack the same"


def test_a_task_that_always_loses_is_drawn_until_its_bound() -> None:
    def lost_of(oversample: float | None) -> tuple[int, int]:
        shares, labels = mixture(1.0, 1.0, oversample=oversample), list[str]()
        while labels.count("t1") < 100 and len(labels) < 1_000:
            labels += drawn(shares, 1)
            if labels[-1] == "t0":
                shares.lost("t0")
        return labels.count("t0"), labels.count("t1")

    assert lost_of(None) == (1_000, 0), "without a bound the other tasks wait for it"
    assert abs(lost_of(3.0)[0] - 300) <= 3
    assert abs(lost_of(1.0)[0] - 100) <= 1, "1: nothing is made up for"
