"""Digests of the source files that score a task: reward function, environment, agent, program, question to a judge.

A resumed run compares them with those that it recorded, to say that rewards are now computed by other code. Files are
found without importing anything: the code of a task runs in processes of its own. What these files import is not
looked at. What was given from Python has its digest from there (`given.py`).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from stretto.environments.function_specs import is_spec
from stretto.environments.given import is_given
from stretto.environments.row_sources import file_digest
from stretto.environments.task_options import TaskOptions, rewards_of

SPECS = ("reward", "environment", "function")  # keys of a task that may name `package.module:function`


def source_digests(task: TaskOptions) -> dict[str, str]:
    """Returns the digest of each source file of a task by the name that the recipe gives it.

    A file that cannot be found or read is left out.
    """
    found = {}
    for name, path in _sources(task):
        try:
            found[name] = file_digest(path)
        except OSError:
            continue
    return found


def _sources(task: TaskOptions) -> Iterator[tuple[str, Path]]:
    named = [getattr(task, key, None) for key in SPECS]
    for spec in (*named, *(getattr(each, "function", None) for each in rewards_of(task))):
        if not isinstance(spec, str) or is_given(spec) or not is_spec(spec):
            continue
        if (path := _module_file(spec.partition(":")[0])) is not None:
            yield spec, path
    for scorer in getattr(task, "scorers", {}).values():
        if (question := getattr(scorer, "prompt_path", None)) is not None:
            yield question, Path(question)
    for word in getattr(task, "command", None) or ():
        if Path(word).is_file():
            yield word, Path(word)


def _module_file(name: str) -> Path | None:
    """Returns the file of a module, as the working directory and `sys.path` have it."""
    place = Path(*name.split("."))
    for folder in (Path.cwd(), *map(Path, sys.path)):
        for path in (folder / place.with_suffix(".py"), folder / place / "__init__.py"):
            if path.is_file():
                return path
    return None
