"""A small table: a sequence of rows with access to columns, and a view for terminals and notebooks.

Imports nothing heavy.
"""

from __future__ import annotations

import difflib
import html
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, overload

from stretto.errors import RunError, printable

Row = dict[str, Any]

WIDEST = 40  # characters of a value that are shown
FIRST, LAST = 10, 5  # rows that are shown of a long table
NEAREST, CLOSE = 3, 0.6  # names that an error proposes for an unknown column, and how alike they are
FEW = 10  # columns that an error lists


class Table(Sequence[Row]):
    """Rows of named values.

    `table[3]` is a row, `table[3:7]` a table, `table["reward_mean"]` the values of a column: None where a row lacks it.
    """

    def __init__(self, rows: Iterable[Mapping[str, Any]], *, shown: Sequence[str] = (), title: str = "") -> None:
        """`shown` are the columns that a view has, if the rows have them; by default all."""
        self._rows: list[Row] = [dict(row) for row in rows]
        self._columns = tuple(dict.fromkeys(name for row in self._rows for name in row))
        self._shown = tuple(shown)
        self._title = title

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of all columns."""
        return self._columns

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows)

    @overload
    def __getitem__(self, key: int) -> Row: ...
    @overload
    def __getitem__(self, key: slice) -> Table: ...
    @overload
    def __getitem__(self, key: str) -> list[Any]: ...
    def __getitem__(self, key: int | slice | str) -> Row | Table | list[Any]:
        if isinstance(key, str):
            self._refuse_unknown(key)
            return [row.get(key) for row in self._rows]
        if isinstance(key, slice):
            return Table(self._rows[key], shown=self._shown, title=self._title)
        return self._rows[key]

    def select(self, *columns: str) -> Table:
        """Returns a table of these columns, in this order."""
        for name in columns:
            self._refuse_unknown(name)
        return Table(({name: row.get(name) for name in columns} for row in self._rows), title=self._title)

    def to_pandas(self) -> Any:
        """Returns a data frame. Raises `RunError` if pandas is not installed."""
        try:
            import pandas
        except ImportError as error:
            raise RunError("`to_pandas` needs the package pandas: `pip install pandas`") from error
        return pandas.DataFrame(self._rows, columns=list(self._columns))

    def _refuse_unknown(self, name: str) -> None:
        if name not in self._columns:
            near, columns = self._nearest(name), self._columns
            if near:
                hint = f"did you mean {' or '.join(f'`{each}`' for each in near)}?"
            elif len(columns) > FEW:
                hint = f"`.columns` lists all {len(columns)}"
            else:
                hint = f"there are {', '.join(columns) or 'none'}"
            raise KeyError(f"there is no column `{name}`; {hint}")

    def _nearest(self, name: str) -> list[str]:
        """Returns the names that are most like one, nearest first, at most `NEAREST`."""
        close = difflib.get_close_matches(name, self._columns, n=NEAREST, cutoff=CLOSE)
        words = [word for word in name.lower().split("_") if len(word) > 2]
        sharing = [each for each in self._columns if any(word in each for word in words)]
        return list(dict.fromkeys([*close, *sharing]))[:NEAREST]

    # -- views ---------------------------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        names, rows = self._view()
        widths = [max(len(name), *(len(row[at]) for row in rows), 0) for at, name in enumerate(names)]
        numeric = [self._is_numeric(name) for name in names]
        lines = [self._headline(names)]
        for row in [names, *rows] if names else []:
            cells = (
                value.rjust(width) if right else value.ljust(width)
                for value, width, right in zip(row, widths, numeric, strict=True)
            )
            lines.append("  ".join(cells).rstrip())
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        names, rows = self._view()
        head = "".join(f"<th>{html.escape(name)}</th>" for name in names)
        body = "".join("<tr>" + "".join(f"<td>{html.escape(value)}</td>" for value in row) + "</tr>" for row in rows)
        table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        return f"<p>{html.escape(self._headline(names))}</p>{table if names else ''}"

    def _headline(self, names: Sequence[str]) -> str:
        count = f"{len(self._rows):,} row{'s' * (len(self._rows) != 1)}"
        hidden = len(self._columns) - len(names)
        more = f", {hidden} more columns in `.columns`" if hidden else ""
        return f"{self._title + ': ' if self._title else ''}{count}{more}"

    def _view(self) -> tuple[list[str], list[list[str]]]:
        """Returns the names and the texts that are shown."""
        names = [name for name in self._shown if name in self._columns] or list(self._columns)
        rows = self._rows
        cut = len(rows) > FIRST + LAST + 1
        texts = [[_text(row.get(name)) for name in names] for row in (rows[:FIRST] + rows[-LAST:] if cut else rows)]
        if cut:
            texts.insert(FIRST, ["..." for _ in names])
        return names, texts

    def _is_numeric(self, name: str) -> bool:
        return all(isinstance(row.get(name), int | float | None) for row in self._rows)


def _text(value: Any) -> str:
    """Returns a value as a short line of plain characters."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e5 else f"{value:,.0f}"
    text = printable(str(value).replace("\n", "\\n"))
    return text if len(text) <= WIDEST else f"{text[: WIDEST - 3]}..."
