"""A key of a recipe that changed has all of its values."""

from __future__ import annotations

from pathlib import Path

from view_cases import record_extended_run

from stretto.store.recipe_history import recipe_changes, recipe_parts, recipe_values
from stretto.store.schema import opened_readonly

PARTS = [(0, {"a": 0.002, "b": "x"}), (30, {"a": 0.001, "b": "x"}), (40, {"a": 0.001, "b": "x", "c": [1]})]


def test_values_name_the_updates_from_which_they_hold() -> None:
    assert recipe_values(PARTS) == {"a": "0.002, from update 30: 0.001", "b": "x", "c": "not set, from update 40: [1]"}
    assert recipe_values(PARTS[:1]) == {"a": 0.002, "b": "x"}, "a value that never changed keeps its type"
    assert recipe_values([]) == {}


def test_changes_are_listed_by_update() -> None:
    assert recipe_changes(PARTS) == [(30, [("a", "0.002", "0.001")]), (40, [("c", "not set", "[1]")])]


def test_phases_are_read_from_the_journal_and_the_last_one_from_the_configuration(tmp_path: Path) -> None:
    record_extended_run(tmp_path)
    with opened_readonly(tmp_path / "journal.sqlite") as db:
        values = recipe_values(recipe_parts(db, tmp_path))
        (tmp_path / "config.toml").unlink()
        assert recipe_values(recipe_parts(db, tmp_path)) == values
    assert values["training.learning_rate"] == "0.001, from update 2: 0.0005"
    assert values["training.steps"] == "2, from update 2: 4"
    assert values["seed"] == 7
