"""Keeps what torch compiles between runs, so that the first update of a second run is quick.

Torch's own folder is in the temporary folder, which a restart of the machine or of a container empties. Ours is in the
user's cache folder, one for each combination of what the code was compiled for. `TORCHINDUCTOR_CACHE_DIR` and
`TRITON_CACHE_DIR`, if they are set, have precedence.
"""

from __future__ import annotations

import importlib
import logging
import os
import platform
import re
import threading
from collections.abc import Callable
from pathlib import Path

import torch

log = logging.getLogger(__name__)

COMPILER = "torch._inductor.compile_fx"  # its import takes seconds
VARIABLES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}


def keep_compiled(device: torch.device) -> None:
    """Makes torch and Triton keep compiled code in the user's cache folder. Does nothing on the CPU.

    Call before anything is compiled. A folder that cannot be made is done without.
    """
    if device.type != "cuda":
        return
    folder = cache_folder(torch.cuda.get_device_name(device))
    for variable, name in VARIABLES.items():
        if variable in os.environ:
            continue
        try:
            (folder / name).mkdir(parents=True, exist_ok=True)
        except OSError:
            continue
        os.environ[variable] = str(folder / name)


def import_compiler(device: torch.device) -> Callable[[], None]:
    """Starts to import torch's compiler in a thread; returns a function that waits for it. Nothing on the CPU.

    Nobody may import a part of it meanwhile.
    """
    if device.type != "cuda":
        return lambda: None

    def work() -> None:
        try:
            importlib.import_module(COMPILER)
        except Exception as error:  # whoever needs it meets the same, and says so
            log.info("`%s` cannot be imported: %s", COMPILER, error)

    thread = threading.Thread(target=work, name="import of the compiler", daemon=True)
    thread.start()
    return thread.join


def cache_folder(device_name: str) -> Path:
    """Returns the folder of code that was compiled for this device by this Python and torch."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    versions = {"torch": torch.__version__, "cuda": torch.version.cuda, "python": platform.python_version()}
    parts = (device_name, *(f"{name}-{version}" for name, version in versions.items()))
    return base / "stretto" / "compiled" / re.sub(r"[^A-Za-z0-9.+_-]+", "-", "-".join(parts))
