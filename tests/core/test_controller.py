import pytest
from core_record import record
from core_run import Run

from stretto.core import messages as m
from stretto.core.controller import Controller
from stretto.core.plan import resolve_plan
from stretto.errors import TransitionError


def starts(commands):
    return [(c.group, c.version, c.deadline) for c in commands if isinstance(c, m.Start)]


def trains(commands):
    return [(c.update, c.trajectories) for c in commands if isinstance(c, m.Train)]


def test_a_run_begins_with_the_first_version_on_every_instance():
    run = Run(instances=(), staleness=1)
    assert run.send(m.Joined(7, 2)) == [m.LoadVersion(7, 0)]
    assert starts(run.send(m.Loaded(7, 0))) == [(0, 0, 1), (1, 0, 1)]


def test_with_staleness_0_nothing_starts_while_an_update_trains():
    run = Run("synchronous")
    assert trains(run.finish(0, 1)) == [(0, (0, 1))]
    assert starts(run.last) == []
    assert "(`rollout.staleness`)" in run.wait("admission").reason
    assert run.send(m.Updated(0)) == [m.Publish(1), m.LoadVersion(0, 1), m.UnloadVersion(0, 0), m.Retire(0)]
    assert starts(run.send(m.Loaded(0, 1))) == [(2, 1, 1), (3, 1, 1)]


def test_with_staleness_the_next_groups_start_while_an_update_trains():
    run = Run(staleness=2, in_flight=2)
    assert trains(run.finish(0, 1)) == [(0, (0, 1))]
    assert starts(run.last) == [(2, 0, 2), (3, 0, 2)]


def test_the_trainer_waits_for_the_unfinished_groups_that_the_rule_names():
    run = Run(staleness=1, in_flight=4, rows=8)
    assert trains(run.finish(1, 3)) == [(0, (1, 3))]
    run.update()
    run.finish(4, 5)  # version 1, due by update 2; groups 0 and 2 of version 0 are due now
    assert run.given(m.Train) == []
    wait = run.wait("trainer")
    assert wait.groups == (0, 2)
    assert "group 0 (version 0, due by update 1: 1 running on instance 0)" in wait.reason
    assert wait.reason.startswith(
        "update 1: 2 groups are finished, which is enough, but older groups must be trained first; unfinished: group 0"
    )
    assert trains(run.finish(0, 2)) == [(1, (0, 2))]


def test_a_batch_is_ordered_by_version_group_and_member_whatever_finished_first():
    run = Run(staleness=2, group_size=2, in_flight=4, rows=8)
    run.finish(3, 1)
    assert run.controller.training == 0
    run.update()
    assert trains(run.finish(4, 2)) == [(1, (4, 5, 8, 9))]  # group 2 of version 0, then group 4 of version 1


def test_rows_and_in_flight_close_admission_by_name():
    run = Run(staleness=3, group_size=2, rows=5, in_flight=4)
    assert run.controller.counters.admitted_groups == 3  # the third group starts while four trajectories run
    assert "6 trajectories run or wait to run, and `rollout.rows` is 5" in run.wait("admission").reason
    run.finish(0)
    assert starts(run.last) == [(3, 0, 3)]
    run.send(m.Generated(2, 5))
    run.send(m.Generated(3, 5))
    assert "4 groups have started and are not trained yet, and `rollout.in_flight` is 4" in run.wait("admission").reason


def test_a_run_that_starts_ahead_has_one_batch_of_rows_until_its_first_batch_is_taken():
    run = Run(batch=2, group_size=2, staleness=2, ahead=True)
    assert (run.plan.rows, run.plan.in_flight) == (12, 6)
    assert run.controller.ledger.num_active == 4
    assert run.wait("admission").reason == (
        "all rows are taken: 4 trajectories run or wait to run, and there are 4 until the first batch is taken"
    )
    run.finish(0)
    assert [start.group for start in run.given(m.Start)] == [2], "its rows are free"
    run.finish(1)
    assert [train.update for train in run.given(m.Train)] == [0]
    assert run.controller.ledger.num_active == 8, "two batches: the invariant allows no third before version 1"
    run.update()
    assert run.controller.ledger.num_active == 12


