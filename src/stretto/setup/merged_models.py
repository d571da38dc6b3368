"""Models with an adapter added to their weights (`model.merge_adapter`), as folders in the user's cache.

A merged model is an ordinary model folder, so engines, trainers and other machines load it as any other. Its name has a
digest of the base and of the adapter. It takes as much room as the base.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import torch

from stretto.models.adapters import adapter_digest, merge_adapter, read_adapter, refuse_another_base
from stretto.models.checksums import checksum
from stretto.models.loading import load_config, load_model, load_tokenizer
from stretto.models.user_cache import user_cache
from stretto.setup.made_models import made_once

CPU = torch.device("cpu")


def merged_model(base: str, adapter: str, say: Callable[[str], None], *, name: str | None = None) -> Path:
    """Returns the folder of a base with an adapter merged into it, made if it is not there yet.

    `name` is what errors call the base. Raises `ModelError` if the adapter does not fit the base.
    """
    digest = hashlib.blake2b(f"{adapter_digest(adapter)} {model_identity(base)}".encode(), digest_size=16).hexdigest()

    def make(folder: Path) -> None:
        say(f"the adapter in {adapter} is merged into {name or base}, once, in {user_cache() / f'merged-{digest}'}")
        write_merged(base, adapter, folder, name=name)

    return made_once(f"merged-{digest}", "config.json", make, what="the merged model")


def write_merged(base: str, adapter: str | Path, folder: Path, *, name: str | None = None) -> None:
    """Writes a base with an adapter merged into it as a model folder, in the type of the base, with its tokenizer."""
    read = read_adapter(adapter)
    dtype = own_dtype(base)
    model = load_model(base, dtype, CPU)
    refuse_another_base(read, name or base, checksum(dict(model.named_parameters())), dtype)
    merge_adapter(model, read)
    model.save_pretrained(folder)  # type: ignore[operator]
    load_tokenizer(base).save_pretrained(folder)


def own_dtype(path: str) -> torch.dtype:
    """Returns the type that the weights of a model are stored in."""
    config = load_config(path)
    found = getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None)
    if isinstance(found, str):
        found = getattr(torch, found)
    return found if isinstance(found, torch.dtype) else torch.float32


def model_identity(base: str) -> str:
    """Returns a text that changes with the files of a model: names, sizes and times, or the revision of a hub name."""
    folder = Path(base)
    if not folder.is_dir():
        return f"{base} {getattr(load_config(base), '_commit_hash', None)}"
    stats = [(path.relative_to(folder).as_posix(), path.stat()) for path in sorted(folder.rglob("*")) if path.is_file()]
    return f"{folder.resolve()} {[(name, each.st_size, each.st_mtime_ns) for name, each in stats]}"
