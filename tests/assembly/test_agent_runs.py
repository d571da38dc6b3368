"""Whole runs of agents over the real engine and trainer: trained, killed, resumed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from run_cases import assert_verifies, rows, run, story

from stretto.assembly.check import check
from stretto.observe.progress import Silent
from stretto.recipe.schema import Recipe, load_recipe

pytest.importorskip("stretto.chat")

# Two turns of one chat, a call that does not train, and a sub-agent with a context of its own.
AGENT = """
import json, os, sys, urllib.error, urllib.request

def ask(messages, **more):
    body = json.dumps({"messages": messages, **more}).encode()
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    return json.load(urllib.request.urlopen(request, timeout=60))["choices"][0]["message"]

task = json.load(sys.stdin)
messages = [{"role": "user", "content": task["prompt"]}]
said = ""
try:
    for _ in range(2):
        messages.append(ask(messages))
        said += messages[-1]["content"]
        messages.append({"role": "user", "content": "="})
    ask([{"role": "user", "content": "title"}], train=False)
    said += ask([{"role": "user", "content": "sub"}])["content"]
except urllib.error.HTTPError as error:
    if json.load(error)["error"]["code"] not in ("context_length_exceeded", "limit_reached"):
        raise
print(said)
"""


def agents(model: Path, folder: Path, *overrides: str) -> Recipe:
    """Three updates of 2 groups of 4 runs of the agent, whose turns end at a vowel or a digit."""
    (folder / "agent.py").write_text(AGENT)
    path = folder / "agents.toml"
    path.write_text(
        f"""
        seed = 5
        [model]
        path = "{model}"
        lora = {{ rank = 4 }}
        [task]
        type = "agent"
        path = "prompts.jsonl"
        command = ["python", "-I", "-S", "agent.py"]
        reward = "our_rewards:letters"
        turns = 4
        [rollout]
        prompts = 2
        group = 4
        max_tokens = 80
        stop = ["a", "e", "i", "o", "u", "1", "2", "3", "4"]
        [training]
        steps = 3
        learning_rate = 1e-3
        [evaluation]
        prompts = 2
        [runtime]
        device = "cpu"
        engine_threads = 1
        trainer_threads = 1
        stall_seconds = 60.0
        """
    )
    return load_recipe(path, overrides)


class Dies(Silent):
    def updated(self, line: Mapping[str, Any]) -> None:
        if line["update"] == 1:
            raise KeyError("as if it were killed here")


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


def test_a_run_of_agents_that_is_killed_goes_on_with_the_same_bits(model: Path, tmp_path: Path) -> None:
    made = agents(model, tmp_path, 'rollout.paradigm="synchronous"', "evaluation.prompts=0")
    with pytest.raises(KeyError):
        run(made, tmp_path / "run", observer=Dies())
    run(made, tmp_path / "run", resume=True)
    assert_verifies(tmp_path / "run")
    run(made, tmp_path / "whole")
    assert story(tmp_path / "run") == story(tmp_path / "whole")
