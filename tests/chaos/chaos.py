"""Kills real runs at random moments and has them go on, until they are finished; then proves what they left.

    python tests/chaos/chaos.py --runs 50 [--victim driver] [--seed 0]

A run is a `stretto train` of a few seconds, of another paradigm each time, in a process that is forked from one that
has imported everything: its life is then its own and not the imports'. A *victim* is what is killed: a function that
ends something of the run's and says whether it did. More kinds are rows of `VICTIMS`. Every moment follows from the
seed, as an update of the run and some time after it; what the machine does meanwhile does not.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(TESTS))

from run_cases import recipe, write_task  # noqa: E402 - the tests are no package
from stretto.runtime.replaying import replay  # noqa: E402
from stretto.runtime.starting import standing  # noqa: E402
from stretto.store.reader import JournalReader  # noqa: E402
from stretto.store.schema import JOURNAL_NAME, is_empty  # noqa: E402
from stretto.store.verify import exit_code, format_findings, verify  # noqa: E402

STEPS, PROMPTS, GROUP = 6, 3, 4
LIFE_S = 2.0  # about what a run takes before its first update: moments in there are drawn from so many seconds
UPDATE_S = 0.4  # and this after the update that a moment is drawn for
PATIENCE_S = 300.0

Victim = Callable[[ForkServerProcess, random.Random], bool]


def kill_driver(process: ForkServerProcess, chance: random.Random) -> bool:
    """The whole run, at once."""
    process.kill()
    process.join(PATIENCE_S)
    return process.exitcode == -signal.SIGKILL


VICTIMS: dict[str, Victim] = {"driver": kill_driver}

MIXES: tuple[tuple[str, ...], ...] = (
    ('rollout.paradigm="multi-version"', "rollout.staleness=2", "rollout.in_flight=6", "runtime.instances=2"),
    ('rollout.paradigm="synchronous"',),
    ('rollout.paradigm="multi-version"', "rollout.staleness=2", "rollout.filter=no-signal", "task.order=pass-rate"),
    ('rollout.paradigm="one-step-off"', "evaluation.every=2"),
    ('rollout.paradigm="multi-version"', "rollout.staleness=3", "training.replay={ratio=0.5}", "evaluation.every=2"),
    ('rollout.paradigm="partial"', "rollout.in_flight=6"),
    ('rollout.paradigm="multi-version"', "rollout.staleness=2", "model.lora=", "runtime.durable_versions=false"),
    ('rollout.paradigm="drop"', "rollout.staleness=1", "rollout.in_flight=9", "rollout.rows=36"),
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """A run that came to its end."""

    kills: tuple[int, ...]  # at each, the updates that were finished
    mix: tuple[str, ...]
    seconds: float


def survive(model: Path, folder: Path, seed: int, victim: str = "driver", kills: int = 1) -> Outcome:
    """One run in `folder`, killed up to `kills` times; raises AssertionError where it is not whole at its end."""
    chance, started, done = random.Random(seed), time.monotonic(), list[int]()
    mix = MIXES[seed % len(MIXES)]
    folder.mkdir(parents=True)
    write_task(folder)
    often = "runtime.checkpoint_seconds=" + chance.choice(["0.000001", "1.0", "600.0"])
    options = [f"training.steps={STEPS}", "rollout.max_tokens=40", often, *mix]
    recipe(model, folder, *options)  # refuses here what could not be run
    while standing(folder / "run") != "finished":
        process = _start(folder, options)
        before = finished(folder / "run")
        target = chance.randint(before, STEPS)
        soon = chance.uniform(0.0, LIFE_S if target == before else UPDATE_S)
        goes_on = len(done) < kills and _wait(process, folder / "run", target, soon)
        if goes_on and VICTIMS[victim](process, chance):
            done.append(finished(folder / "run"))
        process.join(PATIENCE_S)
        if process.exitcode == -signal.SIGKILL:
            continue
        said = (folder / "log").read_text()[-3000:]
        assert process.exitcode == 0, f"seed {seed}, {mix}: ended with status {process.exitcode}: {said}"
    prove(folder / "run", f"seed {seed}, {mix}, killed after {done} updates")
    return Outcome(tuple(done), mix, time.monotonic() - started)


def finished(run: Path) -> int:
    """Updates that are finished."""
    if not (run / JOURNAL_NAME).exists() or is_empty(run / JOURNAL_NAME):
        return 0
    with JournalReader(run) as reader:
        return reader.num_updates()


def _start(folder: Path, options: list[str]) -> ForkServerProcess:
    os.environ["OMP_NUM_THREADS"] = "1"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["stretto.runtime.run"])
    words = ["train", "recipe.toml", "--out", "run", *(word for each in options for word in ("--set", each))]
    if (folder / "run" / "config.toml").exists():
        words.append("--resume")
    process = context.Process(target=live, args=(folder, words))
    process.start()
    return process


def live(folder: Path, words: list[str]) -> None:
    """What the process of a run does."""
    from stretto.cli import main as stretto

    log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.chdir(folder)
    sys.exit(stretto(words))


def _wait(process: ForkServerProcess, run: Path, updates: int, seconds: float) -> bool:
    """Wait until the run has its folder and so many updates, and then so long; whether it still goes on then."""
    ends = time.monotonic() + PATIENCE_S
    while process.is_alive() and time.monotonic() < ends and (not run.exists() or _told(run) < updates):
        time.sleep(0.005)
    process.join(seconds)
    return process.is_alive()


def _told(run: Path) -> int:
    """Updates that the run has told of, which costs it nothing to ask."""
    path = run / "metrics.jsonl"
    return path.read_bytes().count(b'"kind": "update"') if path.exists() else 0


def prove(run: Path, what: str) -> None:
    """The laws, exactly the planned updates, every planned group once, files that agree, and the same weights again."""
    findings = verify(run)
    assert exit_code(findings) == 0, f"{what}\n{format_findings(findings)}"
    summary = json.loads((run / "summary.json").read_text())
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["update"] for line in lines if line["kind"] == "update"] == list(range(STEPS)), what
    with JournalReader(run) as reader:
        assert reader.num_updates() == STEPS, what
        counts = reader.counts()
        groups = reader.num_groups()
        evaluated = [(each.version, each.kind) for each in reader.evaluations()]
    assert counts["trained"] == STEPS * PROMPTS * GROUP == summary["trained_trajectories"], what
    assert summary["steps"] == STEPS, what
    for end in ("failed", "dropped", "filtered"):
        assert counts.get(end, 0) == summary[f"{end}_trajectories"], (what, end)
    if not counts.get("dropped") and not counts.get("filtered"):
        assert groups == STEPS * PROMPTS, what
    assert len({version for version, _ in evaluated}) == len(evaluated), (what, evaluated)
    assert [each["version"] for each in summary["evaluations"]] == [v for v, kind in evaluated if kind != "skipped"], (
        what
    )
    again = replay(run)
    assert again.difference is None, (what, again.difference)
    assert again.updates == STEPS, what


def main() -> int:
    parser = argparse.ArgumentParser(description="kill runs and have them go on")
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--victim", choices=sorted(VICTIMS), default="driver")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    from stretto.tiny import WarmStart, tiny_model

    root = Path(tempfile.mkdtemp(prefix="stretto-chaos-"))
    model = tiny_model(root / "model", warm_start=WarmStart(steps=2))
    survived = 0
    for seed in range(options.seed, options.seed + options.runs):
        folder = root / str(seed)
        outcome = survive(model, folder, seed, options.victim, kills=1 + seed % 3)
        survived += len(outcome.kills)
        at = ", ".join(map(str, outcome.kills)) or "never"
        print(f"run {seed}: killed after updates: {at}; {outcome.seconds:.0f} s; {' '.join(outcome.mix)}", flush=True)
        shutil.rmtree(folder)
    shutil.rmtree(root)
    print(f"{options.runs} runs survived {survived} kills of the {options.victim}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
