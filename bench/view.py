"""How long `stretto view` takes to answer, on a run of a thousand updates and a million trajectories.

    python -m bench.view [--updates 1000] [--trajectories 1000000] [--instances 4096] [--journal FOLDER]
        [--browser] [--out bench/results/view.json]
    python -m bench.view --cpu RECIPE [--out bench/results/view_cpu.json]

Makes a journal of that size with the tables of a real one (in `--journal`, or in a temporary folder), starts the real
server in a process of its own, and asks each question of the page twice: of a server that has read nothing yet
(`cold`, by the clock; `cold_cpu`, its processor time), and again (`warm`). The floors: the first page within one
second, any view within two, but for a search of text, which reports progress.

`--browser` measures the page in Chromium instead (`bench/view_browser.py`): the same floors, with the drawing.

`--cpu RECIPE` runs a recipe with a server and a page beside it: in Chromium if it and playwright are here, else a
client that polls as the page does. It measures the processor time of the server over that of the run. The floor is 2 %.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.view_browser import FLAGS, SIZE, chromium, measure_browser
from stretto.store.journal import JOURNAL_NAME
from stretto.store.schema import LAWS_GIVEN_UP, SCHEMA, SCHEMA_VERSION

GROUP = 8
STALENESS = 2
UPDATE_S = 4.0
BEGAN = 1_700_000_000.0
PROMPT = "What is the sum of all numbers from one to a hundred, and how do you know it? " * 2
TEXT = "First we pair the numbers, then we multiply the sum of each pair by the number of pairs. "
FIRST_S, VIEW_S, READER_SHARE = 1.0, 2.0, 0.02  # floors


def make_journal(path: Path, updates: int, trajectories: int, instances: int, seed: int = 0) -> None:
    """Writes a journal of a finished run. Its digests are not real, so `verify` would refuse it."""
    rng = np.random.default_rng(seed)
    groups = trajectories // GROUP
    batch = groups // updates
    db = sqlite3.connect(path, isolation_level=None)
    db.executescript(f"PRAGMA journal_mode = WAL; PRAGMA synchronous = OFF; BEGIN; {SCHEMA} "
                     f"PRAGMA user_version = {SCHEMA_VERSION}; COMMIT; BEGIN")  # fmt: skip
    facts = {
        "paradigm": "multi-version", "staleness": STALENESS, "auto": False, "batch": batch, "group": GROUP,
        "updates": updates, "seed": seed, "data_rows": groups, "retries": 2, "filter_limit": 0, "order": "shuffled",
        "replay_groups": 0, "replay_uses": 0, "templated": False, "vocabulary": 151_936,
        "laws_broken": list(LAWS_GIVEN_UP["multi-version"]),
    }  # fmt: skip
    db.executemany("INSERT INTO run VALUES (?, ?)", [(key, json.dumps(value)) for key, value in facts.items()])
    db.execute("INSERT INTO sessions VALUES (1, ?, ?, 'finished', NULL, NULL)", (BEGAN, BEGAN + updates * UPDATE_S + 9))
    db.executemany(
        "INSERT INTO instances VALUES (1, ?, 4, ?, NULL, NULL, NULL)", [(each, BEGAN) for each in range(instances)]
    )
    db.executemany(
        "INSERT INTO versions VALUES (?, ?, ?, 0, ?, 0)",
        [(v, f"{v:032x}", BEGAN + v * UPDATE_S, BEGAN + v * UPDATE_S + 0.1) for v in range(updates + 1)],
    )
    for update in range(updates):
        _write_update(db, rng, update, batch, instances)
        if update % 20 == 19:
            db.execute("COMMIT")
            db.execute("BEGIN")
    db.executemany(
        "INSERT INTO moves (at, trajectory, version, source, target, context, num_bytes, prefilled, reason) "
        "VALUES (?, ?, ?, ?, ?, 900, 1000000, 0, 'instance 3 has less to do')",
        [
            (BEGAN + float(at), int(rng.integers(trajectories)), 0, int(rng.integers(instances)), 0)
            for at in np.sort(rng.uniform(0, updates * UPDATE_S, 20 * updates))
        ],
    )
    for evaluation in range(1, 6):
        _write_evaluation(db, rng, evaluation, evaluation * updates // 5)
    db.execute("COMMIT")
    db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    db.close()


def _insert(db: sqlite3.Connection, table: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Inserts rows by the names of their columns. All rows have those of the first; other columns are empty."""
    names = list(rows[0])
    marks = ", ".join("?" for _ in names)
    db.executemany(f"INSERT INTO {table} ({', '.join(names)}) VALUES ({marks})", [tuple(r.values()) for r in rows])


