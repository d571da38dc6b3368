"""The Python of the pages: it compiles, names what exists, and imports what can be imported."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from doc_pages import PAGES, blocks, name_of

import stretto

# Names that a sketch leaves to its reader. Everything else must be defined on the page.
LEFT_TO_THE_READER = {
    "README.md": {"my_function", "rows"},
    "docs/recipes.md": {"done", "observation", "score"},
}
# Packages that the tests do without; what is imported from them is not looked at.
OF_OTHERS = {"vllm", "verifiers", "trl", "datasets"}

PAGES_WITH_PYTHON = [page for page in PAGES if blocks(page, "python")]


def undefined(source: str) -> Iterator[str]:
    """Returns the names that a program uses and nobody defines."""
    ruff = Path(sys.executable).parent / "ruff"
    done = subprocess.run(
        [ruff, "check", "--isolated", "--select", "F821", "--output-format", "json", "-"],
        input=source, capture_output=True, text=True, check=False,
    )  # fmt: skip
    for found in json.loads(done.stdout):
        yield found["message"].split("`")[1]


def missing_imports(tree: ast.AST) -> Iterator[str]:
    """Returns what a program imports and is not there."""
    for node in ast.walk(tree):
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        for name in names:
            if name.partition(".")[0] in OF_OTHERS:
                continue
            try:
                module = importlib.import_module(name)
            except ImportError as error:
                yield f"`{name}`: {error}"
                continue
            if isinstance(node, ast.ImportFrom):
                yield from (f"`{name}.{alias.name}`" for alias in node.names if not hasattr(module, alias.name))


def wrong_uses(tree: ast.AST) -> Iterator[str]:
    """Returns attributes of `stretto` that it does not have, and arguments that its functions do not take."""
    for node in ast.walk(tree):
        of_ours = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "stretto"
        if of_ours and not hasattr(stretto, node.attr):
            yield f"`stretto.{node.attr}` does not exist"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = node.func.value
            if isinstance(owner, ast.Name) and owner.id == "stretto" and hasattr(stretto, node.func.attr):
                taken = inspect.signature(getattr(stretto, node.func.attr)).parameters
                given = [keyword.arg for keyword in node.keywords if keyword.arg]
                yield from (f"`stretto.{node.func.attr}` takes no `{name}`" for name in given if name not in taken)


@pytest.mark.parametrize("page", PAGES_WITH_PYTHON, ids=name_of)
def test_the_python_of_the_page_compiles_and_names_what_exists(page: Path) -> None:
    found = blocks(page, "python")
    saved = {Path(block.title).stem for block in found if block.title}
    wrong = []
    for block in found:
        tree = ast.parse(block.code, block.where)
        wrong += [f"{block.where}: {problem}" for problem in wrong_uses(tree)]
        wrong += [
            f"{block.where}: cannot import {problem}"
            for problem in missing_imports(tree)
            if problem.split("`")[1] not in saved
        ]
    left = LEFT_TO_THE_READER.get(name_of(page), set())
    whole = "\n".join(block.code for block in found)
    wrong += [f"{name_of(page)}: `{name}` is not defined" for name in undefined(whole) if name not in left]
    assert not wrong, "\n".join(wrong)


def test_mistakes_in_python_are_found() -> None:
    assert list(undefined("print(tabel)")) == ["tabel"]
    assert list(missing_imports(ast.parse("from stretto.types import Nothing\nimport stretto.nowhere")))
    assert list(wrong_uses(ast.parse("stretto.trian()"))) == ["`stretto.trian` does not exist"]
    assert list(wrong_uses(ast.parse("stretto.train(None, outt=1)"))) == ["`stretto.train` takes no `outt`"]
