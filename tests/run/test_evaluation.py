"""An evaluation over a fake engine: the same prompts and seeds whatever the version, and what failed is counted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from loop_cases import Characters

from stretto.environments.data import PromptStream, Row
from stretto.environments.mixed_prompts import MixedHeldOut
from stretto.environments.protocol import Outcome, Policy
from stretto.errors import (
    EngineError,
    LateRewardError,
    RequestError,
    RewardError,
    StalledError,
    VersionNotResidentError,
)
from stretto.run.evaluation import PRIORITY, Evaluator
from stretto.run.first_reward import FirstReward
from stretto.run.task_play import TaskPlay
from stretto.store.journal import Journal, JournalReader
from stretto.store.schema import RunFacts, opened_readonly
from stretto.types import (
    Completion,
    EvaluationResult,
    HeldOutAnswer,
    HeldOutScore,
    Prompt,
    Request,
    Sampling,
    TaskScore,
)


class Answers:
    """As much of an engine as an evaluation uses: ten tokens for each request, or what `trouble` raises.

    The tokens are 1 in a greedy answer, and otherwise 0.
    """

    def __init__(self, trouble: Callable[[Request], None], checksum: str = "sum") -> None:
        self.requests: list[Request] = []
        self._trouble = trouble
        self._checksum = checksum

    async def generate(self, request: Request) -> Completion:
        self.requests.append(request)
        self._trouble(request)
        length = min(10, request.sampling.max_tokens)
        tokens = np.full(length, request.sampling.temperature == 0.0, dtype=np.int32)
        logprobs = np.zeros(length, dtype=np.float32)
        return Completion(request.id, request.version, tokens, logprobs, "stop", self._checksum)


class Huge:
    """An environment whose second prompt earns more than can be trained on."""

    async def episode(self, prompt: Prompt, policy: Policy) -> float:
        await policy.generate(prompt.tokens)
        return 1e200 if prompt.index == 1 else 1.0


class Scores:
    """An environment whose reward is 1 for the first prompt and less for those after it."""

    async def episode(self, prompt: Prompt, policy: Policy) -> float:
        await policy.generate(prompt.tokens)
        if prompt.index == 3:
            raise RewardError("no idea")
        return 1.0 - prompt.index / 4


def evaluate(
    folder: Path,
    version: int = 4,
    trouble: Callable[[Request], None] = lambda request: None,
    checksum: str = "sum",
    **options: Any,
) -> tuple[EvaluationResult, list[Request], list[Any]]:
    rows = [Row(text=f"{number}+{number}=") for number in range(8)]
    prompts = PromptStream(rows, Characters(), seed=0, max_prompt_tokens=64, shuffle=False)
    engine: Any = Answers(trouble, checksum)
    with Journal.open(folder / f"{version}.sqlite") as journal:
        journal.begin(RunFacts("synchronous", 0, False, 1, 1, 1, 0, 9, 0), at=1.0)
        environment = options.pop("environment", Scores())
        limits = {name: options.pop(name) for name in ("max_turns", "episode_s") if name in options}
        play = TaskPlay(environment, Sampling(max_tokens=16), **limits)
        evaluator = Evaluator(prompts, 4, tasks=play, seed=5, journal=journal, **options)
        result = asyncio.run(evaluator.evaluate(engine, version, "during", "sum"))
        evaluator.record(result, asdict(result))
    with JournalReader(folder / f"{version}.sqlite") as reader:
        recorded = [(each.version, each.kind, each.reward, each.num) for each in reader.evaluations()]
    return result, engine.requests, recorded


class ByText:
    """An environment whose reward is the number that the prompt begins with; 9 cannot be scored."""

    async def episode(self, prompt: Prompt, policy: Policy) -> float:
        await policy.generate(prompt.tokens)
        if prompt.text.startswith("9"):
            raise RewardError("no idea")
        return float(prompt.text[0])


def test_held_out_scores_of_several_tasks_are_kept_by_label(tmp_path: Path) -> None:
    def stream(label: str, texts: str) -> PromptStream:
        rows = [Row(text=f"{text}=") for text in texts]
        return PromptStream(rows, Characters(), seed=0, max_prompt_tokens=64, shuffle=False, task=label)

    held_out = MixedHeldOut({"sums": stream("sums", "135"), "words": stream("words", "29")})
    plays = {
        "sums": TaskPlay(ByText(), Sampling(max_tokens=4)),
        "words": TaskPlay(ByText(), Sampling(max_tokens=2)),
    }
    engine: Any = Answers(lambda request: None)
    with Journal.open(tmp_path / "j.sqlite") as journal:
        journal.begin(RunFacts("synchronous", 0, False, 1, 1, 1, 0, 9, 0), at=1.0)
        evaluator = Evaluator(held_out, 5, tasks=plays, seed=5, journal=journal, greedy=True)
        result = asyncio.run(evaluator.evaluate(engine, 4, "during", "sum"))
    sums, words = HeldOutScore(3.0, 3, 0, 4.0), HeldOutScore(2.0, 1, 1, 2.0)
    assert list(result.tasks) == ["sums", "words"]
    assert result.tasks == {"sums": TaskScore(sums, sums), "words": TaskScore(words, words)}
    assert (result.score, result.num_scored, result.num_failed) == (11 / 4, 4, 1), "of all prompts, not of all tasks"


def test_prompts_and_seeds_are_the_same_for_every_version(tmp_path: Path) -> None:
    _, first, _ = evaluate(tmp_path, version=4)
    _, second, _ = evaluate(tmp_path, version=9)
    assert [(each.prompt, each.seed) for each in first] == [(each.prompt, each.seed) for each in second]
    assert ({each.version for each in first}, {each.version for each in second}) == ({4}, {9})
    assert len({each.seed for each in first}) == 4
    assert all(each.id < 0 and each.priority == PRIORITY for each in first), "no trajectory of rollout, and after it"


def test_what_failed_is_neither_in_the_score_nor_in_the_lengths(tmp_path: Path) -> None:
    def trouble(request: Request) -> None:
        if request.id == -2:
            raise RequestError("too long")

    result, _, recorded = evaluate(tmp_path, trouble=trouble)
    assert (result.num_scored, result.num_failed) == (2, 2), "a request and a reward"
    assert result.score == pytest.approx((1.0 + 0.5) / 2)
    assert result.mean_tokens == 10.0, "a request that failed is no completion of 0 tokens"
    assert recorded == [(4, "during", result.score, 2)]


def test_the_journal_keeps_the_answers_with_their_texts_rewards_and_errors(tmp_path: Path) -> None:
    def trouble(request: Request) -> None:
        if request.id == -2:
            raise RequestError("too long")

    result, _, _ = evaluate(tmp_path, trouble=trouble, greedy=True, decode=lambda tokens: f"text of {len(tokens)}")
    with opened_readonly(tmp_path / "4.sqlite") as db:
        columns = "prompt_index, greedy, reward, error, text, num_sampled, length(tokens) / 4"
        rows = db.execute(f"SELECT {columns} FROM answers ORDER BY 2, 1").fetchall()
        prompts = db.execute("SELECT prompt_index, prompt_text FROM held_out ORDER BY 1").fetchall()
    assert prompts == [(number, f"{number}+{number}=") for number in range(4)]
    assert rows[0] == (0, 0, 1.0, None, "text of 10", 10, 10)
    assert rows[1] == (1, 0, None, "too long", "", 0, 0), "it failed before its first token"
    assert rows[3] == (3, 0, None, "no idea", "text of 10", 10, 10), "its reward failed, and what it said is kept"
    assert [row[:3] for row in rows[4:]] == [(0, 1, 1.0), (1, 1, 0.75), (2, 1, 0.5), (3, 1, None)]
    scored = [row[2] for row in rows[:4] if row[2] is not None]
    assert sum(scored) / len(scored) == result.score


def test_an_answer_of_several_turns_is_kept_with_its_turns(tmp_path: Path) -> None:
    evaluate(tmp_path, environment=Talks(), max_turns=2, episode_s=0.2, decode=lambda tokens: "")
    with opened_readonly(tmp_path / "4.sqlite") as db:
        num_tokens, num_sampled, turns = db.execute(
            "SELECT num_tokens, num_sampled, turns FROM answers WHERE prompt_index = 0"
        ).fetchone()
    assert (num_tokens, num_sampled) == (16, 13)
    assert np.frombuffer(turns, "<i4").tolist() == [0, 10, 13, 16]


def test_another_prompt_at_the_same_index_is_another_prompt(tmp_path: Path) -> None:
    answers = [
        HeldOutAnswer(0, Prompt(0, text, (1, 2, len(text)), {}), False, (), (), (), 1.0, None) for text in ("a", "bc")
    ]
    with Journal.open(tmp_path / "journal.sqlite") as journal:
        journal.begin(RunFacts("synchronous", 0, False, 1, 1, 1, 0, 9, 0), at=1.0)
        for version, answer in enumerate([answers[0], answers[1], answers[0]]):
            journal.evaluation(version, "during", at=2.0, reward=1.0, num=1, answers=[answer])
    with opened_readonly(tmp_path / "journal.sqlite") as db:
        query = "SELECT evaluation, prompt_text FROM answers a JOIN held_out h ON h.id = a.prompt ORDER BY 1"
        assert db.execute(query).fetchall() == [(1, "a"), (2, "bc"), (3, "a")]
        assert db.execute("SELECT COUNT(*) FROM held_out").fetchone() == (2,)


def test_where_nothing_could_be_generated_there_is_no_score(tmp_path: Path) -> None:
    def trouble(request: Request) -> None:
        raise RequestError("too long")

    result, _, recorded = evaluate(tmp_path, trouble=trouble)
    assert (result.score, result.num_scored, result.num_failed, result.mean_tokens) == (None, 0, 4, 0.0)
    assert recorded == [(4, "during", None, 0)]


def test_an_engine_that_dies_is_no_failed_request(tmp_path: Path) -> None:
    def trouble(request: Request) -> None:
        raise EngineError("gone")

    with pytest.raises(EngineError, match="gone"):
        evaluate(tmp_path, trouble=trouble)


def test_an_engine_that_answers_with_other_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="answered with weights `other`; version 4 is `sum`"):
        evaluate(tmp_path, checksum="other")


@pytest.mark.parametrize("error", [VersionNotResidentError("not here"), KeyError("what")])
def test_an_engine_that_does_not_hold_what_it_had_confirmed_or_breaks_has_failed(
    error: Exception, tmp_path: Path
) -> None:
    def trouble(request: Request) -> None:
        raise error

    with pytest.raises(EngineError, match=r"not here|KeyError"):
        evaluate(tmp_path, trouble=trouble)


class Talks:
    """Two turns with three tokens between them; prompts from the second on go wrong in their own ways."""

    async def episode(self, prompt: Prompt, policy: Policy) -> Outcome:
        assert policy.left == 16
        first = await policy.generate(prompt.tokens)
        assert policy.left == 6
        match prompt.index:
            case 1:
                raise KeyError("a mistake in the environment")
            case 2:
                await asyncio.sleep(60)
        await policy.generate([*prompt.tokens, *first.tokens.tolist(), 1, 2, 3])
        return Outcome((0.25, 0.5))


def test_an_episode_of_several_turns_is_evaluated_and_what_goes_wrong_in_one_is_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def trouble(request: Request) -> None:
        if request.id == -4 and len(request.prompt) > 10:
            raise RequestError("too long")

    result, requests, _ = evaluate(tmp_path, trouble=trouble, environment=Talks(), max_turns=2, episode_s=0.2)
    assert (result.num_scored, result.num_failed, result.score) == (1, 3, 0.75)
    assert "KeyError: 'a mistake in the environment' (test_evaluation.py:" in caplog.text
    first = [request for request in requests if request.id == -1]
    assert [request.sampling.max_tokens for request in first] == [16, 3]
    assert first[1].prompt == (*first[0].prompt, *[0] * 10, 1, 2, 3)
    assert first[0].seed != first[1].seed
    assert result.mean_tokens == (13 + 10 + 10 + 10) / 4


class Mistakes:
    """Each prompt goes wrong in its own way, none of which is the engine's fault."""

    async def episode(self, prompt: Prompt, policy: Policy) -> float:
        match prompt.index:
            case 0:
                await asyncio.gather(policy.generate(prompt.tokens), policy.generate(prompt.tokens))
            case 1:
                await policy.generate([*prompt.tokens, "more"])  # type: ignore[list-item]
            case 2:
                await policy.generate("text")  # type: ignore[arg-type]
        return 1.0


