"""Small whole runs over the real engine and trainer, and what to read from the folders that they leave."""

from __future__ import annotations

import sqlite3
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tomli_w
import torch
from safetensors.torch import load_file

from stretto.assembly.train import train
from stretto.observe.progress import Observer, Silent
from stretto.recipe.reading import load_recipe
from stretto.recipe.schema import Recipe
from stretto.store.verify import exit_code, format_findings, verify

REWARDS = '''
import time

def letters(prompt, completion, answer):
    """Something that an untrained model earns by chance, differently from one completion to the next."""
    return sum(character in "aeiou0123456789" for character in completion) / 8

def troubled(prompt, completion, answer):
    if answer % 6 == 0:
        raise ValueError("no idea")
    if answer % 6 == 1:
        return float("nan")
    if answer % 6 == 2:
        return "three"
    if answer % 6 == 3:
        time.sleep(30)
    return letters(prompt, completion, answer)

def huge(prompt, completion, answer):
    """Every third prompt earns more than can be trained on."""
    return 1e101 if answer % 3 == 0 else letters(prompt, completion, answer)

def slow(prompt, completion, answer):
    time.sleep(0.06)
    return letters(prompt, completion, answer)

def short_ones_fail(prompt, completion, answer):
    if len(completion) < 30:
        raise ValueError("too short")
    return letters(prompt, completion, answer)

def held_out_fail(prompt, completion, answer):
    if answer < 0:
        raise ValueError("no idea")
    return letters(prompt, completion, answer)

def constant(prompt, completion, answer):
    return 1.0

def often_solved(prompt, completion, answer):
    """Every third prompt is right whatever is said."""
    return 1.0 if answer % 3 == 0 else min(1.0, letters(prompt, completion, answer))
'''


class Heard(Silent):
    """Keeps the messages of a run."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def message(self, text: str) -> None:
        self.said.append(text)


def write_task(folder: Path, num_rows: int = 24) -> None:
    """A file of prompts and a module of rewards."""
    (folder / "our_rewards.py").write_text(REWARDS)
    lines = [f'{{"prompt": "{number}+{number}=", "answer": {number}}}' for number in range(num_rows)]
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n")


SMALL: dict[str, dict[str, Any]] = {
    "rollout": {"prompts": 3, "group": 4},
    "training": {"steps": 3, "learning_rate": 1e-3},
    "evaluation": {"prompts": 2},
    "runtime": {"device": "cpu", "engine_threads": 1, "trainer_threads": 1, "stall_seconds": 60.0},
}


def small_recipe(model: Path, folder: Path, tables: str, *overrides: str, lora: bool = True) -> Recipe:
    """Writes `recipe.toml` and reads it: three updates of 3 groups of 4, and what `tables` (TOML) adds or changes."""
    own = tomllib.loads(tables)
    trained = {"path": str(model), "lora": {"rank": 4}} if lora else {"path": str(model)}
    small = {name: {**table, **own.get(name, {})} for name, table in SMALL.items()}
    path = folder / "recipe.toml"
    path.write_text(tomli_w.dumps({"seed": 5, "model": trained, **own, **small}))
    return load_recipe(path, overrides)


def recipe(model: Path, folder: Path, *overrides: str, reward: str = "letters", lora: bool = True) -> Recipe:
    """A reward function, on the files of `write_task` in the working directory."""
    tables = f"""
        [task]
        type = "file"
        path = "prompts.jsonl"
        reward = "our_rewards:{reward}"
        [rollout]
        max_tokens = 12
    """
    return small_recipe(model, folder, tables, *overrides, lora=lora)


def run(
    made: Recipe,
    folder: Path,
    *,
    resume: bool = False,
    observer: Observer | None = None,
    give_up: Sequence[int] = (),
) -> dict[str, Any]:
    return train(made, folder, resume=resume, observer=observer or Silent(), give_up=give_up)


def policy(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors that a run exported."""
    (path,) = (folder / "policy").glob("*.safetensors")
    return load_file(path)


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def rows(folder: Path, query: str) -> Sequence[Any]:
    with sqlite3.connect(folder / "journal.sqlite") as db:
        return db.execute(query).fetchall()


def story(folder: Path) -> tuple[Sequence[Any], ...]:
    """Everything of a run but its clocks: versions, tokens, log-probabilities, rewards, batches."""
    return (
        rows(folder, "SELECT version, checksum FROM versions ORDER BY 1"),
        rows(folder, "SELECT trajectory, version, checksum, tokens, logprobs FROM completions ORDER BY 1"),
        rows(folder, "SELECT trajectory, reward FROM trajectories ORDER BY 1"),
        rows(folder, "SELECT update_id, position, trajectory FROM members ORDER BY 1, 2"),
    )


def assert_verifies(folder: Path) -> str:
    findings = verify(folder)
    text = format_findings(findings)
    assert exit_code(findings) == 0, text
    return text
