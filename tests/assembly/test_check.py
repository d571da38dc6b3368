"""`check` prints the values that follow from others, and what it prints is a recipe of the same run."""

from __future__ import annotations

import re
import tomllib
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
from engine_cases import SHAPE
from transformers import Gemma2Config, Gemma2ForCausalLM

from stretto.assembly.check import check, effective
from stretto.assembly.train import train
from stretto.errors import ModelError, RecipeError
from stretto.models.loading import load_config
from stretto.models.shapes import shape_folder
from stretto.models.tiny import tiny_config, tiny_tokenizer
from stretto.recipe.planned_devices import PlannedDevices
from stretto.recipe.reading import load_recipe

MODEL = {"path": "tiny", "lora": {"rank": 4}}
TASK = {"type": "countdown-chain"}
KL = {"coefficient": 0.1}


@pytest.mark.parametrize(
    ("tables", "key", "value"),
    [
        ({"algorithm": {"type": "dr-grpo"}, "rollout": {"max_tokens": 48}}, "algorithm.average_tokens", 48),
        ({"algorithm": {"type": "dr-grpo", "average_tokens": 7}}, "algorithm.average_tokens", 7),
        ({"algorithm": {"type": "grpo"}}, "algorithm.average_tokens", None),
        ({"algorithm": {"type": "grpo", "kl": KL}}, "algorithm.kl.estimator", "k2"),
        ({"algorithm": {"type": "grpo", "kl": KL | {"place": "reward"}}}, "algorithm.kl.estimator", "k1"),
        ({"algorithm": {"type": "grpo", "kl": KL | {"estimator": "k3"}}}, "algorithm.kl.estimator", "k3"),
        (
            {"algorithm": {"type": "grpo", "length": {"type": "overlong", "cache": 8}}, "rollout": {"max_tokens": 32}},
            "algorithm.length.max_tokens",
            32,
        ),
        ({"algorithm": {"type": "ppo", "critic": {"shared": True}}}, "algorithm.critic.coefficient", 0.5),
        ({"algorithm": {"type": "ppo"}}, "algorithm.critic.coefficient", None),
        ({"training": {"schedule": "linear", "warmup_steps": 3, "steps": 20}}, "training.schedule_start", 3),
        ({"training": {"schedule": "linear", "warmup_steps": 3, "steps": 20}}, "training.schedule_end", 20),
        ({"training": {"steps": 20}}, "training.schedule_end", None),
        ({"runtime": {"type": "ray", "device": "cpu"}}, "runtime.trainer_gpus", 0.0),
        ({"runtime": {"type": "ray", "device": "cuda"}}, "runtime.instance_gpus", 1.0),
        ({"runtime": {"device": "cpu"}}, "runtime.instance_gpus", None),
    ],
)
def test_check_prints_what_follows_from_other_values(tables: dict[str, Any], key: str, value: object) -> None:
    recipe = load_recipe({"model": MODEL, "task": TASK} | tables)
    printed = tomllib.loads(effective(recipe))
    assert reduce(lambda table, name: (table or {}).get(name), key.split("."), printed) == value
    again = load_recipe(printed)
    assert again.plan == recipe.plan
    assert tomllib.loads(effective(again)) == printed, "what it prints is a recipe that prints the same"


def test_a_plan_that_assumes_the_length_of_prompts_says_so_when_it_fails(tmp_path: Path) -> None:
    load_config(str(shape_folder("Qwen/Qwen3-8B"))).save_pretrained(tmp_path)
    recipe = load_recipe({"model": {"path": str(tmp_path), "lora": {"rank": 4}}, "task": TASK})
    with pytest.raises(
        RecipeError, match=r"tokenizer is not here, so a prompt counts as long as a completion, 256 tok"
    ):
        check(recipe, planned=PlannedDevices(1, 8.0))


@pytest.mark.parametrize("option", ["rollout.max_tokens", "evaluation.max_tokens"])
def test_a_completion_longer_than_the_context_is_refused_without_a_tokenizer(tmp_path: Path, option: str) -> None:
    load_config(str(shape_folder("Qwen/Qwen3-8B"))).save_pretrained(tmp_path)
    tables = {"model": {"path": str(tmp_path), "lora": {"rank": 4}}, "task": TASK}
    with pytest.raises(RecipeError, match=rf"`{option} = 50000` leaves no room for a prompt: .* is 40960 tokens"):
        check(load_recipe(tables, [f"{option}=50000"]), planned=PlannedDevices(8, 141.0))


