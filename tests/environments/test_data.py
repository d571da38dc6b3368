"""Prompts: the order they come in, the files they come from, and the rows that are refused."""

import builtins
import errno
import json
import logging
import time
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.environments import data
from stretto.environments.data import PromptStream, Row, load_rows, split_held_out
from stretto.environments.prompt_order import PassRates
from stretto.errors import RecipeError
from stretto.models.tiny import tiny_tokenizer

TOKENIZER = tiny_tokenizer()


def stream(rows, seed=0, limit=100, **options):
    return PromptStream(rows, TOKENIZER, seed=seed, max_prompt_tokens=limit, **options)


def numbered(num):
    return [Row(text=f"row {i}", columns={"number": i}) for i in range(num)]


def write_jsonl(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_every_epoch_has_every_row_once_in_an_order_of_its_own():
    it = stream(numbered(50))
    epochs = [[it.prompt(i).row["number"] for i in range(e * 50, e * 50 + 50)] for e in range(3)]
    assert all(sorted(epoch) == list(range(50)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert [it.epoch(i) for i in (0, 49, 50, 149)] == [0, 0, 1, 2]


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 30), st.integers(0, 2**62), st.lists(st.integers(0, 500), max_size=20))
def test_a_prompt_depends_on_its_position_alone(num_rows, seed, positions):
    there, back = stream(numbered(num_rows), seed), stream(numbered(num_rows), seed)
    first = {i: there.prompt(i) for i in positions}
    assert {i: back.prompt(i) for i in reversed(positions)} == first


def test_another_seed_gives_another_order():
    one, other = stream(numbered(50), seed=1), stream(numbered(50), seed=2)
    assert [one.row_number(i) for i in range(50)] != [other.row_number(i) for i in range(50)]


def test_without_shuffling_rows_keep_their_order():
    it = stream(numbered(5), shuffle=False)
    assert [it.prompt(i).text for i in (0, 4, 5)] == ["row 0", "row 4", "row 0"]


def test_a_text_is_tokenized_as_it_is():
    prompt = stream([Row(text="4+3*17?", columns={"answer": 5})]).prompt(3)
    assert prompt.index == 3
    assert TOKENIZER.decode(prompt.tokens) == prompt.text == "4+3*17?"
    assert prompt.row == {"answer": 5}


def test_messages_go_through_the_chat_template_with_room_for_the_answer():
    prompt = stream([Row(messages=({"role": "user", "content": "hi"},))]).prompt(0)
    assert prompt.text == "user: hi\nassistant: "
    assert TOKENIZER.decode(prompt.tokens) == prompt.text


TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}


def test_tools_of_a_row_are_shown_by_the_chat_template_and_refused_if_it_does_not(tmp_path):
    records = [{"messages": [{"role": "user", "content": "hi"}], "tools": given} for given in ([TOOL], None, [])]
    rows = load_rows(write_jsonl(tmp_path / "rows.jsonl", records))
    shows = tiny_tokenizer()
    shows.chat_template = "{% for tool in tools or () %}{{ tool.function.name }}{% endfor %}|{{ messages[0].content }}"
    it = PromptStream(rows, shows, seed=0, max_prompt_tokens=100, shuffle=False)
    assert [it.prompt(number).text for number in range(3)] == ["add|hi", "|hi", "|hi"]
    assert it.prompt(0).row["tools"] == [TOOL]
    with pytest.raises(RecipeError, match=r"rows.jsonl:1: it has `tools`, but the chat template"):
        stream(rows)


def test_tools_of_a_parquet_file_may_be_json(tmp_path):
    records = [{"messages": [{"role": "user", "content": "hi"}], "tools": json.dumps([TOOL])}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "rows.parquet")
    (row,) = load_rows(tmp_path / "rows.parquet")
    assert row.tools == (TOOL,)
    assert row.columns == {"tools": [TOOL]}


def test_without_a_chat_template_the_text_is_used_or_the_row_refused():
    bare = tiny_tokenizer()
    bare.chat_template = None
    messages = ({"role": "user", "content": "hi"},)
    it = PromptStream([Row(text="plain", messages=messages)], bare, seed=0, max_prompt_tokens=10)
    assert it.prompt(0).text == "plain"
    with pytest.raises(RecipeError, match=r"row 1 of the data set: it has `messages`.*no chat template"):
        PromptStream([Row(messages=messages)], bare, seed=0, max_prompt_tokens=10)


