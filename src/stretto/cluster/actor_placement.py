"""Why actors have not started yet: no machine has room for them, or their processes still import what they need."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray
from ray._private import state  # nothing public knows of an actor that has not answered yet


def why_not_started(actors: Sequence[Any], asks: str) -> str:
    """Returns a sentence on what the actors wait for. `asks` says what they ask for, and by which options. Blocks."""
    placed = sum(is_placed(actor) for actor in actors)
    if placed == len(actors):
        return "there is room, and what is needed is still being imported there"
    total, free = ray.cluster_resources(), ray.available_resources()
    has = ", ".join(f"{free.get(kind, 0):g} of {total.get(kind, 0):g} {kind}s" for kind in ("CPU", "GPU"))
    some = f" ({placed} of {len(actors)} have a place)" if placed else ""
    return (
        f"no machine has taken it yet{some}: {asks}, and free in the cluster are {has}; if that is too little, ask for "
        "less, or `ray start` another machine"
    )


def is_placed(actor: Any) -> bool:
    """Returns True if a machine has given the actor room. Blocks."""
    found: dict[str, Any] = state.actors(actor._actor_id.hex())
    return bool(found.get("Address", {}).get("Port"))  # of the process there
