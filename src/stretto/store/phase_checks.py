"""The checks of `verify` on the recipes of a run: its phases in the journal, and `config.toml`.

The digest of an update covers the phases that begin with it (`digests.py`), so a phase that was changed after its first
update is found there. Here each phase must agree with itself and with those around it, and `config.toml` with the last.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from stretto.store.recipe_keys import flat_keys, of_one_task
from stretto.store.schema import JOURNAL_NAME
from stretto.store.traces import recorded_in

CONFIG_NAME = "config.toml"  # in the run folder
CHANGING = ("staleness", "auto", "updates")  # facts that may differ between phases

# The key of `config.toml` that each fact follows from. Keys without effect are left out of the file.
_KEYS = {
    "seed": ("seed",),
    "paradigm": ("rollout", "paradigm"),
    "batch": ("rollout", "prompts"),
    "group": ("rollout", "group"),
    "retries": ("rollout", "retries"),
    "updates": ("training", "steps"),
    "order": ("task", "order"),
}
# Keys of `config.toml` that may be edited, because they say where a run finds its files and how it is executed.
_OF_THE_MACHINE = (
    *("runtime.", "model.path", "model.adapter", "task.path", "task.evaluation_path", "task.chat_template"),
    *("task.dataset.name", "task.evaluation_dataset.name"),
)


@dataclass(frozen=True, slots=True)
class PhaseRow:
    """A row of `phases`, decoded. A text that cannot be decoded is None."""

    phase: int
    first_update: int
    first_group: int
    facts: Mapping[str, Any] | None
    recipe: Mapping[str, Any] | None  # nested tables


def read_phases(db: sqlite3.Connection) -> list[PhaseRow]:
    """Returns the phases of a journal, in order."""
    rows = db.execute("SELECT phase, first_update, first_group, facts, recipe FROM phases ORDER BY phase")
    return [PhaseRow(phase, update, group, _json(facts), _toml(recipe)) for phase, update, group, facts, recipe in rows]


def phase_breaks(phases: Sequence[PhaseRow], run: Mapping[str, Any]) -> Iterator[str]:
    """Returns what is wrong with the phases of a run with the facts `run`."""
    if phases and (phases[0].first_update, phases[0].first_group) != (0, 0):
        yield f"phase 0 begins with update {phases[0].first_update} and group {phases[0].first_group}, not with the run"
    if [each.phase for each in phases] != list(range(len(phases))):
        yield f"the phases have the numbers {[each.phase for each in phases]}"
    for before, after in pairwise(phases):
        if after.first_update < before.first_update or after.first_group < before.first_group:
            yield f"phase {after.phase} begins before phase {before.phase}"
    for each in phases:
        if each.facts is None or each.recipe is None:
            yield f"phase {each.phase} has {'facts' if each.facts is None else 'a recipe'} that cannot be read"
            continue
        last = each is phases[-1]
        for name, value in each.facts.items():
            if run.get(name) != value and (last or name not in CHANGING):
                yield f"phase {each.phase} has `{name}` as {value!r}, and the run has {run.get(name)!r}"
        for fact, recorded, key, value in _configured(each.recipe, each.facts):
            if recorded != value:
                yield f"phase {each.phase} has `{key} = {value!r}` in its recipe, and `{fact}` as {recorded!r}"


def rest_of_folder(
    folder: Path, facts: Mapping[str, Any], phases: Sequence[PhaseRow], num_updates: int
) -> Iterator[str]:
    """Compares the journal with the other files of the run folder, if it lies in one.

    `num_updates` are finished. A run that was killed as a phase began may still have the `config.toml` of the phase
    before.
    """
    if not (folder / JOURNAL_NAME).is_file():
        return
    if (lost := recorded_in(folder).lost) is not None:
        yield lost
    config: Any = {}
    with contextlib.suppress(FileNotFoundError):
        try:
            config = tomllib.loads((folder / CONFIG_NAME).read_text(encoding="utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            yield f"`{folder / CONFIG_NAME}` is not valid TOML: {error}"
    if not config:
        return
    current = phases[-1].recipe if phases else None
    if len(phases) > 1 and phases[-1].first_update == num_updates and phases[-2].recipe is not None:
        before = _comparable(phases[-2].recipe)
        if _comparable(config) == before:
            return
    found = [
        (key, f"`{key} = {value!r}` in `{CONFIG_NAME}`, and the journal has `{fact}` as {recorded!r}")
        for fact, recorded, key, value in _configured(config, facts)
        if recorded != value
    ]
    yield from (sentence for _, sentence in found)
    if current is None:
        return
    here, there = _comparable(config), _comparable(current)
    for key in sorted((here.keys() | there.keys()) - {key for key, _ in found}):
        if here.get(key) != there.get(key):
            yield (
                f"`{key}` is {_named(here, key)} in `{CONFIG_NAME}`, and {_named(there, key)} in the recipe of phase "
                f"{phases[-1].phase}, the last"
            )


def _configured(config: Any, facts: Mapping[str, Any]) -> Iterator[tuple[str, object, str, object]]:
    """Returns each fact with its value in the journal, its key in a recipe and the value there."""

    def read(*path: str) -> Any:
        found = config
        for name in path:
            found = found.get(name) if isinstance(found, dict) else None
        return found

    for fact, path in _KEYS.items():
        if (value := read(*path)) is not None:
            yield fact, facts.get(fact), ".".join(path), value
    staleness, cap = read("rollout", "staleness"), read("rollout", "staleness_cap")
    if staleness is not None:
        yield "auto", facts.get("auto"), "rollout.staleness", staleness == "auto"
    if (bound := cap if staleness == "auto" else staleness) is not None:
        key = "rollout.staleness_cap" if staleness == "auto" else "rollout.staleness"
        yield "staleness", facts.get("staleness"), key, bound
    for name, wanted, fact in (("groups", "prompts", "reserve_groups"), ("members", "group", "reserve_members")):
        least, most = read("rollout", wanted), read("rollout", "redundancy", name)
        if isinstance(least, int) and isinstance(most, int | None):
            key = f"rollout.redundancy.{name}"
            yield fact, least + facts.get(fact, 0), key, least if most is None else most
    if (kind := read("rollout", "filter")) is not None:
        yield "filter_limit", bool(facts.get("filter_limit")), "rollout.filter", kind != "none"


def _comparable(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keys of a recipe that decide what is trained, dotted, with their values."""
    tasks = values.get("task")
    return {key: value for key, value in flat_keys(values) if not of_one_task(key, tasks).startswith(_OF_THE_MACHINE)}


def _named(values: Mapping[str, Any], key: str) -> str:
    return repr(values[key]) if key in values else "left out"


def _json(text: object) -> Mapping[str, Any] | None:
    with contextlib.suppress(ValueError, TypeError):
        value = json.loads(text)  # type: ignore[arg-type]
        return value if isinstance(value, dict) else None
    return None


def _toml(text: object) -> Mapping[str, Any] | None:
    with contextlib.suppress(ValueError, TypeError, AttributeError):
        return tomllib.loads(text)  # type: ignore[arg-type]
    return None
