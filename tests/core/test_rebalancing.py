import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.core.rebalancing import InstanceView, PoolView, divide, moves_to_even_out, rebalance


def instance(id, version=None, count=0, tokens=None, slots=1, **more):
    """An instance with one version, some trajectories of it, and their context."""
    resident = frozenset() if version is None else frozenset({version})
    counts = {version: count} if count else {}
    return InstanceView(id, slots, resident, counts=counts, tokens={v: tokens or c for v, c in counts.items()}, **more)


def many_slots(id, slots, counts, resident=(), **more):
    return InstanceView(id, slots, frozenset({*counts, *resident}), counts=counts, tokens=dict(counts), **more)


def due(versions, staleness=3):
    return {version: version + staleness for version in versions}


def test_slots_are_divided_in_proportion_with_one_for_every_version_and_for_the_newest():
    instances = [instance(each, 4, 10) for each in range(6)] + [instance(6, 3, 4), instance(7, 2, 1)]
    division = divide(PoolView(instances, newest=5, deadlines=due([2, 3, 4]), top_up=1))
    assert dict(zip(division.versions, division.whole, strict=True)) == {2: 1, 3: 1, 4: 5, 5: 1}
    assert division.suspended == []


def test_what_is_about_to_start_counts_for_the_newest():
    instances = [instance(each, 4, 5) for each in range(8)]
    division = divide(PoolView(instances, newest=5, deadlines=due([4]), top_up=40))
    assert division.whole == [4, 4]


def test_the_newest_version_takes_the_instance_that_has_the_least_to_move():
    instances = [instance(0, 4, 8, 900), instance(1, 4, 8, 300), instance(2, 4, 8, 700)]
    assert rebalance(PoolView(instances, newest=5, deadlines=due([4]))) == []  # nothing may start under it yet
    (change,) = rebalance(PoolView(instances, newest=5, deadlines=due([4]), top_up=1))
    assert (change.instance, change.suspend, change.unload, change.load) == (1, (4,), (4,), (5,))
    assert change.reason.startswith("instance 1 takes version 5 instead of version 4: version 4 has work for 2.0 of 3")


def test_stragglers_of_the_oldest_version_are_gathered_on_one_instance():
    instances = [instance(0, 3, 1, 50), instance(1, 3, 1, 60), instance(2, 4, 30), instance(3, 4, 30)]
    (change,) = rebalance(PoolView(instances, newest=4, deadlines=due([3, 4])))
    assert (change.instance, change.suspend, change.load) == (0, (3,), (4,))


def test_what_rounding_alone_would_move_stays():
    instances = [instance(0, 3, 6), instance(1, 3, 6), instance(2, 4, 14), instance(3, 4, 14)]  # 1.2 and 2.8 of 4
    assert divide(PoolView(instances, newest=4, deadlines=due([3, 4]))).whole == [1, 3]
    assert rebalance(PoolView(instances, newest=4, deadlines=due([3, 4]))) == []


def test_instances_that_can_hold_every_version_only_load_the_newest():
    instances = [many_slots(0, 4, {2: 1, 3: 9}), many_slots(1, 4, {3: 5}), many_slots(2, 4, {2: 3, 3: 1})]
    changes = rebalance(PoolView(instances, newest=4, deadlines=due([2, 3]), top_up=1))
    assert [(each.instance, each.suspend, each.unload, each.load) for each in changes] == [
        (0, (), (), (4,)),
        (1, (), (), (4,)),
        (2, (), (), (4,)),
    ]


def test_with_several_slots_a_version_gives_one_up_for_the_newest_where_that_moves_the_least():
    instances = [many_slots(0, 2, {2: 4, 3: 9}), many_slots(1, 2, {2: 1, 3: 9})]
    (change,) = rebalance(PoolView(instances, newest=4, deadlines=due([2, 3]), top_up=1))
    assert (change.instance, change.suspend, change.load) == (1, (2,), (4,))


def test_what_loads_or_is_evaluated_keeps_its_slot():
    instances = [InstanceView(0, 1, loading=frozenset({4})), instance(1, 3, evaluates=3), instance(2, 3, 9)]
    (change,) = rebalance(PoolView(instances, newest=5, waiting={4: 1}, deadlines=due([3, 4]), top_up=1))
    assert (change.instance, change.suspend, change.load) == (2, (3,), (5,))  # instance 1 goes on with version 3
    assert rebalance(PoolView(instances[:2], newest=5, waiting={4: 1}, deadlines=due([4]), top_up=1)) == []


