"""The benches of what versions and roles cost on one device, on the CPU with a tiny model."""

from __future__ import annotations

import itertools
import sys
import threading
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))  # the benches are no part of the package

from bench.gpu import decode, generation, mismatch, publish, report, rollout, sharing, slots, update
from bench.gpu.cells import Cell, Cells, read_cells
from bench.gpu.costs import StepCost, batch_lengths, ideal_gain
from bench.gpu.timeline import Timeline, Watched
from stretto.training.loss_scaling import LossScale
from stretto.types import Completion, EngineStats

torch.set_num_threads(1)


# -- windows -----------------------------------------------------------------------------------------------------------


def _timeline() -> Timeline:
    """0 rows until 10, 8 rows until 20, 3 rows until 30, then none; ten tokens a second while rows run."""
    timeline = Timeline()
    for at, running, tokens in ((0, 0, 0), (10, 8, 0), (20, 3, 100), (30, 0, 200)):
        timeline.note(float(at), running, tokens)
    return timeline


def test_the_share_of_a_window_counts_what_was_noted_last_until_the_next_note() -> None:
    timeline = _timeline()
    assert timeline.share_at_least(4, 0, 40) == pytest.approx(10 / 40)
    assert timeline.share_at_least(3, 0, 40) == pytest.approx(20 / 40)
    assert timeline.share_at_least(4, 15, 25) == pytest.approx(0.5)
    assert timeline.share_at_least(0, 35, 50) == pytest.approx(1.0)
    with pytest.raises(ValueError, match="no extent"):
        timeline.share_at_least(4, 5, 5)


def test_tokens_of_a_window_are_in_proportion_to_time_between_notes() -> None:
    assert _timeline().tokens_between(0, 40) == pytest.approx(200)
    assert _timeline().tokens_between(15, 22) == pytest.approx(70)


def test_a_watched_core_notes_its_load_and_is_otherwise_the_core() -> None:
    core = types.SimpleNamespace(report=lambda: EngineStats(5, 0, 0, {}, tokens=7), capacity="the core's own")
    timeline = Timeline()
    watched = Watched(core, timeline)
    assert watched.capacity == "the core's own"
    assert watched.report().tokens == 7
    assert timeline._running == [5]


def test_the_window_while_admitting_runs_from_the_first_update_to_the_last_admission() -> None:
    found = update.while_admitting(_timeline(), [12.0, 18.0, 39.0], 28.0, 4)
    assert found["generated_per_s_while_admitting"] == pytest.approx(10)
    assert found["half_rows_share_while_admitting"] == pytest.approx(8 / 16)
    assert found["admitting_updates"] == 1
    assert update.while_admitting(_timeline(), [12.0, 29.0], 28.0, 4) == {}


def test_a_run_of_three_updates_tells_its_rate_while_admitting_and_its_time_with_half_of_the_rows(
    tmp_path: Path,
) -> None:
    assert update.main(["--tiny", "--device", "cpu", "--out", str(tmp_path), "--paradigms", "synchronous"]) == 0
    (record,) = read_cells([tmp_path])
    results, marks = record["results"], record["results"]["marks"]
    assert results["admitting_updates"] == 1
    made = marks[1]["generated"] - marks[0]["generated"]
    between = marks[1]["at"] - marks[0]["at"]
    assert between <= results["admitting_s"] < marks[2]["at"] - marks[0]["at"]
    # A token a row may lie on either side of a bound, and the last group is admitted some time after the update.
    counted = results["generated_per_s_while_admitting"] * results["admitting_s"]
    assert made - 16 <= counted <= marks[2]["generated"] - marks[0]["generated"] + 16
    assert 0 < results["half_rows_share"] < 1


# -- the ideal gain ----------------------------------------------------------------------------------------------------


def test_the_ideal_of_several_updates_is_the_sum_of_their_longest() -> None:
    cost, batches = StepCost(1e-3, 0.0, 0.0), [[10, 100], [20, 50]]
    ideal = ideal_gain(cost, batches, prompt=8, rows=2, training_s=0.5)
    assert ideal["synchronous_s"] == pytest.approx(0.150 + 0.5)
    assert ideal["full_rows_s"] == pytest.approx(0.090 + 0.5)


