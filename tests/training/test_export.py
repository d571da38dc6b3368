import json

import peft
import pytest
import torch
from training_cases import random_batch, tiny
from transformers import AutoModelForCausalLM

from stretto.models.loading import load_model, second_tree
from stretto.training.trainer import LocalTrainer, LoraOptions, TrainingOptions

TOKENS = torch.arange(30)[None] % 23


def trained(model, lora, base):
    trainer = LocalTrainer(model, lora=lora, options=TrainingOptions(learning_rate=3e-2), base=base)
    for update in range(3):
        trainer.update(random_batch(update, seed=update))
    return trainer


def own_logits(trainer):
    tree = second_tree(trainer.model, share=True)
    tree.config._attn_implementation = "sdpa"
    with torch.no_grad():
        return tree(TOKENS).logits


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_a_full_export_is_a_model_folder_that_transformers_loads(kind, tmp_path):
    trainer = trained(tiny(kind), None, None)
    trainer.export(tmp_path)
    loaded = load_model(str(tmp_path), torch.float32, torch.device("cpu"))
    assert torch.allclose(loaded(TOKENS).logits, own_logits(trainer), atol=1e-5)
    assert loaded.config._attn_implementation == "sdpa"
    trainer.update(random_batch(3))  # exporting does not disturb training


@pytest.mark.parametrize("targets", [(), ("q_proj", "layers.1.mlp.down_proj")])
def test_a_lora_export_is_an_adapter_folder_that_peft_and_transformers_load(targets, tmp_path):
    base = tiny("llama")
    base.save_pretrained(tmp_path / "base")
    trainer = trained(base, LoraOptions(rank=4, alpha=6.0, targets=targets), str(tmp_path / "base"))
    trainer.export(tmp_path / "adapter")
    expected = own_logits(trainer)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    assert not torch.allclose(plain(TOKENS).logits, expected, atol=1e-2)
    wrapped = peft.PeftModel.from_pretrained(plain, tmp_path / "adapter")
    assert torch.allclose(wrapped(TOKENS).logits, expected, atol=1e-5)
    # The adapter folder names its base, so that it can be loaded as if it were the model.
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "adapter")
    assert torch.allclose(loaded(TOKENS).logits, expected, atol=1e-5)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["lora_alpha"] == 6


def test_the_tokenizer_is_exported_beside_the_model(tmp_path):
    class Tokenizer:
        def save_pretrained(self, folder):
            (folder / "tokenizer.json").write_text("{}")

    trainer = LocalTrainer(tiny(), lora=LoraOptions(rank=2), tokenizer=Tokenizer())
    trainer.export(tmp_path)
    assert (tmp_path / "tokenizer.json").exists()
    assert (tmp_path / "adapter_model.safetensors").exists()
