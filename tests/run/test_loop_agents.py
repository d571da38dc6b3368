"""Agents through a whole run over the fakes: every call is HTTP, and goes to the version that its session has."""

from __future__ import annotations

import asyncio
import sqlite3
import sys
from collections import Counter
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from loop_cases import Bench, CountingEngine, broken, plan

from stretto.environments.data import Row
from stretto.environments.task_options import AgentOptions
from stretto.serve.agents import AgentEnvironment, ModelAccess

aiohttp = pytest.importorskip("aiohttp")

CALLS = 3
UPDATES = 4


class Characters:
    """A tokenizer: a token is a character."""

    def __len__(self) -> int:
        return 100

    def decode(self, tokens: list[int]) -> str:
        return "".join(map(chr, tokens))


class Solver:
    """An agent that makes three calls, each behind all that was said before.

    With `slow`, those of the first prompt wait after their first call until two more versions are published.
    """

    def __init__(self, *, slow: bool = False, observed: Any = lambda: 3) -> None:
        self.bench: Bench | None = None
        self.runs: Counter[str] = Counter()
        self.versions: dict[str, set[int]] = {}  # that were published between the calls of a run
        self._slow = slow
        self._observed = observed

    def environment(self, monkeypatch: pytest.MonkeyPatch) -> AgentEnvironment:
        module: Any = type(sys)("solvers")
        solver = self

        async def solve(task: dict[str, Any], access: ModelAccess) -> float:
            return await solver.solve(task, access)

        module.solve = solve
        monkeypatch.setitem(sys.modules, "solvers", module)
        options = AgentOptions(path="unused.jsonl", function="solvers:solve", turns=CALLS)
        return AgentEnvironment(Characters(), options, lambda prompt_tokens: Untemplated())

    async def solve(self, task: dict[str, Any], access: ModelAccess) -> float:
        self.runs[task["prompt"]] += 1
        tokens, made = list(map(ord, task["prompt"])), [0]
        published = self._num_updates
        headers = {"Authorization": f"Bearer {access.api_key}"}
        async with aiohttp.ClientSession(access.session_url.rpartition("/sessions")[0], headers=headers) as session:
            for _ in range(CALLS):
                async with session.post("/inference/v1/generate", json={"token_ids": tokens}) as response:
                    answer = await response.json()
                if response.status == 400 and answer["error"]["code"] == "context_length_exceeded":
                    break
                response.raise_for_status()
                made = answer["choices"][0]["token_ids"]
                tokens += [*made, self._observed()]
                while self._slow and task["prompt"] == next(iter(self.runs)) and self._num_updates < 2:
                    await asyncio.sleep(0.002)
        self.versions.setdefault(task["prompt"], set()).update(range(published, self._num_updates + 1))
        return float(made[-1] % 5)

    @property
    def _num_updates(self) -> int:
        assert self.bench is not None
        return self.bench.loop.controller.next_update


class Untemplated:
    """Conversations of a model without a chat template."""

    def take(self, lineage: int) -> None:
        pass


def run(folder: Path, solver: Solver, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Bench:
    texts = [f"{n}+{n}=" for n in range(64)]
    rows = tuple(Row(text=text, columns={"prompt": text}) for text in texts)
    environment = solver.environment(monkeypatch)

    def prepare(bench: Bench) -> None:
        solver.bench = bench

    given = {"max_turns": CALLS, "max_lineages": 3, "max_context": 128, "prepare": prepare, "rows": rows}
    made = Bench(folder, plan(updates=UPDATES, in_flight=6), environment=environment, **{**given, **options})
    assert made.run()
    return made


def rows_of(folder: Path, query: str) -> list[Any]:
    with sqlite3.connect(folder / "journal.sqlite") as db:
        return db.execute(query).fetchall()


def assert_one_version(folder: Path, *engines: CountingEngine) -> None:
    versions = dict(rows_of(folder, "SELECT trajectory, version FROM trajectories"))
    asked = [request for engine in engines for request in engine.requests if request.id >= 0]
    assert asked
    assert all(request.version == versions[request.id] for request in asked)


def test_all_calls_of_a_session_go_to_one_version_whatever_is_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    solver = Solver(slow=True)
    engine = CountingEngine(rows=64, median_tokens=6.0)
    bench = run(tmp_path, solver, monkeypatch, engines=[engine])
    assert broken(tmp_path) == []
    assert_one_version(tmp_path, engine)
    assert any(len(published) > 2 for published in solver.versions.values()), "a session lasted over two publishes"
    assert rows_of(tmp_path, "SELECT COUNT(*) FROM failures") == [(0,)]
    turns = rows_of(tmp_path, "SELECT LENGTH(turns) / 8 FROM completions WHERE turns IS NOT NULL")
    assert max(turns) == (CALLS,)
    assert bench.tasks_left == []


@pytest.mark.parametrize("alike", [True, False])
def test_an_agent_whose_instance_died_goes_on_under_its_version(
    alike: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If it asks for the same (`alike`), nothing is generated twice. Otherwise, it is from the first difference on."""
    caplog.set_level("INFO")
    dying = CountingEngine(rows=16, step_s=0.002, median_tokens=6.0)
    other = CountingEngine(rows=64, step_s=0.001, median_tokens=6.0)
    numbers = count()

    async def kill(bench: Bench) -> None:
        while not any(len(each.turns.done) == 2 and each.instance == 0 for each in bench.loop.rollouts.values()):
            await asyncio.sleep(0.001)
        await dying.close()

    solver = Solver(observed=(lambda: 3) if alike else (lambda: next(numbers) % 100))
    run(tmp_path, solver, monkeypatch, engines=[dying, other], beside=kill)
    assert broken(tmp_path) == []
    assert rows_of(tmp_path, "SELECT outcome FROM instances WHERE instance = 0") == [("lost",)]
    assert rows_of(tmp_path, "SELECT trajectory, reason FROM failures") == []
    assert_one_version(tmp_path, dying, other)
    assert max(solver.runs.values()) > 4, "an agent of a group of four was run again"
    assert ("asked for something else at turn 1" in caplog.text) is not alike
    if alike:
        assert max(Counter((request.id, request.seed) for request in other.requests).values()) == 1
