"""The environment variables of reward workers: a short list of usual ones, and those that the recipe names.

A reward function and its imports should not see secrets that they do not need. So a worker gets the variables in
`PASSED` that are set, and those in `task.pass_env`. This alone is not a sandbox: a worker runs as the same user and can
read the same files. `sandbox.py` is one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from stretto.errors import RecipeError

PASSED = frozenset(
    (
        # who and where
        *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "TMPDIR", "TEMP", "TMP"),
        *("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME"),
        # Python
        *("PYTHONPATH", "PYTHONHOME", "PYTHONUSERBASE", "PYTHONNOUSERSITE", "PYTHONSAFEPATH", "PYTHONPYCACHEPREFIX"),
        *("PYTHONDONTWRITEBYTECODE", "PYTHONHASHSEED", "PYTHONUTF8", "PYTHONIOENCODING", "PYTHONUNBUFFERED"),
        *("PYTHONWARNINGS", "PYTHONFAULTHANDLER", "VIRTUAL_ENV", "CONDA_PREFIX", "CONDA_DEFAULT_ENV"),
        # native libraries, and the threads that they start
        *("LD_LIBRARY_PATH", "LD_PRELOAD", "DYLD_LIBRARY_PATH", "DYLD_FALLBACK_LIBRARY_PATH"),
        *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "BLIS_NUM_THREADS", "NUMEXPR_NUM_THREADS"),
        *("VECLIB_MAXIMUM_THREADS", "RAYON_NUM_THREADS", "TOKENIZERS_PARALLELISM"),
        # devices
        *("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUDA_HOME", "CUDA_PATH"),
        *("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
        # certificates
        *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"),
        # caches of models and data sets
        *("HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "TORCH_HOME"),
    )
)
PREFIXES = ("LC_",)


def worker_environment(passed: Mapping[str, str], folder: str | None = None) -> dict[str, str]:
    """Returns the environment of a worker: the usual variables of this process, and those `passed` by name.

    `folder` is that of a sandbox: it is the home of the worker, and the place of its temporary files.
    """
    own = {name: value for name, value in os.environ.items() if name in PASSED or name.startswith(PREFIXES)}
    if folder is not None:
        own = {name: value for name, value in own.items() if not name.startswith("XDG_")}
        own |= {"HOME": folder, "PYTHONDONTWRITEBYTECODE": "1"} | dict.fromkeys(("TMPDIR", "TEMP", "TMP"), folder)
    # One thread, because the engine and the trainer need the cores. Unbuffered, so that output is read at once.
    return {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **own, **passed}


def named_variables(names: Sequence[str]) -> dict[str, str]:
    """Returns this process's values of the variables in `task.pass_env`. Raises `RecipeError` if one is not set."""
    missing = [name for name in names if name not in os.environ]
    if missing:
        raise RecipeError(
            f"`task.pass_env` names `{missing[0]}`, which is not set in the environment of this process: set it, or "
            "take it out of the list"
        )
    return {name: os.environ[name] for name in names}
