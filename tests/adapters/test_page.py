"""The page about adapters: its tasks load, and its environments can be made."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from chat_cases import chat_tokenizer
from pydantic import TypeAdapter

from stretto.environments.custom import load_environment
from stretto.environments.task_options import TaskOptions
from stretto.environments.tasks import Task, load_task

PAGE = (Path(__file__).parents[2] / "docs" / "adapters.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", PAGE, flags=re.MULTILINE | re.DOTALL))


def code(section: str, language: str) -> str:
    (found,) = re.findall(rf"^ *```{language}\n(.*?)^ *```", SECTIONS[section], flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"^  (?=import|with|  )", "", found, flags=re.MULTILINE) if found.startswith("  ") else found


def task(section: str) -> tuple[dict[str, Any], Task]:
    exec(code("What they share", "python"), {})
    options = tomllib.loads(code(section, "toml"))["task"]
    for key in ("path", "evaluation_path"):
        if key in options:
            options[key] = "worlds.jsonl"
    return options, load_task(TypeAdapter(TaskOptions).validate_python(options), num_evaluation=0)


@pytest.mark.parametrize("section", ["Gymnasium", "TextArena"])
def test_the_task_of_a_section_is_made(section: str) -> None:
    pytest.importorskip(section.lower())
    options, made = task(section)
    assert made.environment is not None
    assert len(code(section, "toml").splitlines()) <= 10
    assert len(made.train) == 1000
    assert made.train[3].columns["seed"] == 3
    assert load_environment(made.environment, chat_tokenizer("hermes")) is not None
    assert options["turns"] == made.max_turns


@pytest.mark.parametrize("section", ["MCP", "BFCL", "OpenEnv"])
def test_the_task_of_a_section_loads(section: str) -> None:
    _, made = task(section)
    assert made.reward is not None or made.environment is not None


def test_the_example_of_an_mcp_server_is_an_environment() -> None:
    pytest.importorskip("mcp")
    scope: dict[str, Any] = {"__name__": "example"}
    exec(code("MCP", "python"), scope)
    assert scope["Notes"].__name__ == "Notes"


def test_rows_of_the_page_are_json() -> None:
    exec(code("What they share", "python"), {})
    assert json.loads(Path("worlds.jsonl").read_text().splitlines()[-1])["seed"] == 999
