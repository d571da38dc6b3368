"""Trackers by name: those of this package, a class of the user's, and what is refused before a run."""

from __future__ import annotations

import importlib.util
import re
import sys
import threading
import tomllib
from pathlib import Path
from typing import Any

import pytest
from tracker_cases import begin, evaluation, report, rows_of, update

from stretto.errors import RecipeError
from stretto.observe.options import TRACKERS, ObserveOptions
from stretto.observe.trackers.catalogue import ENTRIES, check_trackers
from stretto.observe.trackers.sample_rows import Samples

OURS = """
import threading

heard = []
release = threading.Event()

class Ours:
    def on_start(self, run): heard.append(("start", run.folder.name))
    def on_update(self, line): heard.append(("update", line["staleness_histogram"]))
    def on_samples(self, rows): heard.append(("samples", len(rows)))
    def on_end(self, run): heard.append(("end", run.outcome))

class Needy:
    def __init__(self, key): pass
    def on_update(self, line): pass

class Broken:
    def on_update(self, line): raise ConnectionError("no route to host")

class Hung:
    def on_update(self, line): release.wait(30)

class Silent:
    pass
"""


@pytest.fixture
def ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "our_trackers.py").write_text(OURS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    monkeypatch.delitem(sys.modules, "our_trackers", raising=False)
    import our_trackers  # type: ignore[import-not-found]

    return our_trackers


def test_a_class_of_the_users_gets_whole_lines_and_samples(
    ours: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Samples, "rows", lambda self, number: rows_of(number, 2))
    folder = tmp_path / "run"
    report(folder, begin(folder, sinks=["our_trackers:Ours"], samples=2), [update(0), evaluation(1)])
    assert ours.heard == [("start", "run"), ("update", {"0": 3, "1": 5}), ("samples", 2), ("end", "finished")]


@pytest.mark.parametrize(
    ("sink", "words"),
    [
        ("our_trackers:Our", "`our_trackers` has no `Our`; did you mean `Ours`?"),
        ("their_trackers:Ours", "there is no module `their_trackers`"),
        ("our_trackers:Needy", "could not be created without arguments: TypeError"),
        ("our_trackers:Silent", "the tracker `our_trackers:Silent` is no function and has none of the methods"),
    ],
)
def test_a_class_that_cannot_be_used_is_refused_before_the_run(ours: Any, sink: str, words: str) -> None:
    with pytest.raises(RecipeError, match=re.escape(words)) as raised:
        check_trackers(ObserveOptions(sinks=(sink,)))
    assert f'`observe.sinks` names "{sink}"' in str(raised.value)


def test_samples_that_no_tracker_takes_are_refused(ours: Any) -> None:
    with pytest.raises(RecipeError, match=r"`observe.samples = 2` has no effect: .* a method `on_samples"):
        check_trackers(ObserveOptions(sinks=("our_trackers:Broken", "prometheus"), samples=2))
    assert len(check_trackers(ObserveOptions(sinks=("our_trackers:Broken", "our_trackers:Ours"), samples=2))) == 2


@pytest.mark.parametrize("name", TRACKERS)
def test_a_package_that_is_missing_is_named_with_the_extra_that_installs_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda package: None)
    with pytest.raises(RecipeError, match=re.escape(f"`pip install 'stretto[{name}]'`")):
        check_trackers(ObserveOptions(sinks=(name,)))
    extras = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert any(ENTRIES[name].package in wanted for wanted in extras[name])


def test_check_says_where_the_numbers_will_go() -> None:
    assert check_trackers(ObserveOptions(sinks=("tensorboard", "prometheus"))) == [
        "reports to tensorboard, `tensorboard --logdir RUN/tensorboard`",
        "reports to prometheus, http://127.0.0.1:9464/metrics",
    ]


def test_a_tracker_that_fails_or_hangs_is_named_once_and_holds_nobody_up(
    ours: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "run"
    sinks = ["our_trackers:Broken", "our_trackers:Hung", "our_trackers:Ours"]
    options = begin(folder, sinks=sinks, samples=0)
    threads = threading.active_count()
    report(folder, options, [update(number) for number in range(3)], close_s=3.0)
    ours.release.set()
    assert [kind for kind, _ in ours.heard] == ["start", "update", "update", "update", "end"]
    assert [record.getMessage() for record in caplog.records] == [
        "`on_update` of the tracker `our_trackers:Broken` raised ConnectionError: no route to host "
        "(our_trackers.py:18); the run continues, and further failures are counted",
        "`on_update` of the tracker `our_trackers:Broken` failed 3 times",
        "the tracker `our_trackers:Hung` was not done 3 s after the run; it is abandoned, with 2 events left",
    ]
    assert threading.active_count() <= threads + 1
