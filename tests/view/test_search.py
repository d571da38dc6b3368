"""Search finds the trajectories that fit, and goes on where it stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from view_cases import record_run, record_tool_run

from stretto.errors import RunError
from stretto.view import search as module
from stretto.view.api import Api
from stretto.view.runs import RunSource


@pytest.fixture
def api(tmp_path: Path) -> Api:
    record_run(tmp_path)
    return Api([RunSource(tmp_path)])


def ids(api: Api, **parameters: Any) -> list[int]:
    return [row["trajectory"] for row in api.answer("trajectories", {k: str(v) for k, v in parameters.items()})["rows"]]


def test_numbers_and_ranges_are_filters(api: Api) -> None:
    assert ids(api) == list(range(23, -1, -1))
    assert sorted(ids(api, update=1)) == [6, 7, 8, 9, 10, 11]
    assert ids(api, update="1..2", reward=1, sort="oldest") == [7, 9, 11, 13, 15, 17]
    assert set(ids(api, length="6..")) == {id for id in range(24) if id % 3 == 2}
    assert set(ids(api, age="2")) <= {id for id in range(24) if (id // 3) % 3 == 2}
    assert ids(api, finish="length") == [4]
    assert ids(api, group="2", sort="oldest") == [6, 7, 8]
    assert ids(api, failed="1") == []


def test_the_order_is_by_choice(api: Api) -> None:
    rows = api.answer("trajectories", {"sort": "-length", "limit": "5"})["rows"]
    assert [row["length"] for row in rows] == sorted((row["length"] for row in rows), reverse=True)
    assert rows[0]["length"] == 6


def test_a_page_has_a_cursor_for_the_next(api: Api) -> None:
    first = api.answer("trajectories", {"limit": "10"})
    second = api.answer("trajectories", {"limit": "20", "cursor": str(first["cursor"])})
    assert [row["trajectory"] for row in first["rows"] + second["rows"]] == list(range(23, -1, -1))
    assert second["cursor"] is None


def test_text_is_found_in_prompts_and_completions(api: Api) -> None:
    assert ids(api, text="answer of 17") == [17]
    assert ids(api, text="3 + 3") == [11, 10, 9], "in the prompt"
    assert ids(api, text="<script>") == [4]
    assert ids(api, text="100%") == [], "a percent sign is no wildcard"


def test_a_search_that_runs_out_of_time_says_where_to_go_on(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TEXT_CHUNK", 5)
    monkeypatch.setattr(module, "TEXT_S", -1.0)
    assert api.answer("trajectories", {"text": "answer"})["cursor"] == 0
    monkeypatch.setattr(module, "TEXT_S", 10.0)
    found = api.answer("trajectories", {"text": "answer of 2", "limit": "2"})
    assert [row["trajectory"] for row in found["rows"]] == [23, 22]
    rest = api.answer("trajectories", {"text": "answer of 2", "limit": "9", "cursor": str(found["cursor"])})
    assert [row["trajectory"] for row in rest["rows"]] == [21, 20, 2]
    assert rest["cursor"] is None


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"reward": "high"}, "`reward` is `high`: give a number, or a range"),
        ({"sort": "beauty"}, "`sort` is `beauty`"),
        ({"state": "asleep"}, "`state` is `asleep`"),
        ({"limit": "0"}, "`limit` is 0"),
        ({"cursor": "x"}, "`cursor` is `x`: give a whole number"),
        ({"run": "3"}, "`run` is 3: there are runs 0 to 0"),
    ],
)
def test_a_question_that_makes_no_sense_is_refused(api: Api, parameters: dict[str, str], words: str) -> None:
    with pytest.raises(RunError, match=words):
        api.answer("trajectories", parameters)


def test_answers_of_an_evaluation_are_found_too(api: Api) -> None:
    found = api.answer("answers", {"evaluation": "1"})
    assert [(row["index"], row["greedy"], row["reward"]) for row in found["rows"]] == [
        (0, 0, 0.25),
        (0, 1, 1.0),
        (1, 0, None),
    ]
    assert found["rows"][2]["error"] == "the reward raised"
    assert len(api.answer("answers", {"evaluation": "1", "text": "greedy"})["rows"]) == 1
    assert len(api.answer("answers", {"evaluation": "1", "reward": "0.5.."})["rows"]) == 1


def test_trajectories_that_call_a_tool_are_found(tmp_path: Path, api: Api) -> None:
    record_tool_run(tmp_path / "tools")
    calling = Api([RunSource(tmp_path / "tools")])
    assert ids(calling, tool="calculator") == ids(calling, tool="*") == [7]
    assert ids(calling, tool="name") == ids(calling, tool="calc") == [], "the name of a tool, not a part of the text"
    assert ids(api, tool="*") == []
    assert ids(calling, tool="calculator", update=0) == []
