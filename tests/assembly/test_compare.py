"""What `compare` makes of the summaries of its runs."""

from __future__ import annotations

import io
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from stretto.assembly import compare
from stretto.assembly.compare import _add_time_to_target, comparison
from stretto.errors import RecipeError, RunError, StrettoError

RECIPE = '[model]\npath = "tiny"\n[task]\ntype = "countdown-chain"\n'


def row(paradigm: str, *scores: tuple[float, float | None]) -> dict[str, Any]:
    evaluations = [{"elapsed_s": at, "score": score} for at, score in scores]
    return {
        "paradigm": paradigm,
        "evaluations": evaluations,
        "eval_before": evaluations[0]["score"],
        "eval_after": evaluations[-1]["score"],
    }


def test_the_target_is_nine_tenths_of_the_way_to_the_best_unless_it_is_given() -> None:
    rows = [row("drop", (0.0, 0.0), (5.0, None), (9.0, 0.5)), row("partial", (0.0, 0.0), (4.0, 0.9), (8.0, 1.0))]
    _add_time_to_target(rows, None)
    assert [(each["target"], each["seconds_to_target"]) for each in rows] == [(0.9, None), (0.9, 4.0)]
    _add_time_to_target(rows, 0.5)
    assert [each["seconds_to_target"] for each in rows] == [9.0, 4.0]


def test_without_a_score_there_is_no_target() -> None:
    rows = [row("drop", (0.0, None), (9.0, None))]
    _add_time_to_target(rows, None)
    assert (rows[0]["target"], rows[0]["seconds_to_target"]) == (None, None)


def test_greedy_scores_have_a_column_if_a_run_has_them() -> None:
    rest = {
        "staleness_bound": 2, "tokens_per_second": 123_456.0, "wall_seconds": 1234.5, "trainer_idle_share": 0.5,
        "rollout_idle_share": 0.5, "row_idle_share": 0.5, "dropped_share": 0.125, "length_ratio": 1.0,
        "staleness": {"mean": 1.25, "max": 2}, "mixed_version_share": 0.25,
    }  # fmt: skip
    rows = [row("synchronous", (0.0, 0.25), (9.0, 0.5)) | rest, row("multi-version", (0.0, 0.25), (9.0, 0.5)) | rest]
    _add_time_to_target(rows, None)

    def table() -> list[str]:
        out = io.StringIO()
        Console(file=out, width=compare.TABLE_WIDTH).print(compare.comparison_table(rows))
        return out.getvalue().splitlines()

    assert "greedy" not in "".join(table())
    rows[1] |= {"eval_before_greedy": 0.375, "eval_after_greedy": 0.625}  # the other is of an earlier release
    lines = table()
    (header,) = [line for line in lines if "paradigm " in line]
    assert header.split("┃")[-2].strip() == "greedy", "all columns fit into one line"
    assert [line.split("│")[-3:-1] for line in lines if "0.25 -> 0.50" in line] == [
        [" 0.25 -> 0.50 ", "            - "],
        [" 0.25 -> 0.50 ", " 0.38 -> 0.62 "],
    ]


@pytest.mark.parametrize(
    ("status", "error"), [(130, compare.ComparisonStoppedError), (2, RunError), (-15, RunError), (-9, RunError)]
)
def test_a_run_that_did_not_come_to_its_end_is_never_tabled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int, error: type[Exception]
) -> None:
    (tmp_path / "recipe.toml").write_text(RECIPE)
    monkeypatch.setattr(compare, "_train", lambda words: status)
    rows = comparison(
        tmp_path / "recipe.toml", [], paradigms=["partial"], folder=tmp_path / "out", say=lambda text: None
    )
    with pytest.raises(error, match="under `partial`"):
        next(rows)
    assert issubclass(error, StrettoError), "the command line prints it without a traceback"
    assert not (tmp_path / "out" / "compare.json").exists()


@pytest.mark.parametrize("status", [0, 130])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_what_stops_compare_alone_stops_the_run_that_it_waits_for(number: signal.Signals, status: int) -> None:
    child = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        f"signal.signal(signal.SIGTERM, lambda *_: sys.exit({status}))\n"  # 0: its last update was done
        "print('ready', flush=True)\n"
        "time.sleep(60)\n"
    )
    parent = (
        "import signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from stretto.assembly.compare import _train\n"
        f"sys.exit(_train([sys.executable, '-c', {child!r}]) == 130)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    assert process.wait(20) == 1, "it was told that the run stopped, and begins no other"
    process.communicate()


SUMMARY = {"evaluations": [], "eval_before": None, "eval_after": None}


def test_each_engine_has_a_row_for_each_paradigm_that_it_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "recipe.toml").write_text(RECIPE + "[model.lora]\nrank = 4\n")
    asked: list[tuple[str, str, str]] = []

    def run(recipe: Any, folder: Path, *_: Any) -> dict[str, Any]:
        asked.append((recipe.rollout.paradigm, recipe.engine.type, folder.name))
        return dict(SUMMARY)

    monkeypatch.setattr(compare, "_run", run)
    monkeypatch.setattr("stretto.assembly.check.installed_release", lambda: "0.32.0")

    def rows(**options: Any) -> list[tuple[str, str]]:
        found = compare.compare(tmp_path / "recipe.toml", folder=tmp_path / "out", **options)
        return [(each["paradigm"], each["engine"]) for each in found]

    both = rows(engines=["native", "vllm"])
    assert len(both) == 9, "vLLM does not serve `partial`"
    assert ("partial", "native") in both
    assert ("partial", "vllm") not in both
    assert asked[-1] == ("multi-version", "vllm", "multi-version-vllm")
    assert len(rows()) == 5, "with the engine of the recipe"
    assert asked[-1] == ("multi-version", "native", "multi-version")
    with pytest.raises(RecipeError, match=r"`rollout.paradigm = \"partial\"` is refused"):
        rows(engines=["vllm"], paradigms=["partial"])
    with pytest.raises(RecipeError, match="`--engines` names `sglang`; known: native, vllm"):
        rows(engines=["sglang"])


