"""The configurations of public models, to plan a run with where neither a folder nor the hub has them.

Each is the `config.json` of a model of the hub, without the keys that have no effect on its shape. Nothing loads
weights by them.
"""

from __future__ import annotations

from pathlib import Path

OWNER = "Qwen"  # of the models, on the hub
FOLDER = Path(__file__).parent


def shape_folder(path: str) -> Path | None:
    """Returns the folder with the `config.json` of a model of the hub; None if the package does not have it."""
    owner, _, name = path.partition("/")
    return FOLDER / name if owner == OWNER and name in shape_names() else None


def shape_names() -> list[str]:
    """Returns the names of the models whose configuration comes with the package, without their owner."""
    return sorted(path.parent.name for path in FOLDER.glob("*/config.json"))
