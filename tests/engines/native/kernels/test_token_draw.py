"""Drawing by kernels against drawing by torch; on the CPU by Triton's interpreter."""

from __future__ import annotations

from typing import Any

import kernel_references
import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

from stretto.engines.native.kernels import token_draw as kernels  # noqa: E402
from stretto.engines.native.kernels.token_draw import _uniform, draw, draw_workspace  # noqa: E402
from stretto.engines.native.sampling import mix_seed, uniforms  # noqa: E402

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels are compiled here")
SETTINGS = [
    pytest.param("cpu", torch.float32, marks=interpreted, id="cpu-float32"),
    pytest.param("cpu", torch.bfloat16, marks=interpreted, id="cpu-bfloat16"),
    pytest.param("cpu", torch.float16, marks=interpreted, id="cpu-float16"),
    pytest.param("cuda", torch.float32, marks=needs_cuda, id="cuda-float32"),
    pytest.param("cuda", torch.bfloat16, marks=needs_cuda, id="cuda-bfloat16"),
    pytest.param("cuda", torch.float16, marks=needs_cuda, id="cuda-float16"),
]
everywhere = pytest.mark.parametrize(("device", "dtype"), SETTINGS)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def _uniform_kernel(seeds, positions, out, ROWS: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: N803
    rows = tl.arange(0, ROWS)
    tl.store(out + rows, _uniform(tl.load(seeds + rows), tl.load(positions + rows)))


def drawn(function: Any, logits: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
    rows, device = logits.shape[0], logits.device
    seeds = torch.tensor([mix_seed(row) for row in range(rows)], device=device)
    tokens = torch.full((rows,), -1, dtype=torch.int64, device=device)
    logprobs = torch.full((rows,), 5.0, device=device)
    workspace = draw_workspace(rows + 2, logits.shape[1], device)
    function(logits, temperature, seeds, torch.full_like(seeds, 3), tokens, logprobs, workspace)
    return tokens, logprobs


def agree(logits: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
    tokens, logprobs = drawn(draw, logits, temperature)
    expected = drawn(kernel_references.draw, logits, temperature)
    assert tokens.tolist() == expected[0].tolist()
    torch.testing.assert_close(logprobs, expected[1], rtol=1e-5, atol=1e-5, equal_nan=True)
    return tokens, logprobs


def test_uniform_numbers_are_those_of_the_sampler_bit_for_bit() -> None:
    generator = torch.Generator().manual_seed(1)
    seeds = torch.randint(-(2**63), 2**63 - 1, (512,), generator=generator)
    positions = torch.randint(0, 2**40, (512,), generator=generator)
    seeds[:4], positions[:4] = torch.tensor([0, -1, 2**63 - 1, -(2**63)]), torch.tensor([0, 0, 1, 2])
    out = torch.empty(512, dtype=torch.float64, device=DEVICE)
    _uniform_kernel[(1,)](seeds.to(DEVICE), positions.to(DEVICE), out, 512)
    assert torch.equal(out.cpu(), uniforms(seeds, positions))


@everywhere
@pytest.mark.parametrize(
    ("rows", "vocabulary", "block"),
    [(3, 1, 16), (5, 5, 16), (8, 64, 16), (8, 67, 16), (6, 1031, 256), (4, 777, 1024), (2, 9001, 4096)],
)
def test_draws_are_those_of_the_sampler(
    rows: int, vocabulary: int, block: int, device: str, dtype: torch.dtype, monkeypatch: Any
) -> None:
    monkeypatch.setattr(kernels, "BLOCK", block)
    torch.manual_seed(vocabulary)
    logits = (torch.randn(rows, vocabulary) * 3).to(device, dtype)
    temperature = torch.tensor([1.0, 0.6, 2.5, 0.0], device=device).repeat(-(-rows // 4))[:rows]
    agree(logits, temperature)


@everywhere
def test_rows_of_a_wider_tensor_are_drawn_from_in_place(device: str, dtype: torch.dtype) -> None:
    logits = torch.randn(4, 80).to(device, dtype)
    agree(logits[:, :70], torch.ones(4, device=device))


@everywhere
def test_the_first_of_equal_logits_is_the_greedy_one(device: str, dtype: torch.dtype, monkeypatch: Any) -> None:
    monkeypatch.setattr(kernels, "BLOCK", 16)
    logits = torch.zeros(3, 50)
    logits[0, [20, 21, 49]] = 4.0
    logits[1, [0, 33]] = 0.5
    logits[2] = -7.0
    tokens, logprobs = agree(logits.to(device, dtype), torch.zeros(3, device=device))
    assert tokens.tolist() == [20, 0, 0]
    assert logprobs.tolist() == [0.0, 0.0, 0.0]


@everywhere
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter computes with NaN by numpy
def test_a_row_without_a_distribution_says_so_and_spoils_no_other(
    device: str, dtype: torch.dtype, monkeypatch: Any
) -> None:
    monkeypatch.setattr(kernels, "BLOCK", 16)
    torch.manual_seed(0)
    logits = torch.randn(10, 40)
    logits[0, 17] = torch.nan
    logits[1] = -torch.inf
    logits[2, 39] = torch.inf
    logits[3] = torch.nan
    logits[4, 0] = torch.nan
    logits[5:, 16:32] = -torch.inf  # a whole block of tokens that cannot be drawn, which is a distribution
    logits[6, :] = -torch.inf
    logits[6, 35] = -3.0
    temperature = torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0, 1.0, 1.0, 0.7, 0.0, 1.0], device=device)
    tokens, logprobs = agree(logits.to(device, dtype), temperature)
    assert logprobs.isnan().tolist() == [True] * 5 + [False] * 5
    assert (tokens[6], logprobs[6]) == (35, 0.0)


@everywhere
@pytest.mark.parametrize("u", [0.0, 1.0 - 2.0**-53])
def test_an_extreme_uniform_number_still_draws_a_token_with_mass(
    u: float, device: str, dtype: torch.dtype, monkeypatch: Any
) -> None:
    """The seed is chosen so that the hash gives `u`: the inverse of splitmix64's finalizer."""
    monkeypatch.setattr(kernels, "BLOCK", 16)

    def unshift(z: int, bits: int) -> int:
        result = z
        for _ in range(64 // bits):
            result = z ^ (result >> bits)
        return result

    z = int(u * 2**53) << 11
    for bits, constant in ((31, 0x94D049BB133111EB), (27, 0xBF58476D1CE4E5B9)):
        z = unshift(z, bits) * pow(constant, -1, 2**64) % 2**64
    seed = (unshift(z, 30) - 4 * 0x9E3779B97F4A7C15) % 2**64
    seeds = torch.tensor([seed - 2**64 if seed >> 63 else seed], device=device)
    position = torch.tensor([3], device=device)
    assert uniforms(seeds, position).item() == u
    logits = torch.full((1, 60), -torch.inf, device=device, dtype=dtype)
    logits[0, 5:40] = torch.linspace(-3, 3, 35)
    logits[0, 50] = -1000.0  # its probability rounds to zero
    tokens, logprobs = torch.empty_like(position), torch.empty(1, device=device)
    draw(logits, torch.ones(1, device=device), seeds, position, tokens, logprobs, draw_workspace(1, 60, logits.device))
    assert tokens.item() == (5 if u == 0.0 else 39)
    assert logprobs.isfinite().all()


@needs_cuda
def test_over_many_seeds_tokens_come_as_often_as_they_should() -> None:
    vocabulary, rows = 151_936, 8192
    logits = torch.full((vocabulary,), -20.0)
    logits[::19_000] = torch.tensor([0.0, 1.0, -1.0, 0.5, 2.0, -0.5, 0.0, 1.5])
    logits = logits.to("cuda", torch.bfloat16).expand(rows, vocabulary)
    tokens, logprobs = drawn(draw, logits, torch.ones(rows, device="cuda"))
    probabilities = torch.softmax(logits[0].float(), 0)
    expected, counts = probabilities * rows, torch.bincount(tokens, minlength=vocabulary)
    likely = expected > 5
    assert ((counts - expected).square() / expected)[likely].sum() < 26.1  # 99.9 % of a chi-square of 8 degrees
    torch.testing.assert_close(logprobs.exp(), probabilities[tokens], rtol=1e-4, atol=0.0)
