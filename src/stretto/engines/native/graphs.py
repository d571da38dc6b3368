"""Work that is captured once and replayed: kept by key, the least recently used let go."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from stretto.engines.native.capture import CAPTURE, release_cached

logger = logging.getLogger(__name__)

MAX_GRAPHS = 96  # that are kept; each holds some megabytes

Body = Callable[[], object]
Keeping = Callable[[], AbstractContextManager[None]]


class Graphs:
    """Captured graphs of one engine. `wait` waits until nothing runs any more that any of them launched."""

    def __init__(self, wait: Callable[[], None], *, captures: bool) -> None:
        self._wait, self._captures = wait, captures
        self._graphs: OrderedDict[Hashable, torch.cuda.CUDAGraph] = OrderedDict()
        self._pools: dict[int, Any] = {}  # of memory, by lane
        self.num_captured = 0  # since the start, those that are gone included
        self._failed: list[torch.cuda.CUDAGraph] = []  # an allocator may still ask for one whose capture broke off

    def __len__(self) -> int:
        return len(self._graphs)

    def forget(self) -> None:
        """Drop what was captured: the memory that it points at is about to go.

        An allocator refuses a pool that no graph uses any more and that somebody still holds a tensor of, so that what
        is captured next has pools of its own.
        """
        self._graphs.clear()
        self._pools.clear()

    def retire(self) -> None:
        """Let go of memory that captured graphs point at, and that launched ones may still use."""
        self._wait()
        self.forget()

    def run(
        self,
        key: Hashable,
        body: Body,
        lane: int,  # graphs of one never run at once, so that they share their memory
        keeping: Keeping = nullcontext,
    ) -> None:
        """Do what `body` does, as it was captured under `key`; capture it first, unless somebody else captures now.

        To be captured it runs once more, in a context of `keeping`, which takes back what must not happen twice. A
        capture that breaks off is the last: its pool cannot be trusted, and what is not captured yet runs as it is.
        Only a lack of memory is an error.
        """
        graph = self._graphs.get(key)
        if graph is None and self._captures and CAPTURE.acquire(blocking=False):
            try:
                graph = self._capture(key, body, lane, keeping)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                logger.warning("%s could not be captured; from now on nothing more is: %s", key, error)
                self._captures = False
            finally:
                CAPTURE.release()
        if graph is None:
            body()
            return
        self._graphs.move_to_end(key)
        graph.replay()

    def _capture(self, key: Hashable, body: Body, lane: int, keeping: Keeping) -> torch.cuda.CUDAGraph:
        """Capture, giving back what was captured before where memory runs out. `CAPTURE` is held."""
        while len(self._graphs) >= MAX_GRAPHS:
            self._graphs.popitem(last=False)
        graph = self._try_capture(body, lane, keeping)
        if graph is None:
            release_cached()
            graph = self._try_capture(body, lane, keeping)
        if graph is None:
            logger.warning("no memory to capture %s: %d others go", key, len(self._graphs))
            self.retire()
            release_cached()
            graph = self._capture_once(body, lane, keeping)
        self._graphs[key] = graph
        self.num_captured += 1
        logger.debug("captured %s", key)
        return graph

    def _try_capture(self, body: Body, lane: int, keeping: Keeping) -> torch.cuda.CUDAGraph | None:
        """None where memory runs out; the error, and with it all that the try had made, is gone when this returns."""
        try:
            return self._capture_once(body, lane, keeping)
        except torch.OutOfMemoryError:
            return None

    def _capture_once(self, body: Body, lane: int, keeping: Keeping) -> torch.cuda.CUDAGraph:
        """Run `body` once, so that kernels are compiled and libraries set up, take its effect back, and record it."""
        with keeping():
            body()
        graph, pool = torch.cuda.CUDAGraph(), self._pool(lane)
        stream = torch.cuda.current_stream()
        stream.synchronize()
        try:
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                body()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:
            self._failed.append(graph)
            raise
        return graph

    def _pool(self, lane: int) -> Any:
        if lane not in self._pools:
            self._pools[lane] = torch.cuda.graph_pool_handle()
        return self._pools[lane]
