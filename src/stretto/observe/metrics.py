"""The metrics of a run: a line for each update, and the summary at the end.

A *window* is the time from the first admission to the end of the last update; speeds and idle shares refer to it. A run
that was stopped and resumed has several windows, whose sums are kept in the journal. All but the last end with the
stop; the window of a killed session ends with its last update. The warm start and the evaluations before and after the
run lie outside of every window.
"""

from __future__ import annotations

import copy
import json
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from stretto.errors import RunError
from stretto.observe.collapse import History
from stretto.observe.reward_trend import RewardTrend
from stretto.observe.symptoms import Symptoms, is_without_signal
from stretto.observe.task_metrics import TaskMetrics, TaskSums, of_evaluation, of_summary
from stretto.types import (
    Completion,
    EngineStats,
    EpisodeLimit,
    EvaluationResult,
    RewardPart,
    Sample,
    UpdateReport,
    by_trajectory,
    part_means,
)


class Sink(Protocol):
    """A destination of metrics, one record for each update."""

    def write(self, record: Mapping[str, Any]) -> None: ...


class Sinks:
    """Several sinks as one: each gets every record, in order."""

    def __init__(self, *sinks: Sink) -> None:
        self._sinks = sinks

    def write(self, record: Mapping[str, Any]) -> None:
        for sink in self._sinks:
            sink.write(record)


class JsonLines:
    """`metrics.jsonl`: one JSON object a line, flushed after every line."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, record: Mapping[str, Any]) -> None:
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
        except OSError as error:
            raise RunError(f"`{self._path}` cannot be written: {error}") from error

    def rewrite(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Replaces the file by these lines. A resumed run, which may have been killed, writes those of the journal."""
        scratch = self._path.with_suffix(".partial")
        try:
            scratch.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
            scratch.replace(self._path)
        except OSError as error:
            raise RunError(f"`{self._path}` cannot be written: {error}") from error


@dataclass(slots=True)
class Totals:
    """Sums over the whole run, kept when it is stopped and resumed."""

    steps: int = 0
    wall_s: float = 0.0
    trainer_busy_s: float = 0.0
    rollout_busy_s: float = 0.0  # summed over instances
    rollout_s: float = 0.0  # wall time summed over instances
    row_s: float = 0.0  # integral of running rows
    tokens: int = 0  # completion tokens trained on; here and below, without the later uses of a trajectory
    trained: int = 0  # trajectories
    sampled_tokens: int = 0  # of every trajectory with tokens, however it ended
    sampled: int = 0  # the number of those trajectories
    dropped: int = 0
    dropped_begun: int = 0  # of these, the ones that had tokens
    dropped_tokens: int = 0  # that they had
    dropped_complete: int = 0  # dropped trajectories that had their last token
    dropped_complete_tokens: int = 0
    lengths_before: tuple[int, ...] = (
        0,
    ) * 5  # sums that `_dropped_since` subtracts: those at the end of the last update
    filtered: int = 0  # trajectories of groups without signal, which were replaced
    filtered_tokens: int = 0
    filtered_groups: int = 0
    filtered_reward: float = 0.0  # summed over those groups; all members of such a group have the same reward
    filtered_before: tuple[int, int, int, float] = (0, 0, 0, 0.0)  # the four sums above at the end of the last update
    replayed: int = 0  # trajectories that were reused
    replayed_tokens: int = 0
    failed: int = 0
    mixed: int = 0
    truncated: int = 0
    groups_without_signal: int = 0  # trained, with advantages of 0
    updates_without_signal: int = 0  # all of whose groups were
    mismatch_kl_sum: float = 0.0
    mismatch_tokens: int = 0
    ages: dict[int, int] = field(default_factory=dict)  # age in updates -> trajectories trained, later uses included
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    history: History = field(default_factory=History)  # detects a collapse
    symptoms: Symptoms = field(default_factory=Symptoms)  # detects that nothing can be learnt
    trend: RewardTrend = field(default_factory=RewardTrend)  # keeps both from warning of a run that learns
    moves: int = 0  # of trajectories between instances
    moved_bytes: int = 0  # of KV
    prefilled_again: int = 0  # tokens prefilled again after moves without KV
    instances_lost: int = 0
    instances_replaced: int = 0
    limits_reached: dict[str, int] = field(default_factory=dict)  # limit -> episodes that reached it
    spent: float = 0.0  # by episodes
    tasks: TaskSums = field(default_factory=dict)  # of each task that has a label

    def sums(self) -> dict[str, Any]:
        """The sums that the journal keeps: all except those that follow from its updates and evaluations."""
        return {
            name: value
            for name, value in asdict(self).items()
            if name not in ("evaluations", "history", "symptoms", "trend")
        }

    def judge(self, line: Mapping[str, Any]) -> dict[str, list[str]]:
        """Adds the line of an update to what warns of the run. Returns the kinds that hold, and new warnings."""
        outlook = self.trend.add(line)
        collapsing, of_collapse = self.history.add(line, outlook)
        not_learning, of_symptoms = self.symptoms.add(line, outlook)
        return {"collapsing": collapsing, "not_learning": not_learning, "warnings": [*of_collapse, *of_symptoms]}

    @classmethod
    def from_json(cls, values: Mapping[str, Any], lines: Iterable[Mapping[str, Any]] = ()) -> Totals:
        """Restores `sums()`, whose ages JSON has turned into strings; `lines` are those of `metrics.jsonl`."""
        read: dict[str, Any] = {"ages": {int(age): count for age, count in values.get("ages", {}).items()}}
        read["filtered_before"] = tuple(values.get("filtered_before", (0, 0, 0, 0.0)))
        read["lengths_before"] = tuple(values.get("lengths_before", (0,) * 5))
        totals = cls(**{**values, **read})
        for line in lines:
            if line["kind"] == "update":
                totals.judge(line)
        return totals


