"""The fused kernels of a decoder layer against their twins in plain torch; on the CPU by Triton's interpreter."""

from __future__ import annotations

from typing import Any

import kernel_references
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from stretto.engines.native.kernels import layers

pytestmark = pytest.mark.usefixtures("interpreted")

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
on_the_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels are compiled here")
SETTINGS = [
    pytest.param("cpu", torch.float32, marks=on_the_cpu, id="cpu-float32"),
    pytest.param("cpu", torch.float16, marks=on_the_cpu, id="cpu-float16"),
    pytest.param("cuda", torch.float32, marks=needs_cuda, id="cuda-float32"),
    pytest.param("cuda", torch.bfloat16, marks=needs_cuda, id="cuda-bfloat16"),
    pytest.param("cuda", torch.float16, marks=needs_cuda, id="cuda-float16"),
]
everywhere = pytest.mark.parametrize(("device", "dtype"), SETTINGS)
EPSILON, SCALE = 1e-6, 0.75


def random(*shape: int, device: str, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + 31 * sum(shape))
    return torch.randn(*shape, generator=generator).to(device, dtype)


def factor(num_slots: int, rank: int, out: int, seed: int = 0, **like: Any) -> Tensor:
    """A `b` whose products are of the order of one."""
    return random(num_slots * rank, out, seed=seed, **like) / rank**0.5


def chosen(tokens: int, num_slots: int, device: str) -> Tensor:
    return torch.randint(num_slots, (tokens,), generator=torch.Generator().manual_seed(tokens)).to(device)


def close(ours: Tensor, theirs: Tensor) -> None:
    # One rounding step of the dtype, where another order of a sum falls on the other side of it.
    step = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[ours.dtype]
    torch.testing.assert_close(ours, theirs, rtol=step, atol=step, equal_nan=True)


ADD_NORM = [  # tokens, hidden, slots, rank; no slots: no adapters
    (1, 8, 0, 1),
    (3, 36, 0, 4),
    (1, 36, 1, 1),
    (5, 72, 3, 3),
    (4, 576, 2, 16),
    (2, 100, 2, 128),
]


@everywhere
@pytest.mark.parametrize(("tokens", "hidden", "num_slots", "rank"), ADD_NORM)
def test_the_residual_gets_its_adapters_and_is_normalized(
    tokens: int,
    hidden: int,
    num_slots: int,
    rank: int,
    device: str,
    dtype: torch.dtype,
) -> None:
    like: Any = {"device": device, "dtype": dtype}
    wide: Any = {"device": device, "dtype": torch.float32}
    stream, added = random(tokens, hidden, **wide), random(tokens, hidden + num_slots * rank, seed=1, **wide)
    b = factor(num_slots, rank, hidden, **like) if num_slots else None
    weight, slots = random(hidden, **like), chosen(tokens, max(num_slots, 1), device)
    twin, results = stream.clone(), [torch.full((tokens, hidden), torch.nan, **like) for _ in range(2)]
    for product in (None, added):
        layers.add_norm(stream, product, weight, EPSILON, slots, b, rank, SCALE, results[0])
        kernel_references.add_norm(twin, product, weight, EPSILON, slots, b, rank, SCALE, results[1])
        close(stream, twin)
        close(*results)


SHAPES = [  # tokens, heads, kv heads, size, slots, rank, normalized
    (1, 2, 1, 8, 0, 1, True),
    (3, 4, 2, 16, 2, 4, True),
    (17, 3, 1, 12, 3, 5, False),
    (2, 2, 2, 96, 1, 128, False),
    (5, 4, 1, 128, 3, 16, True),
]


