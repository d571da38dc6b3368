"""Tables: rows, columns, and views that nothing in them can break."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from stretto.api.tables import FIRST, LAST, WIDEST, Table
from stretto.errors import RunError


def test_a_table_is_a_sequence_of_rows_with_columns() -> None:
    table = Table([{"a": 1, "b": 2.0}, {"a": 3, "c": "x"}])
    assert len(table) == 2
    assert table[0] == {"a": 1, "b": 2.0}
    assert table[-1]["c"] == "x"
    assert table.columns == ("a", "b", "c")
    assert table["b"] == [2.0, None]
    assert list(table[1:]) == [{"a": 3, "c": "x"}]
    assert table.select("c", "a").columns == ("c", "a")
    assert [row["a"] for row in table] == [1, 3]
    with pytest.raises(KeyError, match="there is no column `aa`; did you mean `a`"):
        table["aa"]
    with pytest.raises(KeyError, match="there are a, b, c"):
        table.select("reward")


def test_an_unknown_column_of_a_wide_table_gets_the_nearest_names_and_never_all() -> None:
    names = ["reward_mean", "reward_std", "tokens_per_second", *(f"filler_{number}" for number in range(80))]
    table = Table([dict.fromkeys(names, 1.0)])
    for asked, answer in [
        ("reward_meen", "did you mean `reward_mean`"),
        ("reward", "did you mean `reward_std` or `reward_mean`?"),
        ("tps_second", "`tokens_per_second`"),
        ("zzz", "`.columns` lists all 83"),
    ]:
        with pytest.raises(KeyError) as caught:
            table[asked]
        assert answer in str(caught.value)
        assert "filler" not in str(caught.value)


def test_a_view_has_the_chosen_columns_and_the_first_and_last_rows() -> None:
    table = Table(({"update": n, "reward": n / 7, "rest": None} for n in range(100)), shown=("update", "reward", "no"))
    lines = repr(table).splitlines()
    assert lines[0] == "100 rows, 1 more columns in `.columns`"
    assert lines[1].split() == ["update", "reward"]
    assert len(lines) == 2 + FIRST + 1 + LAST
    assert lines[-1].split() == ["99", "14.14"]
    assert repr(Table([])) == "0 rows"
    assert Table([{"a": 1}], title="ones")._repr_html_().startswith("<p>ones: 1 row</p><table>")


def test_texts_of_a_model_can_neither_break_a_terminal_nor_a_page() -> None:
    nasty: dict[str, Any] = {"text": "<script>alert(1)</script>\x1b[2J\nend" + "x" * 99}
    table = Table([nasty])
    assert "\x1b" not in repr(table)
    assert len(repr(table).splitlines()) == 3
    assert len(repr(table).splitlines()[-1]) <= WIDEST
    assert "<script>" not in table._repr_html_()
    assert table["text"] == [nasty["text"]]


def test_a_table_becomes_a_data_frame_if_pandas_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    class Frames:
        @staticmethod
        def DataFrame(rows: Any, columns: Any) -> Any:  # noqa: N802
            return rows, columns

    table = Table([{"a": 1}, {"b": 2}])
    monkeypatch.setitem(sys.modules, "pandas", Frames())
    assert table.to_pandas() == ([{"a": 1}, {"b": 2}], ["a", "b"])
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(RunError, match="needs the package pandas"):
        table.to_pandas()
