"""Over how many instances a group starts, by cost."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.core import messages as m
from stretto.core.controller import Controller
from stretto.core.plan import resolve_plan
from stretto.core.spreading import GroupCosts, division

FREE_PREFILL, DEAR_PREFILL = GroupCosts(0.0, 1e-4), GroupCosts(100.0, 1e-4)


def test_a_group_stays_whole_if_its_prompt_is_dear_and_is_spread_if_its_rows_are() -> None:
    assert division([0, 0, 0, 0], 8, "auto", DEAR_PREFILL, 100.0) == [2, 2, 2, 2], "nobody waits on an idle instance"
    assert division([5, 5, 5, 5], 8, "auto", DEAR_PREFILL, 100.0) == [8]
    assert division([5, 5, 5, 5], 8, "auto", FREE_PREFILL, 100.0) == [2, 2, 2, 2]
    assert division([5, 5, 5, 5], 8, "auto", GroupCosts(0.1, 0.0), 100.0) == [8], "rows cost nothing"


def test_before_anything_is_measured_a_group_stays_whole() -> None:
    assert division([0, 0], 4, "auto", None, 100.0) == [4]
    assert division([0, 0], 4, "auto", FREE_PREFILL, 0.0) == [4]


def test_an_instance_with_much_to_do_gets_no_member() -> None:
    assert division([0, 1, 50], 4, "auto", FREE_PREFILL, 10.0) == [3, 1]
    assert len(division([0, 1, 50], 4, "always", None, 0.0)) == 2


def test_what_a_recipe_says_is_done_whatever_it_costs() -> None:
    assert division([0, 0, 0], 4, "always", DEAR_PREFILL, 10.0) == [2, 1, 1]
    assert division([0, 0, 0], 2, "always", None, 0.0) == [1, 1]
    assert division([0, 0, 0], 4, "never", FREE_PREFILL, 10.0) == [4]


def test_a_slower_instance_gets_fewer_members() -> None:
    assert division([0, 0, 0], 10, "always", None, 0.0, [1.0, 1.0, 0.5]) == [4, 4, 2]
    assert division([4, 0], 4, "always", None, 0.0, [1.0, 0.125]) == [4]


def costs_of(loads: list[int], counts: list[int], costs: GroupCosts, length: float) -> float:
    """The row-seconds that are lost, row by row."""
    total = 0.0
    for rows, count in zip(loads, counts, strict=False):
        for number in range(count):  # each new row slows those that are there, and they slow it
            total += 2 * (rows + number) * costs.row_s * length
        total += (rows + count) * costs.prefill_s if count else 0.0
    return total


def divisions(members: int, places: int) -> list[list[int]]:
    if places == 1:
        return [[members]]
    return [[first, *rest] for first in range(members + 1) for rest in divisions(members - first, places - 1)]


@settings(max_examples=200, deadline=None)
@given(
    loads=st.lists(st.integers(0, 6), min_size=1, max_size=4).map(sorted),
    members=st.integers(1, 5),
    prefill_s=st.sampled_from([0.0, 0.1, 1.0, 30.0]),
    row_s=st.sampled_from([0.0, 0.01, 0.1]),
)
def test_no_other_division_costs_less(loads: list[int], members: int, prefill_s: float, row_s: float) -> None:
    costs = GroupCosts(prefill_s, row_s)
    chosen = division(loads, members, "auto", costs, 10.0)
    assert sum(chosen) == members
    least = min(costs_of(loads, each, costs, 10.0) for each in divisions(members, len(loads)))
    assert costs_of(loads, chosen, costs, 10.0) == pytest.approx(least)


def started(spread: str, instances: int, costs: GroupCosts | None) -> list[m.Start]:
    """The groups that start when the last instance of a run has loaded version 0, once a completion was seen."""
    plan = resolve_plan("synchronous", batch=3, group_size=4, updates=2, retries=0, rows=12, spread=spread)  # type: ignore[arg-type]
    controller = Controller(plan)
    controller.length = 50.0
    for each in range(instances):
        controller.handle(m.Joined(each, 1))
    commands = controller.handle(m.LoadSampled({}, costs=costs))
    for each in range(instances):
        assert not [each for each in commands if isinstance(each, m.Start)] or costs is None
        commands = controller.handle(m.Loaded(each, 0))
    return [each for each in commands if isinstance(each, m.Start)]


def test_members_of_a_group_start_on_several_instances_under_one_version() -> None:
    for spread, costs in (("auto", FREE_PREFILL), ("always", FREE_PREFILL)):
        starts = started(spread, 2, costs)
        assert [each.instances for each in starts] == [(0, 0, 1, 1)] * 3, "once both have loaded the version"
        assert {each.version for each in starts} == {0}
    assert [each.instances for each in started("auto", 2, None)] == [(1, 1, 1, 1)], "the others are on instance 0"


def test_with_one_instance_nothing_changes() -> None:
    for spread in ("auto", "never", "always"):
        assert [each.instances for each in started(spread, 1, FREE_PREFILL)] == [(0, 0, 0, 0)] * 3


def test_costs_below_zero_are_refused() -> None:
    with pytest.raises(ValueError, match="`row_s` is -1"):
        GroupCosts(0.0, -1)
