"""Event files of TensorBoard, read back by its own reader."""

from __future__ import annotations

from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tracker_cases import begin, evaluation, report, rows_of, update

from stretto.observe.trackers.sample_rows import Samples


def read(folder: Path) -> EventAccumulator:
    return EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0}).Reload()


def scalars(folder: Path, tag: str) -> list[tuple[int, float]]:
    return [(event.step, round(event.value, 6)) for event in read(folder).Scalars(tag)]


def text(folder: Path, tag: str) -> str:
    return str(read(folder).Tensors(f"{tag}/text_summary")[-1].tensor_proto.string_val[0], "utf-8")


def test_updates_and_evaluations_are_drawn_over_their_numbers(tmp_path: Path) -> None:
    said: list[str] = []
    folder = tmp_path / "run"
    options = begin(folder, sinks=["tensorboard"])
    report(folder, options, [evaluation(0), update(0), update(1), evaluation(2)], say=said.append)
    events = folder / "tensorboard"
    assert scalars(events, "update/reward_mean") == [(0, 0.0), (1, 0.1)]
    assert scalars(events, "evaluation/score") == [(0, 0.25), (2, 0.25)]
    assert scalars(events, "evaluation/greedy_score") == [(0, 0.5), (2, 0.5)]
    assert "update/staleness_histogram/1" not in read(events).Tags()["scalars"]
    assert "rollout.prompts = 16" in text(events, "recipe")
    assert said == [f"tensorboard: `tensorboard --logdir {events}`"]


def test_a_resumed_run_continues_its_curves_without_what_a_killed_run_wrote_too_much(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    options = begin(folder, sinks=["tensorboard"])
    report(folder, options, [evaluation(0), update(0), update(1), evaluation(2), update(2, reward_mean=9.0)])
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(lines[:-1]))  # the journal did not have the last one
    report(folder, options, [update(2), update(3), evaluation(4)])
    events = folder / "tensorboard"
    assert scalars(events, "update/reward_mean") == [(0, 0.0), (1, 0.1), (2, 0.2), (3, 0.3)]
    assert scalars(events, "evaluation/score") == [(0, 0.25), (2, 0.25), (4, 0.25)]


def test_a_tracker_that_is_added_later_gets_the_lines_before(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    begin(folder)
    report(folder, begin(tmp_path / "other"), [evaluation(0), update(0), update(1)])
    options = begin(tmp_path / "another", sinks=["tensorboard"])
    report(folder, options, [update(2)])
    assert scalars(folder / "tensorboard", "update/reward_mean") == [(0, 0.0), (1, 0.1), (2, 0.2)]
    assert scalars(folder / "tensorboard", "evaluation/score") == [(0, 0.25)]


def test_runs_with_one_folder_have_a_folder_each_in_it(tmp_path: Path) -> None:
    events = tmp_path / "events"
    for name in ("first", "second"):
        options = begin(tmp_path / name, sinks=["tensorboard"], tensorboard={"folder": str(events)})
        report(tmp_path / name, options, [update(0)])
    assert scalars(events / "first", "update/reward_mean") == [(0, 0.0)]
    assert sorted(path.name for path in events.iterdir()) == ["first", "second"]


def test_samples_are_a_table_whose_text_is_no_markup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Samples, "rows", lambda self, number: rows_of(number, 2))
    folder = tmp_path / "run"
    report(folder, begin(folder, sinks=["tensorboard"], samples=2), [update(0), update(1)])
    shown = text(folder / "tensorboard", "samples")
    head, rule, first, second = shown.splitlines()
    assert "|reward|reward/format|tokens|" in head
    assert rule.count("|") == head.count("|") == first.count("|")
    assert "||0.125|3|" in first
    assert "|0.5||3|" in second, "a reward that does not apply"
    assert "&lt;b&gt;&#124;bold&#124;&lt;/b&gt;<br>" in shown
    assert "<b>" not in shown
