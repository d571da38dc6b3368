"""How long `import stretto` and `stretto --help` take: `python bench/startup.py [--repeats 15] [--out FILE]`.

Starts each in a process of its own, after one that is not counted. `import stretto` is measured inside of the process,
without the start of Python; `--help` is the whole process, from its start to its end. Gives the least and the median by
the clock, and the CPU time, which other work on the machine changes least. The floors are 100 ms and half a second.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

IMPORT_S, HELP_S = 0.1, 0.5  # floors
IMPORT = """import sys, time
wall, cpu = time.perf_counter(), time.process_time()
import stretto
print(time.perf_counter() - wall, time.process_time() - cpu, "torch" in sys.modules)"""


def measure_import() -> tuple[float, float]:
    """Returns seconds by the clock and of CPU time that `import stretto` takes in a new process."""
    done = subprocess.run([sys.executable, "-c", IMPORT], check=True, stdout=subprocess.PIPE, text=True)
    wall, cpu, torch = done.stdout.split()
    assert torch == "False", "`import stretto` imports torch"
    return float(wall), float(cpu)


def measure_help() -> tuple[float, float]:
    """Returns seconds by the clock and of CPU time of `stretto --help`, the start of Python included."""
    began = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-m", "stretto", "--help"], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    return time.perf_counter() - began, usage.ru_utime + usage.ru_stime


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    result: dict[str, object] = {
        "command": "python bench/startup.py",
        "at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": {"cores": os.cpu_count(), "machine": platform.machine(), "python": platform.python_version(),
                    "load": os.getloadavg()},
        "repeats": options.repeats,
    }  # fmt: skip
    late = []
    for name, measured, floor in (
        ("import stretto", measure_import, IMPORT_S),
        ("stretto --help", measure_help, HELP_S),
    ):
        measured()
        times = [measured() for _ in range(options.repeats)]
        walls, cpus = zip(*times, strict=True)
        result[name] = {
            "least_s": round(min(walls), 4), "median_s": round(statistics.median(walls), 4),
            "median_cpu_s": round(statistics.median(cpus), 4), "floor_s": floor,
        }  # fmt: skip
        if min(walls) > floor:
            late.append(name)
    result["floors_missed"] = late
    print(json.dumps(result, indent=1))
    if options.out:
        options.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 1 if late else 0


if __name__ == "__main__":
    raise SystemExit(main())
