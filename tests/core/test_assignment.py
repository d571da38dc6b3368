import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.core.assignment import assign


def best_by_trying(kept, places, wanted, fixed):
    """The most that any choice keeps of what is not fixed; None: no choice meets all counts."""
    rows, columns = kept.shape
    choices = [
        [
            combination
            for combination in itertools.combinations(range(columns), places[row])
            if not any(fixed[row, column] for column in combination)
        ]
        for row in range(rows)
    ]
    best = {tuple([0] * columns): 0}  # counts -> most kept
    for row in range(rows):
        after: dict[tuple[int, ...], int] = {}
        for counts, value in best.items():
            for choice in choices[row]:
                now = list(counts)
                for column in choice:
                    now[column] += 1
                total = value + sum(int(kept[row, column]) for column in choice)
                after[tuple(now)] = max(after.get(tuple(now), total), total)
        best = after
    return best.get(tuple(wanted))


@st.composite
def problems(draw):
    rows, columns = draw(st.integers(1, 7)), draw(st.integers(1, 4))
    largest = draw(st.sampled_from([0, 1, 3, 1000]))
    kept = np.array(
        draw(
            st.lists(
                st.lists(st.integers(0, largest), min_size=columns, max_size=columns), min_size=rows, max_size=rows
            )
        )
    )
    odds = draw(st.sampled_from([0, 0, 3]))
    fixed = np.array([[odds > 0 and draw(st.integers(0, 9)) < odds for _ in range(columns)] for _ in range(rows)])
    uniform = draw(st.integers(0, columns)) if draw(st.booleans()) else None
    places, wanted = [], [0] * columns
    for row in range(rows):
        free = [column for column in range(columns) if not fixed[row, column]]
        count = min(len(free), draw(st.integers(0, columns)) if uniform is None else uniform)
        places.append(count)
        for column in draw(st.permutations(free))[:count]:
            wanted[column] += 1  # the counts of some choice: there is one that meets them
    return kept, np.array(places), np.array(wanted), fixed


@settings(max_examples=600, deadline=None)
@given(problems())
def test_the_choice_keeps_as_much_as_the_best_of_all_choices(problem):
    kept, places, wanted, fixed = problem
    chosen = assign(*problem) & ~fixed
    assert (chosen.sum(axis=1) == places).all()
    assert (chosen.sum(axis=0) == wanted).all()
    assert int(kept[chosen].sum()) == best_by_trying(*problem)


def test_paths_alone_find_the_same_as_with_prices(monkeypatch):
    rng = np.random.default_rng(0)
    kept = rng.integers(0, 50, (60, 5))
    places = np.ones(60, dtype=np.int64)
    wanted = np.array([12, 12, 12, 12, 12])
    fixed = np.zeros((60, 5), dtype=bool)
    with_prices = kept[assign(kept, places, wanted, fixed)].sum()
    monkeypatch.setattr("stretto.core.assignment.ROUNDS", 0)
    assert kept[assign(kept, places, wanted, fixed)].sum() == with_prices


def test_a_column_that_wants_a_row_gets_one_even_where_the_counts_cannot_be_met():
    kept = np.zeros((3, 4), dtype=np.int64)
    chosen = assign(kept, np.array([4, 4, 1]), np.array([3, 3, 2, 1]), np.zeros((3, 4), dtype=bool))
    assert (chosen.sum(axis=1) == [4, 4, 1]).all()
    assert (chosen.sum(axis=0) >= 1).all()


def test_counts_that_do_not_add_up_are_refused():
    with pytest.raises(ValueError, match="add up to 1 and `wanted` to 2"):
        assign(np.zeros((1, 2), np.int64), np.array([1]), np.array([1, 1]), np.zeros((1, 2), bool))
