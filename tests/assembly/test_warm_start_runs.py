"""Runs that begin with a warm start: version 0 has learned from demonstrations, and everything else is as usual."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from run_cases import assert_verifies, rows, run, story

from stretto.assembly.check import check
from stretto.assembly.retrain import retrain
from stretto.errors import RecipeError, RunError
from stretto.observe.progress import Silent
from stretto.recipe.reading import parse_recipe
from stretto.recipe.schema import Recipe
from stretto.setup.base_models import model_path_of, starting_adapter


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "stretto"


@pytest.fixture(autouse=True)
def demos(tmp_path: Path) -> None:
    """The demonstrated answers are vowels, which `letters` rewards and the model does not say by itself."""
    lines = [{"prompt": f"{number}+{number}=", "completion": "aeiou"} for number in range(24)]
    (tmp_path / "demos.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def recipe(model: Path | str, *, lora: bool, updates: int = 2, **warm_start: Any) -> Recipe:
    values = {"path": "demos.jsonl", "steps": 40, "batch": 8, "learning_rate": 1e-2 if lora else 3e-3}
    return parse_recipe(
        {
            "seed": 5,
            "model": {
                "path": str(model),
                "warm_start": {**values, **warm_start},
                **({"lora": {"rank": 4}} if lora else {}),
            },
            "task": {"type": "file", "path": "prompts.jsonl", "reward": "our_rewards:letters"},
            "rollout": {"prompts": 3, "group": 4, "max_tokens": 12, "paradigm": "synchronous"},
            "training": {"steps": updates, "learning_rate": 1e-3},
            "evaluation": {"prompts": 4},
            "runtime": {"device": "cpu", "engine_threads": 1, "trainer_threads": 1, "stall_seconds": 60.0},
        }
    )


class Listening(Silent):
    def __init__(self) -> None:
        self.said: list[str] = []

    def message(self, text: str) -> None:
        self.said.append(text)


@pytest.mark.parametrize("lora", [True, False])
def test_version_0_has_learned_the_demonstrated_form(lora: bool, model: Path, tmp_path: Path, cache: Path) -> None:
    cold = parse_recipe(
        {**recipe(model, lora=lora).model_dump(mode="json", exclude_unset=True)}
        | {"model": {"path": str(model), **({"lora": {"rank": 4}} if lora else {})}}
    )
    run(cold, tmp_path / "cold")
    listening = Listening()
    run(recipe(model, lora=lora), tmp_path / "warm", observer=listening)
    shown = [text for text in listening.said if text.startswith("warm start")]
    assert "24 demonstrations of `demos.jsonl`" in shown[0]
    assert "step 40/40" in shown[-1]
    (facts,) = cache.glob("warm-*/warm_start.json")
    losses = json.loads(facts.read_text())["losses"]
    assert losses[-1] < losses[0] / 2
    text = "SELECT AVG(completion = 'aeiou') FROM (SELECT t.reward, c.text AS completion FROM trajectories t "
    text += "JOIN completions c USING (trajectory) WHERE t.version = 0)"
    shares = [rows(tmp_path / name, text)[0][0] for name in ("cold", "warm")]
    assert shares[0] == 0.0
    assert shares[1] > 0.5
    assert_verifies(tmp_path / "warm")


@pytest.mark.parametrize("lora", [True, False])
def test_a_warm_started_run_is_resumed_and_replayed_bit_for_bit(
    lora: bool, model: Path, tmp_path: Path, cache: Path
) -> None:
    made = recipe(model, lora=lora)
    run(made, tmp_path / "run")
    (kept,) = cache.glob("warm-*")
    version = rows(tmp_path / "run", "SELECT checksum FROM versions WHERE version = 0")
    for path in sorted(kept.rglob("*"), reverse=True):
        path.unlink()
    kept.rmdir()
    run(made, tmp_path / "again")  # made again
    assert rows(tmp_path / "again", "SELECT checksum FROM versions WHERE version = 0") == version
    assert story(tmp_path / "again") == story(tmp_path / "run")
    result = retrain(tmp_path / "run", say=lambda text: None)
    assert result.difference is None
    longer = recipe(model, lora=lora, updates=3)
    summary = run(longer, tmp_path / "run", resume=True)
    assert summary["steps"] == 3
    assert_verifies(tmp_path / "run")


def test_a_warm_start_is_made_once_for_the_same_data_and_options(model: Path, tmp_path: Path, cache: Path) -> None:
    first = starting_adapter(recipe(model, lora=True), Silent())
    listening = Listening()
    assert starting_adapter(recipe(model, lora=True), listening) == first
    assert listening.said == []
    assert starting_adapter(recipe(model, lora=True, updates=7), Silent()) == first  # of the run, not of the warm start
    (tmp_path / "demos.jsonl").write_text('{"prompt": "1+1=", "completion": "2"}\n')
    assert starting_adapter(recipe(model, lora=True), Silent()) != first
    assert len(list(cache.glob("warm-*"))) == 2


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
def test_a_warm_start_is_made_again_for_another_seed_of_what_it_draws(lora: bool, model: Path, cache: Path) -> None:
    def made(*, order: int = 0, run: int = 5) -> str | None:
        values = recipe(model, lora=lora, steps=1, seed=order).model_dump(mode="json", exclude_unset=True)
        asked = parse_recipe({**values, "seed": run})
        return starting_adapter(asked, Silent()) if lora else model_path_of(asked, Silent())

    first = made()
    assert made() == first
    assert made(order=1) != first, "the order of the demonstrations"
    assert (made(run=6) != first) == lora, "the seed of the run draws the adapter, and nothing of full weights"


def test_data_that_is_missing_shows_before_a_warm_start_is_made(
    model: Path, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    values = recipe(model, lora=True).model_dump(mode="json", exclude_unset=True)
    for number, source in enumerate(({"path": "none.jsonl"}, {"dataset": {"name": "nobody/no-such-rows"}})):
        asked = parse_recipe({**values, "task": {"type": "file", "reward": "our_rewards:letters", **source}})
        with pytest.raises(RecipeError, match=r"none\.jsonl|no-such-rows"):
            run(asked, tmp_path / f"run-{number}")
    assert not list(cache.glob("warm-*"))


def test_another_warm_start_cannot_resume_a_run(model: Path, tmp_path: Path) -> None:
    made = recipe(model, lora=True)
    run(made, tmp_path / "run")
    (tmp_path / "demos.jsonl").write_text('{"prompt": "1+1=", "completion": "2"}\n')
    with pytest.raises(RunError, match=r"`model\.warm_start` does not lead to the weights that the run began with"):
        run(recipe(model, lora=True, updates=3), tmp_path / "run", resume=True)


def test_an_adapter_is_trained_further_by_a_warm_start(model: Path, tmp_path: Path) -> None:
    plain = parse_recipe(
        {**recipe(model, lora=True).model_dump(mode="json", exclude_unset=True)}
        | {"model": {"path": str(model), "lora": {"rank": 4}}}
    )
    run(plain, tmp_path / "first")
    values = recipe(model, lora=True).model_dump(mode="json", exclude_unset=True)
    values["model"] = {
        "path": str(model),
        "adapter": str(tmp_path / "first"),
        "warm_start": values["model"]["warm_start"],
    }
    made = parse_recipe(values)
    assert starting_adapter(made, Silent()) != starting_adapter(recipe(model, lora=True), Silent())
    run(made, tmp_path / "second")
    assert_verifies(tmp_path / "second")


def test_check_reads_the_demonstrations_and_trains_nothing(model: Path, tmp_path: Path, cache: Path) -> None:
    report = str(check(recipe(model, lora=True)))
    assert "warm start on `demos.jsonl`: 24 demonstrations of up to 12 tokens, 40 steps of 8" in report
    assert not list(cache.glob("warm-*"))
    (tmp_path / "demos.jsonl").write_text('{"prompt": "1+1=", "completion": ""}\n')
    with pytest.raises(RecipeError, match=r"demos\.jsonl:1: the completion is empty"):
        check(recipe(model, lora=True))
    (tmp_path / "demos.jsonl").write_text('{"prompt": "1+1=", "completion": "' + "x" * 30 + '"}\n')
    assert "it may learn to write more than it has room for" in str(check(recipe(model, lora=True)))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"epochs": 2.0}, "`model.warm_start.steps` and `model.warm_start.epochs`"),
        ({"steps": 0}, "`model.warm_start.path` has no effect with `model.warm_start.steps = 0`"),
        ({"path": None}, "has no effect without `model.warm_start.path`"),
    ],
)
def test_options_that_contradict_each_other_are_refused(model: Path, changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(RecipeError, match=problem):
        recipe(model, lora=True, **changes)


def test_without_a_path_nothing_changes_for_the_tiny_model(tmp_path: Path, cache: Path) -> None:
    made = parse_recipe({"model": {"path": "tiny", "warm_start": {"steps": 1}}, "task": {"type": "countdown-chain"}})
    path = model_path_of(made, Silent())
    assert Path(path).parent == cache
    assert Path(path).name.startswith("tiny-")
    assert starting_adapter(made, Silent()) is None
    torch.set_num_threads(1)
