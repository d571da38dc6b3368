"""Progress as a person sees it during a run."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from stretto.observe.progress import LEGEND, Plain, Status, Terminal, describe_status, make_observer
from stretto.types import EngineStats, EvaluationResult, HeldOutScore

LINE: dict[str, Any] = {
    "update": 1,
    "reward_mean": 0.25,
    "tokens_per_second": 1234.0,
    "staleness_mean": 0.5,
    "staleness_max": 2,
    "tokens": 30,
    "num_sequences": 3,
    "replayed_sequences": 0,
    "filtered_groups": 0,
    "filtered_share": 0.0,
    "trainer_idle_seconds": 4.0,
    "trainer_waited_for": "group 7 [version 1]",
}
STATUS = Status(
    update=2,
    newest=2,
    staleness=2,
    versions={1: 3, 2: 5},
    loads=[EngineStats(running=8, queued=0, kv_tokens=100, versions={1: 3, 2: 5})],
    waits=["trainer: update 2: 1 of 3 groups [/are] finished"],
)
EVALUATION = EvaluationResult(2, "during", 0.5, 4, 0, 3.0, at=1.0, seconds=1.0)
BOTH = replace(EVALUATION, greedy=HeldOutScore(0.75, 3, 1, 3.0))


def test_a_terminal_shows_versions_and_waits_and_leaves_the_last_update() -> None:
    out = io.StringIO()
    observer = Terminal(Console(file=out, force_terminal=True, width=200), steps=4)
    observer.status(STATUS)
    observer.updated(LINE)
    observer.evaluated(BOTH)
    observer._live.refresh()
    observer.message("a [message] with brackets")
    observer.close()
    observer.close()
    said = out.getvalue()
    assert "2 of 4" in said
    assert "v1: 3" in said
    assert "0.500, greedy 0.750 (version 2)" in said
    assert "\\[" not in said, "the bar is the same whether what is printed above it is markup or not"
    assert "groups [/are] finished" in said, "what waits is text, whatever is in it"
    assert "a [message] with brackets" in said
    assert said.count("trainer idle 4 s: group 7 [version 1]") == 1


def test_a_terminal_counts_the_updates_of_a_run_that_goes_on_from_before_its_next_one() -> None:
    out = io.StringIO()
    observer = Terminal(Console(file=out, force_terminal=True, width=200), steps=4)
    observer.status(STATUS)
    observer._live.refresh()
    observer.close()
    assert "2 of 4" in out.getvalue()
    assert "0 of 4" not in out.getvalue()


def test_elsewhere_there_are_plain_lines_not_too_many_and_always_the_last() -> None:
    out = io.StringIO()
    observer = make_observer(Console(file=out, width=60), 40)
    assert isinstance(observer, Plain)
    observer.status(STATUS)
    for update in range(40):
        observer.updated({**LINE, "update": update})
    observer.evaluated(EVALUATION)
    observer.close()
    lines = out.getvalue().splitlines()
    assert [line.split("  ")[0] for line in lines] == [
        lines[0],
        "1 of 40 updates done",
        "40 of 40 updates done",
        lines[-1],
    ]
    assert lines[0] == LEGEND, "what the columns mean, once"
    assert lines[-1] == "evaluation of version 2: 0.500 on 4 prompts"


@pytest.mark.parametrize("make", [Plain, Terminal], ids=["file", "terminal"])
def test_what_the_trainer_waited_for_is_told_whole(make: type[Plain] | type[Terminal]) -> None:
    waited = "; ".join(f"group {number} (version 3, due by update 5: 8 running on instance 0)" for number in range(4))
    out = io.StringIO()
    observer = make(Console(file=out, width=80, force_terminal=make is Terminal), 40)
    observer.updated({**LINE, "trainer_waited_for": f"{waited}; and 9 more"})
    observer.close()
    assert f"trainer idle 4 s: {waited}; and 9 more" in " ".join(out.getvalue().split())


def test_the_record_of_a_status_is_json_and_does_not_grow_with_the_instances() -> None:
    many = replace(STATUS, loads=list(STATUS.loads) * 1_000, instances=range(1_000), training=1)
    record = json.loads(json.dumps(many.record()))
    assert (record["running"], record["num_instances"], len(record["instances"])) == (8_000, 1_000, 64)
    assert (record["versions"], record["training"], record["waits"]) == ({"1": 3, "2": 5}, 1, list(STATUS.waits))
    assert len(json.dumps(record)) < 8_192


def test_lines_say_what_a_quiet_run_does_ever_more_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr("stretto.observe.progress.time.monotonic", lambda: clock[0])
    screen = io.StringIO()
    plain = Plain(Console(file=screen, width=500), steps=60, quiet_s=20.0)
    waits = ["admission: all rows are taken", "trainer: update 0: 1 of 2 groups are finished"]
    status = replace(STATUS, update=0, training=None, waits=waits)
    shown = []
    for clock[0] in (110.0, 121.0, 130.0, 150.0, 162.0, 200.0):
        plain.status(status)
        shown.append(len(screen.getvalue().splitlines()))
    assert shown == [0, 1, 1, 1, 2, 2]
    plain.message("something else")
    clock[0] = 221.0
    plain.status(replace(status, training=3))
    lines = screen.getvalue().splitlines()
    assert lines[0] == (
        "waiting for update 1 of 60: 8 trajectories decode with 100 tokens of context, 0 are queued; "
        "1 of 2 groups are finished"
    )
    assert lines[-1].startswith("training update 4 of 60: ")
    assert len(lines) == 4


def test_after_the_last_update_a_quiet_run_waits_for_its_end() -> None:
    said = describe_status(replace(STATUS, update=4, waits=["finish: the evaluation of version 2 runs"]), 4)
    assert said.startswith("all updates are done: 8 trajectories decode")
    assert said.endswith("; the evaluation of version 2 runs")
