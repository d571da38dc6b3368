"""The paged KV cache: one tensor for all layers, with a free list of pages that are counted by reference.

Page 0 is scratch: rows that only pad a batch write there, and no other row reads it. A page with more than one
reference holds tokens of a prompt that several samples share, and is never written again. Some references are
*retained*: they belong to a trajectory that has ended and may be followed by another turn. A page that has no other
references is idle.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from stretto.engines.native.capture_lock import release_cached
from stretto.models.routing import RoutingShape

PAGE = 16  # tokens a page
CONSECUTIVE = 32  # pages taken at once that are the lowest free ones: attention over consecutive pages needs no gather
COPY_BYTES = 64 * 2**20  # of pages that are copied at once


def num_pages(tokens: int) -> int:
    """Returns the number of pages that hold `tokens` tokens."""
    return -(-tokens // PAGE)


@dataclass(frozen=True, slots=True)
class RoutingRead:
    """A record of routing on its way to the host."""

    host: Tensor  # [tokens, layers, k]
    arrived: torch.cuda.Event | None  # None: already there

    @property
    def is_done(self) -> bool:
        return self.arrived is None or bool(self.arrived.query())  # type: ignore[no-untyped-call]

    def wait(self) -> NDArray[Any]:
        """Waits for the record and returns it."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.host.numpy()


