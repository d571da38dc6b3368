"""Real processes that train together, for tests: each does what it is asked for as its rank, and sends the result."""

from __future__ import annotations

import multiprocessing
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

import torch

from stretto.training.parallel import Ranks, open_rendezvous

DEADLINE_S = 300.0


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _serve(rank: int, count: int, port: int, pipe: Connection) -> None:
    torch.set_num_threads(1)
    store = open_rendezvous("127.0.0.1", port, count=count, timeout_s=DEADLINE_S, first=True) if rank == 0 else None
    ranks = Ranks.join(
        "127.0.0.1", port, rank=rank, count=count, device=torch.device("cpu"), timeout_s=DEADLINE_S, store=store
    )
    while (asked := pipe.recv()) is not None:
        work, arguments = asked
        try:
            pipe.send((work(ranks, *arguments), None))
        except Exception as error:
            pipe.send((None, f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))
    ranks.leave()


class Processes:
    """`count` ranks over gloo. `run` has each of them call a function of a module with its `Ranks`."""

    def __init__(self, count: int = 2) -> None:
        context, port = multiprocessing.get_context("spawn"), free_port()
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, count, port, theirs), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, work: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What each rank returned; raises `AssertionError` where one raised or did not answer."""
        for pipe in self._pipes:
            pipe.send((work, arguments))
        found = []
        for rank, pipe in enumerate(self._pipes):
            assert pipe.poll(DEADLINE_S), f"rank {rank} does not answer"
            value, error = pipe.recv()
            assert error is None, f"rank {rank}: {error}"
            found.append(value)
        return found

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join(10)
            if process.is_alive():
                process.kill()