class Tally:
    """Adds up the events of a run. Everything in `summary.json` is computed here."""

    def __init__(
        self,
        *,
        rows: int,
        sink: Sink,
        totals: Totals | None = None,
        tasks: TaskMetrics | None = None,
        run: Path | None = None,
    ) -> None:
        """`tasks`: the metrics of the tasks that have labels; None: there is none. `run` is the run's folder."""
        self.totals = totals or Totals()
        if run is not None:
            self.totals.symptoms.run = shlex.quote(str(run))
        self._tasks = tasks or TaskMetrics({})
        self._rows = rows
        self._sink = sink
        self._opened_at: float | None = None
        self._at_open: Sequence[EngineStats] = ()
        self._marked: tuple[float, Sequence[EngineStats]] | None = None
        self._last_ended = 0.0
        self._limits_since: Counter[str] = Counter()  # since the last update
        self._spent_since = 0.0
        self._failed_since = 0

    # -- the window ----------------------------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """True while a window is open."""
        return self._opened_at is not None

    def open_window(self, loads: Sequence[EngineStats], at: float) -> None:
        """Opens the window at the first admission. Later calls do nothing."""
        if self._opened_at is None:
            self._opened_at, self._at_open, self._last_ended = at, loads, at

    def mark(self, loads: Sequence[EngineStats], at: float) -> None:
        """Records the end of an update, which is the end of the window if no other update follows."""
        self._marked = (at, loads)

    def close_window(self, loads: Sequence[EngineStats], at: float, *, stopped: bool = False) -> None:
        """Closes the window after the last update. With `stopped` it ends now instead of at the last update's end."""
        if self._opened_at is None:
            return
        ended, at_end = (at, loads) if stopped or self._marked is None else self._marked
        self.totals = self.carried(at_end, ended)
        self._opened_at = None

    def carried(self, loads: Sequence[EngineStats], at: float) -> Totals:
        """Returns the sums as if the window ended now, for a checkpoint."""
        totals = copy.deepcopy(self.totals)
        if self._opened_at is not None:
            totals.wall_s += at - self._opened_at
            for before, after in zip_longest(self._at_open, loads):
                # An instance that joined since then has done all of its work in this window.
                totals.rollout_busy_s += after.busy_s - (before.busy_s if before else 0.0)
                totals.row_s += after.row_s - (before.row_s if before else 0.0)
                totals.rollout_s += max(0.0, min(at, after.until) - max(self._opened_at, after.since))
        return totals

    # -- events --------------------------------------------------------------------------------------------------------

    def failed(self, num_tokens: int, task: str | None = None) -> None:
        """Counts a trajectory of a task that failed, with the tokens that it had."""
        self.totals.failed += 1
        self._tasks.count(self.totals.tasks, task, "failed")
        self._failed_since += 1
        self._sampled(num_tokens)

    def moved(self, num_bytes: int, prefilled: int) -> None:
        """Counts a move of a trajectory, with its KV or with tokens prefilled again."""
        self.totals.moves += 1
        self.totals.moved_bytes += num_bytes
        self.totals.prefilled_again += prefilled

    def episode_limited(self, limit: EpisodeLimit | None, spent: float) -> None:
        """Counts the limit that an episode has reached, if any, and what it has spent."""
        if limit is not None:
            self.totals.limits_reached[limit] = self.totals.limits_reached.get(limit, 0) + 1
            self._limits_since[limit] += 1
        self.totals.spent += spent
        self._spent_since += spent

    def instance_lost(self) -> None:
        self.totals.instances_lost += 1

    def instance_replaced(self) -> None:
        self.totals.instances_replaced += 1

    def dropped(self, num_tokens: int, *, complete: bool = False) -> None:
        """Counts a dropped trajectory, with the tokens that it had. `complete`: it had its last token."""
        totals = self.totals
        totals.dropped += 1
        totals.dropped_begun += num_tokens > 0
        totals.dropped_tokens += num_tokens
        if complete:
            totals.dropped_complete += 1
            totals.dropped_complete_tokens += num_tokens
        self._sampled(num_tokens)

    def filtered(self, lengths: Sequence[int], reward: float, task: str | None = None) -> None:
        """Counts a group without signal that was replaced: the lengths of its completions, and their common reward."""
        totals = self.totals
        self._tasks.count(totals.tasks, task, "filtered_groups")
        totals.filtered_groups += 1
        totals.filtered += len(lengths)
        totals.filtered_tokens += sum(lengths)
        totals.filtered_reward += reward
        for length in lengths:
            self._sampled(length)

    def evaluated(self, result: EvaluationResult) -> dict[str, Any]:
        """Records an evaluation and returns its line of `metrics.jsonl`."""
        elapsed = self.totals.wall_s + (result.at - self._opened_at if self._opened_at is not None else 0.0)
        record = asdict(result) | {"elapsed_s": elapsed}
        record |= {f"reward/{name}": mean for name, mean in (record.pop("rewards") or {}).items()}
        del record["tasks"]
        record |= of_evaluation(result)
        self.totals.evaluations.append(record)
        line = {"kind": "evaluation", **record}
        self._sink.write(line)
        return line

    def trained(
        self,
        samples: Sequence[Sample],
        report: UpdateReport,
        *,
        started: float,
        ended: float,
        idle_s: float,
        waited_for: str,
    ) -> dict[str, Any]:
        """Records an update and returns its line of `metrics.jsonl`."""
        totals = self.totals
        fresh = [sample for sample in samples if sample.use == 0]
        uses = by_trajectory(samples)
        trained = [own for own in uses if own[0].use == 0]
        tokens = sum(sample.completion.num_sampled for sample in fresh)
        reused_tokens = sum(sample.completion.num_sampled for sample in samples) - tokens
        ages = Counter(report.update - min(sample.oldest_version for sample in own) for own in uses)
        totals.steps += 1
        totals.trainer_busy_s += ended - started
        totals.tokens += tokens
        totals.trained += len(trained)
        totals.replayed += len(uses) - len(trained)
        totals.replayed_tokens += reused_tokens
        totals.mismatch_kl_sum += report.mismatch_kl_sum
        totals.mismatch_tokens += report.mismatch_tokens
        for age, count in ages.items():
            totals.ages[age] = totals.ages.get(age, 0) + count
        for own in trained:
            self._sampled(sum(sample.completion.num_sampled for sample in own))
            totals.mixed += len({s.oldest_version for s in own}) > 1 or any(is_mixed(s.completion) for s in own)
            totals.truncated += any(sample.completion.finish == "length" for sample in own)
        totals.groups_without_signal += int(report.metrics.get("groups_without_signal", 0))
        totals.updates_without_signal += is_without_signal(report.metrics)
        num_lost = self._failed_since + totals.filtered - totals.filtered_before[0]
        cycle_s, self._last_ended = ended - self._last_ended, ended
        line: dict[str, Any] = {
            "kind": "update",
            "update": report.update,
            **report.metrics,
            **reward_means(own[0].reward_parts for own in uses),
            **constant_rewards(own[0].reward_parts for own in uses),
            "at": ended,
            "tokens": tokens,
            "tokens_per_second": tokens / cycle_s if cycle_s > 0 else 0.0,
            "update_seconds": ended - started,
            "cycle_seconds": cycle_s,
            "trainer_idle_seconds": idle_s,
            "trainer_waited_for": waited_for,
            "staleness_mean": sum(age * count for age, count in ages.items()) / max(1, len(uses)),
            "staleness_max": max(ages, default=0),
            "staleness_histogram": {str(age): ages[age] for age in sorted(ages)},
            "replayed_sequences": len(samples) - len(fresh),
            "replayed_tokens": reused_tokens,
            **self._filtered_since(len({sample.group for sample in fresh})),
            "failed": self._failed_since,
            **self._dropped_since(len(trained), tokens, num_lost),
            "limits_reached": dict(self._limits_since),
            "spent": self._spent_since,
            **self._tasks.of_update(samples, totals.tasks),
        }
        self._limits_since, self._spent_since, self._failed_since = Counter(), 0.0, 0
        line |= totals.judge(line)
        self._sink.write(line)
        return line

    def _filtered_since(self, trained_groups: int) -> dict[str, float]:
        """Metrics of the groups filtered since the last update; `trained_groups` were trained for the first time."""
        totals = self.totals
        now = (totals.filtered, totals.filtered_tokens, totals.filtered_groups, totals.filtered_reward)
        count, tokens, groups, reward = (a - b for a, b in zip(now, totals.filtered_before, strict=True))
        totals.filtered_before = now
        means = {"filtered_length": tokens / count, "filtered_reward": reward / groups} if groups else {}
        return {"filtered_groups": groups, "filtered_share": _ratio(groups, groups + trained_groups), **means}

    def _dropped_since(self, num_trained: int, tokens: int, num_lost: int) -> dict[str, float]:
        """Metrics of the trajectories dropped since the last update; this one trains `num_trained`, with `tokens`.

        `num_lost` failed or were filtered since then: the share is of all that ended, as in the summary.
        """
        totals = self.totals
        now = (totals.dropped, totals.dropped_begun, totals.dropped_tokens, totals.sampled, totals.sampled_tokens)
        count, begun, dropped_tokens, sampled, sampled_tokens = (
            a - b for a, b in zip(now, totals.lengths_before, strict=True)
        )
        totals.lengths_before = now
        ratio = _ratio(_ratio(tokens, num_trained), _ratio(sampled_tokens, sampled))
        means = {"dropped_length": dropped_tokens / begun} if begun else {}
        return {
            "dropped": count,
            "dropped_share": _ratio(count, count + num_trained + num_lost),
            "length_ratio": ratio,
            **means,
        }

    def _sampled(self, num_tokens: int) -> None:
        """Counts a length. A trajectory without tokens does not count: a failed request is not a short completion."""
        if num_tokens:
            self.totals.sampled += 1
            self.totals.sampled_tokens += num_tokens

    # -- the summary ---------------------------------------------------------------------------------------------------

    def summary(self) -> dict[str, Any]:
        """Returns the contents of `summary.json`."""
        totals = self.totals
        uses = sum(totals.ages.values())
        before = [e for e in totals.evaluations if e["moment"] == "before"]
        after = [e for e in totals.evaluations if e["moment"] == "after"]
        mean_trained = totals.tokens / totals.trained if totals.trained else 0.0
        mean_sampled = totals.sampled_tokens / totals.sampled if totals.sampled else 0.0
        ended = totals.trained + totals.dropped + totals.failed + totals.filtered
        return {
            "steps": totals.steps,
            "wall_seconds": totals.wall_s,
            "tokens": totals.tokens,
            "tokens_per_second": _ratio(totals.tokens, totals.wall_s),
            "eval_before": before[0]["score"] if before else None,
            "eval_after": after[-1]["score"] if after else None,
            "eval_before_greedy": _greedy_score(before[0]) if before else None,
            "eval_after_greedy": _greedy_score(after[-1]) if after else None,
            "eval_before_version": before[0]["version"] if before else None,
            "eval_after_version": after[-1]["version"] if after else None,
            "evaluations": totals.evaluations,
            "staleness": {
                "mean": _ratio(sum(age * count for age, count in totals.ages.items()), uses),
                "max": max(totals.ages, default=0),
                "histogram": {str(age): totals.ages[age] for age in sorted(totals.ages)},
            },
            "trainer_idle_share": 1.0 - _ratio(totals.trainer_busy_s, totals.wall_s) if totals.wall_s else 0.0,
            "rollout_idle_share": 1.0 - _ratio(totals.rollout_busy_s, totals.rollout_s) if totals.wall_s else 0.0,
            # Whole groups are admitted, so a few more rows than the target may run.
            "row_idle_share": max(0.0, 1.0 - _ratio(totals.row_s, totals.wall_s * self._rows)),
            "trained_trajectories": totals.trained,
            "dropped_trajectories": totals.dropped,
            "dropped_share": _ratio(totals.dropped, ended),
            "dropped_length": totals.dropped_tokens / totals.dropped_begun if totals.dropped_begun else None,
            "dropped_complete_trajectories": totals.dropped_complete,
            "dropped_complete_length": (
                totals.dropped_complete_tokens / totals.dropped_complete if totals.dropped_complete else None
            ),
            "filtered_trajectories": totals.filtered,
            "filtered_groups": totals.filtered_groups,
            "filtered_share": _ratio(totals.filtered, ended),
            "filtered_length": totals.filtered_tokens / totals.filtered if totals.filtered else None,
            "filtered_reward": totals.filtered_reward / totals.filtered_groups if totals.filtered_groups else None,
            "trained_length": mean_trained,
            "replayed_trajectories": totals.replayed,
            "replayed_tokens": totals.replayed_tokens,
            "failed_trajectories": totals.failed,
            "truncated_trajectories": totals.truncated,
            "mixed_version_trajectories": totals.mixed,
            "mixed_version_share": _ratio(totals.mixed, totals.trained),
            "groups_without_signal": totals.groups_without_signal,
            "updates_without_signal": totals.updates_without_signal,
            "length_ratio": _ratio(mean_trained, mean_sampled),
            "moves": totals.moves,
            "moved_bytes": totals.moved_bytes,
            "prefilled_again_tokens": totals.prefilled_again,
            "instances_lost": totals.instances_lost,
            "instances_replaced": totals.instances_replaced,
            "limits_reached": totals.limits_reached,
            "spent": totals.spent,
            "tasks": of_summary(totals.tasks, totals.evaluations),
            "collapsing": totals.history.seen,
            "not_learning": {
                kind: {"since": since, "over": totals.symptoms.over.get(kind)}
                for kind, since in totals.symptoms.since.items()
            },
            "mismatch_kl": totals.mismatch_kl_sum / totals.mismatch_tokens if totals.mismatch_tokens else None,
            "mismatch_tokens": totals.mismatch_tokens,
        }