def test_the_first_update_has_the_same_lengths_in_a_run_of_any_number_of_updates() -> None:
    one, three = batch_lengths("published", 4), batch_lengths("published", 4, 3)
    assert (len(one), len(three), len(three[1])) == (1, 3, 32)
    assert one[0] == three[0]
    assert three[0] != three[1]


def test_the_report_computes_the_ideal_for_the_updates_of_the_runs(tmp_path: Path) -> None:
    cells = Cells(tmp_path, resume=False, sitting="one")
    for rows, context in ((1, 256), (64, 256), (256, 1_024)):
        seconds = 2e-3 + 1e-5 * rows + 1e-9 * rows * context
        parameters = {"size": "1.7B", "lora": 3, "tokens": 48, "batch": rows, "prompt": context}
        cells.write(Cell("step", "native", parameters), {"step_ms": 1e3 * seconds, "context_mean": float(context)})
    work = {"size": "1.7B", "tail": "published", "groups": 16, "prompt": 128}
    cells.write(Cell("training", "native", {**work, "micro": 16_384}), {"training_s": 3.0})
    for paradigm, rate, updates in (("synchronous", 4_000, 8), ("multi-version", 9_000, 8), ("synchronous", 1_000, 2)):
        results = {"tokens_per_s": float(rate), "generated_per_s_while_admitting": 1.5 * rate, "half_rows_share": 0.25}
        parameters = {**work, "paradigm": paradigm, "staleness": 4, "updates": updates}
        cells.write(Cell("update", "native", parameters), results)
    text = report.report(read_cells([tmp_path]))
    ideal = ideal_gain(
        StepCost(2e-3, 1e-5, 1e-9),
        batch_lengths("published", 16, 8),
        128,
        128,
        3.0
        * sum(128 + n for batch in batch_lengths("published", 16, 8) for n in batch)
        / sum(128 + n for n in batch_lengths("published", 16)[0]),
    )
    assert f"| {ideal['gain']:.2f} | 2.25 |" in text
    assert "| 16 x 8 | 8 | multi-version | 4 | 9,000 | 13,500 |" in text
    assert "| 25% |" in text
    training = Cell("training", "native", {**work, "micro": 16_384})
    Cells(tmp_path, resume=False, sitting="two").write(training, {"training_s": 3.0})
    text = report.report(read_cells([tmp_path]))
    assert f"| {ideal['gain']:.2f}* | 2.25 |" in text, "steps and training are of two sittings"


# -- publishing, slots -------------------------------------------------------------------------------------------------


def test_publishing_is_measured_for_both_kinds_and_reported(tmp_path: Path) -> None:
    assert publish.main(["--tiny", "--device", "cpu", "--out", str(tmp_path), "--resume"]) == 0
    found = {r["parameters"]["kind"]: r["results"] for r in read_cells([tmp_path])}
    assert found.keys() == {"lora", "full"}
    for results in found.values():
        assert min(results["load_ms"], results["step_ms"], results["weights_s"]) > 0
    assert found["full"]["limit_ms"] == publish.LIMIT_FULL_MS
    assert found["lora"]["limit_ms"] == found["lora"]["step_ms"]
    assert found["full"]["version_bytes"] > found["lora"]["version_bytes"]
    assert "Publishing a version while rows decode" in report.report(read_cells([tmp_path]))


def test_a_stall_is_what_the_load_and_the_step_after_it_take_beyond_a_step() -> None:
    made = publish.Round([3.0, 9.0, 4.0], [6.0, 12.0, 7.0], [5.0, 5.0, 5.0], [7.0, 8.0, 6.5], [5.0, 5.0, 5.0], 0)
    results = made.results()
    assert (results["stall_ms"], results["stall_ms_max"], results["device_gap_ms"]) == (2.0, 7.0, 2.0)
    assert publish.with_limit(results, "lora")["within_limit"]
    assert not publish.with_limit({**results, "stall_ms": 5.5}, "lora")["within_limit"]
    assert publish.with_limit({**results, "stall_ms": 9.9}, "full")["within_limit"]


