"""Log-probabilities of given tokens without storing the logits of all of them.

With a vocabulary of 150,000 the logits of one long sequence take more memory than the model. They are computed a chunk
of tokens at a time and reduced to two numbers a token. There are two ways to compute the gradient:

- *Recomputation* of the logits in the backward pass: three products with the head for the gradient of the hidden
  states, four with that of the head's weight.
- *Directions*: `d logprob / d hidden = slope * (target - probabilities) @ W` is one vector a token, whatever the
  incoming gradient. If nothing of the head is trained, it is computed with the log-probability from the same chunk, and
  the backward pass only scales it: two products, and `[C, d]` more to store. The gradient of the weight cannot be
  computed ahead, because the incoming gradient differs from token to token.

On CUDA, directions are used whenever possible; on a CPU, if there is more than one chunk. The gradient of a trained
head takes one product more than without chunks: that is the price of the memory saved.

In half precision, logits are float32: a bfloat16 between 16 and 32 is off by 0.03 on average. With their derivative
that is 6 bytes a logit instead of 2.

With `supports`, probabilities are those over each token's support, and zero elsewhere: see `logit_supports`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from stretto.models.float32_products import wide_logits, wide_type
from stretto.training.directions import DirectedFunction
from stretto.training.logit_kernels import LogitScale, deltas_from, deltas_with_entropy, reduce_logits
from stretto.training.logit_supports import PackedSupports, deltas_of_supports, reduce_supports

# Logits in memory at once. On a CPU they should fit into its cache. A GPU needs products with enough rows (883 of
# Qwen3's vocabulary) and, if the head is trained, few sums over its float32 gradient.
CHUNK_ELEMENTS = {"cpu": 1 << 23, "cuda": 1 << 27}
CHUNK_ELEMENTS_TRAINED_HEAD = {"cpu": 1 << 25, "cuda": 1 << 29}


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
    entropy_gradient: bool = False,
    supports: PackedSupports | None = None,  # of the targets; None: the whole vocabulary
    chunk_tokens: int | None = None,
    directions: bool | None = None,  # None: depends on the device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the log-probability of each target under `softmax(logits / temperature)` [C], and the entropy [C].

    With `supports`, softmax and entropy are over each target's support. Both results are float32, or float64 for
    float64 inputs. The entropy is zero unless requested. It carries a gradient only with `entropy_gradient`, which
    recomputes the logits. The result does not depend on `chunk_tokens`, except for rounding.
    """
    trained = torch.is_grad_enabled() and (weight.requires_grad or (bias is not None and bias.requires_grad))
    if chunk_tokens is None:
        elements = CHUNK_ELEMENTS_TRAINED_HEAD if trained else CHUNK_ELEMENTS
        chunk_tokens = max(1, elements.get(hidden.device.type, elements["cuda"]) // weight.shape[0])
    scale = LogitScale(temperature, softcap, multiplier)
    if directions is None:
        directions = hidden.is_cuda or len(targets) > chunk_tokens
    if directions and not trained and not entropy_gradient:
        with_gradient = torch.is_grad_enabled() and hidden.requires_grad
        logprobs, entropies = _DirectedLogprobs.apply(  # type: ignore[no-untyped-call]
            hidden, weight, bias, predicts, targets, scale, entropy, chunk_tokens, with_gradient, supports
        )
    else:
        logprobs, entropies = _TokenLogprobs.apply(  # type: ignore[no-untyped-call]
            hidden, weight, bias, predicts, targets, scale, entropy or entropy_gradient, entropy_gradient, chunk_tokens,
            supports,
        )  # fmt: skip
    return logprobs, entropies if entropy or entropy_gradient else torch.zeros_like(entropies)


class _DirectedLogprobs(DirectedFunction):
    """For a frozen head: the forward pass stores each token's direction, the backward pass scales it."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        predicts: torch.Tensor,
        targets: torch.Tensor,
        scale: LogitScale,
        entropy: bool,
        chunk_tokens: int,
        with_gradient: bool,
        supports: PackedSupports | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        dtype = wide_type(hidden.dtype)
        logprobs, entropies = torch.empty(2, len(targets), dtype=dtype, device=hidden.device).unbind()
        directions = hidden.new_empty((len(targets) if with_gradient else 0, hidden.shape[1]))
        plain = not hidden.is_cuda and hidden.dtype == dtype and scale.softcap is None and supports is None
        for start in range(0, len(targets), chunk_tokens):
            chunk = slice(start, start + chunk_tokens)
            if plain:
                rows = hidden.index_select(0, predicts[chunk])
                direction = directions[chunk] if with_gradient else None
                made = _direct(rows, weight, bias, targets[chunk], scale.slope, entropy, direction)
                logprobs[chunk], entropies[chunk] = made
                continue
            logits = wide_logits(hidden.index_select(0, predicts[chunk]), weight, bias)
            if supports is None:
                delta = _deltas_like(logits, hidden) if with_gradient else None
                reduced = reduce_logits(logits, targets[chunk], scale, delta)
            else:
                block = supports.block(start, start + len(logits), logits.shape[1])
                reduced = reduce_supports(logits, block, scale, delta=with_gradient)
                delta = logits.to(hidden.dtype) if with_gradient else None
            logprobs[chunk], _, entropies[chunk] = reduced
            if delta is not None:
                torch.mm(delta, weight, out=directions[chunk])
        DirectedFunction.keep_directions(ctx, directions, predicts, hidden.shape[0])
        ctx.mark_non_differentiable(entropies)
        return logprobs, entropies


def _deltas_like(logits: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """A buffer for the derivative of logits in the type of the hidden states: the logits' own if the types agree."""
    return logits if logits.dtype == hidden.dtype else torch.empty_like(logits, dtype=hidden.dtype)


def _direct(
    rows: torch.Tensor,  # [rows, d]
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,  # [rows]
    slope: float,
    entropy: bool,
    direction: torch.Tensor | None,  # [rows, d], filled in if given
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and entropies of a chunk on a CPU, in four passes over its logits, five with entropies.

    A factor of a whole row of logits is applied to its hidden state or its direction instead, and the target's share of
    the direction is a row of the weight: neither takes a pass.
    """
    logits = F.linear(rows * slope, weight, None if bias is None else bias * slope)
    highest = logits.amax(-1)
    shifted = logits.sub_(highest[:, None])
    chosen = shifted.gather(1, targets[:, None])[:, 0]
    masses = shifted.exp() if entropy else shifted.exp_()
    totals = masses.sum(-1)
    logs = totals.log()
    entropies = logs - torch.linalg.vecdot(masses, shifted) / totals if entropy else torch.zeros_like(logs)
    if direction is not None:
        torch.mm(masses, weight, out=direction)
        direction.div_(totals[:, None]).neg_().add_(weight.index_select(0, targets)).mul_(slope)
    return chosen - logs, entropies


class _TokenLogprobs(torch.autograd.Function):
    """Recomputes the logits in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        predicts: torch.Tensor,
        targets: torch.Tensor,
        scale: LogitScale,
        entropy: bool,
        entropy_gradient: bool,
        chunk_tokens: int,
        supports: PackedSupports | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        dtype = wide_type(hidden.dtype)
        logprobs = torch.empty(len(targets), dtype=dtype, device=hidden.device)
        normalizers = torch.empty_like(logprobs)
        entropies = torch.zeros_like(logprobs)
        for start in range(0, len(targets), chunk_tokens):
            chunk = slice(start, start + chunk_tokens)
            logits = wide_logits(hidden.index_select(0, predicts[chunk]), weight, bias)
            if supports is not None:
                block = supports.block(start, start + len(logits), logits.shape[1])
                logprobs[chunk], normalizers[chunk], entropies[chunk] = reduce_supports(logits, block, scale)
                continue
            if logits.is_cuda:
                logprobs[chunk], normalizers[chunk], entropies[chunk] = reduce_logits(logits, targets[chunk], scale)
                continue
            logits = scale.apply_(logits)
            normalizer = logits.logsumexp(-1)
            normalizers[chunk] = normalizer
            logprobs[chunk] = logits.gather(1, targets[chunk, None])[:, 0] - normalizer
            if entropy:
                probabilities = (logits - normalizer[:, None]).exp_()
                entropies[chunk] = normalizer - torch.linalg.vecdot(probabilities, logits)
        ctx.save_for_backward(hidden, weight, bias, predicts, targets, normalizers, entropies)
        ctx.scale, ctx.chunk_tokens, ctx.entropy_gradient = scale, chunk_tokens, entropy_gradient
        ctx.supports = supports
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, predicts, targets, normalizers, entropies = ctx.saved_tensors
        dtype = normalizers.dtype
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.zeros_like(hidden) if need_hidden else None
        # Summed over chunks in float32, whatever the type of the weights; a single chunk needs no sum.
        grad_weight: torch.Tensor | None = None
        grad_bias = torch.zeros_like(bias, dtype=dtype) if need_bias else None
        for start in range(0, len(targets), ctx.chunk_tokens):
            chunk = slice(start, start + ctx.chunk_tokens)
            index = predicts[chunk]
            rows = hidden.index_select(0, index)
            logits = wide_logits(rows, weight, bias)
            if ctx.supports is not None:
                block = ctx.supports.block(start, start + len(logits), logits.shape[1])
                with_entropy = (entropies[chunk], grads[1][chunk]) if ctx.entropy_gradient else ()
                delta = deltas_of_supports(logits, block, normalizers[chunk], grads[0][chunk], ctx.scale, *with_entropy)
            elif ctx.entropy_gradient:
                delta = deltas_with_entropy(
                    logits, targets[chunk], normalizers[chunk], entropies[chunk], grads[0][chunk], grads[1][chunk],
                    ctx.scale,
                )  # fmt: skip
            else:
                into = logits if need_bias else _deltas_like(logits, hidden)
                delta = deltas_from(logits, targets[chunk], normalizers[chunk], grads[0][chunk], ctx.scale, into)
            if grad_bias is not None:
                # The bias is added before the multiplier, like the product with the weight.
                grad_bias += delta.sum(0, dtype=dtype)
            delta = delta.to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden.index_copy_(0, index, delta @ weight)
            if need_weight:
                part = delta.t() @ rows
                grad_weight = part if grad_weight is None else grad_weight.to(dtype).add_(part)
        if need_weight and grad_weight is None:
            grad_weight = torch.zeros_like(weight)
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            *([None] * 7),
        )