def test_instances_share_the_one_batch_of_rows():
    run = Run(batch=4, group_size=2, staleness=2, ahead=True, instances=(8, 8))
    loads = [instance.load for instance in run.controller.instances.staying]
    assert loads == [4, 4]


def test_rows_of_the_recipe_that_are_fewer_than_a_batch_stay_fewer():
    run = Run(batch=2, group_size=2, staleness=2, ahead=True, rows=2)
    assert run.controller.ledger.num_active == 2
    assert run.wait("admission").reason.endswith("and `rollout.rows` is 2")


def test_drop_discards_exactly_what_would_be_too_old_and_takes_the_next_prompts():
    run = Run("drop", staleness=1, in_flight=5, rows=50)
    assert trains(run.finish(3, 1)) == [(0, (1, 3))]
    assert [c for c in run.last if isinstance(c, m.Drop)] == []  # K = 1: version 0 may still train at update 1 ...
    run.update()
    run.finish(0)
    kinds = [type(c) for c in run.finish(6)]
    assert trains(run.last) == [(1, (0, 6))]
    dropped = [c for c in run.last if isinstance(c, m.Drop)]
    assert [c.group for c in dropped] == [2, 4, 5]  # ... but not at update 2: w <= 1 - 1, all of version 0
    assert starts(run.last)
    assert kinds.index(m.Train) < kinds.index(m.Drop) < kinds.index(m.Start)
    assert run.controller.counters.dropped == 3
    assert run.send(m.Generated(2, 5)) == []  # what was under way when it was dropped is ignored


def test_drop_takes_the_first_finished_and_is_bounded_by_in_flight_alone():
    run = Run("drop", staleness=1, in_flight=9, rows=50)
    assert run.controller.counters.admitted_groups == 9  # the deadlines would allow four
    assert trains(run.finish(8, 0)) == [(0, (0, 8))]


def test_one_step_off_publishes_when_nothing_runs_and_admits_nothing_until_then():
    run = Run("one-step-off")
    run.finish(0, 1)
    assert starts(run.last) == [(2, 0, 1), (3, 0, 1)]
    assert run.send(m.Updated(0)) == []
    assert "version 1" in run.wait("publish").reason
    assert "version 1 is published first" in run.wait("admission").reason
    run.send(m.Generated(2, 5))
    assert run.last == []
    assert run.send(m.Generated(3, 5))[:2] == [m.Publish(1), m.LoadVersion(0, 1)]
    run.send(m.Scored(3, 1.0))
    assert trains(run.send(m.Scored(2, 1.0))) == [(1, (2, 3))]
    assert starts(run.send(m.Loaded(0, 1))) == [(4, 1, 2), (5, 1, 2)]


def test_partial_swaps_the_one_slot_and_running_work_goes_on_under_the_new_version():
    run = Run("partial", instances=(1,), staleness=2, in_flight=3, rows=9)
    run.finish(0, 1)
    assert starts(run.last) == [(3, 0, 2), (4, 0, 2)]
    assert run.send(m.Updated(0)) == [m.Publish(1), m.SwapVersion(0, 0, 1)]
    assert run.send(m.GenerationFailed(2, "cut off")) == []  # nothing is resident until the swap is confirmed
    assert run.send(m.Loaded(0, 1)) == [m.Resume(2, 1, 0), m.Retire(0)]
    assert run.controller.versions == {1: 3}
    assert trains(run.finish(2, 3)) == [(1, (2, 3))]  # their version is still that of their admission
    assert starts(run.last) == [(5, 1, 3), (6, 1, 3)]