def test_with_too_few_slots_the_earliest_deadlines_are_served_and_the_newest_waits():
    instances = [instance(0, 3, 5), instance(1, 4, 5)]
    pool = PoolView(instances, newest=5, waiting={2: 3}, deadlines={2: 5, 3: 6, 4: 7}, top_up=9)
    (change,) = rebalance(pool)
    assert (change.instance, change.suspend, change.unload, change.load) == (1, (4,), (4,), (2,))
    assert "not enough slots for version 4 and 5" in change.reason
    later = PoolView(instances, newest=5, waiting={2: 3}, deadlines={2: 9, 3: 6, 4: 7})
    assert rebalance(later) == []


def test_a_version_that_is_short_of_memory_gets_an_instance_more():
    instances = [instance(0, 3, 10, short_of_memory=True), instance(1, 4, 10), instance(2, 4, 10), instance(3, 4, 10)]
    pool = PoolView(instances, newest=4, deadlines=due([3, 4]), min_instances={3: 2})
    (change,) = rebalance(pool)
    assert (change.suspend, change.load) == ((4,), (3,))


def test_nothing_is_taken_for_the_newest_version_when_nothing_more_is_admitted():
    instances = [instance(0, 3, 10), instance(1, 3, 10)]
    assert rebalance(PoolView(instances, newest=4, deadlines=due([3]), admits=False)) == []


@st.composite
def pools(draw):
    newest = draw(st.integers(3, 6))
    versions = st.integers(newest - 3, newest)
    instances, slots = [], draw(st.sampled_from([1, 1, 2, 3, 5]))
    for id in range(draw(st.integers(1, 7))):
        held = draw(st.sets(versions, max_size=slots))
        loading = draw(st.sets(st.sampled_from(sorted(held)), max_size=1)) if held else set()
        resident = held - loading
        counts = {version: draw(st.integers(1, 20)) for version in resident if draw(st.booleans())}
        tokens = {version: count * draw(st.integers(1, 50)) for version, count in counts.items()}
        evaluates = draw(st.sampled_from(sorted(resident))) if resident and draw(st.integers(0, 9)) == 0 else None
        instances.append(InstanceView(id, slots, frozenset(resident), frozenset(loading), evaluates, counts, tokens))
    waiting = draw(st.dictionaries(versions, st.integers(1, 9), max_size=2))
    min_instances = draw(st.dictionaries(versions, st.integers(1, 4), max_size=1)) if slots == 1 else {}
    top_up, admits = draw(st.sampled_from([0, 0, 8])), draw(st.booleans())
    deadlines = {version: version + 3 for version in range(newest - 3, newest + 1)}
    return PoolView(instances, newest, waiting, deadlines, top_up if admits else 0, admits, min_instances)


def apply(pool, changes):
    """The pool after the changes, everything that was suspended waiting."""
    waiting, instances = dict(pool.waiting), {each.id: each for each in pool.instances}
    for change in changes:
        old = instances[change.instance]
        for version in change.suspend:
            waiting[version] = waiting.get(version, 0) + old.counts[version]
        assert old.evaluates not in change.unload
        assert set(change.unload) <= old.resident
        assert {version for version in change.unload if version in old.counts} == set(change.suspend)
        resident, loading = old.resident - set(change.unload), old.loading | set(change.load)
        assert not set(change.load) & old.held
        assert len(resident) + len(loading) <= old.slots
        counts = {version: count for version, count in old.counts.items() if version not in change.suspend}
        instances[change.instance] = InstanceView(old.id, old.slots, resident, loading, old.evaluates, counts, counts)
    return PoolView(
        list(instances.values()), pool.newest, waiting, pool.deadlines, pool.top_up, pool.admits, pool.min_instances
    )


