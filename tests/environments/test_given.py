"""What is given from Python: names that other processes can import, digests, and what a resumed run needs again."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

import pytest

from stretto.environments.given import Given, importable_name, rows_digest, source_digest
from stretto.environments.task_options import FileOptions
from stretto.environments.tasks import load_task
from stretto.errors import RecipeError, RunError

ROWS = [{"prompt": "2+2=", "answer": "4"}, {"prompt": "3+3=", "answer": "6"}]


def test_only_what_a_new_process_finds_by_its_name_is_importable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def local() -> None: ...

    (tmp_path / "own_module.py").write_text("class Game:\n    def play(self): ...\n\ndef reward(p, c): return 1\n")
    with monkeypatch.context() as patched:
        patched.syspath_prepend(str(tmp_path))
        import own_module  # type: ignore[import-not-found]

        assert importable_name(own_module.reward) == "own_module:reward"
        assert importable_name(own_module.Game) == "own_module:Game"
        assert importable_name(own_module.Game.play) == "own_module:Game.play"
        assert importable_name(own_module.Game()) is None
        assert importable_name(own_module.Game().play) is None
        kept, own_module.reward = own_module.reward, local
        assert importable_name(kept) is None, "its module has another by this name"
        own_module.reward = kept
    assert importable_name(kept) is None, "its folder is not on the path any more"
    assert importable_name(local) is None
    assert importable_name(functools.partial(local)) is None
    assert importable_name(lambda: None) is None
    monkeypatch.setattr(local, "__module__", "__main__")
    assert importable_name(local) is None


def test_a_digest_is_of_the_source_and_of_all_rows_in_their_order() -> None:
    def first() -> int:
        return 1

    def second() -> int:
        return 2

    class Callable:
        def __call__(self) -> int:
            return 1

    assert source_digest(first) == source_digest(first) != source_digest(second)
    assert source_digest(functools.partial(first)) == source_digest(first)
    assert source_digest(Callable()) == source_digest(Callable)
    assert source_digest(math.sqrt) is None
    exec(compile("def made(): return 1", "<made>", "exec"), made := {})
    assert source_digest(made["made"]) is None
    assert Given.of(reward=made["made"], data=ROWS).names["reward"] == "python:made"
    assert rows_digest(ROWS) == rows_digest([dict(reversed(row.items())) for row in ROWS])
    assert rows_digest(ROWS) != rows_digest(ROWS[::-1])
    assert rows_digest([{"prompt": "a", "at": Path("x")}]) == rows_digest([{"prompt": "a", "at": Path("x")}])


def test_rows_may_come_from_a_data_frame() -> None:
    class Frame:
        columns = ("prompt",)

        def to_dict(self, how: str) -> list[dict[str, Any]]:
            assert how == "records"
            return [{"prompt": "2+2="}]

    given = Given.of(reward=lambda prompt, completion: 1.0, data=Frame())  # type: ignore[arg-type]
    assert given.rows == [{"prompt": "2+2="}]


def test_rows_may_come_from_pandas_and_a_missing_value_is_none() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"prompt": ["a", "b"], "answer": ["1", None], "level": [3.0, float("nan")]})
    assert Given.of(data=frame).rows == [
        {"prompt": "a", "answer": "1", "level": 3.0},
        {"prompt": "b", "answer": None, "level": None},
    ]


def test_rows_may_come_from_a_data_set_and_its_splits_are_refused_by_name() -> None:
    datasets = pytest.importorskip("datasets")
    records = [{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": "2"}]
    split = datasets.Dataset.from_list(records)
    assert Given.of(data=split).rows == Given.of(data=split.to_iterable_dataset()).rows == records
    assert Given.of(data=split).names == Given.of(data=records).names
    with pytest.raises(
        RecipeError, match=r"`data` is a DatasetDict; choose one of its splits, such as `data\['test'\]`"
    ):
        Given.of(data=datasets.DatasetDict({"test": split}))


def test_rows_may_come_from_a_generator_and_have_columns_of_their_own() -> None:
    given = Given.of(data=({"question": f"{number}?", "solution": number} for number in range(3)), reward=math.sqrt)
    table = {"columns": {"prompt": "question", "answer": "solution"}, "dataset": {"name": "of/the-recipe"}}
    task = load_task(FileOptions.model_validate(given.in_task({"type": "file", **table})), given=given)
    assert [row.text for row in task.train] == ["0?", "1?", "2?"]
    assert task.train[2].columns == {"answer": 2}
    bad = Given.of(data=[{"question": "a"}, {"query": "b"}], reward=math.sqrt)
    with pytest.raises(
        RecipeError, match=r"row 2 of `data`: `task.columns.prompt = 'question'`: .*the columns are `query`"
    ):
        load_task(FileOptions.model_validate(bad.in_task({"columns": {"prompt": "question"}})), given=bad)


def test_a_task_that_makes_its_rows_becomes_one_of_rows_and_keeps_what_both_have() -> None:
    given = Given.of(reward=lambda prompt, completion: 1.0, data=ROWS, evaluation_data=ROWS[:1])
    made = given.in_task({"type": "countdown-chain", "size": 9, "reward_seconds": 3.0, "order": "pass-rate"})
    assert made == {"type": "file", "reward_seconds": 3.0, "order": "pass-rate", **given.names}
    assert given.in_task({})["type"] == "file"
    rows_alone = Given.of(data=ROWS)
    for kind in ("file", "environment", "agent"):
        assert rows_alone.in_task({"type": kind, "other": 1}) == {"type": kind, "other": 1, **rows_alone.names}
    assert Given().in_task({"type": "guess"}) == {"type": "guess"}


def test_the_rows_of_a_task_are_those_that_were_given() -> None:
    given = Given.of(reward=lambda prompt, completion: 1.0, data=ROWS * 5, evaluation_data=ROWS[:1])
    options = FileOptions.model_validate(given.in_task({}))
    task = load_task(options, given=given)
    assert [row.text for row in task.train] == ["2+2=", "3+3="] * 5
    assert [row.columns for row in task.evaluation] == [{"answer": "4"}]
    assert task.functions == given.rewards != {}
    assert task.reward == "python:<lambda>"
    assert task.name == "`data`"
    with pytest.raises(RunError, match="this was given from Python and cannot be found by its name"):
        load_task(options)
    bad = Given.of(reward=lambda prompt, completion: 1.0, data=[{"text": "2"}])
    with pytest.raises(RecipeError, match="row 1 of `data`: a row has a column `prompt` or a column `messages`"):
        load_task(FileOptions.model_validate(bad.in_task({})), given=bad)


def test_a_resumed_run_may_be_given_other_rows_to_evaluate_on_and_another_source_under_the_names_of_then() -> None:
    def exact(prompt: str, completion: str) -> float:
        return 1.0

    before = Given.of(reward=exact, data=ROWS, evaluation_data=ROWS[:1])

    def exact(prompt: str, completion: str) -> float:  # type: ignore[no-redef]
        return 0.5

    now = Given.of(reward=exact, data=ROWS, evaluation_data=ROWS[1:])
    assert now.digests.keys() == before.digests.keys() == {"python:exact"}
    assert now.digests != before.digests
    same = now.as_recorded(before.names)
    assert same.digests == now.digests
    assert same.names == before.names | {"evaluation_path": now.names["evaluation_path"]} != before.names
    with pytest.raises(RunError, match="`data` is not what the run began with"):
        Given.of(reward=exact, data=ROWS[::-1], evaluation_data=ROWS[:1]).as_recorded(before.names)
