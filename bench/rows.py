"""CPU time and memory that it takes to read a large data set. `python bench/rows.py [--rows N] [--out FILE]`.

Reads the same rows from JSON Lines, CSV and Parquet, as a run does: renamed, checked, with the digest of the file. The
other side is the least that a program in Python can do, a list of dicts. Each measurement has a process of its own.
Prints CPU seconds (of all threads) and the growth of the largest resident size. `measure` renders chats and counts
their tokens, as `task.too_long = "drop"` does with every row.

The floor: no format takes more than twice the memory of a list of dicts.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROWS = 1_000_000
FLOOR = 2.0
FORMATS = ("jsonl", "csv", "parquet")


def record(number: int) -> dict[str, Any]:
    question = f"What is {number} plus {number}? Think step by step and give the answer at the end."
    return {"question": question, "answer": str(2 * number), "source": "made", "level": str(number % 7)}


def write(folder: Path, num_rows: int) -> None:
    """Writes the rows in each format."""
    import pyarrow
    import pyarrow.parquet

    with (folder / "rows.jsonl").open("w") as lines, (folder / "rows.csv").open("w", newline="") as cells:
        writer = csv.DictWriter(cells, list(record(0)))
        writer.writeheader()
        for number in range(num_rows):
            lines.write(json.dumps(record(number)) + "\n")
            writer.writerow(record(number))
    table = pyarrow.Table.from_pylist([record(number) for number in range(num_rows)])
    pyarrow.parquet.write_table(table, folder / "rows.parquet")


def dicts(path: Path) -> list[dict[str, Any]]:
    """Reads a list of dicts, the plain way."""
    if path.suffix == ".parquet":
        import pyarrow.parquet

        found: list[dict[str, Any]] = pyarrow.parquet.read_table(path).to_pylist()
        return found
    with path.open(newline="") as file:
        return list(csv.DictReader(file)) if path.suffix == ".csv" else [json.loads(line) for line in file]


def largest_kib() -> int:
    """The largest resident size of this process so far; that of `getrusage` may be its parent's."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1])


def measured(read: Callable[[], object]) -> dict[str, float]:
    began, before = time.process_time(), largest_kib()
    kept = read()
    cpu_s, grown = time.process_time() - began, largest_kib() - before
    assert kept is not None
    return {"cpu_s": round(cpu_s, 2), "grown_mib": max(1, round(grown / 1024))}


def measure(what: str, path: Path) -> dict[str, float]:
    """Measures one way to read a file, in this process."""
    from stretto.environments.data import PromptStream
    from stretto.environments.task_options import FileOptions
    from stretto.environments.tasks import load_task

    if path.suffix == ".parquet":
        import pyarrow.parquet  # noqa: F401  (its import is not measured)
    if what == "dicts":
        return measured(lambda: dicts(path))
    columns = {"prompt": "question"} if what == "rows" else {"messages": "question"}
    options = FileOptions(path=str(path), columns=columns)
    if what == "rows":
        return measured(lambda: load_task(options))
    from stretto.models.tiny import tiny_tokenizer

    tokenizer, rows = tiny_tokenizer(), load_task(options, num_evaluation=0).train
    return measured(lambda: PromptStream(rows, tokenizer, seed=0, max_prompt_tokens=4_096, too_long="drop"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--measure", nargs=2, metavar=("WHAT", "FILE"), help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure[0], Path(options.measure[1]))))
        return 0
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), options.rows)
        for suffix in FORMATS:
            for what in ("dicts", "rows", "measure") if suffix == "jsonl" else ("dicts", "rows"):
                command = [sys.executable, __file__, "--measure", what, f"{folder}/rows.{suffix}"]
                done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
                found.setdefault(suffix, {})[what] = json.loads(done.stdout.splitlines()[-1])
            sides = found[suffix]
            sides["memory_ratio"] = round(sides["rows"]["grown_mib"] / sides["dicts"]["grown_mib"], 2)
            sides["cpu_ratio"] = round(sides["rows"]["cpu_s"] / sides["dicts"]["cpu_s"], 2)
            print(suffix, json.dumps(sides))
    import numpy
    import pyarrow
    import tokenizers

    result = {
        "command": f"python bench/rows.py --rows {options.rows}",
        "at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": {"cores": os.cpu_count(), "machine": platform.machine(), "load": os.getloadavg()},
        "versions": {
            "python": platform.python_version(),
            **{each.__name__: each.__version__ for each in (numpy, pyarrow, tokenizers)},
        },
        "rows": options.rows,
        "formats": found,
    }
    if options.out:
        options.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 1 if any(sides["memory_ratio"] > FLOOR for sides in found.values()) else 0


if __name__ == "__main__":
    raise SystemExit(main())
