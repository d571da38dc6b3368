"""`doctor`: what this machine and this installation can do, for people who set one up and for reports of problems.

Looks and measures, and changes nothing. A finding is `broken` if no run can work without it. The others are facts, or
`missing`: something optional that is not there, with what it is for.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import resource
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from stretto import __version__
from stretto.engines.vllm.releases import check_release, installed_release
from stretto.environments import sandbox
from stretto.environments.sandbox_processes import DEFAULT_LIMITS, held_parts
from stretto.errors import RecipeError, first_line, printable
from stretto.observe.run_list import readable_size

Status = Literal["ok", "missing", "broken"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One fact of this machine or installation."""

    part: str  # versions, device, ...
    name: str
    value: str
    status: Status = "ok"
    hint: str = ""  # what it is for, or what to do


# Packages that every run needs, with the oldest version that works.
REQUIRED = {
    "torch": "2.11",
    "transformers": "5.17",
    "numpy": "1.26",
    "pydantic": "2.8",
    "rich": "13.7",
    "safetensors": "0.5",
    "tomli-w": "1.0",
}
# Extras of the package: the module that each brings, and what it is for.
EXTRAS = {
    "reasoning-gym": ("reasoning_gym", 'tasks of reasoning-gym: `task.type = "reasoning-gym"`'),
    "parquet": ("pyarrow", "data sets in Parquet files"),
    "datasets": ("datasets", "data sets of the Hugging Face hub: `task.dataset`"),
    "math-verify": ("math_verify", "comparing mathematical answers as expressions"),
    "gguf": ("gguf", "models in GGUF files"),
    "ray": ("ray", 'runs on a cluster: `runtime.type = "ray"`'),
    "serve": ("aiohttp", "agents that call the policy over HTTP, `stretto serve`"),
    "judge": ("aiohttp", "judges behind an address: `task.judge`"),
    "vllm": ("vllm", 'engines of vLLM: `engine.type = "vllm"`'),
    "gymnasium": ("gymnasium", "environments of gymnasium"),
    "textarena": ("textarena", "environments of textarena"),
    "mcp": ("mcp", "tools of MCP servers"),
    "openenv": ("openenv", "environments of OpenEnv"),
    "tensorboard": ("tensorboard", 'the tracker "tensorboard" of `observe.sinks`'),
    "wandb": ("wandb", 'the tracker "wandb" of `observe.sinks`'),
    "trackio": ("trackio", 'the tracker "trackio" of `observe.sinks`'),
    "mlflow": ("mlflow", 'the tracker "mlflow" of `observe.sinks`'),
    "prometheus": ("prometheus_client", 'the tracker "prometheus" of `observe.sinks`'),
}
LEAST_DISK = 1 << 30  # bytes free, below which a run may not even hold its checkpoints
LEAST_FILES = 1_024  # open files: worker processes and sessions of agents take a few each
OLDEST_PYTHON = (3, 11)


def examine() -> list[Finding]:
    """Returns all findings, part by part. A part that cannot be examined is one finding that says why."""
    findings: list[Finding] = []
    parts: tuple[tuple[str, Callable[[], Iterator[Finding]]], ...] = (
        ("versions", _versions),
        ("device", _device),
        ("kernels", _kernels),
        ("disk", _disk),
        ("sandbox", _sandbox),
        ("limits", _limits),
        ("extras", _extras),
    )
    for part, look in parts:
        try:
            findings += look()
        except Exception as error:
            required = part in ("versions", "device")
            words = f"could not be examined: {type(error).__name__}: {first_line(error)}"
            findings.append(Finding(part, part, words, "broken" if required else "missing"))
    return findings


def exit_status(findings: list[Finding]) -> int:
    """Returns 1 if something is broken that every run needs, else 0."""
    return int(any(finding.status == "broken" for finding in findings))


def as_json(findings: list[Finding]) -> dict[str, Any]:
    """Returns the findings as values for JSON."""
    return {"broken": bool(exit_status(findings)), "findings": [asdict(finding) for finding in findings]}


def lines_of(findings: list[Finding]) -> Iterator[str]:
    """Returns the findings as text, one line each, with a head for each part."""
    width = max(len(finding.name) for finding in findings)
    part = ""
    for finding in findings:
        if finding.part != part:
            part = finding.part
            yield part
        mark = "" if finding.status == "ok" else f"{finding.status.upper()}: "
        hint = f"  ({finding.hint})" if finding.hint else ""
        yield printable(f"  {finding.name:{width}}  {mark}{finding.value}{hint}")


# -- the parts ---------------------------------------------------------------------------------------------------------


def _versions() -> Iterator[Finding]:
    yield Finding("versions", "stretto", f"{__version__} in {Path(sys.modules['stretto'].__path__[0])}")
    old = sys.version_info < OLDEST_PYTHON
    hint = f"needs {'.'.join(map(str, OLDEST_PYTHON))} or newer" if old else ""
    python = f"{platform.python_version()} at {sys.executable}"
    yield Finding("versions", "python", python, "broken" if old else "ok", hint)
    for name, oldest in REQUIRED.items():
        yield _required(name, oldest)
    for name in ("triton", "ray"):
        if (version := _installed(name)) is not None:
            yield Finding("versions", name, version)
    yield Finding("versions", "system", platform.platform())


