"""Reduces a block of logits [rows, V] to a few numbers a row, in as few passes over it as possible.

`reduce_logits` computes each row's log-probability of its target, the logarithm of the normalizer and the entropy, and
on request `d logprob / d logits`, in a type of its own. `deltas_from` computes that derivative alone, from known
normalizers. On CUDA both are Triton kernels, elsewhere plain torch (`*_reference`).

Bytes moved, for logits of 4 bytes and a derivative of 2: `reduce_logits` reads the block once, with `delta` twice
(partly from the device's cache: 132 rows of 152,000 logits are 80 MB), and writes `delta`. At 2**27 logits and 4.3 TB/s
that takes 125 us, up to 310 us with `delta`, compared to 0.7 ms for each product with the head of a model 2,048 wide.
Plain torch takes about ten passes of 4 bytes.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

REDUCE_BLOCK, REDUCE_WARPS = 8192, 8  # logits of one row at once; 32 a thread, so four loads of 16 bytes
DELTA_BLOCK, DELTA_WARPS = 4096, 8


class LogitScale(NamedTuple):
    """Scales the head's output to the logits of the policy: a factor, an optional cap, a temperature."""

    temperature: float = 1.0
    softcap: float | None = None
    multiplier: float = 1.0

    @property
    def slope(self) -> float:
        """The derivative of the scaled logits without the cap."""
        return self.multiplier / self.temperature

    def apply_(self, logits: torch.Tensor) -> torch.Tensor:
        """Scales in place."""
        if self.softcap is not None:
            return logits.mul_(self.multiplier / self.softcap).tanh_().mul_(self.softcap / self.temperature)
        return logits if self.slope == 1.0 else logits.mul_(self.slope)


