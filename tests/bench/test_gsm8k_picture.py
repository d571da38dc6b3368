"""The picture of the GSM8K runs: what the README shows is what the committed cells say."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from bench.gpu.gsm8k_picture import DARK, HEIGHT, LIGHT, WIDTH, main, picture, read_runs, ticks, title_of

ROOT = Path(__file__).parents[2]
CELLS, IMAGES = ROOT / "bench" / "results" / "gpu" / "gsm8k", ROOT / "docs" / "images"
TITLE = "Qwen2.5-Coder-1.5B-Instruct on GSM8K, LoRA, one H200"


SMALL = CELLS / "0.5b"
AGES = [SMALL, SMALL / "ages", SMALL / "ages" / "cispo"]


TAIL = CELLS.parent / "tail" / "gsm8k"
TAIL_TITLE = "Qwen2.5-Coder-0.5B-Instruct on GSM8K, answers of up to 4,096 tokens, one H200"


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gsm8k", [CELLS, "--model", "qwen2.5-coder-1.5b"]),
        ("gsm8k-small", [SMALL, "--model", "qwen2.5-coder-0.5b"]),
        ("gsm8k-ages", [*AGES, "--ages", "--model", "qwen2.5-coder-0.5b"]),
        ("gsm8k-tail", [TAIL, "--ages", "--model", "qwen2.5-coder-0.5b", "--title", TAIL_TITLE]),
    ],
)
def test_the_committed_pictures_are_those_of_the_committed_cells(name, options, tmp_path):
    main([*map(str, options), "--out", str(tmp_path / f"{name}.svg")])
    made = sorted(path.name for path in tmp_path.iterdir())
    assert made == [f"{name}-dark.svg", f"{name}.svg"]
    for file in made:
        assert (tmp_path / file).read_text(encoding="utf-8") == (IMAGES / file).read_text(encoding="utf-8")


def test_the_title_is_that_of_the_model():
    assert title_of("qwen2.5-coder-1.5b") == TITLE
    assert title_of("mine") == "mine on GSM8K, LoRA, one H200"


@pytest.mark.parametrize("folders", [[SMALL], AGES])
@pytest.mark.parametrize("colours", [LIGHT, DARK])
def test_entries_of_the_legend_neither_overlap_nor_leave_the_picture(colours, folders):
    runs = read_runs(folders, "qwen2.5-coder-0.5b", ages=len(folders) > 1)
    labels = {run.label for run in runs}
    tree = ElementTree.fromstring(picture(runs, colours, "title"))
    texts = [each for each in tree.iter() if each.text in labels]
    assert len(texts) == len(labels)
    assert len({each.get("fill") for each in tree.iter() if each.tag.endswith("rect")}) >= len(labels)
    height = float(tree.get("viewBox").split()[-1])
    for _, row in itertools.groupby(texts, key=lambda each: float(each.get("y"))):
        places = [(float(each.get("x")), float(each.get("x")) + 7 * len(each.text)) for each in row]
        assert all(end < begin for (_, end), (begin, _) in itertools.pairwise(places))
        assert places[-1][1] < WIDTH
    assert all(HEIGHT - 9 <= float(each.get("y")) < height for each in texts)


def test_every_run_is_a_line_in_both_panels_and_ours_comes_first():
    runs = read_runs([CELLS], "qwen2.5-coder-1.5b")
    assert runs[0].label == "Stretto, K = 2, 1,319 problems"
    assert runs[-1].label.startswith("TRL")
    tree = ElementTree.fromstring(picture(runs, LIGHT, TITLE))
    lines = [each for each in tree.iter() if each.tag.endswith("polyline")]
    assert len(lines) == 2 * len(runs)


def test_by_age_are_our_runs_alone_the_freshest_first():
    labels = [run.label for run in read_runs(AGES, "qwen2.5-coder-0.5b", ages=True)]
    assert labels[0] == "synchronous, mean age 0"
    assert labels[-2:] == ["K = 8, cispo, mean age 7.4", "K = 8, mean age 7.64"]


def write_cell(folder: Path, side: str, model: str, score: float) -> None:
    evaluation = {"score": score, "num_scored": 512, "elapsed_s": 0.0, "version": 0}
    parameters = {"model": model, "paradigm": "synchronous", "staleness": 0}
    versions = {"trl": "1.0", "vllm": "1.0"}
    cell = {"bench": "gsm8k", "side": side, "parameters": parameters, "versions": versions}
    text = json.dumps({**cell, "results": {"evaluations": [evaluation]}})
    (folder / f"gsm8k-{side}-model={model}.json").write_text(text, encoding="utf-8")


def test_cells_of_trl_without_a_name_count_only_if_no_other_is_the_models(tmp_path):
    write_cell(tmp_path, "native", "small", 0.25)
    write_cell(tmp_path, "native", "model", 0.3)
    write_cell(tmp_path, "trl", "model", 0.5)
    assert [run.points[0][2] for run in read_runs([tmp_path], "small")] == [0.25, 0.5]
    write_cell(tmp_path, "trl", "large", 0.75)
    assert [run.points[0][2] for run in read_runs([tmp_path], "small")] == [0.25, 0.5]
    assert [run.points[0][2] for run in read_runs([tmp_path], "large")] == [0.75]
    write_cell(tmp_path, "trl", "small", 0.625)
    assert [run.points[0][2] for run in read_runs([tmp_path], "small")] == [0.25, 0.625]


def test_trls_two_trainers_have_lines_of_their_own(tmp_path):
    for side in ("trl-async", "trl", "native"):
        write_cell(tmp_path, side, "small", 0.5)
    labels = [run.label for run in read_runs([tmp_path], "small")]
    assert labels == ["Stretto, synchronous", "TRL 1.0 asynchronous, vLLM 1.0", "TRL 1.0, vLLM 1.0"]


@pytest.mark.parametrize(
    ("most", "expected"),
    [(640.7, [0, 200, 400, 600]), (60, [0, 20, 40, 60]), (3, [0, 1, 2, 3]), (24, [0, 5, 10, 15, 20])],
)
def test_ticks_are_round_numbers(most, expected):
    assert ticks(most) == expected
