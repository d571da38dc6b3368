"""Work that is captured once and replayed: stored by key, with the least recently used graphs dropped."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from stretto.engines.native.capture_lock import CAPTURE, release_cached

logger = logging.getLogger(__name__)

MAX_GRAPHS = 96  # stored; each holds some megabytes

Body = Callable[[], object]
Restoring = Callable[[], AbstractContextManager[None]]


class Graphs:
    """Captured graphs of one engine. `wait` waits until nothing that any of them launched runs any more."""

    def __init__(self, wait: Callable[[], None], *, captures: bool) -> None:
        self._wait, self._captures = wait, captures
        self._graphs: OrderedDict[Hashable, torch.cuda.CUDAGraph] = OrderedDict()
        self._pools: dict[int, Any] = {}  # of memory
        self.num_captured = 0  # since the start, dropped ones included
        self._failed: list[torch.cuda.CUDAGraph] = []  # the allocator may still need one whose capture failed

    def __len__(self) -> int:
        return len(self._graphs)

    def forget(self) -> None:
        """Drops all graphs: the memory that they point at is about to be freed.

        The allocator refuses a pool that no graph uses while a tensor of it is alive, so later captures get new pools.
        """
        self._graphs.clear()
        self._pools.clear()

    def retire(self) -> None:
        """Waits for launched graphs and drops all: memory that they use may be freed afterwards."""
        self._wait()
        self.forget()

    def run(
        self,
        key: Hashable,
        body: Body,
        pool: int,  # graphs of one pool never run at once, so they share their memory
        restoring: Restoring = nullcontext,
    ) -> None:
        """Runs `body` as the graph captured under `key`; captures it first, unless another thread captures now.

        To be captured, `body` runs once more, inside the context `restoring`, which takes back what must not happen
        twice. If a capture fails, nothing more is captured: its pool cannot be trusted, and new work runs uncaptured.
        Only a lack of memory is an error.
        """
        graph = self._graphs.get(key)
        if graph is None and self._captures and CAPTURE.acquire(blocking=False):
            try:
                graph = self._capture(key, body, pool, restoring)
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

    def _capture(self, key: Hashable, body: Body, pool: int, restoring: Restoring) -> torch.cuda.CUDAGraph:
        """Captures, and drops older graphs if memory runs out. `CAPTURE` is held."""
        while len(self._graphs) >= MAX_GRAPHS:
            self._graphs.popitem(last=False)
        graph = self._try_capture(body, pool, restoring)
        if graph is None:
            release_cached()
            graph = self._try_capture(body, pool, restoring)
        if graph is None:
            logger.warning("no memory to capture %s: %d others go", key, len(self._graphs))
            self.retire()
            release_cached()
            graph = self._capture_once(body, pool, restoring)
        self._graphs[key] = graph
        self.num_captured += 1
        logger.debug("captured %s", key)
        return graph

    def _try_capture(self, body: Body, pool: int, restoring: Restoring) -> torch.cuda.CUDAGraph | None:
        """Returns None if memory runs out. The error is gone by then, and with it the tensors of the attempt."""
        try:
            return self._capture_once(body, pool, restoring)
        except torch.OutOfMemoryError:
            return None

    def _capture_once(self, body: Body, pool: int, restoring: Restoring) -> torch.cuda.CUDAGraph:
        """Runs `body` once so that kernels are compiled and libraries set up, takes its effect back, and records it."""
        with restoring():
            body()
        graph, handle = torch.cuda.CUDAGraph(), self._pool(pool)
        stream = torch.cuda.current_stream()
        stream.synchronize()
        try:
            with torch.cuda.graph(graph, pool=handle, stream=stream, capture_error_mode="thread_local"):
                body()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:
            self._failed.append(graph)
            raise
        return graph

    def _pool(self, number: int) -> Any:
        if number not in self._pools:
            self._pools[number] = torch.cuda.graph_pool_handle()
        return self._pools[number]
