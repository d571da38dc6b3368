"""One JSON file a measured cell, so that a bench that was cut short goes on where it was.

A cell is a bench, a side (`native`, `vllm`, `trl`) and parameters; its file name says all three. Every record holds
what it takes to believe it: date, device, driver, versions, command. Ratios are only as good as the sitting they come
from: cells that were measured in one go carry the same `sitting`.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

Parameter = int | float | str
PACKAGES = ("torch", "triton", "transformers", "vllm", "flashinfer-python", "trl", "peft", "stretto")


@dataclass(frozen=True, slots=True)
class Cell:
    """What is measured. Two cells are the same one if bench, side and every parameter are."""

    bench: str
    side: str
    parameters: Mapping[str, Parameter] = field(hash=False)

    @property
    def name(self) -> str:
        """The stem of its file."""
        parts = [f"{key}={value:g}" if isinstance(value, float) else f"{key}={value}" for key, value in self._sorted()]
        return "-".join([self.bench, self.side, *parts]).replace("/", "_").replace(" ", "_")

    def _sorted(self) -> list[tuple[str, Parameter]]:
        return sorted(self.parameters.items())


class Cells:
    """A folder of cells. With `resume`, what is there or in one of the `known` folders is not measured again."""

    def __init__(self, folder: Path, *, resume: bool, known: Iterable[Path] = (), sitting: str | None = None) -> None:
        self.folder, self.resume, self.known = folder, resume, tuple(known)
        self.sitting = sitting or new_sitting()
        self.folder.mkdir(parents=True, exist_ok=True)

    def path(self, cell: Cell) -> Path:
        return self.folder / f"{cell.name}.json"

    def has(self, cell: Cell) -> bool:
        """Whether there is nothing left to do for a cell."""
        return self.resume and any((folder / f"{cell.name}.json").exists() for folder in (self.folder, *self.known))

    def pending(self, cells: Iterable[Cell]) -> list[Cell]:
        return [cell for cell in cells if not self.has(cell)]

    def write(self, cell: Cell, results: Mapping[str, Any]) -> dict[str, Any]:
        """Record a cell whole or not at all."""
        record = {
            "bench": cell.bench,
            "side": cell.side,
            "parameters": dict(cell.parameters),
            "results": dict(results),
            "sitting": self.sitting,
            **provenance(),
        }
        scratch = self.path(cell).with_suffix(".partial")
        scratch.write_text(json.dumps(record, indent=2) + "\n")
        os.replace(scratch, self.path(cell))
        return record

    def measure(self, cell: Cell, work: Callable[[], Mapping[str, Any]]) -> dict[str, Any] | None:
        """Measure and record a cell, or skip it. One that does not fit into memory is recorded as such."""
        if self.has(cell):
            print(f"{cell.name}: there already", flush=True)
            return None
        started = time.perf_counter()
        try:
            results = work()
        except torch.OutOfMemoryError as error:
            torch.cuda.empty_cache()
            results = {"does_not_fit": str(error).splitlines()[0]}
        record = self.write(cell, results)
        shown = ", ".join(f"{k} {_short(v)}" for k, v in results.items() if _is_short(v))
        print(f"{cell.name}: {shown} ({time.perf_counter() - started:.1f} s in all)", flush=True)
        return record


def read_cells(folders: Iterable[Path]) -> list[dict[str, Any]]:
    """All records in some folders; of a cell that is in several, the newest."""
    found: dict[str, dict[str, Any]] = {}
    for folder in folders:
        for path in sorted(folder.glob("*.json")):
            record = json.loads(path.read_text())
            if {"bench", "side", "parameters", "results"} <= record.keys():
                name = Cell(record["bench"], record["side"], record["parameters"]).name
                if name not in found or found[name]["date"] <= record["date"]:
                    found[name] = record
    return [found[name] for name in sorted(found)]


# -- what a record says of where it comes from -------------------------------------------------------------------------


def new_sitting() -> str:
    return f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{os.getpid()}"


def provenance() -> dict[str, Any]:
    return {
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": " ".join([*_program(), *sys.argv[1:]]),
        **_machine(),
    }


def write_results(path: Path | None, found: Sequence[Mapping[str, Any]]) -> None:
    """Writes the results of a bench that has no cells to one JSON file, with where they come from; None: nowhere."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({**provenance(), "results": found}, indent=1) + "\n")


def _program() -> list[str]:
    module = getattr(sys.modules.get("__main__"), "__spec__", None)
    return ["python", "-m", module.name] if module is not None else ["python", Path(sys.argv[0]).name]


@lru_cache(maxsize=1)
def _machine() -> dict[str, Any]:
    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine(),
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "versions": {name: version for name in PACKAGES if (version := _version(name)) is not None},
        "commit": _output("git", "rev-parse", "HEAD"),
        "environment": {name: value for name, value in sorted(os.environ.items()) if name.startswith("VLLM_")},
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _output(*command: str) -> str | None:
    """What a command says, or None where it is not there or says nothing."""
    if shutil.which(command[0]) is None:
        return None
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip().splitlines()[0] if done.returncode == 0 and done.stdout.strip() else None


def _is_short(value: Any) -> bool:
    return isinstance(value, int | float) or (isinstance(value, str) and "\n" not in value)


def _short(value: Parameter) -> str:
    return value if isinstance(value, str) else f"{value:,.4g}" if abs(value) < 100 else f"{value:,.0f}"


# -- the command line --------------------------------------------------------------------------------------------------


def add_options(parser: argparse.ArgumentParser) -> None:
    """What every bench of this folder takes."""
    parser.add_argument("--out", type=Path, default=Path("bench/results/gpu"), help="folder of the cells")
    parser.add_argument("--resume", action="store_true", help="skip cells that are there already")
    parser.add_argument("--known", type=Path, action="append", default=[], help="more folders of cells to skip")
    parser.add_argument("--sitting", help="cells of one sitting may be compared; default: this process's own")
    parser.add_argument("--tiny", action="store_true", help="a tiny model and short runs, to try the bench on a CPU")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")


def from_options(options: argparse.Namespace) -> Cells:
    return Cells(options.out, resume=options.resume, known=options.known, sitting=options.sitting)


def integers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


def words(text: str) -> list[str]:
    return [part for part in text.split(",") if part]


def release_memory(device: str) -> None:
    """Gives back what a measurement has left on the device."""
    gc.collect()
    if torch.device(device).type == "cuda":
        torch.cuda.empty_cache()


def run_children(commands: Sequence[Sequence[str]]) -> int:
    """Run benches one after another, each in a process of its own. Goes on after one that failed; 1 if any did."""
    failed = []
    for command in commands:
        print("$", " ".join(command), flush=True)
        if subprocess.run(command, check=False).returncode:
            failed.append(" ".join(command))
    for command in failed:
        print(f"failed: {command}", file=sys.stderr, flush=True)
    return 1 if failed else 0