def test_partial_does_not_overwrite_what_an_evaluation_uses():
    run = Run("partial", instances=(2,), staleness=2, in_flight=3, rows=9, evaluate_every=1)
    run.finish(0, 1)
    assert m.Evaluate(1, 0) in run.update()
    run.finish(2, 3)
    assert run.send(m.Updated(1)) == [m.Publish(2)]
    assert run.send(m.Evaluated(1))[:1] == [m.SwapVersion(0, 1, 2)]


def held_back(**options):
    """Two instances with what they run: the evaluation of version 1 holds instance 0 there, instance 1 follows."""
    run = Run("partial", instances=(1, 1), batch=1, evaluate_every=1, **options)
    run.finish(0)
    assert run.send(m.Updated(0)) == [m.Publish(1), m.SwapVersion(0, 0, 1), m.SwapVersion(1, 0, 1)]
    assert m.Evaluate(1, 0) in run.send(m.Loaded(0, 1))
    run.send(m.Loaded(1, 1))
    return run


def three_versions_on():
    """Instance 0 is held at version 1, and instance 1 runs trajectory 3 under version 3."""
    run = held_back(staleness=1, in_flight=2, rows=1)
    for update in (1, 2):
        run.finish(update)
        assert m.SwapVersion(1, update, update + 1) in run.send(m.Updated(update))
        run.send(m.Loaded(1, update + 1))
    assert runs(run) == {3: (3, 1)}
    return run


def in_a_swap():
    """Instance 0 is held at version 1, and instance 1, which runs trajectory 2, is told to take version 2 instead."""
    run = held_back(staleness=2, in_flight=3, rows=3)
    run.finish(1)
    assert run.send(m.Updated(1)) == [m.Publish(2), m.SwapVersion(1, 1, 2)]
    assert runs(run)[2] == (1, 1)
    return run


def runs(run):
    """Trajectory -> the version and instance that it runs under and on; the instance is None while it waits."""
    found = run.controller.ledger.trajectories.values()
    return {each.id: (each.version, None if each.instance is None else each.instance.id) for each in found}


def test_partial_what_an_instance_leaves_behind_waits_for_a_version_as_new_as_its_own():
    run = three_versions_on()
    assert run.send(m.Lost(1)) == [], "instance 0 has an older version"
    wait = run.wait("trajectories")
    assert wait.groups == (3,)
    assert wait.reason == (
        "no instance has their version or a newer one yet (1 of version 3): instance 0 takes version 3 when its "
        "evaluation of version 1 has ended"
    )
    assert run.send(m.Evaluated(1)) == [m.SwapVersion(0, 1, 3), m.Retire(1)]
    assert run.wait("trajectories").reason.endswith(": instance 0 loads version 3")
    assert run.send(m.Loaded(0, 3)) == [m.Resume(3, 3, 0)]
    assert run.wait("trajectories") is None


def test_partial_what_waits_goes_on_where_an_instance_joins():
    run = three_versions_on()
    run.send(m.Lost(1))
    assert run.send(m.Joined(2, 1)) == [m.LoadVersion(2, 3)]
    assert run.send(m.Loaded(2, 3)) == [m.Resume(3, 3, 2)]


def test_partial_what_runs_on_an_instance_that_leaves_stays_until_another_has_come_as_far():
    run = three_versions_on()
    assert run.send(m.Leaving(1)) == []
    assert runs(run) == {3: (3, 1)}
    assert run.send(m.Evaluated(1)) == [m.SwapVersion(0, 1, 3), m.Retire(1)]
    why = "instance 1 leaves"
    assert run.send(m.Loaded(0, 3)) == [m.Suspend(1, (3,), why), m.Resume(3, 3, 0, why), m.ReleaseInstance(1)]


def test_partial_what_runs_in_a_swap_may_have_tokens_of_the_version_that_is_to_come():
    run = in_a_swap()
    assert run.send(m.Lost(1)) == []
    assert runs(run)[2] == (2, None)
    run = in_a_swap()
    assert run.send(m.Leaving(1)) == []
    run = in_a_swap()
    assert run.send(m.GenerationFailed(2, "cut off", 1)) == []
    assert m.Resume(2, 2, 1) in run.send(m.Loaded(1, 2))


