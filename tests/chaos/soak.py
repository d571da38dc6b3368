"""Hundreds of updates of one real run whose instances join, leave and die all the while; then proves what it left.

    python tests/chaos/soak.py --updates 500 [--seed 0]

Everything is real: a tiny model, native engines of one slot each in threads of this process, the journal, and requests
by the files of `stretto pool`, from several people at once. Who dies, and when, follows from the seed; what the machine
does meanwhile does not.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

TESTS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(TESTS / "cases"))

from run_cases import recipe, rows, run, write_task  # noqa: E402 - the tests are no package

from stretto.engines.native.engine import NativeEngine  # noqa: E402
from stretto.errors import RunError  # noqa: E402
from stretto.observe.progress import Silent  # noqa: E402
from stretto.run import pool_requests  # noqa: E402
from stretto.store.verify import exit_code, format_findings, verify  # noqa: E402

PROMPTS, GROUP = 3, 4
FIRST, FEWEST, MOST = 3, 2, 5  # instances: at the start, and between which they come and go
PEOPLE = 2  # who ask for that at the same time
PAUSE_S = 1.0  # between two requests of one of them, at most
MORTAL_SHARE, LIFE_STEPS = 0.4, (20, 800)  # of the instances, and how many steps those make before they die
SHOW_S = 10.0  # between two lines of progress
REFUSALS = ("there is no instance", "is the last one", "stays, as all others were lost")


@dataclass(frozen=True, slots=True)
class Soaked:
    """A run that came to its end, as its journal has it."""

    updates: int
    joins: int  # beyond those that it began with and those that took a lost one's place
    leaves: int
    losses: int
    moves: int  # of trajectories, from one instance to another
    proof: str  # what `verify` says

    def __str__(self) -> str:
        return (
            f"{self.updates} updates with {self.joins} joins, {self.leaves} leaves and {self.losses} losses of "
            f"instances, {self.moves} moves of trajectories"
        )


def soak(model: Path, folder: Path, updates: int, seed: int, say: Callable[[str], None]) -> Soaked:
    """One run in `folder`; raises AssertionError where it is not whole at its end."""
    folder.mkdir(parents=True)
    write_task(folder)
    made = recipe(
        model,
        folder,
        f"training.steps={updates}",
        "rollout.staleness=2",
        "rollout.in_flight=7",
        "rollout.max_tokens=40",
        "evaluation.prompts=0",
        f"runtime.instances={FIRST}",
        "runtime.slots=1",
        "runtime.rebalance_seconds=0.2",
        "runtime.replacements=10000",
        "runtime.checkpoint_seconds=20.0",
    )
    people = [_Person(folder / "run", random.Random(f"{seed} {number}")) for number in range(PEOPLE)]
    with contextlib.chdir(folder), _mortal(random.Random(seed)):
        for person in people:
            person.start()
        try:
            run(made, folder / "run", observer=_Progress(updates, people, say))
        finally:
            for person in people:
                person.over.set()
    for person in people:
        person.join(30.0)
        if person.error is not None:
            raise person.error
    return prove(folder / "run", updates, sum(person.added for person in people))


def prove(folder: Path, updates: int, added: int) -> Soaked:
    """The laws, exactly the planned updates, every planned trajectory once, and instances that came and went."""
    findings = verify(folder)
    proof = format_findings(findings)
    assert exit_code(findings) == 0, proof
    counts = dict(rows(folder, "SELECT state, COUNT(*) FROM trajectories GROUP BY state"))
    assert counts == {"trained": updates * PROMPTS * GROUP}, counts
    assert rows(folder, "SELECT COUNT(finished_at) FROM updates") == [(updates,)]
    left = dict(rows(folder, "SELECT outcome, COUNT(*) FROM instances WHERE outcome IS NOT NULL GROUP BY outcome"))
    ((moves,),) = rows(folder, "SELECT COUNT(*) FROM moves")
    return Soaked(updates, added, left.get("removed", 0), left.get("lost", 0), moves, proof)


class _Person(threading.Thread):
    """Has instances come and go by the requests of `stretto pool`, one after the other."""

    def __init__(self, folder: Path, chance: random.Random) -> None:
        super().__init__(daemon=True)
        self.over = threading.Event()
        self.error: Exception | None = None
        self.added = self.removed = 0
        self._folder, self._chance = folder, chance

    def run(self) -> None:
        try:
            while not (self._folder / pool_requests.FOLDER).is_dir() and not self.over.wait(0.02):
                pass  # it takes requests once its instances have started
            while not self.over.wait(self._chance.uniform(0.0, PAUSE_S)):
                self._ask()
        except RunError as error:
            if pool_requests.is_alive(self._folder) and "the run ended" not in str(error):
                self.error = error
        except Exception as error:
            self.error = error

    def _ask(self) -> None:
        there = [each["instance"] for each in pool_requests.ask(self._folder, {"do": "list"})["instances"]]
        adds = len(there) <= FEWEST or (len(there) < MOST and self._chance.random() < 0.5)
        try:
            if adds:
                pool_requests.ask(self._folder, {"do": "add", "count": 1})
                self.added += 1
            else:
                pool_requests.ask(self._folder, {"do": "remove", "instance": self._chance.choice(there)})
                self.removed += 1
        except RunError as error:  # another has removed it meanwhile, or it died
            if not any(refusal in str(error) for refusal in REFUSALS):
                raise


class _Progress(Silent):
    def __init__(self, updates: int, people: list[_Person], say: Callable[[str], None]) -> None:
        self._updates, self._people, self._say = updates, people, say
        self._began = self._shown_at = time.monotonic()

    def updated(self, line: Mapping[str, Any]) -> None:
        now, done = time.monotonic(), line["update"] + 1
        if now - self._shown_at >= SHOW_S or done == self._updates:
            self._shown_at = now
            added, removed = (sum(getattr(person, what) for person in self._people) for what in ("added", "removed"))
            self._say(
                f"soak: {done} of {self._updates} updates, {added} joins, {removed} leaves, {now - self._began:.0f} s"
            )


@contextlib.contextmanager
def _mortal(chance: random.Random) -> Iterator[None]:
    """Some of the instances that are made here die after some steps."""
    original, lives = NativeEngine.step, WeakKeyDictionary[NativeEngine, float]()

    def step(self: NativeEngine) -> Any:
        if self not in lives:
            lives[self] = chance.randrange(*LIFE_STEPS) if chance.random() < MORTAL_SHARE else float("inf")
        lives[self] -= 1
        if lives[self] < 0:
            raise MemoryError("told to die")
        return original(self)

    NativeEngine.step = step  # type: ignore[method-assign]
    try:
        yield
    finally:
        NativeEngine.step = original  # type: ignore[method-assign]


def main() -> int:
    parser = argparse.ArgumentParser(description="have the instances of a long run come, go and die")
    parser.add_argument("--updates", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.updates < 1:
        parser.error(f"`--updates {options.updates}` trains nothing; use at least 1")

    from stretto.models.tiny import WarmStart, tiny_model

    root = Path(tempfile.mkdtemp(prefix="stretto-soak-"))
    model = tiny_model(root / "model", warm_start=WarmStart(steps=2))
    began = time.monotonic()
    done = soak(model, root / "soak", options.updates, options.seed, lambda text: print(text, flush=True))
    shutil.rmtree(root)
    print(done.proof)
    print(f"a soak of {done}, in {time.monotonic() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
