"""Episodes of several turns through a whole run: what is recorded, moved, lost and taken up again."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from loop_cases import Bench, CountingEngine, InProcess, broken, plan

from stretto.core import messages as core
from stretto.core.paradigms import PARADIGMS
from stretto.engines.fake import FakeEngine
from stretto.environments.protocol import Outcome, Policy
from stretto.errors import RewardError, RoomError, StalledError
from stretto.run import rollout_runner
from stretto.run.recovery import snapshot
from stretto.run.seeds import trajectory_seed, turn_seed
from stretto.store.reader import JournalReader
from stretto.types import Prompt, Sample

TURNS = 3


@dataclass
class Talks(InProcess):
    """Asks up to three times, with one token more of observation each time; a turn earns its last token modulo 5."""

    pause_s: float = 0.0
    wrong: Callable[[int, int, int], None] = lambda trajectory, turn, attempt: None
    asked: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    async def between(self, trajectory: int) -> None:
        await asyncio.sleep(self.pause_s)

    async def episode(self, prompt: Prompt, policy: Policy) -> Outcome:  # type: ignore[override]
        context, rewards = list(prompt.tokens), list[float]()
        for number in range(TURNS):
            try:
                turn = await policy.generate(context)
            except RoomError:
                break
            if number == 0:
                self.attempts[turn.id] += 1
            self.asked.append((turn.id, number))
            self.wrong(turn.id, number, self.attempts[turn.id])
            rewards.append(float(turn.tokens[-1] % 5))
            if turn.tokens[-1] % 7 == 0:  # an answer that ends the episode
                break
            context += [*turn.tokens.tolist(), *[number + 1] * (number + 1)]
            await self.between(turn.id)
        return Outcome(tuple(rewards))


def talking(folder: Path, *args: Any, **options: Any) -> Bench:
    return Bench(folder, *args, **{"environment": Talks(), "max_turns": TURNS, **options})


def rows(folder: Path, query: str) -> list[Any]:
    with sqlite3.connect(folder / "journal.sqlite") as db:
        return db.execute(query).fetchall()


def samples(folder: Path) -> dict[int, Sample]:
    with JournalReader(folder) as reader:
        return {each.trajectory: each for update in range(reader.num_updates()) for each in reader.batch(update)}


@pytest.mark.parametrize("paradigm", PARADIGMS)
def test_a_run_of_several_turns_keeps_the_laws_under_every_paradigm(paradigm: str, tmp_path: Path) -> None:
    engines = [CountingEngine(rows=8, step_s=0.0005, median_tokens=6.0), CountingEngine(rows=8, median_tokens=6.0)]
    bench = talking(tmp_path, plan(paradigm), engines=engines, rebalance_s=0.02)
    assert bench.run()
    assert broken(tmp_path) == []
    made = samples(tmp_path)
    assert len({len(each.completion.turn_lengths) for each in made.values()}) > 1
    for each in made.values():
        assert each.turn_rewards is not None
        assert len(each.turn_rewards) == len(each.completion.turn_lengths)
        spans = [[0, len(each.completion.tokens)]] if each.completion.turns is None else each.completion.turns.tolist()
        for number, ((_, end), (start, _)) in enumerate(pairwise(spans)):
            assert each.completion.tokens[end:start].tolist() == [number + 1] * (number + 1)
        assert [each.completion.tokens[end - 1] % 5 for _, end in spans] == list(each.turn_rewards)
        assert len(each.completion.tokens) <= 64
    assert {event for (event,) in rows(tmp_path, "SELECT DISTINCT to_state FROM transitions")} >= {"scoring", "scored"}
    assert rows(tmp_path, "SELECT COUNT(*) FROM failures") == [(0,)]


def test_a_turn_asks_for_the_whole_context_with_a_seed_and_a_room_of_its_own(tmp_path: Path) -> None:
    engine = CountingEngine(median_tokens=6.0)
    assert talking(tmp_path, plan("synchronous", updates=1), engines=[engine]).run()
    trajectory, made = next((t, s) for t, s in samples(tmp_path).items() if len(s.completion.turn_lengths) == TURNS)
    asked = [request for request in engine.requests if request.id == trajectory]
    assert made.completion.turns is not None
    tokens, spans = made.completion.tokens.tolist(), made.completion.turns.tolist()
    seed = trajectory_seed(0, trajectory)
    for number, (request, (start, _)) in enumerate(zip(asked, spans, strict=True)):
        assert request.prompt == (*made.prompt, *tokens[:start])
        assert request.seed == turn_seed(seed, number)
        assert request.sampling.max_tokens == 64 - start
    assert turn_seed(seed, 0) == seed


def test_what_is_generated_depends_on_nothing_but_the_version(tmp_path: Path) -> None:
    """Not on instances, moves and neighbours: the first update of two very different runs is the same."""
    one, other = tmp_path / "one", tmp_path / "other"
    one.mkdir()
    other.mkdir()
    assert talking(one, plan("synchronous", updates=1)).run()
    engines = [
        FakeEngine(rows=2, step_s=0.001, slots=1),
        FakeEngine(rows=16, slots=4),
        FakeEngine(rows=4, step_s=0.002),
    ]
    assert talking(other, plan(updates=1), engines=engines, rebalance_s=0.01).run()
    first, second = samples(one), samples(other)
    assert first.keys() == second.keys()
    for id in first:
        assert first[id].completion.tokens.tolist() == second[id].completion.tokens.tolist()
        assert first[id].turn_rewards == second[id].turn_rewards


def test_an_instance_that_dies_costs_no_turn_that_was_done(tmp_path: Path) -> None:
    dying = CountingEngine(rows=8, step_s=0.002, median_tokens=6.0)
    other = CountingEngine(rows=16, step_s=0.001, median_tokens=6.0)

    async def kill(bench: Bench) -> None:
        while not any(
            len(rollout.turns.done) == 2 and rollout.instance == 0 for rollout in bench.loop.rollouts.values()
        ):
            await asyncio.sleep(0.001)
        await dying.close()

    environment = Talks(pause_s=0.003)
    bench = talking(tmp_path, plan(), engines=[dying, other], environment=environment, beside=kill)
    assert bench.run()
    assert broken(tmp_path) == []
    assert rows(tmp_path, "SELECT outcome FROM instances WHERE instance = 0") == [("lost",)]
    again = [id for (id, number) in environment.asked if number == 0 and environment.attempts[id] > 1]
    assert again, "an episode was run again"
    done = {(request.id, request.seed) for request in dying.requests} & {(r.id, r.seed) for r in other.requests}
    assert all(sum(r.seed == seed for r in other.requests) == 1 for _, seed in done)
    plain = tmp_path / "plain"
    plain.mkdir()
    assert talking(plain, plan("synchronous", updates=1), engines=[FakeEngine(median_tokens=6.0)]).run()
    first, expected = samples(tmp_path), samples(plain)
    assert all(first[id].completion.tokens.tolist() == expected[id].completion.tokens.tolist() for id in expected)


def test_an_environment_that_fails_between_two_turns_goes_on_from_there(tmp_path: Path) -> None:
    def wrong(trajectory: int, turn: int, attempt: int) -> None:
        if trajectory == 3 and turn == 1 and attempt < 3:
            raise RewardError("the tool is away")

    engine = CountingEngine(median_tokens=6.0, sigma=0.0)
    bench = talking(tmp_path, plan(), engines=[engine], environment=Talks(wrong=wrong))
    assert bench.run()
    assert broken(tmp_path) == []
    failed = rows(tmp_path, "SELECT trajectory, kind, reason FROM failures")
    if any(id == 3 and number == 1 for id, number in bench.environment.asked):  # type: ignore[attr-defined]
        assert failed == [(3, "generation", "the tool is away")] * 2
    seeds = [request.seed for request in engine.requests if request.id == 3]
    assert len(seeds) == len(set(seeds)), "no turn is generated twice"


@pytest.mark.parametrize("how", ["cancel", "raise"])
def test_an_environment_that_would_end_the_run_fails_an_attempt_alone(how: str, tmp_path: Path) -> None:
    class Hostile(InProcess):
        done = False

        async def episode(self, prompt: Prompt, policy: Policy) -> float:
            reward = await super().episode(prompt, policy)
            if not Hostile.done:
                Hostile.done = True
                if how == "raise":
                    raise KeyboardInterrupt
                task = asyncio.current_task()
                assert task is not None
                task.cancel()
                await asyncio.sleep(60)
            return reward

    assert talking(tmp_path, plan(), environment=Hostile()).run()
    with JournalReader(tmp_path) as reader:
        ((_, _, reason),) = reader.failures()
    assert ("KeyboardInterrupt" if how == "raise" else "cancelled its own task") in reason


def test_one_that_fails_for_good_after_some_turns_is_counted_with_its_tokens(tmp_path: Path) -> None:
    def wrong(trajectory: int, turn: int, attempt: int) -> None:
        if trajectory == 3 and turn == 0:
            raise RewardError("the tool is gone")

    bench = talking(tmp_path, plan(), environment=Talks(wrong=wrong))
    assert bench.run()
    assert broken(tmp_path) == []
    ((state, lost),) = rows(tmp_path, "SELECT state, lost_tokens FROM trajectories WHERE trajectory = 3")
    assert state == "failed"
    assert lost > 0
    assert bench.tally.totals.sampled_tokens == bench.tally.totals.tokens + lost


def test_an_episode_that_asks_for_more_turns_than_its_task_has_fails_by_name(tmp_path: Path) -> None:
    assert talking(tmp_path, plan(retries=0), max_turns=1).run()
    failed = rows(tmp_path, "SELECT DISTINCT kind, reason FROM failures")
    said = "the environment asked for turn 1, counted from 0, and its episodes have 1 at most: return, or raise "
    assert failed == [("scoring", f"{said}`task.turns` if the task has it")]
    assert broken(tmp_path) == []


@pytest.mark.parametrize(
    ("outcome", "said"),
    [(None, "the environment returned None for a reward"), (Outcome((1.0,) * 9), "an outcome of 9 turns")],
)
def test_an_environment_that_returns_no_reward_fails_by_name(outcome: Any, said: str, tmp_path: Path) -> None:
    class Odd(InProcess):
        async def episode(self, prompt: Prompt, policy: Policy) -> Any:
            await policy.generate(prompt.tokens)
            return outcome

    with pytest.raises(StalledError, match=said):
        talking(tmp_path, plan(retries=0), environment=Odd()).run()


def test_an_environment_that_never_asks_fails_by_name(tmp_path: Path) -> None:
    class Silent(InProcess):
        async def episode(self, prompt: Prompt, policy: Policy) -> float:
            return 1.0

    with pytest.raises(StalledError, match="returned without asking for a token"):
        talking(tmp_path, plan(retries=0), environment=Silent()).run()


def test_a_run_that_is_stopped_goes_on_with_the_turns_that_were_done(tmp_path: Path) -> None:
    stays = asyncio.Event()

    class StaysBetweenTurns(Talks):
        async def between(self, trajectory: int) -> None:
            if trajectory >= 24:  # of a later update than the first two
                stays.set()
                await asyncio.Event().wait()

    async def stop_between_turns(bench: Bench) -> None:
        await stays.wait()
        bench.loop.stop()

    bench = talking(
        tmp_path,
        plan(updates=4),
        engines=[FakeEngine(rows=32, median_tokens=6.0)],
        environment=StaysBetweenTurns(),
        beside=stop_between_turns,
    )
    assert not bench.run()
    assert broken(tmp_path) == []
    left = dict(bench.loop.rollouts)
    done = {id: len(rollout.turns.done) for id, rollout in left.items() if not rollout.is_generated}
    assert any(done.values()), "something was stopped between two turns"
    engine = CountingEngine(rows=32, median_tokens=6.0)
    resumed = talking(
        tmp_path,
        plan(updates=4),
        engines=[engine],
        trainer=bench.trainer,
        snapshot=snapshot(tmp_path / "journal.sqlite", bench.plan),
        rollouts=left,
        weights=dict(bench.loop.weights),
    )
    assert resumed.run()
    assert broken(tmp_path) == []
    for id, count in done.items():
        generated = {turn_seed(trajectory_seed(0, id), number) for number in range(count)}
        assert not [request for request in engine.requests if request.id == id and request.seed in generated]


# -- rows between turns ----------------------------------------------------------------------------------------------


def turn_events(bench: Bench) -> list[core.Event]:
    """Collects the events of turns that the core will handle, in their order."""
    seen: list[core.Event] = []
    handle = bench.loop.controller.handle

    def handle_and_keep(event: core.Event) -> list[core.Command]:
        if isinstance(event, core.TurnEnded | core.TurnAsked):
            seen.append(event)
        return handle(event)

    bench.loop.controller.handle = handle_and_keep  # type: ignore[method-assign]
    return seen


@pytest.mark.parametrize("first_turn", [True, False])
def test_an_episode_that_waits_for_its_world_frees_its_row_for_others(first_turn: bool, tmp_path: Path) -> None:
    """Nobody goes on before twelve are in their worlds, and there are four rows."""
    started, all_there = set[int](), asyncio.Event()

    class Gathers(InProcess):
        async def episode(self, prompt: Prompt, policy: Policy) -> float:
            if first_turn:
                await self.gather(prompt, len(started))
            turn = await policy.generate(prompt.tokens)
            if not first_turn:
                await self.gather(prompt, turn.id)
            context = [*prompt.tokens, *turn.tokens.tolist(), 1]
            return float((await policy.generate(context)).tokens[-1] % 5)

        async def gather(self, prompt: Prompt, who: int) -> None:
            started.add(who)
            if len(started) == 12:
                all_there.set()
            await all_there.wait()

    options = plan(rows=4, in_flight=3, updates=2, retries=0)
    assert talking(tmp_path, options, environment=Gathers(), max_turns=2).run()
    assert rows(tmp_path, "SELECT COUNT(*) FROM failures") == [(0,)], "nobody waited until its deadline"
    assert broken(tmp_path) == []


@pytest.mark.parametrize("paradigm", PARADIGMS)
def test_freed_rows_keep_the_laws_under_every_paradigm(
    paradigm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollout_runner, "WORLD_S", 0.0)
    dying = FakeEngine(rows=4, step_s=0.0005, median_tokens=6.0, die_after=60)
    engines = [FakeEngine(rows=4, slots=9, median_tokens=6.0), dying]
    seen: list[list[core.Event]] = []
    bench = talking(
        tmp_path,
        plan(paradigm, rows=6),
        engines=engines,
        environment=Talks(pause_s=0.002),
        rebalance_s=0.02,
        prepare=lambda bench: seen.append(turn_events(bench)),
    )
    assert bench.run()
    assert broken(tmp_path) == []
    (events,) = seen
    for id in {event.trajectory for event in events}:  # type: ignore[union-attr]
        own = [type(event) for event in events if event.trajectory == id]  # type: ignore[union-attr]
        assert (core.TurnAsked, core.TurnAsked) not in pairwise(own), "a row is taken again once"
    assert {type(event) for event in events} == {core.TurnEnded, core.TurnAsked}


@pytest.mark.parametrize(("max_turns", "world_s"), [(1, 0.0), (TURNS, 60.0)])
def test_neither_a_single_turn_nor_a_quick_world_costs_an_event(
    max_turns: int, world_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollout_runner, "WORLD_S", world_s)

    class Pauses(InProcess):
        async def episode(self, prompt: Prompt, policy: Policy) -> float:
            await asyncio.sleep(0.001)
            reward = await super().episode(prompt, policy)
            await asyncio.sleep(0.001)
            return reward

    seen: list[list[core.Event]] = []
    environment = Pauses() if max_turns == 1 else Talks(pause_s=0.001)
    prepare = lambda bench: seen.append(turn_events(bench))  # noqa: E731
    assert talking(tmp_path, plan(), environment=environment, max_turns=max_turns, prepare=prepare).run()
    assert seen == [[]]