@pytest.mark.parametrize(
    ("release", "path", "why"), [(None, "tiny", "needs vLLM, which is not"), ("0.32.0", "tiny-moe", "a mixture of")]
)
def test_an_engine_that_cannot_run_is_refused_before_any_run_begins(
    release: str | None, path: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "recipe.toml").write_text(RECIPE.replace('"tiny"', f'"{path}"') + "[model.lora]\nrank = 4\n")
    monkeypatch.setattr("stretto.assembly.check.installed_release", lambda: release)
    monkeypatch.setattr(compare, "_train", lambda words: pytest.fail("a run begins"))
    with pytest.raises(RecipeError, match=why):
        compare.compare(tmp_path / "recipe.toml", folder=tmp_path / "out", engines=["native", "vllm"])


def test_the_run_that_begins_is_named_with_its_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "recipe.toml").write_text(RECIPE)
    monkeypatch.setattr(compare, "_train", lambda words: 2)
    said: list[str] = []
    rows = comparison(
        tmp_path / "recipe.toml", [], paradigms=["drop"], engines=["native"], folder=tmp_path / "out", say=said.append
    )
    with pytest.raises(RunError, match="the run under `drop-native` ended with status 2"):
        next(rows)
    assert said == [f"drop-native: begins in {tmp_path / 'out' / 'drop-native'}"]


def test_a_comparison_of_engines_has_a_column_for_them() -> None:
    rest = {
        "staleness_bound": 2, "tokens_per_second": 123_456.0, "wall_seconds": 1234.5, "trainer_idle_share": 0.5,
        "rollout_idle_share": 0.5, "row_idle_share": 0.5, "dropped_share": 0.125, "length_ratio": 1.0,
        "staleness": {"mean": 1.25, "max": 2}, "mixed_version_share": 0.25, "target": None, "seconds_to_target": None,
    }  # fmt: skip
    rows = [row("synchronous", (0.0, 0.25), (9.0, 0.5)) | rest | {"engine": name} for name in ("native", "vllm")]

    def headers(of: Any) -> list[str]:
        return [str(column.header) for column in compare.comparison_table(of).columns]

    assert headers(rows)[:2] == ["paradigm", "engine"]
    assert headers(rows[:1])[:2] == ["paradigm", "K"]


def test_a_comparison_can_be_run_from_any_thread() -> None:
    with ThreadPoolExecutor(1) as other:
        assert other.submit(compare._train, [sys.executable, "-c", "raise SystemExit(3)"]).result() == 3


def test_a_run_that_failed_is_told_with_the_command_that_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "recipe.toml").write_text(RECIPE)
    monkeypatch.setattr(compare, "_train", lambda words: 2)
    with pytest.raises(RunError, match=r"`drop` ended with status 2(.|\n)*continue with\n.*--paradigms drop --out"):
        compare.compare_from_command_line(
            tmp_path / "recipe.toml", [], paradigms=["drop"], folder=tmp_path / "out", target=None
        )


def test_a_folder_that_cannot_be_written_is_refused_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text(RECIPE)
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"nothing can be written to .*choose another `--out`"):
        compare.compare_from_command_line(
            tmp_path / "recipe.toml", [], paradigms=["drop"], folder=tmp_path / "file" / "out", target=None
        )


def test_an_engine_that_is_missing_is_refused_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "recipe.toml").write_text(RECIPE + "[model.lora]\nrank = 4\n")
    monkeypatch.setattr("stretto.assembly.check.installed_release", lambda: None)
    monkeypatch.setattr(compare, "_train", lambda words: pytest.fail("a run began"))
    with pytest.raises(RecipeError, match="needs vLLM, which is not installed"):
        compare.compare(tmp_path / "recipe.toml", engines=["native", "vllm"], folder=tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("lora", ["[model.lora]\nrank = 4\n", ""])
def test_a_model_that_an_engine_cannot_serve_is_refused_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lora: str
) -> None:
    (tmp_path / "recipe.toml").write_text(RECIPE.replace('"tiny"', '"tiny-moe"') + lora)
    monkeypatch.setattr("stretto.assembly.check.installed_release", lambda: "0.32.0")
    monkeypatch.setattr(compare, "_train", lambda words: pytest.fail("a run began"))
    with pytest.raises(RecipeError, match="a mixture of experts"):
        compare.compare(tmp_path / "recipe.toml", engines=["native", "vllm"], folder=tmp_path / "out")


def test_an_engine_whose_runs_are_all_finished_is_not_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "recipe.toml").write_text(RECIPE + "[model.lora]\nrank = 4\n")
    monkeypatch.setattr("stretto.assembly.check.installed_release", lambda: None)
    monkeypatch.setattr(compare, "standing", lambda folder: "finished")
    monkeypatch.setattr(compare, "_refuse_folder", lambda recipe, folder: None)
    monkeypatch.setattr(compare, "_summary", lambda folder: dict(SUMMARY))
    found = compare.compare(
        tmp_path / "recipe.toml", engines=["vllm"], paradigms=["synchronous"], folder=tmp_path / "out"
    )
    assert [each["engine"] for each in found] == ["vllm"]
