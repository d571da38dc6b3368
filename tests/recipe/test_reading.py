"""Reading a recipe: files, overrides, and a comparison's changes."""

import tomllib
from pathlib import Path

import pytest

from stretto.environments.task_options import FileOptions
from stretto.errors import RecipeError
from stretto.recipe.reading import load_recipe, paradigm_overrides, parse_recipe
from stretto.recipe.schema import PARADIGM_NAMES

QUICKSTART = Path(__file__).parents[2] / "recipes" / "quickstart.toml"
MINIMAL = '[model]\npath = "tiny"\n[task]\ntype = "countdown-chain"\n'
EVALUATES = f"""
{MINIMAL}
[rollout]
staleness = 3
in_flight = 20
[evaluation]
every = 20
temperature = 0.0
"""


def test_a_missing_or_broken_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="does not exist"):
        load_recipe(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("[model\n")
    with pytest.raises(RecipeError, match="not valid TOML"):
        load_recipe(tmp_path / "bad.toml")


def test_a_recipe_that_an_editor_of_windows_wrote_is_read(tmp_path: Path) -> None:
    path = tmp_path / "r.toml"
    path.write_bytes(b'\xef\xbb\xbf[model]\r\npath = "tiny"\r\n[task]\r\ntype = "countdown-chain"\r\n')
    assert load_recipe(path).model.path == "tiny"


def test_an_integer_of_more_digits_than_python_converts_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(f"seed = {'9' * 5_000}\n{MINIMAL}")
    with pytest.raises(RecipeError, match=r"is not valid TOML: .*5000 digits"):
        load_recipe(path)
    path.write_text(MINIMAL)
    with pytest.raises(RecipeError, match=r"999999\.\.\.999999 \(5000 digits\)\"` must be a whole number"):
        load_recipe(path, [f"training.steps={'9' * 5_000}"])


@pytest.mark.parametrize("text", ["[task]\ntype = 'guess'\n[[task]]\n", "[[task]]\ntype = 'guess'\n  [task]\n"])
def test_one_task_and_several_in_one_recipe_are_told_how_to_be_written(tmp_path: Path, text: str) -> None:
    path = tmp_path / "r.toml"
    path.write_text(f"[model]\npath = 'tiny'\n{text}")
    with pytest.raises(
        RecipeError, match=r"it has `\[task\]` and `\[\[task\]\]`: write `\[\[task\]\]` above each"
    ) as caught:
        load_recipe(path)
    assert "give each a `label`" in str(caught.value)
    path.write_text("[task]\ntype = 'guess'\n[task]\n")
    with pytest.raises(RecipeError, match=r"it has `\[task\]` more than once: write `\[\[task\]\]` above each"):
        load_recipe(path)
    path.write_text("[task]\ntype = guess")
    with pytest.raises(RecipeError) as caught:
        load_recipe(path)
    assert "[[task]]" not in str(caught.value)


def test_set_overrides_a_key_with_a_toml_value_or_a_bare_word(tmp_path: Path) -> None:
    path = tmp_path / "r.toml"
    path.write_text(MINIMAL)
    recipe = load_recipe(path, ["training.steps=7", "rollout.paradigm=synchronous", "model.lora={rank = 4}"])
    assert (recipe.training.steps, recipe.rollout.paradigm) == (7, "synchronous")
    assert recipe.model.lora is not None
    assert recipe.model.lora.rank == 4


@pytest.mark.parametrize(
    ("overrides", "every", "staleness"),
    [
        (["evaluation.prompts=0"], 0, 3),
        (["evaluation.every=0"], 0, 3),
        (["evaluation.prompts=0", "evaluation.every=0"], 0, 3),
        (["training.steps=20"], 0, 3),
        (["training.steps=21"], 20, 3),
        (["rollout.paradigm=synchronous"], 20, 0),
    ],
)
def test_what_an_override_leaves_without_effect_gives_way_to_it(
    tmp_path: Path, overrides: list[str], every: int, staleness: int
) -> None:
    path = tmp_path / "r.toml"
    path.write_text(EVALUATES)
    recipe = load_recipe(path, overrides)
    assert (recipe.plan.evaluate_every, recipe.plan.staleness) == (every, staleness)
    assert recipe.evaluation.temperature == (None if "evaluation.prompts=0" in overrides else 0.0)
    assert parse_recipe(tomllib.loads(recipe.dumps())).plan == recipe.plan


def test_keys_that_an_override_leaves_without_effect_are_told(tmp_path: Path) -> None:
    path = tmp_path / "r.toml"
    path.write_text(EVALUATES)
    told: list[str] = []
    load_recipe(path, ["rollout.paradigm=synchronous"], say=told.append)
    cause = "because `--set rollout.paradigm=synchronous` leaves no effect for it"
    assert told == [f"left out of the recipe, {cause}: `rollout.in_flight` and `rollout.staleness`"]
    load_recipe(path, ["training.steps=21"], say=told.append)
    assert len(told) == 1


def test_what_the_overrides_or_the_recipe_itself_leave_without_effect_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "r.toml"
    path.write_text(EVALUATES)
    with pytest.raises(RecipeError, match=r"`evaluation.every` has no effect with `evaluation.prompts = 0`"):
        load_recipe(path, ["evaluation.prompts=0", "evaluation.every=5"])
    for nested in ("observe.wandb.project=mine", 'observe.wandb={project="mine"}', 'observe={wandb={project="mine"}}'):
        with pytest.raises(RecipeError, match=r"`observe.wandb` has no effect: `observe.sinks = \[\]` does not name"):
            load_recipe(path, [nested])
    path.write_text(EVALUATES + "prompts = 0\n")
    with pytest.raises(RecipeError, match=r"`evaluation.every` has no effect"):
        load_recipe(path, ["training.steps=7"])


def test_held_out_rows_of_a_run_without_evaluation_are_an_error_or_give_way(tmp_path: Path) -> None:
    path = tmp_path / "r.toml"
    task = '[task]\ntype = "file"\npath = "a.jsonl"\nreward = "m:f"\nevaluation_path = "b.jsonl"\n'
    path.write_text(f'[model]\npath = "tiny"\n{task}')
    recipe = load_recipe(path, ["evaluation.prompts=0"])
    assert isinstance(recipe.task, FileOptions)
    assert recipe.task.evaluation_path is None
    path.write_text(f'[model]\npath = "tiny"\n{task}[evaluation]\nprompts = 0\n')
    with pytest.raises(RecipeError, match=r"`task.evaluation_path` has no effect with `evaluation.prompts = 0`"):
        load_recipe(path)


@pytest.mark.parametrize("override", ["training.steps", "=3", "training..steps=3"])
def test_an_override_of_another_form_is_an_error(tmp_path: Path, override: str) -> None:
    path = tmp_path / "r.toml"
    path.write_text(MINIMAL)
    with pytest.raises(RecipeError, match="--set"):
        load_recipe(path, [override])


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("{rank = 4", r"`\{rank = 4` is not valid TOML: .*end of document"),
        ("{rank = 4, rank = 5}", r"is not valid TOML: .*\(at character 20\)"),
        ("[1, 2", "is not valid TOML"),
        ('"quo', "is not valid TOML"),
        ("'quo", "is not valid TOML"),
    ],
)
def test_an_override_that_is_broken_toml_says_where(tmp_path: Path, value: str, words: str) -> None:
    path = tmp_path / "r.toml"
    path.write_text(MINIMAL)
    with pytest.raises(RecipeError, match=rf"`--set model.lora=.*{words}"):
        load_recipe(path, [f"model.lora={value}"])


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("staleness=3", "`staleness` is not an option; did you mean `rollout.staleness`?"),
        ("prompts=3", "did you mean `rollout.prompts` or `evaluation.prompts`?"),
        ("task.path=x", '`task.type = "environment"` or `task.type = "agent"`, and this recipe has `countdown-chain`'),
        ("engine=vllm", "`engine` is a table, not a value; set one of its options, such as `engine.type`"),
        ("rollout=3", "`rollout` is a table, not a value; set one of its options, such as `rollout."),
        ("training.steps=abc", '`training.steps = "abc"` must be a whole number'),
        ("rollout.temprature=2", "did you mean `rollout.temperature`?"),
        ("algorithm.clip=0.3", "did you mean `algorithm.clip_low` or `algorithm.clip_high`?"),
    ],
)
def test_an_override_is_blamed_by_its_own_words_and_the_nearest_key_is_named_at_any_depth(
    override: str, words: str
) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe(QUICKSTART, [override])
    assert str(caught.value).startswith(f"`--set {override}` on `{QUICKSTART}`:\n")
    assert words in str(caught.value)


