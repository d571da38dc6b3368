"""Uploads a policy to the Hugging Face hub, or to another server that `HF_ENDPOINT` names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.utils._validators import validate_repo_id

from stretto.errors import RunError, first_line
from stretto.models.adapter_config import BASE_FOLDER, CONFIG_FILE, read_adapter_config


def refuse_no_login(name: str) -> None:
    """Raises `RunError` if a name cannot be one on the hub, or nobody is logged in there. Asks the hub."""
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise RunError(f"`--push {name}` is no name of the hub: {first_line(error)}") from error
    if get_token() is None:
        raise RunError(f"`--push {name}` needs a login: run `hf auth login`, or set `HF_TOKEN`")
    _asked(name, lambda api: api.whoami())


def upload(folder: Path, name: str, *, public: bool, say: Callable[[str], None]) -> None:
    """Uploads a folder as one commit to the model repository `name`, which is made if it is not there.

    A new repository is private unless `public`. Raises `RunError` if that fails.
    """
    if (folder / CONFIG_FILE).is_file():
        base = read_adapter_config(folder).base
        if (folder / BASE_FOLDER).is_dir() or (base is not None and Path(base).exists()):
            say(f"the adapter names `{base}`, a folder of this machine; with `--merge` it needs no base")

    def push(api: HfApi) -> None:
        api.create_repo(name, private=not public, exist_ok=True)
        done = api.upload_folder(repo_id=name, folder_path=folder, commit_message="A policy trained with Stretto")
        say(f"uploaded to {done.commit_url}")

    _asked(name, push)


def _asked(name: str, call: Callable[[HfApi], object]) -> None:
    """Calls the hub. Raises what goes wrong as a `RunError`."""
    try:
        call(HfApi(library_name="stretto"))
    except HfHubHTTPError as error:
        refused = error.response is not None and error.response.status_code in (401, 403)
        hint = "; log in with `hf auth login` as someone who may write there" if refused else ""
        raise RunError(f"`--push {name}` was refused by the hub: {first_line(error)}{hint}") from error
    except Exception as error:  # which errors a connection raises depends on the version of the client
        raise RunError(f"`--push {name}` failed: {type(error).__name__}: {first_line(error)}") from error
