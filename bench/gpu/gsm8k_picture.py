"""Draws the accuracy of GSM8K runs by second and by update, from their cells: pictures of README and docs.

    python -m bench.gpu.gsm8k_picture bench/results/gpu/gsm8k --model qwen2.5-coder-1.5b --out docs/images/gsm8k.svg
    python -m bench.gpu.gsm8k_picture bench/results/gpu/gsm8k/0.5b --model qwen2.5-coder-0.5b \\
        --out docs/images/gsm8k-small.svg
    python -m bench.gpu.gsm8k_picture bench/results/gpu/gsm8k/0.5b bench/results/gpu/gsm8k/0.5b/ages \\
        bench/results/gpu/gsm8k/0.5b/ages/cispo --ages --model qwen2.5-coder-0.5b --out docs/images/gsm8k-ages.svg
    python -m bench.gpu.gsm8k_picture bench/results/gpu/tail/gsm8k --ages --model qwen2.5-coder-0.5b \\
        --title "Qwen2.5-Coder-0.5B-Instruct on GSM8K, answers of up to 4,096 tokens, one H200" \\
        --out docs/images/gsm8k-tail.svg

Writes the picture in light colours, and beside it one in dark colours (`gsm8k-dark.svg`). Every seed is a line. Bars
are standard errors of a score. Seconds count from the first admission: start-up is not in them, on either side.
"""

from __future__ import annotations

import argparse
import json
import math
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

WIDTH, HEIGHT = 980, 330
PANEL, TOP, BOTTOM, LEFT, GAP = 400, 56, 268, 62, 76  # pixels
GRID_STEPS, LEGEND_ROW = 5, 22
NAMES = {  # of the folders that `examples/qwen.py` writes
    "qwen2.5-coder-1.5b": "Qwen2.5-Coder-1.5B-Instruct",
    "qwen2.5-coder-0.5b": "Qwen2.5-Coder-0.5B-Instruct",
}
USUAL_OBJECTIVE = "grpo"  # the objective of `recipes/gsm8k.toml`
NICE = (1, 2, 2.5, 5, 10)
LIGHT = {
    "text": "#1f2328",
    "dim": "#59636e",
    "grid": "#d1d9e0",
    "lines": ("#0969da", "#1a7f37", "#8250df", "#cf222e", "#bf8700", "#59636e", "#bf3989"),
}
DARK = {
    "text": "#f0f6fc",
    "dim": "#9198a1",
    "grid": "#3d444d",
    "lines": ("#4493f8", "#3fb950", "#ab7df8", "#f85149", "#d29922", "#9198a1", "#db61a2"),
}


@dataclass(frozen=True, slots=True)
class Run:
    """The scores of one run."""

    label: str
    problems: int  # that each of its scores is over
    points: Sequence[tuple[float, float, float, float]]  # second, update, score, standard error


def read_runs(folders: Sequence[Path], model: str, *, ages: bool = False) -> list[Run]:
    """Reads the training cells of a model, ours first. With `ages` they are ours alone, by age.

    TRL's cells may name their model's folder `model`. They count if the folders have none of TRL by the model's name.
    """
    paths = [path for folder in folders for path in sorted(folder.glob("gsm8k-*.json"))]
    found = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    cells = [cell for cell in found if cell["bench"] == "gsm8k" and cell["parameters"].get("model") == model]
    if ages:
        ours = [cell for cell in cells if cell["side"] == "native" and _scored(cell)]
        ours.sort(key=lambda cell: cell["results"]["staleness_mean"])
        return [_run(aged_label(cell), cell) for cell in ours]
    if not any(cell["side"] == "trl" for cell in cells):
        cells += [each for each in found if each["bench"] == "gsm8k" and _is_nameless(each)]
    runs = [_run(label_of(cell), cell) for cell in cells if _scored(cell)]
    if len({run.problems for run in runs}) > 1:
        runs = [replace(run, label=f"{run.label}, {run.problems:,} problems") for run in runs]
    return sorted(runs, key=lambda run: run.label.startswith("TRL"))


