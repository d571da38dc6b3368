"""The recipes of GSM8K: two updates with random weights of Qwen2's shape, and with real models where they are."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from run_cases import assert_verifies, run
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

from examples import gsm8k
from stretto.recipe.reading import load_recipe
from stretto.recipe.schema import Recipe

ROOT = Path(__file__).parents[2]
RECIPES = ("gsm8k", "gsm8k-small")
SMALL = (
    "rollout.prompts=2",
    "rollout.group=2",
    "training.steps=2",
    "training.micro_tokens=2048",
    "evaluation.prompts=2",
    "evaluation.every=",
    'runtime.device="cpu"',
    "runtime.engine_threads=1",
    "runtime.trainer_threads=1",
)


@pytest.fixture
def problems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working directory with a few problems, prepared as a user would, and the repository's examples."""
    published = tmp_path / "published"
    published.mkdir()
    for split in ("train", "test"):
        rows = [{"question": f"What is {n} plus {n}?", "answer": f"It is {2 * n}.\n#### {2 * n}"} for n in range(8)]
        (published / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    assert gsm8k.main(["--from", str(published)]) == 0


def recipe(name: str, model: Path, *changes: str) -> Recipe:
    return load_recipe(ROOT / "recipes" / f"{name}.toml", (*SMALL, f'model.path="{model}"', *changes))


def assert_trains(made: Recipe, folder: Path) -> None:
    summary = run(made, folder)
    assert (summary["steps"], summary["trained_trajectories"]) == (2, 8)
    assert [each["greedy"]["num_scored"] for each in summary["evaluations"]] == [2, 2]
    assert_verifies(folder)


@pytest.mark.parametrize("name", RECIPES)
def test_a_random_model_of_the_same_family_makes_two_updates(
    name: str, problems: None, model: Path, tmp_path: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = Qwen2Config(**shape, num_key_value_heads=2, vocab_size=len(tokenizer), tie_word_embeddings=True)
    torch.manual_seed(0)
    Qwen2ForCausalLM(config).save_pretrained(tmp_path / "qwen2")
    tokenizer.save_pretrained(tmp_path / "qwen2")
    assert_trains(recipe(name, tmp_path / "qwen2", "rollout.max_tokens=6", "evaluation.max_tokens=6"), tmp_path / "run")


@pytest.mark.parametrize("folder", ["smollm2-135m", "qwen2.5-coder-0.5b"])
def test_a_real_model_makes_two_updates(folder: str, problems: None, tmp_path: Path) -> None:
    models = os.environ.get("STRETTO_MODELS")
    if models is None:
        pytest.skip("`make test-models` gives the folder of real models")
    made = recipe("gsm8k-small", ROOT / models / folder, "rollout.max_tokens=32", "evaluation.max_tokens=32")
    assert_trains(made, tmp_path / "run")


TEMPLATE = (  # the tiny model's own template shows no tools
    "{% for tool in tools or [] %}{{ tool['function']['name'] }}\n{% endfor %}"
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def test_a_random_model_with_a_python_tool_makes_two_updates(problems: None, model: Path, tmp_path: Path) -> None:
    template = f"task.chat_template={json.dumps(TEMPLATE)}"
    made = recipe("gsm8k-python", model, "model.lora={rank = 4}", "rollout.max_tokens=280", template)
    summary = run(made, tmp_path / "run")
    assert (summary["steps"], summary["trained_trajectories"]) == (2, 8)
    assert_verifies(tmp_path / "run")
