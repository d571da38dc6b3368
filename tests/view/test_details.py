"""One trajectory, token by token, and the group that it belongs to."""

from __future__ import annotations

from pathlib import Path

import pytest
from view_cases import HOSTILE, record_run, record_tool_run

from stretto.errors import RunError
from stretto.view.api import Api
from stretto.view.runs import RunSource


@pytest.fixture
def api(tmp_path: Path) -> Api:
    record_run(tmp_path)
    return Api([RunSource(tmp_path)])


def test_a_trajectory_has_its_turns_its_values_and_its_life(api: Api) -> None:
    found = api.answer("trajectory", {"id": "4"})
    (lineage,) = found["lineages"]
    assert lineage["turns"] == [0, 0, -1, -1, 1, 1], "what the environment said has no turn"
    assert lineage["logprobs"] == [-0.5, -1.0, 0.0, 0.0, -2.0, -0.25]
    assert lineage["values"]["ratios"] == [1.0, 2.0, None, None, 3.0, 4.0], "only sampled tokens are trained on"
    assert lineage["values"]["gradients"][0] == 0.0
    assert lineage["text"] == HOSTILE
    assert lineage["pieces"] is None
    assert found["has_pieces"] is False
    assert [step["to"] for step in found["transitions"]] == ["running", "scoring", "scored", "training", "trained"]
    assert (found["update"], found["state"], found["num_prompt_tokens"]) == (0, "trained", 3)


def test_a_trajectory_whose_values_are_not_recorded_has_none(api: Api) -> None:
    assert api.answer("trajectory", {"id": "5"})["lineages"][0]["values"] is None


def test_a_group_has_its_members_side_by_side(api: Api) -> None:
    found = api.answer("group", {"id": "1"})
    assert [member["trajectory"] for member in found["members"]] == [3, 4, 5]
    assert found["members"][1]["texts"] == [HOSTILE]
    assert found["prompt"] == "1 + 1 ="


def test_an_answer_has_its_tokens_or_its_error(api: Api) -> None:
    found = api.answer("answer", {"evaluation": "1", "index": "0", "greedy": "1"})
    assert (found["greedy"], found["reward"], found["lineages"][0]["text"]) == (True, 1.0, "greedy words")
    failed = api.answer("answer", {"evaluation": "2", "index": "1"})
    assert (failed["lineages"], failed["error"], failed["version"]) == ([], "the reward raised", 4)


def test_what_is_not_there_is_named(api: Api) -> None:
    for name, parameters in (("trajectory", {"id": "99"}), ("group", {"id": "99"})):
        with pytest.raises(RunError, match=f"there is no {name} 99"):
            api.answer(name, parameters)
    with pytest.raises(RunError, match="no answer to prompt 7"):
        api.answer("answer", {"evaluation": "1", "index": "7"})


def test_tool_calls_have_their_tokens_and_what_came_back(tmp_path: Path) -> None:
    record_tool_run(tmp_path)
    (lineage,) = Api([RunSource(tmp_path)]).answer("trajectory", {"id": "7"})["lineages"]
    assert lineage["calls"] == [
        {"name": "calculator", "arguments": '{"expression": "1 + 1"}', "error": None, "turn": 0, "start": 1, "end": 5,
         "result": "2"}
    ]  # fmt: skip
    assert "".join(lineage["pieces"][1:5]).startswith("<tool_call>")


def test_tool_calls_are_read_from_the_text_if_no_tokenizer_is_here(tmp_path: Path) -> None:
    record_tool_run(tmp_path)
    (tmp_path / "policy" / "tokenizer.json").unlink()
    (lineage,) = Api([RunSource(tmp_path)]).answer("trajectory", {"id": "7"})["lineages"]
    assert [(call["name"], call["start"], call["result"]) for call in lineage["calls"]] == [("calculator", None, None)]
