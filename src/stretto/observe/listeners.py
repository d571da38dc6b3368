"""Tells listeners what happens in a run: callbacks of the user, and trackers.

```
the run --> Listeners --> one queue and one thread for each listener --> on_start, on_update, ..., on_end
```

- The run never waits for a listener while it trains. A listener that falls `MOST_QUEUED` events behind loses the
  events that come while its queue is full. They are counted by name. `on_start` and `on_end` are never lost.
- Each listener has a thread of its own, so one that hangs holds up no other. The calls of one listener come one at a
  time, in the order of the run.
- A listener that raises ends nothing. The first failure of each of its methods is logged with its place, and the
  number of the others at the end.
- At the end of a run, `close` waits for the listeners, up to a deadline. A listener that is not done by then is
  abandoned, and the log says what it did not get.

Imports nothing heavy.
"""

from __future__ import annotations

import copy
import difflib
import inspect
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

from stretto.environments.function_specs import last_line
from stretto.errors import RunError

log = logging.getLogger(__name__)

MOST_QUEUED = 1_024  # events of one listener
CLOSE_S = 30.0  # the longest that the end of a run waits for all listeners together

Line = Mapping[str, Any]
"""A line of `metrics.jsonl`. `docs/metrics.md` explains its keys."""

Outcome = Literal["running", "finished", "stopped", "failed", "killed"]


class LiveRun(Protocol):
    """The run that a listener gets: where it is, how it stands, and a way to stop it."""

    @property
    def folder(self) -> Path:
        """The run folder. `config.toml` is in it."""
        ...

    @property
    def outcome(self) -> Outcome:
        """`running` until `on_end`, and then how the run ended."""
        ...

    def stop(self) -> None:
        """Stops the run at its next update boundary. For any thread; safe to call twice."""
        ...


class Callback:
    """The base class of callbacks. Each method does nothing; override those that you need.

    An object of any other class will do too, if it has one of these methods. A callback has a thread of its own: it may
    block, and its calls come one at a time. It gets copies of the lines, which it may keep and change. Its `run` is the
    `stretto.Run` that `stretto.train` returns.
    """

    def on_start(self, run: LiveRun) -> None:
        """Called once before anything else, when the run folder has the recipe. A resumed run calls it again."""

    def on_update(self, line: dict[str, Any]) -> None:
        """Called after each update with its line of `metrics.jsonl`."""

    def on_evaluation(self, line: dict[str, Any]) -> None:
        """Called after each evaluation with its line of `metrics.jsonl`."""

    def on_message(self, text: str) -> None:
        """Called with each sentence that the run says, such as a warning; those before `on_start` come after it."""

    def on_end(self, run: LiveRun) -> None:
        """Called once after anything else, however the run ended; `run.outcome` tells. Not if `on_start` was not."""


METHODS = tuple(name for name in vars(Callback) if name.startswith("on_"))
KINDS = {"update": "on_update", "evaluation": "on_evaluation"}  # kind of a line -> method


class Listeners:
    """Delivers the events of one run to its listeners. Also a sink of metrics (`observe/metrics.py`)."""

    def __init__(
        self, listeners: Iterable[object] = (), *, most_queued: int = MOST_QUEUED, close_s: float = CLOSE_S
    ) -> None:
        """Raises `RunError` for an object that is no listener. No thread is started before `start`."""
        self._most_queued = most_queued
        self._close_s = close_s
        self._channels: list[_Channel] = []
        self._early: deque[str] = deque(maxlen=most_queued)  # messages before the start
        self._started = False
        for listener in listeners:
            self.add(listener)

    def add(self, listener: object, name: str | None = None, *, word: str = "callback") -> None:
        """Adds a listener before the start: an object with some of the methods of `Callback`, or a function.

        A function is called as `on_update`. `word` and `name` stand in warnings; by default `name` is that of the class
        or function.
        """
        assert not self._started
        called = name or getattr(listener, "__name__", None) or type(listener).__name__
        self._channels.append(_Channel(f"{word} `{called}`", methods_of(listener, called, word), self._most_queued))

    def wait_at_most(self, seconds: float) -> None:
        """Sets how long the end of the run waits for all listeners together."""
        self._close_s = seconds

    def __len__(self) -> int:
        return len(self._channels)

    def start(self, run: LiveRun) -> None:
        """Begins to deliver: `on_start`, then the messages so far."""
        assert not self._started
        self._started = True
        for channel in self._channels:
            channel.start(run)
        while self._early:
            self.message(self._early.popleft())

    def write(self, record: Line) -> None:
        """Delivers a line of `metrics.jsonl`, by its `kind`."""
        if (method := KINDS.get(record["kind"])) is not None:
            for channel in self._channels:
                channel.put(method, record)

    def message(self, text: str) -> None:
        """Delivers a message. One before the start is kept until then."""
        if not self._started:
            self._early.append(text)
            return
        for channel in self._channels:
            channel.put("on_message", text)

    def close(self, run: LiveRun) -> None:
        """Delivers `on_end` and waits until the listeners are done, up to the deadline. Safe to call twice."""
        if not self._started:
            return
        self._started = False
        for channel in self._channels:
            channel.end(run)
        until = time.monotonic() + self._close_s
        for channel in self._channels:
            channel.join(max(0.0, until - time.monotonic()), self._close_s)
        self._channels.clear()


