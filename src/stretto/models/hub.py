"""Asks the Hugging Face hub for a model, once in a process and with one short request.

The loaders of transformers ask for each file of a model and repeat a request that fails for half a minute. So the hub
is asked here first. If it does not answer, only the local cache is read.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from huggingface_hub import HfApi, try_to_load_from_cache
from huggingface_hub.constants import is_offline_mode
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RepositoryNotFoundError

from stretto.errors import ModelError, first_line

ANSWER_S = 10.0


def hub_answers(name: str, option: str) -> bool:
    """True if the hub can be asked for the files of a model; False if only the cache can.

    Raises `ModelError`, which names `option`, if the model is in neither.
    """
    if is_offline_mode():
        why: str | None = "the hub is not asked, because `HF_HUB_OFFLINE` or `TRANSFORMERS_OFFLINE` is set"
    else:
        why = _why_not(name)
    if why is not None and not is_cached(name):
        raise ModelError(f"`{option} = {name!r}`: there is no folder `{name}`, it is not in the cache, and {why}")
    return why is None


def hub_options(path: str, option: str = "model.path") -> dict[str, bool]:
    """The options of a loader for a folder or a hub name: only the cache is read if the hub does not answer.

    Without them, a loader would ask for each file, and wait half a minute for each.
    """
    return {} if Path(path).exists() or hub_answers(path, option) else {"local_files_only": True}


def is_cached(name: str, file: str = "config.json") -> bool:
    """True if a file of a model, by default its configuration, lies in the local cache of the hub."""
    return cached_file(name, file) is not None


def cached_file(name: str, file: str = "config.json") -> Path | None:
    """Returns a file of a model, by default its configuration, in the local cache of the hub; None if it has none."""
    try:
        found = try_to_load_from_cache(name, file)
    except HFValidationError:
        return None
    return Path(found) if isinstance(found, str) else None


@lru_cache(maxsize=64)
def _why_not(name: str) -> str | None:
    """The reason why the hub has no files of a model for us; None if it may have."""
    try:
        HfApi().model_info(name, timeout=ANSWER_S)
    except HFValidationError as error:
        return f"it cannot be a name on the hub: {first_line(error)}"
    except RepositoryNotFoundError:
        return "the hub has no such model, or it is private: check the name, or log in with `hf auth login`"
    except HfHubHTTPError:
        return None  # it answers; the loader reports a model that is gated or broken
    except Exception as error:  # which errors a connection raises depends on the version of the client
        return (
            f"the hub cannot be reached ({type(error).__name__}: {first_line(error)}): check the network, or download "
            "the model elsewhere and give its folder"
        )
    return None