def test_half_of_a_character_is_refused_by_its_row():
    rows = [Row(text="fine"), Row(text="\ud83d hi", where="row 2 of `data`")]
    with pytest.raises(RecipeError, match=r"^row 2 of `data`: `\\ud83d` is half of a character"):
        stream(rows)


def test_a_prompt_that_is_too_long_is_refused_at_the_start():
    rows = [*numbered(7), Row(text="x" * 30)]
    with pytest.raises(
        RecipeError, match=r"row 8 of `f.jsonl`: its prompt has 30 tokens, more than the 20 .*max_tokens"
    ):
        stream(rows, limit=20, name="`f.jsonl`")


def long_rows(num, lengths):
    """Rows of three characters, but for some."""
    return [Row(text="x" * lengths.get(number, 3), columns={"number": number}) for number in range(num)]


def test_all_prompts_that_are_too_long_are_reported_at_once():
    rows = long_rows(40, {3: 30, 7: 50, **dict.fromkeys(range(20, 30), 25)})
    with pytest.raises(RecipeError) as caught:
        stream(rows, limit=20, choices=("drop", "truncate"), shuffle=False)
    said = str(caught.value)
    assert said.startswith("12 prompts have more tokens than the 20 that the context")
    assert "row 4 of the data set (30 tokens), row 8 of the data set (50 tokens)" in said
    assert "and 7 more; the longest has 50" in said
    assert 'or set `task.too_long = "drop"` or `task.too_long = "truncate"`' in said


def test_dropped_rows_are_never_drawn_and_the_others_keep_their_numbers():
    lengths = {3: 30, 7: 50}
    it = stream(long_rows(10, lengths), limit=20, too_long="drop")
    assert (it.num_rows, it.num_dropped, it.num_checked, it.longest_checked) == (8, 2, 10, 3)
    for epoch in range(3):
        numbers = [it.draw(index).row_number for index in range(8 * epoch, 8 * epoch + 8)]
        assert sorted(numbers) == [0, 1, 2, 4, 5, 6, 8, 9]
        assert [it.prompt(index).row["number"] for index in range(8 * epoch, 8 * epoch + 8)] == numbers
    assert it.epoch(8) == 1
    again = stream(long_rows(10, lengths), limit=20, too_long="drop")
    assert [again.row_number(index) for index in range(40)] == [it.row_number(index) for index in range(40)]
    in_order = stream(long_rows(10, lengths), limit=20, too_long="drop", shuffle=False)
    assert [in_order.row_number(index) for index in range(4)] == [0, 1, 2, 4]
    untouched = stream(long_rows(10, {}), limit=20, too_long="drop")
    assert [untouched.row_number(i) for i in range(30)] == [stream(long_rows(10, {})).row_number(i) for i in range(30)]
    with pytest.raises(RecipeError, match=r"all 2 prompts of the data set are too long: row 1 .*the longest has 40"):
        stream(long_rows(2, {0: 30, 1: 40}), limit=20, too_long="drop")


def test_dropped_rows_are_not_drawn_by_their_pass_rates_either():
    rates = PassRates(6, seed=1)
    it = stream(long_rows(6, {0: 30, 5: 30}), limit=20, too_long="drop", pass_rates=rates)
    drawn = {it.draw(index).row_number for index in range(200)}
    assert drawn == {1, 2, 3, 4}


def test_rows_are_dropped_wherever_they_are_in_a_large_data_set(monkeypatch):
    monkeypatch.setattr(data, "CHECKED_ROWS", 10)
    monkeypatch.setattr(data, "CHECK_S", 0.0)
    it = stream(long_rows(2_000, {1_990: 30}), limit=20, too_long="drop")
    assert it.num_rows == 1_999


def test_a_prompt_that_is_cut_keeps_its_end():
    rows = [Row(text="0123456789" * 3), Row(messages=({"role": "user", "content": "abc" * 10},))]
    it = stream(rows, limit=12, too_long="truncate", shuffle=False)
    assert it.prompt(0).text == TOKENIZER.decode(it.prompt(0).tokens) == "890123456789"
    assert it.prompt(1).text == "\nassistant: "
    assert (it.longest_checked, it.too_long.num, it.num_dropped) == (12, 2, 0)


