"""Episodes of several lineages through a whole run: what is recorded, moved, lost and refused."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from loop_cases import Bench, CountingEngine, InProcess, broken, plan

from stretto.core.paradigms import PARADIGMS
from stretto.engines.fake import FakeEngine
from stretto.environments.protocol import Policy
from stretto.errors import RewardError, RoomError, StalledError
from stretto.run.seeds import trajectory_seed, turn_seed
from stretto.store.reader import JournalReader
from stretto.types import Lineage, Prompt


@dataclass
class Branches(InProcess):
    """Two turns of the first lineage; between them a sub-agent of two turns and a title that is not trained."""

    pause_s: float = 0.0

    def __post_init__(self) -> None:
        super().__init__()

    async def episode(self, prompt: Prompt, policy: Policy) -> float:
        first = await policy.generate(prompt.tokens)
        self.attempts[first.id] += 1
        await asyncio.sleep(self.pause_s)
        agent = (7, 7, int(first.tokens[0]))
        asked = await policy.generate(agent, lineage=1)
        await policy.generate((9,), lineage=2, train=False)
        await asyncio.sleep(self.pause_s)
        context = (*prompt.tokens, *first.tokens.tolist(), 3)
        try:
            last = await policy.generate(context)
        except RoomError:
            last = first
        with contextlib.suppress(RoomError):
            await policy.generate((*agent, *asked.tokens.tolist(), 8), lineage=1)
        return float(last.tokens[-1] % 5)


def branching(folder: Path, *args: Any, **options: Any) -> Bench:
    given = {"environment": Branches(), "max_turns": 5, "max_lineages": 3, "max_context": 128}
    return Bench(folder, *args, **{**given, **options})


def rows(folder: Path, query: str) -> list[Any]:
    with sqlite3.connect(folder / "journal.sqlite") as db:
        return db.execute(query).fetchall()


def recorded(folder: Path) -> dict[int, tuple[Lineage, ...]]:
    with JournalReader(folder) as reader:
        return {id: reader.load_lineages(id)[0] for id in reader.trained()}


def tokens_of(lineages: Sequence[Lineage]) -> list[Any]:
    return [(each.context, each.completion.tokens.tolist(), each.train, each.turn_numbers) for each in lineages]


@pytest.mark.parametrize("paradigm", PARADIGMS)
def test_a_run_of_several_lineages_keeps_the_laws_under_every_paradigm(paradigm: str, tmp_path: Path) -> None:
    engines = [CountingEngine(rows=8, step_s=0.0005, median_tokens=6.0), CountingEngine(rows=8, median_tokens=6.0)]
    bench = branching(tmp_path, plan(paradigm), engines=engines, rebalance_s=0.02)
    assert bench.run()
    assert broken(tmp_path) == []
    made = recorded(tmp_path)
    assert made
    for first, agent, title in made.values():
        assert [each.train for each in (first, agent, title)] == [True, True, False]
        assert agent.context == (7, 7, int(first.completion.tokens[0]))
        assert (title.context, title.turn_numbers) == ((9,), (2,))
    for batch in bench.trainer.batches:
        assert {sample.lineage for sample in batch.samples} == {0, 1}
        assert all(tuple(sample.prompt)[:2] == (7, 7) for sample in batch.samples if sample.lineage)
    assert rows(tmp_path, "SELECT COUNT(*) FROM failures") == [(0,)]


def test_turns_are_numbered_over_all_lineages_and_each_has_a_seed_of_its_own(tmp_path: Path) -> None:
    engine = CountingEngine(median_tokens=6.0)
    assert branching(tmp_path, plan("synchronous", updates=1), engines=[engine]).run()
    for id, lineages in recorded(tmp_path).items():
        asked = {request.seed: request for request in engine.requests if request.id == id}
        for lineage in lineages:
            made = lineage.completion
            spans = [[0, len(made.tokens)]] if made.turns is None else made.turns.tolist()
            for number, (start, _) in zip(lineage.turn_numbers or (), spans, strict=True):
                request = asked[turn_seed(trajectory_seed(0, id), number)]
                assert request.prompt == (*lineage.context, *made.tokens[:start].tolist())
                limit = min(len(lineage.context) + 64, 128)
                assert len(request.prompt) + request.sampling.max_tokens == limit


def test_an_instance_that_dies_costs_no_turn_of_any_lineage(tmp_path: Path) -> None:
    dying = CountingEngine(rows=8, step_s=0.002, median_tokens=6.0)
    other = CountingEngine(rows=16, step_s=0.001, median_tokens=6.0)

    async def kill(bench: Bench) -> None:
        while not any(
            rollout.turns.num_lineages == 3 and rollout.instance == 0 and not rollout.is_generated
            for rollout in bench.loop.rollouts.values()
        ):
            await asyncio.sleep(0.001)
        await dying.close()

    environment = Branches(pause_s=0.003)
    assert branching(tmp_path, plan(), engines=[dying, other], environment=environment, beside=kill).run()
    assert broken(tmp_path) == []
    assert rows(tmp_path, "SELECT outcome FROM instances WHERE instance = 0") == [("lost",)]
    assert max(environment.attempts.values()) > 1, "an episode was run again"
    plain = tmp_path / "plain"
    plain.mkdir()
    assert branching(plain, plan("synchronous", updates=1), engines=[FakeEngine(median_tokens=6.0)]).run()
    found, expected = recorded(tmp_path), recorded(plain)
    assert all(tokens_of(found[id]) == tokens_of(expected[id]) for id in expected)


def test_an_episode_that_trains_nothing_fails_by_name(tmp_path: Path) -> None:
    class Untrained(InProcess):
        async def episode(self, prompt: Prompt, policy: Policy) -> float:
            await policy.generate(prompt.tokens, train=False)
            return 1.0

    with pytest.raises(StalledError, match="opened every lineage of its episode with `train=False`"):
        branching(tmp_path, plan(retries=0), environment=Untrained()).run()


def test_an_episode_that_asks_for_another_lineage_when_it_is_run_again_is_refused(tmp_path: Path) -> None:
    class Changes(Branches):
        async def episode(self, prompt: Prompt, policy: Policy) -> float:
            first = await policy.generate(prompt.tokens)
            self.attempts[first.id] += 1
            if first.id == 3 and self.attempts[3] == 1:
                await policy.generate((9,), lineage=1, train=False)
                raise RewardError("the tool is away")
            await policy.generate((9,), lineage=1)
            return 1.0

    bench = branching(tmp_path, plan(updates=1), environment=Changes())
    assert bench.run()
    assert broken(tmp_path) == []
    reasons = [reason for id, _, reason in rows(tmp_path, "SELECT trajectory, kind, reason FROM failures") if id == 3]
    assert reasons[0] == "the tool is away"
    assert "asked for turn 1 with other tokens than the first time" in reasons[1]


def test_a_context_that_is_full_may_be_compacted_into_another_lineage(tmp_path: Path) -> None:
    class Compacts(InProcess):
        async def episode(self, prompt: Prompt, policy: Policy) -> float:
            turn = await policy.generate(prompt.tokens)
            context, lineage, number = [*prompt.tokens, *turn.tokens.tolist()], 0, 1
            while number < 6:
                try:
                    turn = await policy.generate([*context, *[1] * 20], lineage=lineage)
                except RoomError:
                    lineage, context = lineage + 1, context[-4:]
                    continue
                context, number = [*context, *[1] * 20, *turn.tokens.tolist()], number + 1
            return float(number % 5)

    bench = branching(
        tmp_path, plan(updates=2), engines=[FakeEngine(median_tokens=12.0)], environment=Compacts(), max_turns=6,
        max_lineages=6,
    )  # fmt: skip
    assert bench.run()
    assert broken(tmp_path) == []
    made = recorded(tmp_path)
    assert any(len(lineages) > 1 for lineages in made.values())
    for lineages in made.values():
        assert all(each.completion.finish == "length" for each in lineages[:-1])
        assert all(len(each.completion.tokens) <= 64 for each in lineages)
