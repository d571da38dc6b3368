"""Random worlds around the controller: every law is checked after every event, with bookkeeping of the world's own.

`make test-slow` runs twenty times as many schedules: `pytest tests/core --hypothesis-profile=thorough`.
"""

from __future__ import annotations

from dataclasses import replace

from core_laws import Odds
from core_world import World
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stretto.core.paradigms import PARADIGMS
from stretto.core.plan import Plan, resolve_plan

EXAMPLES = settings().max_examples if settings().max_examples > 100 else 150
many = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)


@st.composite
def worlds(draw: st.DrawFn) -> World:
    row = PARADIGMS[draw(st.sampled_from(sorted(PARADIGMS)))]
    auto = row.staleness is None and draw(st.booleans())
    staleness = draw(st.integers(0, 8)) if row.staleness is None else row.staleness
    batch, group_size = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    most = batch if row.one_batch else (staleness + 1) * batch
    replays = staleness > 0 and draw(st.booleans())
    redundant = row.allows_redundancy and draw(st.booleans())
    reserve_groups, reserve_members = (draw(st.integers(0, 4)), draw(st.integers(0, 3))) if redundant else (0, 0)
    plan = resolve_plan(
        row.name,
        batch=batch,
        group_size=group_size,
        reserve_groups=reserve_groups,
        reserve_members=reserve_members,
        spread=draw(st.sampled_from(["auto", "never", "always"])),
        updates=draw(st.integers(1, 8)),
        staleness=staleness,
        auto=auto,
        rows=draw(st.integers(1, 2 * (batch + reserve_groups) * (group_size + reserve_members))),
        in_flight=draw(st.integers(batch, most)),
        retries=draw(st.integers(0, 2)),
        evaluate_every=draw(st.integers(0, 3)),
        filter_limit=draw(st.sampled_from([0, 0, 1, 3, 10 * batch])),
        replay_groups=draw(st.integers(1, 2 * batch)) if replays else 0,
        replay_uses=draw(st.integers(1, 3)) if replays else 0,
        ahead=draw(st.booleans()),
    )
    return World(plan, draw(layouts(plan)), draw(behaviours()), draw(st.integers(0, 2**32)))


@st.composite
def layouts(draw: st.DrawFn, plan: Plan) -> list[int]:
    """One instance with all the slots, several that have them together, or too few."""
    kind = draw(st.sampled_from(["one", "single slots", "mixed", "too few"]))
    if kind == "one":
        return [plan.slots]
    if kind == "single slots":
        return [1] * (plan.slots + draw(st.integers(0, 2)))
    if kind == "too few":
        return draw(st.lists(st.integers(1, 2), min_size=1, max_size=2))
    slots = draw(st.lists(st.integers(1, 4), min_size=2, max_size=5))
    return [*slots, max(1, plan.slots - sum(slots))]


@st.composite
def behaviours(draw: st.DrawFn) -> Odds:
    chance = st.sampled_from([0.0, 0.0, 0.05, 0.3])
    weight = st.sampled_from([0.05, 0.3, 1.0, 5.0])
    return Odds(
        generation_failure=draw(chance),
        scoring_failure=draw(chance),
        loss=draw(st.sampled_from([0.0, 0.01, 0.05])),
        leave=draw(st.sampled_from([0.0, 0.0, 0.01, 0.05])),
        load_sample=draw(st.sampled_from([0.0, 0.02, 0.1])),
        restore=draw(st.sampled_from([0.0, 0.0, 0.01])),
        slow=draw(st.sampled_from([0.0, 0.1, 0.3])),
        turn=draw(st.sampled_from([0.0, 0.0, 0.3, 0.8])),
        no_signal=draw(st.sampled_from([0.0, 0.2, 0.9, 1.0])),
        weights={name: draw(weight) for name in ("load", "generate", "ask_turn", "score", "update", "evaluate")},
        losses=draw(st.integers(0, 6)),
    )


@many
@given(world=worlds())
def test_every_schedule_keeps_the_laws_and_comes_to_its_end(world: World) -> None:
    world.run()
    assert world.finished is False


@many
@given(world=worlds(), stop_after=st.integers(1, 200))
def test_a_run_that_was_stopped_goes_on_from_its_snapshot_to_the_same_end(world: World, stop_after: int) -> None:
    world.run(stop_after)
    if not world.finished:
        return
    world.finished, world.stopping = None, False
    world.restore()
    world.run()
    assert world.finished is False


@many
@given(world=worlds(), stop_after=st.integers(1, 200), data=st.data())
def test_a_run_that_was_stopped_goes_on_with_another_bound_and_more_updates(
    world: World, stop_after: int, data: st.DataObject
) -> None:
    world.run(stop_after)
    if not world.finished:
        return
    world.finished, world.stopping = None, False
    plan, row = world.plan, world.plan.paradigm
    staleness = plan.staleness
    if row.staleness is None:
        staleness = data.draw(st.integers(1 if plan.replay_groups else 0, 8))
    most = plan.batch if row.one_batch else (staleness + 1) * plan.batch
    world.change(
        replace(
            plan,
            staleness=staleness,
            in_flight=data.draw(st.integers(plan.batch, most)),
            updates=plan.updates + data.draw(st.integers(0, 4)),
        )
    )
    world.restore()
    world.run()
    assert world.finished is False