def reward_means(parts: Iterable[Sequence[RewardPart] | None]) -> dict[str, float]:
    """Returns the metrics of a task with several rewards: the mean of each, `reward/NAME`."""
    return {f"reward/{name}": mean for name, mean in part_means(parts).items()}


def constant_rewards(parts: Iterable[Sequence[RewardPart] | None]) -> dict[str, dict[str, float]]:
    """Returns a metric of a task with several rewards: those with one value for all that they apply to, and the value.

    A reward with a negative weight is left out, because its best value is its lowest one. Empty if there is none.
    """
    values: dict[str, set[float]] = {}
    for own in parts:
        for name, weight, value in own or ():
            if value is not None and weight > 0:
                values.setdefault(name, set()).add(value)
    constant = {name: min(found) for name, found in values.items() if len(found) == 1}
    return {"constant_rewards": constant} if constant else {}


def is_mixed(completion: Completion) -> bool:
    """True if the tokens were sampled from more than one version."""
    versions = completion.token_versions
    return versions is not None and len(np.unique(versions)) > 1


def _greedy_score(evaluation: Mapping[str, Any]) -> float | None:
    """Returns the greedy score of an evaluation; None if it has none, as in the journals before there was one."""
    greedy: Mapping[str, Any] = evaluation.get("greedy") or {}
    return greedy.get("score")


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else 0.0
