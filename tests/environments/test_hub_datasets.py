"""Data sets of the hub and of the package datasets: the real package, against folders and a stand-in hub.

The hub is a server of the test on this machine. What was loaded from it lies in a cache of the test, from which it is
read again when the server is gone, as on a machine without a network.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from dataset_hub import DatasetHub, served_datasets

from stretto.environments.data_options import DatasetOptions
from stretto.environments.hub_datasets import open_dataset
from stretto.environments.rows import Row, make_rows
from stretto.environments.task_options import FileOptions
from stretto.environments.tasks import load_task
from stretto.errors import RecipeError

RECORDS = [{"question": f"{number}+{number}=", "answer": str(2 * number)} for number in range(6)]
LINES = "".join(json.dumps(record) + "\n" for record in RECORDS).encode()
COLUMNS = {"prompt": "question"}

needs_datasets = pytest.mark.skipif("not __import__('importlib').util.find_spec('datasets')", reason="no datasets")


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(RecipeError, match=r"`task.dataset` needs the package datasets: `pip install 'stretto\[data"):
        open_dataset(DatasetOptions(name="openai/gsm8k"))


# -- folders -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The package, with a cache of its own."""
    package = pytest.importorskip("datasets")
    monkeypatch.setattr(package.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return package


def rows_of(columns: dict[str, str] | None = None, **options: Any) -> list[Row]:
    opened = open_dataset(DatasetOptions(**options))
    return make_rows(opened.records(columns or COLUMNS), columns or COLUMNS)


def test_a_saved_split_is_read(datasets: Any, tmp_path: Path) -> None:
    folder = str(tmp_path / "saved")
    datasets.Dataset.from_list(RECORDS).save_to_disk(folder)
    rows = rows_of(name=folder)
    assert [row.text for row in rows] == [record["question"] for record in RECORDS]
    assert rows[1].columns == {"answer": "2"}
    assert rows[1].where == f"row 2 of `{folder}`"
    for key in ("split", "config", "revision"):
        with pytest.raises(RecipeError, match=rf"`task.dataset.{key}.* has no effect on the folder"):
            rows_of(name=folder, **{key: "main"})


def test_a_saved_data_set_has_splits(datasets: Any, tmp_path: Path) -> None:
    folder = str(tmp_path / "saved")
    splits = {"train": datasets.Dataset.from_list(RECORDS), "test": datasets.Dataset.from_list(RECORDS[:2])}
    datasets.DatasetDict(splits).save_to_disk(folder)
    assert [len(rows_of(name=folder, **split)) for split in ({}, {"split": "test"})] == [6, 2]
    with pytest.raises(
        RecipeError, match=r"`task.dataset.split = 'tests'`: .* it has `test`, `train`; did .* `test`\?"
    ):
        rows_of(name=folder, split="tests")


def test_a_folder_of_files_is_read_as_load_dataset_does(datasets: Any, tmp_path: Path) -> None:
    (tmp_path / "repository").mkdir()
    (tmp_path / "repository" / "train.jsonl").write_bytes(LINES)
    folder = str(tmp_path / "repository")
    assert len(rows_of(name=folder)) == 6
    assert len(rows_of(name=folder, split="train[:2]")) == 2
    with pytest.raises(RecipeError, match=r"`task.dataset.split = 'test'`: .* has no such split, it has `train`"):
        rows_of(name=folder, split="test")
    with pytest.raises(RecipeError, match=r"`task.dataset.config = 'main'` is none of .* which has `default`"):
        rows_of(name=folder, config="main")


def test_rows_to_train_and_to_evaluate_on_come_from_data_sets_and_are_known_by_their_digests(
    datasets: Any, tmp_path: Path
) -> None:
    folder = tmp_path / "saved"
    splits = {"train": datasets.Dataset.from_list(RECORDS), "test": datasets.Dataset.from_list(RECORDS[:2])}
    datasets.DatasetDict(splits).save_to_disk(str(folder))
    source = {"name": str(folder)}
    options = FileOptions.model_validate(
        {"dataset": source, "evaluation_dataset": {**source, "split": "test"}, "columns": COLUMNS, "system": "Add."}
    )
    task = load_task(options, num_evaluation=8)
    assert (len(task.train), len(task.evaluation), task.name) == (6, 2, f"`{folder}`")
    assert [each["role"] for each in task.train[0].messages or ()] == ["system", "user"]
    assert load_task(options, num_evaluation=8).data == task.data
    assert list(task.data.train) == [f"`{folder}` (train)"]
    assert task.data.train[f"`{folder}` (train)"] != task.data.evaluation[f"`{folder}` (test)"]


@pytest.mark.parametrize(
    ("columns", "pattern"),
    [
        ({"prompt": "questions"}, r"`task.columns.prompt = 'questions'`: .* nearest is `question`; .*`answer`, `ques"),
        (
            {"x": "answer"},
            r'a row has a column `prompt` or .* this has `answer`, `question`; .* \{ prompt = "question"',
        ),
    ],
)
def test_a_column_that_is_missing_is_named(
    datasets: Any, tmp_path: Path, columns: dict[str, str], pattern: str
) -> None:
    datasets.Dataset.from_list(RECORDS).save_to_disk(str(tmp_path / "saved"))
    with pytest.raises(RecipeError, match=pattern):
        rows_of(columns, name=str(tmp_path / "saved"))


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere", "~/data", "a/b/c"])
def test_a_folder_that_is_not_there_is_not_looked_for_on_the_hub(datasets: Any, name: str) -> None:
    with pytest.raises(RecipeError, match=r"there is no such folder .*, and it is no name on the hub"):
        rows_of(name=name)


# -- the hub -----------------------------------------------------------------------------------------------------------

LOAD = """
import json, sys
from stretto.environments.data_options import DatasetOptions
from stretto.environments.hub_datasets import open_dataset
from stretto.errors import RecipeError
try:
    opened = open_dataset(DatasetOptions(**json.loads(sys.argv[1])))
    rows = [record for _, record in opened.records({"prompt": "question"})]
    print(json.dumps({"name": opened.name, "revision": opened.revision, "rows": rows}))
except RecipeError as error:
    print(json.dumps({"error": str(error)}))
"""


class Machine:
    """Processes with one cache, that know the hub at an address."""

    def __init__(self, cache: Path, url: str) -> None:
        self._variables = {"HF_HOME": str(cache), "HF_ENDPOINT": url, "HF_HUB_DISABLE_TELEMETRY": "1"}

    def load(self, *, offline: bool = False, **options: Any) -> dict[str, Any]:
        """Returns the data set that a process loads, or its error."""
        kept = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
        done = subprocess.run(
            [sys.executable, "-c", LOAD, json.dumps(options)],
            env={**kept, **self._variables, **({"HF_DATASETS_OFFLINE": "1"} if offline else {})},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found


@pytest.fixture
def hub() -> Iterator[DatasetHub]:
    with served_datasets() as server:
        yield server


@needs_datasets
@pytest.mark.slow
def test_a_data_set_of_the_hub_is_loaded_and_read_from_the_cache_when_the_hub_is_gone(
    hub: DatasetHub, tmp_path: Path
) -> None:
    first = hub.commit("me/sums", {"train.jsonl": LINES, "test.jsonl": LINES[: LINES.index(b"\n") + 1]})
    machine = Machine(tmp_path, hub.url)
    loaded = machine.load(name="me/sums")
    assert loaded == {"name": "`me/sums` (train)", "revision": first, "rows": RECORDS}
    assert len(machine.load(name="me/sums", split="test")["rows"]) == 1
    assert "`task.dataset.split = 'validation'`" in machine.load(name="me/sums", split="validation")["error"]
    second = hub.commit("me/sums", {"train.jsonl": LINES * 2})
    assert machine.load(name="me/sums", revision=first)["revision"] == first
    assert machine.load(name="me/sums")["revision"] == second
    hub.shutdown()
    hub.server_close()
    for offline in (True, False):
        again = machine.load(name="me/sums", offline=offline)
        assert (again["revision"], len(again["rows"])) == (second, 12)
    wrong = machine.load(name="me/sums", revision="f" * 40, offline=True)["error"]
    assert wrong.startswith(f"`task.dataset.revision = '{'f' * 40}'`: the hub was not asked or did not answer")
    assert second in wrong


@needs_datasets
def test_a_name_that_the_hub_does_not_have_or_cannot_be_asked_for_is_told_apart(
    hub: DatasetHub, tmp_path: Path
) -> None:
    hub.commit("me/sums", {"train.jsonl": LINES})
    machine = Machine(tmp_path, hub.url)
    unknown = machine.load(name="me/sum")["error"]
    assert unknown.startswith("`task.dataset.name = 'me/sum'`: the hub has no such data set, or it is private or gated")
    revision = machine.load(name="me/sums", revision="a" * 40)["error"]
    assert revision.startswith(f"`task.dataset.revision = '{'a' * 40}'`")
    offline = machine.load(name="me/sums", offline=True)["error"]
    assert "it is not in the cache, and the hub is not asked, because `HF_DATASETS_OFFLINE`" in offline
    assert "load it once on a machine with a network" in offline
    hub.shutdown()
    hub.server_close()
    unreachable = machine.load(name="me/sums")["error"]
    assert "it is not in the cache, and the hub cannot be reached: check the network" in unreachable
