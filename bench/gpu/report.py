"""Join cells into tables with ratios.

    python -m bench.gpu.report RESULTS [MORE ...] --out report.md

A ratio whose two sides come from different sittings carries a star, and so does an ideal that was made of several.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.gpu import report_device
from bench.gpu.cells import read_cells
from bench.gpu.costs import StepCost, batch_lengths, fit, ideal_gain
from bench.gpu.rollout import GROUP
from bench.gpu.tables import MISSING, Record, by, decimal, rate, ratio, share, table, value

WHILE_ADMITTING = "generated_per_s_while_admitting"


def report(records: Sequence[Record]) -> str:
    """All tables that there are cells for, as markdown."""
    parts = [
        _generation(records, "decode", "Decode, prefill included"),
        _generation(records, "filled", "Decode steps over filled contexts"),
        _rollout(records),
        _updates(records),
        _costs(records),
        report_device.publish(records),
        report_device.slots(records),
        report_device.sharing(records),
        report_device.mismatch(records),
        _learning(records),
        _where(records),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


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
    for key, sides in by(records, bench, "size", "prompt", "tokens", "lora", "batch").items():
        size, prompt, tokens, lora, batch = key
        ours, theirs = sides.get("native"), sides.get("vllm")
        rows.append(
            [
                *(size, f"{prompt:,} + {tokens:,}", str(lora), str(batch)),
                *(value(side, "tokens_per_s", rate) for side in (ours, theirs)),
                ratio(ours, theirs),
                *(value(ours, name, decimal) for name in ("step_ms", "floor_step_ms")),
                value(ours, "share_of_floor", share),
            ]
        )
    return table(title, head, rows)


def _rollout(records: Sequence[Record]) -> str:
    """The drain of both sides, and the sustained rate over each of them."""
    drains = by(records, "drain", "size", "tail", "groups", "prompt", "lora")
    sustained = by(records, "sustained", "size", "tail", "groups", "prompt")
    head = [
        "size",
        "tail",
        "groups",
        "prompt",
        "LoRA",
        "native drain",
        "vLLM drain",
        "ratio",
        "sustained",
        "over native",
        "over vLLM",
    ]
    rows = []
    for (size, tail, groups, prompt, lora), sides in drains.items():
        ours, theirs = sides.get("native"), sides.get("vllm")
        full = sustained.get((size, tail, groups, prompt), {}).get("native")
        rows.append(
            [
                *(size, tail, f"{groups} x {GROUP}", f"{prompt:,}", str(lora)),
                *(value(side, "tokens_per_s", rate) for side in (ours, theirs)),
                ratio(ours, theirs),
                value(full, "tokens_per_s", rate),
                *(ratio(full, side) for side in (ours, theirs)),
            ]
        )
    return table("Rollout, tokens a second", head, rows)


def _updates(records: Sequence[Record]) -> str:
    """Whole runs. A ratio is between runs of the same work: over synchronous as many updates, of the same groups.

    Over TRL it is to the fastest of its settings.
    """
    head = ["size", "tail", "groups", "updates", "paradigm", "K", "tok/s", "while admitting", "s/update", "training s"]
    head += ["rows idle", "half of rows", "age", "dropped", "over synchronous", "while admitting", "over TRL"]
    found = [record for record in records if record["bench"] == "update"]

    def of(record: Record, *names: str) -> tuple[Any, ...]:
        return tuple(record["parameters"].get(name) for name in names)

    def same(record: Record, *names: str) -> list[Record]:
        return [r for r in found if of(r, *names) == of(record, *names)]

    rows = []
    work = ("size", "tail", "groups")
    for record in sorted(found, key=lambda r: (*of(r, *work), r["side"], of(r, "updates"), str(of(r, "paradigm")))):
        alike = same(record, *work, "updates", "prompt")
        plain = next((r for r in alike if r["parameters"].get("paradigm") == "synchronous"), None)
        tuned = [r for r in same(record, *work, "prompt") if r["side"] == "trl"]
        trl = max(tuned, key=lambda r: r["results"].get("tokens_per_s", 0.0), default=None)
        size, tail, groups, updates, paradigm, staleness = of(record, *work, "updates", "paradigm", "staleness")
        rows.append(
            [
                *(size, tail, f"{groups} x {GROUP}", str(updates), paradigm or record["side"], str(staleness or 0)),
                *(value(record, name, rate) for name in ("tokens_per_s", WHILE_ADMITTING)),
                *(value(record, name, decimal) for name in ("seconds_per_update", "training_s_per_update")),
                *(value(record, name, share) for name in ("row_idle_share", "half_rows_share")),
                value(record, "staleness_mean", decimal),
                value(record, "dropped_share", share),
                ratio(record, plain),
                ratio(record, plain, WHILE_ADMITTING),
                ratio(record, trl),
            ]
        )
    return table("Updates", head, rows)


def step_cost(records: Sequence[Record], size: str) -> StepCost | None:
    """The cost of a step of one size, or None where there are too few cells to tell."""
    steps = _steps(records, size)
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


def _steps(records: Sequence[Record], size: str) -> list[Record]:
    return [
        r for r in records if r["bench"] == "step" and r["parameters"]["size"] == size and "step_ms" in r["results"]
    ]


def _costs(records: Sequence[Record]) -> str:
    """Ideal gains for the work of the runs that were made, or of one update where there are none.

    The gain while groups are admitted is that of the updates between the first and the last, which is what the window
    of the synchronous run holds. An ideal whose steps and training come from several sittings carries a star.
    """
    head = ["size", "a, ms a step", "b, us a row", "c, ns a token", "tail", "groups", "updates", "training s"]
    head += ["synchronous s", "full rows s", "ideal gain", "measured", "ideal while admitting", "measured"]
    rows = []
    for record in (r for r in records if r["bench"] == "training"):
        parameters = record["parameters"]
        cost = step_cost(records, parameters["size"])
        if cost is None or "training_s" not in record["results"]:
            continue
        sittings = {r["sitting"] for r in (record, *_steps(records, parameters["size"]))}
        star = "" if len(sittings) == 1 else "*"
        runs = _runs_of(records, parameters)
        for updates in sorted(runs) or [1]:
            batches = batch_lengths(parameters["tail"], parameters["groups"], updates)
            ideal = _ideal(cost, batches, record)
            between = _ideal(cost, batches[1:-1], record) if updates > 2 else None
            multi, synchronous = (runs.get(updates, {}).get(name) for name in ("multi-version", "synchronous"))
            rows.append(
                [
                    *(parameters["size"], f"{1e3 * cost.a:.3f}", f"{1e6 * cost.b:.2f}", f"{1e9 * cost.c:.2f}"),
                    *(parameters["tail"], f"{parameters['groups']} x {GROUP}", str(updates)),
                    *(f"{ideal[name]:.1f}" for name in ("training_s", "synchronous_s", "full_rows_s")),
                    *(f"{ideal['gain']:.2f}{star}", ratio(multi, synchronous)),
                    *(
                        MISSING if between is None else f"{between['gain']:.2f}{star}",
                        ratio(multi, synchronous, WHILE_ADMITTING),
                    ),
                ]
            )
    return table("Cost of a step and the ideal gain", head, rows)


def _ideal(cost: StepCost, batches: Sequence[Sequence[int]], training: Record) -> dict[str, float]:
    """The ideal of some updates; their training takes as long a token as that of the batch that was measured."""
    prompt, rows = training["parameters"]["prompt"], training["parameters"]["groups"] * GROUP

    def tokens(work: Sequence[Sequence[int]]) -> int:
        return sum(prompt + length for batch in work for length in batch)

    measured = tokens(batch_lengths(training["parameters"]["tail"], training["parameters"]["groups"]))
    training_s = training["results"]["training_s"] * tokens(batches) / measured
    return {**ideal_gain(cost, batches, prompt, rows, training_s), "training_s": training_s}


def _runs_of(records: Sequence[Record], parameters: Mapping[str, Any]) -> dict[int, dict[str, Record]]:
    """Runs of the same size, tail, groups and prompt, by their number of updates and by paradigm."""
    found: dict[int, dict[str, Record]] = {}
    for record in records:
        own = record["parameters"]
        alike = all(own.get(name) == parameters[name] for name in ("size", "tail", "groups", "prompt"))
        if record["bench"] == "update" and record["side"] == "native" and alike:
            found.setdefault(own["updates"], {})[own["paradigm"]] = record
    return found


def _learning(records: Sequence[Record]) -> str:
    head = ["paradigm", "K", "seed", "updates", "accuracy before", "after", "best", "seconds", "age", "tok/s"]
    rows = [
        [
            *(str(r["parameters"][name]) for name in ("paradigm", "staleness", "seed", "updates")),
            *(value(r, name, "{:.3f}".format) for name in ("eval_before", "eval_after", "eval_best")),
            *(value(r, name, "{:,.1f}".format) for name in ("wall_s", "staleness_mean", "tokens_per_s")),
        ]
        for r in records
        if r["bench"] == "learning"
    ]
    return table("Learning", head, rows)


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
