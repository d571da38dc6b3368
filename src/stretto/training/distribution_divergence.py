"""The divergence of the policy from a teacher over whole distributions, without storing the logits of all tokens.

At a token with the policy `p = softmax(u)` and the teacher `q`, the divergence is `sum_i p_i (log p_i - log q_i)`. With
`d_i = log p_i - log q_i` its derivative is `d KL / d u_i = p_i (d_i - KL)`. Both need two blocks of logits, one of each
model, which are made a chunk of tokens at a time in float32 and overwritten in place.

Only the `shared` first tokens of both vocabularies count: models of one family pad their embeddings to different sizes,
and the tokens behind the tokenizer's last one never occur.

The teacher is given by its `TeacherDistributions`: hidden states with a head, whose logits are computed when they are
needed, or its likeliest tokens (`top_k`). All other tokens then count as one outcome, so that the divergence is one
between distributions over `k + 1` outcomes: never negative, and at most that over the whole vocabulary.

As in `logprobs.py`, there are two ways to the gradient: a frozen head needs one vector a token, which the forward pass
computes with the divergence; a trained head needs the logits of both models again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.autograd.function import once_differentiable

from stretto.models.float32_products import wide_logits, wide_type
from stretto.training.directions import DirectedFunction
from stretto.training.logit_kernels import LogitScale

# Logits of one model in memory at once; there are two such blocks.
CHUNK_ELEMENTS = {"cpu": 1 << 22, "cuda": 1 << 26}
CHUNK_ELEMENTS_TRAINED_HEAD = {"cpu": 1 << 24, "cuda": 1 << 28}
LEAST_MASS = 1e-30  # of the tokens outside of `top_k`, whose logarithm must be finite


class TeacherDistributions(Protocol):
    """The distributions of a teacher at the `C` tokens of a micro-batch."""

    def differences(self, logs: torch.Tensor, start: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Compares a chunk of the policy, `logs` [rows, shared], which begins at token `start`.

        Returns `log p - log q` of every token of the vocabulary [rows, shared], which the caller may overwrite, and the
        teacher's likeliest token [rows].
        """
        ...


@dataclass(frozen=True, slots=True)
class HeadDistributions:
    """The distributions that a head makes of hidden states."""

    states: torch.Tensor  # [C, d]
    weight: torch.Tensor  # [V, d]
    bias: torch.Tensor | None  # [V]
    scale: LogitScale
    shared: int

    def differences(self, logs: torch.Tensor, start: int) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self._logs(start, len(logs), logs.dtype)
        best = logits.argmax(-1)
        return torch.sub(logs, logits, out=logits), best

    def likeliest(self, count: int, chunk_tokens: int | None = None) -> LikeliestTokens:
        """Returns the `count` likeliest tokens of each distribution."""
        rows = chunk_tokens or _chunk_tokens(self.states, self.shared, trained=False)
        dtype = wide_type(self.states.dtype)
        tokens, logprobs, rest = [], [], []
        for start in range(0, len(self.states), rows):
            logs = self._logs(start, rows, dtype)
            values, places = logs.topk(count, dim=-1)
            outside = logs.exp_().scatter_(1, places, 0.0).sum(-1)
            tokens.append(places.int())
            logprobs.append(values)
            rest.append(outside.clamp_(min=LEAST_MASS).log_())
        if not tokens:
            empty = self.states.new_zeros((0, count), dtype=dtype)
            return LikeliestTokens(empty.int(), empty, empty.sum(-1), self.shared)
        return LikeliestTokens(torch.cat(tokens), torch.cat(logprobs), torch.cat(rest), self.shared)

    def _logs(self, start: int, rows: int, dtype: torch.dtype) -> torch.Tensor:
        """The log-probabilities of a chunk [rows, shared]."""
        bias = None if self.bias is None else self.bias[: self.shared]
        logits = wide_logits(self.states[start : start + rows], self.weight[: self.shared], bias)
        logits = self.scale.apply_(logits).to(dtype)
        return logits.sub_(logits.logsumexp(-1, keepdim=True))


@dataclass(frozen=True, slots=True)
class LikeliestTokens:
    """The likeliest tokens of each distribution; the others are one outcome."""

    tokens: torch.Tensor  # [C, k] int32, the likeliest first
    logprobs: torch.Tensor  # [C, k]
    rest: torch.Tensor  # [C], the logarithm of what the others have together
    shared: int

    def differences(self, logs: torch.Tensor, start: int) -> tuple[torch.Tensor, torch.Tensor]:
        chosen = slice(start, start + len(logs))
        places = self.tokens[chosen].long()
        outside = logs.exp().scatter_(1, places, 0.0).sum(-1).clamp_(min=LEAST_MASS).log_()
        found = (outside - self.rest[chosen].to(logs.dtype))[:, None].expand_as(logs).clone()
        found.scatter_(1, places, logs.gather(1, places) - self.logprobs[chosen].to(logs.dtype))
        return found, places[:, 0]


