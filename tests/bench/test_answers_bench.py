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
        (["chainsum"], "reasoning-gym has no task `chainsum`; did you mean `chain_sum`?"),
        (["syllogism"], "the answers of `syllogism` are no numbers (one of 100 is 'No'): choose another task"),
        (["chain_sum", "--config", '{"min_terms": 0}'], "reasoning-gym makes no `chain_sum`"),
        (["lcm", "--config", '{"min_value": 1, "max_value": 2}'], "5 are needed: lower `--train` or `--test`"),
    ],
)
def test_tasks_that_give_no_problems_are_refused(given, message, tmp_path, capsys):
    pytest.importorskip("reasoning_gym")
    assert reasoning_problems.main([*given, "--train", "3", "--test", "2", "--out", str(tmp_path / "x")]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert message in said
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--train", "-4"], "argument --train: `-4` is no whole number of at least 1"),
        (["--test", "0"], "argument --test: `0` is no whole number of at least 1"),
        (["--config", "{bad"], "argument --config: `{bad` is no JSON (Expecting property name"),
        (["--config", "[1]"], "argument --config: `[1]` is no JSON object"),
    ],
)
def test_an_option_that_cannot_be_is_named(given, message, tmp_path, capsys):
    with pytest.raises(SystemExit) as error:
        reasoning_problems.main(["chain_sum", "--out", str(tmp_path / "x"), *given])
    assert error.value.code == 2
    assert f"error: {message}" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_a_file_in_the_place_of_the_folder_is_named(tmp_path, capsys):
    pytest.importorskip("reasoning_gym")
    (tmp_path / "x").write_text("mine")
    few = ["chain_sum", "--train", "3", "--test", "2"]
    assert reasoning_problems.main([*few, "--out", str(tmp_path / "x")]) == 2
    assert capsys.readouterr().err == f"error: `--out {tmp_path / 'x'}` is a file; name a folder\n"
    assert reasoning_problems.main([*few, "--out", str(tmp_path / "x" / "y")]) == 2
    assert "cannot be written: Not a directory" in capsys.readouterr().err
    assert (tmp_path / "x").read_text() == "mine"


def test_a_cell_tells_lengths_and_accuracy(tmp_path, monkeypatch):
    scored = []

    def lengths_times_answers(prompt, completion, *, answer, **row):
        scored.append((completion, answer))
        return len(completion) * (1 + float(answer))

    monkeypatch.setitem(sys.modules, "rewards_of_this_test", types.SimpleNamespace(reward=lengths_times_answers))
    given = ["--tiny", "--reward", "rewards_of_this_test:reward", "--out", str(tmp_path)]
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


def test_a_missing_model_and_missing_problems_are_named(tmp_path, monkeypatch, capsys):
    def refused(*given: str) -> str:
        with pytest.raises(SystemExit) as error:
            answers.main(["--out", str(tmp_path / "cells"), "--device", "cpu", *given])
        assert error.value.code == 2
        return capsys.readouterr().err

    monkeypatch.chdir(tmp_path)
    assert "error: `--model` is missing" in refused()
    without = refused("--model", "./none", "--problems", "data/sums")
    assert "error: `--problems data/sums`: there is no `data/sums/test.jsonl`" in without
    assert "`python examples/gsm8k.py`" in without
    assert "`python examples/reasoning_problems.py TASK --out FOLDER`" in without
    write_tiny_problems(tmp_path / "data" / "sums")
    assert "error: `--model = './none'`: there is no folder" in refused("--model", "./none", "--problems", "data/sums")
