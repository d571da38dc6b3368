"""A run with several rewards, from Python: recorded by part, shown everywhere, resumed with the same weights."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from api_cases import ROWS, Stops, letters, tables
from run_cases import assert_verifies

import stretto
from stretto.cli import main
from stretto.errors import RecipeError, RunError
from stretto.observe.trackers.sample_rows import Samples
from stretto.view.details import trajectory
from stretto.view.pieces import Pieces
from stretto.view.runs import RunSource


def of_notebook() -> list[Any]:
    """Returns rewards that no other process can import: one of single completions, one of batches, a measurement."""

    def vowels(prompt: str, completion: str, answer: int) -> float:
        return letters(prompt, completion, answer)

    def digits(completions: list[str], **columns: list[Any]) -> list[float | None]:
        return [
            float(any(map(str.isdigit, text))) if place % 2 == 0 else None for place, text in enumerate(completions)
        ]

    async def length(completion: str) -> float:
        return len(completion)

    return [vowels, stretto.Reward(digits, weight=0.5, name="has digits"), stretto.Reward(length, weight=0.0)]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, model: Path) -> stretto.Run:
    folder = tmp_path_factory.mktemp("several") / "run"
    return stretto.train(tables(model), out=folder, reward=of_notebook(), data=ROWS, progress=False)


def test_every_part_is_in_metrics_samples_and_evaluations(run: stretto.Run) -> None:
    assert_verifies(run.folder)
    line = run.metrics()[-1]
    assert line["reward/length"] > 1
    samples = list(run.samples(update=-1))
    for row in samples:
        parts = [row["reward/vowels"], 0.5 * (row["reward/has digits"] or 0.0)]
        assert row["reward"] == pytest.approx(sum(parts))
    found = [row["reward/has digits"] for row in samples if row["reward/has digits"] is not None]
    assert line["reward/has digits"] == pytest.approx(sum(found) / len(found))
    assert {"reward/vowels", "reward/length"} <= run.evaluations()[0].keys()
    task = tomllib.loads((run.folder / "config.toml").read_text())["task"]
    assert [(each["name"], each["weight"]) for each in task["rewards"]] == [
        ("vowels", 1.0), ("has digits", 0.5), ("length", 0.0)
    ]  # fmt: skip
    assert all(each["function"].startswith("python:") for each in task["rewards"])


def test_every_part_is_in_the_tables_of_trackers(run: stretto.Run) -> None:
    tables = Samples(run.folder, 4)
    rows = tables.rows(1)
    tables.close()
    assert len(rows) == 4
    samples = {row["trajectory"]: row for row in run.samples(update=1)}
    parts = ["reward/vowels", "reward/has digits", "reward/length"]
    for row in rows:
        names = list(row)
        assert names[names.index("reward") + 1 : names.index("tokens")] == parts
        sample = samples[row["trajectory"]]
        assert [row[name] for name in parts] == [sample[name] for name in parts]


def test_every_part_is_shown(run: stretto.Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(run.folder), "--update", "1", "--samples", "2"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "(1 x vowels " in said
    assert "+ 0 x length " in said
    source = RunSource(run.folder)
    curves = source.curves()
    assert curves["rewards"] == ["vowels", "has digits", "length"]
    assert len(curves["updates"]["reward/vowels"]) == 3
    shown = trajectory(source, 0, Pieces(None))
    assert [part["name"] for part in shown["reward_parts"]] == ["vowels", "has digits", "length"]


def test_a_stopped_run_goes_on_with_the_same_weights_and_refuses_others(tmp_path: Path, model: Path) -> None:
    folder = tmp_path / "run"
    recipe = tables(model)
    stretto.train(recipe, out=folder, reward=of_notebook(), data=ROWS, progress=False, callbacks=[Stops()])
    vowels, digits, length = of_notebook()
    heavier = stretto.Reward(digits.function, weight=0.75, name="has digits")
    with pytest.raises(RunError, match=r"`task.rewards` is .*: the members of a group may be scored before and after"):
        stretto.train(recipe, out=folder, resume=True, reward=[vowels, heavier, length], data=ROWS, progress=False)
    with pytest.raises(RunError, match="this was given from Python and cannot be found by its name"):
        stretto.train(recipe, out=folder, resume=True, data=ROWS, progress=False)
    resumed = stretto.train(recipe, out=folder, resume=True, reward=of_notebook(), data=ROWS, progress=False)
    assert resumed.outcome == "finished"
    assert_verifies(folder)


@pytest.mark.parametrize(
    ("rewards", "words"),
    [
        ([], "`reward` is an empty list"),
        ("mine", "`reward` is 'mine', which cannot be called: give a function, or a list of them"),
        ([letters, 3], "`reward` has 3, which cannot be called"),
        ([letters, letters], "`task.rewards` has 2 rewards with the name `letters`"),
        ([stretto.Reward(letters, weight=0.0)], "every reward has `weight = 0`"),
        ([stretto.Reward(letters, weight=float("nan"))], "`task.rewards[0].weight = nan` must be a finite number"),
        ([stretto.Reward(letters, batch_size=0)], "`task.rewards[0].batch_size = 0` must be at least 1"),
    ],
)
def test_rewards_that_cannot_be_used_are_refused_before_anything_starts(
    rewards: Any, words: str, tmp_path: Path, model: Path
) -> None:
    with pytest.raises(RecipeError) as raised:
        stretto.train(tables(model), out=tmp_path / "run", reward=rewards, data=ROWS, progress=False)
    assert words in str(raised.value)
    assert not (tmp_path / "run").exists()


def test_check_says_how_each_reward_is_called(model: Path) -> None:
    said = " ".join(str(stretto.check(tables(model), reward=of_notebook(), data=ROWS)).split())
    assert "the sum of 1 x `vowels`" in said
    assert "0.5 x `has digits` (`python:digits`, in batches of up to 512)" in said
    assert "0 x `length` (`python:length`, one at a time, async) in the driver's process" in said