@many
@given(
    seed=st.integers(0, 2**32),
    staleness=st.integers(1, 4),
    batch=st.integers(1, 4),
    group_size=st.integers(1, 4),
    spare=st.integers(0, 3),
    leave=st.sampled_from([0.0, 0.02, 0.05]),
    load_sample=st.sampled_from([0.0, 0.05, 0.2]),
    losses=st.integers(0, 12),
)
def test_a_pool_of_one_slot_instances_that_come_and_go_keeps_the_laws_and_comes_to_its_end(
    seed: int, staleness: int, batch: int, group_size: int, spare: int, leave: float, load_sample: float, losses: int
) -> None:
    plan = resolve_plan(
        "multi-version",
        batch=batch,
        group_size=group_size,
        updates=8,
        staleness=staleness,
        in_flight=batch * (staleness + 1),
        retries=1,
    )
    odds = Odds(loss=0.03, leave=leave, load_sample=load_sample, slow=0.3, turn=0.3, losses=losses)
    world = World(plan, [1] * (plan.slots + spare), odds, seed)
    world.run()
    assert world.finished is False


@many
@given(
    seed=st.integers(0, 2**32),
    staleness=st.integers(0, 4),
    batch=st.integers(1, 3),
    group_size=st.integers(1, 3),
    instances=st.integers(2, 4),
    evaluate_every=st.integers(1, 3),
    evaluation=st.sampled_from([0.01, 0.05, 0.3]),
    load=st.sampled_from([0.1, 1.0, 5.0]),
    generation_failure=st.sampled_from([0.0, 0.1]),
    loss=st.sampled_from([0.0, 0.02, 0.05]),
    leave=st.sampled_from([0.0, 0.02, 0.05]),
    restore=st.sampled_from([0.0, 0.01]),
    losses=st.integers(1, 12),
)
def test_under_partial_nothing_goes_back_to_a_version_that_an_evaluation_holds_an_instance_at(
    seed: int,
    staleness: int,
    batch: int,
    group_size: int,
    instances: int,
    evaluate_every: int,
    evaluation: float,
    load: float,
    generation_failure: float,
    loss: float,
    leave: float,
    restore: float,
    losses: int,
) -> None:
    plan = resolve_plan(
        "partial",
        batch=batch,
        group_size=group_size,
        updates=12,
        staleness=staleness,
        in_flight=batch * (staleness + 1),
        retries=2,
        evaluate_every=evaluate_every,
    )
    odds = Odds(
        generation_failure=generation_failure,
        loss=loss,
        leave=leave,
        restore=restore,
        slow=0.3,
        turn=0.3,
        losses=losses,
        weights={"evaluate": evaluation, "load": load},
    )
    world = World(plan, [1] * instances, odds, seed)
    world.run()
    assert world.finished is False


@many
@given(
    seed=st.integers(0, 2**32),
    paradigm=st.sampled_from(sorted(name for name, row in PARADIGMS.items() if row.allows_redundancy)),
    staleness=st.integers(0, 4),
    batch=st.integers(1, 4),
    group_size=st.integers(1, 3),
    reserve_groups=st.integers(0, 4),
    reserve_members=st.integers(0, 3),
    filter_limit=st.sampled_from([0, 0, 5]),
    restore=st.sampled_from([0.0, 0.03]),
    failure=st.sampled_from([0.0, 0.1]),
    stop_after=st.none() | st.integers(1, 200),
)
def test_a_run_that_starts_more_than_it_trains_on_drops_only_what_is_not_needed(
    seed: int,
    paradigm: str,
    staleness: int,
    batch: int,
    group_size: int,
    reserve_groups: int,
    reserve_members: int,
    filter_limit: int,
    restore: float,
    failure: float,
    stop_after: int | None,
) -> None:
    row = PARADIGMS[paradigm]
    plan = resolve_plan(
        paradigm,
        batch=batch,
        group_size=group_size,
        reserve_groups=reserve_groups,
        reserve_members=reserve_members,
        updates=10,
        staleness=staleness if row.staleness is None else None,
        retries=1,
        filter_limit=filter_limit,
    )
    odds = Odds(
        generation_failure=failure,
        scoring_failure=failure,
        restore=restore,
        slow=0.3,
        turn=0.1,
        no_signal=0.3,
        losses=6,
    )
    world = World(plan, [1] * (plan.slots + 1), odds, seed)
    world.run(stop_after)
    if world.finished:
        world.finished, world.stopping = None, False
        world.restore()
        world.run()
    assert world.finished is False
    ends = list(world.ended.values())
    most = plan.updates * plan.batch * plan.group_size
    assert ends.count("trained") <= most
    assert failure or filter_limit or ends.count("trained") == most
