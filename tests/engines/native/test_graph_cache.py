"""The store of captured graphs, with captures of our own; and that the release of cached memory waits for captures."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from stretto.engines.native import graph_cache as graphs
from stretto.engines.native.capture_lock import CAPTURE, release_cached
from stretto.engines.native.graph_cache import Graphs


def test_cached_memory_is_released_only_when_nobody_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()
    monkeypatch.setattr(torch.cuda, "empty_cache", released.set)
    thread = threading.Thread(target=release_cached)
    with CAPTURE:
        thread.start()
        assert not released.wait(0.1)
    assert released.wait(10.0)
    thread.join()


@pytest.mark.parametrize(("failures", "kept"), [(0, 2), (1, 2), (2, 1)])
def test_a_capture_without_memory_is_tried_again_with_nothing_of_the_try_before_alive(
    monkeypatch: pytest.MonkeyPatch, failures: int, kept: int
) -> None:
    made: list[weakref.ref[Any]] = []
    alive: list[bool] = []
    waits: list[int] = []

    def capture(self: Any, *_: Any) -> Any:
        alive.extend(one() is not None for one in made)
        held = torch.zeros(4)
        made.append(weakref.ref(held))
        if 1 < len(made) <= failures + 1:  # the first is another's
            raise torch.OutOfMemoryError("CUDA out of memory")
        return SimpleNamespace(replay=lambda: None)

    monkeypatch.setattr(Graphs, "_capture_once", capture)
    store = Graphs(lambda: waits.append(len(store)), captures=True)
    store.run("another", lambda: None, 0)
    store.run("one", lambda: None, 0)
    assert len(made) == failures + 2
    assert not any(alive)
    assert len(store) == kept, "others go only where an empty cache did not do"
    assert waits == ([1] if kept == 1 else []), "and only once nothing runs"


def test_a_capture_for_which_there_is_no_memory_at_all_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def capture(self: Any, *_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Graphs, "_capture_once", capture)
    with pytest.raises(torch.OutOfMemoryError):
        Graphs(lambda: None, captures=True).run("one", lambda: None, 0)
    assert CAPTURE.acquire(blocking=False), "it was let go"
    CAPTURE.release()


def test_the_least_recently_used_go_and_what_is_kept_is_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []

    @contextmanager
    def keeping() -> Iterator[None]:
        log.append("keep")
        yield
        log.append("take back")

    def capture(self: Any, body: Any, lane: int, keeping: Any) -> Any:
        assert lane == 3
        with keeping():
            body()
        return SimpleNamespace(replay=lambda: log.append("replay"))

    monkeypatch.setattr(Graphs, "_capture_once", capture)
    monkeypatch.setattr(graphs, "MAX_GRAPHS", 2)
    store = Graphs(lambda: None, captures=True)
    for key in "abacb":
        log.append(key)
        store.run(key, lambda: log.append("body"), 3, keeping)
    captured = ["keep", "body", "take back", "replay"]
    assert log == ["a", *captured, "b", *captured, "a", "replay", "c", *captured, "b", *captured]
    assert (len(store), store.num_captured) == (2, 4)
    store.forget()
    assert (len(store), store.num_captured) == (0, 4)


def test_where_nothing_is_captured_the_body_runs() -> None:
    ran: list[int] = []
    store = Graphs(lambda: None, captures=False)
    for number in range(2):
        store.run("one", lambda number=number: ran.append(number), 0)  # type: ignore[misc]
    assert ran == [0, 1]
    assert len(store) == 0


def test_a_capture_that_breaks_off_is_the_last(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tries: list[str] = []

    def capture(self: Any, *_: Any) -> Any:
        tries.append("try")
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(Graphs, "_capture_once", capture)
    store, ran = Graphs(lambda: None, captures=True), list[int]()
    for number in range(3):
        store.run(f"key {number}", lambda number=number: ran.append(number), 0)  # type: ignore[misc]
    assert ran == [0, 1, 2]
    assert len(tries) == 1
    assert "key 0 could not be captured" in caplog.text
    assert CAPTURE.acquire(blocking=False), "it was let go"
    CAPTURE.release()


def test_graphs_of_a_lane_share_a_pool_and_what_is_captured_after_all_are_dropped_has_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    handles = itertools.count()
    pools: list[int] = []

    @contextmanager
    def capture(graph: Any, *, pool: int, **_: Any) -> Iterator[None]:
        pools.append(pool)
        yield

    stream = SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(handles))
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=lambda: None))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    store = Graphs(lambda: None, captures=True)
    for key, lane in [("a", 0), ("b", 1), ("c", 0)]:
        store.run(key, lambda: None, lane)
    store.retire()
    for key, lane in [("a", 0), ("b", 1), ("c", 0)]:
        store.run(key, lambda: None, lane)
    assert pools == [0, 1, 0, 2, 3, 2], "torch refuses a pool that is left without graphs while a tensor of it lives"
