"""The command as the user typed it, so that what is printed for them to run next runs as it stands."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path


def program() -> str:
    """How this process was called: `stretto` where that is on the path, else the file, or `python -m stretto.cli`."""
    called = sys.argv[0]
    name = Path(called).name
    if name == "cli.py" or Path(called).parts[-2:] == ("stretto", "__main__.py"):
        return f"{_shown(sys.executable)} -m stretto.cli"
    if name != "stretto":
        return "stretto"  # called from another program: nothing better is known
    on_path = any((Path(folder) / name).exists() for folder in os.environ.get("PATH", "").split(os.pathsep) if folder)
    return name if on_path else _shown(called)


def command(*words: str | Path) -> str:
    """A command of this program, quoted for a shell."""
    return f"{program()} {shlex.join(str(word) for word in words)}"


def _shown(path: str) -> str:
    """Relative to the working directory where it lies below it."""
    absolute = Path(os.path.abspath(path))
    try:
        return shlex.quote(str(absolute.relative_to(Path.cwd())))
    except ValueError:
        return shlex.quote(str(absolute))