def test_mistakes_of_an_environment_are_counted_and_told_and_cost_no_engine(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    result, requests, _ = evaluate(tmp_path, environment=Mistakes(), max_turns=2)
    assert (result.num_scored, result.num_failed, result.score) == (0, 4, None)
    assert [request.id for request in requests] in ([], [-1])
    assert (
        "4 of 4 held-out prompts failed in the evaluation of version 4, the first of them: the environment asked"
        in (caplog.text)
    )


class RightIfGreedy:
    """An environment in which greedy answers earn 1 and the others a quarter; the first prompt cannot be scored."""

    async def episode(self, prompt: Prompt, policy: Policy) -> float:
        answer = await policy.generate(prompt.tokens)
        if prompt.index == 0:
            raise RewardError("no idea")
        return 1.0 if answer.tokens[0] == 1 else 0.25


def greedy_answer(request: Request) -> bool:
    return request.sampling.temperature == 0.0


def test_with_greedy_every_prompt_is_answered_twice_and_the_sampled_answers_are_as_without_it(tmp_path: Path) -> None:
    plain, alone, _ = evaluate(tmp_path, version=4)
    both, requests, _ = evaluate(tmp_path, version=5, greedy=True)
    sampled = [each for each in requests if not greedy_answer(each)]
    greedy = [each for each in requests if greedy_answer(each)]
    assert [replace(each, version=4) for each in sampled] == alone
    assert [each.prompt for each in greedy] == [each.prompt for each in sampled]
    assert len({each.id for each in requests}) == 8
    assert all(each.id < 0 and each.priority == PRIORITY for each in greedy), "no trajectory of rollout, and after it"
    assert plain.greedy is None
    assert (both.score, both.num_scored, both.num_failed) == (plain.score, plain.num_scored, plain.num_failed)


def test_the_two_scores_are_apart_and_both_are_recorded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def trouble(request: Request) -> None:
        if greedy_answer(request) and request.prompt[0] in (ord("1"), ord("2")):
            raise RequestError("too long")

    result, _, recorded = evaluate(tmp_path, trouble=trouble, environment=RightIfGreedy(), greedy=True)
    assert (result.score, result.num_scored, result.num_failed, result.mean_tokens) == (0.25, 3, 1, 10.0)
    assert result.greedy == HeldOutScore(score=1.0, num_scored=1, num_failed=3, mean_tokens=10.0)
    assert recorded == [(4, "during", 0.25, 3)]
    with JournalReader(tmp_path / "4.sqlite") as reader:
        assert [each.greedy for each in reader.evaluations()] == [result.greedy]
    assert "1 of 4 held-out prompts failed in the evaluation of version 4, the first of them: no idea" in caplog.text
    assert "3 of 4 held-out prompts failed in the greedy evaluation of version 4" in caplog.text


def test_one_way_may_have_a_score_and_the_other_none(tmp_path: Path) -> None:
    def no_greedy(request: Request) -> None:
        if greedy_answer(request):
            raise RequestError("too long")

    result, _, _ = evaluate(tmp_path, trouble=no_greedy, environment=RightIfGreedy(), greedy=True)
    assert (result.score, result.num_failed) == (0.25, 1)
    assert result.greedy == HeldOutScore(score=None, num_scored=0, num_failed=4, mean_tokens=0.0)


def test_an_engine_that_dies_over_a_greedy_answer_leaves_no_result(tmp_path: Path) -> None:
    def trouble(request: Request) -> None:
        if greedy_answer(request):
            raise EngineError("gone")

    with pytest.raises(EngineError, match="gone"):
        evaluate(tmp_path, trouble=trouble, greedy=True)
    with JournalReader(tmp_path / "4.sqlite") as reader:
        assert reader.evaluations() == []


class AsksTwice:
    """Two turns with a token between them."""

    async def episode(self, prompt: Prompt, policy: Policy) -> float:
        first = await policy.generate(prompt.tokens)
        last = await policy.generate([*prompt.tokens, *first.tokens.tolist(), 7])
        return float(last.tokens[0])


def test_greedy_episodes_have_turns_of_their_own(tmp_path: Path) -> None:
    result, requests, _ = evaluate(tmp_path, environment=AsksTwice(), max_turns=2, greedy=True)
    by_id = {id: [each for each in requests if each.id == id] for id in {each.id for each in requests}}
    assert len(by_id) == 8
    for begins, goes_on in by_id.values():
        assert greedy_answer(begins) == greedy_answer(goes_on)
        assert goes_on.prompt == (*begins.prompt, *[int(greedy_answer(begins))] * 10, 7)
    assert result.greedy is not None
    assert (result.score, result.greedy.score) == (0.0, 1.0)


def test_a_reward_that_cannot_be_trained_on_is_no_score(tmp_path: Path) -> None:
    result, _, _ = evaluate(tmp_path, environment=Huge())
    assert (result.score, result.num_scored, result.num_failed) == (1.0, 3, 1)


def test_an_evaluation_ends_early_if_no_reward_ever_returns_and_leaves_no_episode_behind(tmp_path: Path) -> None:
    class Hangs:
        async def episode(self, prompt: Prompt, policy: Policy) -> float:
            await policy.generate(prompt.tokens)
            if prompt.index >= 16:
                await asyncio.Event().wait()
            raise LateRewardError("too late")

    rows = [Row(text=f"{number}+{number}=") for number in range(32)]
    prompts = PromptStream(rows, Characters(), seed=0, max_prompt_tokens=64, shuffle=False)

    async def run(first_reward: FirstReward, journal: Journal) -> None:
        evaluator = Evaluator(
            prompts, 32, tasks=TaskPlay(Hangs(), Sampling(max_tokens=16)), seed=5, journal=journal,
            first_reward=first_reward,
        )  # fmt: skip
        engine: Any = Answers(lambda request: None, "sum")
        async with asyncio.timeout(30):
            with pytest.raises(StalledError, match="first 16 did not return in time; the last of them: too late"):
                await evaluator.evaluate(engine, 4, "before", "sum")
        assert asyncio.all_tasks() == {asyncio.current_task()}

    with Journal.open(tmp_path / "journal.sqlite") as journal:
        asyncio.run(run(FirstReward(), journal))
