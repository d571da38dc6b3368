"""The cluster that a run is on: one that is there, or one that is started on this machine for it alone."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from stretto.config import Recipe
from stretto.errors import RecipeError
from stretto.runtime.parts import available_cores

try:
    import ray
    from ray.exceptions import AuthenticationError
except ImportError as missing:
    raise RecipeError("`runtime.type = \"ray\"` takes the package ray: `pip install 'stretto[ray]'`") from missing

log = logging.getLogger(__name__)

NEW = "local"  # the address that always starts a cluster
REACH_S = 10.0  # for a connection to the address that was named
FOLDERS = "stretto-ray-"  # of clusters that were started here; the process that did so follows


@contextlib.contextmanager
def connected(recipe: Recipe) -> Iterator[str]:
    """Be on the cluster that `runtime.address` names; yields what to say of it. What this started ends with it.

    Without an address it is the one that `RAY_ADDRESS` names, or that was started on this machine, or a new one.
    Blocks, so it is called before anything runs.
    """
    _hush()
    if ray.is_initialized():
        yield describe()
        return
    wanted = recipe.runtime.address
    if wanted == NEW or not join(wanted or os.environ.get("RAY_ADDRESS")):
        with _started(recipe):
            yield describe()
        return
    try:
        short = shortage(recipe, ray.cluster_resources())
        yield describe() + (f"; {short}, so a part of the run waits for a machine with room" if short else "")
    finally:
        ray.shutdown()


@contextlib.contextmanager
def _started(recipe: Recipe) -> Iterator[None]:
    """A cluster of this process's own. It ends with it, so it lies where nobody else looks for one."""
    if short := shortage(recipe, {"CPU": available_cores(), "GPU": torch.cuda.device_count()}):
        # It does not grow, so what does not fit would wait for ever.
        raise RecipeError(f"{short}; lower them (fractions are allowed), or start a cluster with `ray start`")
    sweep(Path(tempfile.gettempdir()))
    folder = tempfile.mkdtemp(prefix=f"{FOLDERS}{os.getpid()}-")
    try:
        ray.init(address=NEW, num_cpus=available_cores(), include_dashboard=False, _temp_dir=folder, **_QUIET)
        yield
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


_QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}


def join(address: str | None) -> bool:
    """Connect to a cluster that is there; whether there is one. One that was asked for by name must be."""
    try:
        _reach(address)
        ray.init(address=address or "auto", **_QUIET)
    except (OSError, AuthenticationError) as error:
        if address is None and isinstance(error, ConnectionError):
            return False
        said = str(error).strip().partition("\n")[0]
        raise RecipeError(
            f"`runtime.address`: the cluster at {address or 'this machine'} cannot be joined ({said}); start one with "
            '`ray start --head`, `export RAY_AUTH_MODE=token` if it has a token, or set `runtime.address = "local"`'
        ) from error
    return True


def _reach(address: str | None) -> None:
    """Raise where nobody listens at `HOST:PORT`: Ray itself would try for many minutes."""
    host, _, port = (address or "").rpartition(":")
    if host and "/" not in host and port.isdigit():
        socket.create_connection((host, int(port)), timeout=REACH_S).close()


def _hush() -> None:
    """Log what Ray would print into the terminal, pages of its own logs when a machine dies; a run says that itself."""
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")  # of calls to actors that died, which are handled
    worker = ray._private.worker
    if hasattr(worker, "print_to_stdstream"):
        worker.print_to_stdstream = lambda data, ignore_prefix=False: log.info("ray: %s", data["lines"][0][:200])


def describe() -> str:
    """Its machines and what they have, in words."""
    total = ray.cluster_resources()
    nodes = sum(node["Alive"] for node in ray.nodes())
    gpus = f", {total['GPU']:g} GPUs" if total.get("GPU") else ""
    return f"on a Ray cluster of {nodes} {'machine' if nodes == 1 else 'machines'}: {total.get('CPU', 0):g} CPUs{gpus}"


def gpus_of(asked: float | None, recipe: Recipe) -> float:
    """The GPUs of one actor: what was asked for, or one where the run is on CUDA."""
    return asked if asked is not None else float(recipe.runtime.device == "cuda")


def shortage(recipe: Recipe, total: Mapping[str, float]) -> str | None:
    """What instances and ranks ask for beyond what a cluster has, in words; None where all of it fits."""
    runtime = recipe.runtime
    wanted = {
        "CPU": (runtime.instance_cpus, runtime.trainer_cpus),
        "GPU": (gpus_of(runtime.instance_gpus, recipe), gpus_of(runtime.trainer_gpus, recipe)),
    }
    for kind, (instance, trainer) in wanted.items():
        asked, has = runtime.instances * instance + runtime.trainers * trainer, total.get(kind, 0)
        if asked > has:
            name = kind.lower()
            return (
                f"`runtime.instances = {runtime.instances}` with `instance_{name}s = {instance:g}` and "
                f"`trainers = {runtime.trainers}` with `trainer_{name}s = {trainer:g}` ask for {asked:g} {kind}s, and "
                f"there are {has:g}"
            )
    return None


def sweep(root: Path) -> None:
    """Remove what clusters left that were started by processes which are gone: those were killed."""
    for folder in root.glob(f"{FOLDERS}[0-9]*-*"):
        process = folder.name.removeprefix(FOLDERS).partition("-")[0]
        if process.isdigit() and not Path(f"/proc/{process}").exists() and Path("/proc/self").exists():
            shutil.rmtree(folder, ignore_errors=True)