def _write_update(db: sqlite3.Connection, rng: Any, update: int, batch: int, instances: int) -> None:
    start = BEGAN + update * UPDATE_S
    ids = [update * batch + each for each in range(batch)]
    prompt = np.arange(48, dtype="<i4").tobytes()
    version = max(0, update - 1)
    _insert(db, "groups", [
        {
            "group_id": g, "epoch": 0, "prompt_index": g, "row_number": g, "version": version,
            "deadline": version + STALENESS, "staleness": STALENESS, "prompt_text": f"{PROMPT}{g}?",
            "prompt_tokens": prompt, "row": '{"answer": "5050"}', "admitted_at": start, "draw": "shuffled",
            "task_index": g,
        }
        for g in ids
    ])  # fmt: skip
    members = [(group * GROUP + member, group, member) for group in ids for member in range(GROUP)]
    rewards = (rng.random(len(members)) < 0.3 + 0.5 * min(1.0, update / 500)).astype(float)
    lengths = np.clip(rng.lognormal(3.2, 0.6, len(members)), 4, 256).astype(int)
    begins = start + rng.uniform(0, 0.5, len(members))
    ends = begins + lengths * 0.03
    places = rng.integers(instances, size=len(members))
    _insert(db, "trajectories", [
        {
            "trajectory": id, "group_id": group, "member": member, "version": version, "seed": id, "state": "trained",
            "instance": int(places[k]), "reward": float(rewards[k]), "scored_at": float(ends[k]),
            "ended_at": start + 8, "num_lineages": 1,
        }
        for k, (id, group, member) in enumerate(members)
    ])  # fmt: skip
    tokens = np.arange(256, dtype="<i4").tobytes()
    logprobs = rng.uniform(-2, 0, 256).astype("<f4").tobytes()
    _insert(db, "completions", [
        {
            "trajectory": id, "lineage": 0, "train": 1, "version": version, "checksum": f"{version:032x}",
            "num_tokens": int(n := lengths[k]), "num_sampled": int(n), "finish": "length" if n == 256 else "stop",
            "started_at": float(begins[k]), "finished_at": float(ends[k]), "prefilled": 0,
            "text": (TEXT * 3)[: 3 * int(n)] + str(id), "tokens": tokens[: 4 * int(n)],
            "logprobs": logprobs[: 4 * int(n)],
        }
        for k, (id, _, _) in enumerate(members)
    ])  # fmt: skip
    steps = ((None, "running", 0.0), ("running", "scoring", 3.0), ("scoring", "scored", 3.1),
             ("scored", "training", 4.0), ("training", "trained", 8.0))  # fmt: skip
    _insert(db, "transitions", [
        {"trajectory": id, "from_state": a, "to_state": b, "at": start + at, "reason": ""}
        for a, b, at in steps for id, _, _ in members
    ])  # fmt: skip
    _insert(db, "members", [
        {"update_id": update, "position": place, "trajectory": id} for place, (id, _, _) in enumerate(members)
    ])  # fmt: skip
    line = {"kind": "update", "update": update, "trainer_waited_for": f"update {update}: 3 of {batch} groups"}
    line |= {f"metric_{each}": float(rng.random()) for each in range(60)}
    line |= {
        "reward_mean": float(rewards.mean()), "tokens": int(lengths.sum()), "tokens_per_second": int(lengths.sum()) / 4,
        "staleness_mean": 1.0, "staleness_max": 2, "entropy": 1 / (1 + update / 100), "grad_norm": float(rng.random()),
        "mismatch_kl": 1e-4, "mismatch_tokens": 10, "staleness_kl": 1e-3, "length_mean": float(lengths.mean()),
        "length_max": int(lengths.max()), "update_seconds": 3.2, "cycle_seconds": UPDATE_S, "trainer_idle_seconds": 0.7,
    }  # fmt: skip
    _insert(db, "updates", [
        {
            "update_id": update, "taken_at": start + 4.7, "finished_at": start + 7.9, "checksum": f"{update + 1:032x}",
            "metrics": json.dumps(line), "totals": "{}", "samples": bytes(16 * len(members)), "digest": "0" * 32,
        }
    ])  # fmt: skip


