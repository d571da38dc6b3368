from stretto.core.messages import Load, Swap, Unload
from stretto.core.placement import Instance, candidates, place, place_in_one_slot, resuming_instance, stranded


def instance(id, slots, resident=(), loading=(), running=None):
    made = Instance(id, slots, set(resident), set(loading), dict(running or {}))
    for number in range(sum(made.running.values())):
        made.trajectories[id * 100 + number] = None
    return made


def test_a_new_group_goes_to_the_newest_version_then_to_the_least_loaded():
    instances = [
        instance(0, 2, [3], running={3: 1}),
        instance(1, 2, [3, 4], running={3: 3}),
        instance(2, 2, [4], running={4: 2}),
        instance(3, 2, loading=[4]),
    ]
    assert [(each.id, version) for each, version in candidates(instances, target=40)] == [(2, 4), (1, 4), (0, 3)]


def test_nothing_goes_above_its_share_while_another_instance_is_loading():
    full, loading = instance(0, 1, [4], running={4: 5}), instance(1, 1, loading=[4])
    assert candidates([full, loading], target=10) == []
    assert candidates([full, loading], target=12) == [(full, 4)]
    assert candidates([full], target=5) == [(full, 4)]


def test_an_instance_above_its_share_of_the_work_comes_after_one_with_an_older_version():
    instances = [instance(0, 1, [4], running={4: 5}), instance(1, 1, [3], running={3: 4})]
    assert [each.id for each, _ in candidates(instances, target=10)] == [1, 0]


def test_a_trajectory_resumes_on_the_least_loaded_holder_of_its_version():
    instances = [instance(0, 1, [3], running={3: 2}), instance(1, 2, [3, 4], running={4: 1}), instance(2, 1, [4])]
    assert resuming_instance(instances, 3).id == 1
    assert resuming_instance(instances, 5) is None
    assert resuming_instance(instances, None).id == 2


def test_a_publish_loads_the_newest_where_a_slot_is_free_or_nothing_runs():
    instances = [
        instance(0, 2, [3], running={3: 1}),  # a free slot
        instance(1, 1, [3], running={3: 1}),  # busy
        instance(2, 1, [3]),  # idle
        instance(3, 2, [2, 3], running={3: 1}),  # full, but version 2 is idle
        instance(4, 1, loading=[3]),  # cannot be told to do anything yet
    ]
    assert place(instances, [], 4, hold=None) == [Load(0, 4), Unload(2, 3), Load(2, 4), Unload(3, 2), Load(3, 4)]


def test_stranded_versions_take_slots_before_the_newest_and_even_from_it():
    idle_newest = instance(0, 1, [5])
    assert place([idle_newest], [2, 3], 5, hold=None) == [Unload(0, 5), Load(0, 2)]
    two = [instance(0, 1, [5]), instance(1, 2, [5], running={5: 1})]
    assert place(two, [2], 5, hold=None) == [Load(1, 2)]
    assert place([instance(0, 1, [5], running={5: 1})], [2], 5, hold=None) == []


def test_what_an_evaluation_holds_is_not_unloaded():
    assert place([instance(0, 1, [3])], [], 4, hold=(0, 3)) == []
    assert place([instance(0, 1, [3])], [], 4, hold=(1, 3)) == [Unload(0, 3), Load(0, 4)]
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
