"""`PlainDecoder` against the modules of transformers: values, gradients, compiled, checkpointed.

In float64 on a CPU; on a CUDA device in bfloat16, through flash attention and the compiler as it is used.
"""

import numpy as np
import pytest
import torch
from training_cases import random_batch, tiny
from transformers import MistralConfig, MistralForCausalLM, Qwen2Config, Qwen2ForCausalLM

from stretto.errors import ModelError
from stretto.models.loading import second_tree
from stretto.models.lora import LoraLinear, inject_lora
from stretto.models.packed_attention import layout_of, packed_attention
from stretto.training.forward import PackedModel
from stretto.training.packing import micro_batch
from stretto.training.trainer import LocalTrainer, LoraOptions, TrainingOptions

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def adapted(model, targets=()):
    names = inject_lora(model, 4, 12.0, targets)
    for place, name in enumerate(names):
        up = model.get_submodule(name).lora_B
        up.data = torch.randn(up.shape, generator=torch.Generator().manual_seed(place)).to(up) * 0.1
    return model


def results(
    model, *, plain, compiled=False, checkpointing=False, multiple=1, backend="aot_eager", samples=None, shares=False
):
    """Log-probabilities of a batch, and the gradients of everything that trains."""
    packed = PackedModel(model)
    packed.prepare(compiled=compiled, checkpointing=checkpointing, plain=plain, backend=backend)
    assert (packed.plain is not None) == plain
    samples = samples or random_batch().samples
    shape = {
        "flash": packed.flash,
        "shares_prompts": shares,
        "multiple": multiple,
        "dtype": torch.float64,
        "device": packed.head.weight.device,
    }
    micro = micro_batch(samples, range(12), np.zeros(12), np.zeros(12), **shape)
    got, _ = packed.logprobs(micro, 0.9)
    (got * torch.linspace(-1, 2, len(got), device=got.device)).sum().backward()
    return got.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def assert_same(one, other, tolerance=1e-9):
    assert torch.allclose(one[0], other[0], atol=tolerance)
    assert one[1].keys() == other[1].keys()
    for name, gradient in one[1].items():
        assert torch.allclose(gradient, other[1][name], atol=tolerance, rtol=1e-6), name


def with_biases(dtype):
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=23, intermediate_size=48, **shape)).to(dtype).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data.normal_()
    return model


MODELS = {
    "qwen3 in full": lambda: tiny("qwen3", torch.float64),
    "llama in full": lambda: tiny("llama", torch.float64),
    "qwen2 in full": lambda: with_biases(torch.float64),
    "qwen3 by lora": lambda: adapted(tiny("qwen3", torch.float64)),
    "qwen2 by lora": lambda: adapted(with_biases(torch.float64)),
    "some layers by lora": lambda: adapted(tiny("qwen3", torch.float64), ("q_proj", "v_proj", "down_proj")),
}


@pytest.mark.parametrize("kind", MODELS)
def test_values_and_gradients_are_those_of_the_stock_modules(kind):
    make = MODELS[kind]
    expected = results(make(), plain=False)
    for multiple in (1, 64):
        assert_same(results(make(), plain=True, multiple=multiple), expected)


@pytest.mark.parametrize(("kind", "checkpointing"), [("qwen3 in full", False), ("qwen3 by lora", True)])
def test_compiled_layers_give_the_same_numbers(kind, checkpointing):
    torch._dynamo.reset()
    make = MODELS[kind]
    assert_same(results(make(), plain=True, compiled=True, checkpointing=checkpointing), results(make(), plain=False))


@pytest.mark.parametrize("kind", ["qwen3 in full", "qwen2 by lora"])
@pytest.mark.parametrize("compiled", [False, True])
def test_shared_prompts_change_no_value_and_no_gradient(kind, compiled):
    torch._dynamo.reset()
    make, samples = MODELS[kind], random_batch(prompt_tokens=(20, 40)).samples
    shared = results(make(), plain=True, compiled=compiled, samples=samples, shares=True, multiple=8)
    # Norms are computed in float32 whatever the type, and gradients of a shared prompt are summed before them.
    assert_same(shared, results(make(), plain=False, samples=samples), tolerance=1e-5)


@pytest.mark.parametrize("plain", [False, True])
def test_checkpointing_changes_no_number(plain):
    make = MODELS["qwen3 by lora"]
    assert_same(results(make(), plain=plain, checkpointing=True), results(make(), plain=plain), tolerance=1e-12)