def head_inputs(
    tokens: int, heads: int, kv_heads: int, size: int, num_slots: int, rank: int, normalized: bool, like: Any
) -> dict[str, Any]:
    widths = [heads * size, kv_heads * size, kv_heads * size]
    angles = torch.rand(64, size // 2) * 6.0
    cos_sin = torch.cat((angles.cos(), angles.cos(), angles.sin(), angles.sin()), 1)
    device = like["device"]
    return {
        "qkv": random(tokens, sum(widths) + 3 * num_slots * rank, **like),
        "heads": heads,
        "kv_heads": kv_heads,
        "size": size,
        "q_weight": random(size, seed=1, **like) if normalized else None,
        "k_weight": random(size, seed=2, **like) if normalized else None,
        "epsilon": EPSILON,
        "cos_sin": cos_sin.to(device),
        "positions": torch.randint(64, (tokens,)).to(device),
        "slots": chosen(tokens, max(num_slots, 1), device),
        "bs": tuple(factor(num_slots, rank, width, seed=9, **like) for width in widths) if num_slots else None,
        "rank": rank,
        "scale": SCALE,
        "write_slots": torch.randperm(tokens + 4)[:tokens].to(device),
    }


def split(function: Any, inputs: dict[str, Any], like: Any) -> tuple[Tensor, Tensor, Tensor]:
    tokens, heads, kv_heads, size = inputs["qkv"].shape[0], inputs["heads"], inputs["kv_heads"], inputs["size"]
    cache = torch.full((2, tokens + 4, kv_heads, size), 7.0, **like)
    q = torch.full((tokens, heads, size), torch.nan, **like)
    function(**inputs, keys=cache[0], values=cache[1], q_out=q)
    return q, cache[0], cache[1]


@everywhere
@pytest.mark.parametrize("shape", SHAPES)
def test_heads_are_adapted_normalized_rotated_and_cached(shape: Any, device: str, dtype: torch.dtype) -> None:
    like = {"device": device, "dtype": dtype}
    inputs = head_inputs(*shape, like=like)
    for ours, theirs in zip(
        split(layers.split_heads, inputs, like), split(kernel_references.split_heads, inputs, like), strict=True
    ):
        close(ours, theirs)


@everywhere
@pytest.mark.parametrize("tile", [32, 64])
def test_larger_tiles_compute_the_same(tile: int, device: str, dtype: torch.dtype, monkeypatch: Any) -> None:
    for tiles in ("TOKEN_TILES", "GATE_TILES"):
        monkeypatch.setattr(layers, tiles, ((10**6, tile),))
    like: Any = {"device": device, "dtype": dtype}
    inputs = head_inputs(67, 1, 1, 16, 3, 4, True, like)
    for ours, theirs in zip(
        split(layers.split_heads, inputs, like), split(kernel_references.split_heads, inputs, like), strict=True
    ):
        close(ours, theirs)
    x, b, slots = random(67, 32 + 2 * 12, **like), factor(3, 4, 16, **like), inputs["slots"]
    outs = [torch.empty(67, 16, **like) for _ in range(2)]
    layers.gate(x, 16, "silu", slots, (b, b), 4, SCALE, outs[0])
    kernel_references.gate(x, 16, "silu", slots, (b, b), 4, SCALE, outs[1])
    close(*outs)
    streams, added = [x[:, :16].float().clone() for _ in range(2)], x[:, 16:44].float().contiguous()
    layers.add_norm(streams[0], added, b[0], EPSILON, slots, b, 4, SCALE, outs[0])
    kernel_references.add_norm(streams[1], added, b[0], EPSILON, slots, b, 4, SCALE, outs[1])
    close(*outs)
    close(*streams)


@everywhere
def test_a_layer_without_adapters_among_fused_ones_is_left_alone(device: str, dtype: torch.dtype) -> None:
    like = {"device": device, "dtype": dtype}
    inputs = head_inputs(3, 2, 1, 16, 2, 4, True, like)
    inputs["bs"] = (inputs["bs"][0], None, inputs["bs"][2])
    for ours, theirs in zip(
        split(layers.split_heads, inputs, like), split(kernel_references.split_heads, inputs, like), strict=True
    ):
        close(ours, theirs)


def test_the_twin_rotates_and_normalizes_as_transformers_does() -> None:
    qwen = pytest.importorskip("transformers.models.qwen3.modeling_qwen3")
    like = {"device": "cpu", "dtype": torch.float32}
    inputs = head_inputs(5, 4, 2, 16, 0, 1, True, like)
    q, k, _ = split(kernel_references.split_heads, inputs, like)
    norms = [qwen.Qwen3RMSNorm(16, EPSILON) for _ in range(2)]
    for norm, name in zip(norms, ("q_weight", "k_weight"), strict=True):
        norm.weight.data = inputs[name]
    heads = inputs["qkv"].view(1, 5, 8, 16).transpose(1, 2)
    cos, sin = inputs["cos_sin"][inputs["positions"]][None].chunk(2, -1)
    expected = qwen.apply_rotary_pos_emb(norms[0](heads[:, :4]), norms[1](heads[:, 4:6]), cos, sin)
    close(q, expected[0][0].transpose(0, 1))
    close(k[inputs["write_slots"]], expected[1][0].transpose(0, 1))


GATE = [  # tokens, width, slots, rank, activation
    (1, 7, 0, 1, "silu"),
    (2, 40, 0, 1, "gelu"),
    (3, 130, 2, 4, "silu"),
    (18, 33, 3, 3, "gelu_tanh"),
    (2, 256, 1, 128, "silu"),
    (5, 64, 2, 16, "gelu"),
    (4, 24, 2, 1, "gelu_tanh"),
]


@everywhere
@pytest.mark.parametrize(("tokens", "width", "num_slots", "rank", "activation"), GATE)
def test_gate_and_up_are_adapted_and_multiplied(
    tokens: int, width: int, num_slots: int, rank: int, activation: str, device: str, dtype: torch.dtype
) -> None:
    like: Any = {"device": device, "dtype": dtype}
    gate_up = random(tokens, 2 * width + 2 * num_slots * rank, **like)
    bs = tuple(factor(num_slots, rank, width, seed=s, **like) for s in (1, 2)) if num_slots else None
    slots, results = chosen(tokens, max(num_slots, 1), device), [torch.empty(tokens, width, **like) for _ in range(2)]
    layers.gate(gate_up, width, activation, slots, bs, rank, SCALE, results[0])  # type: ignore[arg-type]
    kernel_references.gate(gate_up, width, activation, slots, bs, rank, SCALE, results[1])  # type: ignore[arg-type]
    close(*results)


@everywhere
@pytest.mark.parametrize("absent", [0, 1])
def test_gate_or_up_may_have_no_adapters(absent: int, device: str, dtype: torch.dtype) -> None:
    like: Any = {"device": device, "dtype": dtype}
    gate_up, slots = random(19, 2 * 24 + 2 * 4 * 5, **like), chosen(19, 4, device)
    slots[:16] = slots[:16] % 2 * 3  # a tile of the first and the last slot
    b: Any = [factor(4, 5, 24, seed=seed, **like) for seed in (1, 2)]
    b[absent] = None
    results = [torch.empty(19, 24, **like) for _ in range(2)]
    layers.gate(gate_up, 24, "silu", slots, (b[0], b[1]), 5, SCALE, results[0])
    kernel_references.gate(gate_up, 24, "silu", slots, (b[0], b[1]), 5, SCALE, results[1])
    close(*results)


@everywhere
@pytest.mark.parametrize("kernel", ["add_norm", "gate", "heads"])
def test_no_nan_of_another_version_reaches_a_token(kernel: str, device: str, dtype: torch.dtype) -> None:
    """Slot 1 is broken, in its B and in what its A gives for every token; the tokens of slots 0 and 2 do not change."""
    like: Any = {"device": device, "dtype": dtype}
    tokens, width, num_slots, rank = 6, 24, 3, 4
    slots = torch.tensor([0, 1, 2, 2, 1, 0], device=device)
    fused = {"add_norm": 1, "gate": 2, "heads": 3}[kernel]
    clean = random(tokens, fused * (width + num_slots * rank), **like)
    factors = [factor(num_slots, rank, width, seed=s, **like) for s in range(fused)]
    results = []
    for broken in (False, True):
        x, bs = clean.clone(), [b.clone() for b in factors]
        for layer, b in enumerate(bs if broken else []):
            at = fused * width + layer * num_slots * rank
            x[:, at + rank : at + 2 * rank] = torch.nan
            b[rank : 2 * rank] = torch.nan
        out = torch.empty(tokens, width, **like)
        if kernel == "add_norm":
            stream = clean[:, :width].float().clone()
            layers.add_norm(stream, x.float(), clean[0, :width], EPSILON, slots, bs[0], rank, SCALE, out)
        elif kernel == "gate":
            layers.gate(x, width, "silu", slots, (bs[0], bs[1]), rank, SCALE, out)
        else:
            angles = torch.rand(1, 24, device=device).expand(8, 24)
            cache, q = torch.empty(2, tokens, 2, 12, **like), torch.empty(tokens, 2, 12, **like)
            places = torch.arange(tokens, device=device)
            layers.split_heads(x, 2, 2, 12, None, None, EPSILON, angles if not broken else results[0][1], places, slots,
                               (bs[0], bs[1], bs[2]), rank, SCALE, places, cache[0], cache[1], q)  # fmt: skip
            out = torch.cat((q, cache[0], cache[1]), 1).flatten(1)
            results.append((out, angles))
            continue
        results.append((out, out))
    (whole, _), (partly, _) = results
    assert torch.equal(whole[slots != 1], partly[slots != 1])
    assert partly[slots == 1].isnan().all()


@everywhere
def test_a_token_has_the_same_bits_whoever_stands_beside_it(device: str, dtype: torch.dtype) -> None:
    like: Any = {"device": device, "dtype": dtype}
    width, num_slots, rank = 40, 3, 4
    gate_up = random(20, 2 * width + 2 * num_slots * rank, **like)
    bs = (factor(num_slots, rank, width, seed=1, **like), factor(num_slots, rank, width, seed=2, **like))
    slots, together = chosen(20, num_slots, device), torch.empty(20, width, **like)
    layers.gate(gate_up, width, "silu", slots, bs, rank, SCALE, together)
    for token in (0, 13, 19):
        alone = torch.empty(1, width, **like)
        layers.gate(gate_up[token : token + 1], width, "silu", slots[token : token + 1], bs, rank, SCALE, alone)
        assert torch.equal(alone[0], together[token])


def test_an_unknown_activation_is_refused() -> None:
    x = torch.zeros(1, 8)
    for function in (layers.gate, kernel_references.gate):
        with pytest.raises(ValueError, match="`activation` is `relu`"):
            function(x, 4, "relu", torch.zeros(1, dtype=torch.int64), None, 1, 1.0, x[:, :4])


@pytest.mark.parametrize("tiles", [layers.GATE_TILES, layers.TOKEN_TILES])
def test_tiles_grow_with_the_tokens(tiles: tuple[tuple[int, int], ...]) -> None:
    sizes = [layers._tile(tokens, tiles) for tokens in (1, 128, 129, 512, 2048, 2049, 8192)]
    assert sizes == sorted(sizes)
    assert (sizes[0], sizes[-1]) == (16, 64)


@pytest.mark.parametrize(("rank", "stages"), [(1, 3), (16, 3), (64, 3), (128, 2), (256, 1), (1024, 1)])
def test_fewer_slots_are_in_flight_if_the_rank_is_large(rank: int, stages: int) -> None:
    b = torch.empty(2 * rank, 8, dtype=torch.bfloat16)
    assert layers._stages(3, b, rank, 64) == stages
    assert layers._stages(3, None, rank, 64) == 1
