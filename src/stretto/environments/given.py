"""Rewards, environments and rows that were given from Python, instead of by a name or a path in the recipe.

A function or class that a worker process can import is written into the recipe by its name, and runs as any other. All
else stays in this process and is recorded as `python:NAME@DIGEST`:

| given                             | recorded in `config.toml`               | digest of        |
|-----------------------------------|-----------------------------------------|------------------|
| a reward of a notebook or script  | `task.reward = "python:exact@3fd0..."`  | its source       |
| several, one of them such a reward | `task.rewards`, with such a `function` | its source       |
| an environment, class or object   | `task.environment = "python:Game@..."`  | its class's code |
| rows                              | `task.path = "python:data@..."`         | all rows         |

A digest is left out where there is no source. A run that is resumed must be given the same: rows to train on by their
digest, functions by their name. A function whose source has changed is accepted, and the run says so, as it does for a
source file (`source_digests.py`).

A recipe with several tasks is given each thing by the label of its task: `reward={"math": exact}`.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import importlib.machinery
import inspect
import json
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from stretto.environments.function_specs import is_spec
from stretto.environments.python_rewards import Rewards, several
from stretto.errors import RecipeError, RunError

PREFIX = "python:"
DIGITS = 12  # of a digest

ARGUMENTS = {
    "reward": "reward",
    "rewards": "reward",
    "environment": "environment",
    "path": "data",
    "evaluation_path": "evaluation_data",
}
"""Key of `[task]` -> the argument of `stretto.train` that gives it."""

_OF_ONE_TASK = {
    "reward": "give a function",
    "environment": "give a class or an object",
    "data": "give rows, as a list of mappings",
    "evaluation_data": "give rows, as a list of mappings",
}

Rows = Sequence[Mapping[str, Any]]
GivenRows = Iterable[Mapping[str, Any]]
GivenRewards = Rewards | Mapping[str, Rewards]
"""The argument `reward`: for the only task, or by the labels of several."""


def is_given(value: object) -> bool:
    """Tells if a value of a recipe stands for something that was given from Python."""
    return isinstance(value, str) and value.startswith(PREFIX)


def functions_of(value: Any) -> list[str]:
    """Returns the names that a value of `[task]` has: those of the functions of `rewards`, or itself."""
    if isinstance(value, list | tuple):
        return [str(each.get("function", "")) for each in value if isinstance(each, Mapping)]
    return [value] if isinstance(value, str) else []


def without_digest(value: str) -> str:
    """Returns `python:NAME` without the digest."""
    return value.partition("@")[0]


@dataclass(frozen=True, slots=True)
class Given:
    """All that a caller has given for the task of a run. `names` has the values for the keys of `[task]`.

    For several tasks, `tasks` has what was given for each, by label, and all else is empty.
    """

    # The rewards that are not imported by their names, by the name that each has; an only one has none.
    rewards: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    environment: Any = None  # a class, or an object that plays episodes; None: as above
    rows: Rows | None = None
    evaluation_rows: Rows | None = None
    names: Mapping[str, Any] = field(default_factory=dict)
    digests: Mapping[str, str] = field(default_factory=dict)  # `python:NAME` -> digest of its source now, if it has one
    tasks: Mapping[str, Given] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        *,
        reward: GivenRewards | None = None,
        environment: Any = None,
        data: GivenRows | Mapping[str, GivenRows] | None = None,
        evaluation_data: GivenRows | Mapping[str, GivenRows] | None = None,
    ) -> Given:
        """Takes the arguments of a caller. Raises `RecipeError` for one that cannot be used."""
        arguments = {"reward": reward, "environment": environment, "data": data, "evaluation_data": evaluation_data}
        if isinstance(reward, Mapping) or any(map(_is_by_label, arguments.values())):
            return cls._of_several(arguments)
        if reward is not None and environment is not None:
            raise RecipeError("`reward` and `environment` are both given: an environment rewards its episodes itself")
        rewards = several(reward)
        names: dict[str, Any] = {}
        functions: dict[str, Callable[..., Any]] = {}
        if rewards is not None:
            names["rewards"] = tuple(each.table(_name(each.function)) for each in rewards)
            functions = {each.shown_name: each.function for each in rewards if is_given(_name(each.function))}
        elif callable(reward):
            names["reward"] = _name(reward)
            functions = {"": reward} if is_given(names["reward"]) else {}
        if environment is not None:
            names["environment"] = _name(environment)
        own = [each for value in names.values() for each in functions_of(value)]
        rows = None if data is None else collected(data, "data")
        held_out = None if evaluation_data is None else collected(evaluation_data, "evaluation_data")
        for key, some in (("path", rows), ("evaluation_path", held_out)):
            if some is not None:
                names[key] = f"{PREFIX}{ARGUMENTS[key]}@{rows_digest(some)}"
        return cls(
            functions,
            environment if is_given(names.get("environment")) else None,
            rows,
            held_out,
            names,
            {without_digest(name): digest for name in own if is_given(name) and (digest := name.partition("@")[2])},
        )

    @classmethod
    def _of_several(cls, arguments: Mapping[str, Any]) -> Given:
        """Takes arguments that are given by label."""
        by_label: dict[str, dict[str, Any]] = {}
        labelled = next(name for name, given in arguments.items() if _is_by_label(given))
        for name, given in arguments.items():
            if given is not None and not _is_by_label(given):
                raise RecipeError(
                    f"`{labelled}` is a {type(arguments[labelled]).__name__}; {_OF_ONE_TASK[labelled]}; or, with "
                    f"several tasks, give `{name}` by label too"
                )
            for label, thing in (given or {}).items():
                if isinstance(thing, Mapping):
                    raise RecipeError(
                        f"`{name}[{label!r}]` is a {type(thing).__name__}; give what is for one task there"
                    )
                by_label.setdefault(str(label), {})[name] = thing
        made = {}
        for label, own in by_label.items():
            with of_task(label):
                made[label] = cls.of(**own)
        return cls(
            tasks=made, digests={name: digest for each in made.values() for name, digest in each.digests.items()}
        )

    @property
    def is_nothing(self) -> bool:
        """True if nothing was given."""
        return not self.names and not self.tasks

    def of_label(self, label: str | None) -> Given:
        """Returns what was given for the task with a label; None: for the only task."""
        return self.tasks.get(label, NOTHING_GIVEN) if self.tasks and label is not None else self

    def in_recipe(self, task: Any) -> Any:
        """Returns `task` of a recipe, one table or several, with what was given. Raises `RecipeError`."""
        if not isinstance(task, list | tuple):
            if self.tasks:
                raise RecipeError(
                    f"something is given by label, for {_named(self.tasks)}, and the recipe has one task: give it as "
                    "it is, rows as a list of mappings"
                )
            return self.in_task(task or {})
        labels = [str(each.get("label")) for each in task if isinstance(each, Mapping)]
        if not self.tasks:
            argument = ARGUMENTS[next(iter(self.names))]
            raise RecipeError(
                f"the recipe has several tasks, {_named(labels)}: give `{argument}` by label, such as "
                f"`{argument}={{{labels[0]!r}: ...}}`"
            )
        for label in self.tasks:
            if label not in labels:
                near = difflib.get_close_matches(label, labels, n=1, cutoff=0.6)
                hint = f"; did you mean {near[0]!r}?" if near else f"; the labels are {_named(labels)}"
                raise RecipeError(f"something is given for the task {label!r}, which the recipe does not have{hint}")
        changed = []
        for label, each in zip(labels, task, strict=True):
            with of_task(label):
                changed.append(self.of_label(label).in_task(each) if label in self.tasks else each)
        return changed

    def in_task(self, table: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the table `[task]` of a recipe with what was given. Raises `RecipeError` if they do not fit.

        A task that makes its own rows becomes a task of rows, without the keys that such a task does not have.
        """
        if not self.names:
            return dict(table)
        asked, kind = [ARGUMENTS[key] for key in self.names], table.get("type")
        wanted = self._type(kind, asked)
        result = dict(table)
        if wanted != kind:
            from stretto.environments.task_options import EnvironmentOptions, FileOptions

            options = EnvironmentOptions if wanted == "environment" else FileOptions
            result = {key: value for key, value in table.items() if key in options.model_fields}
            result["type"] = wanted
        for key, other in (("path", "dataset"), ("evaluation_path", "evaluation_dataset")):
            if key in self.names:
                result.pop(other, None)
        if "reward" in asked:
            for key in ("reward", "rewards", "judge", "reward_model"):
                result.pop(key, None)
        return result | dict(self.names)

    def _type(self, kind: object, asked: Sequence[str]) -> object:
        """Returns the type of the task that the arguments make of a recipe's task."""
        said = " and ".join(f"`{name}`" for name in asked)
        if "environment" in asked:
            if "data" in asked or kind in ("file", "environment"):
                return "environment"
            raise RecipeError(f"{said} needs rows: give `data` too, or a recipe whose task has a `path`")
        if "reward" in asked and kind in ("environment", "agent"):
            raise RecipeError(
                f"`reward` scores a task of one turn, and `task.type = {kind!r}` is none; leave it out, or use "
                "a recipe with another task"
            )
        if "reward" in asked and "data" in asked:
            return "file"
        if kind in ("file", "environment", "agent") and (kind == "file" or "reward" not in asked):
            return kind
        lacking = "`data`" if "reward" in asked else "`reward` or `environment`"
        if kind is None:
            raise RecipeError(f"{said} alone makes no task, and the recipe has no `[task]`: give {lacking} too")
        raise RecipeError(
            f"{said} alone does not make a task of `task.type = {kind!r}`, which has rows and a reward of its own: "
            f'give {lacking} too, or a recipe with `task.type = "file"`'
        )

    def as_recorded(self, recorded: Any) -> Given:
        """Compares what is given with the table `[task]`, or the tables `[[task]]`, that a run was started with.

        Returns what is given under the names of then. Raises `RunError` if something is missing, or if the rows to
        train on are others.
        """
        if isinstance(recorded, list):
            tables = {str(each.get("label")): each for each in recorded}
            same = {label: self.of_label(label).as_recorded(table) for label, table in tables.items() if self.tasks}
            if not self.tasks:
                for table in tables.values():
                    refuse_missing(table, {})
            return replace(self, tasks={label: same.get(label, each) for label, each in self.tasks.items()})
        refuse_missing(recorded, self.names)
        names = dict(self.names)
        for key, name in self.names.items():
            before = recorded.get(key)
            if key == "rewards":
                names[key] = _as_before(name, before)
                continue
            if not is_given(name) or not is_given(before) or before == name:
                continue
            if without_digest(str(before)) != without_digest(name):
                continue  # `refuse_another_recipe` names both
            if key == "evaluation_path":
                continue  # later evaluations may have other rows
            if key == "path":
                raise RunError(
                    "`data` is not what the run began with: its rows, or their order, have changed "
                    f"(digest {name.partition('@')[2]}, at its start {str(before).partition('@')[2]}); give the same "
                    "rows, or start a new run"
                )
            names[key] = str(before)
        return replace(self, names=names)