def test_partial_what_was_under_way_before_a_restore_waits_for_the_newest_version():
    run = in_a_swap()
    controller = Controller.restore(run.plan, record(run.controller))
    assert controller.handle(m.Joined(0, 1))[0] == m.LoadVersion(0, 2)
    (wait,) = [wait for wait in controller.waits() if wait.owner == "trajectories"]
    assert wait.reason == (
        "no instance has their version or a newer one yet (2 of version 2): instance 0 loads version 2"
    )
    assert m.Resume(2, 2, 0) in controller.handle(m.Loaded(0, 2))


def test_a_run_admits_what_its_updates_need_and_ends_with_its_last_version():
    run = Run(staleness=3, updates=2, in_flight=8, rows=99)
    assert run.controller.counters.admitted_groups == 4
    assert "all groups that the 2 updates of the run need have started" in run.wait("admission").reason
    run.finish(0, 1, 2, 3)
    run.update()
    assert run.controller.training == 1
    assert run.send(m.Updated(1)) == [m.Publish(2), m.Retire(1), m.Finish(stopped=False)]
    assert run.controller.waits() == []
    assert run.send(m.Evaluated(1)) == []


def test_a_wait_names_three_groups_and_counts_the_others():
    run = Run(staleness=3, updates=4, in_flight=8, rows=99)
    reason = run.wait("trainer").reason
    num = len(run.wait("trainer").groups)
    assert reason.count("group ") == 3 < num
    assert reason.endswith(f"and {num - 3} more")


def test_a_failed_trajectory_is_retried_under_its_version_and_then_left_out_of_its_group():
    run = Run(staleness=1, group_size=2, retries=1, in_flight=2)
    assert run.send(m.GenerationFailed(0, "first")) == [m.Resume(0, 0, 0)]
    assert run.send(m.GenerationFailed(0, "second")) == [m.Fail(0, "second")]
    run.send(m.Generated(1, 5))
    assert run.send(m.ScoringFailed(1, "first")) == [m.Rescore(1)]
    run.send(m.Scored(1, 1.0))
    assert trains(run.finish(1)) == [(0, (1, 2, 3))]
    assert run.controller.counters.failed == 1


def test_a_group_of_which_nothing_is_left_is_replaced_by_the_next_prompt():
    run = Run("synchronous", group_size=1, retries=0)
    run.send(m.Generated(0, 5))
    assert run.send(m.ScoringFailed(0, "no number")) == [m.Fail(0, "no number"), m.Start(2, 0, 0, (0,), (2,))]
    assert trains(run.finish(1, 2)) == [(0, (1, 2))]
    assert (run.controller.counters.replaced_groups, run.controller.counters.admitted_groups) == (1, 3)


def test_an_instance_that_holds_only_an_older_version_takes_groups_while_the_rule_allows_it():
    run = Run(instances=(1,), staleness=2, in_flight=3, rows=8, retries=0)
    run.finish(0, 1)
    assert run.send(m.Updated(0)) == [m.Publish(1)]  # the one slot is busy with version 0
    assert starts(run.send(m.GenerationFailed(2, "cut off"))) == [(5, 0, 2)]


def test_auto_staleness_rises_at_once_and_falls_when_the_invariant_allows_it():
    run = Run(staleness=4, auto=True, in_flight=6, rows=99)
    assert run.controller.staleness == 1
    assert run.controller.counters.admitted_groups == 4
    assert starts(run.send(m.Measured(20.0, 10.0))) == [(4, 0, 3), (5, 0, 3)]
    assert run.controller.staleness == 3
    run.send(m.Measured(0.0, 10.0))
    assert run.controller.staleness == 2  # not 1: six groups of version 0 need three batches
    run.finish(*range(4))
    run.update()
    run.send(m.Measured(0.0, 10.0))
    assert run.controller.staleness == 2  # not 1: groups of version 0 are outstanding at update 2
    run.send(m.Measured(1000.0, 10.0))
    assert run.controller.staleness == 4


