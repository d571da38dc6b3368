"""Tasks: what they ask, how answers are read, and that evaluation is held out."""

import asyncio
import json
import sys
from random import Random

import numpy as np
import pytest

from stretto.environments import countdown, guess
from stretto.environments.countdown import Problem
from stretto.environments.reasoning_problems import exact, extract_answer
from stretto.environments.reward_calls import Details
from stretto.environments.reward_pool import RewardPool
from stretto.environments.single_turn import SingleTurn
from stretto.environments.task_options import (
    CountdownChainOptions,
    EnvironmentOptions,
    FileOptions,
    GuessOptions,
    ReasoningGymOptions,
)
from stretto.environments.tasks import load_task
from stretto.errors import RecipeError, RewardError
from stretto.types import Completion, Prompt


def test_the_chain_counts_down_and_ends_with_the_answer():
    assert countdown.chain(Problem(x=4, a=3, n=2)) == "024017000=0"
    problem = Problem(x=4, a=3, n=17)
    assert problem.prompt == "4+3*17?"
    assert countdown.chain(problem).startswith("174167150")
    assert countdown.reward(problem.prompt, countdown.chain(problem), answer=problem.answer) == 1.0


def test_the_countdown_reward_looks_at_the_end_alone():
    assert countdown.reward("4+3*17?", "=5", answer=5) == 1.0
    assert countdown.reward("4+3*17?", "=4", answer=5) == 0.0
    assert countdown.reward("4+3*17?", "=55", answer=5) == 0.0
    assert countdown.reward("4+3*17?", "", answer=5) == 0.0


def test_a_slip_changes_the_chain_and_not_its_form():
    problem = Problem(x=4, a=3, n=30)
    slipped = countdown.chain(problem, Random(0), slips=0.5)
    right = countdown.chain(problem)
    assert len(slipped) == len(right)
    assert slipped != right
    assert slipped[0::3][:-1] == right[0::3][:-1]


def test_countdown_lengths_have_a_long_tail():
    counts = np.array([countdown.problem_at(i, 0, held_out=False).n for i in range(2000)])
    assert 2 <= np.median(counts) <= 4
    assert counts.min() == 1
    assert counts.max() <= 50
    assert np.quantile(counts, 0.95) >= 6 * np.median(counts)


def test_no_countdown_problem_is_both_trained_on_and_evaluated():
    task = load_task(CountdownChainOptions(size=1500), num_evaluation=300)
    train, evaluation = ({row.text for row in rows} for rows in (task.train, task.evaluation))
    assert len(task.train) == 1500
    assert len(task.evaluation) == 300
    assert not train & evaluation
    assert task.train[7] == load_task(CountdownChainOptions(size=1500)).train[7]
    assert task.train[0:20] != load_task(CountdownChainOptions(size=1500), seed=1).train[0:20]
    with pytest.raises(IndexError):
        task.train[1500]


@pytest.mark.parametrize(
    ("text", "expected", "answer"),
    [
        ("so\nAnswer: 42", "42", "42"),
        ("Answer: 1\nno, wait\n**Answer:** `-4`.", "-4", "-4"),
        ("answer: Paris\nI hope this helps", "Paris", "Paris"),
        ("<answer> 7 </answer> indeed", "7", "7"),
        ("Answer: 3\n<answer>4</answer>", "4", "4"),
        ("the sum is 12, so 12 + 3 = 15 apples", "15", "15"),
        ("I think\nParis\n\n", "Paris", "Paris"),
        ("Answer:\n1 2\n3 4\n", "1 2\n3 4", "1 2\n3 4"),
        ("", "15", ""),
        ("", "Paris", ""),
        ("Answer: a b c.", "a b c.", "a b c."),
    ],
)
def test_the_answer_is_read_by_the_documented_rule(text, expected, answer):
    assert extract_answer(text, expected) == answer


