"""Linear layers over one input as one product, with the adapters of all slots.

Query, key and value are one product, and so are gate and up. The weights stay where they are shared: a product reads
one storage, and the layers' own Parameters become views of it. There are two layouts, one for each set of kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from stretto.engines.native.lora_slots import SlotMask, SlottedLinear
from stretto.models.float32_products import HALF, adds_in_place, wide_mm

ADDED_FROM = 1024  # tokens of a product that adds to the residual stream itself; few tokens are bound by the weights
Linear = nn.Linear | SlottedLinear


class Product(Protocol):
    """The layers of one product. `bs` are the adapters' second factors that the reader of the output has to apply."""

    bs: tuple[Tensor | None, ...]  # one a layer; None: nothing to apply

    @property
    def scale(self) -> float:
        """The scale of all adapters in `bs`."""
        ...

    def __call__(self, x: Tensor) -> Tensor:
        """Returns the outputs of all layers side by side, [tokens, out or more], from [tokens, in]."""
        ...

    def add_to(self, stream: Tensor, x: Tensor) -> Tensor | None:
        """Adds the output to the residual stream, or returns it for `add_norm` to add."""
        ...


class StackedProduct:
    """One matrix [outs + columns, in], for kernels that finish the adapters where they read the output.

    The last rows are the adapters' `A`, layer by layer and slot by slot, so that their product needs no launch of its
    own; its results are the last columns of the output. The output of `add_to` is float32. Each Parameter becomes a
    view of its rows, contiguous as it was.
    """

    def __init__(self, *linears: Linear) -> None:
        columns = max((linear.lora_a.shape[1] for linear in linears if isinstance(linear, SlottedLinear)), default=0)
        whole, self.bias = _stacked(linears, columns)
        self.weight = whole.t()
        masks = [linear.mask for linear in linears if isinstance(linear, SlottedLinear)]
        self._mask: SlotMask | None = masks[0] if masks else None
        self.bs = tuple(linear.lora_b if isinstance(linear, SlottedLinear) else None for linear in linears)
        # Without adapters and a bias, the output is all that is to be added.
        self._adds = not columns and self.bias is None and adds_in_place(whole.device, whole.dtype)

    @property
    def scale(self) -> float:
        return 1.0 if self._mask is None else self._mask.scale

    def __call__(self, x: Tensor) -> Tensor:
        return torch.mm(x, self.weight) if self.bias is None else torch.addmm(self.bias, x, self.weight)

    def add_to(self, stream: Tensor, x: Tensor) -> Tensor | None:
        if self._adds and x.shape[0] >= ADDED_FROM:
            torch.ops.aten.addmm.dtype_out(stream, x, self.weight, stream.dtype, out=stream)
            return None
        return wide_mm(x, self.weight, self.bias)


def _stacked(linears: Sequence[Linear], columns: int) -> tuple[Tensor, Tensor | None]:
    """Moves the weights and biases of layers into one matrix and one vector, with `columns` rows of `A` a layer.

    A layer without an adapter beside one that has it gets rows of zeros.
    """
    first = linears[0].weight
    outs = sum(linear.out_features for linear in linears)
    whole = first.new_zeros(outs + columns * len(linears), linears[0].in_features)
    bias = None if all(linear.bias is None for linear in linears) else first.new_zeros(whole.shape[0])
    at = 0
    for linear in linears:
        own = slice(at, at + linear.out_features)
        linear.weight.data = whole[own].copy_(linear.weight.detach())
        if bias is not None:
            linear.bias.data = bias[own].copy_(linear.bias.detach())
        at += linear.out_features
    for linear in linears:
        if isinstance(linear, SlottedLinear):
            linear.place(whole[at : at + columns].t(), linear.lora_b)
        at += columns
    return whole, bias