def _is_nameless(cell: dict[str, Any]) -> bool:
    return bool(cell["side"] == "trl" and cell["parameters"].get("model") == "model")


def label_of(cell: dict[str, Any]) -> str:
    """The name of a line."""
    if cell["side"].startswith("trl"):
        kind = " asynchronous" if cell["side"] == "trl-async" else ""
        return f"TRL {cell['versions']['trl']}{kind}, vLLM {cell['versions']['vllm']}"
    paradigm, bound = cell["parameters"]["paradigm"], cell["parameters"]["staleness"]
    # Until a row for each trajectory was the default, `in_flight = "full"` had one batch of rows.
    rows = cell["parameters"].get("rows", cell["results"].get("rows"))
    few = cell["parameters"].get("in_flight") == "full" and rows is None
    return "Stretto, synchronous" if paradigm == "synchronous" else f"Stretto, K = {bound}{', 512 rows' * few}"


def aged_label(cell: dict[str, Any]) -> str:
    """The name of a line, with the mean age of what was trained on, and the objective if it is not the usual one.

    Runs that differ in anything else get the same name: leave their folders out.
    """
    paradigm, bound = cell["parameters"]["paradigm"], cell["parameters"]["staleness"]
    name = "synchronous" if paradigm == "synchronous" else f"K = {bound}"
    objective = tomllib.loads(cell["results"].get("recipe", "")).get("algorithm", {}).get("type", USUAL_OBJECTIVE)
    other = "" if objective == USUAL_OBJECTIVE else f", {objective}"
    return f"{name}{other}, mean age {cell['results']['staleness_mean']:.3g}"


def _scored(cell: dict[str, Any]) -> list[dict[str, Any]]:
    return [each for each in cell["results"]["evaluations"] if each["score"] is not None]


def _run(label: str, cell: dict[str, Any]) -> Run:
    scored = _scored(cell)
    return Run(label, max(each["num_scored"] for each in scored), [_point(each) for each in scored])


def _point(evaluation: dict[str, Any]) -> tuple[float, float, float, float]:
    score, count = float(evaluation["score"]), int(evaluation["num_scored"])
    error = math.sqrt(score * (1 - score) / count)
    return float(evaluation["elapsed_s"]), float(evaluation["version"]), score, error


def picture(runs: Sequence[Run], colours: dict[str, Any], title: str) -> str:
    """Returns the picture as SVG. Raises `ValueError` if there are more names of lines than colours."""
    labels = list(dict.fromkeys(run.label for run in runs))
    if len(labels) > len(colours["lines"]):
        raise ValueError(f"{len(labels)} names of lines, but {len(colours['lines'])} colours: leave folders out")
    problems = " or ".join(f"{count:,}" for count in sorted({run.problems for run in runs}))
    scores = [value for run in runs for _, _, score, error in run.points for value in (score - error, score + error)]
    low, high = math.floor(min(scores) * 20) / 20, math.ceil(max(scores) * 20) / 20
    placed = legend_places(labels)
    height = HEIGHT + LEGEND_ROW * placed[-1][1]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="system-ui, sans-serif" '
        f'role="img" aria-label="{title}">',
        _text(LEFT, 24, title, colours["text"], size=16, weight=600),
    ]
    for number, name in enumerate(("seconds of training", "updates")):
        left = LEFT + number * (PANEL + GAP)
        most = max(point[number] for run in runs for point in run.points)
        parts += _panel(left, name, most, (low, high), colours)
        parts.append(_text(left, TOP - 10, f"accuracy on {problems} held-out problems, temperature 1", colours["dim"]))
        for run in runs:
            colour = colours["lines"][labels.index(run.label)]
            parts += _line(run, number, left, most, (low, high), colour)
    for place, (label, (x, row)) in enumerate(zip(labels, placed, strict=True)):
        colour, y = colours["lines"][place], HEIGHT - 9 + row * LEGEND_ROW
        parts.append(f'<rect x="{x}" y="{y - 7}" width="14" height="4" fill="{colour}"/>')
        parts.append(_text(x + 20, y, label, colours["text"], size=13))
    return "\n".join([*parts, "</svg>", ""])


