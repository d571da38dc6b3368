"""Programs: their input, their bounded output, and their end with all of their children."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path

import pytest

from stretto.errors import RewardError
from stretto.serve.programs import run_program

ENVIRONMENT = {"PATH": os.environ["PATH"]}


def run(code: str, **options):
    command = [sys.executable, "-I", "-S", "-c", code]
    options = {"environment": ENVIRONMENT, "input_text": ""} | options
    return asyncio.run(asyncio.wait_for(run_program(command, **options), 60))


def test_a_program_reads_its_input_and_says_how_it_ended():
    code = "import os, sys; print(sys.stdin.read().upper(), os.environ['X']); print('hm', file=sys.stderr); sys.exit(3)"
    result = run(code, input_text="grüße", environment={**ENVIRONMENT, "X": "y", "PYTHONUTF8": "1"})
    assert (result.status, result.errors) == (3, "hm\n")
    assert result.output.endswith(" y\n")
    assert result.last_words == "; its output ends: hm"


def test_only_the_end_of_the_output_is_kept():
    code = "import sys\nfor n in range(30_000): sys.stdout.write(f'line {n}\\n')"
    result = run(code, output_bytes=1_000)
    assert len(result.output) == 1_000
    assert result.output.endswith("line 29999\n")


def test_a_program_that_reads_nothing_and_gets_much():
    assert run("pass", input_text="x" * 1_000_000).status == 0


def test_children_that_a_program_leaves_behind_are_killed():
    code = (
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-I', '-S', '-c', 'import time; time.sleep(600)'])\n"
        "print(child.pid)"
    )
    result = run(code)  # also returns at once, although the child has its pipes
    assert _gone(int(result.output))


def test_a_program_that_is_given_up_is_killed_with_its_children(tmp_path: Path):
    ready = tmp_path / "ready"
    code = (
        "import os, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-I', '-S', '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(ready) + '.part'!r}, 'w').write(f'{{os.getpid()}} {{child.pid}}')\n"
        f"os.rename({str(ready) + '.part'!r}, {str(ready)!r})\n"
        "time.sleep(600)"
    )

    async def give_up():
        command = [sys.executable, "-I", "-S", "-c", code]
        running = asyncio.create_task(run_program(command, environment=ENVIRONMENT, input_text=""))
        while not ready.exists():
            await asyncio.sleep(0.01)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(asyncio.wait_for(give_up(), 60))
    assert all(_gone(int(pid)) for pid in ready.read_text().split())


def test_a_program_that_cannot_be_started_is_named():
    with pytest.raises(RewardError, match="`/no/such` cannot be started: No such file"):
        asyncio.run(run_program(["/no/such"], environment={}, input_text=""))


def _gone(pid: int) -> bool:
    """Tells if a process is gone, or dead and not collected yet: its parent was killed, so nobody may collect it."""
    deadline = time.monotonic() + 10.0  # a killed process ends when it is scheduled, which takes long on a busy machine
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state in "ZX":
            return True
        time.sleep(0.001)
    return False
