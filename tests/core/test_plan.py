import pytest

from stretto.core.paradigms import PARADIGMS, slots_needed
from stretto.core.plan import resolve_plan


def plan_of(paradigm, **options):
    return resolve_plan(paradigm, **{"retries": 2} | options)


def test_the_table_has_the_five_rows_of_the_design():
    assert {
        name: (row.staleness, row.one_batch, row.on_publish, row.bounded_by, row.at_limit, row.breaks)
        for name, row in PARADIGMS.items()
    } == {
        "synchronous": (0, True, "none", "deadlines", "wait", ()),
        "one-step-off": (1, True, "drain", "deadlines", "wait", ()),
        "partial": (None, False, "continue", "deadlines", "wait", (1,)),
        "drop": (None, False, "pinned", "in_flight", "drop", (2,)),
        "multi-version": (None, False, "pinned", "deadlines", "wait", ()),
    }


def test_slots_are_one_a_version_that_can_be_live_and_one_for_evaluation():
    assert slots_needed(PARADIGMS["multi-version"], 3, evaluates=False) == 4
    assert slots_needed(PARADIGMS["multi-version"], 3, evaluates=True) == 5
    assert slots_needed(PARADIGMS["partial"], 3, evaluates=False) == 1
    assert slots_needed(PARADIGMS["synchronous"], 0, evaluates=True) == 2
    assert plan_of("drop", batch=2, group_size=1, updates=3, staleness=2, evaluate_every=5).slots == 4


@pytest.mark.parametrize(
    ("paradigm", "staleness", "in_flight"),
    [("multi-version", 4, 15), ("multi-version", 0, 10), ("partial", 1, 15), ("drop", 0, 10), ("drop", 3, 15)],
)
def test_in_flight_defaults_to_one_and_a_half_batches_where_staleness_has_room(paradigm, staleness, in_flight):
    plan = plan_of(paradigm, batch=10, group_size=4, updates=5, staleness=staleness)
    assert (plan.in_flight, plan.rows) == (in_flight, 40)


@pytest.mark.parametrize(("paradigm", "staleness"), [("synchronous", 0), ("one-step-off", 1)])
def test_paradigms_of_one_batch_fix_staleness_and_in_flight(paradigm, staleness):
    plan = plan_of(paradigm, batch=10, group_size=4, updates=5)
    assert (plan.staleness, plan.in_flight) == (staleness, 10)
    with pytest.raises(ValueError, match="`in_flight` is 11"):
        plan_of(paradigm, batch=10, group_size=4, updates=5, in_flight=11)
    with pytest.raises(ValueError, match=f"`staleness` is {staleness} in the paradigm `{paradigm}`, not 2"):
        plan_of(paradigm, batch=10, group_size=4, updates=5, staleness=2)
    with pytest.raises(ValueError, match="not 'auto'"):
        plan_of(paradigm, batch=10, group_size=4, updates=5, auto=True)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("batch", 0),
        ("group_size", 0),
        ("updates", 0),
        ("staleness", -1),
        ("rows", 0),
        ("retries", -1),
        ("evaluate_every", -1),
        ("filter_limit", -1),
        ("replay_groups", -1),
        ("replay_uses", -1),
        ("replay_groups", 2),
        ("in_flight", 3),
        ("in_flight", 13),
    ],
)
def test_an_option_that_cannot_work_is_refused_by_name(option, value):
    options = {"batch": 4, "group_size": 2, "updates": 3, "staleness": 2} | {option: value}
    with pytest.raises(ValueError, match=f"`{option}` is {value}"):
        plan_of("multi-version", **options)


def test_drop_takes_any_in_flight_from_a_batch_up():
    assert plan_of("drop", batch=4, group_size=1, updates=1, staleness=1, in_flight=99).in_flight == 99


def test_an_unknown_paradigm_is_refused_with_those_there_are():
    with pytest.raises(ValueError, match=r"`paradigm` is 'async'.*`synchronous`.*`multi-version`"):
        plan_of("async", batch=1, group_size=1, updates=1)


def test_a_paradigm_without_a_staleness_of_its_own_must_be_given_one():
    with pytest.raises(ValueError, match="`staleness` is missing: the paradigm `partial` needs a value for it"):
        plan_of("partial", batch=1, group_size=1, updates=1)


def test_a_replay_needs_groups_that_may_grow_older():
    options = {"batch": 4, "group_size": 2, "updates": 3, "replay_groups": 1, "replay_uses": 1}
    assert plan_of("multi-version", staleness=1, **options).replay_groups == 1
    with pytest.raises(ValueError, match="`replay_groups` is 1, but with `staleness` 0"):
        plan_of("synchronous", **options)
    with pytest.raises(ValueError, match="`replay_groups` is 1, but with `staleness` 0"):
        plan_of("drop", staleness=0, **options)
