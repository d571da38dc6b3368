"""Data sets of the Hugging Face hub, and folders of the package datasets, as rows.

`datasets` finds, downloads and caches; here its names and errors become ours. What is in its cache is used if the hub
cannot be asked: `HF_DATASETS_OFFLINE=1` or `HF_HUB_OFFLINE=1` says so at once.
"""

from __future__ import annotations

import contextlib
import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stretto.environments.data_options import DatasetOptions
from stretto.environments.row_sources import Record, without_columns
from stretto.errors import RecipeError, first_line

BATCH_ROWS = 1024  # that are turned into objects at once
TRAIN = "train"

ANSWER_S = 10.0  # that the hub has for one short question

_COMMIT = re.compile(r"[0-9a-f]{40}\Z")
_DOWNLOAD = (
    "load it once on a machine with a network (`datasets.load_dataset`) and copy its cache (`HF_HOME`), or its folder "
    "of `save_to_disk`, here"
)


@dataclass(frozen=True, slots=True)
class OpenedDataset:
    """A split that is ready to be read."""

    name: str  # in messages, such as `openai/gsm8k (main, train)`
    dataset: Any  # a `datasets.Dataset`
    revision: str | None  # the commit on the hub; None: it has none, or is not known

    def records(self, columns: Mapping[str, str]) -> Iterator[Record]:
        """Yields the records with their places. Raises `RecipeError` if a column is missing, or one is unreadable."""
        if reason := without_columns(self.dataset.column_names, columns):
            raise RecipeError(f"{self.name}: {reason}")
        if len(self.dataset) == 0:
            raise RecipeError(f"{self.name} has no rows; there is nothing to ask the model")
        number, names = 0, self.dataset.column_names
        try:
            for batch in self.dataset.with_format(None).iter(BATCH_ROWS):
                for values in zip(*(batch[name] for name in names), strict=True):
                    number += 1
                    yield f"row {number} of {self.name}", dict(zip(names, values, strict=True))
        except RecipeError:
            raise
        except Exception as error:  # decoding an image or audio may need another package
            raise RecipeError(
                f"row {number + 1} of {self.name} cannot be read: {type(error).__name__}: {first_line(error)}; only "
                "text, numbers, lists and objects are of use here"
            ) from error


def open_dataset(options: DatasetOptions, option: str = "task.dataset") -> OpenedDataset:
    """Opens a data set of the hub or of a folder. Raises `RecipeError`, which names the key of `option` to change."""
    try:
        import datasets
    except ImportError as error:
        raise RecipeError(f"`{option}` needs the package datasets: `pip install 'stretto[datasets]'`") from error
    datasets.disable_progress_bars()
    folder = Path(options.name)
    if folder.is_dir():
        return _of_folder(datasets, folder, options, option)
    return _of_hub(datasets, options, option)


def _called(options: DatasetOptions, split: str | None) -> str:
    parts = ", ".join(part for part in (options.config, split) if part)
    return f"`{options.name}`" + (f" ({parts})" if parts else "")


# -- folders -----------------------------------------------------------------------------------------------------------