def legend_places(labels: Sequence[str]) -> list[tuple[int, int]]:
    """The place of each entry of the legend: pixels from the left, and its row."""
    places, x, row = list[tuple[int, int]](), LEFT, 0
    for label in labels:
        width = max(210, 40 + 7 * len(label))  # a letter of size 13 has less than 7 on average
        if x > LEFT and x + width > WIDTH:
            x, row = LEFT, row + 1
        places.append((x, row))
        x += width
    return places


def _panel(left: float, name: str, most: float, scale: tuple[float, float], colours: dict[str, Any]) -> Iterator[str]:
    """The grid of one panel, with its numbers."""
    low, high = scale
    for step in range(round((high - low) / 0.05) + 1):
        value = low + 0.05 * step
        y = _up(value, scale)
        yield f'<line x1="{left}" y1="{y:.1f}" x2="{left + PANEL}" y2="{y:.1f}" stroke="{colours["grid"]}"/>'
        yield _text(left - 8, y + 4, f"{value:.2f}", colours["dim"], anchor="end")
    for value in ticks(most):
        yield _text(left + PANEL * value / most, BOTTOM + 18, f"{value:g}", colours["dim"], anchor="middle")
    yield _text(left + PANEL / 2, BOTTOM + 36, name, colours["dim"], anchor="middle")


def ticks(most: float) -> list[float]:
    """Round numbers from 0 to `most`, about `GRID_STEPS` of them."""
    raw = most / GRID_STEPS
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(nice * power for nice in NICE if nice * power >= raw)
    return [step * number for number in range(int(most / step) + 1)]


def _line(run: Run, axis: int, left: float, most: float, scale: tuple[float, float], colour: str) -> Iterable[str]:
    places = [(left + PANEL * point[axis] / most, point[2], point[3]) for point in run.points]
    for x, score, error in places:
        top, bottom = _up(score + error, scale), _up(score - error, scale)
        yield f'<line x1="{x:.1f}" y1="{top:.1f}" x2="{x:.1f}" y2="{bottom:.1f}" stroke="{colour}" opacity="0.45"/>'
    path = " ".join(f"{x:.1f},{_up(score, scale):.1f}" for x, score, _ in places)
    yield f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2.2"/>'
    for x, score, _ in places:
        yield f'<circle cx="{x:.1f}" cy="{_up(score, scale):.1f}" r="3.2" fill="{colour}"/>'


def _up(value: float, scale: tuple[float, float]) -> float:
    low, high = scale
    return BOTTOM - (BOTTOM - TOP) * (value - low) / (high - low)


def _text(
    x: float, y: float, text: str, colour: str, *, size: int = 12, anchor: str = "start", weight: int = 400
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{colour}" text-anchor="{anchor}" '
        f'font-weight="{weight}">{text}</text>'
    )


def title_of(model: str) -> str:
    """The title for a model's folder."""
    return f"{NAMES.get(model, model)} on GSM8K, LoRA, one H200"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cells", type=Path, nargs="+", help="the folders of the cells")
    parser.add_argument("--ages", action="store_true", help="our runs alone, with the mean age of what they train on")
    parser.add_argument("--model", required=True, help="the name of the model's folder")
    parser.add_argument("--title", help="default: by `--model`")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    runs = read_runs(options.cells, options.model, ages=options.ages)
    if not runs:
        parser.error(f"no cell of `{options.model}` in {', '.join(map(str, options.cells))}")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    for path, colours in ((options.out, LIGHT), (options.out.with_stem(f"{options.out.stem}-dark"), DARK)):
        path.write_text(picture(runs, colours, options.title or title_of(options.model)), encoding="utf-8")
        print(path)


if __name__ == "__main__":
    main()
