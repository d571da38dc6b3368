"""Shows a run: a line for each update, or the samples of one update with their rewards.

Reads only the journal and imports no torch, so it starts fast and works while the run is going.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from rich import box
from rich.console import Group, RenderableType
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from stretto.chat.transcripts import Decode, divide
from stretto.errors import RunError, printable
from stretto.store.overview import described, state_of
from stretto.store.reader import JournalReader
from stretto.store.records import EvaluationRecord, SampleRecord, TaskRecord, UpdateRecord
from stretto.store.schema import ENDS, UNDER_WAY, reading
from stretto.types import Lineage, RewardPart, part_means

NUM_SAMPLES = 8  # shown of an update by default
MAX_LINES = 40  # of a prompt or a completion, so that a long sample does not push the others off the screen


def show(
    run_folder: str | Path, update: int | None = None, samples: int | None = None, decode: Decode | None = None
) -> RenderableType:
    """Returns the overview of a run, or with `update` its first `samples` samples: group by group, best first.

    `decode` tells the turns of a sample and what was observed between them apart; without it they are one text.
    """
    if samples is not None and samples < 1:
        raise RunError(f"`--samples {samples}` shows nothing: use at least 1")
    if samples is not None and update is None:
        raise RunError(f"`--samples {samples}` has no effect without `--update N`; add it to choose the update")
    with JournalReader(run_folder) as reader, reader.moment(), reading(reader.path):
        return _overview(reader) if update is None else _update(reader, update, samples or NUM_SAMPLES, decode)


# -- the overview ------------------------------------------------------------------------------------------------------


def _overview(reader: JournalReader) -> RenderableType:
    parts: list[RenderableType] = [_headline(reader)]
    if updates := reader.updates():
        parts.append(_updates(updates))
    evaluations = reader.evaluations()
    if tasks := reader.tasks():
        parts.append(_tasks(tasks, evaluations))
    if evaluations:
        parts.append(_evaluations(evaluations))
    parts.append(_ends(reader.counts()))
    notes = [(kind, text) for _, kind, text in reader.notes()]
    notes += [(f"{kind} failed", f"trajectory {trajectory}: {why}") for trajectory, kind, why in reader.failures()]
    if notes:
        table = _table("note", "times", "last text")
        for kind in sorted({kind for kind, _ in notes}):
            texts = [text for one, text in notes if one == kind]
            table.add_row(Text(printable(kind)), str(len(texts)), Text(printable(texts[-1])))
        parts.append(table)
    return Group(*parts)


def _tasks(tasks: list[TaskRecord], evaluations: list[EvaluationRecord]) -> Table:
    table = _table("task", "groups", "share", "reward", "filtered", "failed", "held-out", "now")
    total = sum(record.trained for record in tasks)
    for record in tasks:
        scores = [score for each in evaluations if (score := each.tasks.get(record.label)) is not None]
        table.add_row(
            Text(printable(record.label)),
            str(record.trained),
            f"{record.trained / total:.2%}" if total else "-",
            "-" if record.reward is None else f"{record.reward:.4f}",
            str(record.filtered),
            str(record.failed),
            *([f"{scores[0]:.4f}", f"{scores[-1]:.4f}"] if scores else ["-", "-"]),
        )
    return table


def _evaluations(evaluations: list[EvaluationRecord]) -> Table:
    greedy = any(record.greedy is not None for record in evaluations)
    table = _table("evaluation", "version", "reward", *["greedy"] * greedy, "prompts", "seconds")
    for record in evaluations:
        scores = [record.reward, *[None if record.greedy is None else record.greedy.score] * greedy]
        table.add_row(
            record.kind,
            str(record.version),
            *["-" if score is None else f"{score:.4f}" for score in scores],
            str(record.num),
            f"{record.seconds:.1f}",
        )
    return table


def _headline(reader: JournalReader) -> Text:
    facts, sessions = reader.facts(), reader.sessions()
    last = sessions[-1] if sessions else None
    state = state_of(reader.path.resolve().parent, last.outcome if last else None)
    staleness = f"auto, at most {facts.staleness}" if facts.auto else str(facts.staleness)
    redundant = facts.reserve_groups > 0 or facts.reserve_members > 0
    laws = sorted({*facts.laws_broken, *([2] if redundant else [])})
    broken = f", gives up law {' and '.join(map(str, laws))}" if laws else ""
    started = f", of {facts.batch + facts.reserve_groups} x {facts.group + facts.reserve_members}" if redundant else ""
    name = reader.path.resolve().parent.name  # `.` has none of its own
    return Text(
        f"{name}: {facts.paradigm}{broken}, staleness {staleness}, {facts.batch} prompts x "
        f"{facts.group}{started}; {reader.num_updates()} of {facts.updates} updates, "
        + (f"resumed {_times(len(sessions) - 1)}, " if len(sessions) > 1 else "")
        + described(state, last.error if last else None)
    )


def _times(count: int) -> str:
    return {1: "once", 2: "twice"}.get(count, f"{count} times")


def _updates(updates: list[UpdateRecord]) -> Table:
    reused = any(record.num_again for record in updates)
    filtered = any(record.metrics.get("filtered_groups") for record in updates)
    columns = ["reward", "samples", *["reused"] * reused, *["filtered groups"] * filtered]
    table = _table("update", *columns, "tokens", "age", "oldest", "seconds")
    for record in updates:
        seconds = "training" if record.finished_at is None else f"{record.finished_at - record.taken_at:.1f}"
        table.add_row(
            str(record.update),
            f"{record.reward:.4f}",
            str(record.num_samples),
            *[str(record.num_again)] * reused,
            *[str(record.metrics.get("filtered_groups", "-"))] * filtered,
            f"{record.tokens:.1f}",
            f"{record.age:.2f}",
            str(record.oldest),
            seconds,
        )
    return table


def _ends(counts: dict[str, int]) -> Text:
    total = sum(counts.values())
    ends = [f"{counts.get(state, 0):,} {state}" for state in ENDS]
    in_progress = [f"{counts[state]:,} {state}" for state in UNDER_WAY if counts.get(state)]
    return Text(f"trajectories: {total:,} started; {', '.join(ends)}; in progress: {', '.join(in_progress) or 'none'}")


def _table(first: str, *others: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(first, overflow="fold")
    for name in others:
        wide = name == "last text"
        table.add_column(name, justify="left" if wide else "right", no_wrap=not wide, overflow="fold")
    return table


# -- the samples of one update -----------------------------------------------------------------------------------------


def _update(reader: JournalReader, update: int, samples: int, decode: Decode | None) -> RenderableType:
    records = reader.samples(update)
    if not records:
        taken = [record.update for record in reader.updates()]
        known = f"it has updates {taken[0]} to {taken[-1]}" if taken else "it has none yet"
        raise RunError(f"`--update {update}` is not in `{reader.path.parent}`: {known}")
    # The batch is ordered by (version, group, member, lineage), so the samples of a group are adjacent.
    trajectories = [list(own) for _, own in groupby(records, lambda r: (r.trajectory, r.use))]
    ordered = [own for _, group in groupby(trajectories, _group_of) for own in sorted(group, key=_best_first)]
    shown = ordered[:samples]
    rewards = [own[0].reward for own in trajectories if own[0].reward is not None]
    mean = sum(rewards) / len(rewards) if rewards else math.nan
    means = "".join(
        f", {name} {value:.4f}" for name, value in part_means(own[0].reward_parts for own in trajectories).items()
    )
    parts: list[RenderableType] = [
        Text(f"update {update}: {len(shown)} of {len(trajectories)} samples, mean reward {mean:.4f}{means}")
    ]
    for group, members in groupby(shown, _group_of):
        sharing = list(members)
        label = sharing[0][0].task
        title = f"group {group}" if label is None else f"group {group}, task {printable(label)}"
        parts += [Rule(title, style="none", characters="="), Text("prompt:", style="bold")]
        parts.append(_indented(sharing[0][0].prompt))
        for own in sharing:
            parts.append(Text(_describe(own), style="bold"))
            divided = decode is not None and any(record.turns > 1 for record in own)
            lineages = reader.load_lineages(own[0].trajectory)[0] if divided else None
            for record in own:
                parts += _head(record)
                if decode is not None and lineages is not None:
                    parts += _turns(lineages[record.lineage], decode)
                else:
                    parts.append(_indented(record.text))
    return Group(*parts)


def _group_of(trajectory: Sequence[SampleRecord]) -> int:
    return trajectory[0].group


def _best_first(trajectory: Sequence[SampleRecord]) -> tuple[float, int]:
    record = trajectory[0]
    return (-record.reward if record.reward is not None else math.inf, record.member)


def _describe(trajectory: Sequence[SampleRecord]) -> str:
    """Describes a trajectory; `trajectory` has its lineages."""
    record = trajectory[0]
    reward = "none" if record.reward is None else f"{record.reward:.4f}"
    again = f", use {record.use}" if record.use else ""
    if record.turn_rewards is not None:
        reward += f" ({' + '.join(f'{each:g}' for each in record.turn_rewards)})"
    if record.reward_parts is not None:
        reward += f" ({' + '.join(map(_part, record.reward_parts))})"
    num_turns = sum(each.turns for each in trajectory)
    turns = f" in {num_turns} turns" if num_turns > 1 else ""
    limit = f", reached the limit of its {record.limit}" if record.limit in ("seconds", "budget") else ""
    limit += f", spent {record.spent:g}" if record.spent is not None else ""
    end = record.finish if record.num_lineages == 1 else f"{record.num_lineages} lineages"
    return (
        f"trajectory {record.trajectory}: reward {reward}, version {record.version}, age {record.age}, "
        f"{sum(each.num_tokens for each in trajectory)} tokens{turns}, {end}{limit}{again}"
    )


def _part(part: RewardPart) -> str:
    """Describes one of several rewards: its name, its value and its weight."""
    name = printable(part.name)
    return f"{name} none" if part.value is None else f"{part.weight:g} x {name} {part.value:g}"


def _head(record: SampleRecord) -> list[RenderableType]:
    """Returns a line about a lineage, and its own context, if its trajectory has several."""
    parts: list[RenderableType] = []
    if record.num_lineages > 1:
        turns = f" in {record.turns} turns" if record.turns > 1 else ""
        untrained = "" if record.train else ", not trained"
        parts.append(Text(f"  lineage {record.lineage}: {record.num_tokens} tokens{turns}, {record.finish}{untrained}"))
    if record.context is not None:
        parts += [Text("  context:"), _indented(record.context), Text("  completion:")]
    return parts


def _turns(lineage: Lineage, decode: Decode) -> list[RenderableType]:
    """Returns the turns of a lineage, with the tools that each calls, and what was observed before each."""
    made, parts = lineage.completion, list[RenderableType]()
    tokens = made.tokens.tolist()
    spans = [[0, len(tokens)]] if made.turns is None else made.turns.tolist()
    for part in divide(tokens, spans, lineage.turn_numbers or range(len(spans)), decode):
        if part.turn is None:
            parts += [Text("  observed:"), _indented(part.text.strip("\n"))]
            continue
        names = [each.call.name for each in part.calls]
        called = ", ".join(f"`{printable(name)}`" if name else "what cannot be read" for name in names)
        parts += [Text(f"  turn {part.turn}{', calls ' * bool(names)}{called}:"), _indented(part.text.rstrip("\n"))]
    return parts


def _indented(text: str) -> Text:
    """Indents a text as plain characters: the output of a model is never markup and never controls the terminal."""
    lines = [printable(line) for line in text.split("\n")]
    if len(lines) > MAX_LINES:
        half = MAX_LINES // 2
        lines = [*lines[:half], f"[... {len(lines) - 2 * half} lines ...]", *lines[-half:]]
    return Text("\n".join(f"    {line}" for line in lines))
