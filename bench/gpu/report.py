"""Join cells into tables with ratios.

    python -m bench.gpu.report RESULTS [MORE ...] --out report.md

A ratio whose two sides come from different sittings carries a star.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.gpu.cells import read_cells
from bench.gpu.costs import StepCost, batch_lengths, fit, ideal_gain
from bench.gpu.rollout import GROUP

Record = Mapping[str, Any]
MISSING = "-"


def report(records: Sequence[Record]) -> str:
    """All tables that there are cells for, as markdown."""
    parts = [
        _generation(records, "decode", "Decode, prefill included"),
        _generation(records, "filled", "Decode steps over filled contexts"),
        _rollout(records),
        _updates(records),
        _costs(records),
        _learning(records),
        _where(records),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _table(title: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    body = ["| " + " | ".join(row) + " |" for row in rows]
    if not body:
        return ""
    return "\n".join([f"## {title}", "", "| " + " | ".join(head) + " |", "|" + "---|" * len(head), *body])


def _by(records: Sequence[Record], bench: str, *names: str) -> dict[tuple[Any, ...], dict[str, Record]]:
    """Cells of a bench by some parameters, then by side."""
    found: dict[tuple[Any, ...], dict[str, Record]] = {}
    for record in records:
        if record["bench"] == bench:
            key = tuple(record["parameters"][name] for name in names)
            found.setdefault(key, {})[record["side"]] = record
    return dict(sorted(found.items()))


def _value(record: Record | None, name: str, show: Callable[[float], str]) -> str:
    if record is None:
        return MISSING
    if "does_not_fit" in record["results"]:
        return "does not fit"
    value = record["results"].get(name)
    return MISSING if value is None else show(value)


def _ratio(one: Record | None, other: Record | None, name: str = "tokens_per_s") -> str:
    if one is None or other is None or not one["results"].get(name) or not other["results"].get(name):
        return MISSING
    star = "" if one["sitting"] == other["sitting"] else "*"
    return f"{one['results'][name] / other['results'][name]:.2f}{star}"


def _rate(value: float) -> str:
    return f"{value:,.0f}"


def _ms(value: float) -> str:
    return f"{value:.2f}"


def _share(value: float) -> str:
    return f"{value:.0%}"


def _generation(records: Sequence[Record], bench: str, title: str) -> str:
    head = [
        "size",
        "context",
        "LoRA",
        "batch",
        "native tok/s",
        "vLLM tok/s",
        "ratio",
        "step ms",
        "floor ms",
        "of floor",
    ]
    rows = []
    for key, sides in _by(records, bench, "size", "prompt", "tokens", "lora", "batch").items():
        size, prompt, tokens, lora, batch = key
        ours, theirs = sides.get("native"), sides.get("vllm")
        rows.append(
            [
                *(size, f"{prompt:,} + {tokens:,}", str(lora), str(batch)),
                *(_value(side, "tokens_per_s", _rate) for side in (ours, theirs)),
                _ratio(ours, theirs),
                *(_value(ours, name, _ms) for name in ("step_ms", "floor_step_ms")),
                _value(ours, "share_of_floor", _share),
            ]
        )
    return _table(title, head, rows)


def _rollout(records: Sequence[Record]) -> str:
    """The drain of both sides, and the sustained rate over each of them."""
    drains = _by(records, "drain", "size", "tail", "groups", "lora")
    sustained = _by(records, "sustained", "size", "tail", "groups")
    head = [
        "size",
        "tail",
        "groups",
        "LoRA",
        "native drain",
        "vLLM drain",
        "ratio",
        "sustained",
        "over native",
        "over vLLM",
    ]
    rows = []
    for (size, tail, groups, lora), sides in drains.items():
        ours, theirs = sides.get("native"), sides.get("vllm")
        full = sustained.get((size, tail, groups), {}).get("native")
        rows.append(
            [
                *(size, tail, f"{groups} x {GROUP}", str(lora)),
                *(_value(side, "tokens_per_s", _rate) for side in (ours, theirs)),
                _ratio(ours, theirs),
                _value(full, "tokens_per_s", _rate),
                *(_ratio(full, side) for side in (ours, theirs)),
            ]
        )
    return _table("Rollout, tokens a second", head, rows)


def _updates(records: Sequence[Record]) -> str:
    head = ["size", "tail", "groups", "paradigm", "K", "tok/s", "steady", "s/update", "training s", "rows idle"]
    head += ["age", "dropped", "over synchronous", "over TRL"]
    found = [record for record in records if record["bench"] == "update"]

    def of(record: Record, *names: str) -> tuple[Any, ...]:
        return tuple(record["parameters"].get(name) for name in names)

    rows = []
    for record in sorted(found, key=lambda r: (*of(r, "size", "tail", "groups"), r["side"], *of(r, "paradigm"))):
        same = [r for r in found if of(r, "size", "tail", "groups") == of(record, "size", "tail", "groups")]
        plain = next((r for r in same if r["parameters"].get("paradigm") == "synchronous"), None)
        trl = next((r for r in same if r["side"] == "trl"), None)
        size, tail, groups, paradigm, staleness = of(record, "size", "tail", "groups", "paradigm", "staleness")
        rows.append(
            [
                *(size, tail, f"{groups} x {GROUP}", paradigm or record["side"], str(staleness or 0)),
                *(_value(record, name, _rate) for name in ("tokens_per_s", "steady_tokens_per_s")),
                *(_value(record, name, _ms) for name in ("seconds_per_update", "training_s_per_update")),
                _value(record, "row_idle_share", _share),
                _value(record, "staleness_mean", _ms),
                _value(record, "dropped_share", _share),
                _ratio(record, plain),
                _ratio(record, trl),
            ]
        )
    return _table("Updates", head, rows)


def step_cost(records: Sequence[Record], size: str) -> StepCost | None:
    """The cost of a step of one size, or None where there are too few cells to tell."""
    steps = [
        r for r in records if r["bench"] == "step" and r["parameters"]["size"] == size and "step_ms" in r["results"]
    ]
    if len(steps) < 3:
        return None
    points = [
        (
            float(r["parameters"]["batch"]),
            r["parameters"]["batch"] * r["results"]["context_mean"],
            r["results"]["step_ms"] / 1e3,
        )
        for r in steps
    ]
    return fit(points)


def _costs(records: Sequence[Record]) -> str:
    head = ["size", "a, ms a step", "b, us a row", "c, ns a token", "tail", "groups", "training s"]
    head += ["synchronous s", "full rows s", "ideal gain", "measured gain"]
    rows = []
    for record in (r for r in records if r["bench"] == "training"):
        parameters = record["parameters"]
        cost = step_cost(records, parameters["size"])
        if cost is None or "training_s" not in record["results"]:
            continue
        tail, groups, training = parameters["tail"], parameters["groups"], record["results"]["training_s"]
        ideal = ideal_gain(cost, batch_lengths(tail, groups), parameters["prompt"], groups * GROUP, training)
        rows.append(
            [
                *(parameters["size"], f"{1e3 * cost.a:.3f}", f"{1e6 * cost.b:.2f}", f"{1e9 * cost.c:.2f}"),
                *(tail, f"{groups} x {GROUP}", f"{training:.2f}"),
                *(f"{ideal[name]:.1f}" for name in ("synchronous_s", "full_rows_s")),
                f"{ideal['gain']:.2f}",
                _measured_gain(records, parameters),
            ]
        )
    return _table("Cost of a step and the ideal gain", head, rows)


def _measured_gain(records: Sequence[Record], parameters: Mapping[str, Any]) -> str:
    same = {
        r["parameters"].get("paradigm"): r
        for r in records
        if r["bench"] == "update"
        and all(r["parameters"].get(name) == parameters[name] for name in ("size", "tail", "groups"))
    }
    return _ratio(same.get("multi-version"), same.get("synchronous"))


def _learning(records: Sequence[Record]) -> str:
    head = ["paradigm", "K", "seed", "updates", "accuracy before", "after", "best", "seconds", "age", "tok/s"]
    rows = [
        [
            *(str(r["parameters"][name]) for name in ("paradigm", "staleness", "seed", "updates")),
            *(_value(r, name, "{:.3f}".format) for name in ("eval_before", "eval_after", "eval_best")),
            *(_value(r, name, "{:,.1f}".format) for name in ("wall_s", "staleness_mean", "tokens_per_s")),
        ]
        for r in records
        if r["bench"] == "learning"
    ]
    return _table("Learning", head, rows)


def _where(records: Sequence[Record]) -> str:
    """What the figures were measured on, a line each."""
    lines = {
        f"- {r['device']}, driver {r['driver']}, Python {r['python']}, "
        + ", ".join(f"{name} {version}" for name, version in sorted(r["versions"].items()))
        for r in records
    }
    rates = [r["results"]["rates"] for r in records if "rates" in r["results"]]
    if rates:
        bandwidth, peak = (max(rate[name] for rate in rates) for name in ("bandwidth", "peak"))
        lines.add(f"- measured there: copy {bandwidth / 1e12:.2f} TB/s, matrix products {peak / 1e12:.0f} TFLOP/s")
    return "\n".join(["## Measured on", "", *sorted(lines)]) if lines else ""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, help="a markdown file; default: the terminal")
    options = parser.parse_args(arguments)
    text = report(read_cells(options.folders))
    if options.out is None:
        print(text, end="")
    else:
        options.out.write_text(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
