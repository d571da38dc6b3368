"""Demonstrations: what is read from a file, and what is refused with its line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stretto.chat.templates import with_template
from stretto.environments.demonstrations import batches_of, load_demonstrations
from stretto.errors import RecipeError
from stretto.models.stop_tokens import end_of_turn
from stretto.models.tiny import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
END = TOKENIZER.eos_token_id


def write(folder: Path, *records: Any) -> Path:
    path = folder / "demos.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def load(path: Path, **options: Any) -> list[tuple[str, str]]:
    """Returns the texts of the demonstrations."""
    found = load_demonstrations(path, TOKENIZER, **{"context": 200, "end": END, **options})
    decode = TOKENIZER.decode
    return [(decode(each.prompt), decode(each.completion)) for each in found]


def test_a_prompt_and_its_completion_are_read_with_the_end_of_a_text(tmp_path: Path) -> None:
    eos = TOKENIZER.eos_token
    assert load(write(tmp_path, {"prompt": "1+1=", "completion": "2", "id": 3})) == [("1+1=", f"2{eos}")]
    assert load(write(tmp_path, {"prompt": "1+1=", "completion": f"2{eos}"}), end=None)[0][0] == "1+1="


def test_the_last_message_of_the_assistant_is_the_completion(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "1+1"}]
    said = {"messages": [*chat, {"role": "assistant", "content": "2"}]}
    ((prompt, completion),) = load(write(tmp_path, said))
    assert prompt == TOKENIZER.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert completion == f"2{TOKENIZER.eos_token}"
    assert load(write(tmp_path, {"messages": chat, "completion": "2"})) == [(prompt, completion)]


def test_the_prefill_is_part_of_the_prompt_and_not_of_the_completion(tmp_path: Path) -> None:
    tokenizer, eos = with_template(TOKENIZER, prefill="<think>"), TOKENIZER.eos_token
    chat = [{"role": "user", "content": "1+1"}]
    path = write(
        tmp_path,
        {"messages": [*chat, {"role": "assistant", "content": "<think>easy</think>2"}]},
        {"messages": chat, "completion": "easy</think>2"},
        {"prompt": "1+1=", "completion": "<think>2"},
    )
    found = load_demonstrations(path, tokenizer, context=200, end=END)
    decode = TOKENIZER.decode
    assert [decode(each.completion) for each in found] == [f"easy</think>2{eos}"] * 2 + [f"<think>2{eos}"]
    assert decode(found[0].prompt).endswith("<think>")
    assert decode(found[2].prompt) == "1+1="


def test_a_demonstration_gets_the_system_message_of_the_task(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        {"prompt": "1+1", "completion": "2"},
        {"messages": [{"role": "system", "content": "own"}, {"role": "user", "content": "1+1"}], "completion": "2"},
    )
    (with_task, with_own) = (prompt for prompt, _ in load(path, system="brief"))
    chat = [{"role": "system", "content": "brief"}, {"role": "user", "content": "1+1"}]
    assert with_task == TOKENIZER.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert "own" in with_own
    assert "brief" not in with_own


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        ({"prompt": "1+1"}, r":2: a demonstration has a column `completion`, or `messages` that end with"),
        ({"messages": [{"role": "user", "content": "1"}]}, r"its last message has the role 'user'"),
        ({"prompt": "1+1", "completion": " \n"}, r":2: the completion is empty"),
        ({"prompt": "1+1", "completion": 2}, r":2: the completion of a demonstration is text, this is int"),
        ({"prompt": "1+1", "completion": "2" * 300}, r":2: the demonstration has 304 tokens \(3 of its prompt\)"),
        ({"prompt": "x" * 300, "completion": "2"}, r":2"),
        ({"prompt": "", "completion": "2"}, r":2"),
        ({"completion": "2"}, r":2: this row lacks the column `prompt` or `messages` that other rows have"),
        ([1], r":2: a row is an object with named columns, this is list"),
        (
            {"messages": [{"role": "wizard", "content": "1"}, {"role": "assistant", "content": "2"}]},
            r":2.*wizard",
        ),
        (
            {"messages": [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}], "completion": "2"},
            r":2: .* and this has both",
        ),
    ],
)
def test_a_demonstration_that_cannot_be_used_is_refused_with_its_line(
    record: Any, problem: str, tmp_path: Path
) -> None:
    with pytest.raises(RecipeError, match=problem):
        load(write(tmp_path, {"prompt": "1+1=", "completion": "2"}, record))


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"`model\.warm_start\.path` names files that end in `\.jsonl`, "):
        load(tmp_path / "nowhere.jsonl")
    with pytest.raises(RecipeError, match="has no rows"):
        load(write(tmp_path))


def test_every_row_comes_once_in_every_epoch() -> None:
    steps = list(batches_of(6, 4, 3, seed=1))
    flat = [row for step in steps for row in step]
    assert sorted(flat[:6]) == sorted(flat[6:]) == list(range(6))
    assert steps == list(batches_of(6, 4, 3, seed=1))
    assert steps != list(batches_of(6, 4, 3, seed=2))


class Chatty:
    """A tokenizer whose chat ends with another token than a text."""

    chat_template = "..."
    eos_token_id = 1

    def apply_chat_template(self, chat: Any, tokenize: bool) -> str:
        return "".join(f"<{each['content']}#" for each in chat)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [ord(character) for character in text]


def test_the_end_of_a_turn_is_that_of_the_chat_template() -> None:
    assert end_of_turn(Chatty(), (1, ord("#"))) == ord("#")
    assert end_of_turn(Chatty(), (1,)) == 1
    assert end_of_turn(TOKENIZER, (END,)) == END
