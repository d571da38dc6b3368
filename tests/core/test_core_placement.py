from stretto.core.messages import Load, Swap
from stretto.core.placement import Candidates, Instance, evictable, place_in_one_slot, stranded


def instance(id, slots, resident=(), loading=(), running=None):
    made = Instance(id, slots, set(resident), set(loading), dict(running or {}))
    for number in range(sum(made.running.values())):
        made.trajectories[id * 100 + number] = None
    return made


def ranked(instances, target, oldest=0):
    return [(each.id, version) for each, version in Candidates(instances, target, oldest)]


def test_a_new_group_goes_to_the_newest_version_then_to_the_least_loaded():
    instances = [
        instance(0, 2, [3], running={3: 1}),
        instance(1, 2, [3, 4], running={3: 3}),
        instance(2, 2, [4], running={4: 2}),
        instance(3, 2, loading=[4]),
    ]
    assert ranked(instances, 40) == [
        (2, 4),
        (1, 4),
        (0, 3),
    ]


def test_nothing_goes_above_its_share_while_another_instance_is_loading():
    full, loading = instance(0, 1, [4], running={4: 5}), instance(1, 1, loading=[4])
    assert ranked([full, loading], 10) == []
    assert ranked([full, loading], 12) == [(0, 4)]
    assert ranked([full], 5) == [(0, 4)]


def test_an_instance_above_its_share_of_the_work_comes_after_one_with_an_older_version():
    instances = [instance(0, 1, [4], running={4: 5}), instance(1, 1, [3], running={3: 4})]
    assert [id for id, _ in ranked(instances, 10, 0)] == [1, 0]


def test_candidates_follow_the_groups_that_start():
    instances = [instance(0, 1, [4]), instance(1, 1, [4]), instance(2, 1, [3])]
    candidates = Candidates(instances, target=6, oldest=0)
    chosen = []
    for number in range(8):
        place, version = candidates.best(lambda version: True)
        chosen.append((place.id, version))
        place.trajectories[number] = None
        candidates.started()
    assert chosen == [(0, 4), (1, 4), (0, 4), (1, 4), (2, 3), (2, 3), (0, 4), (1, 4)]
    assert candidates.best(lambda version: version < 4) is None  # what is refused at a version is at all older ones
    assert candidates.best(lambda version: True) is None


def test_a_version_that_is_too_old_takes_no_new_group():
    instances = [instance(0, 1, [4], running={4: 5}), instance(1, 1, [2]), instance(2, 1, [3], running={3: 1})]
    assert [id for id, _ in ranked(instances, 30, 3)] == [0, 2]


def test_an_instance_that_is_short_of_memory_comes_last():
    instances = [instance(0, 1, [4]), instance(1, 1, [4], running={4: 9})]
    instances[0].crowded = True
    assert [id for id, _ in ranked(instances, 30, 0)] == [1, 0]


def test_what_runs_or_is_evaluated_is_not_unloaded():
    assert evictable(instance(0, 4, [5, 2, 3, 4], running={4: 1}), hold=(0, 3)) == [2, 5]
    assert evictable(instance(0, 1, [3]), hold=(1, 3)) == [3]
    assert place_in_one_slot([instance(0, 2, [3])], 4, hold=(0, 3)) == []


def test_in_one_slot_the_newest_overwrites_what_is_there():
    instances = [
        instance(0, 1, [3], running={3: 2}),
        instance(1, 1),
        instance(2, 1, loading=[3]),
        instance(3, 1, [4]),
    ]
    assert place_in_one_slot(instances, 4, hold=None) == [Swap(0, 3, 4), Load(1, 4)]


def test_a_version_is_stranded_when_no_instance_holds_or_loads_it():
    assert stranded([instance(0, 2, [1], loading=[2])], [1, 2, 3]) == [3]
    assert stranded([], [1]) == [1]
