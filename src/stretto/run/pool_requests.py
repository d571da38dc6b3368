"""`stretto pool`: requests about the instances of a live run, through files in its folder.

    stretto pool            the run
    N.request.json  ----->  looked for every `POLL_S`, deleted, carried out
    N.answer.json   <-----  written when that is done; for a removal, when all trajectories were handed over

A file gets its name only when it is complete. A run is alive while its lock is held (`store/lock.py`). Files are read
and written in a thread, so nothing in the folder can hold up the run. This module imports nothing heavy.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import reprlib
import stat
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from stretto.errors import RunError, StrettoError, printable
from stretto.run.folder_checks import standing
from stretto.store.lock import is_alive

if TYPE_CHECKING:
    from stretto.run.instance_membership import Instances

log = logging.getLogger(__name__)

FOLDER = "pool"  # in the run's
REQUEST, ANSWER = ".request.json", ".answer.json"
POLL_S = 1.0
ASK_POLL_S = 0.1
MAX_BYTES = 4_096  # of a request
LONGEST_S = 600.0  # for an answer: an instance that is made may have to load a large model


@dataclass(frozen=True, slots=True)
class _Value:
    """A request that is JSON."""

    value: Any


_Request = _Value | RunError  # one that can be carried out, or why it cannot


class Control:
    """Carries out requests, in the process of the run, until it is cancelled."""

    def __init__(self, run_folder: Path) -> None:
        self._folder = run_folder / FOLDER
        self._unreadable: set[Path] = set()  # requests that could not be taken; each is told once

    def open(self) -> None:
        """Makes the folder, and deletes the files that an earlier session left in it.

        For a resumed run, call it before the run takes its lock: then every request made after that is carried out,
        however long the run takes to start. To a new run no request can be made before this folder exists.
        """
        if self._folder.is_dir() and is_alive(self._folder.parent):
            return  # another process runs it, and will refuse this one
        try:
            self._folder.mkdir(exist_ok=True)
            for left in self._folder.iterdir():
                if left.is_symlink() or not left.is_dir():  # no folder in it is of a session
                    left.unlink()
        except OSError as error:
            raise RunError(f"`{self._folder}` cannot be used: {error}") from error

    async def serve(self, instances: Instances) -> None:
        """Carries out requests, each in a task: a removal that takes long holds up no other request."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                for name, request in await asyncio.to_thread(self._take):
                    tasks.create_task(self._serve(instances, name, request), name=f"control {name}")
                await asyncio.sleep(POLL_S)

    def _take(self) -> list[tuple[str, _Request]]:
        """Returns the name and the contents of each new request, and deletes its file."""
        taken = []
        for path in sorted(self._folder.glob(f"*{REQUEST}")):
            try:
                request = _read(path)
                path.unlink()
            except OSError as error:  # it may be found the next time
                if path not in self._unreadable:
                    log.warning("request `%s` cannot be read: %s", printable(str(path)), error)
                self._unreadable.add(path)
                continue
            taken.append((path.name.removesuffix(REQUEST), request))
        return taken

    async def _serve(self, instances: Instances, name: str, request: _Request) -> None:
        """Carries out a request and answers it. An error of the request is the answer, and does not affect the run."""
        answer: dict[str, Any] = {"error": "the run ended before it was done"}
        try:
            if isinstance(request, RunError):
                raise request
            done = await _do(instances, request)
            answer = {"done": done, "instances": instances.describe()}
        except StrettoError as error:
            log.warning("request `%s` is refused: %s", printable(name), error)
            answer = {"error": str(error)}
        finally:
            try:
                await asyncio.to_thread(_write, self._folder / f"{name}{ANSWER}", answer)
            except OSError as error:
                log.warning(
                    "request `%s` was answered with %s, which cannot be written: %s", printable(name), answer, error
                )