def test_exact_scoring_takes_the_answer_and_nothing_near_it():
    assert exact("p", "Answer: 42", answer="42") == 1.0
    assert exact("p", "Answer: 42 apples", answer="42") == 0.0
    assert exact("p", "Answer: 4", answer="42") == 0.0


def test_any_reasoning_gym_task_can_be_loaded_by_name():
    options = ReasoningGymOptions(name="chain_sum", size=50, config={"min_terms": 2, "max_terms": 2})
    task = load_task(options, seed=5, num_evaluation=50)
    row = task.train[0]
    assert [message["role"] for message in row.messages] == ["system", "user"]
    assert "Answer: " in row.messages[0]["content"]
    assert row.text.endswith(row.messages[1]["content"] + "\n")
    assert exact("p", f"Answer: {row.columns['answer']}", **row.columns) == 1.0
    assert load_task(options, seed=5).train[0] == row


def test_reasoning_gym_evaluates_on_seeds_that_are_not_trained_on():
    options = ReasoningGymOptions(name="chain_sum", size=50, config={"min_digits": 4, "max_digits": 4, "min_terms": 4})
    task = load_task(options, num_evaluation=50)
    assert not {row.text for row in task.train} & {row.text for row in task.evaluation}
    assert len(load_task(options, num_evaluation=0).evaluation) == 0


def test_without_an_instruction_only_the_problem_is_asked():
    row = load_task(ReasoningGymOptions(name="chain_sum", size=2, instruction="")).train[0]
    assert [message["role"] for message in row.messages] == ["user"]


@pytest.mark.parametrize(
    ("options", "pattern"),
    [
        (
            ReasoningGymOptions(name="chain_sums"),
            "`task.name = 'chain_sums'` is not a data set.*did you mean `chain_sum`",
        ),
        (ReasoningGymOptions(name="chain_sum", config={"terms": 2}), r"`task.config` has \['terms'\].*max_terms"),
        (ReasoningGymOptions(name="chain_sum", config={"seed": 2}), "`seed` and `size` are options of the task"),
        (ReasoningGymOptions(name="chain_sum", config={"min_terms": 9}), "is refused by `chain_sum`: max_terms"),
    ],
)
def test_bad_options_are_refused_by_name(options, pattern):
    with pytest.raises(RecipeError, match=pattern):
        load_task(options)


def test_without_the_package_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", None)
    with pytest.raises(RecipeError, match=r"pip install 'stretto\[reasoning-gym\]'"):
        load_task(ReasoningGymOptions(name="chain_sum"))


def test_the_data_sets_own_scorer_runs_in_a_worker_and_its_failure_is_a_reward_error():
    task = load_task(ReasoningGymOptions(name="chain_sum", size=3, scoring="scorer"))
    row = task.train[0]

    async def run():
        pool = RewardPool(task.reward)
        await pool.start()
        try:
            right = await pool.score("p", f"Answer: {row.columns['answer']}", row.columns)
            wrong = await pool.score("p", "Answer: no idea", row.columns)
            with pytest.raises(RewardError, match=r"reasoning_scorer:reward` raised KeyError"):
                await pool.score("p", "Answer: 1", {**row.columns, "entry": {}})
        finally:
            await pool.close()
        return right, wrong

    right, wrong = asyncio.run(run())
    assert right == 1.0
    assert wrong < 1.0


