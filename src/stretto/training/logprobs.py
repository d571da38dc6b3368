"""Log-probabilities of given tokens without ever holding the logits of all of them.

With a vocabulary of 150,000 the logits of one long sequence outweigh the model. They are made a chunk of tokens at a
time, reduced to two numbers a token, and made again in the backward pass.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

CHUNK_ELEMENTS = {"cpu": 1 << 22, "cuda": 1 << 27}  # logits held at once; a processor wants them in its cache


def token_logprobs(
    hidden: torch.Tensor,  # [T, d]
    weight: torch.Tensor,  # [V, d]
    predicts: torch.Tensor,  # [C] int64, rows of `hidden`, each at most once
    targets: torch.Tensor,  # [C] int64
    *,
    bias: torch.Tensor | None = None,  # [V]
    temperature: float = 1.0,
    softcap: float | None = None,  # logits become `softcap * tanh(logits / softcap)` before the temperature
    multiplier: float = 1.0,  # of the logits, before the cap
    entropy: bool = False,
    chunk_tokens: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The log-probability of each target under `softmax(logits / temperature)` [C], and the entropy there [C].

    Both are float32, or float64 for float64 inputs. The entropy carries no gradient, and is zero where not asked for.
    The result does not depend on `chunk_tokens`, except for rounding.
    """
    if chunk_tokens is None:
        chunk_tokens = max(1, CHUNK_ELEMENTS.get(hidden.device.type, CHUNK_ELEMENTS["cuda"]) // weight.shape[0])
    return _TokenLogprobs.apply(  # type: ignore[no-any-return, no-untyped-call]
        hidden, weight, bias, predicts, targets, temperature, softcap, multiplier, entropy, chunk_tokens
    )


def _scaled_logits(
    rows: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    temperature: float,
    softcap: float | None,
    multiplier: float,
) -> torch.Tensor:
    logits = F.linear(rows, weight, bias)
    if logits.dtype != torch.float64:
        logits = logits.float()
    if softcap is not None:
        return logits.mul_(multiplier / softcap).tanh_().mul_(softcap / temperature)
    scale = multiplier / temperature
    return logits if scale == 1.0 else logits.mul_(scale)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        predicts: torch.Tensor,
        targets: torch.Tensor,
        temperature: float,
        softcap: float | None,
        multiplier: float,
        entropy: bool,
        chunk_tokens: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        logprobs = torch.empty(len(targets), dtype=dtype, device=hidden.device)
        normalizers = torch.empty_like(logprobs)
        entropies = torch.zeros_like(logprobs)
        for start in range(0, len(targets), chunk_tokens):
            chunk = slice(start, start + chunk_tokens)
            rows = hidden.index_select(0, predicts[chunk])
            logits = _scaled_logits(rows, weight, bias, temperature, softcap, multiplier)
            normalizer = logits.logsumexp(-1)
            normalizers[chunk] = normalizer
            logprobs[chunk] = logits.gather(1, targets[chunk, None])[:, 0] - normalizer
            if entropy:
                chances = (logits - normalizer[:, None]).exp_()
                entropies[chunk] = normalizer - torch.linalg.vecdot(chances, logits)
        ctx.save_for_backward(hidden, weight, bias, predicts, targets, normalizers)
        ctx.settings = (temperature, softcap, multiplier, chunk_tokens)
        ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, predicts, targets, normalizers = ctx.saved_tensors
        temperature, softcap, multiplier, chunk_tokens = ctx.settings
        dtype = normalizers.dtype
        grad = grads[0]
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.zeros_like(hidden) if need_hidden else None
        # Summed over chunks in float32, whatever the type of the weights.
        grad_weight = torch.zeros_like(weight, dtype=dtype) if need_weight else None
        grad_bias = torch.zeros_like(bias, dtype=dtype) if need_bias else None
        for start in range(0, len(targets), chunk_tokens):
            chunk = slice(start, start + chunk_tokens)
            index = predicts[chunk]
            rows = hidden.index_select(0, index)
            logits = _scaled_logits(rows, weight, bias, temperature, softcap, multiplier)
            slope = None if softcap is None else (logits * (temperature / softcap)).square_().neg_().add_(1)
            # d logprob / d logits = (target - chances) / temperature
            delta = logits.sub_(normalizers[chunk, None]).exp_().neg_()
            delta.scatter_add_(1, targets[chunk, None], torch.ones_like(delta[:, :1]))
            delta.mul_((grad[chunk] * (multiplier / temperature))[:, None])
            if slope is not None:
                delta.mul_(slope)
            if grad_bias is not None:
                # The bias stands before the multiplier, as the weight does.
                grad_bias += delta.sum(0)
            delta = delta.to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden.index_copy_(0, index, delta @ weight)
            if grad_weight is not None:
                grad_weight += delta.t() @ rows
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            *([None] * 7),
        )
