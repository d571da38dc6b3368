"""`stretto pool`: what a person asks of a live run about its instances, through files in its folder.

    stretto pool            the run
    N.request.json  ----->  looked for every `POLL_S`, taken away, done
    N.answer.json   <-----  written when it is done, which for a removal is when everything was handed over

Both are whole when they have their names. Whether a run is alive is told by the lock of its journal, which goes with
its process however that ends. Imports nothing heavy.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stretto.errors import RunError, StrettoError

if TYPE_CHECKING:
    from stretto.instances import Instances

FOLDER = "pool"  # in the run's
REQUEST, ANSWER = ".request.json", ".answer.json"
POLL_S = 1.0
ASK_POLL_S = 0.1
LONGEST_S = 600.0  # for an answer: an instance that is made may have to load a large model


class Control:
    """The run's side: serves requests until it is cancelled."""

    def __init__(self, run_folder: Path) -> None:
        self._folder = run_folder / FOLDER

    async def serve(self, instances: Instances) -> None:
        """Do what is asked, each request by itself: a removal that takes long holds up nobody."""
        try:
            self._folder.mkdir(exist_ok=True)
            for left in self._folder.iterdir():  # of an earlier session
                left.unlink()
        except OSError as error:
            raise RunError(f"`{self._folder}` cannot be used: {error}") from error
        async with asyncio.TaskGroup() as tasks:
            while True:
                for path in sorted(self._folder.glob(f"*{REQUEST}")):
                    name = path.name.removesuffix(REQUEST)
                    request = json.loads(path.read_text(encoding="utf-8"))
                    path.unlink()
                    tasks.create_task(self._serve(instances, name, request), name=f"control {name}")
                await asyncio.sleep(POLL_S)

    async def _serve(self, instances: Instances, name: str, request: Mapping[str, Any]) -> None:
        answer: dict[str, Any] = {"error": "the run ended before it was done"}
        try:
            done = await _do(instances, request)
            answer = {"done": done, "instances": instances.describe()}
        except StrettoError as error:
            answer = {"error": str(error)}
        finally:
            with contextlib.suppress(FileNotFoundError):  # nobody waits any more
                _write(self._folder / f"{name}{ANSWER}", answer)


async def _do(instances: Instances, request: Mapping[str, Any]) -> str:
    if request["do"] == "list":
        return ""
    if request["do"] == "add":
        added: list[int] = []
        for _ in range(request["count"]):
            try:
                added.append(await instances.add())
            except StrettoError as error:
                raise RunError(f"{len(added)} of {request['count']} instances were added; then: {error}") from error
        return f"added instances {', '.join(map(str, added))}"
    instance = request["instance"]
    lost = await instances.leave(instance)
    if lost:
        return f"instance {instance} was lost as it left: {lost}; its trajectories begin again elsewhere"
    return f"instance {instance} has handed its trajectories over and is gone"


def _write(path: Path, value: Mapping[str, Any]) -> None:
    scratch = path.with_suffix(".partial")
    scratch.write_text(json.dumps(value), encoding="utf-8")
    scratch.replace(path)


# -- the other side ----------------------------------------------------------------------------------------------------


def is_alive(run_folder: Path) -> bool:
    """Whether a process runs this run now."""
    try:
        descriptor = os.open(run_folder / "journal.sqlite.lock", os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def ask(run_folder: Path, request: Mapping[str, Any], *, longest_s: float = LONGEST_S) -> dict[str, Any]:
    """Have a live run do something; what it answered. Raises `RunError` with its reason, or where none comes."""
    if not (run_folder / "config.toml").is_file():
        raise RunError(f"`{run_folder}` is no run folder; give the folder that `stretto train` made")
    folder = run_folder / FOLDER
    if not is_alive(run_folder) or not folder.is_dir():
        raise RunError(f"the run in `{run_folder}` is not running (or has not begun yet), so it has no instances")
    name = uuid.uuid4().hex
    _write(folder / f"{name}{REQUEST}", request)
    deadline = time.monotonic() + longest_s
    path = folder / f"{name}{ANSWER}"
    while not path.exists():
        if not is_alive(run_folder):
            raise RunError(f"the run in `{run_folder}` ended before it answered")
        if time.monotonic() > deadline:
            raise RunError(f"the run in `{run_folder}` has not answered for {longest_s:g} s; it may still do it")
        time.sleep(ASK_POLL_S)
    answer: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    path.unlink()
    if "error" in answer:
        raise RunError(answer["error"])
    return answer


def describe(answer: Mapping[str, Any]) -> str:
    """An answer as lines of text."""
    lines = [answer["done"]] if answer["done"] else []
    lines.append(f"{'instance':>8}  {'running':>7}  {'queued':>6}  {'KV':>5}  {'tokens':>12}  {'minutes':>7}  versions")
    for each in answer["instances"]:
        versions = ", ".join(f"{version} ({count})" for version, count in each["versions"].items()) or "none"
        lines.append(
            f"{each['instance']:>8}  {each['running']:>7}  {each['queued']:>6}  {each['kv_share']:>5.0%}  "
            f"{each['tokens']:>12,}  {each['seconds'] / 60:>7.1f}  {versions}{'; leaving' if each['leaving'] else ''}"
        )
    return "\n".join(lines) + "\n"