def _of_folder(datasets: Any, folder: Path, options: DatasetOptions, option: str) -> OpenedDataset:
    if options.revision is not None:
        raise RecipeError(
            f"`{option}.revision` has no effect on the folder `{folder}`: it is for the hub; leave it out"
        )
    is_saved = (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file()
    if not is_saved:
        loaded = _loaded(datasets, options, option)
        return OpenedDataset(_called(options, options.split or TRAIN), loaded, None)
    if options.config is not None:
        raise RecipeError(
            f"`{option}.config` has no effect on the folder `{folder}`, which `save_to_disk` has written; leave it out"
        )
    try:
        saved = datasets.load_from_disk(str(folder))
    except Exception as error:  # of the format, of pyarrow, or of the file system
        raise RecipeError(f"`{option}.name = {options.name!r}` cannot be read: {first_line(error)}") from error
    if isinstance(saved, dict):
        split = options.split or TRAIN
        if split not in saved:
            raise _unknown_split(options, option, split, sorted(saved))
        return OpenedDataset(_called(options, split), saved[split], None)
    if options.split is not None and options.split != str(saved.split):
        raise RecipeError(
            f"`{option}.split = {options.split!r}` has no effect on the folder `{folder}`, which has one data set "
            "without splits; leave it out"
        )
    return OpenedDataset(_called(options, options.split), saved, None)


# -- the hub -----------------------------------------------------------------------------------------------------------


def _of_hub(datasets: Any, options: DatasetOptions, option: str) -> OpenedDataset:
    if options.name.startswith((".", "/", "~")) or options.name.count("/") > 1:  # a name has one slash at most
        hint = "; `~` is not expanded, write the whole path" if options.name.startswith("~") else ""
        raise RecipeError(
            f"`{option}.name = {options.name!r}`: there is no such folder (seen from {Path.cwd()}), and it is no name "
            f"on the hub{hint}"
        )
    if Path(options.name).is_file():
        raise RecipeError(f"`{option}.name = {options.name!r}` is a file: name it in `task.path`")
    loaded = _loaded(datasets, options, option)
    folders = {Path(file["filename"]).parent.name for file in loaded.cache_files}  # named after the commit
    revision = next((name for name in folders if _COMMIT.match(name)), None) if len(folders) == 1 else None
    asked = options.revision
    if asked is not None and _COMMIT.match(asked) and revision is not None and asked != revision:
        raise RecipeError(
            f"`{option}.revision = {asked!r}`: the hub was not asked or did not answer, and the newest revision in the "
            f"cache, which is used then, is {revision}; {_DOWNLOAD}"
        )
    return OpenedDataset(_called(options, options.split or TRAIN), loaded, revision)


def _loaded(datasets: Any, options: DatasetOptions, option: str) -> Any:
    """Calls `load_dataset`. Its errors become sentences about the keys of a recipe."""
    split, named = options.split or TRAIN, f"`{option}.name = {options.name!r}`"
    try:
        with _asked_once(datasets, options.name):
            return datasets.load_dataset(options.name, options.config, split=split, revision=options.revision)
    except datasets.exceptions.DatasetNotFoundError as error:
        said = first_line(error)
        if "evision" in said and options.revision is not None:
            raise RecipeError(
                f"`{option}.revision = {options.revision!r}`: {said}; name another, or leave it out"
            ) from error
        raise RecipeError(
            f"{named}: the hub has no such data set, or it is private or gated: check the name, or log in with "
            f"`hf auth login` ({said})"
        ) from error
    except datasets.exceptions.DataFilesNotFoundError as error:
        raise RecipeError(f"{named} has no files of rows: {first_line(error)}") from error
    except ValueError as error:
        raise _of_value_error(options, option, split, error) from error
    except Exception as error:  # of a connection: which ones depends on the versions of the clients
        if _is_connection(error):
            why = "the hub is not asked, because `HF_DATASETS_OFFLINE` or `HF_HUB_OFFLINE` is set"
            if not datasets.config.HF_HUB_OFFLINE:
                why = "the hub cannot be reached: check the network"
            raise RecipeError(f"{named}: it is not in the cache, and {why}; without a network, {_DOWNLOAD}") from error
        raise RecipeError(f"{named} cannot be loaded: {type(error).__name__}: {first_line(error)}") from error


@contextlib.contextmanager
def _asked_once(datasets: Any, name: str) -> Iterator[None]:
    """Lets `load_dataset` read its cache alone if the hub does not answer: it would repeat every request for a while.

    Yields with the package in its offline mode, or not.
    """
    was = datasets.config.HF_HUB_OFFLINE
    try:
        if not was and not Path(name).is_dir():
            datasets.config.HF_HUB_OFFLINE = not _answers(name)
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE = was


def _answers(name: str) -> bool:
    """Tells if the hub answers, whatever it says."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        HfApi().dataset_info(name, timeout=ANSWER_S)
    except (HfHubHTTPError, HFValidationError):
        return True  # `load_dataset` says what is wrong
    except Exception:  # which errors a connection raises depends on the version of the client
        return False
    return True


def _is_connection(error: BaseException) -> bool:
    """Tells if an error, or what caused it, is one of a connection."""
    seen: BaseException | None = error
    while seen is not None:
        words = ("Connect", "Timeout", "Offline")
        if isinstance(seen, ConnectionError | TimeoutError) or any(word in type(seen).__name__ for word in words):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def _of_value_error(options: DatasetOptions, option: str, split: str, error: ValueError) -> RecipeError:
    """Returns the error for a split or a configuration that the data set does not have."""
    said = str(error)
    listed = re.findall(r"'([^']+)'", said.partition("[")[2]) if "[" in said else []
    if "split" in said.lower():
        return _unknown_split(options, option, split, listed)
    if "onfig" in said:
        listed = listed or [name for name in re.findall(r"[\w.-]+", said.rpartition(":")[2]) if name]
        choices = ", ".join(f"`{name}`" for name in listed[:12]) or first_line(error)
        if options.config is None:
            return RecipeError(f"`{option}.config` is missing: `{options.name}` has several configurations: {choices}")
        return RecipeError(
            f"`{option}.config = {options.config!r}` is none of `{options.name}`, which has {choices}"
            + _near(options.config, listed)
        )
    return RecipeError(f"`{option}.name = {options.name!r}` cannot be loaded: {first_line(error)}")


def _unknown_split(options: DatasetOptions, option: str, split: str, splits: list[str]) -> RecipeError:
    default = "" if options.split is not None else " (the default)"
    has = ", ".join(f"`{name}`" for name in splits) or "others"
    return RecipeError(
        f"`{option}.split = {split!r}`{default}: `{options.name}` has no such split, it has {has}{_near(split, splits)}"
    )


def _near(name: str, names: list[str]) -> str:
    near = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean `{near[0]}`?" if near else ""