def test_measurements_change_nothing_without_auto():
    run = Run(staleness=2)
    assert run.send(m.Measured(1e9, 1.0)) == []
    assert run.controller.staleness == 2


def test_evaluations_hold_their_version_run_one_at_a_time_and_skips_are_counted():
    run = Run("synchronous", instances=(2,), evaluate_every=1)
    run.finish(0, 1)
    assert m.Evaluate(1, 0) in run.update()
    run.finish(2, 3)
    assert m.Retire(1) not in run.update()  # version 1 is being evaluated
    assert run.given(m.Evaluate) == []
    assert run.given(m.SkipEvaluation) == [m.SkipEvaluation(2, "the evaluation of version 1 still runs")]
    assert run.controller.counters.evaluations_skipped == 1
    assert run.send(m.Evaluated(1)) == [m.UnloadVersion(0, 1), m.Retire(1)]
    assert run.controller.counters.evaluations == 1


def test_an_evaluation_on_a_lost_instance_counts_as_skipped():
    run = Run("synchronous", instances=(2, 2), evaluate_every=1)
    run.finish(0, 1)
    (evaluation,) = [c for c in run.update() if isinstance(c, m.Evaluate)]
    run.send(m.Lost(evaluation.instance))
    assert run.controller.counters.evaluations_skipped == 1


def test_a_run_that_is_asked_to_stop_ends_at_once_when_the_trainer_is_free():
    assert Run(staleness=1).send(m.StopRequested()) == [m.Finish(stopped=True)]


def test_a_run_that_is_asked_to_stop_ends_after_the_update_that_runs():
    run = Run("one-step-off")
    run.finish(0, 1)
    assert run.send(m.StopRequested()) == []
    assert run.send(m.GenerationFailed(2, "cut off")) == []
    assert run.finish(3) == []
    assert run.send(m.Joined(9, 2)) == []
    assert run.send(m.Updated(0)) == [m.Publish(1), m.Finish(stopped=True)]


def test_a_restored_run_resumes_rescores_and_trains_again_when_the_first_instance_joins():
    run = Run(staleness=2, in_flight=5, rows=99)
    run.finish(0, 1)
    run.send(m.Generated(2, 5))
    run.finish(3)
    controller = Controller.restore(run.plan, record(run.controller))
    assert controller.needed_versions == [0]
    assert controller.versions == {0: 2}
    assert controller.handle(m.Joined(5, 3)) == [m.Rescore(2), m.Train(0, (0, 1)), m.LoadVersion(5, 0)]
    assert controller.handle(m.Loaded(5, 0)) == [m.Resume(4, 0, 5), m.Resume(5, 0, 5)]
    assert trains(controller.handle(m.Updated(0)) + controller.handle(m.Scored(2, 1.0))) == [(1, (2, 3))]


def test_a_restored_run_ramps_again_if_less_than_one_batch_is_outstanding():
    options = {"batch": 2, "group_size": 2, "staleness": 2, "ahead": True}

    def running_after_restore(snapshot):
        controller = Controller.restore(Run(**options).plan, snapshot)
        controller.handle(m.Joined(5, 8))
        controller.handle(m.Loaded(5, controller.newest))
        return controller.ledger.num_active

    begun = Run(**options)
    assert running_after_restore(record(begun.controller)) == 4, "no batch was taken yet"
    begun.finish(0, 1)
    begun.update()
    assert running_after_restore(record(begun.controller)) == 12
    done = Run(**options, updates=1)
    done.finish(0, 1)
    done.update()
    assert done.controller.finished
    assert running_after_restore(record(done.controller)) == 4, "a finished run that is extended begins anew"


