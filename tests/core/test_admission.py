import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.core.admission import (
    admits,
    batch_ready,
    invariant_holds,
    lowest_staleness,
    waited_deadline,
    wanted_staleness,
)

counts = st.dictionaries(st.integers(3, 9), st.integers(1, 6), max_size=5)


def holds_by_definition(outstanding, next_update, batch):
    return all(deadline >= next_update for deadline in outstanding) and all(
        sum(count for due, count in outstanding.items() if due <= d) <= batch * (d - next_update + 1)
        for d in range(next_update, 30)
    )


def test_synchronous_admits_a_batch_and_nothing_while_it_trains():
    assert admits({}, deadline=0, next_update=0, batch=2)
    assert admits({0: 1}, deadline=0, next_update=0, batch=2)
    assert not admits({0: 2}, deadline=0, next_update=0, batch=2)
    assert not admits({}, deadline=0, next_update=1, batch=2)  # update 0 trains: version 0 would be too old


def test_an_older_group_is_refused_when_it_would_push_a_later_one_past_its_deadline():
    assert not admits({5: 4}, deadline=4, next_update=4, batch=2)
    assert admits({5: 3}, deadline=4, next_update=4, batch=2)


@given(outstanding=counts, deadline=st.integers(0, 10), next_update=st.integers(2, 5), batch=st.integers(1, 5))
def test_admission_is_the_invariant_with_one_more_group(outstanding, deadline, next_update, batch):
    assert invariant_holds(outstanding, next_update, batch) == holds_by_definition(outstanding, next_update, batch)
    if invariant_holds(outstanding, next_update, batch):
        more = outstanding | {deadline: outstanding.get(deadline, 0) + 1}
        assert admits(outstanding, deadline, next_update, batch) == holds_by_definition(more, next_update, batch)


@given(outstanding=counts, data=st.data(), next_update=st.integers(2, 3), batch=st.integers(1, 5))
def test_a_ready_batch_leaves_the_invariant_behind_and_a_refused_one_would_break_it(
    outstanding, data, next_update, batch
):
    if not invariant_holds(outstanding, next_update, batch):
        return
    finished = {d: data.draw(st.integers(0, count)) for d, count in outstanding.items()}
    left, room = dict(outstanding), batch
    for deadline in sorted(finished):
        taken = min(room, finished[deadline])
        left[deadline] -= taken
        room -= taken
    left = {deadline: count for deadline, count in left.items() if count}
    ready = batch_ready(outstanding, finished, next_update, batch)
    assert ready == (room == 0 and holds_by_definition(left, next_update + 1, batch))


@given(outstanding=counts, next_update=st.integers(2, 3), batch=st.integers(1, 5))
def test_a_batch_is_always_ready_when_everything_outstanding_is_finished(outstanding, next_update, batch):
    if invariant_holds(outstanding, next_update, batch) and sum(outstanding.values()) >= batch:
        assert batch_ready(outstanding, outstanding, next_update, batch)


def test_the_batch_rule_names_how_far_the_unfinished_groups_matter():
    # Two are due by update 5 and unfinished: one batch of two cannot hold both besides what is due by 6.
    assert waited_deadline({5: 2, 6: 2, 9: 2}, {9: 2}, next_update=5, batch=2) == 6
    assert waited_deadline({5: 2, 6: 2, 9: 2}, {5: 2, 9: 2}, next_update=5, batch=2) is None
    # Nothing is due now, yet they would pile up: three are due by update 6 and only two fit into its batch.
    assert waited_deadline({6: 3, 9: 2}, {9: 2}, next_update=5, batch=2) == 6


@pytest.mark.parametrize(
    ("tail_s", "update_s", "cap", "wanted"),
    [(10, 5, 8, 3), (11, 5, 8, 4), (0, 5, 8, 1), (0, 0, 8, 1), (3, 0, 8, 8), (1e300, 1e-300, 8, 8), (9, 1, 0, 0)],
)
def test_wanted_staleness_covers_the_tail_under_the_cap(tail_s, update_s, cap, wanted):
    assert wanted_staleness(tail_s, update_s, cap) == wanted


@pytest.mark.parametrize(("tail_s", "update_s"), [(-1, 1), (1, -1), (float("nan"), 1)])
def test_a_measurement_that_is_no_duration_is_refused(tail_s, update_s):
    with pytest.raises(ValueError, match="`tail_s`"):
        wanted_staleness(tail_s, update_s, 4)


def test_staleness_falls_only_as_far_as_what_is_outstanding_allows():
    assert lowest_staleness({}, 0, 4, next_update=7, batch=2) == 0
    assert lowest_staleness({5: 1}, 0, 4, next_update=7, batch=2) == 2  # it would be too old with less
    assert lowest_staleness({7: 5}, 0, 4, next_update=7, batch=2) == 2  # five groups need three batches
    assert lowest_staleness({4: 1, 7: 1}, 1, 3, next_update=7, batch=2) == 3
