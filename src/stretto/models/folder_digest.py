"""A quick digest of the files of a model, to see that a folder has another model now."""

from __future__ import annotations

import hashlib
from pathlib import Path

SUFFIXES = (".safetensors", ".bin", ".json", ".jinja", ".model", ".txt")
BLOCK = 1 << 20  # bytes
BLOCKS = 16  # of a file, at most


def folder_digest(folder: Path) -> str:
    """Returns a digest of the names, sizes and contents of the files of a model in a folder.

    Of a large file, `BLOCKS` blocks at equal distances are read, so that tens of gigabytes take milliseconds. Training
    changes weights everywhere; an edit between two blocks that keeps the size is not noticed. Raises `OSError`.
    """
    found = hashlib.blake2b(digest_size=16)
    for path in sorted(each for each in folder.iterdir() if each.suffix in SUFFIXES and each.is_file()):
        size = path.stat().st_size
        found.update(f"{path.name}:{size}:".encode())
        step = max(BLOCK, -(-size // BLOCKS))
        with path.open("rb") as file:
            for start in range(0, size, step):
                file.seek(start)
                found.update(file.read(BLOCK))
    return found.hexdigest()