def _required(name: str, oldest: str) -> Finding:
    install = f"`pip install '{name}>={oldest}'`"
    version = _installed(name)
    if version is None:
        return Finding("versions", name, "not installed", "broken", install)
    if _numbers(version) < _numbers(oldest):
        return Finding("versions", name, version, "broken", f"needs {oldest} or newer: {install}")
    try:
        importlib.import_module(name.replace("-", "_"))
    except Exception as error:
        return Finding("versions", name, f"{version} cannot be imported: {first_line(error)}", "broken", install)
    return Finding("versions", name, version)


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    """Returns the leading numbers of a version: `2.13.0+cpu` is (2, 13, 0)."""
    numbers = []
    for part in version.split("+")[0].split("."):
        if not part.isdecimal():
            break
        numbers.append(int(part))
    return tuple(numbers)


def _device() -> Iterator[Finding]:
    import torch

    from stretto.engines.host_memory import usable_memory
    from stretto.setup.threads import available_cores

    yield Finding("device", "cpu", f"{available_cores()} of {os.cpu_count()} cores, {platform.machine()}")
    yield Finding("device", "memory", readable_size(usable_memory()))
    if not torch.cuda.is_available():
        why = "this build of torch has no CUDA" if torch.version.cuda is None else "torch sees no CUDA device"
        yield Finding("device", "gpu", f"none: {why}", hint="runs use the CPU")
        return
    for number in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(number)
        major, minor = torch.cuda.get_device_capability(number)
        words = f"{torch.cuda.get_device_name(number)}, capability {major}.{minor}, {readable_size(total)}"
        used = "" if number == 0 else "a run uses the first one, or one for each instance and rank on a cluster"
        yield Finding(
            "device", f"gpu {number}", f"{words}, {readable_size(free)} free, CUDA {torch.version.cuda}", hint=used
        )


def _kernels() -> Iterator[Finding]:
    import torch

    from stretto.engines.native.kernels.kernel_set import TRITON, kernels_for
    from stretto.models.varlen_attention import flash_fits
    from stretto.setup.compile_cache import VARIABLES, cache_folder
    from stretto.setup.device import choose_device, choose_dtype

    device = choose_device("auto")
    dtype = choose_dtype("auto", device)
    on_gpu = kernels_for(device) is TRITON
    yield Finding("kernels", "engine", "Triton, with CUDA graphs" if on_gpu else "torch on the CPU, in mixed batches")
    attention = "flash attention of torch" if flash_fits(device, dtype, 128) else "buckets of equal length"
    yield Finding("kernels", "attention of the trainer", attention)
    yield Finding("kernels", "type of weights", str(dtype).removeprefix("torch."))
    if on_gpu and importlib.util.find_spec("triton") is None:
        yield Finding("kernels", "triton", "not installed", "broken", "the engine's kernels on a GPU need it")
    if device.type == "cuda":
        given = [os.environ[variable] for variable in VARIABLES if variable in os.environ]
        yield Finding(
            "kernels", "compiled code", ", ".join(given) or str(cache_folder(torch.cuda.get_device_name(device)))
        )


def _disk() -> Iterator[Finding]:
    from stretto.models.user_cache import user_cache

    for name, folder in (
        ("working directory", Path.cwd()),
        ("temporary folder", Path(tempfile.gettempdir())),
        ("cache", user_cache()),
    ):
        there = next(each for each in (folder, *folder.parents) if each.exists())
        free = shutil.disk_usage(there).free
        writable = os.access(there, os.W_OK)
        words = f"{folder}: {readable_size(free)} free{'' if writable else ', cannot be written to'}"
        good = free >= LEAST_DISK and writable
        yield Finding("disk", name, words, "ok" if good else "missing", "" if good else "runs need a folder with room")
    shared = Path("/dev/shm")
    if shared.is_dir():
        yield Finding("disk", "shared memory", f"{readable_size(shutil.disk_usage(shared).free)} free in {shared}")


def _sandbox() -> Iterator[Finding]:
    gaps = sandbox.missing(held_parts(DEFAULT_LIMITS))
    if not gaps:
        yield Finding("sandbox", "task.sandbox", "all parts hold")
    for gap in gaps:
        yield Finding("sandbox", "task.sandbox", f"code of a model: {gap}", "missing", "see docs/security.md")


def _limits() -> Iterator[Finding]:
    for name, kind, least in (
        ("open files", resource.RLIMIT_NOFILE, LEAST_FILES),
        ("processes", resource.RLIMIT_NPROC, 0),
        ("address space", resource.RLIMIT_AS, 0),
        ("locked memory", resource.RLIMIT_MEMLOCK, 0),
    ):
        soft, hard = resource.getrlimit(kind)
        few = 0 <= soft < least
        words = _amount(soft) if soft == hard else f"{_amount(soft)}, can be raised to {_amount(hard)}"
        hint = f"agents and worker processes may need more: `ulimit -n {least}`" if few else ""
        yield Finding("limits", name, words, "missing" if few else "ok", hint)


def _amount(limit: int) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else f"{limit:,}"


def _extras() -> Iterator[Finding]:
    for extra, (module, purpose) in EXTRAS.items():
        if extra == "vllm" and (refused := _refused_vllm()) is not None:
            yield Finding("extras", extra, refused, "missing", purpose)
        elif importlib.util.find_spec(module) is not None:
            version = f" {installed_release()}" if extra == "vllm" else ""
            yield Finding("extras", extra, f"installed{version}", hint=purpose)
        else:
            yield Finding("extras", extra, f"`pip install 'stretto[{extra}]'`", "missing", purpose)


def _refused_vllm() -> str | None:
    """Returns why the vLLM that is installed is refused; None if it is not, or if there is none."""
    found = installed_release()
    if found is None:
        return None
    try:
        check_release(found)
    except RecipeError as error:
        return str(error)
    return None
