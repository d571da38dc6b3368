"""Whole runs that a judge scores: an outage and a spent budget stop them, and they are resumed without a loss."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import pytest
from judge_cases import FakeJudge, Reply, running
from run_cases import assert_verifies, rows, run, story

from stretto.assembly.check import check
from stretto.assembly.serve import PolicyFolder, ServeOptions, load
from stretto.environments.reward_calls import RewardSpec
from stretto.environments.reward_pool import RewardPool
from stretto.environments.rewards.judge_options import JudgeOptions
from stretto.errors import RecipeError, ScoringHaltedError
from stretto.observe.progress import Silent, Status
from stretto.recipe.reading import parse_recipe
from stretto.recipe.schema import Recipe
from stretto.serve.http import Endpoint
from stretto.setup.scorers import judge_scorer

JUDGE = {
    "model": "judge",
    "prompt": "Rate {completion} after {prompt}.",
    "scale": [0, 10],
    "concurrency": 4,
    "outage_seconds": 0.5,
}


def recipe(folder: Path, server: FakeJudge, *, steps: int = 3, **changes: Any) -> Recipe:
    return parse_recipe(
        {
            "seed": 5,
            "model": {"path": str(folder), "lora": {"rank": 4}},
            "task": {"type": "file", "path": "prompts.jsonl", "judge": {**JUDGE, "address": server.url, **changes}},
            "rollout": {"prompts": 3, "group": 4, "max_tokens": 12, "paradigm": "synchronous"},
            "training": {"steps": steps, "learning_rate": 1e-3},
            "evaluation": {"prompts": 2},
            "runtime": {"device": "cpu", "engine_threads": 1, "trainer_threads": 1, "stall_seconds": 60.0},
        }
    )


def _vowels(body: dict[str, Any]) -> Reply:
    """A score that depends on the completion alone."""
    text = body["messages"][-1]["content"].removeprefix("Rate ")
    return Reply(f"Score: {min(10, sum(character in 'aeiou0123456789' for character in text))}")


def test_a_judge_scores_a_run_and_the_same_question_is_asked_once(model: Path, tmp_path: Path) -> None:
    with running(FakeJudge(_vowels)) as server:
        summary = run(recipe(model, server), tmp_path / "run")
    assert summary["steps"] == 3
    assert_verifies(tmp_path / "run")
    rewards = [reward for (reward,) in rows(tmp_path / "run", "SELECT reward FROM trajectories")]
    assert len(set(rewards)) > 1
    assert all(0 <= reward <= 1 for reward in rewards)
    questions = [call["messages"][-1]["content"] for call in server.calls]
    assert len(questions) == len(set(questions))


class Watching(Silent):
    """Keeps what the run said and waited for."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.waits: list[str] = []

    def message(self, text: str) -> None:
        self.said.append(text)

    def status(self, status: Status) -> None:
        self.waits.extend(status.waits)


def test_an_outage_stops_the_run_and_what_was_generated_is_scored_when_it_is_resumed(
    model: Path, tmp_path: Path
) -> None:
    """The resumed run is, bit for bit, the run that had no outage."""
    with running(FakeJudge(_vowels)) as server:
        run(recipe(model, server), tmp_path / "whole")
    away = threading.Event()

    def answer(body: dict[str, Any]) -> Reply:
        if len(server.calls) == 22:  # in the middle of the second update
            away.set()
        return Reply(status=503, text="busy") if away.is_set() else _vowels(body)

    with running(FakeJudge(answer)) as server:
        made = recipe(model, server, outage_seconds=4.0)
        watching = Watching()
        with pytest.raises(ScoringHaltedError, match=r"`task\.judge\.outage_seconds = 4`") as caught:
            run(made, tmp_path / "run", observer=watching)
        assert "`--resume`" in str(caught.value)
        assert any(wait.startswith("rewards: scoring waits for the judge") for wait in watching.waits)
        assert any("scoring cannot go on" in said for said in watching.said)
        states = dict(rows(tmp_path / "run", "SELECT state, COUNT(*) FROM trajectories GROUP BY 1"))
        assert states["scoring"] > 0
        assert "failed" not in states
        assert rows(tmp_path / "run", "SELECT outcome FROM sessions") == [("failed",)]
        (error,) = rows(tmp_path / "run", "SELECT error FROM sessions")[0]
        assert "has answered no call" in error
        generated = rows(tmp_path / "run", "SELECT trajectory, tokens FROM completions ORDER BY 1")
        away.clear()
        run(made, tmp_path / "run", resume=True)
    assert (
        rows(tmp_path / "run", "SELECT trajectory, tokens FROM completions ORDER BY 1")[: len(generated)] == generated
    )
    assert story(tmp_path / "run") == story(tmp_path / "whole")
    assert_verifies(tmp_path / "run")


