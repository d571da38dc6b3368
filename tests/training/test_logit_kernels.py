import os

import pytest
import torch

from stretto.training import logit_kernels
from stretto.training.logit_kernels import (
    LogitScale,
    deltas_from,
    deltas_from_reference,
    reduce_logits,
    reduce_logits_reference,
)

if torch.cuda.is_available():
    DEVICES = [("cuda", torch.bfloat16), ("cuda", torch.float16), ("cuda", torch.float32)]
else:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when the kernels are first imported
    DEVICES = [("cpu", torch.float32), ("cpu", torch.float16)]

ON = pytest.mark.parametrize(("device", "dtype"), DEVICES)
SCALES = pytest.mark.parametrize("scale", [LogitScale(), LogitScale(0.7, None, 0.5), LogitScale(1.3, 2.0, 0.5)])


@pytest.fixture
def small_blocks(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr(logit_kernels, "REDUCE_BLOCK", 16)
    monkeypatch.setattr(logit_kernels, "DELTA_BLOCK", 32)


def block(rows, vocabulary, dtype, device):
    generator = torch.Generator().manual_seed(rows * 1000 + vocabulary)
    logits = 3 * torch.randn(rows, vocabulary, generator=generator)
    targets = torch.randint(0, vocabulary, (rows,), generator=generator)
    targets[0], targets[-1] = 0, vocabulary - 1
    return logits.to(device, dtype), targets.to(device)


@ON
@SCALES
@pytest.mark.parametrize(("rows", "vocabulary"), [(1, 1), (3, 16), (2, 33), (5, 7)])
@pytest.mark.parametrize("delta", ["none", "in place", "apart"])
def test_the_kernel_reduces_as_plain_torch_does(small_blocks, device, dtype, scale, rows, vocabulary, delta):
    logits, targets = block(rows, vocabulary, torch.float32 if delta == "apart" else dtype, device)
    ours, theirs = logits.clone(), logits.clone()
    if delta == "apart":
        ours, theirs = (torch.full_like(logits, 7.0, dtype=dtype) for _ in range(2))
    sources = (logits.clone(), logits.clone()) if delta == "apart" else (ours, theirs)
    got = logit_kernels._reduce_triton(sources[0], targets, scale, None if delta == "none" else ours)
    expected = reduce_logits_reference(sources[1], targets, scale, None if delta == "none" else theirs)
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=2e-5)
    assert torch.equal(theirs, logits) is (delta == "none") or vocabulary == 1
    tolerance = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
    torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance)


@ON
@SCALES
@pytest.mark.parametrize(("rows", "vocabulary"), [(1, 1), (3, 32), (2, 65)])
def test_the_kernel_makes_deltas_as_plain_torch_does(small_blocks, device, dtype, scale, rows, vocabulary):
    logits, targets = block(rows, vocabulary, dtype, device)
    _, normalizers, _ = reduce_logits_reference(logits.clone(), targets, scale)
    factors = torch.linspace(-2, 1, rows, device=device)
    ours, theirs = logits.clone(), logits.clone()
    got = logit_kernels._deltas_triton(ours, targets, normalizers, factors, scale, ours)
    expected = deltas_from_reference(theirs, targets, normalizers, factors, scale, theirs)
    assert got is ours
    assert expected is theirs
    tolerance = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
    torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)


def test_the_kernel_holds_at_the_size_of_its_blocks_and_for_large_logits():
    pytest.importorskip("triton")
    device, dtype = DEVICES[0]
    logits, targets = block(2, 2 * logit_kernels.REDUCE_BLOCK + 5, dtype, device)
    logits[1] = logits[1] * 1e4  # a softmax that overflows without the maximum taken out
    ours, theirs = logits.clone(), logits.clone()
    got = logit_kernels._reduce_triton(ours, targets, LogitScale(), ours)
    expected = reduce_logits_reference(theirs, targets, LogitScale(), theirs)
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
    assert torch.isfinite(ours).all()


@SCALES
def test_the_derivative_is_that_of_autograd(scale):
    logits, targets = block(4, 11, torch.float64, "cpu")
    leaf = logits.clone().requires_grad_()
    scaled = leaf * scale.slope
    if scale.softcap is not None:
        scaled = torch.tanh(leaf * scale.multiplier / scale.softcap) * (scale.softcap / scale.temperature)
    logprobs = scaled.log_softmax(-1).gather(1, targets[:, None])[:, 0]
    factors = torch.tensor([1.0, -2.0, 0.0, 0.5], dtype=torch.float64)
    expected = torch.autograd.grad(logprobs, leaf, factors)[0]
    got, normalizers, entropies = reduce_logits(logits.clone(), targets, scale)
    assert torch.allclose(got, logprobs, atol=1e-12)
    chances = scaled.softmax(-1)
    assert torch.allclose(entropies, -(chances * chances.log()).sum(-1), atol=1e-12)
    assert torch.allclose(deltas_from(logits, targets, normalizers, factors, scale, logits), expected, atol=1e-12)
