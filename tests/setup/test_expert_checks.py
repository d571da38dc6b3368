"""Adapters on experts that the native engine cannot hold are refused before a model is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import stretto
from stretto.errors import ModelError
from stretto.models.loading import load_config
from stretto.models.shapes import shape_folder
from stretto.recipe.reading import parse_recipe
from stretto.setup.expert_checks import check_expert_slots, expert_targets

CONFIG = load_config(str(shape_folder("Qwen/Qwen3-30B-A3B")))
TARGETS = ("q_proj", "gate_up_proj")


def recipe_of(staleness: int, targets: tuple[str, ...] = TARGETS, device: str = "cuda") -> Any:
    return parse_recipe(
        {
            "model": {"path": "Qwen/Qwen3-30B-A3B", "lora": {"rank": 8, "targets": list(targets)}},
            "task": {"type": "countdown-chain"},
            "rollout": {"staleness": staleness},
            "evaluation": {"prompts": 0},
            "runtime": {"device": device},
        }
    )


def test_more_groups_than_a_product_on_cuda_has_are_refused() -> None:
    assert expert_targets(recipe_of(7), CONFIG) == ("gate_up_proj",)
    with pytest.raises(ModelError, match=r"128 experts in 8 version slots are 1024 groups.*lower `rollout\.staleness`"):
        check_expert_slots(recipe_of(7), CONFIG)
    check_expert_slots(recipe_of(6), CONFIG)
    check_expert_slots(recipe_of(7, ("q_proj",)), CONFIG)
    check_expert_slots(recipe_of(7, device="cpu"), CONFIG)


def test_a_plan_for_other_devices_refuses_them_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stretto.models.hub.is_offline_mode", lambda: True)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    changes = {"model.lora": {"rank": 8, "targets": list(TARGETS)}, "rollout.staleness": 7}
    with pytest.raises(ModelError, match="are 1152 groups"):
        stretto.check("qwen3-30b-a3b", changes, devices="8x141GiB")