def _write_evaluation(db: sqlite3.Connection, rng: Any, id: int, version: int) -> None:
    at = BEGAN + version * UPDATE_S
    _insert(db, "evaluations", [
        {"id": id, "version": version, "kind": "during", "at": at, "reward": 0.5, "num": 1000, "seconds": 6.0}
    ])  # fmt: skip
    tokens, logprobs = np.arange(64, dtype="<i4").tobytes(), rng.uniform(-2, 0, 64).astype("<f4").tobytes()
    if id == 1:
        _insert(db, "held_out", [
            {
                "id": index, "prompt_index": index, "digest": "", "prompt_text": f"{PROMPT}{index}?",
                "prompt_tokens": tokens, "row": "{}",
            }
            for index in range(1_000)
        ])  # fmt: skip
    _insert(db, "answers", [
        {
            "evaluation": id, "prompt_index": index, "prompt": index, "greedy": 0, "lineage": 0, "num_lineages": 1,
            "reward": float(index % 2), "num_tokens": 64, "num_sampled": 64, "finish": "stop", "text": TEXT,
            "tokens": tokens, "logprobs": logprobs,
        }
        for index in range(1_000)
    ])  # fmt: skip


# -- the server --------------------------------------------------------------------------------------------------------


class Server:
    """`stretto view` in a process of its own."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, "-m", "stretto", "view", str(folder), "--port", "0"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().split()[0]

    def ask(self, path: str, **parameters: Any) -> tuple[float, Any]:
        """Asks one question; returns the seconds that it took, and the answer."""
        url = f"{self.url}{path}?{urllib.parse.urlencode(parameters)}"
        started = time.perf_counter()
        with urllib.request.urlopen(url, timeout=600) as response:
            content = response.read()
        seconds = time.perf_counter() - started
        return seconds, json.loads(content) if path.startswith("api/") else content

    def cpu_s(self) -> float:
        """Returns the processor time of the server so far."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def memory(self) -> float:
        """Returns its memory in MB."""
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(text.partition("VmRSS:")[2].split()[0]) / 1024

    def close(self) -> None:
        self.process.terminate()
        self.process.wait()


FILES = ("", *(f"page/{name}" for name in ("style.css", "elements.js", "data.js", "charts.js", "overview.js",
         "timeline.js", "tokens.js", "trajectories.js", "compare.js", "app.js")))  # fmt: skip


