"""The reference of the keys says what the models say."""

from pathlib import Path

from stretto.recipe.error_messages import all_keys
from stretto.recipe.key_reference import describe_keys
from stretto.recipe.schema import Recipe

REFERENCE = Path(__file__).parents[2] / "docs" / "recipes.md"


def test_every_key_of_a_recipe_is_in_the_reference_with_its_type_and_default() -> None:
    text = REFERENCE.read_text()
    missing = [key for key in all_keys(Recipe) if f"| `{key}` |" not in text]
    assert not missing, "run `make reference`"
    assert describe_keys() in text, "run `make reference`"
    assert '| `rollout.staleness` | integer or `"auto"` | 2 | K:' in text
    assert "| `model.path` | string | required |" in text


def test_tables_of_several_kinds_have_their_shared_keys_once_and_need_one_key_of_a_kind() -> None:
    lines = describe_keys().splitlines()
    for key in ("name", "weight", "function", "judge", "model"):
        (line,) = [line for line in lines if line.startswith(f"| `task.rewards.{key}` |")]
        needs = "one of `function`, `judge`, `model`"
        assert (f"| {needs} |" in line) == (key in ("function", "judge", "model")), line
        assert "| required |" not in line
    assert any(line.startswith("| `task.rewards.judge.address` | string | required |") for line in lines)
