"""Tool calls in what a model wrote: three forms, and texts that are no call."""

from __future__ import annotations

import pytest

from stretto.chat.tool_calls import parse_tool_calls

F_AND_G: list[tuple[str, object]] = [("f", {}), ("g", {})]


def found(text: str) -> tuple[str, list[tuple[str, object, bool]]]:
    parsed = parse_tool_calls(text)
    return parsed.content, [(call.name, call.arguments, call.error is None) for call in parsed.calls]


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ('<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', "", [("f", {"a": 1})]),
        ('Hm.\n<tool_call>{"arguments": {}, "name": "f"}</tool_call>', "Hm.", [("f", {})]),
        ('<tool_call>{"name": "f"}</tool_call> and\n<tool_call>{"name": "g"}</tool_call>!', "and\n!", F_AND_G),
        ('<tool_call>{"name": "f", "arguments": {"code": "a\nb"}}</tool_call>', "", [("f", {"code": "a\nb"})]),
        ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", {"a": 1})]),
        ('<tool_call>{"function": {"name": "f", "arguments": {"a": 1}}}</tool_call>', "", [("f", {"a": 1})]),
        ('<tool_call>{"name": "f", "arguments": null}', "", [("f", {})]),  # stopped before the closing tag
        ('<tool_call>{"name": "f"}<tool_call>{"name": "g"}</tool_call>', "", F_AND_G),
        ('<|python_tag|>{"name": "f", "parameters": {"a": 1}}', "", [("f", {"a": 1})]),
        ('So: <|python_tag|>{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}', "So:", F_AND_G),
        ('{"name": "f", "parameters": {"a": 1}}', "", [("f", {"a": 1})]),
        (' [{"name": "f", "arguments": {}}, {"name": "g", "arguments": {}}]\n', "", F_AND_G),
        ('```json\n{"name": "f", "arguments": {}}\n```', "", [("f", {})]),
    ],
)  # fmt: skip
def test_calls_are_read_in_every_form(text: str, content: str, calls: list[tuple[str, object]]) -> None:
    assert found(text) == (content, [(*call, True) for call in calls])


@pytest.mark.parametrize(
    "text",
    ["", "Hello!", "{}", '{"name": "Ann"}', '{"name": 3, "arguments": {}}', '{"name": "f", "arguments": {}} it is',
     "[1, 2]", "[]", '{"name": "f", "arguments": {', "{" * 100_000, '{"name": "", "arguments": {}}', "```", "``````"],
)  # fmt: skip
def test_other_text_is_content(text: str) -> None:
    assert found(text) == (text, [])


@pytest.mark.parametrize(
    ("text", "name", "arguments"),
    [
        ('<tool_call>{"name": "f", "arguments": {"a": }}</tool_call>', "f", '{"name": "f", "arguments": {"a": }}'),
        ('<tool_call>{"name": "f", "arguments": [1]}</tool_call>', "f", "[1]"),
        ('<tool_call>{"name": "f", "arguments": "x y"}</tool_call>', "f", "x y"),
        ('<tool_call>{"name": "f", "arguments": "3"}</tool_call>', "f", "3"),
        ('<|python_tag|>{"name": "f", "parameters": {', "f", '{"name": "f", "parameters": {'),
    ],
)
def test_arguments_that_are_no_json_object_are_kept_as_text_with_an_error(text: str, name: str, arguments: str) -> None:
    assert found(text) == ("", [(name, arguments, False)])


@pytest.mark.parametrize(
    "body",
    ["f(1)", "", "{}", "[" * 100_000, '{"name": ' + "9" * 10_000 + "}", '{"name": 7}', '"f"', "</tool_call"],
)
def test_a_call_without_a_name_is_kept_in_the_content_too(body: str) -> None:
    for text in (f"<tool_call>{body}</tool_call>", f"<tool_call>{body}"):
        content, [(name, arguments, fine)] = found(text)
        assert (content, name, arguments, fine) == (text, "", body, False)
    assert found(f"<|python_tag|>{body}") == (f"<|python_tag|>{body}", [("", body, False)])


def test_a_text_of_nothing_but_tags_is_read_in_no_time() -> None:
    calls = parse_tool_calls("<tool_call>" * 20_000).calls
    assert len(calls) == 20_000
    assert all(call.error for call in calls)
