"""A report and a trace are whole in themselves."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from view_cases import HOSTILE, record_run

from stretto.cli import main
from stretto.view import report as module
from stretto.view.report import write_report
from stretto.view.runs import RunSource, open_runs
from stretto.view.trace import trace_events


def embedded(page: str) -> dict[str, Any]:
    (text,) = re.findall(r'<script type="application/json" id="embedded">(.*?)</script>', page, re.DOTALL)
    found: dict[str, Any] = json.loads(text)
    return found


def test_a_report_has_every_update_and_the_findings(tmp_path: Path) -> None:
    record_run(tmp_path / "run")
    assert main(["report", str(tmp_path / "run"), "-o", str(tmp_path / "report.html")]) == 0
    page = (tmp_path / "report.html").read_text()
    (run,) = embedded(page)["runs"]
    assert run["curves"]["updates"]["update"] == [0, 1, 2, 3]
    assert run["verify"]["state"] == "done"
    assert len(run["verify"]["findings"]) == 5
    assert (
        {row["trajectory"] for row in run["rows"]} == set(range(24)) == {t["trajectory"] for t in run["trajectories"]}
    )
    assert len(run["answers"]) == 6
    assert run["state"]["folder"] == ""


@pytest.mark.parametrize(("words", "progress"), [([], True), (["-q"], False)])
def test_a_quiet_report_prints_its_result_alone(
    words: list[str], progress: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record_run(tmp_path / "run")
    assert main(["report", str(tmp_path / "run"), "-o", str(tmp_path / "report.html"), *words]) == 0
    told = capsys.readouterr().out
    assert ("reading its trajectories" in told, "verifying" in told) == (progress, progress)
    assert "report.html has " in told


def test_text_of_models_is_no_markup_in_a_report_and_nothing_is_loaded(tmp_path: Path) -> None:
    record_run(tmp_path / "run")
    write_report(open_runs([tmp_path / "run"]), tmp_path / "report.html", verified=False, tokenizer=None, say=print)
    page = (tmp_path / "report.html").read_text()
    assert HOSTILE not in page
    assert page.count("<script") == 2, "the data and the page's own script"
    assert "default-src 'none'; script-src 'sha256-" in page
    assert not re.search(r'(src|href)="(/|http)', page.split("<script", 1)[0])


def test_the_sample_of_a_report_is_bounded_and_spread_over_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record_run(tmp_path / "run")
    monkeypatch.setattr(module, "SAMPLE_BYTES", 25_000)
    write_report(open_runs([tmp_path / "run"]), tmp_path / "report.html", verified=False, tokenizer=None, say=print)
    (run,) = embedded((tmp_path / "report.html").read_text())["runs"]
    groups = sorted(map(int, run["groups"]))
    assert 2 <= len(groups) < 8
    assert (groups[0], groups[-1]) == (0, 7)
    assert run["num_trajectories"] == 24


def test_an_empty_run_has_a_report(tmp_path: Path) -> None:
    record_run(tmp_path / "run", end=None, updates=0).journal.close()
    assert write_report(open_runs([tmp_path / "run"]), tmp_path / "r.html", verified=True, tokenizer=None, say=print)


def test_a_trace_has_updates_waits_publishes_and_trajectories(tmp_path: Path) -> None:
    record_run(tmp_path)
    events = list(trace_events(RunSource(tmp_path), limit=100))
    names = [event["name"] for event in events]
    assert {"update 0", "update 3", "wait before update 1", "evaluation of version 0", "publish 4"} <= set(names)
    wait = next(event for event in events if event["name"] == "wait before update 1")
    assert wait["args"]["for"] == "group 1"
    assert wait["dur"] == 750_000
    begins = [event["id"] for event in events if event["ph"] == "b"]
    ends = [event["id"] for event in events if event["ph"] == "e"]
    assert sorted(begins) == sorted(ends) == sorted([*range(24)] * 2), (
        "one in its version's lane, one in its instance's"
    )
    counters = [event["args"]["trajectories"] for event in events if event["name"] == "instance 0 running"]
    assert min(counters) == counters[-1] == 0


def test_a_trace_of_many_trajectories_has_whole_groups_of_them(tmp_path: Path) -> None:
    record_run(tmp_path)
    events = list(trace_events(RunSource(tmp_path), limit=12))
    ids = {event["id"] for event in events if event["ph"] == "b"}
    assert ids == {id for group in (0, 2, 4, 6) for id in range(3 * group, 3 * group + 3)}
    assert not any(event["ph"] == "b" for event in trace_events(RunSource(tmp_path), limit=0))


def test_the_command_writes_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record_run(tmp_path / "run")
    assert main(["trace", str(tmp_path / "run"), "-o", str(tmp_path / "t.json")]) == 0
    assert "open it at https://ui.perfetto.dev" in capsys.readouterr().out
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]


@pytest.mark.parametrize("command", ["report", "trace"])
def test_a_file_that_exists_is_replaced_only_by_force(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record_run(tmp_path / "run")
    out = tmp_path / "precious"
    out.write_text("data")
    words = [command, str(tmp_path / "run"), "-o", str(out)]
    assert main(words) == 2
    assert "exists already; choose another `-o`, or replace it with `--force`" in capsys.readouterr().err
    assert out.read_text() == "data"
    assert main([*words, "--force"]) == 0
    assert out.read_text() != "data"
