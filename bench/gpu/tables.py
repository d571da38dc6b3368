"""Cells as rows of markdown tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

Record = Mapping[str, Any]
MISSING = "-"


def table(title: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table under its title, or nothing where it has no rows."""
    body = ["| " + " | ".join(row) + " |" for row in rows]
    if not body:
        return ""
    return "\n".join([f"## {title}", "", "| " + " | ".join(head) + " |", "|" + "---|" * len(head), *body])


def by(records: Sequence[Record], bench: str, *names: str) -> dict[tuple[Any, ...], dict[str, Record]]:
    """Cells of a bench by some parameters, then by side."""
    found: dict[tuple[Any, ...], dict[str, Record]] = {}
    for record in records:
        if record["bench"] == bench:
            key = tuple(_parameter(record, name) for name in names)
            found.setdefault(key, {})[record["side"]] = record
    return dict(sorted(found.items()))


def _parameter(record: Record, name: str) -> Any:
    """One parameter of a cell; a model in another type than the usual one is called by both."""
    found, dtype = record["parameters"][name], record["parameters"].get("dtype")
    return f"{found}, {dtype}" if name in ("size", "model") and dtype is not None else found


def value(record: Record | None, name: str, show: Callable[[Any], str]) -> str:
    """One result of a cell as text; what there is none of, is missing."""
    if record is None:
        return MISSING
    if "does_not_fit" in record["results"]:
        return "does not fit"
    found = record["results"].get(name)
    return MISSING if found is None else show(found)


def ratio(one: Record | None, other: Record | None, name: str = "tokens_per_s") -> str:
    """One over the other; a star where they were not measured in one sitting."""
    if one is None or other is None or not one["results"].get(name) or not other["results"].get(name):
        return MISSING
    star = "" if one["sitting"] == other["sitting"] else "*"
    return f"{one['results'][name] / other['results'][name]:.2f}{star}"


def rate(value: float) -> str:
    return f"{value:,.0f}"


def decimal(value: float) -> str:
    return f"{value:.2f}"


def share(value: float) -> str:
    return f"{value:.0%}"
