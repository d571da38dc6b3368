"""Files of rows as people have them: their formats, several at once, and what is wrong with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from stretto.environments.row_sources import file_digest, found_files, load_rows
from stretto.environments.rows import Row
from stretto.errors import RecipeError

RECORDS = [{"prompt": "one?", "answer": "1"}, {"prompt": "zwölf,\n“quoted”?", "answer": "12"}]
ROWS = [Row(text=record["prompt"], columns={"answer": record["answer"]}) for record in RECORDS]


def write(path: Path, records: list[dict[str, Any]] | None = None) -> Path:
    """Writes records in the format that the suffix of the path names."""
    records = RECORDS if records is None else records
    match path.suffix:
        case ".jsonl":
            path.write_text("".join(json.dumps(record) + "\n" for record in records))
        case ".json":
            path.write_text(json.dumps(records, indent=2, ensure_ascii=False))
        case ".parquet":
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), path)
        case suffix:
            delimiter = "\t" if suffix == ".tsv" else ","
            cells = [list(records[0]), *([str(value) for value in record.values()] for record in records)]
            lines = (delimiter.join('"' + cell.replace('"', '""') + '"' for cell in line) for line in cells)
            path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv", "tsv", "parquet"])
def test_every_format_gives_the_same_rows(tmp_path: Path, suffix: str) -> None:
    assert load_rows(write(tmp_path / f"rows.{suffix}")) == ROWS


def test_a_json_file_may_have_an_object_on_each_line(tmp_path: Path) -> None:
    lines = write(tmp_path / "rows.jsonl").read_bytes()
    (tmp_path / "rows.json").write_bytes(b"\xef\xbb\xbf" + lines)
    assert load_rows(tmp_path / "rows.json") == ROWS
    (tmp_path / "rows.json").write_text('{\n  "rows": []\n}\n')
    with pytest.raises(RecipeError, match=r"rows.json:1: this line is not JSON.*a `.json` file is a list of objects"):
        load_rows(tmp_path / "rows.json")
    (tmp_path / "rows.json").write_text('[{"prompt": "a"}, {"prompt": ')
    with pytest.raises(RecipeError, match=r"rows\.json:1: this file is not JSON: .*, at column 30$"):
        load_rows(tmp_path / "rows.json")
    (tmp_path / "rows.json").write_text('[{"prompt": "a"}, 3]')
    with pytest.raises(RecipeError, match=r"rows\.json:2: a row is an object with named columns, this is int"):
        load_rows(tmp_path / "rows.json")


# -- several files -----------------------------------------------------------------------------------------------------


def test_files_come_in_the_order_of_the_list_and_those_of_a_pattern_sorted(tmp_path: Path) -> None:
    for name in ("b", "a", "c"):
        write(tmp_path / f"{name}.jsonl", [{"prompt": name}])
    write(tmp_path / "z.csv", [{"prompt": "z"}])
    pattern = str(tmp_path / "*.jsonl")
    assert [row.text for row in load_rows(pattern)] == ["a", "b", "c"]
    assert [row.text for row in load_rows([str(tmp_path / "z.csv"), pattern])] == ["z", "a", "b", "c"]
    (deep := tmp_path / "x" / "y").mkdir(parents=True)
    write(deep / "d.jsonl", [{"prompt": "d"}])
    assert [row.text for row in load_rows(str(tmp_path / "**" / "d.jsonl"))] == ["d"]
    write(odd := tmp_path / "[1].jsonl", [{"prompt": "odd"}])
    assert [row.text for row in load_rows(str(odd))] == ["odd"], "a file of that name is no pattern"
    with pytest.raises(RecipeError, match=r"`task.path`: no file matches `.*nothing-\*"):
        found_files(str(tmp_path / "nothing-*"))
    with pytest.raises(RecipeError, match=r"`task.path` names `.*a.jsonl` twice"):
        found_files([pattern, str(tmp_path / "a.jsonl")])


def test_an_empty_file_among_several_is_named(tmp_path: Path) -> None:
    paths = [write(tmp_path / "a.jsonl"), tmp_path / "b.jsonl", write(tmp_path / "c.csv")]
    paths[1].write_text("\n")
    with pytest.raises(RecipeError, match=r"b.jsonl` has no rows.*it is one of 3 files of `task.path`: leave it out"):
        load_rows(paths)
    for text in ("", "\n", "prompt,answer\n"):
        (tmp_path / "only.csv").write_text(text)
        with pytest.raises(RecipeError, match=r"only.csv` has no rows; there is nothing to ask the model$"):
            load_rows(tmp_path / "only.csv")


def test_all_bad_rows_of_all_files_are_reported_at_once(tmp_path: Path) -> None:
    bad = [{"prompt": "fine"}, {"prompt": 3}, *({"prompt": None} for _ in range(7)), {"messages": []}]
    paths = [write(tmp_path / "a.jsonl", bad), write(tmp_path / "b.jsonl", [{"prompt": "fine"}, {"prompt": 4}])]
    with paths[1].open("a") as file:
        file.write("{\n")
    with pytest.raises(RecipeError) as caught:
        load_rows(paths)
    first, *lines = str(caught.value).splitlines()
    assert first == "11 rows cannot be used:"
    assert any("a.jsonl:2, " in line and "b.jsonl:2: `prompt` is a string" in line for line in lines)
    assert any("a.jsonl:3, " in line and "a.jsonl:5 and 4 more: `prompt` is null" in line for line in lines)
    assert any("a.jsonl:10: `messages` is a list of objects" in line for line in lines)
    assert any("b.jsonl:3: this line is not JSON" in line for line in lines)


def test_rows_without_a_prompt_are_told_of_columns_only_if_all_lack_it(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", [{"prompt": "a", "answer": 1}, {"answer": 2}, {"answer": 3}])
    with pytest.raises(RecipeError) as caught:
        load_rows(path)
    assert "rows.jsonl:2, " in str(caught.value)
    assert "this row lacks the column `prompt` or `messages` that other rows have" in str(caught.value)
    assert "task.columns" not in str(caught.value)
    with pytest.raises(
        RecipeError, match=r'name the one to ask with, such as `task.columns = { prompt = "question" }`'
    ):
        load_rows(write(tmp_path / "other.jsonl", [{"question": "a"}, {"question": "b"}]))


def test_the_list_of_bad_rows_is_bounded(tmp_path: Path) -> None:
    wrong = [{"messages": [{"role": "user", "content": number}]} for number in range(500)]
    with pytest.raises(RecipeError) as caught:
        load_rows(write(tmp_path / "rows.jsonl", wrong))
    first, *lines = str(caught.value).splitlines()
    assert first == "500 rows cannot be used:"
    assert lines[-1] == "  and 492 for other reasons"
    assert len(lines) == 9


# -- columns -----------------------------------------------------------------------------------------------------------


def test_columns_get_our_names_and_the_others_keep_theirs(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", [{"question": "2+2=", "solution": "4", "level": 3}])
    columns = {"prompt": "question", "answer": "solution"}
    assert load_rows(path, columns=columns) == [Row(text="2+2=", columns={"level": 3, "answer": "4"})]
    assert load_rows(path, columns={**columns, "target": "solution"})[0].columns["target"] == "4"


def test_a_column_that_is_named_goes_before_one_that_has_our_name(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", [{"prompt": "raw", "question": "asked", "messages": [], "answer": "a"}])
    assert load_rows(path, columns={"prompt": "question"}) == [Row(text="asked", columns={"answer": "a"})]
    assert load_rows(path, columns={"prompt": "answer", "answer": "prompt"}) == [
        Row(text="a", columns={"question": "asked", "answer": "raw"})
    ]
    (row,) = load_rows(path, columns={"messages": "question"})
    assert row.messages == ({"role": "user", "content": "asked"},)
    path = write(tmp_path / "rows.jsonl", [{"prompt": "a", "completion": "b"}])
    assert load_rows(path, columns={"answer": "completion"}) == [Row(text="a", columns={"answer": "b"})]


def test_a_column_that_has_our_name_is_never_replaced_without_a_word(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", [{"q": "asked", "a": "b"}])
    with pytest.raises(RecipeError, match=r"`task.columns.a = 'q'` would replace a column `a` that the row has"):
        load_rows(path, columns={"prompt": "q", "a": "q"})
    assert load_rows(path, columns={"prompt": "q", "a": "q", "other_a": "a"})[0].columns == {
        "a": "asked",
        "other_a": "b",
    }


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "parquet"])
def test_a_map_of_columns_that_is_the_wrong_way_round_is_told_so(tmp_path: Path, suffix: str) -> None:
    path = write(tmp_path / f"rows.{suffix}", [{"question": "1", "solution": "2"}])
    with pytest.raises(RecipeError) as caught:
        load_rows(path, columns={"question": "prompt"})
    assert "there is no column `prompt`, but a column `question`: the map is written the wrong way round" in str(
        caught.value
    )
    assert '`task.columns = { prompt = "question" }`' in str(caught.value)
    assert load_rows(path, columns={"prompt": "question"})[0].text == "1"


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "parquet"])
def test_a_column_that_one_of_several_files_lacks_is_named_with_file_row_and_the_nearest(
    tmp_path: Path, suffix: str
) -> None:
    good = write(tmp_path / f"a.{suffix}", [{"question": "1", "solution": "2"}])
    bad = write(tmp_path / f"b.{suffix}", [{"question": "1", "Solutions": "2"}])
    place = rf"b\.{suffix}(:1)?: "
    with pytest.raises(RecipeError, match=place + r"`task.columns.answer = 'solution'`: .* nearest is `Solutions`"):
        load_rows([good, bad], columns={"prompt": "question", "answer": "solution"})
    bad = write(tmp_path / f"b.{suffix}", [{"QUESTION": "1"}])
    with pytest.raises(RecipeError, match=place + r"`task.columns.prompt = 'question'`: .* nearest is `QUESTION`"):
        load_rows([good, bad], columns={"prompt": "question"})
    with pytest.raises(RecipeError, match=r'this has `QUESTION`; name the one to ask with.*\{ prompt = "QUESTION" \}'):
        load_rows(bad)


# -- CSV ---------------------------------------------------------------------------------------------------------------


def test_a_csv_file_of_a_spreadsheet_is_read(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes(b'\xef\xbb\xbfprompt,answer\r\n"caf\xc3\xa9, or\r\ntea?",007\r\n\r\nnext,1e5\r\n')
    assert load_rows(path) == [
        Row(text="café, or\r\ntea?", columns={"answer": "007"}),
        Row(text="next", columns={"answer": "1e5"}),
    ]
    assert [row.where for row in load_rows(path)] == [f"{path}:2", f"{path}:5"], "the lines that they begin at"
    path.write_text("prompt\n" + "x" * 200_000 + "\n")
    assert len(load_rows(path)[0].text or "") == 200_000


def test_a_csv_file_may_begin_with_empty_lines(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("\n\nprompt,answer\na,1\n", encoding="utf-8")
    (row,) = load_rows(path)
    assert (row.text, row.columns, row.where) == ("a", {"answer": "1"}, f"{path}:4")
    path.write_text("\nquestion\na\n", encoding="utf-8")
    with pytest.raises(RecipeError, match=r"rows.csv:2: a row has a column `prompt`"):
        load_rows(path)


@pytest.mark.parametrize(
    ("data", "pattern"),
    [
        (b"What is 2+2?,4\nWhat is 3+3?,6\n", r"rows.csv:1: .*this has `4`, `What is 2\+2\?`.*the first line of the"),
        (b"prompt,answer\na,1\nb\nc,2,3\nd,4\n", r"2 rows cannot.*\n.*rows.csv:3: this line has 1 values.*2 columns"),
        (b"prompt,answer\na,1\nb,c,2\n", r"rows.csv:3: this line has 3 values, and the first line.*put quotes"),
        (
            b"prompt,answer\n" + b"a,1\n" * 20 + b"caf\xe9,1\nb,2\n",
            r"rows.csv:22: this line is not in UTF-8: .*0xe9.*iconv -f WINDOWS-1252 -t UTF-8",
        ),
        (b"prompt,answer,answer\na,1,2\n", r"rows.csv:1: .*`answer` is there twice"),
        (b"prompt;answer\na;1\n", r"rows.csv:1: the values of this file are separated by ';', not by ','"),
        (
            b'prompt,answer\n"a,1',
            r"rows.csv:2: this row cannot be read as CSV: .*; a quote that opens in it may not be",
        ),
        (
            b'prompt,answer\nx,1\n"a,1\nb,2\nc,3\n',
            r"rows.csv:3: this row, which goes on to line 5, cannot be read as CSV.*quote",
        ),
        (b'prompt,answer\nx,1\n"a,1\nb,2\nc,"3"\n', r"rows.csv:3: this row, which goes on to line 5,"),
    ],
)
def test_a_csv_file_that_is_none_is_refused(tmp_path: Path, data: bytes, pattern: str) -> None:
    (tmp_path / "rows.csv").write_bytes(data)
    with pytest.raises(RecipeError, match=pattern):
        load_rows(tmp_path / "rows.csv")


# -- chats -------------------------------------------------------------------------------------------------------------


def said(text: str) -> tuple[dict[str, str], ...]:
    return ({"role": "user", "content": text},)


def test_a_prompt_may_be_a_list_of_messages_and_messages_a_text(tmp_path: Path) -> None:
    records: list[dict[str, Any]] = [{"prompt": list(said("a"))}, {"messages": "b"}, {"messages": "[1, 2] is what?"}]
    assert [row.messages for row in load_rows(write(tmp_path / "rows.jsonl", records))] == [
        said("a"),
        said("b"),
        said("[1, 2] is what?"),
    ]
    write(tmp_path / "rows.csv", [{"messages": json.dumps(said("c"))}])
    assert load_rows(tmp_path / "rows.csv")[0].messages == said("c"), "JSON in a cell"


def test_parts_of_text_are_joined_and_other_parts_refused_by_their_type(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "2+2?"}]
    path = write(tmp_path / "rows.jsonl", [{"messages": [{"role": "user", "content": parts}]}])
    assert load_rows(path)[0].messages == said("What is 2+2?")
    shown = [*parts, {"type": "image_url", "image_url": {"url": "x.png"}}]
    write(path, [{"messages": [{"role": "user", "content": shown}]}])
    with pytest.raises(RecipeError, match=r"rows.jsonl:1: a part of type `image_url` of the `content`.* is no text"):
        load_rows(path)


def test_tool_calls_of_earlier_turns_are_kept(tmp_path: Path) -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    chat = [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "2", "name": "add"},
    ]
    (row,) = load_rows(write(tmp_path / "rows.jsonl", [{"messages": chat}]))
    assert row.messages is not None
    assert row.messages[1]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1}}
    assert row.messages[2]["name"] == "add"


# -- names of files ----------------------------------------------------------------------------------------------------


def test_a_path_that_is_something_else_says_what_was_perhaps_meant(tmp_path: Path) -> None:
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "dataset_info.json").touch()
    with pytest.raises(RecipeError, match=r"written by `save_to_disk`: name it with `task.dataset = \{ name = "):
        load_rows(tmp_path / "saved")
    with pytest.raises(RecipeError, match=r"is a folder; .*such as `.*/\*.parquet`"):
        load_rows(tmp_path)
    with pytest.raises(
        RecipeError, match=r'a data set of the hub is named with `task.dataset = \{ name = "openai/gsm8k"'
    ):
        load_rows("openai/gsm8k")
    write(tmp_path / "questions.jsonl")
    with pytest.raises(RecipeError, match=r"did you mean `.*questions.jsonl`\?"):
        load_rows(tmp_path / "question.jsonl")


def test_a_digest_is_of_the_contents_alone(tmp_path: Path) -> None:
    one, other = write(tmp_path / "a.jsonl"), write(tmp_path / "b.jsonl")
    assert file_digest(one) == file_digest(other)
    other.write_text(other.read_text() + " ")
    assert file_digest(one) != file_digest(other)
