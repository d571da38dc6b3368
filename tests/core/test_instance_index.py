"""The index of instances gives the answers that looking at every instance would give."""

from __future__ import annotations

from collections import Counter

from core_index import check_index, check_sources, in_order
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stretto.core.instance_index import InstanceIndex, Ranking
from stretto.core.instances import InstanceState
from stretto.core.ledger import Group, Trajectory, TrajectoryState
from stretto.core.messages import LoadVersion, SwapVersion, UnloadVersion

EXAMPLES = settings().max_examples if settings().max_examples > 100 else 200
many = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))


def instance(id, slots, resident=(), loading=(), running=None, short_of_memory=False):
    made = InstanceState(id, slots, set(resident), set(loading), short_of_memory=short_of_memory)
    for version, count in (running or {}).items():
        run(made, version, count)
    return made


def run(instance, version, count=1, movable=True):
    """Starts trajectories on an instance, outside of any ledger."""
    first = instance.id * 1000 + len(instance.trajectories)
    group = Group(0, version, version)
    made = [
        Trajectory(first + number, group, version, TrajectoryState.RUNNING, instance, movable=movable)
        for number in range(count)
    ]
    instance.start(made, version)


def index_of(*instances, pinned=True):
    index = InstanceIndex(pinned=pinned)
    for each in instances:
        index.add(each)
    return index


def chosen(index, target, oldest=0, count=1):
    """The places of groups of one trajectory, one after the other; None once there is no place."""
    places = []
    for _ in range(count):
        place = index.best_place(target, oldest, lambda version: True)
        places.append(place and (place[0].id, place[1]))
        if place is not None:
            run(*place)
    return places


def test_a_new_group_goes_to_the_newest_version_then_to_the_least_loaded():
    index = index_of(
        instance(0, 2, [3], running={3: 1}),
        instance(1, 2, [3, 4], running={3: 3}),
        instance(2, 2, [4], running={4: 2}),
        instance(3, 2, loading=[4]),
    )
    assert chosen(index, 40, count=3) == [(2, 4), (1, 4), (2, 4)]


def test_nothing_goes_above_its_share_while_another_instance_is_loading():
    full, loading = instance(0, 1, [4], running={4: 5}), instance(1, 1, loading=[4])
    assert chosen(index_of(full, loading), 10) == [None]
    assert chosen(index_of(full, loading), 12) == [(0, 4)]
    assert chosen(index_of(full), 5) == [(0, 4)]


def test_an_instance_above_its_share_of_the_work_comes_after_one_with_an_older_version():
    index = index_of(instance(0, 1, [4], running={4: 5}), instance(1, 1, [3], running={3: 4}))
    assert chosen(index, 10, count=2) == [(1, 3), (0, 4)]


def test_places_follow_the_groups_that_start():
    index = index_of(instance(0, 1, [4]), instance(1, 1, [4]), instance(2, 1, [3]))
    assert chosen(index, 6, count=8) == [(0, 4), (1, 4), (0, 4), (1, 4), (2, 3), (2, 3), (0, 4), (1, 4)]
    assert index.best_place(6, 0, lambda version: version < 4) is None, "refused at a version, refused at older ones"


def test_an_instance_at_half_the_pace_gets_half_as_many_groups():
    index = index_of(instance(0, 1, [4]), instance(1, 1, [4]), instance(2, 1, [4]))
    index.report_paces({1: 0.5})
    counts = Counter(id for id, _ in chosen(index, 50, count=50))
    assert counts == {0: 20, 1: 10, 2: 20}
    index.report_paces({})
    assert {id for id, _ in chosen(index, 80, count=10)} == {1}, "its pace is that of the others again"


def test_a_slower_instance_below_its_share_comes_before_one_above_it():
    index = index_of(instance(0, 1, [4], running={4: 8}), instance(1, 1, [3], running={3: 2}))
    index.report_paces({1: 0.5})
    assert chosen(index, 12, count=3) == [(1, 3), (1, 3), (0, 4)]


def test_a_version_that_is_too_old_takes_no_new_group():
    index = index_of(instance(0, 1, [4], running={4: 5}), instance(1, 1, [2]), instance(2, 1, [3], running={3: 1}))
    assert chosen(index, 18, oldest=3, count=7) == [(0, 4), *[(2, 3)] * 5, (0, 4)]


def test_an_instance_that_is_short_of_memory_comes_last():
    index = index_of(instance(0, 1, [4], short_of_memory=True), instance(1, 1, [4], running={4: 9}))
    assert chosen(index, 24, count=4) == [(1, 4), (1, 4), (1, 4), (0, 4)]


