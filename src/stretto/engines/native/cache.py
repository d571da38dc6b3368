"""The paged KV cache: one tensor for all layers, pages handed out from a free list and counted by reference.

Page 0 is scratch: rows that only fill a batch up write there, and nothing else ever reads it. A page with more than one
reference holds tokens of a prompt that several samples share, and is never written again. References may be those of
what has ended and is *kept* for what may follow: a page that has no others is idle.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from stretto.engines.native.capture import release_cached

PAGE = 16  # tokens a page


def num_pages(tokens: int) -> int:
    """Pages that hold `tokens` tokens."""
    return -(-tokens // PAGE)


class KVCache:
    """`storage` is [layers, 2, pages * PAGE, kv heads, head size]; a token lives at the slot `page * PAGE + offset`."""

    def __init__(
        self, layers: int, kv_heads: int, head_size: int, pages: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.layers, self.kv_heads, self.head_size = layers, kv_heads, head_size
        self._allocate(pages, dtype, device)

    def _allocate(self, pages: int, dtype: torch.dtype, device: torch.device) -> None:
        shape = (self.layers, 2, (pages + 1) * PAGE, self.kv_heads, self.head_size)
        self.storage = torch.zeros(shape, dtype=dtype, device=device)
        self.of_layer = [(layer[0], layer[1]) for layer in self.storage]  # keys and values, views
        self.num_pages = pages
        self._free = list(range(pages, 0, -1))
        self._references = [0] * (pages + 1)
        self._kept = [0] * (pages + 1)  # of these references
        self.num_idle = 0

    def resize(self, pages: int) -> None:
        """Give the storage back and take one of `pages` pages. Nothing may be in it, and nothing that runs use it."""
        assert len(self._free) == self.num_pages, "a cache with pages in use cannot be resized"
        dtype, device = self.storage.dtype, self.storage.device
        self.of_layer, self.storage = [], torch.empty(0)
        if device.type == "cuda":
            release_cached()
        self._allocate(pages, dtype, device)

    @property
    def bytes_per_token(self) -> int:
        """Of the keys and values of all layers."""
        return self.layers * 2 * self.kv_heads * self.head_size * self.storage.element_size()

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Pages with one reference each. The caller has made sure that there are enough."""
        assert count <= len(self._free), "the scheduler took more pages than are free"
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._references[page] = 1
        return pages

    def share(self, pages: Sequence[int]) -> None:
        """One more reference to each page."""
        for page in pages:
            self._add(page, 1, 0)

    def release(self, pages: Sequence[int]) -> None:
        """One reference less to each page; a page without any is free."""
        for page in pages:
            self._add(page, -1, 0)

    def keep(self, pages: Sequence[int]) -> None:
        """One more reference to each page, for what may follow."""
        for page in pages:
            self._add(page, 1, 1)

    def take_over(self, pages: Sequence[int]) -> None:
        """References that were kept are ordinary ones from now on."""
        for page in pages:
            self._add(page, 0, -1)

    def _add(self, page: int, references: int, kept: int) -> None:
        was = 0 < self._references[page] == self._kept[page]
        self._references[page] += references
        self._kept[page] += kept
        assert self._references[page] >= self._kept[page] >= 0, "a page was released twice"
        self.num_idle += (0 < self._references[page] == self._kept[page]) - was
        if not self._references[page]:
            self._free.append(page)

    def slots(self, pages: Sequence[int], tokens: int, device: torch.device | None = None) -> Tensor:
        """The slots [tokens] of the first `tokens` tokens of a list of pages, int32."""
        table = torch.tensor(pages, dtype=torch.int32, device=device or self.storage.device)
        return (table[:, None] * PAGE + torch.arange(PAGE, dtype=torch.int32, device=table.device)).view(-1)[:tokens]

    def read(self, pages: Sequence[int], tokens: int) -> Tensor:
        """A copy in host memory, [layers, 2, tokens, kv heads, head size].

        Layer by layer: a row leaves where memory is short, and all of a long one is gigabytes.
        """
        slots, shape = self.slots(pages, tokens), (self.layers, 2, tokens, self.kv_heads, self.head_size)
        kv = torch.empty(shape, dtype=self.storage.dtype)
        for into, layer in zip(kv, self.storage, strict=True):
            into.copy_(layer.index_select(1, slots))
        return kv

    def write(self, pages: Sequence[int], kv: Tensor) -> None:
        """The inverse of `read`."""
        slots = self.slots(pages, kv.shape[2]).long()
        for layer, own in zip(self.storage, kv, strict=True):
            layer.index_copy_(1, slots, own.to(layer.device, layer.dtype))

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy pages (source, target): samples get their own copy of the page that their prompt ends in."""
        if not pairs:
            return
        pages = self.storage.view(self.layers, 2, -1, PAGE, self.kv_heads, self.head_size)
        if len(pairs) == 1:
            pages[:, :, pairs[0][1]] = pages[:, :, pairs[0][0]]
            return
        source, target = torch.tensor(pairs).t()
        if pages.device.type == "cuda":
            source, target = (side.pin_memory().to(pages.device, non_blocking=True) for side in (source, target))
        pages.index_copy_(2, target, pages.index_select(2, source))
