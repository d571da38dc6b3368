"""Every recipe in the pages is valid. A part of a recipe is completed with what it leaves out.

Files that a page lets its reader save are there, and so is the adapter of an earlier run, `runs/old/policy`.
"""

from __future__ import annotations

import copy
import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from doc_pages import Block, all_blocks, save

from stretto.errors import RecipeError
from stretto.recipe.reading import load_recipe

TASKS: dict[str, dict[str, Any]] = {
    "file": {"path": "rows.jsonl", "reward": "rewards:score"},
    "environment": {"path": "rows.jsonl", "environment": "environments:World"},
    "agent": {"path": "rows.jsonl"},
}
ADAPTER = {"peft_type": "LORA", "r": 16, "lora_alpha": 32, "target_modules": ["q_proj"]}


def completed(tables: dict[str, Any]) -> dict[str, Any]:
    """Returns a whole recipe: a model and a task are added where the tables have none."""
    tables = copy.deepcopy(tables)
    tables.setdefault("model", {}).setdefault("path", "tiny")
    task = tables.setdefault("task", {"type": "agent" if "serve" in tables else "countdown-chain"})
    if isinstance(task, dict):
        for key, value in TASKS.get(task.setdefault("type", "file"), {}).items():
            if key == "reward" and {"rewards", "judge", "reward_model"} & task.keys():
                continue  # they take its place
            if key != "path" or "dataset" not in task:
                task.setdefault(key, value)
    return tables


@pytest.mark.parametrize("block", all_blocks("toml"), ids=lambda block: block.where)
def test_the_recipe_is_valid(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for other in all_blocks():
        if other.page == block.page and other.title:
            save(other, tmp_path)
    (tmp_path / "runs/old/policy").mkdir(parents=True)
    (tmp_path / "runs/old/policy/adapter_config.json").write_text(json.dumps(ADAPTER))
    load_recipe(completed(tomllib.loads(block.code)))


def test_a_mistake_in_a_part_of_a_recipe_is_found() -> None:
    for code in ("[task]\npass_envs = []", "[rollout]\nstaleness = -1", '[training]\nsteps = "many"'):
        with pytest.raises(RecipeError):
            load_recipe(completed(tomllib.loads(code)))
