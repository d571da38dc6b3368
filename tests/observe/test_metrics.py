"""The numbers of `summary.json`, on runs small enough to count by hand."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from stretto.errors import RunError
from stretto.observe.metrics import JsonLines, Tally, Totals, constant_rewards, is_mixed
from stretto.observe.progress import describe_evaluation, describe_update
from stretto.observe.summary import summary_table
from stretto.types import Completion, EngineStats, EvaluationResult, HeldOutScore, Sample, UpdateReport


class Kept:
    """A sink that keeps what it is given."""

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []

    def write(self, record: Any) -> None:
        self.records.append(dict(record))


def completion(num_tokens: int, versions: list[int] | None = None, finish: Any = "stop") -> Completion:
    return Completion(
        id=0,
        version=0,
        tokens=np.arange(num_tokens, dtype=np.int32),
        logprobs=np.zeros(num_tokens, dtype=np.float32),
        finish=finish,
        checksum="",
        token_versions=None if versions is None else np.array(versions, dtype=np.int32),
    )


def sample(trajectory: int, version: int, done: Completion, reward: float = 1.0) -> Sample:
    return Sample(trajectory, trajectory // 2, version, (1, 2, 3), done, reward)


def load(busy_s: float, row_s: float) -> EngineStats:
    return EngineStats(running=0, queued=0, kv_tokens=0, versions={}, busy_s=busy_s, row_s=row_s)


def report(update: int, **metrics: float) -> UpdateReport:
    return UpdateReport(update, {"reward_mean": 0.5, "num_sequences": 2.0, **metrics}, 0.25, 5, 1.0)


def tally(rows: int = 4, totals: Totals | None = None) -> tuple[Tally, Kept]:
    sink = Kept()
    return Tally(rows=rows, sink=sink, totals=totals), sink


def update(tally: Tally, number: int, samples: list[Sample], started: float, ended: float, **metrics: float) -> Any:
    return tally.trained(
        samples, report(number, **metrics), started=started, ended=ended, idle_s=0.5, waited_for="group 3"
    )


def test_the_window_runs_from_the_first_admission_to_the_end_of_the_last_update() -> None:
    subject, sink = tally(rows=4)
    subject.open_window([load(10.0, 20.0)], at=100.0)
    subject.open_window([load(11.0, 21.0)], at=101.0)
    update(subject, 0, [sample(0, 0, completion(6)), sample(1, 0, completion(4))], 104.0, 106.0)
    subject.mark([load(14.0, 30.0)], at=106.0)
    update(subject, 1, [sample(2, 0, completion(10)), sample(3, 1, completion(10))], 107.0, 110.0)
    subject.mark([load(16.0, 36.0)], at=110.0)
    subject.close_window([load(99.0, 999.0)], at=150.0)
    summary = subject.summary()
    assert summary["steps"] == 2
    assert summary["wall_seconds"] == 10.0
    assert summary["tokens"] == 30, "completion tokens that were trained on, prompts not counted"
    assert summary["tokens_per_second"] == 3.0
    assert summary["trainer_idle_share"] == pytest.approx(1 - 5 / 10), "time without a running update"
    assert summary["rollout_idle_share"] == pytest.approx(1 - 6 / 10), "time without a running row"
    assert summary["row_idle_share"] == pytest.approx(1 - 16 / (10 * 4)), "the unused share of `rows`"
    assert summary["staleness"] == {"mean": 0.25, "max": 1, "histogram": {"0": 3, "1": 1}}
    assert summary["mismatch_kl"] == pytest.approx(0.5 / 10)
    assert summary["mismatch_tokens"] == 10
    assert summary["length_ratio"] == 1.0
    assert [line["cycle_seconds"] for line in sink.records] == [6.0, 4.0]
    assert [line["tokens_per_second"] for line in sink.records] == [10 / 6, 5.0]
    assert sink.records[0]["trainer_waited_for"] == "group 3"


def test_idle_rollout_is_a_share_of_all_instances() -> None:
    subject, _ = tally(rows=4)
    subject.open_window([load(0.0, 0.0), load(0.0, 0.0)], at=0.0)
    subject.mark([load(10.0, 20.0), load(5.0, 10.0)], at=10.0)
    subject.close_window([], at=10.0)
    assert subject.summary()["rollout_idle_share"] == pytest.approx(0.25)
    assert subject.summary()["row_idle_share"] == pytest.approx(0.25)


def test_the_length_ratio_is_over_whatever_was_sampled_and_not_over_what_never_got_a_token() -> None:
    subject, _ = tally()
    update(subject, 0, [sample(0, 0, completion(10)), sample(1, 0, completion(10))], 0.0, 1.0)
    subject.dropped(40)
    subject.dropped(0)
    subject.failed(20)
    subject.failed(0)
    summary = subject.summary()
    assert summary["length_ratio"] == pytest.approx(10.0 / (80 / 4))
    assert (summary["dropped_trajectories"], summary["failed_trajectories"]) == (2, 2)
    assert summary["dropped_share"] == pytest.approx(2 / 6)
    assert summary["tokens"] == 20


def test_lengths_of_dropped_trajectories_are_told_of_each_update_and_of_the_run() -> None:
    subject, sink = tally()
    subject.dropped(40)
    subject.dropped(20, complete=True)
    subject.dropped(0)  # it had not begun
    update(subject, 0, [sample(0, 0, completion(10)), sample(1, 0, completion(10))], 0.0, 1.0)
    update(subject, 1, [sample(2, 1, completion(6)), sample(3, 1, completion(6))], 1.0, 2.0)
    first, second = sink.records
    assert (first["dropped"], first["dropped_share"], first["dropped_length"]) == (3, 3 / 5, 30.0)
    assert first["length_ratio"] == pytest.approx(10 / 20)
    assert (second["dropped"], second["dropped_share"], second["length_ratio"]) == (0, 0.0, 1.0)
    assert "dropped_length" not in second
    assert "dropped 3 (60% of those that ended since the last update)" in describe_update(first, 2)
    summary = subject.summary()
    assert (summary["dropped_length"], summary["dropped_complete_length"]) == (30.0, 20.0)
    assert (summary["dropped_trajectories"], summary["dropped_complete_trajectories"]) == (3, 1)


def test_the_share_of_dropped_trajectories_has_the_same_base_in_lines_and_in_the_summary() -> None:
    subject, sink = tally()
    subject.dropped(40)
    subject.failed(20)
    subject.filtered([4, 4, 4], 1.0)
    update(subject, 0, [sample(0, 0, completion(10))], 0.0, 1.0)
    assert sink.records[0]["dropped_share"] == subject.summary()["dropped_share"] == pytest.approx(1 / 6)


def test_mixed_truncated_and_signal_less_are_counted() -> None:
    subject, _ = tally()
    mixed = completion(3, versions=[1, 1, 2])
    same = completion(3, versions=[2, 2, 2], finish="length")
    update(subject, 2, [sample(0, 1, mixed), sample(1, 2, same)], 0.0, 1.0, groups_without_signal=1.0)
    summary = subject.summary()
    assert (is_mixed(mixed), is_mixed(same), is_mixed(completion(3))) == (True, False, False)
    assert (summary["mixed_version_trajectories"], summary["mixed_version_share"]) == (1, 0.5)
    assert summary["truncated_trajectories"] == 1
    assert summary["groups_without_signal"] == 1


def test_a_stopped_window_ends_with_the_stop_and_the_sums_go_on_when_resumed() -> None:
    first, _ = tally()
    first.open_window([load(0.0, 0.0)], at=0.0)
    line = update(first, 0, [sample(0, 0, completion(5))], 2.0, 4.0)
    first.mark([load(4.0, 8.0)], at=4.0)
    first.close_window([load(6.0, 12.0)], at=6.0, stopped=True)
    totals = Totals.from_json(json.loads(json.dumps(first.totals.sums())), [line])
    assert totals == first.totals
    second, _ = tally(totals=totals)
    second.open_window([load(100.0, 100.0)], at=1000.0)
    update(second, 1, [sample(1, 0, completion(15))], 1002.0, 1004.0)
    second.mark([load(104.0, 108.0)], at=1004.0)
    second.close_window([load(104.0, 108.0)], at=1009.0)
    summary = second.summary()
    assert summary["wall_seconds"] == 10.0, "what was generated between the last update and the stop took its time"
    assert (summary["steps"], summary["tokens"], summary["tokens_per_second"]) == (2, 20, 2.0)
    assert summary["trainer_idle_share"] == pytest.approx(0.6)
    assert summary["staleness"]["histogram"] == {"0": 1, "1": 1}


def test_an_evaluation_says_which_version_it_measured_and_when_by_the_runs_own_clock() -> None:
    subject, sink = tally()
    subject.evaluated(EvaluationResult(0, "before", 0.25, 4, 0, 3.0, at=50.0, seconds=1.0))
    subject.open_window([load(0.0, 0.0)], at=100.0)
    subject.evaluated(EvaluationResult(3, "during", 0.5, 4, 0, 3.0, at=107.0, seconds=1.0))
    subject.mark([load(0.0, 0.0)], at=110.0)
    subject.close_window([], at=120.0)
    subject.evaluated(EvaluationResult(6, "after", 0.75, 3, 1, 3.0, at=130.0, seconds=1.0))
    summary = subject.summary()
    assert (summary["eval_before"], summary["eval_before_version"]) == (0.25, 0)
    assert (summary["eval_after"], summary["eval_after_version"]) == (0.75, 6)
    assert [each["elapsed_s"] for each in summary["evaluations"]] == [0.0, 7.0, 10.0]
    assert [record["kind"] for record in sink.records] == ["evaluation"] * 3
    after = EvaluationResult(6, "after", 0.75, 3, 1, 3.0, at=130.0, seconds=1.0)
    assert describe_evaluation(after) == "evaluation of version 6: 0.750 on 3 prompts, 1 failed"
    nothing = EvaluationResult(6, "after", None, 0, 4, 3.0, at=130.0, seconds=1.0)
    assert describe_evaluation(nothing) == "evaluation of version 6: no score on 0 prompts, 4 failed"


def test_both_scores_of_an_evaluation_are_in_its_line_in_the_summary_and_in_the_closing_table() -> None:
    subject, sink = tally()
    greedy = HeldOutScore(0.375, 3, 1, 3.0)
    before = EvaluationResult(0, "before", 0.25, 4, 0, 3.0, at=50.0, seconds=1.0, greedy=greedy)
    nothing = HeldOutScore(None, 0, 4, 0.0)
    subject.evaluated(before)
    subject.evaluated(EvaluationResult(6, "after", 0.75, 4, 0, 3.0, at=60.0, seconds=1.0, greedy=nothing))
    assert sink.records[0]["greedy"] == {"score": 0.375, "num_scored": 3, "num_failed": 1, "mean_tokens": 3.0}
    summary = {**subject.summary(), "spared_groups": 0, "replaced_groups": 0}
    assert (summary["eval_before_greedy"], summary["eval_after_greedy"]) == (0.375, None)
    stream = io.StringIO()
    Console(file=stream, width=160).print(summary_table(summary))
    rows = [" ".join(line.strip("│ ").split()) for line in stream.getvalue().splitlines()]
    assert [row for row in rows if row.startswith("held-out")] == [
        "held-out score before │ 0.250 (version 0)",
        "held-out score before, greedy │ 0.375 (version 0)",
        "held-out score after │ 0.750 (version 6)",
    ]
    assert "training time │ 0.0 s, first rollout to last update" in rows
    assert (
        describe_evaluation(before)
        == "evaluation of version 0: 0.250 on 4 prompts; greedy 0.375 on 3 prompts, 1 failed"
    )


def test_evaluations_of_a_journal_from_before_there_were_greedy_ones_are_read() -> None:
    subject, _ = tally()
    subject.evaluated(EvaluationResult(0, "before", 0.25, 4, 0, 3.0, at=50.0, seconds=1.0))
    del subject.totals.evaluations[0]["greedy"]
    assert subject.summary()["eval_before_greedy"] is None


def test_rewards_that_are_always_equal_are_told_in_every_line_once_in_a_warning_and_in_the_table() -> None:
    def run(*without: int) -> tuple[list[dict[str, Any]], str]:
        subject, _ = tally()
        lines = []
        for number, count in enumerate(without):
            metrics = {"groups": 2.0, "groups_without_signal": float(count)}
            lines.append(update(subject, number, [sample(0, 0, completion(2))], number, number + 1.0, **metrics))
            if number == 1:  # and so it is after the run was resumed
                totals = Totals.from_json(json.loads(json.dumps(subject.totals.sums())), lines)
                subject, _ = tally(totals=totals)
        stream = io.StringIO()
        summary = {**subject.summary(), "spared_groups": 0, "replaced_groups": 0}
        Console(file=stream, width=160).print(summary_table(summary))
        return lines, stream.getvalue()

    lines, table = run(2, 2, 2, 2)
    assert [len(line["warnings"]) for line in lines] == [0, 0, 1, 0]
    assert "no reward trains anything: in every group all rewards are equal" in lines[2]["warnings"][0]
    assert [line["not_learning"] for line in lines] == [[], [], ["no-signal"], ["no-signal"]]
    assert "not learning (no-signal)" in table
    assert all("no signal: the rewards of every group are equal" in describe_update(line, 4) for line in lines)
    assert "all of 4: the rewards trained nothing" in table
    assert "8, their rewards were equal" in table
    lines, table = run(2, 1, 2, 0)
    assert not any(line["warnings"] for line in lines)
    assert ["no signal" in describe_update(line, 4) for line in lines] == [True, True, True, False]
    assert "no signal in 1 of 2 groups" in describe_update(lines[1], 4)
    assert "2 of 4: the rewards trained nothing" in table
    lines, table = run(0, 0)
    assert "signal" not in table


def test_completions_that_are_cut_off_are_named_with_the_folder_of_the_run_and_in_the_table() -> None:
    subject = Tally(rows=4, sink=Kept(), run=Path("runs/my own"))
    for number in range(3):
        metrics = {"groups": 2.0, "groups_without_signal": 2.0, "truncated": 1.0, "length_mean": 2.0}
        done = [sample(0, 0, completion(2, finish="length"))]
        line = update(subject, number, done, number, number + 1.0, **metrics)
    (warning,) = line["warnings"]
    assert "`rollout.max_tokens` cut off 100% of the completions" in warning
    assert "`stretto show 'runs/my own' --update 2`" in warning
    stream = io.StringIO()
    summary = {**subject.summary(), "spared_groups": 0, "replaced_groups": 0}
    Console(file=stream, width=160).print(summary_table(summary))
    assert "since update 2; most completions were cut off: raise `rollout.max_tokens`" in stream.getvalue()


def test_a_run_without_updates_has_a_summary_too() -> None:
    subject, _ = tally()
    subject.close_window([], at=5.0)
    summary = subject.summary()
    assert summary["tokens_per_second"] == 0.0
    assert summary["eval_before"] is None
    assert (summary["mismatch_kl"], summary["mismatch_tokens"]) == (None, 0), "nothing was measured, which is not 0"
    json.dumps(summary, allow_nan=False)


def test_a_line_on_the_screen_says_why_the_trainer_waited() -> None:
    subject, _ = tally()
    line = update(subject, 4, [sample(0, 3, completion(10)), sample(1, 4, completion(20))], 0.0, 1.0)
    assert describe_update(line, 9) == "5 of 9 updates done  reward 0.500  30 tok/s  age 0.50 (max 1)  length 15"
    assert describe_update({**line, "trainer_idle_seconds": 38.2}, 9).endswith("trainer idle 38 s: group 3")
    waited = {"trainer_idle_seconds": 38.2, "trainer_waited_for": "update 0: group 3"}
    assert describe_update({**line, **waited}, 9).endswith("trainer idle 38 s: group 3"), "the line counts from 1"


def test_metrics_are_a_line_a_record_and_are_written_again_from_what_the_journal_has(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "metrics.jsonl")
    for number in range(4):
        lines.write({"kind": "update", "update": number})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "upd')  # killed as it wrote
    lines.rewrite([{"kind": "update", "update": number} for number in range(3)])
    lines.write({"kind": "update", "update": 3})
    kept = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [record["update"] for record in kept] == [0, 1, 2, 3]


def test_sums_come_back_with_what_the_lines_say() -> None:
    subject, _ = tally()
    line = update(subject, 4, [sample(0, 3, completion(10)), sample(1, 4, completion(20))], 0.0, 1.0)
    read = Totals.from_json(json.loads(json.dumps(subject.totals.sums())), [json.loads(json.dumps(line))])
    assert read == subject.totals
    assert Totals.from_json({}) == Totals()


def test_metrics_that_cannot_be_written_are_an_error_by_name(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"metrics.jsonl` cannot be written"):
        JsonLines(tmp_path / "gone" / "metrics.jsonl").write({"kind": "update"})


def test_the_age_of_a_trajectory_is_that_of_its_oldest_token() -> None:
    subject, _ = tally()
    samples = [sample(0, 0, completion(3, [0, 1, 2])), sample(1, 0, completion(2, [1, 2])), sample(2, 0, completion(2))]
    line = update(subject, 2, samples, 0.0, 1.0)
    assert line["staleness_histogram"] == {"1": 1, "2": 2}
    assert subject.totals.ages == {1: 1, 2: 2}


def test_rewards_with_one_value_for_all_completions_are_told_apart() -> None:
    parts = [
        (("right", 1.0, 0.0), ("brief", 0.2, 1.0), ("long", -1.0, 0.0), ("rare", 1.0, None)),
        (("right", 1.0, 0.0), ("brief", 0.2, 0.5), ("long", -1.0, 0.0), ("rare", 1.0, 2.0)),
    ]
    assert constant_rewards(parts) == {"constant_rewards": {"right": 0.0, "rare": 2.0}}
    assert constant_rewards([None, None]) == {}
