"""What a resumed run may change of its recipe, and what is said of the rest."""

from __future__ import annotations

from pathlib import Path

import pytest

from stretto.errors import RunError
from stretto.recipe.error_messages import sections
from stretto.recipe.key_reference import rows
from stretto.recipe.reading import load_recipe, parse_recipe
from stretto.recipe.schema import Recipe
from stretto.run.recipe_changes import FIXED, MAY_CHANGE, accepted_changes, reason_against, refuse_another_recipe

RECIPE = """
[model]
path = "tiny"
lora = { rank = 4 }
[task]
type = "countdown-chain"
[rollout]
staleness = 3
[training]
steps = 100
[evaluation]
every = 20
"""


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The recipe of the run in the working directory."""
    monkeypatch.chdir(tmp_path)
    path = Path("recipe.toml")
    path.write_text(RECIPE)
    Path("config.toml").write_text(load_recipe(path).dumps())
    return path


def changes(path: Path, *overrides: str) -> list[str]:
    return [str(each) for each in accepted_changes(load_recipe(path, overrides), Path())]


def every_key() -> list[str]:
    found = {name for name in Recipe.model_fields if name not in sections(Recipe)}
    for section, variants in sections(Recipe).items():
        found |= {f"{section}.{name}" for model in variants.values() for name, _ in rows(model)}
    return sorted(found)


def test_every_key_of_a_recipe_may_change_or_has_a_reason_why_not() -> None:
    for key in every_key():
        reason_against(key)  # raises for a key that is in neither table
    assert not MAY_CHANGE.keys() & FIXED.keys()
    named = {*MAY_CHANGE, *FIXED} - {"observe"}
    assert not [row for row in named if not any(key == row or key.startswith(f"{row}.") for key in every_key())]


def test_the_documentation_lists_what_may_change() -> None:
    page = (Path(__file__).parents[2] / "docs" / "recovery.md").read_text()
    table = page.partition("### What may change")[2].partition("\n#")[0]
    for key in MAY_CHANGE:
        section, _, name = key.partition(".")
        assert f"`{key}`" in table or f"`{name}`" in table or f"`[{section}]`" in table, key


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (
            ["rollout.paradigm=synchronous"],
            ["`rollout.paradigm` is 'synchronous', and the run in `.` was started with 'multi-version': the laws"],
        ),
        (["algorithm.type=cispo"], ["`algorithm.type` is 'cispo', and the run in `.` was started with 'grpo': a run"]),
        (["rollout.group=4"], ["`rollout.group` is 4, and the run in `.` was started with 8: the numbers"]),
        (["model.lora.rank=8"], ["`model.lora.rank` is 8, and the run in `.` was started with 4: it is another"]),
        (["rollout.stop=['x']"], ["`rollout.stop` is ['x'], and the run in `.` was started with []: trajectories"]),
        (
            ["seed=1", "rollout.retries=0", "training.learning_rate=1.0"],
            [
                "`rollout.retries` is 0, and the run in `.` was started with 2: `verify` counts",
                "`seed` is 1, and the run in `.` was started with 0: the order of the data",
            ],
        ),
    ],
)
def test_what_cannot_change_is_told_with_its_reason_and_not_what_follows_from_it(
    overrides: list[str], told: list[str], path: Path
) -> None:
    with pytest.raises(RunError) as refused:
        changes(path, *overrides)
    first, *lines, last = str(refused.value).splitlines()
    assert first == "the run in `.` cannot go on with this recipe:"
    assert len(lines) == len(told), lines
    for line, start in zip(lines, told, strict=True):
        assert line.strip().startswith(start)
    assert "start a new run; nothing was changed" in last


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        ([], []),
        (["training.steps=200"], ["`training.steps` 100 -> 200"]),
        (
            ["training.learning_rate=5e-6", "training.schedule=cosine"],
            ["`training.learning_rate` 1e-05 -> 5e-06", "`training.schedule` constant -> cosine"],
        ),
        (["rollout.staleness="], ["`rollout.staleness` 3 -> left out"]),
        (["rollout.staleness=auto"], ["`rollout.staleness` 3 -> auto"]),
        (["rollout.rows=8", "rollout.in_flight=20"], ["`rollout.in_flight` left out -> 20", "`rollout.rows` left"]),
        (["evaluation.every=", "evaluation.prompts=8"], ["`evaluation.every` 20 -> 0", "`evaluation.prompts` 64 -> 8"]),
        (["task.reward_seconds=1.5"], ["`task.reward_seconds` 10 -> 1.5"]),
        (["runtime.stall_seconds=5"], ["`runtime.stall_seconds` 900 -> 5"]),
        (["model.dtype=auto", "training.micro_tokens=auto", "rollout.prefill_tokens=auto"], []),
    ],
)
def test_what_may_change_is_told_with_both_values(overrides: list[str], told: list[str], path: Path) -> None:
    found = changes(path, *overrides)
    assert len(found) == len(told), found
    assert all(each.startswith(start) for each, start in zip(found, told, strict=True)), found


def test_a_falling_schedule_needs_its_end_stated_when_the_steps_change(path: Path) -> None:
    path.write_text(RECIPE.replace("steps = 100", 'steps = 100\nschedule = "linear"'))
    Path("config.toml").write_text(load_recipe(path).dumps())
    with pytest.raises(RunError, match=r"`training.steps` is 200, and the schedule `linear` was to end at update 100"):
        changes(path, "training.steps=200")
    assert changes(path, "training.steps=200", "training.schedule_end=200")
    assert changes(path, "training.steps=200", "training.schedule_start=100", "training.schedule_end=200")
    assert changes(path, "training.steps=200", "training.schedule=constant")
    assert changes(path, "training.learning_rate=0.1")


def test_held_out_rows_that_are_split_from_the_data_cannot_change(path: Path) -> None:
    task = 'type = "file"\npath = "p.jsonl"\nreward = "m:f"'
    path.write_text(RECIPE.replace('type = "countdown-chain"', task))
    Path("config.toml").write_text(load_recipe(path).dumps())
    for override in ("evaluation.prompts=8", 'task.evaluation_path="q.jsonl"'):
        with pytest.raises(RunError, match="held-out rows are split from those to train on, so other rows would"):
            changes(path, override)
    path.write_text(path.read_text().replace("m:f", 'm:f"\nevaluation_path = "e.jsonl'))
    Path("config.toml").write_text(load_recipe(path).dumps())
    assert len(changes(path, "evaluation.prompts=8", 'task.evaluation_path="q.jsonl"')) == 2


def test_a_data_set_may_be_held_at_its_revision_and_evaluated_on_another(path: Path) -> None:
    source = 'dataset = { name = "a/b" }\nevaluation_dataset = { name = "a/b", split = "test" }'
    task = f'type = "file"\nreward = "m:f"\n{source}'
    path.write_text(RECIPE.replace('type = "countdown-chain"', task))
    Path("config.toml").write_text(load_recipe(path).dumps())
    accepted = changes(path, 'task.dataset.revision="v1"', 'task.evaluation_dataset.name="a/c"')
    assert accepted == ["`task.dataset.revision` left out -> v1", "`task.evaluation_dataset.name` a/b -> a/c"]
    for override in ('task.dataset.name="a/c"', 'task.columns.prompt="q"', 'task.too_long="drop"', 'task.prefill="<"'):
        with pytest.raises(RunError, match=rf"`{override.partition('=')[0]}` is "):
            changes(path, override)
    with pytest.raises(RunError, match="held-out rows are split from those to train on"):
        changes(path, "task.evaluation_dataset=")


def test_a_comparison_goes_on_with_other_keys_of_the_machine_alone(path: Path) -> None:
    of_the_machine = ["runtime.stall_seconds=5", "training.micro_tokens=5", "rollout.prefill_tokens=64"]
    refuse_another_recipe(load_recipe(path, of_the_machine), Path(), "stop")
    with pytest.raises(RunError, match=r"(?s)this is another recipe:.*`training.steps` is 10, and .* 100\n  stop"):
        refuse_another_recipe(load_recipe(path, ["training.steps=10", "evaluation.every="]), Path(), "stop")


def test_variables_to_pass_may_change_when_a_run_goes_on(path: Path) -> None:
    begun = load_recipe(path).dumps()
    assert "pass_env = []\n" in begun
    for was in (begun, begun.replace("pass_env = []\n", "")):  # one that was begun before there was the key
        Path("config.toml").write_text(was)
        assert changes(path, 'task.pass_env=["OUR_KEY"]') == ["`task.pass_env` [] -> ['OUR_KEY']"]
        assert changes(path) == []


@pytest.mark.parametrize("damaged", [b"[[[", b"\xff\xfe", b"[model]\npath = 3"])
def test_a_run_whose_recipe_is_damaged_is_refused_by_its_name(tmp_path: Path, damaged: bytes) -> None:
    (tmp_path / "config.toml").write_bytes(damaged)
    with pytest.raises(RunError, match=r"config.toml`, the recipe that the run was started with, cannot be read"):
        accepted_changes(parse_recipe({"model": {"path": "tiny"}, "task": {"type": "countdown-chain"}}), tmp_path)


def test_a_number_instead_of_a_recorded_auto_is_a_change_if_it_may_change(path: Path) -> None:
    """The run of a cluster records `auto`, because each instance chooses for its own device."""
    Path("config.toml").write_text(load_recipe(path, ["rollout.prefill_tokens=auto", "model.dtype=auto"]).dumps())
    assert changes(path) == []
    found = changes(path, "rollout.prefill_tokens=4096", 'model.dtype="float32"')
    assert found == ["`rollout.prefill_tokens` auto -> 4096"]


def test_a_run_goes_on_with_what_auto_became_and_without_keys_that_are_newer(path: Path) -> None:
    resolved = ["training.micro_tokens=4096", 'model.dtype="float32"', "rollout.prefill_tokens=8192"]
    begun = load_recipe(path, resolved).dumps()
    assert "greedy = false\n" in begun
    Path("config.toml").write_text(begun.replace("greedy = false\n", ""))
    assert changes(path) == []
    assert changes(path, "training.micro_tokens=2048") == ["`training.micro_tokens` 4096 -> 2048"]
    assert changes(path, "rollout.prefill_tokens=4096") == ["`rollout.prefill_tokens` 8192 -> 4096"]
    with pytest.raises(RunError, match=r"model\.dtype"):
        changes(path, 'model.dtype="bfloat16"')
