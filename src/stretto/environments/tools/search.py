"""Search over a folder of text files: a full-text index in SQLite (FTS5), ranked by BM25.

The index is a file that is made once and read by every call. It is made again if a file was added, changed or removed.
"""

from __future__ import annotations

import hashlib
import os
import re
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from stretto.chat.tools import OUTPUT_CHARS, Tool, make_tool
from stretto.errors import RecipeError, RewardError

SUFFIXES = (".txt", ".md", ".rst")
PASSAGE_WORDS = 150
MAX_QUERY_WORDS = 32
FORMAT = 1  # of the index; raise it when it changes

_WORD = re.compile(r"\w+")


class SearchIndex:
    """The passages of the text files of a folder."""

    def __init__(self, folder: str | Path, *, index: str | Path | None = None) -> None:
        """Makes the index if it is not there. `index` is its file; by default one in the user's cache.

        Raises `RecipeError` if there is no text to search.
        """
        self.folder = Path(folder).resolve()
        files = _files(self.folder)
        if not files:
            raise RecipeError(f"`{folder}` has no text files to search ({', '.join(SUFFIXES)})")
        state = _state(self.folder, files)
        self.path = Path(index).absolute() if index is not None else _cached(self.folder)
        if not self._is_current(state):
            self._make(files, state)

    def search(self, query: str, results: int = 3) -> list[tuple[str, str]]:
        """Returns the best passages for the words of a query, best first, each with the name of its file.

        Raises `RewardError` if the index cannot be read.
        """
        words = list(dict.fromkeys(word.lower() for word in _WORD.findall(query)))[:MAX_QUERY_WORDS]
        if not words or results < 1:
            return []
        wanted = " OR ".join(f'"{word}"' for word in words)
        select = "SELECT file, passage FROM passages WHERE passages MATCH ? ORDER BY rank, rowid LIMIT ?"
        try:
            with closing(sqlite3.connect(f"{self.path.as_uri()}?mode=ro", uri=True)) as connection:
                return connection.execute(select, (wanted, results)).fetchall()
        except sqlite3.Error as error:
            raise RewardError(f"the search index `{self.path}` cannot be read: {error}") from error

    def _is_current(self, state: str) -> bool:
        if not self.path.is_file():
            return False
        try:
            with closing(sqlite3.connect(f"{self.path.as_uri()}?mode=ro", uri=True)) as connection:
                return bool(connection.execute("SELECT state FROM made_of").fetchone() == (state,))
        except sqlite3.Error:
            return False

    def _make(self, files: list[Path], state: str) -> None:
        """Writes the index. It appears as a whole: another process may make it at the same time."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        number, name = tempfile.mkstemp(prefix=".search-", dir=self.path.parent)
        os.close(number)
        try:
            with closing(sqlite3.connect(name)) as connection, connection:
                connection.execute("CREATE VIRTUAL TABLE passages USING fts5(file UNINDEXED, passage, tokenize=porter)")
                connection.execute("CREATE TABLE made_of (state TEXT)")
                connection.execute("INSERT INTO made_of VALUES (?)", (state,))
                connection.executemany("INSERT INTO passages VALUES (?, ?)", self._passages(files))
            os.replace(name, self.path)
        except sqlite3.Error as error:
            raise RecipeError(f"the search index `{self.path}` cannot be made: {error}") from error
        finally:
            Path(name).unlink(missing_ok=True)

    def _passages(self, files: list[Path]) -> Iterator[tuple[str, str]]:
        for file in files:
            words = file.read_text(encoding="utf-8", errors="replace").split()
            for start in range(0, len(words), PASSAGE_WORDS):
                yield str(file.relative_to(self.folder)), " ".join(words[start : start + PASSAGE_WORDS])


def search_tool(
    folder: str | Path,
    *,
    results: int = 3,
    index: str | Path | None = None,
    seconds: float = 10.0,
    output_chars: int = OUTPUT_CHARS,
) -> Tool:
    """Returns a tool `search` over the text files of a folder. Makes its index if needed."""
    made = SearchIndex(folder, index=index)

    def search(query: str) -> str:
        """Searches the documents, and returns the passages that fit best.

        Args:
            query: Words to search for.
        """
        found = made.search(query, results)
        return "\n\n".join(f"[{file}] {passage}" for file, passage in found) or "Nothing was found."

    return make_tool(search, seconds=seconds, output_chars=output_chars)


def _files(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise RecipeError(f"`{folder}` is no folder; name one with text files to search")
    return sorted(path for path in folder.rglob("*") if path.suffix in SUFFIXES and path.is_file())


def _state(folder: Path, files: list[Path]) -> str:
    """Returns a digest that changes if a file is added, changed or removed."""
    digest = hashlib.sha256(f"{FORMAT} {PASSAGE_WORDS} {folder}".encode(errors="surrogateescape"))
    for file in files:
        status = file.stat()
        digest.update(f"\0{file}\0{status.st_size}\0{status.st_mtime_ns}".encode(errors="surrogateescape"))
    return digest.hexdigest()


def _cached(folder: Path) -> Path:
    """Returns the index of a folder in `$XDG_CACHE_HOME/stretto`, or in `~/.cache/stretto`."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    name = hashlib.sha256(os.fsencode(folder)).hexdigest()[:32]
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "stretto" / f"search-{name}.sqlite"