def _read(path: Path) -> _Request:
    """Reads a request: its value, or the error that refuses it. Raises `OSError` if it cannot be read now."""
    if not stat.S_ISREG(path.lstat().st_mode):
        return RunError(f"`{printable(str(path))}` is not a regular file, so it is no request")
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        text = file.read(MAX_BYTES + 1)
    if len(text) > MAX_BYTES:
        return RunError(f"the request is longer than {MAX_BYTES} bytes, so it is none of `stretto pool`")
    try:
        return _Value(json.loads(text))
    except (ValueError, RecursionError) as error:
        return RunError(f"the request is no JSON: {error}")


async def _do(instances: Instances, request: _Value) -> str:
    match request.value:
        case {"do": "list"}:
            return ""
        case {"do": "add", "count": int(count)} if count > 0:
            return await _add(instances, count)
        case {"do": "remove", "instance": int(instance)}:
            return await _remove(instances, instance)
    raise RunError(f"the run does not know the request `{reprlib.repr(request.value)}`")


async def _add(instances: Instances, count: int) -> str:
    added: list[int] = []
    for _ in range(count):
        try:
            added.append(await instances.add())
        except StrettoError as error:
            raise RunError(f"{len(added)} of {count} instances were added; then: {error}") from error
    return f"added {'instance' if count == 1 else 'instances'} {', '.join(map(str, added))}"


async def _remove(instances: Instances, instance: int) -> str:
    lost = await instances.remove(instance)
    if lost:
        return f"instance {instance} was lost as it left: {lost}; its trajectories begin again elsewhere"
    return f"instance {instance} has handed its trajectories over and is gone"


def _write(path: Path, value: Mapping[str, Any]) -> None:
    scratch = path.with_suffix(".partial")
    scratch.unlink(missing_ok=True)
    with scratch.open("x", encoding="utf-8") as file:
        file.write(json.dumps(value))
    scratch.replace(path)


# -- the side of the command -------------------------------------------------------------------------------------------


def ask(run_folder: Path, request: Mapping[str, Any], *, longest_s: float = LONGEST_S) -> dict[str, Any]:
    """Sends a request to a live run and returns its answer. Raises `RunError` if that is an error, or is late."""
    folder = run_folder / FOLDER
    if not is_alive(run_folder) or not folder.is_dir():
        _refuse(run_folder)
    name = uuid.uuid4().hex
    try:
        _write(folder / f"{name}{REQUEST}", request)
    except OSError as error:
        raise RunError(
            f"the run in `{run_folder}` cannot be asked: nothing can be written to `{folder}`: {error.strerror}"
        ) from error
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


def _refuse(run_folder: Path) -> NoReturn:
    """Raises `RunError` that says why there is no live run."""
    match standing(run_folder):
        case "empty":
            raise RunError(
                f"no run has begun in `{run_folder}` yet: it begins once its instances have started; wait "
                "for it, or give the folder of another run"
            )
        case "foreign":
            raise RunError(f"`{run_folder}` is no run folder; give the folder that `stretto train` made")
        case "finished":
            raise RunError(f"the run in `{run_folder}` is finished, so it has no instances")
        case _:
            raise RunError(
                f"the run in `{run_folder}` is not running (or has not begun yet), so it has no instances; one that "
                "was stopped or killed continues with `stretto train` and `--resume`"
            )


def describe(answer: Mapping[str, Any]) -> str:
    """Returns an answer as lines of text."""
    lines = [answer["done"]] if answer["done"] else []
    head = f"{'instance':>8}  {'running':>7}  {'queued':>6}  {'KV':>5}  {'tokens':>12}  {'minutes':>7}"
    lines.append(f"{head}  versions (and trajectories of each)")
    for each in answer["instances"]:
        versions = ", ".join(f"{version} ({count})" for version, count in each["versions"].items()) or "none"
        lines.append(
            f"{each['instance']:>8}  {each['running']:>7}  {each['queued']:>6}  {each['kv_share']:>5.0%}  "
            f"{each['tokens']:>12,}  {each['seconds'] / 60:>7.1f}  {versions}{'; leaving' if each['leaving'] else ''}"
        )
    return "\n".join(lines) + "\n"
