"""Update: whole RL updates, LoRA rank 16, under every paradigm, through the real loop.

    python -m bench.gpu.update --tail published --groups 32,16 --out RESULTS --resume
    python -m bench.gpu.update --tail short --groups 64 --out RESULTS --resume
    python -m bench.gpu.update --tail stop-tokens --groups 64 --paradigms synchronous,multi-version --out RESULTS

Every paradigm is given the same prompts and the same lengths, trajectory by trajectory; each runs in a process of its
own, warmed up before the first admission. `tokens_per_s` is over the whole run, filling and draining included: a run
admits as many groups as it trains, so its end drains under every paradigm, and a run of few updates is mostly its end.
`generated_per_s_while_admitting` is over the part that a long run consists of: from the end of the first update to the
last admission, all tokens generated in that time, whoever trains on them later. With `--tail stop-tokens` lengths are
not forced: 380 tokens of the vocabulary end a completion, as beside TRL (`trl_update`).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.gpu.cells import Cell, add_options, from_options, integers, run_children, words
from bench.gpu.lengths import TAILS
from bench.gpu.runs import Work, run_once
from bench.gpu.shapes import SHAPES
from bench.gpu.timeline import Timeline
from stretto.core.paradigms import PARADIGMS
from stretto.core.plan import resolve_plan
from stretto.store.verify import exit_code, format_findings, verify

GROUP = 8
NUM_STOP_TOKENS = 380  # of 151,936: a completion ends after 400 tokens on average
STOP_MAX_TOKENS = 4_096
PAGE = 16
USUAL = {"in_flight": 2.0, "kv_tokens": 0, "prefill_tokens": 8_192, "micro_tokens": 16_384}  # other values are named


def stop_tokens(size: str, count: int = NUM_STOP_TOKENS) -> tuple[int, ...]:
    """The tokens that end a completion, the same for every side."""
    drawn = np.random.default_rng(380).choice(SHAPES[size].vocab_size, count, replace=False)
    return tuple(sorted(drawn.tolist()))


def cell_of(paradigm: str, groups: int, options: argparse.Namespace) -> Cell:
    own = PARADIGMS[paradigm].staleness
    unusual = {name: getattr(options, name) for name, usual in USUAL.items() if getattr(options, name) != usual}
    if PARADIGMS[paradigm].one_batch:
        unusual.pop("in_flight", None)
    return Cell(
        "update",
        "native",
        {
            "size": options.size,
            "tail": options.tail,
            "groups": groups,
            "paradigm": paradigm,
            "staleness": options.staleness if own is None else own,
            "updates": options.updates,
            "prompt": options.prompt,
            **unusual,
        },
    )


def work_of(cell: Cell, options: argparse.Namespace) -> Work:
    """The work of a cell: rows for one batch, and groups in flight by the paradigm or by `--in-flight`."""
    paradigm, groups = str(cell.parameters["paradigm"]), int(cell.parameters["groups"])
    one_batch = PARADIGMS[paradigm].one_batch
    plan = resolve_plan(
        paradigm,
        batch=groups,
        group_size=GROUP,
        updates=options.updates,
        staleness=None if PARADIGMS[paradigm].staleness is not None else options.staleness,
        in_flight=None if one_batch else int(options.in_flight * groups),
        retries=0,
    )
    forced = options.tail != "stop-tokens"
    tail = TAILS[options.tail] if forced else None
    longest = STOP_MAX_TOKENS if tail is None else tail.cap
    kv_tokens = options.kv_tokens
    if not kv_tokens:
        # Rows of a batch are rarely long together; what does not fit after all is preempted and counted.
        if tail is None:
            mean = min(SHAPES[options.size].vocab_size / options.stop_tokens, longest)
        else:
            made, left = tail.underway(4_096, seed=9)
            mean = float(max(made.mean(), (made + left).mean() / 2))
        kv_tokens = int(1.6 * plan.rows * (options.prompt + mean + PAGE)) + options.prompt + longest
    return Work(
        size=options.size,
        plan=plan,
        prompt=options.prompt,
        lengths=tail,
        max_tokens=longest,
        stop_tokens=() if forced else stop_tokens(options.size, options.stop_tokens),
        kv_tokens=kv_tokens,
        prefill_tokens=options.prefill_tokens,
        micro_tokens=options.micro_tokens,
    )


def measure(cell: Cell, options: argparse.Namespace) -> dict[str, Any]:
    work = work_of(cell, options)
    with tempfile.TemporaryDirectory() as scratch:
        made = run_once(work, options.device, Path(scratch))
        findings = verify(Path(scratch))
    if exit_code(findings):
        raise RuntimeError(f"the run does not verify:\n{format_findings(findings)}")
    return {**results(made, work), "verify": format_findings(findings).splitlines()}


def results(made: dict[str, Any], work: Work) -> dict[str, Any]:
    """Rates and the split of an update's time, from what was recorded at the end of every update and at every step."""
    summary, marks = made["summary"], made["marks"]
    updates, wall = len(marks), summary["wall_seconds"]
    half, whole = work.plan.rows / 2, (made["started"], marks[-1]["at"])
    training = sum(mark["update_seconds"] for mark in marks)
    return {
        "tokens_per_s": summary["tokens_per_second"],
        **while_admitting(made["timeline"], [mark["at"] for mark in marks], made["admitted_at"], half),
        "seconds_per_update": wall / updates,
        "tokens": summary["tokens"],
        "wall_s": wall,
        "training_s_per_update": training / updates,
        "trainer_idle_share": summary["trainer_idle_share"],
        "half_rows_share": made["timeline"].share_at_least(half, *whole),
        "row_idle_share": summary["row_idle_share"],
        "rollout_idle_share": summary["rollout_idle_share"],
        "staleness_mean": summary["staleness"]["mean"],
        "dropped_share": summary["dropped_share"],
        "mixed_version_share": summary["mixed_version_share"],
        "length_ratio": summary["length_ratio"],
        "mismatch_kl": summary["mismatch_kl"],
        "truncated": summary["truncated_trajectories"],
        "rows": work.plan.rows,
        "in_flight": work.plan.in_flight,
        "kv_tokens": work.kv_tokens,
        "ready_s": made["ready_s"],
        "engine": made["engine"],
        "marks": marks,
    }