NOTHING_GIVEN = Given()


def _as_before(now: Sequence[Mapping[str, Any]], before: Any) -> tuple[Mapping[str, Any], ...]:
    """Returns the tables of rewards with the functions of then, where only their digests differ."""
    recorded = functions_of(before)
    if len(recorded) != len(now):
        return tuple(now)  # `refuse_another_recipe` names both
    return tuple(
        {**table, "function": old} if without_digest(old) == without_digest(table["function"]) else table
        for table, old in zip(now, recorded, strict=True)
    )


@contextlib.contextmanager
def of_task(label: str | None) -> Iterator[None]:
    """Names the task in a `RecipeError`, if it is one of several; `label` None: it is the only one."""
    try:
        yield
    except RecipeError as error:
        if label is None:
            raise
        raise RecipeError(f"task `{label}`: {error}") from error


def _is_by_label(given: object) -> bool:
    """Tells if something is given by the labels of tasks. The splits of a data set are a mapping, too."""
    return isinstance(given, Mapping) and not type(given).__name__.endswith("DatasetDict")


def _named(labels: Iterable[str]) -> str:
    return ", ".join(f"`{label}`" for label in labels)


def refuse_missing(task: Mapping[str, Any], names: Mapping[str, Any]) -> None:
    """Raises `RunError` if a table `[task]` needs something that was given from Python and is not given now."""
    missing = [key for key in ARGUMENTS if any(map(is_given, functions_of(task.get(key)))) and key not in names]
    if missing:
        said = {key: next(filter(is_given, functions_of(task[key]))) for key in missing}
        needs = ", ".join(f"`task.{key} = {said[key]!r}`" for key in missing)
        call = ", ".join(f"{ARGUMENTS[key]}=..." for key in missing)
        raise RunError(
            f"{needs}: this was given from Python and cannot be found by its name; use "
            f"`stretto.train(..., {call})` with the same again"
        )


