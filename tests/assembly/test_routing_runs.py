"""Whole runs of a mixture of experts: routing is recorded, replayed, resumed from and forgotten."""

from __future__ import annotations

import contextlib
import sqlite3
from functools import partial
from pathlib import Path

import pytest
import torch
from run_cases import recipe, run
from transformers import AutoModelForCausalLM

from stretto.assembly.check import describe_routing
from stretto.assembly.policy_export import export
from stretto.assembly.recompute import recompute
from stretto.assembly.retrain import retrain
from stretto.errors import RecipeError, TrainerError
from stretto.models.adapters import read_adapter
from stretto.models.tiny import WarmStart, tiny_config, tiny_model, tiny_moe_config
from stretto.store.reader import JournalReader
from stretto.store.schema import JOURNAL_NAME
from stretto.store.verify import conclusion, exit_code, verify

SHORT = ("rollout.staleness=2", "rollout.max_tokens=16", "evaluation.prompts=0")


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny-moe"
    return tiny_model(folder, warm_start=WarmStart(steps=2), mixture=True)


@pytest.mark.parametrize("lora", [True, False])
def test_a_run_that_keeps_its_records_is_extended_and_trained_again_to_the_same_bits(
    mixture: Path, tmp_path: Path, lora: bool
) -> None:
    folder = tmp_path / "run"
    made = recipe(mixture, tmp_path, *SHORT, "training.steps=2", "training.keep_routing=true", lora=lora)
    run(made, folder)
    longer = recipe(mixture, tmp_path, *SHORT, "training.steps=3", "training.keep_routing=true", lora=lora)
    run(longer, folder, resume=True)
    with JournalReader(folder) as reader:
        batches = [reader.batch(update) for update in range(3)]
        assert "expert_entropy" in reader.update_metrics(2)
    for sample in (sample for batch in batches for sample in batch):
        assert sample.completion.routing is not None
        assert sample.completion.routing.shape == (len(sample.prompt) + len(sample.completion.tokens) - 1, 2, 2)
    assert exit_code(verify(folder)) == 0
    assert conclusion(verify(folder)).endswith("`verify --recompute N` (log-probabilities)")
    assert retrain(folder).difference is None


def test_a_run_with_adapters_on_experts_is_trained_again_to_the_same_bits_and_its_policy_merges(
    mixture: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    targets = 'model.lora.targets=["q_proj", "gate_up_proj", "down_proj"]'
    made = recipe(mixture, tmp_path, *SHORT, targets, "training.steps=2", "training.keep_routing=true", lora=True)
    run(made, folder)
    assert exit_code(verify(folder)) == 0
    assert retrain(folder).difference is None
    adapter = read_adapter(folder)
    assert adapter.config.parameters == ("down_proj", "gate_up_proj")
    moved = [name for name in adapter.tensors if name.endswith("down_proj_adapter.lora_B")]
    assert len(moved) == 2
    assert all(adapter.tensors[name].any() for name in moved), "experts were trained"
    export(folder, tmp_path / "merged", merge=True, say=lambda text: None)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    base = AutoModelForCausalLM.from_pretrained(mixture)
    changed = {name for name, p in loaded.named_parameters() if not torch.equal(p, base.get_parameter(name))}
    assert "model.layers.1.mlp.experts.down_proj" in changed
    assert not any("k_proj" in name for name in changed)


def test_records_are_forgotten_with_the_last_checkpoint_and_a_replay_says_so(mixture: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run(recipe(mixture, tmp_path, *SHORT, "training.steps=2"), folder)
    with JournalReader(folder) as reader:
        trained = reader.trained()
    left = {int(path.name.split("-")[0]) for path in (folder / "routing").rglob("*.bin")}
    assert not left & set(trained)
    findings = verify(folder)
    assert exit_code(findings) == 0
    said = conclusion(findings)
    assert "cannot be found: `stretto replay` and `verify --recompute N` need the records of routing" in said
    assert f"those of {len(trained)} trained samples are deleted" in said
    for again in (retrain, partial(recompute, count=4)):
        with pytest.raises(TrainerError, match=r"no record of its routing.*`training\.keep_routing = true`"):
            again(folder)


def test_a_run_with_free_routing_records_nothing(mixture: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run(recipe(mixture, tmp_path, *SHORT, "training.steps=2", 'training.routing="free"'), folder)
    assert not (folder / "routing").exists()
    with JournalReader(folder) as reader:
        assert 0 < reader.update_metrics(1)["expert_entropy"] <= 1, "by the trainer's own forward"
    assert conclusion(verify(folder)).endswith("`verify --recompute N` (log-probabilities)")
    assert retrain(folder).difference is None
    assert recompute(folder, 4).breaks == []
    with contextlib.closing(sqlite3.connect(folder / JOURNAL_NAME)) as db, db:
        db.execute("UPDATE completions SET logprobs = zeroblob(length(logprobs))")
    broken = recompute(folder, 4).breaks
    assert len(broken) == 4
    assert all("near a tie another expert" in each for each in broken)


def test_check_states_the_size_of_records_and_refuses_an_option_without_effect(mixture: Path, tmp_path: Path) -> None:
    made = recipe(mixture, tmp_path, *SHORT)
    (line,) = describe_routing(made, tiny_moe_config(), 10)
    assert line.startswith("routing is replayed: 4 bytes a token (2 layers, 2 of 8 experts), at most")
    assert describe_routing(made, tiny_config(), 10) == []
    with pytest.raises(RecipeError, match="is for mixtures of experts"):
        describe_routing(recipe(mixture, tmp_path, *SHORT, 'training.routing="replay"'), tiny_config(), 10)
