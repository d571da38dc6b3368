"""`docs/python.md`: every snippet runs, one after the other, as a reader would type them."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

import stretto

PAGE = Path(__file__).parents[2] / "docs" / "python.md"
QUICKSTART = """
[model]
path = "tiny"
lora = { rank = 4 }
warm_start = { steps = 2 }
[task]
type = "countdown-chain"
[rollout]
prompts = 2
group = 2
max_tokens = 8
[evaluation]
prompts = 2
"""


def test_every_snippet_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "quickstart.toml").write_text(QUICKSTART)
    snippets = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(snippets) >= 7
    names: dict[str, object] = {"__name__": "__main__"}
    for number, snippet in enumerate(snippets, start=1):
        shorter = snippet.replace('"training.steps": 40', '"training.steps": 13')
        exec(compile(shorter, f"<snippet {number}>", "exec"), names)


def test_the_page_names_every_argument_of_train_and_every_part_of_a_run() -> None:
    text = PAGE.read_text(encoding="utf-8")
    missing = [name for name in inspect.signature(stretto.train).parameters if f"`{name}`" not in text]
    parts = [name for name in vars(stretto.Run) if not name.startswith("_")]
    missing += [name for name in parts if f"`run.{name}" not in text]
    missing += [
        name for name in stretto.__all__ if name[0] != "_" and name not in ("verify", "Table") and name not in text
    ]
    assert not missing
