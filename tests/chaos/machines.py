"""A cluster of simulated machines that runs are on, and how parts of it are killed."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

FIND_S = 120.0  # until what is to be killed has started
TITLE = "ray::"  # how Ray names its processes, followed by the class of the actor
INSTANCE, RANK = "Instance", "TrainerRank"


class Machines:
    """The driver's and `workers`, which everything is on, or the driver's alone. One that is killed is replaced."""

    def __init__(self, workers: int) -> None:
        from ray.cluster_utils import Cluster

        head = {"num_cpus": 0 if workers else 1, "include_dashboard": False}
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        self._workers = [self._cluster.add_node(num_cpus=1) for _ in range(workers)] or [self._cluster.head_node]

    @property
    def address(self) -> str:
        """Where runs join it."""
        return str(self._cluster.address)

    def kill_actor(self, kind: str, alive: Callable[[], bool], chance: random.Random) -> bool:
        """Kill the process of one actor, once there is one; whether there was while the run was `alive`."""
        if not (found := self._wait(kind, alive)):
            return False
        os.kill(chance.choice(found)[1], signal.SIGKILL)
        return True

    def kill_machine(self, alive: Callable[[], bool], chance: random.Random) -> bool:
        """Kill a machine that something of the run is on, once there is one; another joins."""
        if not (found := self._wait("", alive)):
            return False
        machine = chance.choice(found)[0]
        assert machine is not self._cluster.head_node, "a run does not survive the machine of its driver"
        self._cluster.remove_node(machine, allow_graceful=False)
        self._workers.remove(machine)
        self._workers.append(self._cluster.add_node(num_cpus=1))
        return True

    def close(self) -> None:
        self._cluster.shutdown()

    def _wait(self, kind: str, alive: Callable[[], bool]) -> list[tuple[Any, int]]:
        ends = time.monotonic() + FIND_S
        while alive():
            if found := self._actors(kind):
                return found
            assert time.monotonic() < ends, f"no {kind or 'actor'} has started after {FIND_S:g} s"
            time.sleep(0.05)
        return []

    def _actors(self, kind: str) -> list[tuple[Any, int]]:
        """The machines and processes of actors of a class, or of either."""
        kinds = (kind,) if kind else (INSTANCE, RANK)
        said = subprocess.run(["ps", "-A", "-o", "ppid=,pid=,args="], capture_output=True, text=True, check=True).stdout
        machines = {machine.all_processes["raylet"][0].process.pid: machine for machine in self._workers}
        rows = [line.split(None, 2) for line in said.splitlines()]
        return [
            (machines[int(parent)], int(process))
            for parent, process, title in rows
            if int(parent) in machines and title.startswith(tuple(TITLE + kind for kind in kinds))
        ]


@contextmanager
def machines(workers: int = 2) -> Iterator[Machines]:
    """A cluster that nobody else finds."""
    folder = tempfile.mkdtemp(prefix="chaos-")  # short, since paths of sockets are
    changed = {
        "RAY_TMPDIR": folder,  # where clusters of this machine are looked for, too
        "RAY_worker_niceness": "0",  # else actors wait for whatever else is done on a busy machine
    }
    before = {name: os.environ.get(name) for name in changed}
    os.environ.update(changed)
    try:
        made = Machines(workers)
        try:
            yield made
        finally:
            made.close()
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
        shutil.rmtree(folder, ignore_errors=True)
