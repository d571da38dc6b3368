"""Products of half-precision factors that are not rounded to half precision.

The residual stream and the logits are sums of many terms, and in bfloat16 rounding them costs more precision than all
other roundings together (`docs/performance/mismatch.md`). The matrix units add in float32 in any case: here the result
stays in float32. Factors that are float32 or wider are multiplied as usual.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, library

HALF = (torch.bfloat16, torch.float16)
BLOCK = 4_096  # columns that a CPU widens at once


def wide_type(dtype: torch.dtype) -> torch.dtype:
    """Returns the type of sums over values of `dtype`: float32, or `dtype` if it is wider."""
    return torch.promote_types(dtype, torch.float32)


def wide_mm(x: Tensor, factor: Tensor, bias: Tensor | None = None) -> Tensor:
    """Returns `x @ factor + bias` [rows, out] in `wide_type`; `x` is [rows, in], `factor` [in, out], `bias` [out]."""
    if x.dtype not in HALF:
        return torch.mm(x, factor) if bias is None else torch.addmm(bias, x, factor)
    if x.is_cuda:
        y: Tensor = torch.mm(x, factor, out_dtype=torch.float32)
    else:
        rows = x.float()
        y = torch.cat([rows @ part.float() for part in torch.split(factor, BLOCK, 1)], 1)
    return y if bias is None else y.add_(bias)


@functools.cache
def adds_in_place(device: torch.device, dtype: torch.dtype) -> bool:
    """True if `aten::addmm.dtype_out` adds a product of half precision to a float32 matrix in place, on `device`.

    Not every version of torch has it, and it is not documented that the sum may be written over the summand. So it is
    tried once.
    """
    if device.type != "cuda" or dtype not in HALF:
        return False
    try:
        x, factor = (torch.arange(64 * 64, device=device).view(64, 64).remainder(n).to(dtype) for n in (7, 5))
        into = torch.full((64, 64), 2.0**-9, device=device)  # which half precision would round away
        wanted = into + x.float() @ factor.float()
        torch.ops.aten.addmm.dtype_out(into, x, factor, torch.float32, out=into)
        return bool(torch.equal(into, wanted))
    except (AttributeError, RuntimeError, TypeError):
        return False


@library.custom_op("stretto::wide_linear", mutates_args=(), schema="(Tensor x, Tensor weight) -> Tensor")
def wide_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Returns `x @ weight.t()` in `wide_type`. Its gradient arrives wide and is rounded to the type of `x` once."""
    return wide_mm(x, weight.t())


@wide_linear.register_fake
def _(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]), dtype=wide_type(x.dtype))


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
    x, weight = ctx.saved_tensors
    grad = grad.to(x.dtype)
    return (
        grad @ weight if ctx.needs_input_grad[0] else None,
        grad.t() @ x if ctx.needs_input_grad[1] else None,
    )


wide_linear.register_autograd(_backward, setup_context=_keep)


def wide_logits(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Returns logits [rows, V] in `wide_type`, outside of automatic differentiation."""
    return wide_mm(rows, weight.t(), bias) if rows.dtype in HALF else F.linear(rows, weight, bias)
