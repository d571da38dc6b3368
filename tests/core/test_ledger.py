import pytest

from stretto.core.instances import InstanceState
from stretto.core.ledger import TRANSITIONS, Group, Ledger, TrajectoryState
from stretto.errors import TransitionError


def admitted(version=0, deadline=1, size=2):
    ledger, instance = Ledger(), InstanceState(0, 2, resident={version})
    group = Group(0, version, deadline)
    ledger.admit(group, range(size), [instance] * size)
    return ledger, instance, group


def test_every_state_has_its_transitions_and_only_ends_have_none():
    assert set(TRANSITIONS) == set(TrajectoryState)
    ends = {state for state, following in TRANSITIONS.items() if not following}
    assert ends == {TrajectoryState.TRAINED, TrajectoryState.FAILED, TrajectoryState.DROPPED, TrajectoryState.FILTERED}


def test_what_cannot_follow_is_an_error_that_names_the_trajectory():
    ledger, _, group = admitted()
    with pytest.raises(
        TransitionError, match=r"trajectory 1 \(group 0, version 0\) is running and cannot become scored"
    ):
        ledger.score(group.trajectories[1], 1.0)
    ledger.generate(group.trajectories[1])
    with pytest.raises(TransitionError, match="is scoring and cannot become waiting"):
        ledger.interrupt(group.trajectories[1])


def test_a_group_is_trained_with_what_is_left_of_it_and_then_forgotten():
    ledger, instance, group = admitted(size=3)
    for trajectory in group.trajectories:
        ledger.generate(trajectory)
    assert (ledger.num_active, instance.load, instance.running, ledger.running) == (0, 0, {}, {})
    assert not ledger.score(group.trajectories[0], 1.0)
    assert not ledger.fail(group.trajectories[1])
    assert ledger.score(group.trajectories[2], 0.5)
    assert ledger.finished_at == {1: 1}
    ledger.take([group])
    assert ledger.batch_members() == (0, 2)
    assert (ledger.groups, ledger.outstanding_at, ledger.finished_at, ledger.outstanding_of) == ({}, {}, {}, {})
    ledger.train()
    assert (ledger.trajectories, ledger.batch) == ({}, [])
    assert (ledger.counters.trained, ledger.counters.failed, ledger.counters.trained_groups) == (2, 1, 1)


def test_a_group_with_nothing_left_is_replaced_and_forgotten():
    ledger, instance, group = admitted(size=2)
    assert not ledger.fail(group.trajectories[0])
    assert ledger.fail(group.trajectories[1])
    assert (ledger.groups, ledger.trajectories, ledger.outstanding_at, instance.running) == ({}, {}, {}, {})
    assert (ledger.counters.replaced_groups, ledger.num_active) == (1, 0)


def test_an_interrupted_trajectory_is_counted_under_its_version_until_it_runs_elsewhere():
    ledger, instance, group = admitted(version=3, size=1)
    ledger.interrupt(group.trajectories[0])
    assert (ledger.num_active, list(ledger.waiting), instance.load, ledger.slot_freed) == (1, [3], 0, True)
    other = InstanceState(1, 1, resident={3})
    ledger.run(group.trajectories[0], other, 3)
    assert (ledger.num_active, ledger.waiting, other.running) == (1, {}, {3: 1})


def test_dropping_a_group_ends_whatever_state_its_trajectories_are_in():
    ledger, instance, group = admitted(size=5)
    first, second, third, fourth, _ = group.trajectories
    ledger.interrupt(first)
    ledger.generate(second)
    ledger.generate(third)
    ledger.score(third, 1.0)
    ledger.fail(fourth)
    assert ledger.drop(group) == (0, 1, 2, 4)
    assert (ledger.num_active, ledger.waiting, ledger.running, instance.load) == (0, {}, {}, 0)
    assert (ledger.counters.dropped, ledger.counters.failed, ledger.trajectories) == (4, 1, {})


def test_between_turns_a_trajectory_keeps_its_instance_and_version_and_frees_its_row():
    ledger, instance, group = admitted(version=3, size=2)
    first = group.trajectories[0]
    ledger.end_turn(first)
    assert (ledger.num_active, ledger.num_between_turns, ledger.num_unfinished) == (1, 1, 2)
    assert (instance.load, instance.running, ledger.running) == (1, {3: 2}, {3: 2})
    assert (first.runs_on(0), instance.movable) == (True, {3: 1})
    with pytest.raises(TransitionError, match="is between turns and cannot become scored"):
        ledger.score(first, 1.0)
    ledger.ask_turn(first)
    assert (ledger.num_active, ledger.num_between_turns, instance.load, instance.movable) == (2, 0, 2, {3: 2})


@pytest.mark.parametrize("end", ["generate", "interrupt", "fail"])
def test_a_trajectory_between_turns_may_end_fail_or_move(end):
    ledger, instance, group = admitted(size=2)
    ledger.end_turn(group.trajectories[0])
    getattr(ledger, end)(group.trajectories[0])
    waiting = 1 if end == "interrupt" else 0
    assert (ledger.num_active, ledger.num_between_turns, instance.load) == (1 + waiting, 0, 1)
    assert (instance.between_turns, instance.running, instance.movable) == (set(), {0: 1}, {0: 1})


def test_dropping_a_group_ends_those_between_turns():
    ledger, instance, group = admitted(size=2)
    ledger.end_turn(group.trajectories[1])
    assert ledger.drop(group) == (0, 1)
    assert (ledger.num_unfinished, ledger.running, instance.trajectories, instance.load) == (0, {}, {}, 0)
