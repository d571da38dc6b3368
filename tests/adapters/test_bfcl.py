"""BFCL: its data as rows, rewards by its own checkers, and a whole run."""

from __future__ import annotations

import json
import shutil
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from run_cases import assert_verifies, run, small_recipe
from transformers import AutoTokenizer

from stretto.environments.adapters import bfcl
from stretto.environments.data import load_rows
from stretto.errors import RecipeError

pytest.importorskip("bfcl_eval")

SHOWS_TOOLS = (
    "{% if tools %}{% for tool in tools %}{{ tool['function'] | tojson }}\n{% endfor %}{% endif %}"
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def said(*calls: tuple[str, dict[str, Any]]) -> str:
    made = [json.dumps({"name": name, "arguments": arguments}) for name, arguments in calls]
    return "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in made)


def chosen(possible: Any) -> Any:
    """Returns one of the values that BFCL allows for a parameter."""
    if not isinstance(possible, list):
        return possible
    first = next((value for value in possible if value != ""), "")
    if isinstance(first, dict):
        return {name: chosen(values) for name, values in first.items()}
    return (
        [chosen([value]) if isinstance(value, dict) else value for value in first] if isinstance(first, list) else first
    )


def right(row: dict[str, Any]) -> str:
    """Returns calls that the data set itself calls right."""
    calls = [(name, values) for answer in row["answers"] for name, values in answer.items()]
    return said(
        *(
            (name, {key: made for key, possible in values.items() if (made := chosen(possible)) != ""})
            for name, values in calls
        )
    )


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, Any]]:
    return {row["id"]: row for row in bfcl.rows()}


def test_every_category_has_its_own_rows(found: dict[str, dict[str, Any]]) -> None:
    counts = Counter(row["category"] for row in found.values())
    assert all(row["id"].startswith(f"{row['category']}_") for row in found.values())
    assert set(counts) == set(bfcl.CATEGORIES)
    assert (counts["simple_python"], counts["multiple"], counts["parallel"], counts["irrelevance"]) == (
        400,
        200,
        200,
        240,
    )
    with pytest.raises(RecipeError, match="`simple_java` is no category"):
        list(bfcl.rows(["simple_java"]))


def test_the_answers_of_the_data_set_are_right_and_others_are_not(found: dict[str, dict[str, Any]]) -> None:
    checked = [row for row in found.values() if row["answers"]]
    rewards = [bfcl.reward("", right(row), **row) for row in checked]
    assert sum(rewards) / len(rewards) > 0.98  # a few rows of the data set contradict themselves
    assert sum(bfcl.reward("", "I do not know.", **row) for row in checked) == 0.0
    assert sum(bfcl.reward("", said(("no_such_function", {})), **row) for row in checked) == 0.0


def test_a_call_is_judged_by_its_name_and_its_arguments(found: dict[str, dict[str, Any]]) -> None:
    row = found["simple_python_0"]
    name = "calculate_triangle_area"
    assert bfcl.reward("", said((name, {"base": 10, "height": 5})), **row) == 1.0
    assert bfcl.reward("", "<think>\n{}\n</think>\n" + said((name, {"base": 10, "height": 5})), **row) == 1.0
    assert bfcl.reward("", said((name, {"base": 10, "height": 6})), **row) == 0.0
    assert bfcl.reward("", said((name, {"base": "10", "height": 5})), **row) == 0.0
    assert bfcl.reward("", said((name, {"base": 10})), **row) == 0.0
    assert bfcl.reward("", said((name, {"base": 10, "height": 5}), (name, {"base": 10, "height": 5})), **row) == 0.0
    assert bfcl.reward("", '<tool_call>\n{"name": "calculate_tri', **row) == 0.0
    dotted = found["multiple_0"]
    assert bfcl.reward("", right(dotted), **dotted) == 1.0
    both = found["parallel_0"]
    one, other = right(both).split("\n</tool_call>\n")
    assert bfcl.reward("", f"{other}\n{one}\n</tool_call>", **both) == 1.0
    assert bfcl.reward("", other, **both) == 0.0


@pytest.mark.parametrize("odd", [None, [], {}, [None], {"a": {"b": []}}, [[{}]], 10**30, "", True, 1.5])
def test_no_value_of_an_argument_breaks_a_reward(found: dict[str, dict[str, Any]], odd: Any) -> None:
    for row in [row for row in found.values() if row["answers"]][::25]:
        calls = [(name, dict.fromkeys(values, odd)) for answer in row["answers"] for name, values in answer.items()]
        assert bfcl.reward("", said(*calls), **row) in (0.0, 1.0)


def test_where_no_function_fits_a_call_is_wrong(found: dict[str, dict[str, Any]]) -> None:
    none, some = found["irrelevance_0"], found["live_relevance_0-0-0"]
    call = said((none["functions"][0]["name"], {"weight": 1.0}))
    assert bfcl.reward("", "There is no function for this.", **none) == 1.0
    assert bfcl.reward("", call, **none) == 0.0
    assert bfcl.reward("", "No.", **some) == 0.0
    assert bfcl.reward("", call, **some) == 1.0


def test_the_vendors_clients_that_bfcl_imports_are_not_needed() -> None:
    bfcl._checker()
    assert "bfcl_eval.constants.model_config" not in sys.modules
    assert "bfcl_eval.model_handler" not in sys.modules


def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bfcl_eval", None)
    with pytest.raises(RecipeError, match="pip install --no-deps bfcl-eval"):
        list(bfcl.rows())


def test_a_run_trains_on_function_calls_and_verifies(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bfcl.main(["--out", "bfcl", "--categories", "simple_python", "irrelevance"])
    assert "train.jsonl: 515 rows" in capsys.readouterr().out
    functions = [
        {tuple(sorted(function["name"] for function in row.columns["functions"])) for row in load_rows(Path(path))}
        for path in ("bfcl/train.jsonl", "bfcl/evaluation.jsonl")
    ]
    assert functions[1]
    assert functions[0].isdisjoint(functions[1])
    lines = Path("bfcl/train.jsonl").read_text().splitlines()
    Path("short.jsonl").write_text("\n".join(sorted(lines, key=len)[:8]))
    shutil.copytree(model, tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    tables = """
        [task]
        type = "file"
        path = "short.jsonl"
        reward = "stretto.environments.adapters.bfcl:reward"
        [rollout]
        prompts = 2
        group = 2
        max_tokens = 16
        [training]
        steps = 2
        [evaluation]
        prompts = 0
    """
    made = small_recipe(tmp_path / "model", tmp_path, tables)
    with pytest.raises(RecipeError, match="does not show tools"):
        run(made, tmp_path / "refused")
    tokenizer.chat_template = SHOWS_TOOLS
    tokenizer.save_pretrained(tmp_path / "model")
    summary = run(made, tmp_path / "run")
    assert summary["trained_trajectories"] == 8
    assert_verifies(tmp_path / "run")
