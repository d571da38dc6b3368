"""The command as the user typed it, so that what is printed for them to run next runs as it stands."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path


def program() -> str:
    """The way this process was called: `stretto` if that is on the path, else its file, or `python -m stretto`."""
    called = sys.argv[0]
    name = Path(called).name
    if Path(called).parts[-2:] == ("stretto", "__main__.py"):
        return f"{_shown(sys.executable)} -m stretto"
    if name != "stretto":
        return "stretto"  # called from another program: nothing better is known
    on_path = any((Path(folder) / name).exists() for folder in os.environ.get("PATH", "").split(os.pathsep) if folder)
    return name if on_path else _shown(called)


def command(*words: str | Path) -> str:
    """A command of this program, quoted for a shell."""
    return f"{program()} {shlex.join(str(word) for word in words)}"


def _shown(path: str) -> str:
    """Returns a path relative to the working directory, if it lies below it."""
    absolute = Path(os.path.abspath(path))
    try:
        return shlex.quote(str(absolute.relative_to(Path.cwd())))
    except ValueError:
        return shlex.quote(str(absolute))
