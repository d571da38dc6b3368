"""The example notebook, run in a kernel as a user runs it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebook.ipynb"


def output_of(notebook: Any, source: str) -> str:
    """Returns all text that the first cell with this source shows."""
    cell = next(cell for cell in notebook.cells if cell.cell_type == "code" and source in cell.source)
    texts = [each.text if each.output_type == "stream" else each.data.get("text/plain", "") for each in cell.outputs]
    return "\n".join(texts)


def test_the_notebook_trains_shows_and_verifies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "it is kept without outputs"
    NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(tmp_path)}}).execute()
    trained = output_of(notebook, "rewards = []")
    assert "`python:digits` cannot be imported by a worker process" in trained
    assert "25 of 25 updates done" in trained
    assert "\x1b" not in trained, "no live table"
    assert ", finished)" in trained
    first, last = output_of(notebook, "run.evaluations()").splitlines()[2:]
    assert float(last.split()[2]) > float(first.split()[2]) + 0.1, "it learns"
    assert "law 1  one voice     holds" in output_of(notebook, "run.verify()")
    assert "BROKEN" not in output_of(notebook, "run.verify()")
    table = output_of(notebook, "compare_runs")
    assert "training.learning_rate" in table
    cell = next(cell for cell in notebook.cells if cell.source == "run.evaluations()")
    assert "<table>" in cell.outputs[0].data["text/html"]