class KVCache:
    """`storage` is [layers, 2, pages * PAGE, kv heads, head size]; a token lives at the slot `page * PAGE + offset`.

    With `routing`, the experts of each token are kept at the same slots, in `routing` [pages * PAGE, layers, k].
    """

    def __init__(
        self,
        layers: int,
        kv_heads: int,
        head_size: int,
        pages: int,
        dtype: torch.dtype,
        device: torch.device,
        routing: RoutingShape | None = None,
    ) -> None:
        self.layers, self.kv_heads, self.head_size = layers, kv_heads, head_size
        self._routing_shape = routing
        self._allocate(pages, dtype, device)

    def _allocate(self, pages: int, dtype: torch.dtype, device: torch.device) -> None:
        shape = (self.layers, 2, (pages + 1) * PAGE, self.kv_heads, self.head_size)
        self.storage = torch.zeros(shape, dtype=dtype, device=device)
        self.of_layer = [(layer[0], layer[1]) for layer in self.storage]  # keys and values, views
        self.routing: Tensor | None = None
        if (own := self._routing_shape) is not None:
            self.routing = torch.zeros((pages + 1) * PAGE, own.layers, own.chosen, dtype=own.dtype, device=device)
        self.num_pages = pages
        self._free = list(range(pages, 0, -1))  # the next one last
        self._is_ordered = True  # the lowest page is the next one
        self._references = [0] * (pages + 1)
        self._retained = [0] * (pages + 1)  # of these references
        self.num_idle = 0

    def resize(self, pages: int) -> None:
        """Frees the storage and allocates one of `pages` pages. No page may be in use, nor the storage by a launch."""
        assert len(self._free) == self.num_pages, "a cache with pages in use cannot be resized"
        dtype, device = self.storage.dtype, self.storage.device
        self.of_layer, self.storage, self.routing = [], torch.empty(0), None
        if device.type == "cuda":
            release_cached()
        self._allocate(pages, dtype, device)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of the keys and values of one token over all layers."""
        return self.layers * 2 * self.kv_heads * self.head_size * self.storage.element_size()

    def record_routing(self, writes: Tensor, ids: Tensor) -> None:
        """Records the experts `ids` [T, layers, k] of the tokens at the slots `writes` [T]."""
        assert self.routing is not None
        self.routing.index_copy_(0, writes.to(torch.int64), ids.to(self.routing.dtype))

    def stop_recording(self) -> None:
        """Frees the records of routing, and keeps none from now on. No launch may use them."""
        self._routing_shape = self.routing = None

    def read_routing(self, pages: Sequence[int], start: int, tokens: int) -> RoutingRead:
        """Starts to copy the record of tokens `start` to `tokens` of a list of pages to the host."""
        assert self.routing is not None
        slots = self.slots(pages, tokens, torch.device("cpu"))[start:]
        if self.routing.device.type != "cuda":
            return RoutingRead(self.routing.index_select(0, slots), None)
        found = self.routing.index_select(0, slots.pin_memory().to(self.routing.device, non_blocking=True))
        host = torch.empty(found.shape, dtype=found.dtype, pin_memory=True)
        host.copy_(found, non_blocking=True)
        arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrived.record()
        return RoutingRead(host, arrived)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Returns free pages, with one reference each. The caller has made sure that there are enough.

        If they are many, they ascend, and are consecutive where the free ones are.
        """
        assert count <= len(self._free), "the scheduler took more pages than are free"
        if count >= CONSECUTIVE and not self._is_ordered:
            self._free.sort(reverse=True)
            self._is_ordered = True
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._references[page] = 1
        return pages

    def share(self, pages: Sequence[int]) -> None:
        """Adds a reference to each page."""
        for page in pages:
            self._add(page, 1, 0)

    def release(self, pages: Sequence[int]) -> None:
        """Removes a reference from each page; a page without any is free."""
        for page in pages:
            self._add(page, -1, 0)

    def retain(self, pages: Sequence[int]) -> None:
        """Adds a retained reference to each page."""
        for page in pages:
            self._add(page, 1, 1)

    def claim(self, pages: Sequence[int]) -> None:
        """Turns a retained reference to each page into an ordinary one."""
        for page in pages:
            self._add(page, 0, -1)

    def _add(self, page: int, references: int, retained: int) -> None:
        was = 0 < self._references[page] == self._retained[page]
        self._references[page] += references
        self._retained[page] += retained
        assert self._references[page] >= self._retained[page] >= 0, "a page was released twice"
        self.num_idle += (0 < self._references[page] == self._retained[page]) - was
        if not self._references[page]:
            self._is_ordered &= not self._free or page < self._free[-1]
            self._free.append(page)

    def slots(self, pages: Sequence[int], tokens: int, device: torch.device | None = None) -> Tensor:
        """Returns the slots [tokens] of the first `tokens` tokens of a list of pages, int32."""
        table = torch.tensor(pages, dtype=torch.int32, device=device or self.storage.device)
        return (table[:, None] * PAGE + torch.arange(PAGE, dtype=torch.int32, device=table.device)).view(-1)[:tokens]

    def read(self, pages: Sequence[int], tokens: int) -> Tensor:
        """Returns a copy in host memory, [layers, 2, tokens, kv heads, head size].

        It is made layer by layer: a row leaves when memory is short, and a long one is gigabytes.
        """
        slots, shape = self.slots(pages, tokens), (self.layers, 2, tokens, self.kv_heads, self.head_size)
        kv = torch.empty(shape, dtype=self.storage.dtype)
        for into, layer in zip(kv, self.storage, strict=True):
            into.copy_(layer.index_select(1, slots))
        return kv

    def write(self, pages: Sequence[int], kv: Tensor) -> None:
        """Writes a copy that `read` made."""
        slots = self.slots(pages, kv.shape[2]).long()
        for layer, own in zip(self.storage, kv, strict=True):
            layer.index_copy_(1, slots, own.to(layer.device, layer.dtype))

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies pages (source, target): each sample gets its own copy of the page that its prompt ends in.

        No page may be a source and a target. Many groups may start at once, so a part is copied after the other: what
        is gathered takes memory that nobody has planned for.
        """
        if not pairs:
            return
        pages = self.storage.view(self.layers, 2, -1, PAGE, self.kv_heads, self.head_size)
        routing = None if self.routing is None else self.routing.view(-1, PAGE, *self.routing.shape[1:])
        if len(pairs) == 1:
            pages[:, :, pairs[0][1]] = pages[:, :, pairs[0][0]]
            if routing is not None:
                routing[pairs[0][1]] = routing[pairs[0][0]]
            return
        source, target = torch.tensor(pairs).t()
        if pages.device.type == "cuda":
            source, target = (side.pin_memory().to(pages.device, non_blocking=True) for side in (source, target))
        most = max(1, COPY_BYTES // (PAGE * self.bytes_per_token))
        for part, into in zip(source.split(most), target.split(most), strict=True):
            pages.index_copy_(2, into, pages.index_select(2, part))
            if routing is not None:
                routing.index_copy_(0, into, routing.index_select(0, part))