def _name(thing: Any) -> str:
    """Returns the name of a function or class in a recipe: by its import, or as given."""
    return importable_name(thing) or given_name(thing)


def importable_name(thing: Any) -> str | None:
    """Returns `package.module:name` of a function or class that a worker process can import; None: it cannot."""
    module, path = getattr(thing, "__module__", None), getattr(thing, "__qualname__", None)
    if module in (None, "__main__") or path is None or not is_spec(f"{module}:{path}"):
        return None
    found: Any = sys.modules.get(module)
    file = getattr(found, "__file__", None)
    for name in path.split("."):
        found = getattr(found, name, None)
    return f"{module}:{path}" if found is thing and file is not None and _found_at(module) == file else None


def _found_at(module: str) -> str | None:
    """Returns the file that a new process with the same `sys.path` would import a module from."""
    where: Sequence[str] | None = None
    spec: importlib.machinery.ModuleSpec | None = None
    parts = module.split(".")
    for end in range(1, len(parts) + 1):
        name = ".".join(parts[:end])
        specs = (finder.find_spec(name, where, None) for finder in sys.meta_path if hasattr(finder, "find_spec"))
        spec = next((each for each in specs if each is not None), None)
        if spec is None:
            return None
        where = spec.submodule_search_locations
    return None if spec is None else spec.origin