def test_a_spent_budget_stops_the_run_and_a_larger_one_resumes_it(model: Path, tmp_path: Path) -> None:
    with running(FakeJudge(_vowels)) as server:
        with pytest.raises(ScoringHaltedError, match=r"`task\.judge\.budget\.calls = 20`"):
            run(recipe(model, server, budget={"calls": 20}), tmp_path / "run")
        assert len(server.calls) == 20
        with pytest.raises(ScoringHaltedError, match=r"`task\.judge\.budget\.calls = 20`"):
            run(recipe(model, server, budget={"calls": 20}), tmp_path / "run", resume=True)
        assert len(server.calls) == 20
        summary = run(recipe(model, server, budget={"calls": 1_000}), tmp_path / "run", resume=True)
    assert summary["steps"] == 3
    assert not [1 for (state,) in rows(tmp_path / "run", "SELECT state FROM trajectories") if state != "trained"]
    assert_verifies(tmp_path / "run")


def test_an_outage_in_an_evaluation_stops_the_run_too(model: Path, tmp_path: Path) -> None:
    away = True
    with running(FakeJudge(lambda body: Reply(status=503, text="busy") if away else _vowels(body))) as server:
        with pytest.raises(ScoringHaltedError, match="has answered no call"):
            run(recipe(model, server, steps=1), tmp_path / "run")
        away = False
        assert run(recipe(model, server, steps=1), tmp_path / "run", resume=True)["steps"] == 1
    assert_verifies(tmp_path / "run")


def test_nonsense_is_counted_and_does_not_end_the_run(model: Path, tmp_path: Path) -> None:
    def answer(body: dict[str, Any]) -> Reply:
        return Reply("banana") if "after 7+7=" in body["messages"][0]["content"] else _vowels(body)

    with running(FakeJudge(answer)) as server:
        summary = run(recipe(model, server, steps=8, clarifications=0), tmp_path / "run")
    assert summary["steps"] == 8
    failed = rows(tmp_path / "run", "SELECT error FROM trajectories WHERE state = 'failed'")
    assert failed
    assert all("the last one: 'banana'" in error for (error,) in failed)
    assert_verifies(tmp_path / "run")


def test_check_asks_for_the_judge_and_shows_no_key(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "sk-very-secret")
    with running(FakeJudge(key="sk-very-secret")) as server:
        report = check(recipe(model, server, api_key_env="JUDGE_KEY"))
        assert "scored by the judge `judge` at 127.0.0.1" in str(report)
        assert "secret" not in str(report)
        assert not server.calls
        monkeypatch.setenv("JUDGE_KEY", "sk-another-secret")
        with pytest.raises(RecipeError, match="`JUDGE_KEY`") as caught:
            check(recipe(model, server, api_key_env="JUDGE_KEY"))
        assert "secret" not in str(caught.value)


def test_a_judge_sees_what_every_answer_of_a_chat_begins_with(model: Path, tmp_path: Path) -> None:
    chats = [{"messages": [{"role": "user", "content": f"{number}+1"}]} for number in range(12)]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    with running(FakeJudge(_vowels)) as server:
        values = recipe(model, server, steps=1).model_dump(mode="json", exclude_unset=True)
        values["task"] |= {"path": str(tmp_path / "chats.jsonl"), "prefill": "Sure: "}
        values["task"]["judge"] |= {"prompt": "Rate <{completion}> after {prompt}."}
        run(parse_recipe(values), tmp_path / "run")
    asked = [call["messages"][-1]["content"] for call in server.calls]
    assert asked
    assert all(question.startswith("Rate <Sure: ") for question in asked)


