"""Trackers of the user's: a class with the methods of a callback, or a function, named as `package.module:Class`.

They get whole lines, whatever `observe.metrics` says. A class with a method `on_samples(rows)` gets the samples too.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

from stretto.environments.function_specs import SpecError, last_line, resolve
from stretto.errors import RecipeError, RunError
from stretto.observe.listeners import Callback, LiveRun, methods_of
from stretto.observe.trackers.sample_rows import Samples


def make_custom(spec: str, samples: int) -> object:
    """Returns a listener for `package.module:Class`: an object of the class, or the function. Raises `RecipeError`."""
    said = f'`observe.sinks` names "{spec}"'
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.append(os.getcwd())  # not removed later: the class may import from there when it is used
    try:
        found = resolve(spec)
    except SpecError as error:
        raise RecipeError(f"{said}: {error}") from error
    try:
        made = found() if isinstance(found, type) else found
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise RecipeError(f"{said}, which could not be created without arguments: {last_line(error)}") from error
    try:
        methods = methods_of(made, spec, "tracker")
    except RunError as error:
        raise RecipeError(f"{said}: {error}") from error
    on_samples = getattr(made, "on_samples", None)
    return made if not samples or on_samples is None else WithSamples(methods, on_samples, samples)


class WithSamples(Callback):
    """Calls the methods of a listener, and `on_samples` after each update."""

    def __init__(
        self, methods: dict[str, Callable[[Any], object]], on_samples: Callable[[Any], object], most: int
    ) -> None:
        self._methods = methods
        self._on_samples = on_samples
        self._most = most
        self._samples: Samples | None = None

    def on_start(self, run: LiveRun) -> None:
        self._samples = Samples(run.folder, self._most)
        self._call("on_start", run)

    def on_update(self, line: dict[str, Any]) -> None:
        self._call("on_update", line)
        assert self._samples is not None
        self._on_samples(self._samples.rows(line["update"]))

    def on_evaluation(self, line: dict[str, Any]) -> None:
        self._call("on_evaluation", line)

    def on_message(self, text: str) -> None:
        self._call("on_message", text)

    def on_end(self, run: LiveRun) -> None:
        if self._samples is not None:
            self._samples.close()
        self._call("on_end", run)

    def _call(self, method: str, argument: Any) -> None:
        if (call := self._methods.get(method)) is not None:
            call(argument)
