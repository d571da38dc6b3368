"""Several sources of rewards as one: scores come together by the places of their rewards, and a halt wins."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from stretto.environments.built_scorers import BuiltScorer
from stretto.environments.combined_rewards import CombinedRewards, combined_rewards
from stretto.environments.grades import Grade
from stretto.environments.reward_calls import Details, RewardSpec
from stretto.environments.reward_pool import RewardPool
from stretto.errors import RewardError, ScoringHaltedError

BUILT = BuiltScorer("a.b:Judge", "task.rewards.judge.judge", {}, deadline_s=9.0, start_s=3.0, most_at_once=4)
SPECS = (
    RewardSpec("exact", "m:exact"),
    RewardSpec("judge", "a.b:Judge", 0.5, built=BUILT),
    RewardSpec("length", "m:length", -0.1),
)


class Source:
    """Scores every completion alike, or raises."""

    def __init__(
        self, specs: Sequence[RewardSpec], scores: Sequence[float] | Exception, longest_s: float = 1.0
    ) -> None:
        self.specs = tuple(specs)
        self.found = scores
        self.longest_s = longest_s
        self.waiting = "the judge is away" if specs[0].built is not None else ""
        self.forms = tuple(f"form of {spec.name}" for spec in specs)
        self.running = False

    async def start(self) -> None:
        self.running = True

    async def scores(
        self, prompt: str, completion: str, row: Mapping[str, Any], details: Details | None = None
    ) -> tuple[float, ...]:
        if isinstance(self.found, Exception):
            raise self.found
        return tuple(self.found)

    async def score(
        self, prompt: str, completion: str, row: Mapping[str, Any], details: Details | None = None
    ) -> float | Grade:
        raise AssertionError("scores are asked for")

    async def close(self) -> None:
        self.running = False


def combined(*found: Sequence[float] | Exception) -> tuple[CombinedRewards, list[Source]]:
    sources: list[Source] = []

    def make(specs: Sequence[RewardSpec]) -> Source:
        sources.append(Source(specs, found[len(sources)], 1.0 + len(sources)))
        return sources[-1]

    made = combined_rewards(SPECS, make)
    assert isinstance(made, CombinedRewards)
    return made, sources


def test_functions_share_a_source_and_a_judge_has_its_own() -> None:
    made, sources = combined((1.0, 20.0), (0.8,))
    assert [[spec.name for spec in each.specs] for each in sources] == [["exact", "length"], ["judge"]]
    assert made.forms == ("form of exact", "form of judge", "form of length")
    assert (made.longest_s, made.waiting) == (2.0, "the judge is away")


def test_the_reward_is_the_weighted_sum_in_the_order_of_the_recipe() -> None:
    async def main() -> None:
        made, sources = combined((1.0, 20.0), (0.8,))
        await made.start()
        assert all(each.running for each in sources)
        grade = await made.score("p", "c", {})
        assert isinstance(grade, Grade)
        assert grade.reward == pytest.approx(1.0 + 0.5 * 0.8 - 0.1 * 20.0)
        assert [(part.name, part.value) for part in grade.parts] == [("exact", 1.0), ("judge", 0.8), ("length", 20.0)]
        await made.close()
        assert not any(each.running for each in sources)

    asyncio.run(main())


def test_a_part_that_does_not_apply_is_left_out_and_a_halt_goes_before_a_failure() -> None:
    made, _ = combined((1.0, math.nan), (0.8,))
    grade = asyncio.run(made.score("p", "c", {}))
    assert isinstance(grade, Grade)
    assert (grade.reward, grade.parts[2].value) == (pytest.approx(1.4), None)
    made, _ = combined(RewardError("it raised"), ScoringHaltedError("the budget is spent"))
    with pytest.raises(ScoringHaltedError, match="the budget is spent"):
        asyncio.run(made.score("p", "c", {}))
    made, _ = combined(RewardError("it raised"), (0.8,))
    with pytest.raises(RewardError, match="it raised"):
        asyncio.run(made.score("p", "c", {}))


def test_a_source_whose_rewards_are_only_recorded_is_no_error() -> None:
    RewardPool([RewardSpec("length", "builtins:len", 0.0)])
