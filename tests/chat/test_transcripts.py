"""A recorded lineage is turns, the tools that they call, and what came back."""

from __future__ import annotations

from stretto.chat.transcripts import divide, find_calls

WORDS = [
    "think ", '<tool_call>{"name": "a", "arguments": {}}</tool_call>', '<tool_call>{"name": "b"', "</tool_call>",
    "<|im_end|>", "<tool_response>1</tool_response><tool_response>2</tool_response>", "done", " <|im_end|>",
]  # fmt: skip


def test_turns_calls_and_results_are_told_apart() -> None:
    parts = divide(range(8), [[0, 5], [6, 7]], [0, 3], lambda tokens: "".join(WORDS[token] for token in tokens))
    assert [(part.turn, part.start, part.end) for part in parts] == [(0, 0, 5), (None, 5, 6), (3, 6, 7), (None, 7, 8)]
    first, second = parts[0].calls
    assert (first.call.name, first.call.error, first.result) == ("a", None, "1")
    assert parts[0].text[first.start : first.end] == WORDS[1]
    assert second.call.name == "b"
    assert second.call.error is not None
    assert parts[0].text[second.start : second.end] == WORDS[2] + WORDS[3]
    assert second.result == "2"
    assert parts[2].calls == ()


def test_an_observation_without_tags_is_the_result_of_every_call() -> None:
    words = ['{"name": "add", "arguments": {"a": 1}}', " it is 2 "]
    (part, _) = divide([0, 1], [[0, 1]], [0], lambda tokens: "".join(words[token] for token in tokens))
    (call,) = part.calls
    assert (call.start, call.end, call.result) == (0, len(words[0]), "it is 2")


def test_a_call_behind_the_tag_of_llama_reaches_to_the_end_of_its_turn() -> None:
    text = 'well <|python_tag|>{"name": "a", "parameters": {}}; {"name": "b", "parameters": {}}<|eom_id|>'
    calls = find_calls(text)
    assert [call.call.name for call in calls] == ["a", "b"]
    assert {text[call.start : call.end] for call in calls} == {text[5:-10]}
