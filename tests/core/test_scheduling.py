from core_run import Run

from stretto.core import messages as m
from stretto.core.instances import RunningEvaluation


def test_what_runs_on_a_lost_instance_goes_on_elsewhere_under_its_own_version():
    run = Run(instances=(2, 2), staleness=1, in_flight=4, rows=4)
    commands = run.send(m.Lost(0))
    resumed = [c for c in commands if isinstance(c, m.Resume)]
    assert [(c.trajectory, c.version, c.instance) for c in resumed] == [(0, 0, 1), (1, 0, 1)]


def test_a_version_that_lost_its_only_instance_takes_a_slot_from_one_that_is_due_later():
    run = Run(instances=(1, 1), staleness=1, in_flight=4, rows=8)
    run.finish(0, 1)  # on instance 0, which is idle at the publish
    run.send(m.Updated(0))
    assert run.last[:3] == [m.Publish(1), m.UnloadVersion(0, 0), m.LoadVersion(0, 1)]
    assert [c.version for c in run.send(m.Loaded(0, 1)) if isinstance(c, m.Start)] == [1, 1]
    suspend, *rest = run.send(m.Lost(1))
    assert (suspend.instance, suspend.trajectories) == (0, (4, 5))
    assert "not enough slots for version 1" in suspend.reason
    assert rest == [m.UnloadVersion(0, 1), m.LoadVersion(0, 0)]
    assert "no instance has a free slot for version 1 (2 trajectories)" in run.wait("admission").reason
    assert run.send(m.Loaded(0, 0)) == [m.Resume(2, 0, 0), m.Resume(3, 0, 0)]
    assert [type(c) for c in run.finish(2, 3)] == [m.UnloadVersion, m.LoadVersion, m.Retire, m.Train]
    assert [(c.trajectory, c.version, c.reason) for c in run.send(m.Loaded(0, 1)) if isinstance(c, m.Resume)] == [
        (4, 1, suspend.reason),
        (5, 1, suspend.reason),
    ]


def test_a_publish_gives_the_newest_version_an_instance_and_moves_the_fewest_tokens_for_it():
    run = Run(instances=(1, 1, 1), staleness=2, in_flight=6, rows=6, batch=2)
    assert [each.load for each in run.controller.instances.values()] == [2, 2, 2]
    run.send(m.LoadSampled({0: 900, 1: 900, 2: 10, 3: 10, 4: 500, 5: 500}))
    for trajectory in (0, 4):
        run.finish(trajectory)
    run.send(m.Updated(0))
    suspend = run.given(m.Suspend)[0]
    assert (suspend.instance, suspend.trajectories) == (1, (2, 3))
    assert run.last[2:4] == [m.UnloadVersion(1, 0), m.LoadVersion(1, 1)]
    assert {(c.trajectory, c.version, c.instance) for c in run.given(m.Resume)} == {(2, 0, 0), (3, 0, 2)}
    assert all(command.reason == suspend.reason for command in run.given(m.Resume))


def test_an_instance_that_leaves_hands_its_trajectories_over_and_is_released():
    run = Run(instances=(2, 2), staleness=1, in_flight=4, rows=4)
    moving = tuple(run.controller.instances[0].trajectories)
    commands = run.send(m.Leaving(0))
    assert commands[0] == m.Suspend(0, moving, "instance 0 leaves")
    assert [(c.trajectory, c.instance) for c in run.given(m.Resume)] == [(each, 1) for each in moving]
    assert commands[-1] == m.ReleaseInstance(0)
    assert run.send(m.Lost(0)) == []  # ended as it was told, and seen to be gone


def test_the_last_instance_stays_although_it_was_asked_to_go_when_all_others_are_lost():
    run = Run(instances=(2, 2), staleness=1, in_flight=4, rows=4)
    run.send(m.Generated(0, 5))
    run.controller.evaluating = RunningEvaluation(0, 0)  # holds it up, without a trajectory
    assert m.ReleaseInstance(0) not in run.send(m.Leaving(0))
    commands = run.send(m.Lost(1))
    assert commands[0] == m.KeepInstance(0)
    assert m.ReleaseInstance(0) not in commands
    assert {command.instance for command in run.given(m.Resume)} == {0}


def test_an_instance_that_leaves_runs_what_has_no_place_elsewhere_until_it_has():
    run = Run(instances=(1,), staleness=1, in_flight=2, rows=2)
    assert run.send(m.Leaving(0)) == [m.KeepInstance(0)]
    assert run.send(m.Joined(1, 1)) == [m.LoadVersion(1, 0)]
    assert run.send(m.Leaving(0)) == []
    assert [type(command) for command in run.send(m.Loaded(1, 0))] == [m.Suspend, m.Resume, m.Resume, m.ReleaseInstance]


def test_a_trajectory_that_had_ended_before_it_was_suspended_is_scored():
    run = Run(instances=(1, 1), staleness=1, in_flight=4, rows=4)
    run.send(m.Leaving(0))
    run.send(m.Generated(0, 5))
    assert run.controller.ledger.trajectories[0].instance is None
    run.send(m.Scored(0, 1.0))
    assert run.controller.ledger.finished


def test_a_failure_on_an_instance_that_a_trajectory_has_left_is_not_one_of_its_attempts():
    run = Run(instances=(1, 1), staleness=1, in_flight=4, rows=4, retries=0)
    run.send(m.Leaving(0))
    assert run.send(m.GenerationFailed(0, "cut off", instance=0)) == []
    assert run.controller.ledger.trajectories[0].runs_on(1)
    assert run.send(m.GenerationFailed(0, "cut off", instance=1))[0] == m.Fail(0, "cut off")