def test_a_recipe_that_is_wrong_by_itself_is_blamed_with_the_overrides(tmp_path: Path) -> None:
    path = tmp_path / "r.toml"
    path.write_text(f"{MINIMAL}siez = 3\n")
    with pytest.raises(RecipeError, match=r"^`.*r\.toml` with `--set seed=3`:\n  `task\.siez` is not an option"):
        load_recipe(path, ["seed=3"])


def test_an_override_without_a_value_takes_the_key_out() -> None:
    assert load_recipe(QUICKSTART).rollout.staleness == 2
    assert load_recipe(QUICKSTART, ["rollout.staleness="]).rollout.staleness is None
    assert load_recipe(QUICKSTART, ["model.lora="]).model.lora is None
    with pytest.raises(RecipeError, match=r"`--set rollout.rows=` removes `rollout.rows` from .* has no such key"):
        load_recipe(QUICKSTART, ["rollout.rows="])


def test_where_a_key_has_no_effect_the_error_says_how_to_take_it_out(tmp_path: Path) -> None:
    path = tmp_path / "r.toml"
    rollout = '[rollout]\nparadigm = "synchronous"\nstaleness = 3\n'
    path.write_text(MINIMAL + rollout)
    with pytest.raises(RecipeError, match=r"`rollout.staleness = 3` has no effect[\s\S]*`--set KEY=`, with nothing"):
        load_recipe(path)
    assert load_recipe(path, ["rollout.staleness="]).plan.staleness == 0