def test_check_notices_a_model_that_the_judge_does_not_list(model: Path) -> None:
    with running(FakeJudge(models=("judge-large", "other"))) as server:
        report = check(recipe(model, server, model="judge-larg"))
        assert any(
            note.endswith(
                f"{server.url} does not list `task.judge.model = 'judge-larg'` among its 2 models; the nearest is "
                "`judge-large`"
            )
            for note in report.notes
        ), report.notes
        assert not any("does not list" in note for note in check(recipe(model, server, model="other")).notes)


def test_check_of_a_judge_that_is_away_says_so_and_a_run_is_refused(model: Path, tmp_path: Path) -> None:
    away = FakeJudge(url="http://127.0.0.1:9/v1")
    report = check(recipe(model, away))
    assert "scored by the judge `judge` at 127.0.0.1:9" in str(report)
    assert any(
        "could not be asked for its models (Client" in note and "`task.judge.address`" in note for note in report.notes
    )
    with pytest.raises(RecipeError, match="does not answer"):
        run(recipe(model, away), tmp_path / "run")


def test_the_key_is_in_no_file_of_the_run(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "sk-very-secret")
    with running(FakeJudge(_vowels, key="sk-very-secret")) as server:
        made = recipe(model, server, api_key_env="JUDGE_KEY", outage_seconds=30.0)
        server_key, stop = server.key, threading.Event()

        def refuse_later(body: dict[str, Any]) -> Reply:
            if len(server.calls) > 20 and not stop.is_set():
                return Reply(status=401, text=f"wrong key: {server_key}")
            return _vowels(body)

        server.answer = refuse_later
        with pytest.raises(ScoringHaltedError, match="JUDGE_KEY") as caught:
            run(made, tmp_path / "run")
        assert "secret" not in str(caught.value)
    for path in (tmp_path / "run").rglob("*"):
        assert path.is_dir() or b"secret" not in path.read_bytes(), path


@pytest.mark.parametrize(
    ("table", "changes", "problem"),
    [
        ("task", {"reward": "our_rewards:letters"}, "`task.reward` or `task.judge`"),
        ("task", {"sandbox": {}}, "a judge cannot run in `task.sandbox`"),
        ("task", {"reward_seconds": 3.0}, "`task.reward_seconds` has no effect with `task.judge`"),
        ("task", {"reward_workers": 3}, "`task.reward_workers` has no effect with `task.judge`"),
    ],
)
def test_options_that_do_not_go_with_a_judge_are_refused(
    model: Path, table: str, changes: dict[str, Any], problem: str
) -> None:
    values = recipe(model, FakeJudge(url="http://127.0.0.1:9/v1")).model_dump(mode="json", exclude_unset=True)
    values[table] |= changes
    with pytest.raises(RecipeError, match=problem.replace(".", r"\.")):
        parse_recipe(values)


def test_a_served_policy_is_a_judge(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The endpoint of `stretto serve` speaks the same protocol: the tiny model answers, and what it says is read."""
    monkeypatch.setenv("JUDGE_KEY", "a key for tests")
    served = ServeOptions(port=0, key="a key for tests", device="cpu", rows=4)

    async def score(url: str) -> list[float | BaseException]:
        options = {"address": f"{url}/v1", "api_key_env": "JUDGE_KEY", "max_tokens": 24, "pattern": r"([\s\S])$"}
        asked = JudgeOptions.model_validate(
            JUDGE | options | {"scale": None, "choices": {chr(code): code / 100 for code in range(32, 127)}}
        )
        built = judge_scorer(asked, "task.judge", tmp_path)
        pool = RewardPool([RewardSpec("", built.spec, built=built)], columns={})
        await pool.start()
        try:
            calls = [pool.score("1+1=", completion, {}) for completion in ("2", "3", "2")]
            return await asyncio.gather(*calls, return_exceptions=True)
        finally:
            await pool.close()

    async def serve_and_score() -> list[float | BaseException]:
        engine, calls, named = await load(PolicyFolder.find(model), served)
        endpoint = Endpoint(calls, named)
        try:
            await endpoint.start()
            return await score(endpoint.url)
        finally:
            await endpoint.close()
            await engine.close()

    found = asyncio.run(serve_and_score())
    assert found[0] == found[2]
    assert all(isinstance(each, float) for each in found), found