def distribution_divergence(
    hidden: torch.Tensor,  # [T, d]
    weight: torch.Tensor,  # [V, d]
    predicts: torch.Tensor,  # [C] int64, rows of `hidden`, each at most once
    teacher: TeacherDistributions,
    shared: int,  # tokens of the vocabulary that both have
    *,
    bias: torch.Tensor | None = None,  # [V]
    scale: LogitScale | None = None,  # of the policy's logits
    chunk_tokens: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns `KL(policy || teacher)` of each token [C], with gradient, and whether their likeliest tokens agree [C].

    Both are float32, or float64 for float64 inputs; agreement is 1 or 0. The result does not depend on `chunk_tokens`,
    except for rounding.
    """
    trained = torch.is_grad_enabled() and (weight.requires_grad or (bias is not None and bias.requires_grad))
    rows = chunk_tokens or _chunk_tokens(hidden, shared, trained=trained)
    kind: Any = _RecomputedDivergence if trained else _DirectedDivergence
    found: tuple[torch.Tensor, torch.Tensor] = kind.apply(
        hidden, weight, bias, predicts, teacher, scale or LogitScale(), shared, rows
    )
    return found


def _chunk_tokens(hidden: torch.Tensor, shared: int, *, trained: bool) -> int:
    elements = CHUNK_ELEMENTS_TRAINED_HEAD if trained else CHUNK_ELEMENTS
    return max(1, elements.get(hidden.device.type, elements["cuda"]) // shared)


def _reduce(
    rows: torch.Tensor,  # [rows, d]
    weight: torch.Tensor,  # [shared, d]
    bias: torch.Tensor | None,  # [shared]
    teacher: TeacherDistributions,
    start: int,
    scale: LogitScale,
    *,
    delta: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The divergence of each row, agreement, and `d KL / d (output of the head)` [rows, shared] on request."""
    logits = scale.apply_(wide_logits(rows, weight, bias))
    bend = None
    if delta and scale.softcap is not None:
        bend = 1 - (logits * (scale.temperature / scale.softcap)).square_()
    best = logits.argmax(-1)
    logs = logits.sub_(logits.logsumexp(-1, keepdim=True))
    differences, of_teacher = teacher.differences(logs, start)
    probabilities = logs.exp_()
    divergences = torch.linalg.vecdot(probabilities, differences)
    agreement = (best == of_teacher).to(divergences.dtype)
    if not delta:
        return divergences, agreement, None
    result = differences.sub_(divergences[:, None]).mul_(probabilities).mul_(scale.slope)
    return divergences, agreement, result if bend is None else result.mul_(bend)


class _DirectedDivergence(DirectedFunction):
    """For a frozen head: the forward pass stores one vector a token, the backward pass scales it."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        predicts: torch.Tensor,
        teacher: TeacherDistributions,
        scale: LogitScale,
        shared: int,
        chunk_tokens: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        needed = ctx.needs_input_grad[0]
        divergences, agreement = hidden.new_empty((2, len(predicts)), dtype=wide_type(hidden.dtype)).unbind()
        directions = hidden.new_empty((len(predicts) if needed else 0, hidden.shape[1]))
        weight, bias = weight[:shared], None if bias is None else bias[:shared]
        for start in range(0, len(predicts), chunk_tokens):
            chunk = slice(start, start + chunk_tokens)
            rows = hidden.index_select(0, predicts[chunk])
            divergences[chunk], agreement[chunk], delta = _reduce(
                rows, weight, bias, teacher, start, scale, delta=needed
            )
            if delta is not None:
                torch.mm(delta.to(weight.dtype), weight, out=directions[chunk])
        DirectedFunction.keep_directions(ctx, directions, predicts, hidden.shape[0])
        ctx.mark_non_differentiable(agreement)
        return divergences, agreement


class _RecomputedDivergence(torch.autograd.Function):
    """For a trained head: the backward pass computes the logits of both models again."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        predicts: torch.Tensor,
        teacher: TeacherDistributions,
        scale: LogitScale,
        shared: int,
        chunk_tokens: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        divergences, agreement = hidden.new_empty((2, len(predicts)), dtype=wide_type(hidden.dtype)).unbind()
        narrow = None if bias is None else bias[:shared]
        for start in range(0, len(predicts), chunk_tokens):
            chunk = slice(start, start + chunk_tokens)
            rows = hidden.index_select(0, predicts[chunk])
            divergences[chunk], agreement[chunk], _ = _reduce(
                rows, weight[:shared], narrow, teacher, start, scale, delta=False
            )
        ctx.save_for_backward(hidden, weight, bias, predicts)
        ctx.teacher, ctx.scale, ctx.shared, ctx.chunk_tokens = teacher, scale, shared, chunk_tokens
        ctx.mark_non_differentiable(agreement)
        return divergences, agreement

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, predicts = ctx.saved_tensors
        shared, dtype = ctx.shared, wide_type(hidden.dtype)
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.zeros_like(hidden) if need_hidden else None
        # Summed over chunks in float32, whatever the type of the weights.
        grad_weight = torch.zeros_like(weight, dtype=dtype) if need_weight else None
        grad_bias = torch.zeros_like(bias, dtype=dtype) if need_bias else None
        narrow = None if bias is None else bias[:shared]
        for start in range(0, len(predicts), ctx.chunk_tokens):
            chunk = slice(start, start + ctx.chunk_tokens)
            rows = hidden.index_select(0, predicts[chunk])
            _, _, delta = _reduce(rows, weight[:shared], narrow, ctx.teacher, start, ctx.scale, delta=True)
            assert delta is not None
            delta = delta.mul_(grads[0][chunk, None])
            if grad_bias is not None:
                grad_bias[:shared] += delta.sum(0)
            delta = delta.to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden.index_copy_(0, predicts[chunk], delta @ weight[:shared])
            if grad_weight is not None:
                grad_weight[:shared] += delta.t() @ rows
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            *([None] * 5),
        )
