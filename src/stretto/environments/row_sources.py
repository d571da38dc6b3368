"""Files of rows: JSON Lines, JSON, CSV, TSV and Parquet, one or several. Read in a stream, one record at a time.

| file               | its records                                                           | place in messages   |
|--------------------|-----------------------------------------------------------------------|---------------------|
| `.jsonl`           | an object on each line                                                | `rows.jsonl:LINE`   |
| `.json`            | a list of objects, or an object on each line                          | `rows.json:ITEM`    |
| `.csv`, `.tsv`     | lines under a line of column names, in UTF-8; every value is a text   | `rows.csv:LINE`     |
| `.parquet`         | its rows                                                              | `rows.parquet:ROW`  |
"""

from __future__ import annotations

import csv
import difflib
import glob
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from stretto.environments.row_faults import RowFaults, half_character
from stretto.environments.rows import ASKING, Row, make_rows, missing_column, missing_prompt
from stretto.errors import RecipeError

Record = tuple[str, Any]
"""The place of a record, and the record, which is an object if all is well."""

PARQUET_ROWS = 1024  # that are turned into objects at once
LONGEST_CELL = 1 << 30  # characters of a CSV cell
MAGIC = frozenset("*?[")  # a path with one of these is a pattern, unless there is a file of that name


def load_rows(
    path: str | Path | Sequence[str | Path], option: str = "task.path", columns: Mapping[str, str] | None = None
) -> list[Row]:
    """Reads the rows of files, in the order in which they are named; those of a pattern come sorted.

    Each row has a column `prompt` or `messages`, possibly by `columns` (ours with theirs); the others go to the reward
    function. `option` is the recipe's key that names the files. Raises `RecipeError` with all that is wrong.
    """
    faults = RowFaults()
    return make_rows(read_files(found_files(path, option), option, columns or {}, faults), columns, faults)


def found_files(path: str | Path | Sequence[str | Path], option: str = "task.path") -> list[Path]:
    """Returns the files that a recipe names. Raises `RecipeError` if a pattern matches none, or a file comes twice."""
    named = [path] if isinstance(path, str | Path) else list(path)
    files: list[Path] = []
    for each in map(str, named):
        if MAGIC.isdisjoint(each) or Path(each).exists():
            files.append(Path(each))
            continue
        matches = sorted(Path(found) for found in glob.glob(each, recursive=True) if Path(found).is_file())
        if not matches:
            raise RecipeError(f"`{option}`: no file matches `{each}` (seen from {Path.cwd()})")
        files += matches
    if len(set(files)) < len(files):
        twice = next(file for number, file in enumerate(files) if file in files[:number])
        raise RecipeError(f"`{option}` names `{twice}` twice: its rows would come twice; name it once")
    return files


