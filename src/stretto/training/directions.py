"""The gradient of a number for each token, behind a head that is not trained.

The derivative of such a number by the token's hidden state is one vector, its *direction*, whatever the incoming
gradient. The forward pass computes it with the number itself, and the backward pass only scales it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable


class DirectedFunction(torch.autograd.Function):
    """A function whose first argument is the hidden states [T, d] and whose first result is a number a token [C].

    A subclass has the forward pass, which ends with `keep_directions`. Other results have no gradient.
    """

    @staticmethod
    def keep_directions(ctx: Any, directions: torch.Tensor, predicts: torch.Tensor, num_tokens: int) -> None:
        """Keeps the directions [C, d] of the rows `predicts` of the hidden states, of which there are `num_tokens`."""
        ctx.save_for_backward(directions, predicts)
        ctx.num_tokens = num_tokens

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        directions, predicts = ctx.saved_tensors
        grad_hidden = directions.new_zeros((ctx.num_tokens, directions.shape[1]))
        scaled = (directions * grads[0][:, None]).to(directions.dtype)
        return (grad_hidden.index_copy_(0, predicts, scaled), *([None] * (len(ctx.needs_input_grad) - 1)))
