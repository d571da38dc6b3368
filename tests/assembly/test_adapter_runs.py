"""Runs that start from the adapter of another run: trained further, or merged into its base first."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
import torch
from interruption_cases import Dies
from run_cases import assert_verifies, policy, recipe, rows, run
from safetensors.torch import load_file, save_file

from stretto.assembly.recompute import recompute
from stretto.assembly.retrain import retrain
from stretto.assembly.serve import PolicyFolder, ServeOptions, load
from stretto.errors import ModelError, RecipeError, RunError
from stretto.models.loading import load_model
from stretto.models.tiny import WarmStart, tiny_model

CPU = torch.device("cpu")
FIRST, LAST = "SELECT checksum FROM versions WHERE version = 0", "SELECT checksum FROM versions ORDER BY version DESC"
KL = 'algorithm.kl={coefficient=0.1, place="loss"}'
QUIET = "evaluation.prompts=0"


@pytest.fixture
def old(model: Path, tmp_path: Path) -> Path:
    run(recipe(model, tmp_path, QUIET, "training.steps=2"), tmp_path / "old")
    return tmp_path / "old"


def test_an_adapter_is_trained_further_and_the_run_verifies_replays_and_is_served(
    model: Path, tmp_path: Path, old: Path
) -> None:
    folder = tmp_path / "new"
    made = recipe(model, tmp_path, QUIET, f'model.adapter="{old}/policy"', KL, lora=False)
    assert made.model.lora is not None
    assert made.model.lora.rank == 4
    run(made, folder)
    assert rows(folder, FIRST)[0] == rows(old, LAST)[0], "version 0 is the last version of the run before"
    assert_verifies(folder)
    (first,) = rows(folder, "SELECT json_extract(metrics, '$.reference_kl') FROM updates WHERE update_id = 0")[0]
    assert abs(first) < 1e-6, "the reference of the divergence is the policy that the run starts from"
    assert retrain(folder).difference is None
    assert not recompute(folder, 4).breaks
    engine, _, _ = asyncio.run(load(PolicyFolder.find(folder), ServeOptions(device="cpu", rows=1)))
    assert engine.capacity.slots == 1
    asyncio.run(engine.close())


def test_a_run_of_a_continued_adapter_goes_on_and_is_refused_if_the_adapter_has_changed(
    model: Path, tmp_path: Path, old: Path
) -> None:
    folder, made = tmp_path / "new", recipe(model, tmp_path, QUIET, f'model.adapter="{old}"', lora=False)
    with pytest.raises(KeyError):
        run(made, folder, observer=Dies(at=0))
    path = old / "policy" / "adapter_model.safetensors"
    whole = path.read_bytes()
    save_file({name: tensor * 2 for name, tensor in load_file(path).items()}, path)
    with pytest.raises(RunError, match=r"`model\.adapter = .* is not the adapter that the run began with: version 0"):
        run(made, folder, resume=True)
    path.write_bytes(whole)
    assert run(made, folder, resume=True)["steps"] == 3
    assert_verifies(folder)


@pytest.mark.parametrize("lora", [True, False])
def test_a_merged_adapter_is_the_base_of_a_new_run(
    model: Path, tmp_path: Path, old: Path, lora: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with torch.no_grad():  # so that the adapter is seen
        path = old / "policy" / "adapter_model.safetensors"
        save_file({name: tensor + 0.02 for name, tensor in load_file(path).items()}, path)
    folder = tmp_path / "new"
    merging = f'model.adapter="{old}"', "model.merge_adapter=true"
    run(recipe(model, tmp_path, QUIET, "training.learning_rate=1e-12", *merging, lora=lora), folder)
    assert_verifies(folder)
    assert retrain(folder).difference is None
    (merged,) = (tmp_path / "cache" / "stretto").iterdir()
    weights = dict(load_model(str(merged), torch.float32, CPU).named_parameters())
    name = next(name for name in weights if name.endswith("q_proj.weight"))
    own = dict(load_model(str(model), torch.float32, CPU).named_parameters())[name]
    tensors = load_file(path)
    down, up = (
        tensors[f"base_model.model.{name.removesuffix('.weight')}.{leaf}.weight"] for leaf in ("lora_A", "lora_B")
    )
    assert torch.allclose(weights[name], own + 2.0 * up @ down, atol=1e-6)
    if lora:
        config = json.loads((folder / "policy" / "adapter_config.json").read_text())
        assert config["base_model_name_or_path"] == str(folder / "policy" / "base")
        based = dict(load_model(str(folder / "policy" / "base"), torch.float32, CPU).named_parameters())
        assert torch.equal(based[name], weights[name])
    else:
        assert torch.allclose(policy(folder)[name], weights[name], atol=1e-6)


def test_an_adapter_of_another_base_is_refused_and_nothing_is_written(
    model: Path, tmp_path: Path, old: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    other = tiny_model(tmp_path / "other", seed=3, warm_start=WarmStart(steps=0))
    for more in ([], ["model.merge_adapter=true"]):
        made = recipe(other, tmp_path, QUIET, f'model.adapter="{old}"', *more, lora=False)
        with pytest.raises(ModelError, match=rf"is of another base than `model\.path = '{other}'`: it was trained on"):
            run(made, tmp_path / "new")
        assert not (tmp_path / "new").exists()
    with pytest.raises(RecipeError, match=r"`model\.lora\.rank = 8`, and the adapter in .* has 4"):
        recipe(model, tmp_path, f'model.adapter="{old}"', "model.lora.rank=8")
    with pytest.raises(RecipeError, match=r"`model\.merge_adapter = true` has no effect without `model\.adapter`"):
        recipe(model, tmp_path, "model.merge_adapter=true")
    with pytest.raises(RecipeError, match=r"holds no adapter: there is no .*; it holds a whole model"):
        recipe(model, tmp_path, f'model.adapter="{model}"', lora=False)