def test_a_snapshot_is_refused_by_a_plan_that_does_not_fit_it():
    run = Run(staleness=1, in_flight=4, rows=99)
    snapshot = record(run.controller)
    with pytest.raises(ValueError, match="`batch` is 3, but the run was begun with 2"):
        Controller.restore(
            resolve_plan("multi-version", batch=3, group_size=1, updates=10, retries=2, staleness=2), snapshot
        )
    with pytest.raises(ValueError, match="`updates` is 1, but the groups that were started already need 2"):
        Controller.restore(
            resolve_plan("multi-version", batch=2, group_size=1, updates=1, retries=2, staleness=2), snapshot
        )


def test_reports_that_cannot_be_true_are_errors():
    run = Run(staleness=1)
    with pytest.raises(TransitionError, match="trajectory 77 is not in progress"):
        run.send(m.Generated(77, 1))
    with pytest.raises(TransitionError, match="update 0 was reported as done, but the trainer runs None"):
        run.send(m.Updated(0))
    with pytest.raises(TransitionError, match="instance 0 joined, but it has joined before"):
        run.send(m.Joined(0, 1))
    with pytest.raises(TransitionError, match="was not told to load version 5"):
        run.send(m.Loaded(0, 5))
    with pytest.raises(TransitionError, match="is running, not being scored"):
        run.send(m.ScoringFailed(0, "early"))
    with pytest.raises(ValueError, match="`slots` of instance 3 is 0"):
        run.send(m.Joined(3, 0))
    with pytest.raises(ValueError, match="`first_version` is 11"):
        Controller(run.plan, first_version=11)


def test_a_run_can_begin_at_a_later_version():
    controller = Controller(resolve_plan("synchronous", batch=1, group_size=1, updates=5, retries=2), first_version=4)
    assert controller.handle(m.Joined(0, 1)) == [m.LoadVersion(0, 4)]
    assert controller.handle(m.Loaded(0, 4)) == [m.Start(0, 4, 4, (0,), (0,))]
    controller.handle(m.Generated(0, 1))
    assert controller.handle(m.Scored(0, 1.0)) == [m.Train(4, (0,))]
    assert controller.handle(m.Updated(4))[-1] == m.Finish(stopped=False)


# -- groups without signal ---------------------------------------------------------------------------------------------


def score(run, group, *rewards):
    """Generate a group and give it these rewards; the commands of the last of them."""
    first = group * run.plan.group_size
    for trajectory, reward in enumerate(rewards, first):
        run.send(m.Generated(trajectory, 5))
        run.send(m.Scored(trajectory, reward))
    return run.last


def test_a_group_without_signal_is_filtered_and_the_next_prompt_starts_at_the_newest_version():
    run = Run(group_size=2, staleness=1, in_flight=2, filter_limit=4)
    score(run, 0, 1.0, 0.0)
    score(run, 1, 0.0, 1.0)
    run.update()
    assert run.controller.newest == 1
    assert score(run, 2, 1.0, 1.0) == [m.Filter(2, (4, 5)), m.Start(4, 1, 2, (0, 0), (8, 9))]
    assert (run.controller.counters.filtered_groups, run.controller.counters.filtered) == (1, 2)
    score(run, 3, 0.5, 0.0)
    assert trains(score(run, 4, 0.0, 0.5)) == [(1, (6, 7, 8, 9))]


def test_without_the_option_a_group_without_signal_is_trained():
    run = Run(group_size=2)
    score(run, 0, 1.0, 1.0)
    assert trains(score(run, 1, 0.0, 0.0)) == [(0, (0, 1, 2, 3))]


def test_what_is_left_of_a_group_counts_when_the_last_of_it_fails():
    run = Run("synchronous", group_size=3, retries=0, filter_limit=4)
    score(run, 0, 1.0, 1.0)
    assert run.send(m.GenerationFailed(2, "cut off"))[:2] == [m.Fail(2, "cut off"), m.Filter(0, (0, 1))]
    assert starts(run.last) == [(2, 0, 0)]
    score(run, 1, 1.0)
    run.send(m.GenerationFailed(4, "cut off"))
    assert run.send(m.GenerationFailed(5, "cut off"))[1] == m.Filter(1, (3,)), "one alone has nothing to compare with"


