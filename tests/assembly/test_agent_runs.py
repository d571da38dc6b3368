"""Whole runs of agents over the real engine and trainer: trained, killed, resumed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from agent_cases import agents
from interruption_cases import assert_same_bits_after_a_kill
from run_cases import assert_verifies, rows, run
from transformers import AutoTokenizer

from stretto.api.runs import open_run
from stretto.assembly.check import check
from stretto.assembly.policy_export import export
from stretto.assembly.serve import PolicyFolder
from stretto.models.loading import load_tokenizer

pytest.importorskip("stretto.chat")


def test_a_program_that_knows_nothing_of_us_is_trained_and_evaluated(model: Path, tmp_path: Path) -> None:
    made = agents(model, tmp_path)
    assert "played by" in str(check(made))
    summary = run(made, tmp_path / "run")
    assert summary["trained_trajectories"] == 24
    assert summary["eval_after"] is not None
    assert summary["mismatch_kl"] < 1e-6
    assert_verifies(tmp_path / "run")
    rewards = {reward for (reward,) in rows(tmp_path / "run", "SELECT reward FROM trajectories")}
    assert len(rewards) > 1


@pytest.mark.parametrize("merge", [False, True])
def test_a_policy_is_asked_as_it_was_trained(merge: bool, model: Path, tmp_path: Path) -> None:
    template = "{% for message in messages %}{{ opening }}{{ message['content'] }}{% endfor %}"
    options = [f"task.chat_template={json.dumps(template)}", "task.template={opening = '>'}"]
    folder = tmp_path / "run"
    run(agents(model, tmp_path, *options, "training.steps=1", "evaluation.prompts=0"), folder)
    export(folder, tmp_path / "out", merge=merge)
    question: Any = [{"role": "user", "content": "1+2?"}]
    for place in (folder, tmp_path / "out"):
        policy = PolicyFolder.find(place)
        tokenizer = load_tokenizer(policy.tokenizer)
        assert tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True) == ">1+2?"
        assert "trained on chats" in (policy.path / "README.md").read_text()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True) == ">1+2?"
    assert open_run(folder).policy(device="cpu")._prompt("1+2?") == (">1+2?", False)


def test_a_run_of_agents_that_is_killed_goes_on_with_the_same_bits(model: Path, tmp_path: Path) -> None:
    made = agents(model, tmp_path, 'rollout.paradigm="synchronous"', "evaluation.prompts=0")
    assert_same_bits_after_a_kill(made, tmp_path, at=1)
