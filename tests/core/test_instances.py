from stretto.core.instances import InstanceState, evictable, load_in_one_slot
from stretto.core.messages import LoadVersion, SwapVersion


def instance(id, slots, resident=(), loading=(), running=None):
    return InstanceState(id, slots, set(resident), set(loading), dict(running or {}))


def test_what_runs_or_is_evaluated_is_not_unloaded():
    assert evictable(instance(0, 4, [5, 2, 3, 4], running={4: 1}), evaluation=(0, 3)) == [2, 5]
    assert evictable(instance(0, 1, [3]), evaluation=(1, 3)) == [3]
    assert load_in_one_slot([instance(0, 2, [3])], 4, evaluation=(0, 3)) == []


def test_in_one_slot_the_newest_overwrites_what_is_there():
    instances = [
        instance(0, 1, [3], running={3: 2}),
        instance(1, 1),
        instance(2, 1, loading=[3]),
        instance(3, 1, [4]),
    ]
    assert load_in_one_slot(instances, 4, evaluation=None) == [SwapVersion(0, 3, 4), LoadVersion(1, 4)]
