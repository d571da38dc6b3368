"""KV in host memory, between two turns of an episode: copies out of the cache and back, and what they cost.

On a GPU, copies go through pinned memory on a stream of their own, so decoding continues meanwhile. Streams are ordered
by events, and the host waits for none of them:

| who waits           | for                              | because                                              |
|---------------------|----------------------------------|------------------------------------------------------|
| a copy, out or in   | everything launched before       | a launch may still write its pages, or read them     |
| the engine's stream | a copy that is `order_after`     | its pages are about to be used for something else    |

On a CPU a copy is done when the call returns.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stretto.engines.host_memory import usable_memory
from stretto.engines.native.cache import PAGE, KVCache

# The most of the machine's memory that the copies of one engine take. Eight engines on one machine take less than half.
MEMORY_SHARE = 0.05
USED_ON_GPUS = False  # the copies have not been tried on a GPU yet: there, KV that leaves is dropped
COPY_S = 1e-3  # what a copy costs apart from its bytes: two launches a layer
NEW_SHARE = 0.3  # the weight of the last copy in the average bandwidth
WINDOW_S = 0.25  # of work over which the prefill rate is measured: many steps, as results arrive a step late
LEAST_PREFILLED = 4096  # tokens; before so many were prefilled, the rate is a guess


@dataclass(slots=True)
class Rates:
    """The speed of copies and of prefilling. They begin with guesses: a slow bus, and a slow device."""

    bytes_per_s: float = 5e9
    prefill_tokens_per_s: float = 5e3
    _best: float = 0.0  # prefill rate; decoding takes part of the time, so every measured rate is too low
    _tokens: int = 0  # prefilled, and seconds of work, when the window began
    _busy_s: float = 0.0

    def copied(self, num_bytes: int, seconds: float) -> None:
        """Notes that a copy of that size took so long."""
        if seconds > 0:
            self.bytes_per_s += NEW_SHARE * (num_bytes / seconds - self.bytes_per_s)

    def worked(self, tokens: int, busy_s: float) -> None:
        """Notes how many tokens were prefilled so far, in how many seconds with work."""
        if busy_s - self._busy_s < WINDOW_S:
            return
        self._best = max(self._best, (tokens - self._tokens) / (busy_s - self._busy_s))
        self._tokens, self._busy_s = tokens, busy_s
        if tokens >= LEAST_PREFILLED:
            self.prefill_tokens_per_s = self._best

    def copy_pays(self, tokens: int, num_bytes: int, *, copies: int) -> bool:
        """Returns True if so many copies that hold up the engine cost less than to prefill the tokens again."""
        return copies * (COPY_S + num_bytes / self.bytes_per_s) < tokens / self.prefill_tokens_per_s


@dataclass(slots=True, eq=False)
class HostCopy:
    """A copy of full pages: [layers, 2, pages, PAGE, kv heads, head size]."""

    kv: Tensor
    began: torch.cuda.Event | None = None  # of the last copy, out or in; None on a CPU
    done: torch.cuda.Event | None = None
    measured: bool = False

    @property
    def num_pages(self) -> int:
        return self.kv.shape[2]

    @property
    def is_done(self) -> bool:
        return self.done is None or bool(self.done.query())  # type: ignore[no-untyped-call]


class HostKV:
    """Makes copies, within a limit on their bytes. One thread calls everything, on the engine's stream."""

    def __init__(self, cache: KVCache, limit_bytes: int | None = None) -> None:
        self._cache = cache
        self._device = cache.storage.device
        self.overlaps = self._device.type == "cuda"  # a copy out costs the engine nothing
        self._stream: torch.cuda.Stream | None = None
        if self.overlaps:
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self.limit_bytes = int(MEMORY_SHARE * usable_memory()) if limit_bytes is None else limit_bytes
        self.num_bytes = 0  # of all copies that are not released
        self.rates = Rates()

    @property
    def num_tokens(self) -> int:
        """Tokens in host memory."""
        return self.num_bytes // self._cache.bytes_per_token

    def size(self, pages: int) -> int:
        """Returns the bytes of a copy of so many pages."""
        return pages * PAGE * self._cache.bytes_per_token

    def pays(self, pages: int, *, at_once: bool) -> bool:
        """Returns True if pages should go to the host rather than be dropped; `at_once`: the engine waits for that."""
        if self.overlaps and not USED_ON_GPUS:
            return False
        copies = 2 if at_once or not self.overlaps else 1
        return self.rates.copy_pays(pages * PAGE, self.size(pages), copies=copies)

    def copy_out(self, pages: Sequence[int]) -> HostCopy:
        """Starts to copy pages to the host. They must not change until it is done, or `order_after` was called."""
        cache = self._cache
        shape = (cache.layers, 2, len(pages), PAGE, cache.kv_heads, cache.head_size)
        copy = HostCopy(torch.empty(shape, dtype=cache.storage.dtype, pin_memory=self.overlaps))
        self.num_bytes += self.size(len(pages))
        self._run(copy, pages, out=True)
        return copy

    def copy_in(self, copy: HostCopy, pages: Sequence[int]) -> None:
        """Starts to copy to pages of the device. The engine's stream may use them after `order_after`."""
        self._run(copy, pages, out=False)

    def order_after(self, copy: HostCopy) -> None:
        """Has the engine's stream wait for a copy."""
        if copy.done is not None:
            torch.cuda.current_stream(self._device).wait_event(copy.done)

    def release(self, copy: HostCopy) -> None:
        """Frees the memory of a copy; if it still runs, once it is done."""
        self.num_bytes -= self.size(copy.num_pages)
        self.measure(copy)

    def measure(self, copy: HostCopy) -> None:
        """Measures the bandwidth, if the copy is done and was not measured before."""
        if copy.measured or copy.began is None or copy.done is None or not copy.is_done:
            return
        copy.measured = True
        self.rates.copied(self.size(copy.num_pages), copy.began.elapsed_time(copy.done) / 1e3)

    def wait(self) -> None:
        """Waits until no copy runs: the cache may be freed afterwards."""
        if self._stream is not None:
            self._stream.synchronize()

    def _run(self, copy: HostCopy, pages: Sequence[int], *, out: bool) -> None:
        index = torch.tensor(pages, dtype=torch.int64)
        if self._stream is None:
            began = time.perf_counter()
            self._copy(copy.kv, index, out=out)
            self.rates.copied(self.size(len(pages)), time.perf_counter() - began)
            return
        launched = torch.cuda.current_stream(self._device).record_event()
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(launched)
            copy.began = self._event()
            self._copy(copy.kv, index.pin_memory().to(self._device, non_blocking=True), out=out)
            copy.done = self._event()
        copy.measured = False

    def _copy(self, kv: Tensor, index: Tensor, *, out: bool) -> None:
        """Copies one layer after the other: what is gathered takes memory that nobody has planned for."""
        cache = self._cache
        for own, layer in zip(kv, cache.storage, strict=True):
            pages = layer.view(2, -1, PAGE, cache.kv_heads, cache.head_size)
            if out:
                own.copy_(pages.index_select(1, index), non_blocking=True)
            else:
                pages.index_copy_(1, index, own.to(self._device, non_blocking=True))

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event