def file_digest(path: Path) -> str:
    """Returns a digest of the contents of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def read_files(files: Sequence[Path], option: str, columns: Mapping[str, str], faults: RowFaults) -> Iterator[Record]:
    """Yields the records of files. Adds those that cannot be read to `faults`, and raises `RecipeError` for a file."""
    for path in files:
        try:
            empty = True
            for record in _reader(path, option)(path, columns, faults):
                empty = False
                yield record
        except OSError as error:
            raise RecipeError(
                f"`{path}` cannot be read: {error.strerror or error}; `{option}` names a file that you may read"
            ) from error
        if empty and not faults.num:
            among = f"; it is one of {len(files)} files of `{option}`: leave it out" if len(files) > 1 else ""
            raise RecipeError(f"`{path}` has no rows; there is nothing to ask the model{among}")


_Reader = Callable[[Path, Mapping[str, str], RowFaults], Iterator[Record]]


def _reader(path: Path, option: str) -> _Reader:
    kinds = ", ".join(f"`{suffix}`" for suffix in READERS)
    if not path.is_file():
        raise RecipeError(f"`{path}` is {_not_a_file(path)}; `{option}` names files that end in {kinds}{_hint(path)}")
    found = READERS.get(path.suffix.lower())
    if found is None:
        raise RecipeError(f"`{path}` ends in `{path.suffix}`; `{option}` names files that end in {kinds}")
    return found


def _not_a_file(path: Path) -> str:
    return "a folder" if path.is_dir() else "not a file"


def _hint(path: Path) -> str:
    if str(path).startswith("~"):
        return " (`~` is not expanded, write the whole path)"
    if (path / "dataset_info.json").is_file() or (path / "dataset_dict.json").is_file():
        return f'; this folder was written by `save_to_disk`: name it with `task.dataset = {{ name = "{path}" }}`'
    if path.is_dir():
        return f", such as `{path}/*.parquet`"
    names = [str(each) for each in path.parent.iterdir()] if path.parent.is_dir() else []
    near = difflib.get_close_matches(str(path), names, n=1, cutoff=0.8)
    if near:
        return f"; did you mean `{near[0]}`?"
    if not path.suffix and not path.is_absolute() and str(path).count("/") <= 1:  # as a name on the hub
        return f'; a data set of the hub is named with `task.dataset = {{ name = "{path}" }}`'
    return ""


# -- JSON --------------------------------------------------------------------------------------------------------------


def _read_jsonl(path: Path, columns: Mapping[str, str], faults: RowFaults) -> Iterator[Record]:
    with path.open("rb") as file:
        yield from _json_lines(path, file, faults)


def _json_lines(path: Path, file: IO[bytes], faults: RowFaults, hint: str = "") -> Iterator[Record]:
    for number, line in enumerate(file, start=1):
        where = f"{path}:{number}"
        try:
            whole = line.decode("utf-8-sig" if number == 1 else "utf-8")  # may begin with a mark
            text = whole.strip()
            record = json.loads(text) if text else None
        except json.JSONDecodeError as error:
            column = error.colno + len(whole) - len(whole.lstrip())
            faults.add(where, f"this line is not JSON: {error.msg}, at column {column}{hint}")
            continue
        except (UnicodeDecodeError, RecursionError) as error:
            faults.add(where, f"this line is not JSON: {error}{hint}")
            continue
        if text:
            yield from _whole(where, record, faults, escaped="\\u" in text)


def _read_json(path: Path, columns: Mapping[str, str], faults: RowFaults) -> Iterator[Record]:
    """Reads a list of objects. A file that does not begin with a bracket has an object on each line."""
    with path.open("rb") as file:
        begin = file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()
        file.seek(0)
        if begin[:1] != b"[":
            yield from _json_lines(
                path, file, faults, " (a `.json` file is a list of objects, or has one on each line)"
            )
            return
        try:
            text = file.read().decode("utf-8-sig")
            records = json.loads(text)
        except json.JSONDecodeError as error:
            raise RecipeError(
                f"{path}:{error.lineno}: this file is not JSON: {error.msg}, at column {error.colno}"
            ) from error
        except (UnicodeDecodeError, RecursionError) as error:
            raise RecipeError(f"`{path}` is not JSON: {error}") from error
    escaped = "\\u" in text
    del text
    records.reverse()
    for number in range(1, len(records) + 1):
        yield from _whole(f"{path}:{number}", records.pop(), faults, escaped=escaped)


def _whole(where: str, record: Any, faults: RowFaults, *, escaped: bool) -> Iterator[Record]:
    """Yields a record, unless it has half of a character, which JSON can write and no tokenizer takes."""
    if escaped:
        try:
            json.dumps(record, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError as error:
            faults.add(where, half_character(error))
            return
    yield where, record


# -- CSV ---------------------------------------------------------------------------------------------------------------


def _read_csv(path: Path, columns: Mapping[str, str], faults: RowFaults) -> Iterator[Record]:
    csv.field_size_limit(max(csv.field_size_limit(), LONGEST_CELL))
    delimiter = "\t" if path.suffix.lower() == ".tsv" else ","
    with path.open(encoding="utf-8-sig", newline="") as file:
        lines = csv.reader(file, delimiter=delimiter, strict=True)
        began = 1  # the first line of the row that is read
        try:
            names = next(filter(None, lines), None)  # an empty line has none
            if names is None:
                return
            _check_header(f"{path}:{lines.line_num}", names, columns, delimiter)
            began = lines.line_num + 1
            for cells in lines:
                where, began = f"{path}:{began}", lines.line_num + 1
                if len(cells) == len(names):
                    yield where, dict(zip(names, cells, strict=True))
                elif cells:
                    faults.add(
                        where,
                        f"this line has {len(cells)} values, and the first line of the file names {len(names)} "
                        "columns; put quotes around a value with a delimiter or a line break in it",
                    )
        except csv.Error as error:
            long = f", which goes on to line {lines.line_num:,}," if lines.line_num > began else ""
            quote = "; a quote that opens in it may not be closed" if long or "end of data" in str(error) else ""
            raise RecipeError(f"{path}:{began}: this row{long} cannot be read as CSV: {error}{quote}") from error
        except UnicodeDecodeError as error:
            raise RecipeError(
                f"{path}:{_undecodable_line(path)}: this line is not in UTF-8: it has the byte "
                f"0x{error.object[error.start]:02x}; save the file again in UTF-8, for example with `iconv -f "
                f"WINDOWS-1252 -t UTF-8 {path}`"
            ) from error


def _undecodable_line(path: Path) -> int:
    """Returns the first line of a file that is not in UTF-8. No character of UTF-8 has the byte of a line break."""
    with path.open("rb") as file:
        return next((number for number, line in enumerate(file, start=1) if not _is_utf8(line)), 1)


def _is_utf8(line: bytes) -> bool:
    try:
        line.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _check_header(where: str, names: Sequence[str], columns: Mapping[str, str], delimiter: str) -> None:
    """Refuses a first line that cannot be the names of the columns; `where` is its place."""
    if twice := next((name for number, name in enumerate(names) if name in names[:number]), None):
        raise RecipeError(
            f"{where}: the first line of the file has the names of its columns, and `{twice}` is there twice; write "
            "such a line, or rename one"
        )
    other = next((each for each in "\t;|," if each != delimiter and each in names[0]), None)
    if other is not None and len(names) == 1:
        raise RecipeError(
            f"{where}: the values of this file are separated by {other!r}, not by {delimiter!r}: a `.tsv` file has "
            "tabs, and a `.csv` file commas"
        )
    if reason := without_columns(names, columns):
        raise RecipeError(f"{where}: {reason}; the first line of the file has the names of its columns")


def without_columns(names: Sequence[str], columns: Mapping[str, str]) -> str:
    """Returns which column a table lacks that all its rows need; empty if it lacks none."""
    for ours, theirs in columns.items():
        if theirs not in names:
            return missing_column(ours, theirs, names)
    return "" if any(name in columns or name in names for name in ASKING) else missing_prompt(names)


# -- Parquet -----------------------------------------------------------------------------------------------------------


def _read_parquet(path: Path, columns: Mapping[str, str], faults: RowFaults) -> Iterator[Record]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise RecipeError(f"reading `{path}` needs pyarrow: `pip install 'stretto[parquet]'`") from error
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            if reason := without_columns(file.schema_arrow.names, columns):
                raise RecipeError(f"{path}: {reason}")
            number = 0
            for batch in file.iter_batches(PARQUET_ROWS):
                for record in batch.to_pylist():
                    number += 1
                    yield f"{path}:{number}", record
    except (pyarrow.ArrowException, OSError) as error:
        raise RecipeError(f"`{path}` cannot be read as Parquet: {error}") from error


READERS: Mapping[str, _Reader] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".tsv": _read_csv,
    ".parquet": _read_parquet,
}
