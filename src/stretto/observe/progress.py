"""Progress of a run for people: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from stretto.errors import printable
from stretto.observe.listeners import Listeners
from stretto.observe.symptoms import is_without_signal
from stretto.types import EngineStats, EvaluationResult, HeldOutScore

MOST_INSTANCES = 64  # whose load the journal keeps
UPDATE_NUMBER = re.compile(r"^update \d+: ")  # of a wait, which counts from 0
QUIET_S = 20.0  # without a line, until there is one that says what the run does
MOST_QUIET_S = 320.0  # the same if nothing but such lines came before


@dataclass(frozen=True, slots=True)
class Status:
    """The state of a run at one moment."""

    update: int  # the next update, whose batch is not yet taken
    newest: int  # the newest version
    staleness: int  # the current K
    versions: Mapping[int, int]  # live version -> unfinished trajectories
    loads: Sequence[EngineStats]  # one for each instance
    waits: Sequence[str]  # sentences: who waits for what
    instances: Sequence[int] = ()  # ids, in the order of `loads`
    training: int | None = None  # the update that is trained now

    def record(self) -> dict[str, Any]:
        """Returns what the journal keeps, for programs that watch the run: its size does not grow with the run."""
        loads = [
            {"instance": id, "running": load.running, "queued": load.queued, "kv_tokens": load.kv_tokens}
            for id, load in zip(self.instances, self.loads, strict=False)
        ]
        return {
            "update": self.update,
            "training": self.training,
            "newest": self.newest,
            "staleness": self.staleness,
            "versions": {str(version): count for version, count in sorted(self.versions.items())},
            "running": sum(load.running for load in self.loads),
            "queued": sum(load.queued for load in self.loads),
            "instances": loads[:MOST_INSTANCES],
            "num_instances": len(loads),
            "waits": list(self.waits),
        }


class Observer(Protocol):
    """Receives what happens in a run, to display it. Never influences the run."""

    def message(self, text: str) -> None: ...
    def status(self, status: Status) -> None: ...
    def updated(self, line: Mapping[str, Any]) -> None: ...
    def evaluated(self, result: EvaluationResult) -> None: ...
    def close(self) -> None: ...


class Silent:
    """Shows nothing; for tests, and for callers that read the files."""

    def message(self, text: str) -> None:
        pass

    def status(self, status: Status) -> None:
        pass

    def updated(self, line: Mapping[str, Any]) -> None:
        pass

    def evaluated(self, result: EvaluationResult) -> None:
        pass

    def close(self) -> None:
        pass


class Announcer:
    """An observer whose messages also go to the listeners of a run. They get lines as a sink of metrics."""

    def __init__(self, observer: Observer, listeners: Listeners) -> None:
        self._observer = observer
        self._listeners = listeners
        self.status = observer.status
        self.updated = observer.updated
        self.evaluated = observer.evaluated
        self.close = observer.close

    def message(self, text: str) -> None:
        self._observer.message(text)
        self._listeners.message(text)


LEGEND = (
    "reward: mean of the batch; tok/s: completion tokens trained on; age: versions between sampling and training; "
    "length: mean completion tokens"
)


def describe_update(line: Mapping[str, Any], steps: int) -> str:
    """Returns an update as one line, with what the trainer waited for."""
    text = (
        f"{line['update'] + 1} of {steps} updates done  reward {line['reward_mean']:.3f}  "
        f"{line['tokens_per_second']:,.0f} tok/s  age {line['staleness_mean']:.2f} (max {line['staleness_max']})  "
        f"length {line['tokens'] / max(1, line['num_sequences'] - line['replayed_sequences']):.0f}"
    )
    if without := describe_signal(line):
        text += f"  {without}"
    if line.get("dropped"):
        text += f"  dropped {line['dropped']} ({line['dropped_share']:.0%} of those that ended since the last update)"
    if line["filtered_groups"]:
        text += f"  filtered {line['filtered_groups']} groups ({line['filtered_share']:.0%})"
    if line["replayed_sequences"]:
        text += f"  reused {line['replayed_sequences']}"
    if line["trainer_idle_seconds"] >= 1.0 and line["trainer_waited_for"]:
        reason = UPDATE_NUMBER.sub("", line["trainer_waited_for"])
        text += f"  trainer idle {line['trainer_idle_seconds']:.0f} s: {reason}"
    return text


def describe_signal(line: Mapping[str, Any]) -> str:
    """Returns words for the groups of an update whose rewards are all equal; empty if there is none."""
    without, groups = line.get("groups_without_signal", 0), line.get("groups", 0)
    if is_without_signal(line):
        return "no signal: the rewards of every group are equal"
    return f"no signal in {without:.0f} of {groups:.0f} groups" if without else ""


def describe_evaluation(result: EvaluationResult) -> str:
    """Returns an evaluation as one line, with the score of each task, and both scores if it has a greedy one."""
    text = f"evaluation of version {result.version}: {_score_and_count(result)}"
    if result.tasks:
        text += f" ({', '.join(f'{label} {_score(each.sampled)}' for label, each in result.tasks.items())})"
    return text if result.greedy is None else f"{text}; greedy {_score_and_count(result.greedy)}"


def _score_and_count(result: EvaluationResult | HeldOutScore) -> str:
    failed = f", {result.num_failed} failed" if result.num_failed else ""
    return f"{_score(result)} on {result.num_scored} prompts{failed}"


def _score(result: EvaluationResult | HeldOutScore) -> str:
    return "no score" if result.score is None else f"{result.score:.3f}"


def describe_status(status: Status, steps: int) -> str:
    """Returns what a run does now as one line, for a time in which nothing ends."""
    running, queued, kv_tokens = (
        sum(getattr(load, name) for load in status.loads) for name in ("running", "queued", "kv_tokens")
    )
    does = "all updates are done" if status.update >= steps else f"waiting for update {status.update + 1} of {steps}"
    if status.training is not None:
        does = f"training update {status.training + 1} of {steps}"
    text = f"{does}: {running:,} trajectories decode with {kv_tokens:,} tokens of context, {queued:,} are queued"
    reasons = (wait.partition(": ")[2] for wait in status.waits if wait.startswith(("trainer: ", "finish: ")))
    return next((f"{text}; {UPDATE_NUMBER.sub('', reason)}" for reason in reasons), text)


class Plain:
    """Prints lines: for updates at most one every `every_s` seconds, and always the last.

    After `quiet_s` seconds without a line it prints what the run does; the next such line takes twice as long, up to
    `MOST_QUIET_S`, until something else is printed.
    """

    def __init__(self, console: Console, steps: int, every_s: float = 2.0, quiet_s: float = QUIET_S) -> None:
        self._console = console
        self._steps = steps
        self._every_s = every_s
        self._shown_at = 0.0
        self._first_quiet_s = self._quiet_s = quiet_s
        self._printed_at = time.monotonic()

    def message(self, text: str) -> None:
        self._quiet_s = self._first_quiet_s
        self._print(text)

    def status(self, status: Status) -> None:
        if time.monotonic() - self._printed_at >= self._quiet_s:
            self._print(describe_status(status, self._steps))
            self._quiet_s = min(2 * self._quiet_s, MOST_QUIET_S)

    def _print(self, text: str) -> None:
        self._console.print(printable(text, lines=True), highlight=False, markup=False, soft_wrap=True)
        self._printed_at = time.monotonic()

    def updated(self, line: Mapping[str, Any]) -> None:
        for warning in line.get("warnings", ()):
            self.message(warning)
        now = time.monotonic()
        if now - self._shown_at >= self._every_s or line["update"] + 1 == self._steps:
            if self._shown_at == 0.0:
                self.message(LEGEND)
            self._shown_at = now
            self.message(describe_update(line, self._steps))

    def evaluated(self, result: EvaluationResult) -> None:
        self.message(describe_evaluation(result))

    def close(self) -> None:
        pass


class Terminal:
    """Redraws a table in place: updates, reward, speed, live versions, staleness, and waits."""

    def __init__(self, console: Console, steps: int) -> None:
        self._console = console
        self._steps = steps
        self._status: Status | None = None
        self._line: Mapping[str, Any] | None = None
        self._evaluation: EvaluationResult | None = None
        self._live = Live(console=console, refresh_per_second=4, get_renderable=self._render, transient=True)
        self._started = False

    def message(self, text: str) -> None:
        self._console.print(printable(text, lines=True), highlight=False, markup=False)

    def status(self, status: Status) -> None:
        self._status = status
        if not self._started:
            self._started = True
            self._live.start()

    def updated(self, line: Mapping[str, Any]) -> None:
        for warning in line.get("warnings", ()):
            self.message(warning)
        self._line = line

    def evaluated(self, result: EvaluationResult) -> None:
        self._evaluation = result
        self.message(describe_evaluation(result))

    def close(self) -> None:
        if self._started:
            self._live.stop()
            self._started = False
        if self._line is not None:
            self.message(describe_update(self._line, self._steps))
            self._line = None

    def _render(self) -> Group:
        table = Table.grid(padding=(0, 2))
        line, status = self._line, self._status
        # A run that was resumed has no line yet.
        done = max(line["update"] + 1 if line else 0, status.newest if status else 0)
        filled = int(30 * done / self._steps)
        bar = f"[{'#' * filled}{'.' * (30 - filled)}]"
        # As `Text`, because a bracket would begin markup.
        table.add_row("updates done", Text(f"{bar} {done} of {self._steps}"))
        if line is not None:
            without = describe_signal(line)
            table.add_row("reward", f"{line['reward_mean']:.3f}{without and f'   {without}'}")
            table.add_row("speed", f"{line['tokens_per_second']:,.0f} tokens/s")
            table.add_row("age of data", f"{line['staleness_mean']:.2f} updates, at most {line['staleness_max']}")
        if self._evaluation is not None:
            made = self._evaluation
            greedy = "" if made.greedy is None else f", greedy {_score(made.greedy)}"
            table.add_row("evaluation", f"{_score(made)}{greedy} (version {made.version})")
        if status is not None:
            live = "  ".join(f"v{version}: {count}" for version, count in sorted(status.versions.items()))
            running = sum(load.running for load in status.loads)
            table.add_row("live versions", f"{live or '-'}   running {running}, K = {status.staleness}")
            for wait in status.waits[:3]:
                table.add_row("waiting", Text(wait))
        return Group(table)


def make_observer(console: Console, steps: int) -> Observer:
    """Returns the live table on a terminal, and lines elsewhere."""
    return Terminal(console, steps) if console.is_terminal else Plain(console, steps)
