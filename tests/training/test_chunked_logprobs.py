import pytest
import torch

from stretto.training.logprobs import token_logprobs


def case(dtype=torch.float64, rows=9, width=6, vocabulary=13):
    torch.manual_seed(0)
    hidden = torch.randn(rows, width, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocabulary, width, dtype=dtype, requires_grad=True)
    bias = torch.randn(vocabulary, dtype=dtype, requires_grad=True)
    predicts = torch.tensor([7, 0, 3, 8, 4])
    targets = torch.tensor([12, 0, 5, 5, 1])
    return hidden, weight, bias, predicts, targets


def naive(hidden, weight, bias, predicts, targets, temperature, softcap, multiplier):
    logits = (hidden[predicts] @ weight.t() + (0 if bias is None else bias)) * multiplier
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logprobs = (logits / temperature).log_softmax(-1)
    return logprobs.gather(1, targets[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)


@pytest.mark.parametrize("chunk_tokens", [1, 2, 5, 100, None])
@pytest.mark.parametrize(
    ("temperature", "softcap", "multiplier"), [(1.0, None, 1.0), (0.7, None, 0.5), (1.3, 2.0, 0.5)]
)
@pytest.mark.parametrize("with_bias", [True, False])
def test_values_entropies_and_gradients_are_the_naive_ones(chunk_tokens, temperature, softcap, multiplier, with_bias):
    hidden, weight, bias, predicts, targets = case()
    bias = bias if with_bias else None
    settings = {"temperature": temperature, "softcap": softcap, "multiplier": multiplier}
    got, entropies = token_logprobs(
        hidden, weight, predicts, targets, bias=bias, entropy=True, chunk_tokens=chunk_tokens, **settings
    )
    expected, expected_entropies = naive(hidden, weight, bias, predicts, targets, **settings)
    assert torch.allclose(got, expected, atol=1e-12)
    assert torch.allclose(entropies, expected_entropies, atol=1e-12)
    assert not entropies.requires_grad
    inputs = [x for x in (hidden, weight, bias) if x is not None]
    upstream = torch.randn_like(got)
    for one, other in zip(
        torch.autograd.grad(got, inputs, upstream), torch.autograd.grad(expected, inputs, upstream), strict=True
    ):
        assert torch.allclose(one, other, atol=1e-12)


def test_gradcheck():
    hidden, weight, bias, predicts, targets = case()

    def work(hidden, weight, bias):
        return token_logprobs(
            hidden, weight, predicts, targets, bias=bias, temperature=0.8, softcap=3.0, multiplier=0.7, chunk_tokens=2
        )[0]

    assert torch.autograd.gradcheck(work, (hidden, weight, bias))


def test_a_frozen_weight_gets_no_gradient():
    hidden, weight, _, predicts, targets = case()
    weight = weight.detach()
    token_logprobs(hidden, weight, predicts, targets)[0].sum().backward()
    assert hidden.grad is not None
    assert weight.grad is None


def test_half_precision_is_reduced_in_float32():
    hidden, weight, _, predicts, targets = case(torch.bfloat16)
    got, _ = token_logprobs(hidden, weight, predicts, targets, chunk_tokens=2)
    got.sum().backward()
    logits = torch.nn.functional.linear(hidden[predicts], weight).float()
    assert got.dtype == torch.float32
    assert torch.equal(got, logits.gather(1, targets[:, None])[:, 0] - logits.logsumexp(-1))
    assert weight.grad.dtype == torch.bfloat16


def test_the_logits_of_all_tokens_are_never_held_at_once():
    rows, vocabulary = 64, 1000
    largest = 0

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            result = function(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and result.shape[-1:] == (vocabulary,):
                largest = max(largest, result.numel() // vocabulary)
            return result

    hidden = torch.randn(rows, 4, requires_grad=True)
    weight = torch.randn(vocabulary, 4)
    index = torch.arange(rows)
    with Watch():
        logprobs, _ = token_logprobs(hidden, weight, index, index, entropy=True, chunk_tokens=8)
        logprobs.sum().backward()
    assert largest == 8


@pytest.mark.parametrize("chunk_tokens", [1, 2, 5, 100])
@pytest.mark.parametrize(
    ("temperature", "softcap", "multiplier"), [(1.0, None, 1.0), (0.7, None, 0.5), (1.3, 2.0, 0.5)]
)
@pytest.mark.parametrize("with_bias", [True, False])
def test_directions_made_ahead_give_the_gradient_of_logits_made_again(
    chunk_tokens, temperature, softcap, multiplier, with_bias
):
    hidden, weight, bias, predicts, targets = case()
    weight, bias = weight.detach(), bias.detach() if with_bias else None
    settings = {"temperature": temperature, "softcap": softcap, "multiplier": multiplier, "bias": bias, "entropy": True}
    results = []
    for directions in (True, False):
        got, entropies = token_logprobs(
            hidden,
            weight,
            predicts,
            targets,
            chunk_tokens=chunk_tokens,
            directions=directions,
            **settings,
        )
        upstream = torch.linspace(-1, 2, len(got), dtype=got.dtype)
        results.append((got, entropies, torch.autograd.grad(got, hidden, upstream)[0]))
    for one, other in zip(*results, strict=True):
        assert torch.allclose(one, other, atol=1e-13)


def test_gradcheck_of_directions():
    hidden, weight, bias, predicts, targets = case()
    settings = {"temperature": 0.8, "softcap": 3.0, "multiplier": 0.7, "chunk_tokens": 2, "directions": True}

    def work(hidden):
        return token_logprobs(hidden, weight.detach(), predicts, targets, bias=bias.detach(), **settings)[0]

    assert torch.autograd.gradcheck(work, (hidden,))


def test_no_directions_are_made_where_the_head_is_trained_or_nothing_is():
    hidden, weight, _, predicts, targets = case()
    trained, _ = token_logprobs(hidden, weight, predicts, targets, directions=True)
    trained.sum().backward()
    assert weight.grad.abs().sum() > 0
    with torch.no_grad():
        plain, _ = token_logprobs(hidden, weight, predicts, targets, directions=True)
    assert torch.allclose(plain, trained, atol=1e-13)
    assert not plain.requires_grad


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("trained", [False, True])
def test_on_cuda_values_and_gradients_are_those_of_the_processor(trained):
    torch.manual_seed(0)
    rows, width, vocabulary = 300, 64, 5003
    settings = {"temperature": 0.8, "softcap": 3.0, "multiplier": 0.7, "entropy": True, "chunk_tokens": 128}
    inputs = torch.randn(rows, width), torch.randn(vocabulary, width) / 8
    index, targets = torch.arange(0, rows, 2), torch.randint(0, vocabulary, (150,))
    results = []
    for device in ("cpu", "cuda"):
        hidden = inputs[0].clone().to(device).requires_grad_()
        weight = inputs[1].clone().to(device).requires_grad_(trained)
        got, entropies = token_logprobs(hidden, weight, index.to(device), targets.to(device), **settings)
        got.square().mean().backward()
        results.append([got, entropies, hidden.grad, *([weight.grad] if trained else [])])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(other.cpu(), one, atol=1e-3, rtol=1e-2)
