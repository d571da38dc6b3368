"""Kills real runs, or parts of them, at random moments, until they are finished; then proves what they left.

    python tests/chaos/chaos.py --runs 50 [--victim driver ...] [--seed 0]

A run is a `stretto train` of a few seconds, of another paradigm each time, in a process that is forked from one that
has imported everything: its life is then its own and not the imports'. A *victim* is what is killed, one after the
other of `VICTIMS`. All but the driver of a local run are parts of a run on a cluster of three simulated machines, which
is there for all runs. A driver that was killed is started again with `--resume`; whatever else was killed, the driver
has to go on by itself. Every moment follows from the seed, as an update of the run and some time after it; what the
machine does meanwhile does not. A run that ends before its moment is made again with another.
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
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(TESTS / "cases"))

from machines import INSTANCE, RANK, Machines, machines  # noqa: E402 - the tests are no package
from run_cases import recipe, write_task  # noqa: E402

from stretto.assembly.retrain import retrain  # noqa: E402
from stretto.run.folder_checks import standing  # noqa: E402
from stretto.store.reader import JournalReader  # noqa: E402
from stretto.store.traces import recorded_in  # noqa: E402
from stretto.store.verify import exit_code, format_findings, verify  # noqa: E402

STEPS, PROMPTS, GROUP = 6, 3, 4
LIFE_S = 2.0  # about what a run takes before its first update: moments in there are drawn from so many seconds
RAY_LIFE_S = 12.0  # the same on a cluster, whose processes import everything
UPDATE_S = 0.4  # and this after the update that a moment is drawn for
PATIENCE_S = 300.0
ATTEMPTS, ATTEMPT = 6, 1_000_003  # at a run that ends before its moment; and what is added to the seed of each


@dataclass(frozen=True, slots=True)
class Life:
    """A run from its start to its end."""

    process: ForkServerProcess
    machines: Machines | None  # that it is on
    chance: random.Random

    def kill(self) -> bool:
        """The driver, and with it the whole run."""
        self.process.kill()
        self.process.join(PATIENCE_S)
        return self.process.exitcode == -signal.SIGKILL

    def kill_actor(self, kind: str) -> bool:
        assert self.machines is not None
        return self.machines.kill_actor(kind, self.process.is_alive, self.chance)

    def kill_machine(self) -> bool:
        assert self.machines is not None
        return self.machines.kill_machine(self.process.is_alive, self.chance)


LOCAL = "driver"  # the victim that needs no cluster
VICTIMS: dict[str, Callable[[Life], bool]] = {  # each says whether it killed something
    LOCAL: Life.kill,
    "instance": lambda life: life.kill_actor(INSTANCE),
    "trainer": lambda life: life.kill_actor(RANK),
    "machine": Life.kill_machine,
    "driver on a cluster": Life.kill,
}

MIXES: tuple[tuple[str, ...], ...] = (
    ('rollout.paradigm="multi-version"', "rollout.staleness=2", "rollout.in_flight=6", "runtime.instances=2"),
    ('rollout.paradigm="synchronous"',),
    ('rollout.paradigm="multi-version"', "rollout.staleness=2", "rollout.filter=no-signal", "task.order=pass-rate"),
    ('rollout.paradigm="one-step-off"', "evaluation.every=2"),
    ('rollout.paradigm="multi-version"', "rollout.staleness=3", "training.replay={ratio=0.5}", "evaluation.every=2"),
    ('rollout.paradigm="partial"', "rollout.in_flight=6"),
    ('rollout.paradigm="multi-version"', "rollout.staleness=2", "model.lora=", "runtime.durable_versions=false"),
    ('rollout.paradigm="drop"', "rollout.staleness=1", "rollout.in_flight=9", "rollout.rows=36"),
    ("rollout.redundancy={groups=5,members=6}", "rollout.spread=always", "runtime.instances=2", "task.order=pass-rate"),
    ('rollout.paradigm="one-step-off"', "rollout.redundancy={groups=4,members=5}", "rollout.filter=no-signal"),
)

RAY = (
    'runtime.type="ray"',
    "runtime.instance_cpus=0.2",
    "runtime.trainer_cpus=0.2",
    "runtime.instance_seconds=10.0",
    "runtime.update_seconds=120.0",
    "task.reward_workers=1",
)
COUNTS = {  # instances and ranks of either run of a victim: few, because most of a short run is the start of processes
    "instance": ((2, 1), (1, 1)),
    "trainer": ((1, 1), (1, 2)),
    "machine": ((2, 1), (1, 2)),
    "driver on a cluster": ((1, 1), (2, 1)),
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """A run that came to its end."""

    kills: tuple[int, ...]  # at each, the updates that were finished
    mix: tuple[str, ...]
    seconds: float


def survive(
    model: Path,
    folder: Path,
    seed: int,
    victim: str = LOCAL,
    kills: int = 1,
    on: Machines | None = None,
    attempt: int = 0,
) -> Outcome:
    """One run in `folder`, killed up to `kills` times; raises AssertionError where it is not whole at its end.

    Every victim but `LOCAL` is killed `on` machines. Another `attempt` draws other moments.
    """
    chance, started, done = random.Random(seed + ATTEMPT * attempt), time.monotonic(), list[int]()
    mix = MIXES[seed % len(MIXES)]
    folder.mkdir(parents=True)
    write_task(folder)
    (folder / "log").touch()
    often = "runtime.checkpoint_seconds=" + chance.choice(["0.000001", "1.0", "600.0"])
    if victim != LOCAL:
        assert on is not None
        instances, trainers = COUNTS[victim][chance.randrange(2)]
        counts = f"runtime.instances={instances}", f"runtime.trainers={trainers}"
        mix = (*mix, *counts, *RAY, f'runtime.address="{on.address}"')
    options = [f"training.steps={STEPS}", "rollout.max_tokens=40", often, *mix]
    ranks = recipe(model, folder, *options).runtime.trainers  # refuses here what could not be run
    while standing(folder / "run") != "finished":
        life = Life(_start(folder, options), on, chance)
        try:
            while len(done) < kills and _goes_on(life, folder / "run", STEPS if done else STEPS - 2):
                if VICTIMS[victim](life):
                    done.append(finished(folder / "run"))
            life.process.join(PATIENCE_S)
            status, said = life.process.exitcode, (folder / "log").read_text()
            killed = status == -signal.SIGKILL and VICTIMS[victim] == Life.kill
            assert killed or status == 0, f"seed {seed}, {mix}: ended with status {status}: {said[-3000:]}"
        finally:
            life.process.kill()
    what = f"seed {seed}, {mix}, {victim} killed after {done} updates"
    assert "with other bits" not in said, f"{what}: {said[-3000:]}"
    prove(folder / "run", what, ranks)
    return Outcome(tuple(done), mix, time.monotonic() - started)


def _goes_on(life: Life, run: Path, last: int) -> bool:
    """Wait for the next moment to kill something, soon after update `last` or earlier; whether the run goes on then."""
    before = finished(run)
    target = life.chance.randint(before, max(before, last))
    start = RAY_LIFE_S if life.machines else LIFE_S
    soon = life.chance.uniform(0.0, start if target == before else UPDATE_S)
    return _wait(life.process, run, target, soon)


def finished(run: Path) -> int:
    """Updates that are finished."""
    return max(0, recorded_in(run).finished)


def _start(folder: Path, options: list[str]) -> ForkServerProcess:
    os.environ["OMP_NUM_THREADS"] = "1"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["stretto.assembly.train"])
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


def prove(run: Path, what: str, ranks: int = 1) -> None:
    """The laws, exactly the planned updates, every planned group once, files that agree, and the same weights again.

    A replay is by one rank, so it comes to the same bits as one.
    """
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
    if ranks > 1:
        return
    again = retrain(run)
    assert again.difference is None, (what, again.difference)
    assert again.updates == STEPS, what


def main() -> int:
    parser = argparse.ArgumentParser(description="kill runs and have them go on")
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--victim", choices=list(VICTIMS), action="append", help="default: one after the other")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    from stretto.models.tiny import WarmStart, tiny_model

    root = Path(tempfile.mkdtemp(prefix="stretto-chaos-"))
    model = tiny_model(root / "model", warm_start=WarmStart(steps=2))
    victims = options.victim or list(VICTIMS)
    runs, kills = Counter[str](), Counter[str]()
    with ExitStack() as stack:
        on = stack.enter_context(machines()) if victims != [LOCAL] else None
        for seed in range(options.seed, options.seed + options.runs):
            folder, victim = root / str(seed), victims[seed % len(victims)]
            most = 1 + seed % (3 if victim == LOCAL else 2)
            for attempt in range(ATTEMPTS):
                outcome = survive(model, folder, seed, victim, most, None if victim == LOCAL else on, attempt)
                if outcome.kills:
                    break
                print(f"run {seed}: had ended before its moment, so another is drawn; {victim}", flush=True)
                shutil.rmtree(folder)
            else:
                raise AssertionError(f"seed {seed}: {victim} was never killed in {ATTEMPTS} runs")
            runs[victim] += 1
            kills[victim] += len(outcome.kills)
            at = ", ".join(map(str, outcome.kills))
            took, mix = f"{outcome.seconds:.0f} s", " ".join(outcome.mix)
            print(f"run {seed}: killed after updates: {at}; {victim}; {took}; {mix}", flush=True)
            shutil.rmtree(folder)
    shutil.rmtree(root)
    for victim in victims:
        print(f"{runs[victim]} runs survived {kills[victim]} kills of: {victim}")
    print(f"{runs.total()} runs survived {kills.total()} kills")
    return 0


if __name__ == "__main__":
    sys.exit(main())