def write_rows(path, num, start=0):
    records = [{"prompt": f"{i}?", "answer": str(i)} for i in range(start, start + num)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_a_file_holds_rows_out_when_it_has_no_evaluation_file(tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", 20)
    task = load_task(FileOptions(path=str(path), reward="reward:reward"))
    assert len(task.train) == 16
    assert len(task.evaluation) == 4
    assert not {row.text for row in task.train} & {row.text for row in task.evaluation}


def test_a_file_of_its_own_to_evaluate_on_leaves_all_rows_to_train_on(tmp_path):
    path, held = write_rows(tmp_path / "rows.jsonl", 20), write_rows(tmp_path / "held.jsonl", 5, start=100)
    task = load_task(FileOptions(path=str(path), reward="reward:reward", evaluation_path=str(held)), num_evaluation=3)
    assert len(task.train) == 20
    assert [row.text for row in task.evaluation] == ["100?", "101?", "102?"]


def test_a_system_message_makes_prompts_a_conversation(tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", 2)
    row = load_task(FileOptions(path=str(path), reward="reward:reward", system="be brief")).train[0]
    assert row.messages == ({"role": "system", "content": "be brief"}, {"role": "user", "content": "0?"})
    assert row.columns == {"answer": "0", "messages": list(row.messages)}, "for rewards that ask for them"
    assert row.where == f"{path}:1"


def test_messages_tokens_and_version_go_to_rewards_apart_from_the_columns():
    seen = []

    class Rewards:
        async def score(self, prompt, completion, row, details=None):
            seen.append((prompt, completion, row, details))
            return 1.0

    messages = [{"role": "user", "content": "2+2"}]
    prompt = Prompt(0, "<user>2+2", (1, 2), {"answer": 4, "messages": messages})
    made = Completion(0, 7, np.array([61, 53], np.int32), np.zeros(2, np.float32), "stop", "")
    environment = SingleTurn(Rewards(), lambda tokens: "".join(map(chr, tokens)))
    assert asyncio.run(environment.score(prompt, made)) == 1.0
    tokens = np.array([61, 53], "<i4").tobytes()
    assert seen == [("<user>2+2", "=5", {"answer": 4}, Details(messages, tokens, 7))]
    environment = SingleTurn(Rewards(), lambda tokens: "".join(map(chr, tokens)), "<think>")
    asyncio.run(environment.score(prompt, made))
    assert seen[-1] == ("<user>2+2", "=5", {"answer": 4}, Details(messages, tokens, 7, "<think>"))


def test_an_episode_asks_once_and_scores_the_decoded_answer():
    asked = []

    class Oracle:
        async def generate(self, tokens):
            asked.append(tuple(tokens))
            return Completion(0, 0, np.array([61, 53], np.int32), np.zeros(2, np.float32), "stop", "")

    async def run():
        pool = RewardPool(countdown.REWARD)
        await pool.start()
        try:
            environment = SingleTurn(pool, lambda tokens: "".join(map(chr, tokens)))
            prompt = Prompt(index=0, text="4+3*17?", tokens=(1, 2, 3), row={"answer": 5})
            return await environment.episode(prompt, Oracle())
        finally:
            await pool.close()

    assert asyncio.run(run()) == 1.0
    assert asked == [(1, 2, 3)]


def test_an_episode_has_no_more_lineages_than_turns(tmp_path):
    given = {"path": "p.jsonl", "environment": "a:B"}
    assert EnvironmentOptions(turns=4, **given).max_lineages == 4
    assert EnvironmentOptions(turns=40, **given).max_lineages == 16
    assert EnvironmentOptions(turns=40, lineages=2, **given).max_lineages == 2
    assert GuessOptions(turns=4).max_lineages == 1
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    options = EnvironmentOptions(turns=4, path=str(tmp_path / "p.jsonl"), environment="a:B", lineages=3)
    assert load_task(options, num_evaluation=0).max_lineages == 3


def test_the_world_of_guess_takes_the_time_it_is_told_to():
    times = [guess.waiting_s(2.0, episode, turn) for episode in range(4_000) for turn in range(4)]
    assert sum(times) / len(times) == pytest.approx(2.0, rel=0.1)
    assert sorted(times)[len(times) // 2] == pytest.approx(2.0 * 0.487, rel=0.1)
    assert guess.waiting_s(2.0, 5, 1) == guess.waiting_s(2.0, 5, 1) != guess.waiting_s(2.0, 5, 2)
