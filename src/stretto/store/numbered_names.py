"""Names that are numbers: `checkpoints/000042` and `versions/000042.safetensors`.

Whatever else is in these folders, such as a copy that somebody made, is not the run's: nothing reads or removes it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

CHECKPOINT, VERSION = "", ".safetensors"  # the suffixes
_NUMBER = re.compile(r"[0-9]{6,18}", re.ASCII)


def numbered_name(number: int, suffix: str) -> str:
    """Returns the name that has this number."""
    return f"{number:06d}{suffix}"


def numbered(folder: Path, suffix: str) -> dict[int, Path]:
    """Returns the entries of a folder that have the run's names, by number, in ascending order."""
    found = ((_number(path.name, suffix), path) for path in _entries(folder))
    return dict(sorted((number, path) for number, path in found if number is not None))


def foreign(folder: Path, suffix: str) -> list[Path]:
    """Returns the other entries of a folder, except hidden ones: those may be a run's incomplete files."""
    others = (path for path in _entries(folder) if _number(path.name, suffix) is None)
    return sorted(path for path in others if not path.name.startswith("."))


def _entries(folder: Path) -> Iterator[Path]:
    return folder.iterdir() if folder.is_dir() else iter(())


def _number(name: str, suffix: str) -> int | None:
    stem = name.removesuffix(suffix)
    if not _NUMBER.fullmatch(stem):
        return None
    number = int(stem)
    return number if numbered_name(number, suffix) == name else None
