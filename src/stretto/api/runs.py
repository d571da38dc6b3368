"""A run, as Python sees it: its folder, what it has recorded, and what can be done with it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from stretto.api.tables import Table
from stretto.errors import RunError
from stretto.observe.listeners import Outcome
from stretto.store.overview import State, overview

if TYPE_CHECKING:
    from stretto.api.policies import TrainedPolicy
    from stretto.assembly.retrain import RetrainResult
    from stretto.recipe.schema import Recipe
    from stretto.run.handle import RunHandle
    from stretto.store.verify import Finding

UPDATE_COLUMNS = (
    *("update", "reward_mean", "reward_std", "tokens", "tokens_per_second", "staleness_mean", "staleness_max"),
    *("update_seconds", "trainer_idle_seconds", "entropy", "mismatch_kl"),
)
EVALUATION_COLUMNS = ("version", "moment", "score", "num_scored", "num_failed", "elapsed_s")
OUTCOMES: Mapping[State, Outcome] = {
    "running": "running",
    "starting": "running",
    "finished": "finished",
    "stopped": "stopped",
    "failed": "failed",
    "killed": "killed",
    "damaged": "failed",
    "other version": "failed",
}
SAMPLE_COLUMNS = ("update", "group", "reward", "version", "age", "num_tokens", "prompt", "text")


class Findings(Sequence["Finding"]):
    """The findings of `verify`, one for each law. Printed, they are the text of `stretto verify`."""

    def __init__(self, findings: Sequence[Finding]) -> None:
        self._findings = tuple(findings)

    @property
    def hold(self) -> bool:
        """True if every law holds, or is broken only by the design of the paradigm."""
        return all(finding.holds for finding in self._findings)

    def __len__(self) -> int:
        return len(self._findings)

    @overload
    def __getitem__(self, key: int) -> Finding: ...
    @overload
    def __getitem__(self, key: slice) -> Sequence[Finding]: ...
    def __getitem__(self, key: int | slice) -> Finding | Sequence[Finding]:
        return self._findings[key]

    def __str__(self) -> str:
        from stretto.store.verify import conclusion, format_findings

        return f"{format_findings(self._findings)}\n{conclusion(self._findings)}"

    __repr__ = __str__


def verify(folder: str | Path) -> Findings:
    """Proves the three laws, and what was trained on, from the journal of a run.

    Raises `RunError` if there is no journal, and `JournalError` if it cannot be read.
    """
    from stretto.store.verify import verify as verified

    return Findings(verified(folder))


class Run:
    """A run in its folder: running, stopped, killed or finished. Every call reads what the folder holds now."""

    def __init__(self, folder: str | Path, handle: RunHandle | None = None) -> None:
        """`handle` is that of a run that this process runs, or has run."""
        self._folder = Path(folder)
        self._handle = handle

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self._folder

    @property
    def name(self) -> str:
        """The name of the run folder."""
        return self._folder.resolve().name

    @property
    def outcome(self) -> Outcome:
        """`running`, `finished`, `stopped`, `failed` (by an error, or damaged) or `killed`. The last three resume."""
        if self._handle is not None:
            return self._handle.outcome
        return OUTCOMES[overview(self._folder).state]

    @property
    def problem(self) -> str | None:
        """The first line of the error that a failed run ended by, or of why its journal cannot be read; else None."""
        return overview(self._folder).problem

    @property
    def stopped(self) -> bool:
        """True if the run was stopped before its last update. `stretto.train(out=..., resume=True)` continues it."""
        return self.outcome == "stopped"

    def stop(self) -> None:
        """Stops the run at its next update boundary. For any thread; safe to call twice.

        Raises `RunError` if another process runs it. Does nothing if it has ended.
        """
        if self._handle is not None:
            self._handle.stop()
        elif self.outcome == "running":
            raise RunError(f"another process runs `{self._folder}`: stop it there, by Ctrl-C or the signal SIGTERM")

    @property
    def recipe(self) -> Recipe:
        """The recipe as the run resolved it (`config.toml`); that of the last phase, if a resumed run changed it."""
        from stretto.recipe.reading import load_recipe

        return load_recipe(self._folder / "config.toml")

    @property
    def summary(self) -> dict[str, Any]:
        """The contents of `summary.json`: the totals when the run last ended or stopped; empty before."""
        try:
            summary: dict[str, Any] = json.loads((self._folder / "summary.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            raise RunError(f"`{self._folder / 'summary.json'}` cannot be read: {error}") from error
        return summary

    def metrics(self, kind: Literal["update", "evaluation"] = "update") -> Table:
        """Returns the lines of `metrics.jsonl` of a kind, in order. `docs/metrics.md` explains the columns."""
        shown = {"update": UPDATE_COLUMNS, "evaluation": EVALUATION_COLUMNS}
        if kind not in shown:
            raise RunError(f"`kind = {kind!r}` is no kind of line: use {' or '.join(map(repr, shown))}")
        lines = [line for line in self._lines() if line["kind"] == kind]
        return Table(lines, shown=shown[kind], title=f"{kind}s of {self.name}")

    def evaluations(self) -> Table:
        """Returns the evaluations on held-out prompts, in order."""
        return self.metrics("evaluation")

    def _lines(self) -> Iterator[dict[str, Any]]:
        path = self._folder / "metrics.jsonl"
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return
        except (OSError, ValueError) as error:
            raise RunError(f"`{path}` cannot be read: {error}") from error
        for line in text.splitlines(keepends=True):
            if line.endswith("\n"):  # a line without an end is being written
                yield json.loads(line)

    def samples(
        self,
        update: int | None = None,
        *,
        min_reward: float | None = None,
        max_reward: float | None = None,
        text: str | None = None,
        task: str | None = None,
        limit: int | None = None,
    ) -> Table:
        """Returns samples that were trained on, in the order of training, with prompts, texts and rewards.

        `update` chooses one update; a negative number counts from the last. `text` is contained in the prompt or the
        text. `task` is the label of a task. `limit` is the most rows. A trajectory of several lineages has a row for
        each. If the task has several rewards, each has a column `reward/NAME`, without its weight; None: it does not
        apply.
        """
        from stretto.store.reader import JournalReader

        rows: list[dict[str, Any]] = []
        names: dict[str, None] = {}  # the columns of several rewards
        with JournalReader(self._folder) as reader, reader.moment():
            taken = [record.update for record in reader.updates()]
            known = [record.label for record in reader.tasks()] if task is not None else []
            if task is not None and task not in known:
                has = f"its tasks are {', '.join(map(repr, known))}" if known else "its task has no label"
                raise RunError(f"`task = {task!r}` is no task of `{self._folder}`: {has}")
            for number in self._chosen(update, taken):
                for record in reader.samples(number):
                    if limit is not None and len(rows) >= limit:
                        break
                    lowest = min_reward is None or (record.reward is not None and record.reward >= min_reward)
                    highest = max_reward is None or (record.reward is not None and record.reward <= max_reward)
                    found = text is None or any(
                        text in part for part in (record.prompt, record.text, record.context or "")
                    )
                    if lowest and highest and found and task in (None, record.task):
                        parts = {f"reward/{name}": value for name, value in record.rewards.items()}
                        names |= dict.fromkeys(parts)
                        rows.append({"update": number, **asdict(record), **parts})
        place = SAMPLE_COLUMNS.index("reward") + 1
        columns = (*SAMPLE_COLUMNS[:place], *names, *SAMPLE_COLUMNS[place:])
        labelled = any(row["task"] is not None for row in rows)
        shown = ("update", "task", *columns[1:]) if labelled else columns
        return Table(rows, shown=shown, title=f"samples of {self.name}")

    def _chosen(self, update: int | None, taken: Sequence[int]) -> Sequence[int]:
        if update is None:
            return taken
        number = update + len(taken) if update < 0 else update
        if number not in taken:
            known = f"it has updates {taken[0]} to {taken[-1]}" if taken else "it has none yet"
            raise RunError(f"`update = {update}` is not in `{self._folder}`: {known}")
        return [number]

    def verify(self) -> Findings:
        """Proves the three laws from the journal. Prints as `stretto verify` does; `.hold` is the result."""
        return verify(self._folder)

    def replay(
        self, until: int | None = None, *, out: str | Path | None = None, say: Callable[[str], None] | None = None
    ) -> RetrainResult:
        """Trains the run again from its journal and compares every version; see `stretto replay`.

        `out` is a folder for the resulting policy. `say` gets a line for each version.
        """
        from stretto.api.event_loops import call_apart
        from stretto.assembly.retrain import retrain

        target = None if out is None else Path(out)
        return call_apart(lambda: retrain(self._folder, until=until, out=target, say=say or (lambda text: None)))

    def policy(self, *, device: str = "auto") -> TrainedPolicy:
        """Loads the trained policy, for transformers and to try it out. Raises `RunError` until the run is finished."""
        from stretto.api.policies import load_policy

        return load_policy(self, device)

    def export(
        self,
        out: str | Path | None = None,
        *,
        merge: bool = False,
        push: str | None = None,
        public: bool = False,
        say: Callable[[str], None] | None = None,
    ) -> None:
        """Writes the policy to the new folder `out`, or uploads it to the hub as `push`, or both.

        With `merge`, an adapter is added to its base: a whole model. `public` makes a new repository of the hub public.
        """
        from stretto.api.run_files import export

        export(self._folder, out, merge=merge, push=push, public=public, say=say)

    def report(
        self,
        out: str | Path = "report.html",
        *,
        verify: bool = True,
        tokenizer: str | Path | None = None,
        force: bool = False,
    ) -> int:
        """Writes what `stretto view` shows of the run into one HTML file. Returns its size in bytes.

        `verify=False` leaves out the findings of `verify`; `force` replaces a file that exists.
        """
        from stretto.api.run_files import write_report

        return write_report([self._folder], out, verify=verify, tokenizer=tokenizer, force=force)

    def trace(self, out: str | Path = "trace.json", *, trajectories: int = 20_000, force: bool = False) -> int:
        """Writes the timeline for Perfetto, with spans of up to so many trajectories. Returns the number of events."""
        from stretto.api.run_files import write_trace

        return write_trace(self._folder, out, trajectories=trajectories, force=force)

    def __repr__(self) -> str:
        return f"Run({str(self._folder)!r}, {self.outcome})"


def open_run(folder: str | Path) -> Run:
    """Opens a run in its folder, whether it is running, was stopped or killed, or is finished.

    Raises `RunError` if the folder holds no run.
    """
    path = Path(folder).expanduser()
    if not (path / "config.toml").is_file():
        what = "is no run folder: it has no `config.toml`" if path.exists() else "does not exist"
        raise RunError(f"`{path}` {what}")
    return Run(path)
