"""Tables of what versions and roles cost on one device: publishing, slots, sharing, mismatch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.gpu.sharing import name_of, shares, sum_of
from bench.gpu.tables import MISSING, Record, by, decimal, ratio, share, table, value


def _small(number: float) -> str:
    return f"{number:.2e}"


def publish(records: Sequence[Record]) -> str:
    head = ["size", "versions", "rows", "step ms", "load ms", "stall ms", "worst", "gap on the device ms", "may be ms"]
    head += ["kept", "trainer's copy ms"]
    rows = []
    for (size, kind, batch), sides in by(records, "publish", "size", "kind", "batch").items():
        record = sides["native"]
        rows.append(
            [
                *(size, kind, str(batch)),
                *(
                    value(record, name, decimal)
                    for name in ("step_ms", "load_ms", "stall_ms", "stall_ms_max", "device_gap_ms", "limit_ms")
                ),
                value(record, "within_limit", lambda kept: "yes" if kept else "no"),
                value(record, "weights_s", lambda seconds: decimal(1e3 * seconds)),
            ]
        )
    return table("Publishing a version while rows decode", head, rows)


def slots(records: Sequence[Record]) -> str:
    """A step by live versions; the ratio is to one adapter."""
    found = by(records, "slots", "size", "batch", "prompt", "tokens", "kind", "versions")
    rows = []
    for (size, batch, prompt, tokens, kind, versions), sides in found.items():
        record, one = sides["native"], found.get((size, batch, prompt, tokens, "lora", 1), {}).get("native")
        rows.append(
            [
                *(size, str(batch), f"{prompt:,} + {tokens:,}", kind, str(versions)),
                value(record, "step_ms", decimal),
                ratio(record, one, "step_ms"),
            ]
        )
    head = ["size", "rows", "context", "weights", "live versions", "step ms", "over one adapter"]
    return table("A decode step by live versions", head, rows)


def sharing(records: Sequence[Record]) -> str:
    """Shares of the rates alone, the best interleaving of each number of rows first."""
    rows = [
        [
            *(each["size"], str(each["rows"]), str(each.get("group", 1)), f"{each['micro_tokens']:,}", name_of(each)),
            *(share(each[name]) for name in ("decode_share", "training_share")),
            sum_of(each),
        ]
        for each in shares(records)
    ]
    head = ["size", "rows", "rows a prompt", "micro-batch tokens", "interleaving"]
    head += ["of decode alone", "of training alone", "sum"]
    return table("Decode and training on one device", head, rows)


def mismatch(records: Sequence[Record]) -> str:
    head = ["model", "engine", "weights", "type", "tokens", "mean of abs(d)", "99 % below", "largest", "KL"]
    rows: list[list[str]] = []
    for (model, kind, *_), sides in by(records, "mismatch", "model", "kind", "prompts", "tokens").items():
        for side in sorted(sides):
            record: Any = sides[side]
            rows.append(
                [
                    *(model, side, kind, record["results"].get("dtype", MISSING)),
                    value(record, "tokens", "{:,}".format),
                    *(value(record, name, _small) for name in ("mean_abs", "p99_abs", "max_abs", "kl")),
                ]
            )
    return table("Engine against trainer, log-probabilities of the same tokens", head, rows)
