"""Runs are compared by the keys of their recipes; those that differ by the seed alone are one experiment."""

from __future__ import annotations

from pathlib import Path

from view_cases import CONFIG, record_extended_run, record_run

from stretto.view.comparison import comparison
from stretto.view.runs import open_runs


def test_keys_that_differ_are_listed_and_seeds_belong_together(tmp_path: Path) -> None:
    configs = (CONFIG, CONFIG.replace("seed = 7", "seed = 8"), CONFIG.replace("0.001", "0.002"))
    for name, config in zip("abc", configs, strict=True):
        record_run(tmp_path / name, updates=1, config=config)
    found = comparison(open_runs([tmp_path / name for name in "abc"]))
    assert found["seeds"] == [[0, 1], [2]]
    assert [(each["key"], each["values"]) for each in found["differences"]] == [
        ("training.learning_rate", [0.001, 0.001, 0.002]),
        ("seed", [7, 8, 7]),
    ], "what makes another experiment comes first"


def test_what_auto_became_on_another_device_makes_no_other_experiment(tmp_path: Path) -> None:
    for name, micro_tokens, prefill_tokens in (("a", 8_192, 8_192), ("b", 2_048, 4_096)):
        config = CONFIG.replace("[rollout]", f"[rollout]\nprefill_tokens = {prefill_tokens}")
        config = config.replace("[training]", f"[training]\nmicro_tokens = {micro_tokens}")
        record_run(tmp_path / name, updates=1, config=config)
    found = comparison(open_runs([tmp_path / name for name in "ab"]))
    assert found["seeds"] == [[0, 1]]
    assert {each["key"] for each in found["differences"]} == {"training.micro_tokens", "rollout.prefill_tokens"}


def test_a_run_without_a_recipe_is_named(tmp_path: Path) -> None:
    for name in "ab":
        record_run(tmp_path / name, updates=1)
    (tmp_path / "b" / "config.toml").write_text("not [toml")
    found = comparison(open_runs([tmp_path / name for name in "ab"]))
    assert found["without_recipe"] == ["b"]


def test_a_recipe_that_changed_is_compared_with_all_of_its_values(tmp_path: Path) -> None:
    record_extended_run(tmp_path / "a")
    record_run(tmp_path / "b", config=CONFIG.replace("0.001", "0.0005"))
    found = comparison(open_runs([tmp_path / "a", tmp_path / "b"]))
    values = {each["key"]: each["values"] for each in found["differences"]}
    assert values["training.learning_rate"] == ["0.001, from update 2: 0.0005", 0.0005]
    assert found["seeds"] == [[0], [1]]
