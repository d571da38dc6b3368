"""Judges and reward models as workers make them: their devices, their deadlines, their part of the memory plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForSequenceClassification

from stretto.environments.reward_calls import RewardSpec
from stretto.environments.rewards.reward_model_options import RewardModelOptions
from stretto.environments.tasks import Task
from stretto.errors import RecipeError
from stretto.models.tiny import tiny_tokenizer
from stretto.recipe.reading import parse_recipe
from stretto.recipe.schema import Recipe
from stretto.setup import scorers
from stretto.setup.device import with_section
from stretto.setup.inputs import passed_variables
from stretto.setup.reward_model_memory import process_bytes, reward_model_footprint, reward_model_sizes

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def recipe(runtime: dict[str, Any] | None = None, **options: Any) -> Recipe:
    return parse_recipe(
        {
            "model": {"path": "tiny"},
            "task": {"type": "file", "path": "x.jsonl", "reward_model": {"path": "somewhere", **options}},
            "runtime": runtime or {},
        }
    )


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Any:
    def pretend(count: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)

    return pretend


def _device(made: Recipe) -> str:
    return str(scorers.reward_model_device(made, made.task.reward_model))  # type: ignore[union-attr]


def shares(made: Recipe, device: torch.device) -> bool:
    (options,) = scorers.scorers_of(made.task).values()
    assert isinstance(options, RewardModelOptions)
    return scorers.shares_device(made, options, device)


def test_auto_is_a_gpu_that_the_run_does_not_use(gpus: Any) -> None:
    gpus(0)
    assert _device(recipe()) == "cpu"
    gpus(1)
    assert _device(recipe()) == "cuda:0"
    assert shares(recipe(), CUDA)
    gpus(2)
    assert _device(recipe()) == "cuda:1"
    assert not shares(recipe(), CUDA)
    assert shares(recipe(device="cuda:0"), CUDA)
    assert _device(recipe({"device": "cpu"})) == "cpu"
    assert _device(recipe({"type": "ray"})) == "cpu"
    assert _device(recipe({"type": "ray"}, device="cuda:1")) == "cuda:0"  # Ray shows a process one GPU
    assert _device(recipe(device="cpu")) == "cpu"
    assert not shares(recipe(device="cpu"), CPU)


def test_a_gpu_that_is_not_there_is_refused(gpus: Any) -> None:
    gpus(1)
    with pytest.raises(RecipeError, match=r"`task\.reward_model\.device = 'cuda:1'`, but torch sees 1 GPUs"):
        _device(recipe(device="cuda:1"))


def test_a_reward_model_on_the_device_of_the_run_is_part_of_the_memory_plan(gpus: Any, tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_labels=1
    )
    model = LlamaForSequenceClassification(config)
    model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    options = RewardModelOptions(path=str(tmp_path), dtype="float32", batch_tokens=1_024, max_tokens=512)
    weights = sum(parameter.numel() for parameter in model.parameters()) * 4
    found = process_bytes(options, CUDA)
    assert weights < found - int(0.6 * (1 << 30)) < weights + 1_024 * 32 * 64 * 4
    made = recipe(path=str(tmp_path))
    gpus(1)
    sizes = reward_model_sizes(made, CUDA)
    assert reward_model_footprint(made, sizes, CUDA) > found / 2
    assert reward_model_footprint(with_section(made, "runtime", type="ray"), sizes, CUDA) == 0, "it has its own device"
    gpus(2)
    assert reward_model_sizes(made, CUDA) == ()


def test_the_scorers_of_one_of_several_tasks_are_named_with_its_label(monkeypatch: pytest.MonkeyPatch) -> None:
    judge = {"address": "http://host/v1", "model": "m", "prompt": "?", "scale": [0, 1], "api_key_env": "NO_SUCH_KEY"}
    rows, second = {"type": "file", "path": "x.jsonl"}, [{"function": "a:b"}, {"judge": judge, "name": "kind"}]
    made = parse_recipe(
        {
            "model": {"path": "tiny"},
            "task": [{**rows, "label": "first", "judge": judge}, {**rows, "label": "second", "rewards": second}],
        }
    )
    for part, option in zip(made.parts, ("task.first.judge", "task.second.rewards.kind.judge"), strict=True):
        with pytest.raises(RecipeError, match=rf"`{option}\.api_key_env` names `NO_SUCH_KEY`"):
            passed_variables(part)
    monkeypatch.setenv("NO_SUCH_KEY", "a key")
    task = Task("rows", [], [], None, several=(RewardSpec("kind", scorers.SCORERS["judge"]),))
    (spec,) = scorers.reward_specs(made.parts[1], task)
    assert spec.built is not None
    assert spec.built.option == "task.second.rewards.kind.judge"
    assert spec.shown == "`task.second.rewards.kind.judge`"


def test_loading_has_a_deadline_of_its_own(gpus: Any) -> None:
    gpus(0)
    made = recipe(seconds=7.0, load_seconds=900.0, threads=2)
    (spec,) = scorers.reward_specs(made.parts[0], Task("rows", [], [], scorers.SCORERS["reward_model"]))
    built = spec.built
    assert built is not None
    assert (built.deadline_s, built.start_s, built.gpus) == (7.0, 900.0, 0.0)
    assert built.environment == {"OMP_NUM_THREADS": "2"}
    plain = parse_recipe({"model": {"path": "tiny"}, "task": {"type": "countdown-chain"}})
    (spec,) = scorers.reward_specs(plain.parts[0], Task("rows", [], [], "a:b"))
    assert spec.built is None
