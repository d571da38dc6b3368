"""Whole runs whose objective scores every token under the version that sampled it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from run_cases import assert_verifies, recipe, rows, run

from stretto.assembly.retrain import retrain
from stretto.observe.progress import Silent

STALE = ("rollout.staleness=2", "rollout.in_flight=9", "rollout.max_tokens=30", "training.steps=6")
MIXES: dict[str, tuple[str, ...]] = {
    "multi-version": (),
    "partial": ('rollout.paradigm="partial"',),
    "not durable": ("runtime.durable_versions=false",),
    "reuse": ("training.replay={ratio=0.5}",),
}


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines() if '"update"' in line]


class Stops(Silent):
    """Ends the process, as far as the run can tell, as update 3 ends."""

    def updated(self, line: Mapping[str, Any]) -> None:
        if line["update"] == 3:
            raise KeyError("as if it were killed here")


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
    made = recipe(
        model, tmp_path, *STALE, *MIXES[mix], f'algorithm.type="{objective}"', "evaluation.prompts=0", lora=lora
    )
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
        run(made, tmp_path / "run", observer=Stops())
    run(made, tmp_path / "run", resume=True)
    assert_verifies(tmp_path / "run")
    assert rows(tmp_path / "run", "SELECT COUNT(*) FROM updates") == [(6,)]
    assert retrain(tmp_path / "run").difference is None


def test_a_few_sequences_of_older_versions_are_compared_whatever_the_objective(model: Path, tmp_path: Path) -> None:
    options = (*STALE, "evaluation.prompts=0")
    run(recipe(model, tmp_path, *options), tmp_path / "run")
    stale = [line for line in lines(tmp_path / "run") if line["staleness_max"] >= 1]
    assert stale, "nothing was stale; the test shows nothing"
    assert all(line["mismatch_tokens"] > 0 and line["mismatch_kl"] < 1e-8 for line in stale)
    assert any(f"mismatch_kl_age_{line['staleness_max']:.0f}" in line for line in stale)


def test_versions_are_removed_when_no_update_can_need_them(model: Path, tmp_path: Path) -> None:
    made = recipe(model, tmp_path, *STALE, 'algorithm.type="dora"', "evaluation.prompts=0", "training.steps=8")
    run(made, tmp_path / "run")
    left = sorted(int(path.stem) for path in (tmp_path / "run" / "versions").glob("*.safetensors"))
    assert left == [version for version in left if version >= 6], "K = 2"
