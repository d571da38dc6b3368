"""Float32 sums of half-precision factors: products into the residual stream, logits, and the precision gained."""

from typing import Any

import numpy as np
import pytest
import torch
from kernel_references import REFERENCE, dense_attention
from training_cases import tiny

from stretto.engines.native.cache import KVCache
from stretto.engines.native.fused import FusedDecoder
from stretto.models import float32_products as wide_products
from stretto.models.adapted_linear import adapted_wide
from stretto.models.float32_products import wide_linear, wide_mm
from stretto.models.loading import second_tree
from stretto.models.lora import inject_lora
from stretto.models.packed_attention import layout_of
from stretto.training.forward import PackedModel
from stretto.training.logprobs import token_logprobs


def draw(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64).to(
        dtype
    )


@pytest.mark.parametrize("block", [3, 4_096])
def test_a_product_of_half_precision_is_not_rounded(block, monkeypatch):
    monkeypatch.setattr(wide_products, "BLOCK", block)
    x, factor, bias = draw(5, 40, dtype=torch.bfloat16), draw(40, 7, dtype=torch.bfloat16), draw(7).bfloat16()
    exact = x.double() @ factor.double() + bias.double()
    got = wide_mm(x, factor, bias)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), exact, atol=1e-5, rtol=1e-6)
    assert (torch.addmm(bias, x, factor).double() - exact).abs().max() > 1e-3


def test_wide_linear_and_adapted_wide_pass_gradcheck():
    x, weight, down, up = (draw(*shape).requires_grad_() for shape in ((7, 6), (5, 6), (2, 6), (5, 2)))
    assert torch.autograd.gradcheck(wide_linear, (x, weight))

    def adapted(x: torch.Tensor, down: torch.Tensor, up: torch.Tensor) -> Any:
        return adapted_wide(x, weight.detach(), down, up, down.detach(), up.detach(), 0.7)[:2]

    base, added = adapted(x, down, up)
    assert torch.allclose(base, x @ weight.t())
    assert torch.allclose(added, 0.7 * x @ down.t() @ up.t())
    assert torch.autograd.gradcheck(adapted, (x, down, up))


def random_model(dtype: torch.dtype, *, lora: bool = False) -> Any:
    model = tiny(dtype=torch.float32, hidden_size=64, head_dim=16, intermediate_size=96, num_hidden_layers=8,
                 initializer_range=0.2, vocab_size=200)  # fmt: skip
    model = model.to(torch.bfloat16).to(dtype)  # the same values in every type
    if lora:
        for place, name in enumerate(inject_lora(model, 4, 12.0)):
            up = model.get_submodule(name).lora_B
            up.data = (draw(*up.shape, seed=place) * 0.1).to(torch.bfloat16).to(up)
            down = model.get_submodule(name).lora_A
            down.data = down.data.to(torch.bfloat16).to(down)
    return model


IDS = torch.randint(0, 200, (60,), generator=torch.Generator().manual_seed(3))


def scored(model: Any, *, plain: bool, compiled: bool = False) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    packed = PackedModel(model)
    packed.prepare(compiled=compiled, checkpointing=False, plain=plain, backend="aot_eager")
    count = len(IDS) - 1
    hidden = packed.hidden(IDS[:-1], torch.arange(count), layout_of(np.array([count]), flash=packed.flash))
    got, _ = token_logprobs(hidden, packed.head.weight, torch.arange(count), IDS[1:])
    got.mean().backward()
    return got.detach().double(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


# In float16 the stream is rounded less coarsely, and there is less to win.
@pytest.mark.parametrize(
    ("half", "lora", "share"), [(torch.bfloat16, False, 0.75), (torch.bfloat16, True, 0.75), (torch.float16, True, 0.9)]
)
def test_the_plain_decoder_in_half_precision_is_nearer_to_the_truth_than_the_stock_modules(half, lora, share):
    torch._dynamo.reset()
    truth, gradients = scored(random_model(torch.float32, lora=lora), plain=True)
    stock, _ = scored(random_model(half, lora=lora), plain=False)
    ours, our_gradients = scored(random_model(half, lora=lora), plain=True)
    compiled, compiled_gradients = scored(random_model(half, lora=lora), plain=True, compiled=True)
    assert (ours - truth).abs().mean() < share * (stock - truth).abs().mean()
    torch.testing.assert_close(compiled, ours, atol=0.05, rtol=0.02)
    assert gradients.keys() == our_gradients.keys() == compiled_gradients.keys()
    for name, gradient in gradients.items():
        for found in (our_gradients[name], compiled_gradients[name]):
            assert (found.float() - gradient).norm() < 0.1 * gradient.norm(), name


def engine_and_trainer(dtype):
    """What the engine, the trainer and the stock modules say of the same tokens, in this type."""
    model = random_model(dtype)
    ours, _ = scored(second_tree(model, share=True), plain=True)
    config, count = model.config, len(IDS) - 1
    shape = (config.num_hidden_layers, config.num_key_value_heads, config.head_dim)
    cache = KVCache(*shape, 8, dtype, torch.device("cpu"))
    engine = FusedDecoder(model, cache, config.num_attention_heads, REFERENCE, 128)
    places = torch.arange(count)

    def attend(layer: int, q: torch.Tensor, out: torch.Tensor, scale: float) -> torch.Tensor:
        keys, values = cache.of_layer[layer]
        return out.copy_(dense_attention(q, keys[:count], values[:count], scale))

    with torch.no_grad():
        logits = engine(IDS[:-1], places, places, torch.zeros_like(places), attend, None)
        stock = model(input_ids=IDS[None, :-1], use_cache=False).logits[0]
    theirs = logits.log_softmax(-1).gather(1, IDS[1:, None])[:, 0].double()
    rounded = stock.float().log_softmax(-1).gather(1, IDS[1:, None])[:, 0].double()
    return theirs, ours, rounded


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_engine_and_trainer_differ_by_less_than_a_rounded_stream_would_make_them(half):
    theirs, ours, rounded = engine_and_trainer(half)
    assert (theirs - ours).abs().mean() < 0.5 * (theirs - rounded).abs().mean()


def test_engine_and_trainer_in_float16_are_nearer_to_float32_by_its_three_bits():
    truths = engine_and_trainer(torch.float32)
    apart = {}
    for half in (torch.bfloat16, torch.float16):
        found = engine_and_trainer(half)
        apart[half] = [float((ours - truth).abs().mean()) for ours, truth in zip(found, truths, strict=True)]
    for side in (0, 1):
        assert apart[torch.float16][side] < apart[torch.bfloat16][side] / 4