def while_admitting(timeline: Timeline, ended: Sequence[float], admitted: float, half: float) -> dict[str, Any]:
    """The window from the end of the first update to the last admission; nothing where no update ended inside it.

    `ended` are the ends of all updates, `half` is half of the rows. `admitting_updates` are those that ended inside.
    """
    start, inside = ended[0], sum(at <= admitted for at in ended[1:])
    if not inside:
        return {}
    return {
        "generated_per_s_while_admitting": timeline.tokens_between(start, admitted) / (admitted - start),
        "half_rows_share_while_admitting": timeline.share_at_least(half, start, admitted),
        "admitting_s": admitted - start,
        "admitting_updates": inside,
    }


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--size", default="1.7B")
    parser.add_argument("--tail", choices=[*TAILS, "stop-tokens"], default="published")
    parser.add_argument("--groups", type=integers, default=[32], help="groups of 8 an update")
    parser.add_argument("--paradigms", type=words, default=list(PARADIGMS))
    parser.add_argument("--staleness", type=int, default=4, help="K of the paradigms that leave it open")
    parser.add_argument("--in-flight", type=float, help="groups outstanding, in batches; default: 2")
    parser.add_argument("--updates", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--kv-tokens", type=int, help="default: what the tail needs on average, and more")
    parser.add_argument("--prefill-tokens", type=int, help="most tokens prefilled in a step; default: 8,192")
    parser.add_argument("--micro-tokens", type=int, help="most tokens of a micro-batch; default: 16,384")
    parser.add_argument("--stop-tokens", type=int, default=NUM_STOP_TOKENS, help="of `--tail stop-tokens`")
    parser.set_defaults(**USUAL)
    options = parser.parse_args(arguments)
    if options.tiny:
        options.size, options.groups, options.updates, options.prompt = "tiny", [2], 3, 8
        options.staleness, options.prefill_tokens, options.micro_tokens = 1, 64, 256
        if options.tail != "stop-tokens":
            options.tail = "tiny"
    return options


def main(arguments: list[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = parse(given)
    cells = from_options(options)
    every = [cell_of(paradigm, groups, options) for groups in options.groups for paradigm in options.paradigms]
    if len(every) == 1:
        cells.measure(every[0], lambda: measure(every[0], options))
        return 0
    return run_children(
        [
            [
                *(sys.executable, "-m", "bench.gpu.update", *given, "--sitting", cells.sitting),
                *("--groups", str(cell.parameters["groups"]), "--paradigms", str(cell.parameters["paradigm"])),
            ]
            for cell in cells.pending(every)
        ]
    )


if __name__ == "__main__":
    raise SystemExit(main())