def test_a_load_sample_evens_out_instances_and_leaves_alone_what_was_just_moved():
    run = Run(instances=(1,), staleness=1, batch=8, in_flight=16, rows=16)
    run.send(m.Joined(1, 1))
    run.send(m.Loaded(1, 0))
    assert [each.load for each in run.controller.instances.values()] == [16, 0]
    tokens = {each: 100 - each for each in range(16)}
    suspend = run.send(m.LoadSampled(tokens, ending=frozenset({15, 14})))[0]
    assert suspend.trajectories == tuple(range(13, 5, -1))  # the fewest tokens, without those that are about to end
    assert [command.instance for command in run.given(m.Resume)] == [1] * 8
    assert run.controller.counters.moved == 8
    assert run.send(m.LoadSampled(tokens)) == []
    assert [type(command) for command in run.send(m.Lost(1))] == [m.Resume] * 8


def test_a_version_whose_instances_are_all_short_of_memory_gets_another():
    run = Run(instances=(1, 1, 1), staleness=2, in_flight=6, rows=6, batch=2)
    run.finish(0, 1)
    run.send(m.Updated(0))
    (load,) = run.given(m.LoadVersion)
    run.send(m.Loaded(load.instance, 1))
    older = [each.id for each in run.controller.instances.values() if 0 in each.running]
    run.send(m.LoadSampled({}, short_of_memory=frozenset(older)))
    assert run.controller.min_instances == {0: len(older) + 1}
    run.finish(2, 3)
    run.update()
    assert run.controller.min_instances == {}


def test_a_trajectory_that_waits_for_its_world_frees_its_row_for_the_next_group():
    run = Run(staleness=3, rows=2, in_flight=4)
    assert run.controller.counters.admitted_groups == 2
    assert [c.group for c in run.send(m.TurnEnded(0)) if isinstance(c, m.Start)] == [2]
    assert [c.group for c in run.send(m.TurnEnded(2)) if isinstance(c, m.Start)] == [3]
    assert run.send(m.TurnEnded(1)) == []
    assert "4 groups have started and are not trained yet, and `rollout.in_flight` is 4" in run.wait("admission").reason
    for trajectory in (0, 1, 2):
        assert run.send(m.TurnAsked(trajectory)) == []
    assert (
        "all rows are taken: 4 trajectories run or wait to run, and `rollout.rows` is 2" in run.wait("admission").reason
    )


def test_no_group_starts_before_those_that_came_back_from_their_worlds_have_ended():
    run = Run(staleness=9, rows=2, in_flight=8, updates=10)
    for trajectory in (0, 1, 2):
        run.send(m.TurnEnded(trajectory))
    for trajectory in (0, 1, 2):
        run.send(m.TurnAsked(trajectory))
    active = run.controller.ledger.num_active
    assert active == 5  # rows are 2, and three came back
    for trajectory in (0, 1, 2):
        assert run.given(m.Start) == []
        run.send(m.Generated(trajectory, 5))
    assert run.given(m.Start) == []
    run.send(m.Generated(3, 5))
    assert [c.group for c in run.given(m.Start)] == [5]


def test_a_row_is_not_free_between_turns_while_instances_are_short_of_memory():
    run = Run(staleness=3, rows=2, in_flight=4)
    run.send(m.LoadSampled({}, short_of_memory=frozenset({0})))
    assert run.send(m.TurnEnded(0)) == []
    assert "1 are between turns" in run.wait("admission").reason
    assert [c.group for c in run.send(m.LoadSampled({})) if isinstance(c, m.Start)] == [2]


def test_between_turns_a_version_stays_loaded_and_a_publish_under_drain_waits():
    run = Run("one-step-off")
    run.finish(0, 1)
    run.send(m.TurnEnded(2))
    run.send(m.Generated(3, 5))
    assert run.send(m.Updated(0)) == []
    assert "1 between turns on instance 0" in run.wait("publish").reason
    assert run.send(m.Generated(2, 5))[:2] == [m.Publish(1), m.LoadVersion(0, 1)]
    other = Run(staleness=2, in_flight=4, rows=8)
    other.send(m.TurnEnded(2))
    other.send(m.TurnEnded(3))
    other.finish(0, 1)
    assert m.Retire(0) not in other.update()
    assert other.controller.versions == {0: 4, 1: 0}  # two of them are between turns


def test_work_between_turns_is_not_moved_to_even_out_instances():
    run = Run(instances=(1,), staleness=1, batch=8, in_flight=16, rows=16)
    for trajectory in range(12):
        run.send(m.TurnEnded(trajectory))
    run.send(m.Joined(1, 1))
    run.send(m.Loaded(1, 0))
    run.send(m.LoadSampled(dict.fromkeys(range(16), 50)))
    assert {each for c in run.given(m.Suspend) for each in c.trajectories} <= {12, 13, 14, 15}


def test_reports_of_turns_from_an_instance_that_a_trajectory_has_left_change_nothing():
    run = Run(instances=(1, 1), staleness=1, in_flight=4, rows=4)
    assert run.send(m.TurnAsked(0)) == []
    run.send(m.TurnEnded(0))
    run.send(m.Leaving(0))
    assert run.controller.ledger.trajectories[0].runs_on(1)
    assert run.controller.ledger.num_between_turns == 0
    run.send(m.Lost(1))
    assert run.send(m.TurnEnded(0)) == run.send(m.TurnAsked(0)) == []
    assert run.controller.ledger.num_active == 4
