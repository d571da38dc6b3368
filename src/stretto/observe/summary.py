"""The table that is printed at the end of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from stretto.observe.symptoms import MOSTLY_TRUNCATED, OF_SIGNAL


def summary_table(summary: Mapping[str, Any]) -> Table:
    """Returns the summary of a run as a table."""
    table = Table(title="summary of the run", show_header=False)
    table.add_column(justify="left")
    table.add_column(justify="right")
    for moment in ("before", "after"):
        for key, name in (
            (f"eval_{moment}", f"held-out score {moment}"),
            (f"eval_{moment}_greedy", f"held-out score {moment}, greedy"),
        ):
            if summary[key] is not None:
                table.add_row(name, f"{summary[key]:.3f} (version {summary[f'eval_{moment}_version']})")
    for label, own in summary.get("tasks", {}).items():
        scores = [own["eval_before"], own["eval_after"]]
        shown = " -> ".join("none" if score is None else f"{score:.3f}" for score in scores)
        score = "" if scores == [None, None] else f"; held-out {shown}"
        table.add_row(f"task {label}", f"{own['groups']} groups, {own['share']:.1%}{score}")
    table.add_row("updates", f"{summary['steps']}")
    table.add_row("training time", f"{summary['wall_seconds']:.1f} s, first rollout to last update")
    table.add_row("speed", f"{summary['tokens_per_second']:,.0f} tokens/s")
    staleness = summary["staleness"]
    table.add_row("age of the data", f"{staleness['mean']:.2f} updates on average, {staleness['max']} at most")
    table.add_row("trainer idle", f"{summary['trainer_idle_share']:.0%}")
    table.add_row("rollout idle", f"{summary['rollout_idle_share']:.0%}, {summary['row_idle_share']:.0%} of the rows")
    table.add_row("dropped / failed", f"{summary['dropped_trajectories']} / {summary['failed_trajectories']}")
    if summary["dropped_length"] is not None:
        table.add_row("share dropped", f"{summary['dropped_share']:.1%} of all that ended")
        table.add_row(
            "mean length dropped / trained",
            f"{summary['dropped_length']:.1f} so far / {summary['trained_length']:.1f}",
        )
    if summary["groups_without_signal"]:
        table.add_row("trained groups without signal", f"{summary['groups_without_signal']}, their rewards were equal")
    if count := summary["updates_without_signal"]:
        share = "all" if count == summary["steps"] else f"{count}"
        table.add_row("updates without signal", f"{share} of {summary['steps']}: the rewards trained nothing")
    if summary["filtered_groups"]:
        table.add_row(
            "filtered groups (without signal)",
            f"{summary['filtered_groups']}, {summary['filtered_share']:.0%} of all that ended; "
            f"mean reward {summary['filtered_reward']:.3f}",
        )
        table.add_row(
            "mean length filtered / trained", f"{summary['filtered_length']:.1f} / {summary['trained_length']:.1f}"
        )
    if summary["spared_groups"]:
        table.add_row("groups without signal beyond `filter_limit`", f"{summary['spared_groups']}, trained")
    if summary["replayed_trajectories"]:
        table.add_row("reused trajectories", f"{summary['replayed_trajectories']}")
    if summary["replaced_groups"]:
        table.add_row("failed groups that were replaced", f"{summary['replaced_groups']}")
    table.add_row("mixed versions", f"{summary['mixed_version_trajectories']}")
    table.add_row("mean length trained / sampled", f"{summary['length_ratio']:.3f}")
    for kind, update in summary["collapsing"].items():
        table.add_row(f"collapsing ({kind})", f"since update {update}")
    cut_off = summary["truncated_trajectories"] >= MOSTLY_TRUNCATED * max(1, summary["trained_trajectories"])
    for kind, when in summary["not_learning"].items():
        over = "" if when["over"] is None else f", over at update {when['over']}"
        if cut_off and not over and kind in (*OF_SIGNAL, "truncated"):
            over = "; most completions were cut off: raise `rollout.max_tokens`"
        what = "prompts too easy" if kind == "solved" else f"not learning ({kind})"
        table.add_row(what, f"since update {when['since']}{over}")
    mismatch = summary["mismatch_kl"]
    table.add_row("engine against trainer (KL)", "not measured" if mismatch is None else f"{mismatch:.1e}")
    return table
