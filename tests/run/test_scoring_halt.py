"""A scorer that cannot go on stops the run at an update boundary, and costs no trajectory anything."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from loop_cases import Bench, broken, direct, plan

from stretto.core.paradigms import PARADIGMS
from stretto.engines.fake import FakeEngine
from stretto.errors import ScoringHaltedError, StalledError
from stretto.run.recovery import snapshot
from stretto.run.stall_watchdog import StallWatchdog
from stretto.store.reader import JournalReader


class Away:
    """A scorer that gives 40 rewards and then none."""

    def __init__(self) -> None:
        self.num_given = 0
        self.away = True

    def __call__(self, completion: str) -> float:
        if self.away and self.num_given >= 40:
            raise ScoringHaltedError("the judge is away")
        self.num_given += 1
        return float(len(completion) % 5)


@pytest.mark.parametrize("paradigm", sorted(set(PARADIGMS) - {"drop"}))
def test_what_was_generated_is_scored_when_the_run_is_resumed(paradigm: str, tmp_path: Path) -> None:
    scorer = Away()
    engine = FakeEngine(rows=12, step_s=0.001, sigma=1.5)
    first = Bench(tmp_path, plan(paradigm, updates=8), engines=[engine], environment=direct(scorer))
    assert first.run() is False
    assert str(first.loop.halted) == "the judge is away"
    assert first.tasks_left == []
    assert broken(tmp_path) == []
    with JournalReader(tmp_path) as reader:
        waits_for_reward = reader.ids("scoring")
        assert waits_for_reward
        assert "failed" not in reader.counts()
        assert list(reader.failures()) == []
        assert reader.num_updates() == first.trainer.version
    scorer.away = False
    second = Bench(
        tmp_path,
        plan(paradigm, updates=8),
        trainer=first.trainer,
        environment=direct(scorer),
        snapshot=snapshot(tmp_path / "journal.sqlite", first.plan),
        rollouts=first.loop.rollouts,
        weights=first.loop.weights,
    )
    assert second.run()
    assert second.loop.halted is None
    assert broken(tmp_path) == []
    with JournalReader(tmp_path) as reader:
        assert reader.num_updates() == 8
        assert reader.counts() == {"trained": 8 * 3 * 4}


def test_the_wait_for_a_scorer_is_part_of_what_a_stall_says() -> None:
    said = "scoring waits for the judge"

    class Nothing:
        """A run in which nothing happens."""

        training = evaluating = None
        environment_works = False
        is_expecting = False
        instances: Nothing
        engines: dict[int, object] = {}  # noqa: RUF012

        def waits(self) -> list[object]:
            return []

        def reports(self) -> list[object]:
            return []

    nothing = Nothing()
    nothing.instances = nothing
    watchdog = StallWatchdog(
        nothing,  # type: ignore[arg-type]
        nothing,  # type: ignore[arg-type]
        None,
        stall_s=0.02,
        reward_s=0.0,
        scoring_wait=lambda: said,
    )
    with pytest.raises(StalledError, match=f"rewards: {said}"):
        asyncio.run(watchdog.watch())
