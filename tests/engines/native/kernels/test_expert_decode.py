"""The kernels of experts in a decode step against plain torch; on the CPU by Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton")

from stretto.engines.native.kernels import layers
from stretto.engines.native.kernels.expert_decode import Tiling, choose, experts_of_few, tilings
from stretto.engines.native.kernels.experts import choose_experts, grouped_experts
from stretto.models.expert_products import weighted_experts

pytestmark = pytest.mark.usefixtures("interpreted")
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
device = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = [(1, 8, 2), (5, 6, 2), (33, 8, 3), (17, 128, 8)]  # tokens, experts, chosen


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(device)


@pytest.mark.parametrize(("tokens", "experts", "chosen"), SHAPES)
@pytest.mark.parametrize("normalized", [True, False])
def test_the_experts_with_the_largest_logits_are_chosen(
    tokens: int, experts: int, chosen: int, normalized: bool
) -> None:
    logits = random(tokens, experts)
    weights, ids = choose(logits, chosen, normalized=normalized)
    shares, wanted = logits.softmax(-1).topk(chosen)
    assert torch.equal(ids, wanted)
    torch.testing.assert_close(weights, shares / shares.sum(-1, keepdim=True) if normalized else shares)


def test_of_equal_logits_the_first_experts_are_chosen() -> None:
    _, ids = choose(torch.zeros(2, 6, device=device), 3, normalized=True)
    assert ids.tolist() == [[0, 1, 2]] * 2


def test_logits_that_are_not_numbers_choose_experts_that_exist() -> None:
    _, ids = choose(torch.full((2, 6), float("nan"), device=device), 2, normalized=True)
    assert bool(((ids >= 0) & (ids < 6)).all())


@pytest.mark.parametrize(("tokens", "experts", "chosen"), [*SHAPES[:3], (9, 20, 4)])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("tiling", [Tiling(16, 16, 16, 4, 2), Tiling(16, 32, 64, 4, 2)])
def test_a_token_gets_the_weighted_sum_of_its_experts(
    tokens: int, experts: int, chosen: int, activation: str, tiling: Tiling
) -> None:
    """Widths that tiles divide and that they do not."""
    for width, inner in ((40, 24), (64, 32)):
        x, up, down = (
            random(tokens, width),
            random(experts, 2 * inner, width) * 0.2,
            random(experts, width, inner) * 0.2,
        )
        weights, ids = choose(random(tokens, experts, seed=1), chosen, normalized=True)
        made = experts_of_few(x, ids, weights, up, down, activation, tiling, tiling)
        function = F.silu if activation == "silu" else lambda gate: F.gelu(gate, approximate="tanh")
        wanted = weighted_experts(x.double(), ids, weights.double(), up.double(), down.double(), function)
        torch.testing.assert_close(made.double(), wanted, atol=1e-4, rtol=1e-4)


def test_half_precision_is_rounded_where_grouped_products_round() -> None:
    dtype = torch.bfloat16 if device == "cuda" else torch.float16
    x, up, down = (t.to(dtype) for t in (random(9, 64), random(8, 96, 64) * 0.2, random(8, 64, 48) * 0.2))
    weights, ids = choose(random(9, 8, seed=1), 3, normalized=True)
    tiling = Tiling(16, 16, 32, 4, 2)
    made = experts_of_few(x, ids, weights, up, down, "silu", tiling, tiling)
    wanted = weighted_experts(x, ids, weights, up, down, F.silu)
    assert made.dtype == wanted.dtype == torch.float32
    assert float((made - wanted).norm() / wanted.norm()) < (2e-3 if dtype == torch.bfloat16 else 2e-4)


def test_there_are_tilings_for_few_pairs_alone() -> None:
    assert tilings(1, 128) is not None
    assert tilings(16 * 8, 128) is not None
    assert tilings(8_192 * 8, 128) is None


@needs_cuda
@pytest.mark.parametrize("tokens", [1, 16, 64, 256])
def test_decode_kernels_and_grouped_products_agree(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x, router = random(tokens, 256).bfloat16(), random(32, 256).bfloat16()
    up, down = (random(32, 256, 256) * 0.1).bfloat16(), (random(32, 256, 128) * 0.1).bfloat16()
    weights, ids = choose_experts(x, router, 4, normalized=True)
    made = grouped_experts(x, ids, weights, up, down, layers.gate, "silu", 0)
    monkeypatch.setattr("stretto.engines.native.kernels.expert_decode.TILINGS", ())
    wanted = grouped_experts(x, ids, weights, up, down, layers.gate, "silu", 0)
    assert float((made - wanted).norm() / wanted.norm()) < 2e-3
