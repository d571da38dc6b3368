"""Functions and classes that a recipe names as `package.module:function`: their import, and their place in messages.

Imports only the standard library: reward workers load this module.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import os
import re
import reprlib
import traceback
from collections.abc import Callable
from types import CodeType
from typing import Any


class SpecError(Exception):
    """Raised for a `package.module:function` that does not name a callable."""


def is_spec(text: str) -> bool:
    """Tells if a text has the form `package.module:function`."""
    module, _, function = text.partition(":")
    return all(part.isidentifier() for part in [*module.split("."), *function.split(".")])


def function_name(target: str) -> str:
    """Returns the name of a function without its module; one that has none, such as a lambda, is a `reward`."""
    last = re.split(r"[:.]", target)[-1]
    return last if last.isidentifier() else "reward"


def resolve(spec: str) -> Callable[..., Any]:
    """Imports and returns the callable that `package.module:function` names. Raises `SpecError`."""
    module_name, _, path = spec.partition(":")
    try:
        value: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name + ".").startswith(error.name + "."):
            hint = f"; write `{module_name[:-3]}:{path}`, without `.py`" if module_name.endswith(".py") else ""
            raise SpecError(
                f"there is no module `{error.name}`, neither installed nor in the working directory {os.getcwd()}{hint}"
            ) from error
        raise SpecError(f"importing `{module_name}` failed: {last_line(error)}") from error
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a module that is also a script may call `sys.exit`
        raise SpecError(f"importing `{module_name}` failed: {last_line(error)}") from error
    for name in path.split("."):
        if not hasattr(value, name):
            near = difflib.get_close_matches(name, [n for n in dir(value) if not n.startswith("_")], n=1)
            hint = f"; did you mean `{near[0]}`?" if near else ""
            raise SpecError(f"`{module_name}` has no `{path}`{hint}")
        value = getattr(value, name)
    if not callable(value):
        raise SpecError(f"`{path}` is {reprlib.repr(value)}, which cannot be called; name a function")
    result: Callable[..., Any] = value
    return result


def last_line(error: BaseException, within: Callable[..., Any] | None = None) -> str:
    """Returns the last line of a traceback, with the file and line that raised it.

    If the traceback passes through the file of the function `within`, the last line of that file is named instead of a
    line of a library that it called.
    """
    line = traceback.format_exception_only(error)[-1].strip()
    places = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, SyntaxError) and error.filename and not error.filename.startswith("<"):  # a file, no string
        places.append((error.filename, error.lineno))
    if within is not None and (code := _code(within)) is not None:
        places = [place for place in places if place[0] == code.co_filename] or places
    return f"{line} ({os.path.basename(places[-1][0])}:{places[-1][1]})" if places else line


def defined_at(function: Callable[..., Any]) -> str:
    """Returns ` (file.py:12)`, the place where a function begins; empty for one that is not written in Python."""
    code = _code(function)
    return "" if code is None else f" ({os.path.basename(code.co_filename)}:{code.co_firstlineno})"


def _code(function: Callable[..., Any]) -> CodeType | None:
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None:  # perhaps an object with `__call__`
        code = getattr(type(function).__call__, "__code__", None)
    return code if isinstance(code, CodeType) else None
