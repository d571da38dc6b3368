"""Draws the pictures of the concepts: `python -m docs.tools.pictures` writes them to `docs/images`, light and dark.

Schedules come from the real scheduler (`schedule.py`), figures from `bench/results`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from docs.tools.drawing import DARK, LIGHT, Canvas, Palette
from docs.tools.schedule import Bar, Schedule, schedule

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "docs" / "images"

# Seconds of each trajectory, two in a group: most are short, a few are long.
LENGTHS = [
    2, 3, 4, 11, 2, 3, 3, 2, 4, 3, 2, 2, 3, 9, 2, 4, 3, 3, 2, 6, 3, 2, 4, 3, 2, 3, 3, 2, 2, 5, 3, 3, 2, 2, 4, 4,
]  # fmt: skip
SEATED = {5: 3, 6: 4, 7: 3}  # outstanding groups by version, in the picture of seats: B = 4, K = 2, next update 7
BATCH, GROUP, UPDATE_S = 2, 2, 2.0
LEFT = 118.0  # where time begins


def example(paradigm: str, updates: int, staleness: int | None = 2) -> Schedule:
    """The schedule of one paradigm on these lengths. A group at its deadline is waited for, or dropped."""
    chosen = staleness if paradigm in ("partial", "drop", "multi-version") else None
    in_flight = 4 if chosen is not None else None
    return schedule(
        paradigm, [float(length) for length in LENGTHS * 3], batch=BATCH, group=GROUP, staleness=chosen,
        updates=updates, update_s=UPDATE_S, in_flight=in_flight,
    )  # fmt: skip


def lanes(
    canvas: Canvas, made: Schedule, top: float, *, until: float, scale: float, height: float = 20.0, labels: bool = True
) -> float:
    """Draws the rows of the engine and the trainer below `top`. Returns where they end."""
    palette, step = canvas.palette, height + 4
    rows = 1 + max(bar.row for bar in made.bars.values())
    bottom = top + rows * step + 6
    for version, at in made.published.items():
        if 0 < at < until:
            x = LEFT + at * scale
            canvas.line([(x, top - 4), (x, bottom + height)], palette.line, dashed=True, width=1)
            if labels:
                canvas.text(x, top - 9, f"version {version}", size=11, fill=palette.muted, anchor="middle")
    canvas.text(14, top + rows * step / 2, "rollout", bold=True)
    for bar in made.bars.values():
        if bar.start < until:
            _bar(canvas, bar, top + bar.row * step, until=until, scale=scale, height=height)
    canvas.text(14, bottom + height / 2 + 4, "trainer", bold=True)
    for update, start, end in made.updates:
        if start < until:
            x, width = LEFT + start * scale, (min(end, until) - start) * scale
            canvas.rect(x, bottom, width, height, palette.box, palette.text)
            canvas.text(x + width / 2, bottom + height / 2 + 4, f"update {update}" if labels else str(update), size=11,
                        anchor="middle")  # fmt: skip
    return bottom + height


def _bar(canvas: Canvas, bar: Bar, y: float, *, until: float, scale: float, height: float) -> None:
    palette = canvas.palette
    end = min(bar.end if bar.end is not None else until, until)
    edges = [*(at for at, _ in bar.pieces), end]
    for (start, version), stop in zip(bar.pieces, edges[1:], strict=True):
        if start >= end:
            continue
        fill = palette.page if bar.dropped else palette.series[version % len(palette.series)]
        stroke = palette.bad if bar.dropped else palette.page
        width = (min(stop, end) - start) * scale
        canvas.rect(LEFT + start * scale, y, width, height, fill, stroke, dashed=bar.dropped)
        label = str(version) if width < 150 or len(bar.pieces) > 1 else f"{version}, due by update {bar.deadline}"
        if bar.dropped:
            label = "dropped" if width > 50 else ""
        canvas.text(LEFT + start * scale + 6, y + height / 2 + 4, label, size=11,
                    fill=palette.bad if bar.dropped else palette.on_series)  # fmt: skip


def versions(palette: Palette) -> Canvas:
    """Four versions side by side: the long trajectory of version 0 ends under version 0."""
    made, until, scale = example("multi-version", updates=7, staleness=3), 24.0, 33.0
    canvas = Canvas(920, 236, "Rollout and trainer over time, multi-version with K = 3", palette)
    end = lanes(canvas, made, 42, until=until, scale=scale)
    canvas.text(LEFT, end + 24, "A bar is a trajectory, its number and colour are its version. A dotted line is a new "
                "version: what runs keeps its own.", size=12, fill=palette.muted)  # fmt: skip
    return canvas


def paradigms(palette: Palette) -> Canvas:
    """The same trajectories under five paradigms."""
    canvas = Canvas(920, 706, "The same trajectories under five paradigms", palette)
    words = {
        "synchronous": "waits for the whole batch, then trains, then starts again",
        "one-step-off": "trains on the last batch while the next one is sampled; each batch waits for its longest",
        "partial": "continues running trajectories under the new weights: one bar, several colours",
        "drop": "discards what would be too old: the long ones",
        "multi-version": "keeps old versions until their trajectories are done",
    }
    top = 30.0
    for name, meaning in words.items():
        made = example(name, updates=12)
        canvas.text(14, top - 8, name, bold=True, code=True)
        canvas.text(150, top - 8, meaning, size=12, fill=palette.muted)
        end = lanes(canvas, made, top + 4, until=30.0, scale=26.0, height=12, labels=False)
        done = sum(finished <= 30.0 for _, _, finished in made.updates)
        canvas.text(906, top - 8, f"{done} updates in this time", size=12, anchor="end", fill=palette.accent)
        top = end + 34
    canvas.height = top - 22
    return canvas


def seats(palette: Palette) -> Canvas:
    """Admission as seats: each update has B of them, and a group needs one no later than its deadline."""
    canvas = Canvas(920, 268, "Outstanding groups and the seats of the next updates", palette)
    waiting = [version for version, count in SEATED.items() for _ in range(count)]
    for place, update in enumerate((7, 8, 9)):
        taken = waiting[4 * place : 4 * place + 4]
        x = 40 + place * 190
        canvas.text(x + 70, 34, f"update {update}", bold=True, anchor="middle")
        for seat in range(4):
            y = 46 + seat * 40
            if seat < len(taken):
                version = taken[seat]
                canvas.rect(x, y, 140, 32, palette.series[version % 5], palette.page)
                canvas.text(x + 70, y + 21, f"version {version}, due {version + 2}", size=12, anchor="middle",
                            fill=palette.on_series)  # fmt: skip
            else:
                canvas.rect(x, y, 140, 32, "none", palette.line, dashed=True)
                canvas.text(x + 70, y + 21, "free", size=12, anchor="middle", fill=palette.muted)
    words = (
        "Every group sits no later than its deadline (its version + 2): all of them can be trained in time.",
        "The two free seats are what admission may still start. A third new group has to wait.",
    )
    for line, text in enumerate(words):
        canvas.text(40, 232 + 18 * line, text, size=12, fill=palette.muted)
    canvas.rect(640, 86, 150, 32, palette.series[7 % 5], palette.accent)
    canvas.text(715, 107, "a new group, due 9", size=12, anchor="middle", fill=palette.on_series)
    canvas.line([(640, 112), (572, 140)], palette.line, arrow=True)
    canvas.text(640, 140, "starts: there is a seat", size=12, fill=palette.good)
    return canvas


def age(palette: Palette) -> Canvas:
    """Speed against mean age, from the simulation of `bench.gpu.simulate`."""
    cells = json.loads((ROOT / "bench" / "results" / "simulated_published_16.json").read_text())
    canvas = Canvas(920, 400, "Mean age of the data against the share of the ideal speed", palette)
    left, bottom, width, height = 74.0, 340.0, 560.0, 300.0

    def place(mean_age: float, share: float) -> tuple[float, float]:
        return left + width * mean_age / 5, bottom - height * share

    for percent in (0, 25, 50, 75, 100):
        y = bottom - height * percent / 100
        canvas.line([(left, y), (left + width, y)], palette.line, width=0.5)
        canvas.text(left - 8, y + 4, f"{percent} %", size=11, anchor="end", fill=palette.muted)
    for mean in range(6):
        canvas.text(left + width * mean / 5, bottom + 18, str(mean), size=11, anchor="middle", fill=palette.muted)
    canvas.text(left + width / 2, bottom + 40, "mean age of the trained data, in updates", size=12, anchor="middle")
    canvas.text(left, 26, "speed, share of an engine that is always full", size=12)
    chosen = {"synchronous": (0, 0), "one-step-off": (0, 1), "multi-version": (2, 0)}
    curves: dict[int, list[tuple[float, float, float]]] = {}
    for cell in cells:
        options, results = cell["parameters"], cell["results"]
        if options["paradigm"] not in chosen:
            continue
        mean, share = results["staleness_mean"], results["ideal_share"]
        if options["paradigm"] == "multi-version":
            curves.setdefault(options["staleness"], []).append((mean, share, options["in_flight"]))
            continue
        x, y = place(mean, share)
        canvas.circle(x, y, 5, palette.muted)
        canvas.text(x + 10, y + 4 + (14 if options["paradigm"] == "one-step-off" else 0), options["paradigm"], size=12,
                    code=True)  # fmt: skip
    colours = {4: palette.series[1], 8: palette.series[0]}
    for staleness, points in sorted(curves.items()):
        points.sort()
        colour = colours[staleness]
        canvas.line([place(mean, share) for mean, share, _ in points], colour, width=3)
        for age, share, in_flight in points:
            x, y = place(age, share)
            canvas.circle(x, y, 6, colour)
            below = staleness == 4
            canvas.text(x, y + (22 if below else -12), f"{in_flight:g} batches", size=11, anchor="middle")
        x, y = place(*points[-1][:2])
        canvas.text(x + 14, y + 5, f"K = {staleness}", bold=True)
    note = ["Batches: `in_flight`, groups that are", "started and not yet trained.", "", "More in flight: older data,",
            "fuller engine.", "", "More K: the same age, but the trainer", "waits less for the longest.", "",
            "16 groups of 8, lengths up to 16,384", "tokens, simulated with the real", "scheduler."]  # fmt: skip
    for number, text in enumerate(note):
        canvas.text(668, 60 + number * 20, text.replace("`", ""), size=12, fill=palette.muted)
    return canvas


def proof(palette: Palette) -> Canvas:
    """The records of a run as a chain, and which command checks which link."""
    canvas = Canvas(920, 330, "What a run records, and which command proves it", palette)
    boxes = [
        ("engine", ["tokens,", "log-probabilities,", "checksum of the weights"]),
        ("reward", ["a number for", "each completion"]),
        ("batch", ["members and order,", "on disk before", "training begins"]),
        ("update", ["digest of its samples", "and of the update", "before it"]),
        ("version", ["checksum of the", "weights that it made"]),
    ]
    for place, (name, lines) in enumerate(boxes):
        x = 14 + place * 182
        canvas.rect(x, 30, 164, 92, palette.box, palette.line, radius=8)
        canvas.text(x + 82, 54, name, bold=True, anchor="middle", size=15)
        for number, text in enumerate(lines):
            canvas.text(x + 82, 74 + number * 17, text, size=12, anchor="middle", fill=palette.muted)
        if place:
            canvas.line([(x - 18, 76), (x - 2, 76)], palette.line, arrow=True)
    spans = [
        ("verify", 0, 4, "the records agree with one another and with the three laws", palette.accent),
        ("verify --recompute N", 0, 0, "the version really gives these log-probabilities", palette.good),
        ("replay", 2, 4, "these batches really give these weights", palette.good),
    ]
    for number, (command, first, last, meaning, colour) in enumerate(spans):
        y = 148 + number * 46
        x, end = 14 + first * 182, 14 + last * 182 + 164
        canvas.line([(x, y - 8), (x, y), (end, y), (end, y - 8)], colour, width=2)
        canvas.text(x + 2, y + 19, command, code=True, bold=True)
        canvas.text(x + 12 + 8.2 * len(command), y + 19, meaning, size=12, fill=palette.muted)
    canvas.text(14, 300, "not proved", bold=True, fill=palette.bad)
    unproved = "that the reward measures what you want, that the data is right, that the model became better"
    canvas.text(100, 300, unproved, size=12, fill=palette.muted)
    return canvas


PICTURES: dict[str, Callable[[Palette], Canvas]] = {
    "versions": versions,
    "paradigms": paradigms,
    "seats": seats,
    "age": age,
    "proof": proof,
}


def write(folder: Path = IMAGES) -> None:
    """Writes all pictures."""
    for name, draw in PICTURES.items():
        for palette in (LIGHT, DARK):
            draw(palette).save(folder, name)


if __name__ == "__main__":
    write()
