"""A whole run that a reward model scores, in a process of its own."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from run_cases import assert_verifies, rows, run
from transformers import LlamaConfig, LlamaForSequenceClassification

from stretto.assembly.check import check
from stretto.environments.rewards.reward_model_options import RewardModelOptions
from stretto.errors import RecipeError
from stretto.models.reward_model import RewardModel
from stretto.models.tiny import tiny_tokenizer
from stretto.recipe.reading import parse_recipe
from stretto.recipe.schema import Recipe


@pytest.fixture
def scorer(tmp_path: Path) -> Path:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_labels=1
    )
    LlamaForSequenceClassification(config).save_pretrained(tmp_path / "scorer")
    tiny_tokenizer().save_pretrained(tmp_path / "scorer")
    return tmp_path / "scorer"


def recipe(model: Path, scorer: Path | str) -> Recipe:
    return parse_recipe(
        {
            "seed": 5,
            "model": {"path": str(model), "lora": {"rank": 4}},
            "task": {"type": "file", "path": "prompts.jsonl", "reward_model": {"path": str(scorer)}, "system": "Add."},
            "rollout": {"prompts": 3, "group": 4, "max_tokens": 12},
            "training": {"steps": 2},
            "evaluation": {"prompts": 2},
            "runtime": {"device": "cpu", "engine_threads": 1, "trainer_threads": 1, "stall_seconds": 60.0},
        }
    )


@pytest.mark.slow
def test_a_reward_model_scores_the_conversations_of_a_run(model: Path, scorer: Path, tmp_path: Path) -> None:
    assert f"scored by the reward model `{scorer}`" in str(check(recipe(model, scorer)))
    run(recipe(model, scorer), tmp_path / "run")
    assert_verifies(tmp_path / "run")
    reward_model = RewardModel(RewardModelOptions(path=str(scorer)), "cpu", "float32")
    query = "SELECT g.prompt_text, g.row, c.text, t.reward FROM trajectories t JOIN completions c USING (trajectory) "
    for _, row, completion, reward in rows(tmp_path / "run", query + "JOIN groups g USING (group_id) LIMIT 8"):
        messages = json.loads(row)["messages"]
        assert messages[0] == {"role": "system", "content": "Add."}
        item = SimpleNamespace(prompt="", completion=completion, messages=messages)
        assert reward_model.score([item])[0] == pytest.approx(reward, abs=1e-5)


def test_a_policy_is_no_reward_model(model: Path) -> None:
    with pytest.raises(RecipeError, match=r"`task\.reward_model` cannot be used: .* is no reward model") as caught:
        check(recipe(model, model))
    assert "those of Qwen3ForCausalLM" in str(caught.value)
