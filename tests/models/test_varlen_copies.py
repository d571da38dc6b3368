"""The kernels that copy keys and sum gradients of copies; on the CPU by Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from kernel_interpreter import interpreted_kernels

from stretto.models.varlen_copies import expand_by_kernel, expanded, reduce_by_kernel, reduced
from stretto.models.varlen_layout import Copies, varlen_layout

device = "cuda" if torch.cuda.is_available() else "cpu"
LENGTHS, PREFIXES = np.array([30, 7, 1, 64, 5, 21, 3, 40]), np.array([-1, 0, 0, 0, -1, -1, 5, 5])
TOKENS = int(LENGTHS.sum())


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with interpreted_kernels(monkeypatch):
        yield


LAYOUT = varlen_layout(LENGTHS, PREFIXES)
_, KEYS, MOST = LAYOUT.sizes.tolist()


@pytest.mark.parametrize(("heads", "size"), [(2, 64), (1, 8), (3, 24), (8, 128)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_do_what_the_reference_does(heads: int, size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(heads)
    there = LAYOUT.to(device).copies
    states = [torch.randn(TOKENS, heads, size).to(dtype) for _ in range(2)]
    found = expand_by_kernel(*(each.to(device) for each in states), there, KEYS)
    for one, other in zip(found, expanded(*states, LAYOUT.copies, KEYS), strict=True):
        assert torch.equal(one.cpu(), other)
    grads = [torch.randn(KEYS, heads, size).to(dtype) for _ in range(2)]
    sums = reduce_by_kernel(*(each.to(device) for each in grads), TOKENS, there, MOST)
    for one, other in zip(sums, reduced(*grads, TOKENS, LAYOUT.copies, MOST), strict=True):
        if dtype == torch.float32:
            assert torch.equal(one.cpu(), other), "copies are added in one order"
        torch.testing.assert_close(one.cpu(), other)  # the interpreter rounds to bfloat16 by cutting bits off


def test_rows_may_be_parts_of_wider_ones() -> None:
    """Values are a part of the output of the projection of query, key and value."""
    torch.manual_seed(0)
    both = torch.randn(TOKENS, 5 * 16).to(device)
    key, value = (part.view(TOKENS, -1, 16) for part in both[:, 16:].split_with_sizes([32, 32], 1))
    assert key.stride(0) == 80
    there = LAYOUT.to(device).copies
    sources = Copies.of(there, TOKENS, KEYS, MOST).sources
    for one, other in zip(expand_by_kernel(key, value, there, KEYS), (key, value), strict=True):
        assert torch.equal(one, other.index_select(0, sources))
    turned = key.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(expand_by_kernel(turned, turned, there, KEYS)[0], key.index_select(0, sources))