def test_a_trajectory_continues_on_the_least_loaded_instance_that_has_memory():
    index = index_of(
        instance(0, 2, [3], running={3: 2}),
        instance(1, 2, [3], short_of_memory=True),
        instance(2, 2, [3], running={3: 1}),
        instance(3, 2, [4]),
    )
    assert [each.id for each in in_order(index.holders(3))] == [2, 0]
    index[0].leave(True)
    index[2].report_memory(True)
    assert [each.id for each in in_order(index.holders(3))] == [1, 2]
    assert index.holders(5) is None


def test_an_instance_that_is_removed_is_in_no_answer_and_changes_nothing():
    gone = instance(0, 1, [3], running={3: 2})
    index = index_of(gone, instance(1, 1, [3]))
    assert index.num_running(3) == 1
    assert index.remove(0) is gone
    gone.leave(True)  # whatever becomes of it
    run(gone, 3)
    assert (index.num_staying, index.num_running(3), list(index)) == (1, 0, [1])


def test_an_answer_costs_nothing_that_grows_with_the_past():
    """A ranking drops entries of the past, or it would grow with every change."""
    only = instance(0, 1, [3])
    ranking = Ranking()
    ranking.add(only)
    for _ in range(1000):
        run(only, 3)
        ranking.reload(only)
        assert ranking.first is only
    assert len(ranking._heap) <= 2 * len(ranking.members) + 16


@many
@given(
    loads=st.lists(
        st.tuples(st.integers(1, 14), st.integers(0, 4), st.sampled_from([False, False, True])), min_size=1, max_size=12
    )
)
def test_an_idle_instance_takes_over_from_the_few_that_the_index_names_what_it_would_from_all(loads):
    index = InstanceIndex(pinned=True)
    for id, (load, resting, short_of_memory) in enumerate(loads):
        index.add(instance(id, 1, [3], running={3: load}, short_of_memory=short_of_memory))
        run(index[id], 3, resting, movable=False)
    check_sources(index, 3)
    assert len(index.movable_sources(3)) <= 2 * max(each.work for each in index.values())


@many
@given(data=st.data(), pinned=st.booleans())
def test_every_answer_is_that_of_looking_at_every_instance(data, pinned):
    index, draw = InstanceIndex(pinned=pinned), data.draw
    ids = iter(draw(st.permutations(range(12))))  # ids need not follow the order of joining
    for _ in range(draw(st.integers(1, 40))):
        change(draw, index, ids)
        if draw(st.booleans()):  # what has changed several times since the last question is entered once
            check_index(
                index,
                pinned=pinned,
                target=draw(st.integers(1, 30)),
                oldest=draw(st.integers(-2, 4)),
                refused=draw(st.integers(0, 4)),
            )


def change(draw, index, ids):
    """Does something to one of the instances, or adds or removes one."""
    what = draw(
        st.sampled_from(
            ["join", "remove", "load", "confirm", "unload", "leave", "memory", "start", "stop", "movable", "paces"]
        )
    )
    if what == "join" or not index:
        if (id := next(ids, None)) is not None:
            index.add(instance(id, draw(st.integers(1, 3)), draw(st.sets(st.integers(0, 3), max_size=1))))
        return
    each = index[draw(st.sampled_from(sorted(index)))]
    if what == "remove":
        index.remove(each.id)
    elif what == "load" and each.free > 0:
        absent = [version for version in range(5) if not each.holds(version)]
        each.apply(LoadVersion(each.id, draw(st.sampled_from(absent))))
    elif what == "load" and each.resident and not each.loading:  # as `partial` does
        each.apply(SwapVersion(each.id, old := max(each.resident), old + 1))
    elif what == "confirm" and each.loading:
        each.confirm(draw(st.sampled_from(sorted(each.loading))))
        if draw(st.booleans()):
            version = max(each.resident)
            for trajectory in each.trajectories.values():
                trajectory.version = version
            each.swap(version)
    elif what == "unload" and (idle := sorted(each.resident - each.running.keys())):
        each.apply(UnloadVersion(each.id, draw(st.sampled_from(idle))))
    elif what == "leave":
        each.leave(not each.leaving)
    elif what == "memory":
        each.report_memory(not each.short_of_memory)
    elif what == "paces":
        index.report_paces(draw(st.dictionaries(st.sampled_from(sorted(index)), st.sampled_from([0.125, 0.5, 0.875]))))
    elif what == "start" and each.resident:
        run(each, draw(st.sampled_from(sorted(each.resident))), draw(st.integers(1, 8)), draw(st.booleans()))
    elif what == "stop" and each.trajectories:
        each.stop(each.trajectories[draw(st.sampled_from(sorted(each.trajectories)))])
    elif what == "movable" and each.trajectories:
        trajectory = each.trajectories[draw(st.sampled_from(sorted(each.trajectories)))]
        each.make_movable(trajectory, not trajectory.movable)