def test_rows_that_the_template_refuses_are_all_named_with_what_it_says():
    template = "{% if 'bad' in messages[0].content %}{{ raise_exception('no bad words') }}{% endif %}ok"
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    rows = [
        Row(messages=({"role": "user", "content": text},), where=f"rows.jsonl:{line}")
        for line, text in enumerate(["fine", "bad", "fine", "bad too"], start=1)
    ]
    with pytest.raises(RecipeError) as caught:
        PromptStream(rows, tokenizer, seed=0, max_prompt_tokens=20, shuffle=False)
    assert str(caught.value).splitlines() == [
        "2 rows cannot be used:",
        "  rows.jsonl:2, rows.jsonl:4: the chat template refused it: no bad words",
    ]


class Generated:
    """Rows made when they are asked for; from `first_long` on they are too long."""

    def __init__(self, num_rows, first_long, row_s=0.0):
        self.num_rows, self.first_long, self.row_s = num_rows, first_long, row_s

    def __len__(self):
        return self.num_rows

    def __getitem__(self, index):
        time.sleep(self.row_s)
        return Row(text="x" * (30 if index >= self.first_long else 3))


def test_every_prompt_of_a_generated_set_is_checked_at_the_start():
    with pytest.raises(RecipeError, match=r"100 prompts have more tokens than the 20 .*row 701 of .* \(30 tokens\)"):
        stream(Generated(800, 700), limit=20, shuffle=False)
    it = stream(Generated(800, 800), limit=20)
    assert it.num_checked == it.num_rows == 800


def test_a_set_that_is_slow_to_make_is_checked_for_a_while_in_the_order_of_the_draw(monkeypatch):
    monkeypatch.setattr(data, "CHECK_S", 0.2)
    it = stream(Generated(2_000, 1_900, row_s=0.001), limit=20, shuffle=False)
    assert 16 <= it.num_checked < 1_000
    assert len(it.prompt(1_950).tokens) == 30, "what comes later is refused by the engine, as data"


@pytest.mark.parametrize(("rows", "pattern"), [([], "has no rows"), ([Row(text="")], "row 1 .* its prompt is empty")])
def test_nothing_to_ask_is_refused(rows, pattern):
    with pytest.raises(RecipeError, match=pattern):
        stream(rows)


def test_held_out_rows_are_not_trained_on():
    rows = numbered(40)
    train, held = split_held_out(rows, 10, seed=3)
    assert len(held) == 10
    assert sorted(row.columns["number"] for row in train + held) == list(range(40))
    assert split_held_out(rows, 10, seed=3) == (train, held)
    assert split_held_out(rows, 10, seed=4) != (train, held)
    with pytest.raises(RecipeError, match="40 of 40 rows cannot be held out"):
        split_held_out(rows, 40, seed=0)


RECORDS = [
    {"prompt": "one?", "answer": "1", "level": 3},
    {"prompt": "zwölf?", "answer": "12", "level": 4},
]


def test_jsonl_columns_go_to_the_row(tmp_path):
    path = write_jsonl(tmp_path / "rows.jsonl", RECORDS)
    path.write_text(path.read_text() + "\n\n")
    assert load_rows(path) == [
        Row(text="one?", columns={"answer": "1", "level": 3}),
        Row(text="zwölf?", columns={"answer": "12", "level": 4}),
    ]


def test_parquet_gives_the_same_rows_as_jsonl(tmp_path):
    records = [*RECORDS]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "rows.parquet")
    assert load_rows(tmp_path / "rows.parquet") == load_rows(write_jsonl(tmp_path / "rows.jsonl", records))


def test_parquet_messages_are_read(tmp_path):
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"messages": messages}]), tmp_path / "rows.parquet")
    assert load_rows(tmp_path / "rows.parquet") == [Row(messages=tuple(messages))]


