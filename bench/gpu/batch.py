r"""Runs benches one after another on a host that is there for a short time, each with a limit of its own.

    python -m bench.gpu.batch bench/gpu/batches/gsm8k_next.txt --log LOGS --until 1700 --copy /tmp/tree

A line of the file is a job: a name, the most seconds that it may take, and a command, which a shell runs. `#` begins a
comment. `{sitting}` stands for one name for all jobs, so that their cells may be compared. A job that fails or runs
out of its time does not stop those after it. What a job prints goes to `LOGS/NAME.txt`, and `LOGS/jobs.txt` says when
each began and ended, and with which status.

`--copy` runs everything in a copy of `src`, `bench`, `recipes` and `examples`, with `models`, `data` and `build` as
links: files that are sent to the host meanwhile do not change what is measured. `--until` is the number of seconds
after which no job begins; one that would not end before then gets what is left, and jobs whose least time, a second
number after a slash (`300/200`), is more than that are left out.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from bench.gpu.cells import new_sitting

COPIED = ("src", "bench", "recipes", "examples")
LINKED = ("models", "data", "build")
GRACE_S = 20.0  # for a job to end after it was told to


@dataclass(frozen=True, slots=True)
class Job:
    """One line of the file."""

    name: str
    limit_s: float
    least_s: float  # it is not begun if there is less time
    command: str


def parse_job(line: str) -> Job | None:
    """Returns the job of a line; None for an empty line or a comment. Raises `ValueError` if it is neither."""
    text = line.strip()
    if not text or text.startswith("#"):
        return None
    parts = text.split(maxsplit=2)
    if len(parts) < 3:
        raise ValueError(f"`{text}` is no job: it has a name, seconds and a command")
    limit, _, least = parts[1].partition("/")
    try:
        return Job(parts[0], float(limit), float(least or 0.0), parts[2])
    except ValueError:
        raise ValueError(f"`{parts[1]}` are no seconds: write `300`, or `300/200` with the least of them") from None


def copy_tree(root: Path, copy: Path) -> Path:
    """Copies what benches need to `copy`, and links the rest. Returns the copy."""
    copy.mkdir(parents=True)
    for name in COPIED:
        shutil.copytree(root / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "results"))
    for name in LINKED:
        (root / name).mkdir(exist_ok=True)
        (copy / name).symlink_to((root / name).resolve(), target_is_directory=True)
    return copy


def run_job(job: Job, seconds: float, folder: Path, log: Path) -> int:
    """Runs a job in a process group of its own, for at most so many seconds. Returns its status, 124 if it was cut."""
    with (log / f"{job.name}.txt").open("w", encoding="utf-8") as out:
        paths = [str(folder / "src"), str(folder), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONUNBUFFERED": "1"}
        process = subprocess.Popen(
            ["bash", "-e", "-c", job.command],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            for number in (signal.SIGINT, signal.SIGKILL):  # a run that is interrupted leaves its metrics
                os.killpg(process.pid, number)
                try:
                    process.wait(GRACE_S)
                    break
                except subprocess.TimeoutExpired:
                    continue
            return 124


def run_all(jobs: list[Job], folder: Path, log: Path, until: float) -> int:
    """Runs the jobs in order. Returns the number of those that failed, were cut or were left out."""
    began, failed = time.monotonic(), 0
    log.mkdir(parents=True, exist_ok=True)

    def note(text: str) -> None:
        line = f"{time.monotonic() - began:7.1f} s  {text}"
        print(line, flush=True)
        with (log / "jobs.txt").open("a", encoding="utf-8") as out:
            out.write(line + "\n")

    for job in jobs:
        left = until - (time.monotonic() - began)
        if left <= job.least_s:
            note(f"{job.name} is left out: {max(0.0, left):.0f} s are left")
            failed += 1
            continue
        note(f"{job.name} begins")
        status = run_job(job, min(job.limit_s, left), folder, log)
        note(f"{job.name} ends with status {status}")
        failed += status != 0
    note("all jobs are done")
    return failed


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="the jobs")
    parser.add_argument("--log", type=Path, default=Path("build/log"), help="folder of what they print")
    parser.add_argument("--until", type=float, default=float("inf"), help="seconds after which no job begins")
    parser.add_argument("--copy", type=Path, help="a new folder to copy the tree to")
    parser.add_argument("--sitting", help="default: a new one")
    options = parser.parse_args(arguments)
    try:
        text = options.file.read_text(encoding="utf-8").replace("{sitting}", options.sitting or new_sitting())
        jobs = [job for line in text.splitlines() if (job := parse_job(line)) is not None]
    except (OSError, ValueError) as error:
        parser.error(f"`{options.file}`: {error}")
    if options.copy is not None and options.copy.exists():
        parser.error(f"`--copy {options.copy}` exists already; name a new folder")
    root = Path.cwd()
    folder = root if options.copy is None else copy_tree(root, options.copy.resolve())
    return 1 if run_all(jobs, folder, (root / options.log).resolve(), options.until) else 0


if __name__ == "__main__":
    sys.exit(main())
