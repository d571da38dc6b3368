from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from stretto.core.apportionment import exact_shares, whole_shares


def divide(needs, total, least=None, most=None):
    least = least or [0] * len(needs)
    most = most or [total] * len(needs)
    return whole_shares(exact_shares(needs, total, least, most), total, most)


def test_the_largest_remainders_are_rounded_up():
    assert divide([60, 25, 15], 10) == [6, 2, 2]  # 2.5 and 1.5: of equal remainders the later is rounded up
    assert divide([41, 33, 26], 10) == [4, 3, 3]
    assert divide([1, 1, 1], 4) == [1, 1, 2]


def test_whoever_needs_hardly_anything_still_gets_the_least():
    assert divide([1000, 1, 0], 4, least=[1, 1, 1]) == [2, 1, 1]


def test_what_one_may_not_have_goes_to_the_others_in_proportion():
    assert divide([40, 10, 4], 6, least=[1, 1, 1], most=[3, 3, 3]) == [3, 2, 1]


def test_where_nobody_needs_anything_all_get_the_same():
    assert divide([0, 0], 4) == [2, 2]


def test_bounds_at_both_ends_are_both_kept():
    assert exact_shares([100, 1, 1], 10, [0, 3, 0], [5, 9, 9]) == [Fraction(5), Fraction(3), Fraction(2)]


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 3), st.integers(0, 12)), min_size=1, max_size=8), st.data()
)
def test_shares_add_up_keep_their_bounds_and_are_within_one_of_exact(rows, data):
    needs = [need for need, _, _ in rows]
    least = [low for _, low, _ in rows]
    most = [low + more for _, low, more in rows]
    total = data.draw(st.integers(sum(least), sum(most)))
    exact = exact_shares(needs, total, least, most)
    whole = whole_shares(exact, total, most)
    assert sum(exact) == sum(whole) == total
    for share, count, low, high in zip(exact, whole, least, most, strict=True):
        assert low <= share <= high
        assert low <= count <= high
        assert abs(count - share) < 1
    for one in range(len(rows)):
        for other in range(len(rows)):
            if needs[one] > needs[other] and least[one] < exact[one] < most[one] and exact[other] > least[other]:
                assert exact[one] >= exact[other], "who needs more within bounds does not get less"