def test_parquet_without_pyarrow_names_the_extra(tmp_path, monkeypatch):
    (tmp_path / "rows.parquet").touch()
    real = builtins.__import__

    def without(name, *rest, **named):
        if name.startswith("pyarrow"):
            raise ImportError(name)
        return real(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(RecipeError, match=r"pip install 'stretto\[parquet\]'"):
        load_rows(tmp_path / "rows.parquet")


@pytest.mark.parametrize(
    ("line", "pattern"),
    [
        ("{not json", r"rows.jsonl:2: this line is not JSON: [^:]*, at column 2$"),
        ('   {"prompt": }', r"rows.jsonl:2: this line is not JSON: [^:]*, at column 15$"),
        ("[1, 2]", r"rows.jsonl:2: a row is an object with named columns, this is list"),
        ('{"question": "?"}', r"rows.jsonl:2: this row lacks the column `prompt` or `messages` that other"),
        ('{"prompt": "?", "messages": []}', r"rows.jsonl:2: .* this has both; remove one of them"),
        ('{"prompt": null, "answer": 1}', r"rows.jsonl:2: `prompt` is null"),
        ('{"prompt": "\\ud800 hi"}', r"rows.jsonl:2: `\\ud800` is half of a character"),
        ("[" * 100_000 + "]" * 100_000, r"rows.jsonl:2: this line is not JSON"),
        ('{"prompt": 3}', r"rows.jsonl:2: `prompt` is a string, or a list of messages, this is int"),
        ('{"prompt": "?", "completion": "!"}', r"rows.jsonl:2: the name `completion`"),
        ('{"messages": []}', r"rows.jsonl:2: `messages` is a list"),
        ('{"messages": [{"role": "user"}]}', r"rows.jsonl:2: a message has a `role` and a `content`"),
        ('{"messages": [{"role": "user", "content": "x"}], "tools": "add"}', r"rows.jsonl:2: `tools` is a list"),
        ('{"messages": [{"role": "user", "content": "x"}], "tools": [3]}', r"rows.jsonl:2: .*one of them is 3"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', r"rows.jsonl:2: the last of `messages`"),
    ],
)
def test_a_bad_line_is_named_by_file_and_number(tmp_path, line, pattern):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "fine"}\n' + line + "\n")
    with pytest.raises(RecipeError, match=pattern):
        load_rows(path)


def test_a_file_that_an_editor_of_windows_wrote_is_read(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "caf\xc3\xa9"}\r\n{"prompt": "\\ud83c\\udf89"}\r\n')
    assert [row.text for row in load_rows(path)] == ["café", "\N{PARTY POPPER}"]


def test_a_row_of_a_file_is_called_by_its_line_whatever_was_held_out(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f'{{"prompt": "{"x" * (30 if line == 8 else 3)}"}}\n' for line in range(1, 11)))
    rows = load_rows(path)
    train = [row for number, row in enumerate(rows, start=1) if number not in (2, 5)]
    with pytest.raises(RecipeError, match=r"rows.jsonl:8: its prompt has 30 tokens"):
        stream(train, limit=20)


def test_a_file_that_is_none_is_refused(tmp_path):
    with pytest.raises(RecipeError, match="is not a file"):
        load_rows(tmp_path / "rows.jsonl")
    (tmp_path / "folder.jsonl").mkdir()
    with pytest.raises(RecipeError, match=r"folder.jsonl` is a folder; `task.path` names"):
        load_rows(tmp_path / "folder.jsonl")
    with pytest.raises(RecipeError, match=r"is not a file; `task.evaluation_path` names"):
        load_rows(tmp_path / "rows.jsonl", "task.evaluation_path")
    (tmp_path / "rows.txt").touch()
    with pytest.raises(RecipeError, match=r"ends in `\.txt`; `task.path` names files that end in `.jsonl`, `.json`"):
        load_rows(tmp_path / "rows.txt")
    (tmp_path / "rows.parquet").write_text("no")
    with pytest.raises(RecipeError, match="cannot be read as Parquet"):
        load_rows(tmp_path / "rows.parquet")


@pytest.mark.parametrize("method", ["open", "is_file"])  # the file itself, or a folder above it that is closed
def test_a_file_that_may_not_be_read_is_named(tmp_path, monkeypatch, method):
    def refused(*_, **__):
        raise PermissionError(errno.EACCES, "Permission denied")

    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "fine"}\n')
    monkeypatch.setattr(Path, method, refused)
    with pytest.raises(RecipeError, match=r"rows.jsonl` cannot be read: Permission denied; `task.path` names"):
        load_rows(path)


def test_a_long_prompt_is_refused_in_our_words_alone(caplog):
    tokenizer = tiny_tokenizer()
    tokenizer.model_max_length = 4
    logging.getLogger("transformers").addHandler(caplog.handler)
    try:
        with pytest.raises(RecipeError, match="its prompt has 100 tokens"):
            PromptStream([Row(text="x" * 100)], tokenizer, seed=0, max_prompt_tokens=8)
        PromptStream([Row(text="x" * 100)], tokenizer, seed=0, max_prompt_tokens=8, too_long="truncate").prompt(0)
    finally:
        logging.getLogger("transformers").removeHandler(caplog.handler)
    assert "indexing errors" not in caplog.text
