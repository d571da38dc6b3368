"""The rows of a task: read from files, from a data set of the hub, or given from Python."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from stretto.environments.data_options import DatasetOptions, RowsOptions
from stretto.environments.given import ARGUMENTS, Given, RowsDigest, is_given
from stretto.environments.row_faults import RowFaults
from stretto.environments.row_sources import Record, file_digest, found_files, read_files
from stretto.environments.rows import Row, make_rows, split_held_out

HELD_OUT_SHARE = 5  # at most one row in five is held out


@dataclass(frozen=True, slots=True)
class DataRead:
    """The sources of a task's rows: files by their digests, data sets of the hub by their revisions.

    Rows that are generated, or were given from Python, have none: a recipe has the digest of the latter.
    """

    train: Mapping[str, str] = field(default_factory=dict)  # in the order of the rows
    evaluation: Mapping[str, str] = field(default_factory=dict)  # empty: split from the others
    revisions: Mapping[str, str] = field(default_factory=dict)  # key of the recipe -> commit on the hub, if known


NOTHING_READ = DataRead()


class TaskRows(NamedTuple):
    """The rows of a task, and what they were read from."""

    name: str  # in messages
    train: list[Row]
    evaluation: list[Row]
    data: DataRead


def read_rows(options: RowsOptions, seed: int, num_evaluation: int, given: Given) -> TaskRows:
    """Reads the rows of a task. Without rows to evaluate on, `num_evaluation` are split off by the `seed`."""
    name = "`data`" if is_given(options.path) else options.rows_name
    rows, train, revisions = _read(options, options.path, options.dataset, "", given.rows)
    if options.evaluation_path is None and options.evaluation_dataset is None:
        kept, held_out = split_held_out(rows, min(num_evaluation, len(rows) // HELD_OUT_SHARE), seed)
        return TaskRows(name, kept, held_out, DataRead(train, {}, revisions))
    held_out, evaluation, others = _read(
        options, options.evaluation_path, options.evaluation_dataset, "evaluation_", given.evaluation_rows
    )
    return TaskRows(name, rows, held_out[:num_evaluation], DataRead(train, evaluation, {**revisions, **others}))


def _read(
    options: RowsOptions,
    path: str | tuple[str, ...] | None,
    dataset: DatasetOptions | None,
    prefix: str,
    given: Sequence[Mapping[str, Any]] | None,
) -> tuple[list[Row], dict[str, str], dict[str, str]]:
    """Returns rows, the digests of what they were read from, and the revision of a data set by its key."""
    faults, columns = RowFaults(), options.columns

    def made(records: Iterator[Record]) -> list[Row]:
        return make_rows(records, columns, faults, system=options.system)

    if dataset is not None:
        from stretto.environments.hub_datasets import open_dataset

        option = f"task.{prefix}dataset"
        opened = open_dataset(dataset, option)
        if opened.revision is not None:
            return made(opened.records(columns)), {opened.name: opened.revision}, {option: opened.revision}
        digest = RowsDigest()
        rows = made((where, digest.add(record)) for where, record in opened.records(columns))
        return rows, {opened.name: digest.value}, {}
    if is_given(path):
        assert given is not None, "refused before"
        name = ARGUMENTS[f"{prefix}path"]
        return made((f"row {number} of `{name}`", dict(row)) for number, row in enumerate(given, start=1)), {}, {}
    assert path is not None, "a task has a path or a data set"
    option = f"task.{prefix}path"
    files = found_files(path, option)
    rows = made(read_files(files, option, columns, faults))
    return rows, {str(file): file_digest(file) for file in files}, {}
