"""The questions that the page asks, by name. `server.py` answers them over HTTP, `report.py` ahead of time."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from stretto.errors import JournalError, RunError
from stretto.view import details
from stretto.view.comparison import comparison
from stretto.view.pieces import Pieces, find_tokenizer
from stretto.view.runs import RunSource
from stretto.view.search import Query, answers, search
from stretto.view.timeline import Window, timeline
from stretto.view.verification import Verification

Parameters = Mapping[str, str]


class Api:
    """Answers questions about runs. Methods may be called from several threads."""

    def __init__(self, runs: Sequence[RunSource], tokenizer: Path | None = None) -> None:
        self.runs = runs
        self._tokenizer = tokenizer
        self._pieces: dict[int, Pieces] = {}
        self._verifications = [Verification(run) for run in runs]
        self._questions: dict[str, Callable[[Parameters], Any]] = {
            "runs": self._runs,
            "state": lambda p: self._run(p).state(),
            "poll": lambda p: self._run(p).poll(_integer(p, "after", -1), p.get("seen", "")),
            "curves": lambda p: self._run(p).curves(_integer(p, "after", -1)),
            "notes": lambda p: self._run(p).notes(),
            "recipe": lambda p: self._run(p).recipe(),
            "timeline": self._timeline,
            "trajectories": lambda p: search(
                self._run(p), _query(p), self._pieces_of(p) if p.get("tool") else Pieces(None)
            ),
            "trajectory": lambda p: details.trajectory(self._run(p), _integer(p, "id"), self._pieces_of(p)),
            "group": lambda p: details.group(self._run(p), _integer(p, "id")),
            "answers": self._answers,
            "answer": self._answer,
            "compare": lambda p: comparison(self.runs),
            "verify": lambda p: self._verifications[self._place(p)].state(),
        }

    def answer(self, name: str, parameters: Parameters) -> Any:
        """Answers a question. Raises `LookupError` for an unknown one, and `StrettoError` for a bad one."""
        return self._questions[name](parameters)

    def start_verification(self, parameters: Parameters) -> Any:
        """Begins to verify a run, and returns the progress."""
        return self._verifications[self._place(parameters)].start()

    def close(self) -> None:
        """Ends what runs."""
        for verification in self._verifications:
            verification.close()

    def _place(self, parameters: Parameters) -> int:
        place = _integer(parameters, "run", 0)
        if not 0 <= place < len(self.runs):
            raise RunError(f"`run` is {place}: there are runs 0 to {len(self.runs) - 1}")
        return place

    def _run(self, parameters: Parameters) -> RunSource:
        return self.runs[self._place(parameters)]

    def _runs(self, _: Parameters) -> list[dict[str, Any]]:
        found = []
        for run in self.runs:
            line: dict[str, Any] = {"name": run.name, "folder": str(run.folder), "error": None}
            try:
                with run.reading() as db:
                    last = db.execute("SELECT outcome FROM sessions ORDER BY session DESC LIMIT 1").fetchone()
                line["condition"] = run.condition(last[0] if last else None)
            except JournalError as error:
                line |= {"condition": "unreadable", "error": str(error)}
            found.append(line)
        return found

    def _pieces_of(self, parameters: Parameters) -> Pieces:
        place = self._place(parameters)
        if place not in self._pieces:
            run = self.runs[place]
            path = self._tokenizer or find_tokenizer(run.folder, run.recipe())
            try:
                self._pieces[place] = Pieces(path)
            except Exception:  # of the tokenizer's file: the page shows ids
                self._pieces[place] = Pieces(None)
        return self._pieces[place]

    def _timeline(self, parameters: Parameters) -> dict[str, Any]:
        run = self._run(parameters)
        window = Window(
            _real(parameters, "from"),
            _real(parameters, "to"),
            bins=_integer(parameters, "bins", 600),
            version_rows=_integer(parameters, "version_rows", 40),
            instance_rows=_integer(parameters, "instance_rows", 20),
            versions=_lanes(parameters, "versions"),
            instances=_lanes(parameters, "instances"),
        )
        return timeline(run, window, _real(parameters, "now"))

    def _answers(self, parameters: Parameters) -> dict[str, Any]:
        greedy = parameters.get("greedy")
        return answers(
            self._run(parameters),
            _integer(parameters, "evaluation"),
            greedy=None if not greedy else greedy == "1",
            text=parameters.get("text", ""),
            reward=_bounds(parameters, "reward"),
            limit=_integer(parameters, "limit", 100),
            cursor=_integer(parameters, "cursor", 0),
            task=parameters.get("task", "").strip(),
        )

    def _answer(self, parameters: Parameters) -> dict[str, Any]:
        return details.answer(
            self._run(parameters), _integer(parameters, "evaluation"), _integer(parameters, "index"),
            parameters.get("greedy") == "1", self._pieces_of(parameters),
        )  # fmt: skip


def _query(parameters: Parameters) -> Query:
    return Query(
        update=_bounds(parameters, "update"),
        version=_bounds(parameters, "version"),
        group=_bounds(parameters, "group"),
        reward=_bounds(parameters, "reward"),
        length=_bounds(parameters, "length"),
        age=_bounds(parameters, "age"),
        finish=parameters.get("finish") or None,
        state=parameters.get("state") or None,
        failed=parameters.get("failed") == "1",
        task=parameters.get("task", "").strip(),
        text=parameters.get("text", ""),
        tool=parameters.get("tool", "").strip(),
        sort=parameters.get("sort") or "newest",
        limit=_integer(parameters, "limit", 100),
        cursor=_integer(parameters, "cursor", 0),
    )


def _bounds(parameters: Parameters, name: str) -> tuple[float, float] | None:
    """Returns the bounds of a filter: `3` is one number, `3..5`, `3..` and `..5` are ranges."""
    text = parameters.get(name, "").strip()
    if not text:
        return None
    low, dots, high = text.partition("..")
    try:
        if not dots:
            return float(low), float(low)
        return float(low) if low.strip() else -math.inf, float(high) if high.strip() else math.inf
    except ValueError:
        raise RunError(f"`{name}` is `{text}`: give a number, or a range such as `0.5..1`, `3..` or `..7`") from None


def _lanes(parameters: Parameters, name: str) -> tuple[int, int] | None:
    found = _bounds(parameters, name)
    if found is None:
        return None
    if not all(map(math.isfinite, found)):
        raise RunError(f"`{name}` needs both ends of its range")
    return int(found[0]), int(found[1])


def _integer(parameters: Parameters, name: str, default: int | None = None) -> int:
    text = parameters.get(name, "")
    if not text and default is not None:
        return default
    try:
        value = int(text)
    except ValueError:
        raise RunError(f"`{name}` is `{text}`: give a whole number") from None
    if abs(value) >= 2**62:
        raise RunError(f"`{name}` is too large")
    return value


def _real(parameters: Parameters, name: str) -> float:
    try:
        value = float(parameters.get(name, ""))
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise RunError(f"`{name}` is `{parameters.get(name, '')}`: give a number")
    return value
