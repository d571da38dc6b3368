"""The trackers that a recipe can name: their classes, their packages, and the checks before a run."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from stretto.errors import RecipeError
from stretto.observe.listeners import Listeners
from stretto.observe.options import TRACKERS, ObserveOptions
from stretto.observe.trackers.custom import WithSamples, make_custom
from stretto.observe.trackers.tracker import Tracker


@dataclass(frozen=True, slots=True)
class Entry:
    """A tracker of this package."""

    kind: str  # the class, as `module:Class` of this package
    package: str  # that it imports, which the extra of the tracker's name installs


ENTRIES: Mapping[str, Entry] = {
    "tensorboard": Entry("tensorboard:TensorboardTracker", "tensorboard"),
    "wandb": Entry("wandb:WandbTracker", "wandb"),
    "trackio": Entry("trackio:TrackioTracker", "trackio"),
    "mlflow": Entry("mlflow:MlflowTracker", "mlflow"),
    "prometheus": Entry("prometheus:PrometheusTracker", "prometheus_client"),
}
assert tuple(ENTRIES) == TRACKERS


def check_trackers(options: ObserveOptions) -> list[str]:
    """Returns a sentence for each tracker of a recipe. Starts none of them.

    Raises `RecipeError` for what can be known before a run: a package that is not installed, a class that cannot be
    made, a tracker without a key.
    """
    return [
        f"reports to {name}" + (f", {made.destination}" if isinstance(made, Tracker) else "")
        for name, made in _checked(options, lambda text: None).items()
    ]


def add_trackers(options: ObserveOptions, listeners: Listeners, say: Callable[[str], None]) -> None:
    """Adds the trackers of a recipe to the listeners of a run. Raises `RecipeError` as `check_trackers` does.

    `say` gets a sentence when one has started.
    """
    for name, tracker in _checked(options, say).items():
        listeners.add(tracker, name, word="tracker")
    if options.sinks:
        listeners.wait_at_most(options.flush_seconds)


def _checked(options: ObserveOptions, say: Callable[[str], None]) -> dict[str, object]:
    """Returns the trackers of a recipe by name, as listeners."""
    trackers = {name: _make(name, options, say) for name in options.sinks}
    for tracker in trackers.values():
        if isinstance(tracker, Tracker):
            tracker.check()
    takers = [
        each
        for each in trackers.values()
        if (each.takes_tables if isinstance(each, Tracker) else isinstance(each, WithSamples))
    ]
    if options.samples and options.sinks and not takers:
        raise RecipeError(
            f"`observe.samples = {options.samples}` has no effect: no tracker of `observe.sinks` takes samples; leave "
            "it out, or give your class a method `on_samples(rows)`"
        )
    return trackers


def _make(name: str, options: ObserveOptions, say: Callable[[str], None]) -> object:
    entry = ENTRIES.get(name)
    if entry is None:
        return make_custom(name, options.samples)
    if importlib.util.find_spec(entry.package) is None:
        raise RecipeError(
            f'`observe.sinks` names "{name}", whose package {entry.package} is not installed: `pip install '
            f"'stretto[{name}]'`, or leave it out"
        )
    module, _, kind = entry.kind.partition(":")
    made: Tracker = getattr(importlib.import_module(f"stretto.observe.trackers.{module}"), kind)(name, options, say)
    return made
