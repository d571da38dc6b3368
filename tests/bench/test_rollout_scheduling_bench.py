"""The simulation of rollout features: its time adds up, and it says what they do to lengths."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.gpu.costs import StepCost
from bench.gpu.simulate import Costs
from bench.rollout_scheduling import (
    Lengths,
    Run,
    Setting,
    batch_rollout,
    drained,
    figures,
    redundancy,
    replication,
    slower_instance,
)
from stretto.core.plan import resolve_plan

COSTS = Costs(StepCost(1e-3, 1e-5, 0.0), training=1e-5, decode_share=1.0, training_share=1.0)
SETTING = Setting(tail="tiny", prompt=100)


def test_a_synchronous_update_takes_as_long_as_its_rows_need_to_end_and_to_be_trained() -> None:
    plan = resolve_plan("synchronous", batch=2, group_size=4, updates=3, retries=0)
    run = Run(plan, SETTING, COSTS).run()
    length = Lengths(SETTING, 4)
    lengths = [length(each) for each in range(8, 24)]
    seconds = sum(
        drained(own, 100, COSTS) + 2 * 100 * COSTS.prefill + sum(own) * COSTS.training
        for own in (lengths[:8], lengths[8:])
    )
    assert run.ended[2] - run.ended[0] == pytest.approx(seconds)
    assert run.prefills == 6


def test_members_have_the_same_lengths_in_groups_with_more_of_them() -> None:
    few, many = Lengths(SETTING, 8), Lengths(SETTING, 9)
    assert [few(8 + each) for each in range(8)] == [many(9 + each) for each in range(8)]
    same = Lengths(replace(SETTING, alike=1.0), 8)
    assert len({same(each) for each in range(8)}) == 1


def test_redundancy_is_faster_drops_long_ones_and_knows_by_how_much() -> None:
    rows = redundancy(COSTS, SETTING, 3, [(32, 8), (40, 10)])
    for without, with_ in zip(rows[::2], rows[1::2], strict=True):
        assert (without["dropped_share"], without["true_ratio"], without["speed"]) == (0.0, 1.0, 1.0)
        assert with_["speed"] > 1.0
        assert with_["dropped_share"] > 0.05
        assert with_["true_ratio"] < with_["length_ratio"] + 0.05 < 1.05
        assert with_["true_dropped_length"] > with_["trained_length"]
    assert rows[1]["dropped_share"] == pytest.approx(1 - 32 * 8 / (40 * 10))


def test_a_spread_group_is_prefilled_on_each_instance() -> None:
    kept, _, _, always = replication(COSTS, SETTING, 1, [{"instances": 2}])
    assert (kept["prefills"], always["prefills"]) == (128, 256)


def test_a_core_that_is_told_the_speeds_is_faster_and_equal_speeds_change_nothing() -> None:
    rows = slower_instance(COSTS, SETTING, 2, [2])
    assert [row["slowdown"] for row in rows] == [1.0, 1.5, 2.0, 4.0] * 2
    for row in rows:
        if row["slowdown"] == 1.0:
            assert row["speed"] == 1.0
        elif row["slowdown"] >= 2.0:
            assert row["speed"] > 1.1, row


def test_batch_rollout_begins_again_until_enough_groups_are_kept() -> None:
    once = batch_rollout(SETTING, COSTS, 2, 4, 2, 4)
    assert batch_rollout(replace(SETTING, no_signal=0.7), COSTS, 2, 4, 2, 4) > 1.5 * once
    assert batch_rollout(replace(SETTING, reward_s=3.0), COSTS, 2, 4, 2, 4) == pytest.approx(once + 3.0)


def test_figures_leave_the_first_update_out() -> None:
    plan = resolve_plan("synchronous", batch=2, group_size=2, updates=2, retries=0)
    run = Run(plan, SETTING, COSTS).run()
    assert figures(run, 0)["seconds_per_update"] == pytest.approx(run.ended[1] - run.ended[0])
