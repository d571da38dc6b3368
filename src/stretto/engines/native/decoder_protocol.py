"""The forward of one tree, as the steps call it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from torch import Tensor

Attend = Callable[[int, Tensor, Tensor, float], Tensor]
"""Attention of one layer over the cache: (layer, q [tokens, heads, size], out of the same shape, scale).

Returns the result: `out`, or memory of its own.
"""


class Decoder(Protocol):
    """The forward of one tree over tokens that know their place in the cache."""

    fused: bool  # it can be captured over any number of tokens
    vocabulary: int

    @property
    def layers(self) -> Iterable[object]:
        """The products and linear layers of a forward, for `exact_padding`."""
        ...

    @property
    def scale(self) -> float:
        """The scale of the adapters, which is a constant of a captured step."""
        ...

    def pad_experts(self, rows: int) -> None:
        """Lets the products of experts, if there are any, have at least so many rows on a CPU."""
        ...

    def stop_recording(self) -> None:
        """Lets the forward record no routing from now on. Called before the cache frees its records."""
        ...

    def __call__(
        self,
        tokens: Tensor,  # [tokens]
        positions: Tensor,  # [tokens]
        writes: Tensor,  # [tokens], the cache slot of each token's keys and values
        slots: Tensor,  # [tokens], the slot of the weights that each token runs under
        attend: Attend,
        keep: Tensor | None,  # tokens whose logits are wanted; None: all
        attend_kept: Attend | None = None,
    ) -> Tensor:
        """Returns logits [kept tokens, vocabulary].

        `attend_kept` is the attention of the kept tokens alone. A fused decoder that is given it computes the rest of
        the last layer for these tokens only: of the others, no more than keys and values is ever read.
        """
        ...