@settings(max_examples=500, deadline=None)
@given(pools())
def test_a_plan_can_be_carried_out_serves_what_it_can_and_is_followed_by_no_other(pool):
    division = divide(pool)
    after = apply(pool, rebalance(pool))
    held = {version for each in after.instances for version in each.held}
    needs = pool.needs()
    for version in division.versions:
        assert version in held or needs[version] == 0
    assert not any(change.suspend for change in rebalance(after)), "rebalancing once is enough"
    latest = max(
        (
            pool.deadlines[version]
            for version in division.versions
            if needs[version] and not any(version in each.fixed for each in pool.instances)
        ),
        default=None,
    )
    for version in division.suspended:
        if needs[version] and latest is not None and version in pool.deadlines:
            assert pool.deadlines[version] >= latest


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 400), min_size=3, max_size=6), st.integers(1, 2))
def test_the_newest_version_displaces_the_fewest_tokens(tokens, wanted):
    instances = [instance(id, 4, 10, each) for id, each in enumerate(tokens)]
    pool = PoolView(
        instances, newest=5, deadlines=due([4]), top_up=10 * wanted * len(instances) // (len(instances) - wanted)
    )
    count = divide(pool).whole[1]
    moved = sum(tokens[change.instance] for change in rebalance(pool))
    assert moved == min(sum(each) for each in itertools.combinations(tokens, count))


def test_work_goes_from_the_most_to_the_least_loaded_until_it_is_not_worth_it():
    loads = {0: 20, 1: 2, 2: 10}
    moves = moves_to_even_out(7, {0: 20, 1: 2, 2: 10}, loads, [0, 1, 2])
    assert [(each.source, each.target, each.count) for each in moves] == [(0, 1, 9)]
    assert loads == {0: 11, 1: 11, 2: 10}
    assert moves[0].reason == "instance 0 runs 20 trajectories, instance 1 2"
    assert moves_to_even_out(7, {0: 5, 1: 2}, {0: 5, 1: 2}, [0, 1]) == []
    assert moves_to_even_out(7, {0: 20, 1: 11}, {0: 20, 1: 11}, [0, 1]) == []


def test_only_what_runs_under_the_version_can_go():
    loads = {0: 20, 1: 0}
    assert [each.count for each in moves_to_even_out(7, {0: 3}, loads, [1])] == [3]
    assert loads == {0: 17, 1: 3}


def test_an_instance_that_is_short_of_memory_gives_away_more_readily():
    assert [each.count for each in moves_to_even_out(7, {0: 6, 1: 4}, {0: 6, 1: 4}, [1], short_of_memory={0})] == [1]
    assert moves_to_even_out(7, {0: 4, 1: 6}, {0: 4, 1: 6}, [1], short_of_memory={0}) == []


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40), st.booleans()), min_size=1, max_size=8))
def test_evening_out_conserves_the_work_and_ends_even(rows):
    running = {id: count for id, (count, _, _) in enumerate(rows) if count}
    loads = {id: count + other for id, (count, other, _) in enumerate(rows)}
    targets = [id for id, (_, _, target) in enumerate(rows) if target]
    total = sum(loads.values())
    for move in moves_to_even_out(7, running, loads, targets):
        assert move.target in targets
        running[move.source] -= move.count
        running[move.target] = running.get(move.target, 0) + move.count
        assert running[move.source] >= 0
    assert sum(loads.values()) == total
    assert moves_to_even_out(7, {id: count for id, count in running.items() if count}, dict(loads), targets) == []


def test_work_is_even_if_a_slower_instance_has_less_of_it():
    assert moves_to_even_out(7, {0: 20, 1: 10}, {0: 20, 1: 10}, [0, 1], paces={1: 0.5}) == []
    (move,) = moves_to_even_out(7, {0: 15, 1: 15}, {0: 15, 1: 15}, [0, 1], paces={1: 0.5})
    assert (move.source, move.target, move.count) == (1, 0, 5)


def test_a_version_that_waits_gets_the_slot_of_one_that_only_could_start_groups() -> None:
    """The bound of staleness was lowered from 5 to 1: groups of version 1, which are being scored, are due first."""
    idle = InstanceView(id=7, slots=1, resident=frozenset({1}))
    pool = PoolView([idle], newest=1, waiting={0: 3}, deadlines={0: 5, 1: 2}, top_up=3)
    (change,) = rebalance(pool)
    assert (change.instance, change.unload, change.load) == (7, (1,), (0,))
