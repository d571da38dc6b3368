import numpy as np
import pytest
import torch

from stretto.training.logit_supports import pack_supports
from stretto.training.logprobs import token_logprobs
from stretto.types import Supports


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
    logits = torch.nn.functional.linear(hidden[predicts].float(), weight.float())  # not rounded on the way
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, logits.gather(1, targets[:, None])[:, 0] - logits.logsumexp(-1))
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
    assert_same_on_cuda(trained, supports=lambda targets, device: None)


def assert_same_on_cuda(trained, supports):
    """Compares values and gradients. `supports` makes those of the targets on a device; None: the whole vocabulary."""
    torch.manual_seed(0)
    rows, width, vocabulary = 300, 64, 5003
    settings = {"temperature": 0.8, "softcap": 3.0, "multiplier": 0.7, "entropy": True, "chunk_tokens": 128}
    inputs = torch.randn(rows, width), torch.randn(vocabulary, width) / 8
    index, targets = torch.arange(0, rows, 2), torch.randint(0, vocabulary, (150,))
    results = []
    for device in ("cpu", "cuda"):
        hidden = inputs[0].clone().to(device).requires_grad_()
        weight = inputs[1].clone().to(device).requires_grad_(trained)
        settings["supports"] = supports(targets, device)
        got, entropies = token_logprobs(hidden, weight, index.to(device), targets.to(device), **settings)
        got.square().mean().backward()
        results.append([got, entropies, hidden.grad, *([weight.grad] if trained else [])])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(other.cpu(), one, atol=1e-3, rtol=1e-2)


SUPPORTS = [[12, 3, 0], [0], [5, 2], list(range(13)), [4, 1, 7, 9]]  # of the targets of `case`


def packed(supports, targets, device="cpu"):
    tokens = np.array([token for one in supports for token in one], np.int32)
    together = Supports(np.array([len(one) for one in supports], np.int32), tokens)
    return pack_supports([together], targets.numpy(), device)


def naive_over_supports(hidden, weight, bias, predicts, targets, temperature, softcap, multiplier):
    """One token at a time, from the logits of its support alone."""
    logprobs, entropies = [], []
    for row, target, support in zip(predicts, targets, SUPPORTS, strict=True):
        logits = (hidden[row] @ weight.t() + (0 if bias is None else bias))[support] * multiplier
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        logits = logits / temperature
        logprobs.append(logits[support.index(int(target))] - logits.logsumexp(-1))
        own = logits.log_softmax(-1)
        entropies.append(-(own.exp() * own).sum())
    return torch.stack(logprobs), torch.stack(entropies)


SETTINGS = pytest.mark.parametrize(
    ("temperature", "softcap", "multiplier"), [(1.0, None, 1.0), (0.7, None, 0.5), (1.3, 2.0, 0.5)]
)


@pytest.mark.parametrize("chunk_tokens", [1, 2, 5, 100])
@SETTINGS
@pytest.mark.parametrize("entropy_gradient", [True, False])
def test_over_supports_values_entropies_and_gradients_are_the_naive_ones(
    chunk_tokens, temperature, softcap, multiplier, entropy_gradient
):
    hidden, weight, bias, predicts, targets = case()
    settings = {"temperature": temperature, "softcap": softcap, "multiplier": multiplier}
    got = token_logprobs(
        hidden, weight, predicts, targets, bias=bias, entropy=True, entropy_gradient=entropy_gradient,
        chunk_tokens=chunk_tokens, supports=packed(SUPPORTS, targets), **settings,
    )  # fmt: skip
    expected = naive_over_supports(hidden, weight, bias, predicts, targets, **settings)
    for one, other in zip(got, expected, strict=True):
        assert torch.allclose(one, other, atol=1e-12)
    assert got[1].requires_grad is entropy_gradient
    kept = 2 if entropy_gradient else 1
    upstream = [torch.randn_like(each) for each in got[:kept]]
    inputs = (hidden, weight, bias)
    ours = torch.autograd.grad(got[:kept], inputs, upstream)
    for one, other in zip(ours, torch.autograd.grad(expected[:kept], inputs, upstream), strict=True):
        assert torch.allclose(one, other, atol=1e-12)


@SETTINGS
@pytest.mark.parametrize("directions", [True, False])
def test_gradcheck_over_supports(temperature, softcap, multiplier, directions):
    hidden, weight, bias, predicts, targets = case()
    weight, bias = weight.detach(), bias.detach()
    settings = {"temperature": temperature, "softcap": softcap, "multiplier": multiplier, "chunk_tokens": 2}
    supports = packed(SUPPORTS, targets)

    def work(hidden):
        return token_logprobs(
            hidden, weight, predicts, targets, bias=bias, directions=directions, supports=supports, **settings
        )[0]

    assert torch.autograd.gradcheck(work, (hidden,))
    assert torch.allclose(
        work(hidden), naive_over_supports(hidden, weight, bias, predicts, targets, temperature, softcap, multiplier)[0]
    )


def test_the_support_of_the_whole_vocabulary_changes_nothing_but_rounding():
    hidden, weight, bias, predicts, targets = case()
    everything = packed([list(range(13))] * 5, targets)
    for entropy_gradient in (True, False):
        settings = {"bias": bias, "entropy": True, "temperature": 0.6, "entropy_gradient": entropy_gradient}
        got = token_logprobs(hidden, weight, predicts, targets, supports=everything, **settings)
        plain = token_logprobs(hidden, weight, predicts, targets, **settings)
        for one, other in zip(got, plain, strict=True):
            assert torch.allclose(one, other, atol=1e-12)
        (one,), (other,) = (torch.autograd.grad(x[0].square().sum(), (weight,)) for x in (got, plain))
        assert torch.allclose(one, other, atol=1e-12)


def test_a_token_that_is_alone_in_its_support_is_certain_and_gives_no_gradient():
    hidden, weight, _, predicts, targets = case(torch.float32)
    alone = packed([[token] for token in targets.tolist()], targets)
    got, entropies = token_logprobs(hidden, weight, predicts, targets, entropy=True, supports=alone)
    assert got.tolist() == entropies.tolist() == [0.0] * 5
    got.sum().backward()
    assert not hidden.grad.any()


def test_half_precision_over_supports_is_reduced_in_float32():
    hidden, weight, _, predicts, targets = case(torch.bfloat16)
    got, _ = token_logprobs(hidden, weight, predicts, targets, chunk_tokens=2, supports=packed(SUPPORTS, targets))
    got.sum().backward()
    logits = torch.nn.functional.linear(hidden[predicts].float(), weight.float())
    expected = [row[t] - row[own].logsumexp(-1) for row, t, own in zip(logits, targets, SUPPORTS, strict=True)]
    torch.testing.assert_close(got, torch.stack(expected))
    assert got.dtype == torch.float32
    assert weight.grad.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("supports", "said"),
    [
        ([[12], [1], [5], [5], [1]], "not among those"),
        ([[12, 12], [0], [5], [5], [1]], "there twice"),
        ([[12], [0], [5], [5]], "4 supports"),
    ],
)
def test_a_target_outside_of_its_support_is_an_error(supports, said):
    with pytest.raises(ValueError, match=said):
        packed(supports, case()[4])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("trained", [False, True])
def test_on_cuda_supports_give_what_they_give_on_the_processor(trained):
    def supports(targets, device):
        sets = [[int(t), *range(n % 40)] if int(t) >= 40 else list(range(40)) for n, t in enumerate(targets)]
        return packed(sets, targets, device)

    assert_same_on_cuda(trained, supports)