class JoinedProduct:
    """One matrix [in, outs], which a CPU reads in order; the adapters are applied at once.

    Read the other way, products of few rows take up to four times as long on a CPU. The `B` of several layers lie on
    the diagonal of one matrix, so that each layer's output sees its own columns alone.
    """

    scale = 1.0

    def __init__(self, *linears: Linear) -> None:
        self.in_features = linears[0].in_features
        self._widths = [linear.out_features for linear in linears]
        self.bs: tuple[Tensor | None, ...] = (None,) * len(linears)
        self.weight = joined([linear.weight for linear in linears])
        biases = [linear.bias for linear in linears if linear.bias is not None]
        self.bias = joined(biases) if biases else None
        self._mask: SlotMask | None = None
        self.a = self.b = self.weight.new_empty(0)
        adapted = [linear for linear in linears if isinstance(linear, SlottedLinear)]
        self._num_adapted = len(adapted)
        if adapted:
            self._mask = adapted[0].mask
            self._join_adapters(linears, adapted)
        self.shape = (self.in_features, tuple(self._widths), self.bias is None, len(adapted))

    def _join_adapters(self, linears: Sequence[Linear], adapted: Sequence[SlottedLinear]) -> None:
        columns = adapted[0].lora_b.shape[0]
        self.a = self.weight.new_zeros(self.in_features, columns * len(adapted))
        self.b = self.weight.new_zeros(columns * len(adapted), sum(self._widths))
        at = out = 0
        for linear, width in zip(linears, self._widths, strict=True):
            if isinstance(linear, SlottedLinear):
                own = slice(at, at + columns)
                linear.place(self.a[:, own], self.b[own, out : out + width])
                at += columns
            out += width

    def __call__(self, x: Tensor) -> Tensor:
        y = torch.mm(x, self.weight) if self.bias is None else torch.addmm(self.bias, x, self.weight)
        if self._mask is None:
            return y
        h = torch.mm(x, self.a).masked_fill_(self._mask.foreign_of[self._num_adapted], 0.0)
        return y.addmm_(h, self.b, alpha=self._mask.scale)

    def add_to(self, stream: Tensor, x: Tensor) -> None:
        add_product(stream, x, self.weight)
        if self.bias is not None:
            stream.add_(self.bias)
        if self._mask is not None:
            h = torch.mm(x, self.a).masked_fill_(self._mask.foreign_of[self._num_adapted], 0.0)
            add_product(stream, h, self.b, self._mask.scale)

    def trials(self, generator: torch.Generator) -> Iterator[Callable[[Tensor], Tensor]]:
        """Yields each product of a forward as a function of [tokens, in], with random numbers for the adapters."""
        weight, bias = self.weight, self.bias
        yield lambda x: torch.mm(x, weight) if bias is None else torch.addmm(bias, x, weight)
        yield lambda x: add_product(torch.ones(x.shape[0], weight.shape[1]), x, weight)
        if self._mask is not None:
            yield from adapter_trials(self.in_features, self.b, generator)


def adapter_trials(in_features: int, b: Tensor, generator: torch.Generator) -> Iterator[Callable[[Tensor], Tensor]]:
    """Yields the two products of adapters, with random numbers in the shape and layout of `b` [columns, out]."""
    columns, width = b.shape
    first = torch.randn(in_features, columns, generator=generator).to(b)
    second = torch.randn(columns, width, generator=generator).to(b)
    yield lambda x: torch.mm(x, first)
    yield lambda x: x.new_ones(x.shape[0], width).addmm_(torch.mm(x, first), second, alpha=2.0)
    if b.dtype in HALF:
        yield lambda x: add_product(torch.ones(x.shape[0], width), torch.mm(x, first), second, 2.0)


def add_product(stream: Tensor, x: Tensor, weight: Tensor, scale: float = 1.0) -> Tensor:
    """Adds `scale * (x @ weight)` to the float32 stream in place; products of half precision are not rounded."""
    if x.dtype in HALF:
        return stream.add_(wide_mm(x, weight), alpha=scale)
    return stream.addmm_(x, weight, alpha=scale)


def joined(weights: Sequence[Tensor]) -> Tensor:
    """Returns weights [out, in] side by side as one matrix [in, outs], or biases [out] as one vector.

    If they do not lie so already, their values move into a new storage and each weight becomes a view of it: a
    Parameter stays the object that others hold, and the weights are in memory once.
    """
    first, widths = weights[0], [weight.shape[0] for weight in weights]
    total, place = sum(widths), first.storage_offset()
    for weight, width in zip(weights, widths, strict=True):
        same = weight.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not same or weight.storage_offset() != place or weight.stride() != (1, total)[: weight.dim()]:
            break
        place += width
    else:
        size, stride = (*first.shape[1:], total), (total, 1)[-first.dim() :]
        return first.detach().as_strided(size, stride)
    whole = torch.cat([weight.detach().t() for weight in weights], dim=-1).contiguous()
    for weight, view in zip(weights, whole.split_with_sizes(widths, -1), strict=True):
        weight.data = view.t()
    return whole
