"""Folders of models that are made once and kept in the user's cache. One appears there as a whole or not at all."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from stretto.errors import ModelError
from stretto.models.user_cache import user_cache


def made_once(name: str, has: str, make: Callable[[Path], None], *, what: str) -> Path:
    """Returns the folder `name` of the cache. If it lacks the file `has`, `make` fills it, in a place beside it.

    Two processes may ask for it at once. Raises `ModelError`, which says `what` cannot be written.
    """
    target = user_cache() / name
    if (target / has).exists():
        return target
    scratch = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
        make(scratch)
        scratch.chmod(0o755)
        try:
            scratch.rename(target)
        except OSError:
            if not (target / has).exists():  # otherwise another process was first
                raise
    except OSError as error:
        raise ModelError(f"{what} cannot be written to `{target}`: {error}") from error
    finally:
        if scratch is not None:
            shutil.rmtree(scratch, ignore_errors=True)
    return target