def test_past_the_limit_groups_are_trained_as_they_are_and_the_next_batch_counts_anew():
    run = Run("synchronous", group_size=2, filter_limit=3)
    for group in (0, 1, 2):
        assert score(run, group, 0.0, 0.0)[0] == m.Filter(group, (2 * group, 2 * group + 1))
    assert score(run, 3, 0.0, 0.0) == [m.SpareFromFilter(3, 0)]
    assert trains(score(run, 4, 1.0, 1.0)) == [(0, (6, 7, 8, 9))]
    assert (run.controller.counters.filtered_groups, run.controller.counters.spared_groups) == (3, 2)
    run.update()
    assert run.given(m.Start)
    assert score(run, 5, 0.0, 0.0)[0] == m.Filter(5, (10, 11))


def test_rewards_and_the_count_of_filtered_groups_survive_a_restore():
    run = Run("synchronous", group_size=2, filter_limit=1)
    score(run, 0, 0.0, 0.0)
    score(run, 1, 1.0)
    controller = Controller.restore(run.plan, record(run.controller))
    controller.handle(m.Joined(0, 8))
    controller.handle(m.Loaded(0, 0))
    controller.handle(m.Generated(3, 5))
    assert controller.handle(m.Scored(3, 1.0)) == [m.SpareFromFilter(1, 0)]


# -- replay ------------------------------------------------------------------------------------------------------------


def batches(commands):
    return [(c.trajectories, c.again) for c in commands if isinstance(c, m.Train)]


def test_young_groups_are_used_again_after_the_fresh_ones_and_forgotten_when_they_are_too_old():
    run = Run(staleness=1, in_flight=2, replay_groups=1, replay_uses=1)
    assert batches(run.finish(0, 1)) == [((0, 1), ())]  # nothing was trained before
    assert run.given(m.EndReuse) == []
    run.update()
    assert batches(run.finish(2, 3)) == [((2, 3), ((0, 1),))]
    run.send(m.Updated(1))
    # Group 0 has had its later use; the others are of version 0 and were due by update 1.
    assert run.given(m.EndReuse) == [m.EndReuse((0, 1, 2, 3))]
    assert run.controller.counters.replayed_groups == 1


def test_those_with_fewest_uses_and_then_the_newest_are_used_again_first():
    run = Run(staleness=4, in_flight=2, replay_groups=1, replay_uses=2)
    used = []
    for update in range(4):
        (batch,) = batches(run.finish(2 * update, 2 * update + 1))
        used.append(batch[1])
        run.update()
    assert [run.controller.reuse.kept[group].version for group in (2, 4)] == [0, 1]
    assert used == [(), ((0, 1),), ((1, 1),), ((4, 1),)]  # at update 3 group 4, of version 1, is the newest of those


def test_a_batch_that_is_trained_again_after_a_restore_uses_the_same_groups_again():
    run = Run(staleness=2, in_flight=2, replay_groups=2, replay_uses=3)
    run.finish(0, 1)
    run.update()
    (command,) = [c for c in run.finish(2, 3) if isinstance(c, m.Train)]
    assert command.again == ((0, 1), (1, 1))
    controller = Controller.restore(run.plan, record(run.controller))
    assert command in controller.handle(m.Joined(0, 8))
    controller.handle(m.Updated(1))
    assert {group: each.uses for group, each in controller.reuse.kept.items()} == {0: 2, 1: 2, 2: 1, 3: 1}


def test_members_that_failed_are_not_used_again():
    run = Run(staleness=2, group_size=2, in_flight=2, retries=0, replay_groups=2, replay_uses=1)
    run.send(m.GenerationFailed(0, "cut off"))
    run.send(m.Generated(1, 5))
    run.send(m.Scored(1, 1.0))
    run.finish(1)
    run.update()
    assert batches(run.finish(2, 3))[0][1] == ((1, 1), (2, 1), (3, 1))
