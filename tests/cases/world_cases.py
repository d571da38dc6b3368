"""Prompts and scripted policies for environments of other packages."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from chat_cases import ScriptedPolicy, chat_tokenizer, spelled
from run_cases import assert_verifies, rows, run

from stretto.recipe.reading import parse_recipe
from stretto.types import Prompt

TOKENIZER = chat_tokenizer("hermes")


def chat_prompt(text: str, **columns: Any) -> Prompt:
    """A row with messages."""
    return Prompt(0, text, tuple(TOKENIZER.encode(text)), {**columns, "messages": [{"role": "user", "content": text}]})


def plain_prompt(text: str, **columns: Any) -> Prompt:
    """A row with a prompt of plain text."""
    return Prompt(0, text, tuple(TOKENIZER.encode(text)), columns)


def play(environment: Any, prompt: Prompt, *script: Any) -> tuple[Any, list[tuple[bool, str]]]:
    """Plays an episode with what the policy says; returns its outcome, and its row of text, sampled or not."""
    policy = ScriptedPolicy(TOKENIZER, *script)
    outcome = asyncio.run(environment.episode(prompt, policy))
    assert set(policy.lineages) == {0}
    return outcome, spelled(TOKENIZER, policy.rows[0])


def trained_in_worlds(
    folder: Path, model: Path, data: list[dict[str, Any]], *, max_tokens: int = 90, **task: Any
) -> list[tuple[float, ...] | None]:
    """Trains two updates of eight episodes, played in a worker process; returns the rewards of each one's turns."""
    (folder / "worlds.jsonl").write_text("\n".join(map(json.dumps, data)))
    recipe = parse_recipe(
        {
            "seed": 5,
            "model": {"path": str(model), "lora": {"rank": 4}},
            "task": {"type": "environment", "path": str(folder / "worlds.jsonl"), **task},
            "rollout": {"prompts": 2, "group": 4, "max_tokens": max_tokens, "stop": [*"aeiou1234"]},
            "training": {"steps": 2, "learning_rate": 1e-3},
            "evaluation": {"prompts": 0},
            "runtime": {"device": "cpu", "engine_threads": 1, "trainer_threads": 1, "stall_seconds": 60.0},
        }
    )
    summary = run(recipe, folder / "run")
    assert summary["trained_trajectories"] == 16
    assert_verifies(folder / "run")
    earned = list(rows(folder / "run", "SELECT turn_rewards FROM trajectories"))
    return [None if each is None else tuple(each) for (each,) in earned]
