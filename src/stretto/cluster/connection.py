"""The Ray cluster of a run: one that exists already, or one that is started on this machine for this run."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from stretto.errors import RecipeError, first_line
from stretto.recipe.schema import Recipe
from stretto.setup.cluster_devices import shortage
from stretto.setup.threads import available_cores

try:
    import ray
    from ray.exceptions import AuthenticationError
except ImportError as missing:
    raise RecipeError("`runtime.type = \"ray\"` takes the package ray: `pip install 'stretto[ray]'`") from missing

log = logging.getLogger(__name__)

NEW = "local"  # the address that always starts a cluster
REACH_S = 10.0  # for a connection to the address that was named
FOLDERS = "stretto-ray-"  # prefix of the folders of clusters that were started here; the process id follows


@contextlib.contextmanager
def connected(recipe: Recipe) -> Iterator[str]:
    """Connects to the cluster that `runtime.address` names, and yields a description of it.

    Without an address it is the cluster that `RAY_ADDRESS` names, or that was started on this machine, or a new one. A
    cluster that was started here ends with the context. Blocks, so it is called before anything runs.
    """
    _redirect_ray_output()
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
    """Starts a cluster for this process alone, in a folder where no other process looks for one, and ends it."""
    if short := shortage(recipe, {"CPU": available_cores(), "GPU": torch.cuda.device_count()}):
        # This cluster does not grow, so an actor that does not fit would wait for ever.
        raise RecipeError(f"{short}; lower them (fractions are allowed), or start a cluster with `ray start`")
    remove_leftovers(Path(tempfile.gettempdir()))
    folder = tempfile.mkdtemp(prefix=f"{FOLDERS}{os.getpid()}-")
    try:
        ray.init(address=NEW, num_cpus=available_cores(), include_dashboard=False, _temp_dir=folder, **_QUIET)
        yield
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


_QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}


def join(address: str | None) -> bool:
    """Connects to a running cluster. Returns False if there is none on this machine and no `address` was given.

    Raises `RecipeError` if the cluster at `address` cannot be joined.
    """
    try:
        _refuse_unreachable(address)
        ray.init(address=address or "auto", **_QUIET)
    except (OSError, AuthenticationError) as error:
        if address is None and isinstance(error, ConnectionError):
            return False
        where = address or "this machine"
        raise RecipeError(
            f"`runtime.address`: the cluster at {where} cannot be joined ({first_line(error)}); start one with "
            '`ray start --head`, `export RAY_AUTH_MODE=token` if it has a token, or set `runtime.address = "local"`'
        ) from error
    return True


def _refuse_unreachable(address: str | None) -> None:
    """Raises `OSError` if nothing listens at `HOST:PORT`: Ray itself would try for many minutes."""
    host, _, port = (address or "").rpartition(":")
    if host and "/" not in host and port.isdigit():
        socket.create_connection((host, int(port)), timeout=REACH_S).close()


def _redirect_ray_output() -> None:
    """Sends what Ray prints to the log. When a machine dies it prints pages, and the run reports that itself."""
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")  # of calls to actors that died, which are handled
    worker = ray._private.worker
    if hasattr(worker, "print_to_stdstream"):
        worker.print_to_stdstream = lambda data, ignore_prefix=False: log.info("ray: %s", data["lines"][0][:200])


def describe() -> str:
    """Returns the number of machines of the cluster and their resources, as text."""
    total = ray.cluster_resources()
    nodes = sum(node["Alive"] for node in ray.nodes())
    gpus = f", {total['GPU']:g} GPUs" if total.get("GPU") else ""
    return f"on a Ray cluster of {nodes} {'machine' if nodes == 1 else 'machines'}: {total.get('CPU', 0):g} CPUs{gpus}"


def remove_leftovers(root: Path) -> None:
    """Removes the folders of clusters whose processes were killed before they could remove them."""
    for folder in root.glob(f"{FOLDERS}[0-9]*-*"):
        process = folder.name.removeprefix(FOLDERS).partition("-")[0]
        if process.isdigit() and not Path(f"/proc/{process}").exists() and Path("/proc/self").exists():
            shutil.rmtree(folder, ignore_errors=True)
