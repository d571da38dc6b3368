"""Tells a mixture of experts from a dense model by its `config.json`, without torch.

A recipe is checked before torch is imported, so it cannot ask `transformers` for the configuration.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from stretto.models.shapes import shape_folder

EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")  # names in configurations


def is_known_mixture(path: str) -> bool:
    """True if the configuration of a `model.path` is on this machine and is that of a mixture of experts.

    Reads the folder, the local cache of the hub, or the shapes that come with the package. Never asks the hub.
    """
    if path == "tiny-moe":
        return True
    file = _config_file(path)
    try:
        config = {} if file is None else json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # the loader of the model reports it
        return False
    return _num_experts(config) > 1


def _config_file(path: str) -> Path | None:
    if Path(path).exists():
        return Path(path) / "config.json"
    from stretto.models.hub import cached_file  # whose client takes a while to import

    if (cached := cached_file(path)) is not None:
        return cached
    folder = shape_folder(path)
    return None if folder is None else folder / "config.json"


def _num_experts(config: Any) -> int:
    """Returns the experts of a layer; 0 if none are named. A model of several parts names them in that of text."""
    if not isinstance(config, dict):
        return 0
    counts = [config.get(name) for name in EXPERT_COUNTS]
    return max([each for each in counts if isinstance(each, int)] + [_num_experts(config.get("text_config"))])