Reduced = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Log-probabilities of the targets, logarithms of the normalizers, entropies (zero if not requested). All [rows]."""


def reduce_logits(
    logits: torch.Tensor,  # [rows, V], contiguous
    targets: torch.Tensor,  # [rows] int64
    scale: LogitScale,
    delta: torch.Tensor | None = None,  # [rows, V], contiguous: filled with the derivative; may be `logits` itself
) -> Reduced:
    """Reduces a block of logits under the scaled softmax, in float32, or float64 for float64; see the module."""
    reduce = _reduce_triton if _has_kernel(logits) else reduce_logits_reference
    return reduce(logits, targets, scale, delta)


def deltas_from(
    logits: torch.Tensor,  # [rows, V], contiguous; overwritten
    targets: torch.Tensor,  # [rows] int64
    normalizers: torch.Tensor,  # [rows]
    factors: torch.Tensor,  # [rows], of each row's derivative
    scale: LogitScale,
    into: torch.Tensor,  # [rows, V], contiguous; may be `logits` itself
) -> torch.Tensor:
    """`factor * d logprob / d logits`, in the type of `into`, which it returns."""
    make = _deltas_triton if _has_kernel(logits) else deltas_from_reference
    return make(logits, targets, normalizers, factors, scale, into)


def _has_kernel(logits: torch.Tensor) -> bool:
    return logits.is_cuda and logits.dtype != torch.float64  # the kernels reduce in float32


def reduce_logits_reference(
    logits: torch.Tensor, targets: torch.Tensor, scale: LogitScale, delta: torch.Tensor | None = None
) -> Reduced:
    scaled = scale.apply_(logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True))
    normalizers = scaled.logsumexp(-1)
    logprobs = scaled.gather(1, targets[:, None])[:, 0] - normalizers
    entropies = normalizers - torch.linalg.vecdot((scaled - normalizers[:, None]).exp_(), scaled)
    if delta is not None:
        deltas_from_reference(logits, targets, normalizers, torch.ones_like(normalizers), scale, delta)
    return logprobs, normalizers, entropies


def deltas_from_reference(
    logits: torch.Tensor,
    targets: torch.Tensor,
    normalizers: torch.Tensor,
    factors: torch.Tensor,
    scale: LogitScale,
    into: torch.Tensor,
) -> torch.Tensor:
    scaled = scale.apply_(logits.to(normalizers.dtype))  # in place if the type is the same
    bend = None if scale.softcap is None else 1 - (scaled * (scale.temperature / scale.softcap)).square_()
    result = scaled.sub_(normalizers[:, None]).exp_().neg_()
    result.scatter_add_(1, targets[:, None], torch.ones_like(result[:, :1]))
    result.mul_((factors * scale.slope)[:, None])
    if bend is not None:
        result.mul_(bend)
    return result if result is into else into.copy_(result)


def deltas_with_entropy(
    logits: torch.Tensor,  # [rows, V]
    targets: torch.Tensor,  # [rows] int64
    normalizers: torch.Tensor,  # [rows]
    entropies: torch.Tensor,  # [rows]
    factors: torch.Tensor,  # [rows], of d logprob / d logits
    entropy_factors: torch.Tensor,  # [rows], of d entropy / d logits
    scale: LogitScale,
) -> torch.Tensor:
    """`factor * d logprob / d logits + entropy factor * d entropy / d logits`, in the type of the normalizers.

    With `p` the probabilities: `d entropy / d logit_i = -p_i (log p_i + entropy)`. Plain torch on every device.
    """
    scaled = scale.apply_(logits.to(normalizers.dtype, copy=True))
    bend = None if scale.softcap is None else 1 - (scaled * (scale.temperature / scale.softcap)).square_()
    logs = scaled.sub_(normalizers[:, None])
    probabilities = logs.exp()
    result = logs.add_(entropies[:, None]).mul_(-entropy_factors[:, None]).sub_(factors[:, None]).mul_(probabilities)
    result.scatter_add_(1, targets[:, None], factors[:, None].to(result.dtype))
    result.mul_(scale.slope)
    return result if bend is None else result.mul_(bend)


def _numbers(scale: LogitScale) -> tuple[float, float, float]:
    """The slope, and the factors inside and outside of the cap."""
    cap = scale.softcap or 1.0
    return scale.slope, scale.multiplier / cap, cap / scale.temperature


def _reduce_triton(
    logits: torch.Tensor, targets: torch.Tensor, scale: LogitScale, delta: torch.Tensor | None = None
) -> Reduced:
    rows, vocabulary = logits.shape
    assert logits.is_contiguous()
    assert delta is None or delta.is_contiguous()
    results = torch.empty(3, rows, dtype=torch.float32, device=logits.device)
    logprobs, normalizers, entropies = results.unbind()
    if rows:
        _kernels()["reduce"][(rows,)](
            logits, logits if delta is None else delta, targets, logprobs, normalizers, entropies, *_numbers(scale),
            VOCABULARY=vocabulary, CAPPED=scale.softcap is not None, DELTA=delta is not None,
            BLOCK=REDUCE_BLOCK, num_warps=REDUCE_WARPS,
        )  # fmt: skip
    return logprobs, normalizers, entropies


def _deltas_triton(
    logits: torch.Tensor,
    targets: torch.Tensor,
    normalizers: torch.Tensor,
    factors: torch.Tensor,
    scale: LogitScale,
    into: torch.Tensor,
) -> torch.Tensor:
    rows, vocabulary = logits.shape
    assert logits.is_contiguous()
    assert into.is_contiguous()
    if rows:
        _kernels()["deltas"][(rows, -(-vocabulary // DELTA_BLOCK))](
            logits, into, targets, normalizers, factors.contiguous(), *_numbers(scale),
            VOCABULARY=vocabulary, CAPPED=scale.softcap is not None, BLOCK=DELTA_BLOCK, num_warps=DELTA_WARPS,
        )  # fmt: skip
    return into


@functools.cache
def _kernels() -> dict[str, Any]:
    """The kernels, imported at first use, because only CUDA needs Triton."""
    from stretto.training import logit_triton

    return {"reduce": logit_triton.reduce_kernel, "deltas": logit_triton.deltas_kernel}
