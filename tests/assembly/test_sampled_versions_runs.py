"""Whole runs whose objective scores every token under the version that sampled it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from interruption_cases import Dies
from run_cases import assert_verifies, recipe, rows, run

from stretto.assembly import train
from stretto.assembly.resume import Resumed
from stretto.assembly.retrain import retrain
from stretto.run.loop import Loop
from stretto.store.version_files import VersionFile, VersionFiles
from stretto.training import version_scoring
from stretto.types import Weights

STALE = ("rollout.staleness=2", "rollout.in_flight=9", "rollout.max_tokens=30", "training.steps=6")
MIXES: dict[str, tuple[str, ...]] = {
    "multi-version": (),
    "partial": ('rollout.paradigm="partial"',),
    "not durable": ("runtime.durable_versions=false",),
    "reuse": ("training.replay={ratio=0.5}",),
}


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines() if '"update"' in line]


@pytest.mark.parametrize(
    ("objective", "mix", "lora"),
    [
        ("dora", "multi-version", True),
        ("dora", "multi-version", False),
        ("dora", "partial", True),
        ("dora", "partial", False),
        ("dora", "not durable", False),
        ("dora", "reuse", True),
        ("hispo", "multi-version", True),
    ],
)
def test_stale_tokens_are_reproduced_and_the_run_can_be_trained_again(
    model: Path, tmp_path: Path, objective: str, mix: str, lora: bool
) -> None:
    # With an entropy bonus every sequence has a gradient, and none is skipped.
    chosen = (f'algorithm.type="{objective}"', "algorithm.entropy.coefficient=1e-6", "evaluation.prompts=0")
    made = recipe(model, tmp_path, *STALE, *MIXES[mix], *chosen, lora=lora)
    run(made, tmp_path / "run")
    assert_verifies(tmp_path / "run")
    updates = lines(tmp_path / "run")
    assert max(line["staleness_max"] for line in updates) >= 1, "nothing was stale; the test shows nothing"
    for line in updates:
        assert line["mismatch_tokens"] >= line["tokens"], "every token is compared, whatever its age"
        assert line["mismatch_kl"] < 1e-8
        assert line.get("masked_fraction", 0.0) == 0.0
        assert line.get("weight_capped_fraction", 0.0) == 0.0
    assert any("mismatch_kl_age_1" in line for line in updates)
    assert retrain(tmp_path / "run").difference is None


@pytest.mark.parametrize("mix", ["multi-version", "partial", "not durable"])
@pytest.mark.parametrize("every", [1e-6, 1e9], ids=["from a checkpoint", "from the journal"])
def test_a_run_that_was_killed_goes_on_to_the_same_weights(model: Path, tmp_path: Path, mix: str, every: float) -> None:
    made = recipe(
        model, tmp_path, *STALE, *MIXES[mix], 'algorithm.type="dora"', "evaluation.prompts=0",
        f"runtime.checkpoint_seconds={every}", lora=mix != "not durable",
    )  # fmt: skip
    with pytest.raises(KeyError):
        run(made, tmp_path / "run", observer=Dies(at=3))
    run(made, tmp_path / "run", resume=True)
    assert_verifies(tmp_path / "run")
    assert rows(tmp_path / "run", "SELECT COUNT(*) FROM updates") == [(6,)]
    assert retrain(tmp_path / "run").difference is None


def test_a_few_sequences_of_older_versions_are_compared_whatever_the_objective(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(version_scoring, "ADAPTERS_EVERY", 1)
    options = (*STALE, "evaluation.prompts=0")
    run(recipe(model, tmp_path, *options), tmp_path / "run")
    stale = [line for line in lines(tmp_path / "run") if line["staleness_max"] >= 1]
    assert stale, "nothing was stale; the test shows nothing"
    assert all(line["mismatch_tokens"] > 0 and line["mismatch_kl"] < 1e-8 for line in stale)
    assert any(f"mismatch_kl_age_{line['staleness_max']:.0f}" in line for line in stale)


def test_versions_are_removed_when_no_update_can_need_them(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = recipe(model, tmp_path, *STALE, 'algorithm.type="dora"', "evaluation.prompts=0", "training.steps=8")
    monkeypatch.setattr(VersionFiles, "prune", lambda files, needed: None)  # at the end of a run, of everything
    run(made, tmp_path / "run")
    left = [int(path.stem) for path in (tmp_path / "run" / "versions").glob("*.safetensors")]
    assert 8 in left
    assert min(left) >= 5, "K = 2, and the end of the run may forestall the last removal"


def test_a_resumed_run_takes_only_live_versions_to_the_device_and_keeps_no_file_for_ever(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = recipe(
        model, tmp_path, "rollout.staleness=2", "rollout.in_flight=3", "training.steps=6", 'algorithm.type="dora"',
        "evaluation.prompts=0", lora=False,
    )  # fmt: skip
    folder = tmp_path / "run"
    with pytest.raises(KeyError):
        run(made, folder, observer=Dies(at=3))
    (folder / "checkpoints" / "000001").mkdir(parents=True)
    (folder / "checkpoints" / "000001" / "state.json").write_text("{}")  # there, if not readable: it holds version 0
    resumed: list[Resumed] = []
    removed: list[int] = []
    make_loop, remove = train._make_loop, VersionFiles.remove

    def watched_loop(run: Any, state: Resumed, *rest: Any) -> Any:
        resumed.append(replace(state, weights=dict(state.weights)))
        return make_loop(run, state, *rest)

    def watched_remove(files: VersionFiles, version: int) -> None:
        removed.append(version)
        remove(files, version)

    monkeypatch.setattr(train, "_make_loop", watched_loop)
    monkeypatch.setattr(VersionFiles, "remove", watched_remove)
    run(made, folder, resume=True)
    assert {version: type(each) for version, each in resumed[0].weights.items()} == {
        2: VersionFile,
        3: Weights,
        4: Weights,
    }
    assert 0 in removed
    assert retrain(folder).difference is None


def test_a_version_that_was_trained_and_not_published_is_kept_while_engines_need_it(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = recipe(model, tmp_path, *STALE, "training.mismatch_samples=0", "evaluation.prompts=0", "training.steps=8")
    folder, loops, early = tmp_path / "run", list[Loop](), list[int]()
    with pytest.raises(KeyError):
        run(made, folder, observer=Dies(at=3))
    make_loop, remove = train._make_loop, VersionFiles.remove

    def watched_loop(*arguments: Any) -> Loop:
        loops.append(make_loop(*arguments))
        assert (loops[0].controller.newest, loops[0].controller.unpublished) == (3, 4)
        return loops[0]

    def watched_remove(files: VersionFiles, version: int) -> None:
        early.extend([version] if version in loops[0].controller.versions else [])
        remove(files, version)

    monkeypatch.setattr(train, "_make_loop", watched_loop)
    monkeypatch.setattr(VersionFiles, "remove", watched_remove)
    run(made, folder, resume=True)
    assert early == []
    assert_verifies(folder)
