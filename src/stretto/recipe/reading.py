"""Reads a recipe and validates it.

`load_recipe` reads TOML, applies `--set key=value` (`overrides.py`), validates (`schema.py`, `checks.py`), and raises
`RecipeError` with a line for each problem. `paradigm_overrides` serves `compare`, which runs one recipe under every
paradigm: it drops the keys that a paradigm fixes itself instead of refusing them.
"""

from __future__ import annotations

import copy
import re
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from stretto.core.paradigms import PARADIGMS
from stretto.errors import RecipeError
from stretto.recipe.checks import ineffective_keys
from stretto.recipe.error_messages import explain
from stretto.recipe.overrides import Overrides, apply_overrides, described
from stretto.recipe.schema import UNREFUSED, Recipe, RolloutSection
from stretto.recipe.shipped_recipes import found, missing
from stretto.recipe.task_tables import Path as KeyPath
from stretto.recipe.task_tables import remove_key


def load_recipe(
    recipe: str | Path | Mapping[str, Any] | Recipe,
    overrides: Overrides = (),
    *,
    compare_as: str | None = None,
    change_task: Callable[[Any], Any] | None = None,
    source: str | None = None,
    say: Callable[[str], None] | None = None,
) -> Recipe:
    """Reads and validates a recipe: a TOML file, the name of a shipped one, its tables, or one that was read.

    `overrides` are dotted keys with their values, None removes a key; or strings `key=value`, where `key=` removes one.
    `compare_as` changes the recipe to another paradigm, and `change_task` its table `[task]` or its tables `[[task]]`.
    `source` is the name of the recipe in errors, by default its file. `say` is told which keys of the recipe are left
    out, because they have no effect with the overrides. Raises `RecipeError`, which names the overrides as the cause if
    the recipe alone is valid.
    """
    raw, own = _tables(recipe)
    source = source or own
    if overrides:
        written, raw = raw, _overridden(raw, overrides, say)
        typed = described(overrides)
        source = f"`{typed}` on `{source}`" if _is_recipe(written) else f"`{source}` with `{typed}`"
    if change_task is not None:
        raw = {**raw, "task": change_task(raw.get("task"))}
    if compare_as is not None:
        raw = paradigm_overrides(raw, compare_as)
    return parse_recipe(raw, source=source)


def _tables(recipe: str | Path | Mapping[str, Any] | Recipe) -> tuple[Mapping[str, Any], str]:
    """Returns the tables of a recipe, as they were written, and its name in errors."""
    if isinstance(recipe, Recipe):
        return tomllib.loads(recipe.source_toml()), "the recipe"
    if isinstance(recipe, Mapping):
        return recipe, "the recipe"
    return _read_tables(found(Path(recipe))), str(recipe)


def _read_tables(path: Path) -> dict[str, Any]:
    text = ""
    try:
        text = path.read_bytes().decode("utf-8-sig")  # some editors write a byte-order mark
        return tomllib.loads(text)
    except FileNotFoundError:
        raise RecipeError(missing(path)) from None
    except IsADirectoryError:
        raise RecipeError(f"recipe `{path}` is a folder; name a TOML file") from None
    except OSError as error:
        raise RecipeError(
            f"recipe `{path}` cannot be read: {error.strerror}; name a TOML file that you can read"
        ) from error
    except ValueError as error:  # no UTF-8, no TOML, or an integer of more digits than Python converts
        raise RecipeError(f"recipe `{path}` is not valid TOML: {error}{_hint_of_tasks(text)}") from error


def _hint_of_tasks(text: str) -> str:
    """Returns how several tasks are written, if a recipe has a table `[task]` and another one; else nothing."""
    alone, several = (len(re.findall(rf"^[ \t]*{head}", text, re.MULTILINE)) for head in (r"\[task\]", r"\[\[task\]\]"))
    if not alone or alone + several < 2:
        return ""
    given = "`[task]` and `[[task]]`" if several else "`[task]` more than once"
    return f"; it has {given}: write `[[task]]` above each of several tasks, and give each a `label`"


def _is_recipe(raw: Mapping[str, Any]) -> bool:
    try:
        parse_recipe(raw)
    except RecipeError:
        return False
    return True


def parse_recipe(raw: Mapping[str, Any], source: str = "recipe") -> Recipe:
    """Validates a recipe given as nested tables."""
    try:
        return Recipe.model_validate(_tuples(raw))
    except ValidationError as error:
        lines = explain(error.errors(include_url=False), Recipe, raw)
        if any("has no effect" in line for line in lines):
            lines.append("(`--set KEY=`, with nothing after it, removes a key for one run)")
        raise RecipeError(f"{source}:\n{_indented(chr(10).join(lines))}") from None


def paradigm_overrides(raw: Mapping[str, Any], paradigm: str) -> dict[str, Any]:
    """Returns the recipe under another paradigm, without the keys that the paradigm fixes."""
    row = PARADIGMS[paradigm]
    result = {key: dict(value) if isinstance(value, Mapping) else value for key, value in raw.items()}
    rollout = result.setdefault("rollout", {})
    rollout["paradigm"] = paradigm
    if row.staleness is not None:
        for key in ("staleness", "staleness_cap"):
            rollout.pop(key, None)
    if not row.allows_redundancy:
        rollout.pop("redundancy", None)
    if row.one_batch:
        rollout.pop("in_flight", None)
        if isinstance(result.get("training"), dict):
            result["training"].pop("replay", None)
        defaults, redundancy = RolloutSection(), rollout.get("redundancy", {})
        prompts, group = rollout.get("prompts", defaults.prompts), rollout.get("group", defaults.group)
        most = redundancy.get("groups", prompts) * redundancy.get("members", group)
        if rollout.get("rows", 0) > most:  # more than one batch has
            rollout.pop("rows")
    for path in ineffective_in(result) - ineffective_in(raw):
        # Such as clips and comparisons of older versions, which have no effect without staleness.
        if path[0] in ("algorithm", "runtime") or path[-1] == "mismatch_samples":
            remove_key(result, path)
    return result


def _overridden(raw: Mapping[str, Any], overrides: Overrides, say: Callable[[str], None] | None) -> dict[str, Any]:
    """Applies overrides to a recipe. Removes keys that lost their effect by that, unless they were set with it."""
    result = copy.deepcopy(dict(raw))
    asked = apply_overrides(result, overrides)
    removed = []
    for path in sorted(ineffective_in(result) - ineffective_in(raw)):
        # `observe.wandb.project` asks for `observe.wandb`, and so does a whole table `observe`.
        if not any(path == each[: len(path)] or each == path[: len(each)] for each in asked):
            remove_key(result, path)
            removed.append(path)
    if removed and say is not None:
        names = " and ".join(f"`{'.'.join(path)}`" for path in removed)
        say(f"left out of the recipe, because `{described(overrides)}` leaves no effect for it: {names}")
    return result


def ineffective_in(raw: Mapping[str, Any]) -> set[KeyPath]:
    """The keys that are set and have no effect; none if the recipe is invalid, which `parse_recipe` explains."""
    try:
        return set(ineffective_keys(Recipe.model_validate(_tuples(raw), context=UNREFUSED)))
    except ValidationError:
        return set()


def _tuples(value: Any) -> Any:
    """Turns the arrays of TOML into tuples, which strict models need."""
    if isinstance(value, Mapping):
        return {key: _tuples(item) for key, item in value.items()}
    if isinstance(value, list):
        return tuple(_tuples(item) for item in value)
    return value


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())
