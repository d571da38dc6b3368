"""The table `[observe]`."""

from __future__ import annotations

from typing import Any

import pytest

from stretto.errors import RecipeError
from stretto.recipe.reading import parse_recipe
from stretto.recipe.schema import Recipe


def recipe(**observe: Any) -> Recipe:
    return parse_recipe({"model": {"path": "tiny"}, "task": {"type": "countdown-chain"}, "observe": observe})


def test_a_recipe_reports_to_nobody_unless_it_says_so() -> None:
    assert recipe().observe.sinks == ()
    assert "flush_seconds" not in recipe().dumps(), "an option without effect is not written down"


def test_the_options_of_a_tracker_are_read_and_written() -> None:
    made = recipe(sinks=["tensorboard", "wandb"], samples=4, wandb={"project": "mine", "tags": ["a"]})
    assert made.observe.wandb is not None
    assert (made.observe.wandb.project, made.observe.wandb.tags) == ("mine", ("a",))
    assert 'project = "mine"' in made.dumps()


@pytest.mark.parametrize(
    ("observe", "words"),
    [
        ({"sinks": ["wandbb"]}, r'`observe.sinks = \["wandbb"\]` must name "tensorboard"'),
        ({"sinks": ["wandb", "wandb"]}, '`observe.sinks` names "wandb" twice'),
        ({"sinks": ["tensorboard"], "wandb": {"project": "mine"}}, '`observe.wandb` has no effect: .*"wandb"; add it'),
        ({"samples": 3}, "`observe.samples` has no effect without a tracker"),
        ({"metrics": "all"}, "`observe.metrics` has no effect without a tracker"),
        ({"sinks": ["prometheus"], "samples": 3}, "`observe.samples = 3` has no effect: .prometheus. takes numbers"),
        (
            {"sinks": ["prometheus"], "prometheus": {"port": 70_000}},
            "`observe.prometheus.port = 70000` must be",
        ),
        ({"report_to": "wandb"}, "`observe.report_to` is not an option; did you mean `observe.sinks`"),
    ],
)
def test_a_table_that_cannot_mean_what_it_says_is_refused(observe: dict[str, Any], words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        recipe(**observe)
