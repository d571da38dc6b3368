"""Tables of GSM8K runs in `docs/performance.md` and `README.md`, from the cells in `bench/results/gpu`.

A cell is the record of one measurement (`bench/gpu/cells.py`). A table has a row for each figure and a column for each
run, or the reverse. A figure that a cell does not have is left empty. To add a run, commit its cells, add a column here
and run `make reference`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

Record = Mapping[str, Any]

RESULTS = Path(__file__).parents[2] / "bench" / "results" / "gpu"
FEWEST_UPDATES = 5  # that a mean reward is given for
LARGE, SMALL, SMOL = "qwen2.5-coder-1.5b", "qwen2.5-coder-0.5b", "smollm2-135m"


# -- cells -------------------------------------------------------------------------------------------------------------


@cache
def _cells(folder: str) -> tuple[Record, ...]:
    return tuple(json.loads(path.read_text(encoding="utf-8")) for path in sorted((RESULTS / folder).glob("*.json")))


def find_cell(folder: str, bench: str, side: str, **parameters: Any) -> Record:
    """Returns the only cell of a folder with these parameters. None as a parameter: the cell must not have it."""
    found = [
        cell
        for cell in _cells(folder)
        if (cell["bench"], cell["side"]) == (bench, side)
        and all(cell["parameters"].get(name) == value for name, value in parameters.items())
    ]
    if len(found) != 1:
        raise ValueError(f"{folder} has {len(found)} cells `{bench}` of `{side}` with {parameters}; it must have one")
    return found[0]


@dataclass(frozen=True, slots=True)
class Run:
    """A training run in a table."""

    heading: str
    training: Record
    test: Record | None = None  # the whole test, before and after training

    @property
    def updates(self) -> Sequence[Record]:
        """The updates of the run, in their order."""
        found: Sequence[Record] = self.training["results"]["by_update"]
        return found

    def score(self, update: int) -> Record | None:
        """Returns the evaluation after so many updates; None if there was none, or none that ended."""
        for each in self.training["results"]["evaluations"]:
            if each["version"] == update and each["score"] is not None:
                return dict(each)
        return None


def ours(heading: str, folder: str, *, tested: bool = True, **parameters: Any) -> Run:
    """Returns a run of Stretto, with its whole test if it was `tested`."""
    parameters = {"in_flight": None, "rows": None, **parameters}
    training = find_cell(folder, "gsm8k", "native", **parameters)
    test = find_cell(folder, "gsm8k-test", "native", **training["parameters"]) if tested else None
    return Run(heading, training, test)


def of_trl(heading: str, folder: str, model: str, *, tested: bool = True) -> Run:
    """Returns the run of TRL in a folder."""
    test = find_cell(folder, "gsm8k-test", "trl", model=model) if tested else None
    return Run(heading, find_cell(folder, "gsm8k", "trl", model=model), test)


# -- figures -----------------------------------------------------------------------------------------------------------

Figure = Callable[[Run], str]


def whole(value: float) -> str:
    return f"{value:,.0f}"


def tenth(value: float) -> str:
    return f"{value:.1f}"


def hundredth(value: float) -> str:
    return "0" if value == 0 else f"{value:.2f}"


def thousandth(value: float) -> str:
    return f"{value:.3f}"


def percent(value: float) -> str:
    return f"{100 * value:.1g} %" if value < 0.01 else f"{100 * value:.0f} %"


def factor(value: float) -> str:
    return f"{value:.2f} x"


def result(name: str, show: Callable[[float], str]) -> Figure:
    """Returns the figure of a training cell by its name."""
    return lambda run: _shown(run.training["results"].get(name), show)


def whole_test(name: str) -> Figure:
    """Returns a score of the whole test by its name."""
    return lambda run: "" if run.test is None else _shown(run.test["results"].get(name), thousandth)


def held_out(update: int) -> Figure:
    """Returns the held-out score after so many updates."""
    return lambda run: "" if (found := run.score(update)) is None else thousandth(found["score"])


def mean_of(name: str, first: int, last: int, show: Callable[[float], str]) -> Figure:
    """Returns the mean over the updates `first` to `last`, which count from 1."""

    def figure(run: Run) -> str:
        return show(mean(each[name] for each in run.updates[first - 1 : last]))

    return figure


def rate_of(first: int, last: int) -> Figure:
    """Returns the trained tokens a second over the updates `first` to `last`, which count from 1."""

    def figure(run: Run) -> str:
        updates = run.updates[first - 1 : last]
        return whole(sum(each["tokens"] for each in updates) / sum(each["cycle_seconds"] for each in updates))

    return figure


def rewards_of_versions(first: int, last: int | None) -> Figure:
    """Returns the mean reward of the answers that the versions `first` to `last` generated; None: to the end.

    It is left empty if fewer than `FEWEST_UPDATES` are of these versions.
    """

    def figure(run: Run) -> str:
        versions = [(round(each["update"] - each["staleness_mean"]), each["reward_mean"]) for each in run.updates]
        found = [reward for version, reward in versions if first <= version and (last is None or version <= last)]
        return thousandth(mean(found)) if len(found) >= FEWEST_UPDATES else ""

    return figure


def trained_rate(run: Run) -> str:
    """Returns the trained tokens a second after the first update. TRL's cells have no other rate."""
    results = run.training["results"]
    return whole(results["tokens_per_s" if run.training["side"].startswith("trl") else "tokens_per_s_after_first"])


def mean_age(run: Run) -> str:
    """Returns the mean age. TRL's ordinary trainer is synchronous, so that its cells have none."""
    return hundredth(run.training["results"].get("staleness_mean", 0))


def seconds_to(update: int) -> Figure:
    """Returns the seconds of training until the end of so many updates."""
    return lambda run: whole(run.updates[update - 1]["elapsed_s"]) if len(run.updates) >= update else ""


def _shown(value: float | None, show: Callable[[float], str]) -> str:
    return "" if value is None else show(value)


def mean(values: Iterable[float]) -> float:
    """Returns the mean of some values, of which there must be one at least."""
    found = list(values)
    return sum(found) / len(found)


# -- tables ------------------------------------------------------------------------------------------------------------


def as_markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a table of markdown."""
    lines = [head, *rows]
    body = ["|" + "|".join(f" {cell} " if cell else " " for cell in line) + "|" for line in lines]
    return "\n".join([body[0], "|" + "---|" * len(head), *body[1:], ""])


def figures_of(runs: Sequence[Run], figures: Mapping[str, Figure]) -> str:
    """Returns a table with a row for each figure and a column for each run."""
    rows = ([name, *(figure(run) for run in runs)] for name, figure in figures.items())
    return as_markdown(["", *(run.heading for run in runs)], rows)


def curve_of(runs: Sequence[Run]) -> str:
    """Returns a table of held-out scores, with a row for each update at which a run was evaluated."""
    updates = sorted({each["version"] for run in runs for each in run.training["results"]["evaluations"]})
    head = ["update", *(cell for run in runs for cell in (f"{run.heading}, seconds", run.heading))]
    rows = []
    for update in updates:
        found = [run.score(update) for run in runs]
        pairs = (("", "") if each is None else (whole(each["elapsed_s"]), thousandth(each["score"])) for each in found)
        rows.append([str(update), *(cell for pair in pairs for cell in pair)])
    return as_markdown(head, rows)
