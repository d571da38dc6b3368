"""The folder of the user's cache: models that were made or merged, and compiled code."""

from __future__ import annotations

import os
from pathlib import Path


def user_cache() -> Path:
    """Returns `$XDG_CACHE_HOME/stretto`, or `~/.cache/stretto`. It need not exist."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "stretto"
