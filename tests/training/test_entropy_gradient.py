"""The entropy's gradient out of the chunked log-probabilities."""

import pytest
import torch

from stretto.training.logprobs import token_logprobs

SCALES = pytest.mark.parametrize(
    ("temperature", "softcap", "multiplier"), [(1.0, None, 1.0), (0.7, None, 0.5), (1.3, 2.0, 0.5)]
)


def case(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    hidden = torch.randn(9, 6, dtype=dtype, requires_grad=True)
    weight = torch.randn(13, 6, dtype=dtype, requires_grad=True)
    bias = torch.randn(13, dtype=dtype, requires_grad=True)
    return hidden, weight, bias, torch.tensor([7, 0, 3, 8, 4]), torch.tensor([12, 0, 5, 5, 1])


@SCALES
@pytest.mark.parametrize("chunk_tokens", [1, 2, 100])
def test_the_gradient_of_log_probability_and_entropy_together_is_the_naive_one(
    temperature: float, softcap: float | None, multiplier: float, chunk_tokens: int
) -> None:
    hidden, weight, bias, predicts, targets = case()
    got = token_logprobs(
        hidden, weight, predicts, targets, bias=bias, temperature=temperature, softcap=softcap, multiplier=multiplier,
        entropy_gradient=True, chunk_tokens=chunk_tokens,
    )  # fmt: skip
    logits = (hidden[predicts] @ weight.t() + bias) * multiplier
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logs = (logits / temperature).log_softmax(-1)
    expected = logs.gather(1, targets[:, None])[:, 0], -(logs.exp() * logs).sum(-1)
    upstream = [torch.randn_like(each) for each in got]
    inputs = (hidden, weight, bias)
    pairs = zip(
        torch.autograd.grad(got, inputs, upstream), torch.autograd.grad(expected, inputs, upstream), strict=True
    )
    assert torch.allclose(got[1], expected[1], atol=1e-12)
    assert all(torch.allclose(one, other, atol=1e-12) for one, other in pairs)


@SCALES
@pytest.mark.parametrize("directions", [True, False])
def test_the_gradient_passes_gradcheck_whichever_way_the_device_prefers(
    temperature: float, softcap: float | None, multiplier: float, directions: bool
) -> None:
    hidden, weight, _, predicts, targets = case()
    frozen = weight.detach()

    def work(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return token_logprobs(
            hidden, frozen, predicts, targets, temperature=temperature, softcap=softcap, multiplier=multiplier,
            entropy_gradient=True, chunk_tokens=2, directions=directions,
        )  # fmt: skip

    assert torch.autograd.gradcheck(work, (hidden,))


def test_half_precision_gets_the_gradient_too() -> None:
    hidden, weight, _, predicts, targets = case(torch.bfloat16)
    _, entropies = token_logprobs(hidden, weight, predicts, targets, entropy_gradient=True, chunk_tokens=2)
    (grad,) = torch.autograd.grad(entropies.sum(), (hidden,))
    wide = hidden.detach().double().requires_grad_(True)
    _, exact = token_logprobs(wide, weight.detach().double(), predicts, targets, entropy_gradient=True)
    (expected,) = torch.autograd.grad(exact.sum(), (wide,))
    assert grad.dtype == torch.bfloat16
    assert torch.allclose(grad.double(), expected, atol=0.05, rtol=0.05)