def abandoned() -> list[str]:
    """Returns the names of the listeners of this process that were not done when their runs ended."""
    return [thread.name for thread in threading.enumerate() if isinstance(thread, _Deliverer) and thread.is_abandoned]


def methods_of(listener: object, name: str, word: str = "callback") -> dict[str, Callable[[Any], object]]:
    """Returns the methods of a listener that it defines. Raises `RunError` if it is none, or has none.

    `word` and `name` stand in the error.
    """
    known = ", ".join(f"`{method}`" for method in METHODS)
    if isinstance(listener, type):
        raise RunError(f"the {word} `{name}` is a class; give an object of it, such as `{name}()`")
    found = {method: own for method in METHODS if callable(own := getattr(listener, method, None))}
    near = {
        other: close[0]
        for other in dir(listener)
        if other.startswith("on_")
        and other not in METHODS
        and (close := difflib.get_close_matches(other, METHODS, 1, 0.8))
    }
    for other, method in near.items():
        if method not in found or getattr(type(listener), method, None) is getattr(Callback, method):
            raise RunError(f"the {word} `{name}` has a method `{other}`, which nothing calls; did you mean `{method}`?")
    if not found and callable(listener):
        found = {"on_update": listener}
    if not found:
        raise RunError(f"the {word} `{name}` is no function and has none of the methods {known}")
    found = {
        method: own
        for method, own in found.items()
        if getattr(type(listener), method, None) is not getattr(Callback, method)  # does nothing
    }
    for method, own in found.items():
        if inspect.iscoroutinefunction(own) or inspect.iscoroutinefunction(type(own).__call__):
            raise RunError(
                f"the {word} `{name}` is asynchronous in `{method}`; write it with `def`: it has a thread of its own "
                "and may block"
            )
        _refuse_signature(own, f"{word} `{name}`", method)
    return found


def _refuse_signature(method: Callable[[Any], object], name: str, called: str) -> None:
    try:
        inspect.signature(method).bind(None)
    except TypeError as error:
        raise RunError(f"the {name} cannot be called as `{called}` with one argument: {error}") from error
    except ValueError:  # a builtin without a signature
        return


class _Deliverer(threading.Thread):
    """The thread of a listener."""

    is_abandoned = False  # the run has ended without it


class _Channel:
    """The queue and the thread of one listener. `name` stands in warnings, such as "callback `Recorder`"."""

    def __init__(self, name: str, methods: Mapping[str, Callable[[Any], object]], most_queued: int) -> None:
        self._name = name
        self._methods = methods
        self._most = most_queued
        self._queue: deque[tuple[str | None, Any]] = deque()  # method, argument; the method is None at the end
        self._filled = threading.Condition()
        self._thread = _Deliverer(target=self._deliver, name=f"listener {name}", daemon=True)
        self._failures: Counter[str] = Counter()  # by method
        self._num_lost = 0

    def start(self, run: LiveRun) -> None:
        self._append("on_start", run)
        self._thread.start()

    def put(self, method: str, argument: Any) -> None:
        """Queues a call. If the queue is full, it is lost and counted."""
        if method not in self._methods:
            return
        if len(self._queue) >= self._most:
            self._num_lost += 1
            if self._num_lost == 1:
                log.warning(
                    "the %s is %d events behind: what it has no room for is lost to it, and counted; the "
                    "run does not wait",
                    self._name,
                    self._most,
                )
            return
        self._append(method, argument)

    def end(self, run: LiveRun) -> None:
        self._append("on_end", run)
        self._append(None, None)

    def join(self, timeout_s: float, asked_s: float) -> None:
        """Waits for the listener, then logs what it has lost and how often it failed."""
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._thread.is_abandoned = True
            left = sum(method in self._methods for method, _ in list(self._queue))
            log.warning(
                "the %s was not done %g s after the run; it is abandoned, with %d events left",
                self._name,
                asked_s,
                left,
            )
        if self._num_lost:
            log.warning("the %s has lost %d events", self._name, self._num_lost)
        for method, count in self._failures.items():
            if count > 1:
                log.warning("`%s` of the %s failed %d times", method, self._name, count)

    def _append(self, method: str | None, argument: Any) -> None:
        with self._filled:
            self._queue.append((method, argument))
            self._filled.notify()

    def _deliver(self) -> None:
        """Runs in the listener's thread."""
        while not self._thread.is_abandoned:
            with self._filled:
                while not self._queue:
                    self._filled.wait()
                method, argument = self._queue.popleft()
            if method is None:
                return
            if (call := self._methods.get(method)) is None:
                continue
            try:
                call(copy.deepcopy(argument) if method in KINDS.values() else argument)
            except BaseException as error:  # also `sys.exit()`: the run is not the listener's to end
                self._failed(method, error)

    def _failed(self, method: str, error: BaseException) -> None:
        self._failures[method] += 1
        if self._failures[method] == 1:
            log.warning(
                "`%s` of the %s raised %s; the run continues, and further failures are counted",
                method,
                self._name,
                last_line(error, within=self._methods[method]),
            )
