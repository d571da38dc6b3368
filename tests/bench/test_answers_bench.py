"""Problems of reasoning-gym as files, and the bench of how long a model's answers to them are."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))  # the benches and examples are no part of the package

from bench.gpu import answers
from bench.gpu.problems import write_tiny_problems
from examples import reasoning_problems
from stretto.environments.rewards.mathematics import reward

torch.set_num_threads(1)


def rows_of(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_problems_are_different_and_their_answers_earn_the_reward(tmp_path, capsys):
    pytest.importorskip("reasoning_gym")
    given = ["chain_sum", "--config", '{"min_terms": 3, "max_terms": 4}', "--train", "30", "--test", "10"]
    assert reasoning_problems.main([*given, "--out", str(tmp_path)]) == 0
    assert "30 problems to train on, 10 held out" in capsys.readouterr().out
    train, test = rows_of(tmp_path / "train.jsonl"), rows_of(tmp_path / "test.jsonl")
    assert (len(train), len(test)) == (30, 10)
    assert len({json.dumps(row["messages"]) for row in (*train, *test)}) == 40
    for row in train:
        assert reward("", f"so \\boxed{{{row['answer']}}}", answer=str(row["answer"])) == 1.0


def test_held_out_problems_stay_the_same_when_more_are_trained_on(tmp_path):
    pytest.importorskip("reasoning_gym")
    for name, train in (("small", "5"), ("large", "40")):
        reasoning_problems.main(["lcm", "--train", train, "--test", "10", "--out", str(tmp_path / name)])
    assert rows_of(tmp_path / "small" / "test.jsonl") == rows_of(tmp_path / "large" / "test.jsonl")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["no_such_task"], "reasoning-gym makes no `no_such_task`"),
        (["bitwise_arithmetic"], "0 different problems with a number as answer"),
        (["chain_sum", "--config", '{"min_terms": 0}'], "reasoning-gym makes no `chain_sum`"),
    ],
)
def test_tasks_that_give_no_problems_are_refused(given, message, tmp_path, capsys):
    pytest.importorskip("reasoning_gym")
    assert reasoning_problems.main([*given, "--train", "3", "--test", "2", "--out", str(tmp_path / "x")]) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_a_cell_tells_lengths_and_accuracy(tmp_path, monkeypatch):
    scored = []

    def lengths_times_answers(prompt, completion, *, answer, **row):
        scored.append((completion, answer))
        return len(completion) * (1 + float(answer))

    monkeypatch.setitem(sys.modules, "rewards_of_this_test", types.SimpleNamespace(reward=lengths_times_answers))
    given = ["--tiny", "--model", "tiny", "--reward", "rewards_of_this_test:reward", "--out", str(tmp_path)]
    assert answers.main(given) == 0
    (path,) = tmp_path.glob("answers-native-*.json")
    found = json.loads(path.read_text(encoding="utf-8"))["results"]
    assert found["num_problems"] == 4
    assert 1 <= found["length_p50"] <= found["length_p99"] <= found["length_max"] <= 12
    problems = rows_of(write_tiny_problems(tmp_path / "problems") / "test.jsonl")[:4]
    assert [answer for _, answer in scored] == [row["answer"] for row in problems]
    assert len({completion for completion, _ in scored}) == 4
    expected = sum(len(text) * (1 + int(row["answer"])) for (text, _), row in zip(scored, problems, strict=True)) / 4
    assert found["accuracy"] == pytest.approx(expected)
    assert expected > 1  # so that a score of another kind is not taken for it
