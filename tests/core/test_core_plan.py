import pytest

from stretto.core.paradigms import PARADIGMS, slots_needed
from stretto.core.plan import from_alpha, resolve_plan


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
    assert resolve_plan("drop", batch=2, group_size=1, updates=3, staleness=2, evaluate_every=5).slots == 4


@pytest.mark.parametrize(
    ("paradigm", "staleness", "in_flight"),
    [("multi-version", 4, 15), ("multi-version", 0, 10), ("partial", 1, 15), ("drop", 0, 10), ("drop", 3, 15)],
)
def test_in_flight_defaults_to_one_and_a_half_batches_where_staleness_has_room(paradigm, staleness, in_flight):
    plan = resolve_plan(paradigm, batch=10, group_size=4, updates=5, staleness=staleness)
    assert (plan.in_flight, plan.rows) == (in_flight, 40)


@pytest.mark.parametrize(("paradigm", "staleness"), [("synchronous", 0), ("one-step-off", 1)])
def test_paradigms_of_one_batch_fix_staleness_and_in_flight(paradigm, staleness):
    plan = resolve_plan(paradigm, batch=10, group_size=4, updates=5)
    assert (plan.staleness, plan.in_flight) == (staleness, 10)
    with pytest.raises(ValueError, match="`in_flight` is 11"):
        resolve_plan(paradigm, batch=10, group_size=4, updates=5, in_flight=11)
    with pytest.raises(ValueError, match=f"`staleness` is {staleness} in the paradigm `{paradigm}`, not 2"):
        resolve_plan(paradigm, batch=10, group_size=4, updates=5, staleness=2)
    with pytest.raises(ValueError, match="not 'auto'"):
        resolve_plan(paradigm, batch=10, group_size=4, updates=5, auto=True)


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
        ("in_flight", 3),
        ("in_flight", 13),
    ],
)
def test_an_option_that_cannot_work_is_refused_by_name(option, value):
    options = {"batch": 4, "group_size": 2, "updates": 3, "staleness": 2} | {option: value}
    with pytest.raises(ValueError, match=f"`{option}` is {value}"):
        resolve_plan("multi-version", **options)


def test_drop_takes_any_in_flight_from_a_batch_up():
    assert resolve_plan("drop", batch=4, group_size=1, updates=1, staleness=1, in_flight=99).in_flight == 99


def test_an_unknown_paradigm_is_refused_with_those_there_are():
    with pytest.raises(ValueError, match=r"`paradigm` is 'async'.*`synchronous`.*`multi-version`"):
        resolve_plan("async", batch=1, group_size=1, updates=1)


@pytest.mark.parametrize(("alpha", "expected"), [(0, (0, 8)), (0.5, (1, 12)), (1, (1, 16)), (2.3, (3, 26))])
def test_alpha_is_a_staleness_and_an_in_flight_that_a_plan_accepts(alpha, expected):
    assert from_alpha(alpha, 8) == expected
    resolve_plan("multi-version", batch=8, group_size=1, updates=1, staleness=expected[0], in_flight=expected[1])


@pytest.mark.parametrize("alpha", [-0.1, float("nan"), float("inf")])
def test_alpha_must_be_a_number_from_0(alpha):
    with pytest.raises(ValueError, match="`alpha`"):
        from_alpha(alpha, 8)