def measure(folder: Path, updates: int, trajectories: int) -> dict[str, Any]:
    """Asks everything twice. A cold question of trajectories is asked until all of them are read."""
    began, end = BEGAN, BEGAN + (updates + 3) * UPDATE_S
    whole = {"from": began, "to": end, "now": end, "bins": 900, "version_rows": 44, "instance_rows": 24}
    middle = began + updates * UPDATE_S / 2
    questions: dict[str, tuple[str, dict[str, Any]]] = {
        "state": ("api/state", {}),
        "curves": ("api/curves", {}),
        "timeline, whole run": ("api/timeline", whole),
        "timeline, one update": ("api/timeline", {**whole, "from": middle, "to": middle + 6}),
        "timeline, 64 instances": ("api/timeline", {**whole, "instances": "0..63"}),
        "trajectories, newest": ("api/trajectories", {}),
        "trajectories of an update": ("api/trajectories", {"update": updates // 2}),
        "trajectories by reward and length": ("api/trajectories", {"reward": "1", "length": "99..", "sort": "-length"}),
        "one trajectory": ("api/trajectory", {"id": trajectories // 2}),
        "one group": ("api/group", {"id": trajectories // 2 // GROUP}),
        "answers of an evaluation": ("api/answers", {"evaluation": 3}),
        "text search, first page": ("api/trajectories", {"text": "pair the numbers"}),
        "text search, first answer of a rare text": ("api/trajectories", {"text": "no such text"}),
    }  # fmt: skip
    result: dict[str, Any] = {}
    server = Server(folder)
    try:
        started, before = time.perf_counter(), server.cpu_s()
        for name in (*FILES, "api/runs", "api/poll"):
            server.ask(name)
        seconds = time.perf_counter() - started
        result["first page, all requests"] = {"cold": seconds, "cold_cpu": server.cpu_s() - before}
    finally:
        server.close()
    for name, (path, parameters) in questions.items():
        server = Server(folder)
        try:
            before = server.cpu_s()
            cold, _ = server.ask(path, **parameters)
            result[name] = {"cold": cold, "cold_cpu": server.cpu_s() - before}
        finally:
            server.close()
    server = Server(folder)
    try:
        started, answers = time.perf_counter(), 0
        while True:
            _, found = server.ask("api/timeline", **whole)
            answers += 1
            if found["read"] >= found["all"]:
                break
        result["reading all trajectories"] = {"seconds": time.perf_counter() - started, "answers": answers}
        for name, (path, parameters) in questions.items():
            result[name]["warm"] = min(server.ask(path, **parameters)[0] for _ in range(3))
        result["memory_mb"] = server.memory()
    finally:
        server.close()
    return result


def measure_cpu(recipe: str, scratch: Path, view: str) -> dict[str, Any]:
    """Runs a recipe with a server and a page beside it, and returns the processor time of both.

    The page is Chromium's if it is here. Otherwise a client asks as the page does.
    """
    out = scratch / f"run-{view}"
    command = [sys.executable, "-m", "stretto", "train", recipe, "--out", str(out)]
    began = time.monotonic()
    run = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not (out / JOURNAL_NAME).exists():
        if run.poll() is not None:
            raise SystemExit(f"`{' '.join(command)}` ended with status {run.returncode}")
        time.sleep(0.1)
    time.sleep(1.0)
    server, ended = Server(out), threading.Event()
    try:
        beside = _browse if _has_browser() else _poll
        page = threading.Thread(target=beside, args=(server, view, ended), name="page")
        page.start()
        _, status, usage = os.wait4(run.pid, 0)
        run.returncode = os.waitstatus_to_exitcode(status)
        ended.set()
        page.join()
        server_s = server.cpu_s()
    finally:
        server.close()
    if run.returncode:
        raise SystemExit(f"`{' '.join(command)}` ended with status {run.returncode}")
    run_s = usage.ru_utime + usage.ru_stime
    return {
        "page": "Chromium" if beside is _browse else "a client", "server_cpu_s": round(server_s, 2),
        "run_cpu_s": round(run_s, 1), "seconds": round(time.monotonic() - began, 1),
        "share": round(server_s / run_s, 4),
    }  # fmt: skip


def _has_browser() -> bool:
    try:
        import playwright.sync_api  # noqa: F401
    except ImportError:
        return False
    return bool(shutil.which("chromium") or shutil.which("chromium-browser") or os.environ.get("CHROMIUM"))


def _browse(server: Server, view: str, ended: threading.Event) -> None:
    """Shows a view in Chromium until the run has ended."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=chromium(), args=list(FLAGS))
        page = browser.new_page(viewport=SIZE)
        page.goto(f"{server.url}#/{view}")
        while not ended.is_set():
            page.wait_for_timeout(500)
        browser.close()


def _poll(server: Server, view: str, ended: threading.Event) -> None:
    """Asks as the page does until the run has ended."""
    after, seen = -1, ""
    for name in (*FILES, "api/runs"):
        server.ask(name)
    while True:
        spent, found = server.ask("api/poll", after=after, seen=seen)
        seen = found["seen"]
        if found["state"] is not None:
            after = (found["curves"]["updates"]["update"] or [after])[-1]
            end = found["state"]["now"]
            if view == "timeline":
                whole = {"from": found["state"]["sessions"][0]["started_at"], "to": end, "now": end, "bins": 870}
                spent += server.ask("api/timeline", **whole)[0]
        if ended.wait(min(15.0, max(2.0, spent / 0.01))):
            return


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--updates", type=int, default=1_000)
    parser.add_argument("--trajectories", type=int, default=1_000_000)
    parser.add_argument("--instances", type=int, default=4_096)
    parser.add_argument("--journal", type=Path)
    parser.add_argument("--browser", action="store_true", help="measure the page in Chromium")
    parser.add_argument("--cpu", metavar="RECIPE", help="measure the CPU time of a server beside a run of this recipe")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        if options.cpu:
            found = {view: measure_cpu(options.cpu, Path(scratch), view) for view in ("overview", "timeline")}
            late = [view for view, each in found.items() if each["share"] > READER_SHARE]
            return _finish(f"--cpu {options.cpu}", {"recipe": options.cpu}, found, late, options.out)
        folder = options.journal or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / JOURNAL_NAME).exists():
            started = time.perf_counter()
            make_journal(folder / JOURNAL_NAME, options.updates, options.trajectories, options.instances)
            print(f"made the journal in {time.perf_counter() - started:.0f} s")
        setting = {"updates": options.updates, "trajectories": options.trajectories, "instances": options.instances,
                   "journal_bytes": (folder / JOURNAL_NAME).stat().st_size}  # fmt: skip
        if options.browser:
            found = _in_browser(folder, Path(scratch))
            late = [
                name
                for name, each in found.items()
                if isinstance(each, dict)
                and (each.get("drawn_s", 0.0) > VIEW_S or (each.get("first_paint_s") or 0.0) > FIRST_S)
            ]
            return _finish("--browser", setting, found, late, options.out)
        found = measure(folder, options.updates, options.trajectories)
    late = [
        name
        for name, value in found.items()
        if isinstance(value, dict) and value.get("cold", 0.0) > (FIRST_S if name.startswith("first page") else VIEW_S)
    ]
    return _finish("", setting, found, late, options.out)


def _in_browser(folder: Path, scratch: Path) -> dict[str, Any]:
    report = scratch / "report.html"
    command = [sys.executable, "-m", "stretto", "report", str(folder), "-o", str(report), "--no-verify"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    server = Server(folder)
    try:
        return {"report_bytes": report.stat().st_size, **measure_browser(server.url, report)}
    finally:
        server.close()


def _finish(flags: str, setting: dict[str, Any], found: dict[str, Any], late: list[str], out: Path | None) -> int:
    """Prints the result and writes it. Returns the exit status: 1 if a floor is missed."""
    report = {
        "command": f"python -m bench.view {flags}".strip(),
        "at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": {"cores": os.cpu_count(), "python": platform.python_version(), "sqlite": sqlite3.sqlite_version,
                    "numpy": np.__version__, "machine": platform.machine(), "load": os.getloadavg()},
        "setting": setting,
        "seconds": found,
        "floors_missed": late,
    }  # fmt: skip
    for name, value in found.items():
        print(f"  {name:<44} {json.dumps(value) if not isinstance(value, float) else f'{value:.0f}'}")
    print(f"floors missed: {', '.join(late) or 'none'}")
    if out:
        out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 1 if late else 0


if __name__ == "__main__":
    raise SystemExit(main())