@pytest.mark.parametrize("paradigm", PARADIGM_NAMES)
def test_compare_drops_what_a_paradigm_fixes_itself(paradigm: str) -> None:
    chosen = {"staleness": 2, "in_flight": 20, "rows": 160}
    others = {"algorithm": {"clip_low": 0.1}, "runtime": {"instances": 2, "slots": 3}}
    raw = {**tomllib.loads(MINIMAL), "rollout": chosen, **others}
    recipe = parse_recipe(paradigm_overrides(raw, paradigm))
    assert recipe.rollout.paradigm == paradigm
    assert raw["rollout"] == {"staleness": 2, "in_flight": 20, "rows": 160}, "the recipe itself is not changed"


def test_compare_leaves_a_replay_out_where_nothing_can_be_used_again() -> None:
    raw = {**tomllib.loads(MINIMAL), "training": {"replay": {"ratio": 0.5}}}
    for paradigm in PARADIGM_NAMES:
        plan = parse_recipe(paradigm_overrides(raw, paradigm)).plan
        assert plan.replay_groups == (0 if paradigm in ("synchronous", "one-step-off") else 8)


def test_a_comparison_runs_drop_without_redundancy() -> None:
    raw = {**tomllib.loads(MINIMAL), "rollout": {"redundancy": {"groups": 20}}}
    assert not parse_recipe(paradigm_overrides(raw, "drop")).plan.redundant
    assert parse_recipe(paradigm_overrides(raw, "synchronous")).plan.rows == 20 * 8
