"""What a run exports, loaded by vLLM. Needs a GPU and vLLM, and is skipped without them."""

import os

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from stretto.models.lora_options import LoraOptions
from stretto.training.trainer import LocalTrainer, TrainingOptions

SHAPE = {
    "vocab_size": 64,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 256,
    "initializer_range": 0.1,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
PROMPT = [5 * i % 64 for i in range(40)]


def changed(trainer):
    """Give the weights in training values that a missing or wrong tensor would show in."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return trainer


def logprobs_in_transformers(folder):
    """Loads adapters too: such a folder names its base."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT])).logits[0]
    return logits.log_softmax(-1)[:-1].gather(1, torch.tensor(PROMPT[1:])[:, None])[:, 0]


def logprobs_in_vllm(vllm, model, adapter=None):
    lora = {"enable_lora": True, "max_lora_rank": 8} if adapter else {}
    engine = vllm.LLM(
        model=str(model),
        skip_tokenizer_init=True,
        dtype="float16",
        enforce_eager=True,
        max_model_len=128,
        gpu_memory_utilization=0.1,
        enable_prefix_caching=False,
        **lora,
    )
    request = None
    if adapter:
        from vllm.lora.request import LoRARequest

        request = LoRARequest("policy", 1, str(adapter))
    how = vllm.SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
    output = engine.generate([{"prompt_token_ids": PROMPT}], how, lora_request=request, use_tqdm=False)[0]
    found = [places[token].logprob for places, token in zip(output.prompt_logprobs[1:], PROMPT[1:], strict=True)]
    engine.llm_engine.engine_core.shutdown()
    return torch.tensor(found)


@pytest.fixture(scope="module")
def vllm():
    if not torch.cuda.is_available():
        pytest.skip("vLLM serves on a GPU")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
    return pytest.importorskip("vllm")


def test_vllm_loads_a_full_export_and_agrees_with_transformers(vllm, tmp_path):
    torch.manual_seed(0)
    trainer = changed(LocalTrainer(LlamaForCausalLM(LlamaConfig(**SHAPE)), options=TrainingOptions()))
    trainer.export(tmp_path)
    expected = logprobs_in_transformers(tmp_path)
    assert (logprobs_in_vllm(vllm, tmp_path) - expected).abs().max() < 0.05


def test_vllm_loads_an_exported_adapter_and_agrees_with_transformers(vllm, tmp_path):
    torch.manual_seed(0)
    base = LlamaForCausalLM(LlamaConfig(**SHAPE))
    base.save_pretrained(tmp_path / "base")
    before = logprobs_in_transformers(tmp_path / "base")
    trainer = changed(LocalTrainer(base, lora=LoraOptions(rank=8), base=str(tmp_path / "base")))
    trainer.export(tmp_path / "adapter")
    expected = logprobs_in_transformers(tmp_path / "adapter")
    assert (expected - before).abs().mean() > 0.3
    assert (logprobs_in_vllm(vllm, tmp_path / "base", tmp_path / "adapter") - expected).abs().max() < 0.05
