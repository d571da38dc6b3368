"""A recipe as it is: scores before and after, and the seconds between them.

    python -m bench.gpu.recipe_run recipes/bfcl.toml --set seed=1 --out RESULTS

Runs `stretto train RECIPE --out RUN`, with the same `--set`, in a process of its own: what a user would type. The cell
has the curves, rates and idle shares of `bench.gpu.gsm8k`, and the greedy scores where the recipe asks for them.
`--verify` also proves the laws of the run.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.gpu.cells import Cell, add_options, from_options
from bench.gpu.gsm8k import COMMAND, read_lines, results_of, train
from stretto.recipe.reading import load_recipe


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Trains in `folder` and returns what the cell says."""
    recipe = load_recipe(options.recipe, options.set)
    started = train(options.recipe, folder, [word for change in options.set for word in ("--set", change)])
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    found = {
        **results_of(read_lines(folder), summary, started),
        "greedy": [each["greedy"]["score"] for each in summary["evaluations"] if each.get("greedy")],
        "recipe": recipe.source_toml(),
    }
    if options.verify:
        done = subprocess.run([*COMMAND, "verify", str(folder)], check=False, capture_output=True, text=True)
        found["verify"] = {"status": done.returncode, "output": done.stdout}
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path)
    add_options(parser)
    parser.add_argument(
        "--set", action="append", default=[], help="`key=value` for the recipe; part of the cell's name"
    )
    parser.add_argument("--run", type=Path, help="keep the run there")
    parser.add_argument("--verify", action="store_true", help="prove the laws of the run afterwards")
    options = parser.parse_args(arguments)
    changes = {key: value for key, _, value in (change.partition("=") for change in options.set)}
    cell = Cell("recipe", "native", {"recipe": options.recipe.stem, **changes})
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.run or Path(scratch) / "run"
        folder.parent.mkdir(parents=True, exist_ok=True)
        from_options(options).measure(cell, lambda: measure(options, folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