def given_name(thing: Any) -> str:
    """Returns `python:NAME@DIGEST` of a function, a class or an object; without a digest if it has no source."""
    name = getattr(thing, "__name__", None) or type(thing).__name__
    digest = source_digest(thing)
    return f"{PREFIX}{name}" + ("" if digest is None else f"@{digest}")


def source_digest(thing: Any) -> str | None:
    """Returns a digest of the source of a function or class, or of the class of an object; None if there is none."""
    inner = inspect.unwrap(getattr(thing, "func", thing))
    if not inspect.isroutine(inner) and not inspect.isclass(inner):
        inner = type(inner)
    try:
        source = textwrap.dedent(inspect.getsource(inner))
    except (OSError, TypeError):
        return None
    return _short(hashlib.sha256(source.encode()))


class RowsDigest:
    """A digest of rows in their order. A value that JSON does not have counts by its `repr`."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()

    def add(self, row: Any) -> Any:
        """Adds a row, and returns it."""
        self._digest.update(json.dumps(row, sort_keys=True, default=repr).encode() + b"\n")
        return row

    @property
    def value(self) -> str:
        """The digest of all rows that were added."""
        return _short(self._digest)


def rows_digest(rows: Rows) -> str:
    """Returns a digest of rows in their order."""
    digest = RowsDigest()
    for row in rows:
        digest.add(row)
    return digest.value


def _short(digest: Any) -> str:
    return str(digest.hexdigest())[:DIGITS]


def collected(data: Any, argument: str) -> list[dict[str, Any]]:
    """Returns rows as a list. Raises `RecipeError` for what has none.

    `data` is an iterable of mappings, a split of the package datasets, or a data frame of pandas or polars, in which a
    missing value is None.
    """
    if isinstance(data, str) or hasattr(data, "__fspath__"):
        raise RecipeError(f"`{argument} = {str(data)!r}` is a path: name a file in the recipe, as `task.path`")
    if isinstance(data, Mapping):
        splits = list(data) if hasattr(data, "column_names") else []  # a data set with its splits
        hint = f"choose one of its splits, such as `{argument}[{splits[0]!r}]`" if splits else "give rows"
        raise RecipeError(f"`{argument}` is a {type(data).__name__}; {hint}, as a list of mappings")
    if not isinstance(data, Iterable) and not hasattr(data, "columns"):
        raise RecipeError(f"`{argument}` is a {type(data).__name__}; give rows, as a list of mappings")
    rows = []
    for number, row in enumerate(_records(data), start=1):
        if not isinstance(row, Mapping) or not all(isinstance(key, str) for key in row):
            raise RecipeError(
                f"row {number} of `{argument}` is {row!r:.80}; a row is a mapping, such as "
                '`{"prompt": "2+2=", "answer": "4"}`'
            )
        rows.append(dict(row))
    if not rows:
        raise RecipeError(f"`{argument}` has no rows; there is nothing to ask the model")
    return rows


def _records(data: Any) -> Iterable[Any]:
    """Returns the rows of data. Iterating a data frame itself would give its columns."""
    if hasattr(data, "columns") and hasattr(data, "to_dicts"):  # polars
        return data.to_dicts()  # type: ignore[no-any-return]
    if hasattr(data, "columns") and hasattr(data, "to_dict"):  # pandas
        if hasattr(data, "notna"):
            data = data.astype(object).where(data.notna(), None)
        return data.to_dict("records")  # type: ignore[no-any-return]
    return data  # type: ignore[no-any-return]