def test_batches_of_other_sizes_and_other_layers_do_not_compile_again():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = adapted(tiny("qwen3", torch.float64, num_hidden_layers=3))
    packed = PackedModel(model)
    packed.prepare(compiled=True, checkpointing=False, backend="aot_eager")
    counts = []
    for seed, (groups, prompts) in enumerate(((2, (1, 7)), (3, (1, 7)), (1, (1, 7)), (3, (20, 40)), (1, (17, 18)))):
        samples = random_batch(seed=seed, groups=groups, longest=40 * (seed + 1), prompt_tokens=prompts).samples
        nothing, shape = np.zeros(len(samples)), {"flash": True, "multiple": 8, "shares_prompts": True}
        micro = micro_batch(samples, range(len(samples)), nothing, nothing, dtype=torch.float64, **shape)
        packed.logprobs(micro, 1.0)[0].sum().backward()
        counts.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert counts[0] == 2  # the first layer's input needs no gradient, that of the others does
    assert counts[-1] == counts[0]


@pytest.mark.slow
def test_graphs_of_other_models_do_not_count_against_a_models_limit():
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=2):  # what one model needs
        for kind in ("qwen3 by lora", "qwen2 by lora", "some layers by lora"):
            assert_same(results(MODELS[kind](), plain=True, compiled=True), results(MODELS[kind](), plain=False))


def test_flash_layouts_give_the_attention_of_buckets():
    torch.manual_seed(0)
    lengths = np.array([3, 70, 1, 300, 64, 2])
    inputs = [torch.randn(1, heads, 440, 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)]
    upstream = torch.randn(1, 440, 4, 8, dtype=torch.float64)
    outputs = []
    for flash in (False, True):
        layout = layout_of(lengths, flash=flash)
        out, _ = packed_attention(torch.nn.Module(), *inputs, None, packed_layout=layout)
        outputs.append((out, *torch.autograd.grad(out, inputs, upstream)))
    for one, other in zip(*outputs, strict=True):
        assert torch.allclose(one, other, atol=1e-12)


def test_a_model_that_does_not_fit_is_refused_if_it_is_to_be_compiled():
    shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    windowed = MistralForCausalLM(MistralConfig(vocab_size=23, intermediate_size=32, sliding_window=64, **shape)).eval()
    with pytest.raises(ModelError, match=r"`training\.compile = true`"):
        LocalTrainer(windowed, options=TrainingOptions(compile=True))


def test_an_update_through_the_plain_decoder_is_that_of_the_stock_modules():
    base = tiny(dtype=torch.float64)
    steps = []
    for plain in (False, True):
        trainer = LocalTrainer(
            second_tree(base, share=True), lora=LoraOptions(rank=4), options=TrainingOptions(learning_rate=0.01)
        )
        if plain:
            trainer.packed.prepare(compiled=False, checkpointing=False, plain=True)
        for update in range(3):  # adapters move, and their copies in the type of the base must follow
            report = trainer.update(random_batch(update))
        steps.append((report.metrics["loss"], trainer.weights(3).tensors))
    assert steps[0][0] == pytest.approx(steps[1][0], rel=1e-9)
    for name, tensor in steps[0][1].items():
        assert torch.allclose(tensor, steps[1][1][name], atol=1e-9)
    assert isinstance(trainer.model.get_submodule("model.layers.0.mlp.up_proj"), LoraLinear)


@needs_cuda
@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("checkpointing", "shares"), [(False, True), (False, False), (True, True)])
@pytest.mark.parametrize(("half", "tolerance"), [(torch.bfloat16, 0.1), (torch.float16, 0.02)])
def test_on_cuda_half_precision_follows_float32_on_the_processor(
    lora, compiled, checkpointing, shares, half, tolerance
):
    def make(dtype, device):
        model = tiny(dtype=dtype, hidden_size=64, head_dim=64, intermediate_size=96, initializer_range=0.1)
        return (adapted(model) if lora else model).to(device)

    samples = random_batch(prompt_tokens=(20, 40)).samples
    expected, gradients = results(make(torch.float32, "cpu"), plain=False, samples=samples)
    got, ours = results(
        make(half, "cuda"),
        plain=True, compiled=compiled, checkpointing=checkpointing, multiple=128, backend="inductor",
        samples=samples, shares=shares,
    )  # fmt: skip
    assert (got.cpu() - expected).abs().max() < tolerance
    assert gradients.keys() == ours.keys()
    for name, gradient in gradients.items():
        difference = (ours[name].cpu().float() - gradient).norm() / gradient.norm()
        assert difference < tolerance, name