def test_a_cluster_that_is_advised_instead_of_one_process_fits_with_the_options_that_are_named(tmp_path: Path) -> None:
    load_config(str(shape_folder("Qwen/Qwen3-8B"))).save_pretrained(tmp_path)
    tables = {
        "model": {"path": str(tmp_path), "lora": {"rank": 16}}, "task": TASK,
        "rollout": {"prompts": 64, "group": 8, "max_tokens": 1024},
    }  # fmt: skip
    devices = PlannedDevices(8, 32.0)
    with pytest.raises(RecipeError) as refused:
        check(load_recipe(tables), planned=devices)
    said = re.search(r"(\d) devices of 32 GiB would do, with (.*?`)\. The tokenizer", str(refused.value))
    assert said is not None, refused.value
    advised = re.findall(r"`([a-z_.]+ = [^`]+)`", said[2])
    assert 'runtime.type = "ray"' in advised
    with pytest.raises(RecipeError, match=r"a rank of the trainer.*together 62\.75 GiB"):
        check(load_recipe(tables, ['runtime.type = "ray"']), planned=devices)  # `auto` is more than in one process
    assert f"take {said[1]} of 8 devices" in check(load_recipe(tables, advised), planned=devices).memory


def test_more_versions_of_adapters_on_experts_than_cuda_has_groups_for_are_refused(tmp_path: Path) -> None:
    load_config(str(shape_folder("Qwen/Qwen3-30B-A3B"))).save_pretrained(tmp_path)

    def planned(staleness: int, *targets: str) -> str:
        model = {"path": str(tmp_path), "lora": {"rank": 4, "targets": list(targets)}}
        recipe = {
            "model": model, "task": TASK, "rollout": {"staleness": staleness}, "runtime": {"type": "ray"},
            "training": {"checkpointing": True},
        }  # fmt: skip
        return str(check(load_recipe(recipe), planned=PlannedDevices(8, 141.0)))

    assert "fits 8 x 141 GiB" in planned(6, "q_proj", "down_proj")
    assert "fits 8 x 141 GiB" in planned(7, "q_proj")
    with pytest.raises(ModelError, match=r"adapters on 128 experts in 8 version slots"):
        planned(7, "q_proj", "down_proj")


@pytest.mark.parametrize(
    ("runtime", "recorded"), [({}, 8192), ({"type": "ray"}, "auto"), ({"deterministic": True}, 2048)]
)
def test_the_size_of_a_prefill_is_chosen_and_said(tmp_path: Path, runtime: dict[str, Any], recorded: int | str) -> None:
    load_config(str(shape_folder("Qwen/Qwen3-8B"))).save_pretrained(tmp_path)
    recipe = load_recipe({"model": {"path": str(tmp_path), "lora": {"rank": 4}}, "task": TASK, "runtime": runtime})
    report = check(recipe, planned=PlannedDevices(2, 141.0))
    assert tomllib.loads(report.effective)["rollout"]["prefill_tokens"] == recorded
    size = 8192 if recorded == "auto" else recorded
    assert str(report).count(f"# `rollout.prefill_tokens = {size}` (auto): ") == 1


def test_a_size_of_a_prefill_that_is_named_is_kept_and_not_explained() -> None:
    recipe = load_recipe({"model": MODEL, "task": TASK, "rollout": {"prefill_tokens": 64}})
    report = check(recipe, planned=PlannedDevices(1, 24.0))
    assert report.recipe.rollout.prefill_tokens == 64
    assert "`rollout.prefill_tokens" not in str(report)


@pytest.mark.parametrize("engine", ["native", "vllm"])
def test_check_refuses_a_model_with_the_error_of_a_run(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stretto.assembly.check.installed_release", lambda: "0.32.0")
    folder = tmp_path / "gemma"
    config = Gemma2Config(**{**SHAPE, "vocab_size": tiny_config().vocab_size})
    Gemma2ForCausalLM(config).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    recipe = load_recipe(
        {"model": {"path": str(folder)}, "task": TASK, "engine": {"type": engine}},
        ['rollout.paradigm="synchronous"', "rollout.max_tokens=8", 'runtime.device="cpu"'],
    )
    said = f"^`model.path = {str(folder)!r}`: .*`Gemma2Attention` asks .* for `softcap`.*; choose another model$"
    with pytest.raises(ModelError, match=said) as checked:
        check(recipe)
    with pytest.raises(ModelError) as trained:
        train(recipe, tmp_path / "run")
    assert str(trained.value) == str(checked.value)
