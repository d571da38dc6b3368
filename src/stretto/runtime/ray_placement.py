"""Why actors have not begun yet: no machine has taken them, or their processes are being started."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray
from ray._private import state  # nothing else tells of an actor that has not answered yet


def why_not_begun(actors: Sequence[Any], asks: str) -> str:
    """What they wait for, in words; `asks` says what they ask for, and by which options. Blocks."""
    placed = sum(has_place(actor) for actor in actors)
    if placed == len(actors):
        return "there is room, and what is needed is still being imported there"
    total, free = ray.cluster_resources(), ray.available_resources()
    has = ", ".join(f"{free.get(kind, 0):g} of {total.get(kind, 0):g} {kind}s" for kind in ("CPU", "GPU"))
    some = f" ({placed} of {len(actors)} have a place)" if placed else ""
    return (
        f"no machine has taken it yet{some}: {asks}, and free in the cluster are {has}; where that is too little, ask "
        "for less, or `ray start` another machine"
    )


def has_place(actor: Any) -> bool:
    """Whether a machine has given an actor room. Blocks."""
    found: dict[str, Any] = state.actors(actor._actor_id.hex())
    return bool(found.get("Address", {}).get("Port"))  # of the process there