def test_slots_are_measured_for_every_number_of_versions_of_both_kinds(tmp_path: Path) -> None:
    arguments = ["--tiny", "--device", "cpu", "--out", str(tmp_path), "--resume"]
    assert slots.main(arguments) == 0
    records = read_cells([tmp_path])
    assert len(records) == 2 * 2 * 3
    assert len({record["sitting"] for record in records}) == 1
    before = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert slots.main(arguments) == 0
    assert {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before
    assert "| tiny | 3 | 16 + 4 | lora | 1 |" in report.report(records)


def test_rows_are_dealt_round_over_the_versions() -> None:
    cell = Cell("slots", "native", {"batch": 5, "versions": 2, "prompt": 4, "size": "tiny"})
    assert [ask.version for ask in slots.asks(cell)] == [0, 1, 0, 1, 0]


# -- sharing -----------------------------------------------------------------------------------------------------------


def test_turns_never_overlap_and_alternate_while_both_are_there() -> None:
    turns, log, inside = sharing.Turns(), [], []

    def work(name: str, count: int) -> None:
        with sharing._in_turn(turns, name, lambda: None) as boundary:
            while not log and len(turns._present) < 2:
                threading.Event().wait(0.001)
            for _ in range(count):
                inside.append(name)
                assert inside == [name]
                log.append(name)
                inside.remove(name)
                boundary()

    threads = [threading.Thread(target=work, args=(name, count)) for name, count in (("a", 40), ("b", 15))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=10)
    assert not any(thread.is_alive() for thread in threads)
    assert (log.count("a"), log.count("b")) == (40, 15)
    both = log[log.index("b") : len(log) - log[::-1].index("b")]
    assert all(one != next_one for one, next_one in itertools.pairwise(both))


def test_one_that_fails_in_its_turn_leaves_the_device_to_the_other() -> None:
    turns = sharing.Turns()
    with pytest.raises(RuntimeError, match="broken"), sharing._in_turn(turns, "a", lambda: None):
        raise RuntimeError("broken")
    turns.enter("b")
    turns.pass_on("b")


def test_all_interleavings_are_measured_and_the_best_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sharing.main(["--tiny", "--device", "cpu", "--out", str(tmp_path)]) == 0
    records = read_cells([tmp_path])
    assert sorted(r["parameters"]["mode"] for r in records) == ["both", "decode", "training", "turns"]
    turns = next(r["results"] for r in records if r["parameters"]["mode"] == "turns")
    assert min(turns["decoded_per_s"], turns["trained_per_s"]) > 0
    assert "tiny, 16 rows: best is " in capsys.readouterr().out
    assert "| turns of 2 steps |" in report.report(records)


def test_shares_are_of_the_rates_alone_with_the_same_rows() -> None:
    common = {"size": "1.7B", "tail": "published", "groups": 16, "prompt": 128, "tokens": 512, "micro_tokens": 16_384}

    def record(mode: str, rows: int, steps: int, sitting: str = "one", **results: float) -> dict[str, Any]:
        parameters = {**common, "mode": mode, "rows": rows, "steps": steps}
        return {"bench": "sharing", "side": "native", "parameters": parameters, "results": results, "sitting": sitting}

    records = [
        record("training", 0, 0, trained_per_s=100.0),
        record("decode", 128, 0, decoded_per_s=1_000.0),
        record("decode", 256, 0, decoded_per_s=2_000.0),
        record("both", 256, 0, decoded_per_s=1_000.0, trained_per_s=60.0),
        record("turns", 256, 32, "two", decoded_per_s=1_000.0, trained_per_s=48.0),
        record("both", 512, 0, decoded_per_s=1_000.0, trained_per_s=60.0),
    ]
    best, other = sharing.shares(records)
    assert (best["mode"], best["sum"], best["one_sitting"]) == ("both", pytest.approx(1.1), True)
    assert (other["mode"], other["sum"], other["one_sitting"]) == ("turns", pytest.approx(0.98), False)


# -- mismatch ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["native-full", "native-lora"])
def test_the_native_engine_and_the_trainer_agree_on_the_tiny_model(tmp_path: Path, side: str) -> None:
    assert mismatch.main(["--tiny", "--device", "cpu", "--sides", side, "--out", str(tmp_path)]) == 0
    (record,) = read_cells([tmp_path])
    assert record["results"]["tokens"] == 8 * 12
    assert record["results"]["max_abs"] < 1e-4
    assert "Engine against trainer" in report.report([record])


def test_a_step_in_float16_that_is_made_again_is_scored_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stretto.training.trainer.initial_loss_scale", lambda dtype: LossScale(2.0**40))
    given = ["--tiny", "--device", "cpu", "--dtype", "float16", "--sides", "native-full", "--out", str(tmp_path)]
    assert mismatch.main(given) == 0
    (record,) = read_cells([tmp_path])
    assert record["parameters"]["dtype"] == record["results"]["dtype"] == "float16"
    assert record["results"]["tokens"] == 8 * 12
    assert 0 < record["results"]["mean_abs"] < 5e-3
    assert "tiny, float16" in report.report([record])


@pytest.mark.parametrize(("asked", "named"), [(None, None), ("float32", None), ("float16", "float16")])
def test_a_cell_names_a_type_that_is_not_the_usual_one(asked: str | None, named: str | None) -> None:
    given = ["--tiny", "--device", "cpu", *([] if asked is None else ["--dtype", asked])]
    assert mismatch.cell_of("native-full", mismatch.parse(given)).parameters.get("dtype") == named
    options = generation.parse(["decode", "rollout"], None, given)
    for bench in (decode, rollout):
        cells = bench.cells_of("native", "tiny", [0, 1], options)
        assert {cell.parameters.get("dtype") for cell in cells} == {named}
    model = mismatch.model_of(mismatch.parse(given))
    assert model.dtype == {None: torch.float32, "float16": torch.float16}[named]


def test_log_probabilities_that_are_off_show_in_every_figure() -> None:
    found = mismatch.results_of(np.array([0.0, 0.0, 0.0, np.log(2.0)]))
    assert found["mean_abs"] == found["mean"] == pytest.approx(np.log(2.0) / 4)
    assert found["max_abs"] == pytest.approx(np.log(2.0))
    assert found["kl"] == pytest.approx((1 - np.log(2.0)) / 4)


def test_what_vllm_drew_is_scored_under_the_very_same_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands in for vLLM's process: our own engine over the folder that vLLM would have loaded."""
    commands = []

    def draw(command: list[str]) -> None:
        commands.append(command)
        options = mismatch.parse(command[3:])
        model = mismatch.load_model(str(options.folder), torch.float32, torch.device("cpu"))
        _, drawn = mismatch.draw_native(model, "full", options)
        np.savez(
            options.draw_vllm,
            tokens=np.array([each.tokens for each in drawn]),
            logprobs=np.array([each.logprobs for each in drawn]) - 0.25,
        )

    monkeypatch.setattr(mismatch, "_run", draw)
    assert mismatch.main(["--tiny", "--device", "cpu", "--sides", "vllm", "--out", str(tmp_path)]) == 0
    (record,) = read_cells([tmp_path])
    assert record["side"] == "vllm"
    assert record["results"]["mean"] == pytest.approx(0.25, abs=1e-4)
    assert len(commands) == 1


def test_a_batch_that_was_not_scored_whole_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    options = mismatch.parse(["--tiny", "--device", "cpu"])
    trainer, drawn = mismatch.draw_native(mismatch.model_of(options), "full", options)
    own = trainer.update
    monkeypatch.setattr(trainer, "update", lambda batch: own(type(batch)(batch.update, batch.samples[:4])))
    with pytest.raises(RuntimeError, match="48 tokens were scored"):
        mismatch.score(trainer, drawn, options)
    assert isinstance(drawn[0], Completion)


# -- the order of cells ------------------------------------------------------------------------------------------------


def test_the_most_important_cells_come_first_and_filled_contexts_last() -> None:
    options = generation.parse(["decode"], None, ["--lora", "1,3"])
    order = [
        (c.bench, c.parameters["batch"], c.parameters["lora"]) for c in decode.cells_of("vllm", "1.7B", [1, 3], options)
    ]
    assert order[:4] == [("decode", 256, 1), ("decode", 256, 3), ("decode", 512, 1), ("decode", 512, 3)]
    assert [bench for bench, _, _ in order] == ["decode"] * 10 + ["filled"] * 8
