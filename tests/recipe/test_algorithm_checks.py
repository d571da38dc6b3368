"""Algorithms in a recipe: what is refused, in which words, and what is not."""

import tomllib
from typing import Any

import pytest

from stretto.errors import RecipeError
from stretto.objectives import OBJECTIVES
from stretto.objectives.teacher_options import TeacherOptions, teacher_index, teacher_refusals
from stretto.recipe.reading import paradigm_overrides, parse_recipe
from stretto.recipe.schema import PARADIGM_NAMES

STALE = {"rollout": {"staleness": 2}}
FRESH = {"rollout": {"paradigm": "synchronous"}}
LORA = {"model": {"path": "tiny", "lora": {"rank": 4}}}
PROXIMAL = {"anchor": "proximal"}
FILTER = {"rollout": {"filter": "no-signal"}}


def parsed(algorithm: dict[str, Any], **sections: Any) -> Any:
    raw = {"model": {"path": "tiny"}, "task": {"type": "countdown-chain"}, **sections, "algorithm": algorithm}
    return parse_recipe(raw)


def required(name: str) -> dict[str, Any]:
    kind = OBJECTIVES[name]
    found: dict[str, Any] = {"type": name}
    if kind.model_fields["average"].default == "constant":
        found["average_tokens"] = 256
    if name == "distill":
        found["teachers"] = [{"path": "tiny"}]
    if name == "custom":
        found["function"] = "tests.recipe.test_algorithm_checks:user_objective"
    return found


def user_objective(tokens: Any, options: Any) -> Any:
    return -tokens.logprobs, {}


@pytest.mark.parametrize("paradigm", PARADIGM_NAMES)
@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_objective_is_a_recipe_under_every_paradigm_and_survives_being_written_out(
    name: str, paradigm: str
) -> None:
    steps = 2 if name == "decoupled-ppo" else 1  # with one, its ratio is 1, which is refused
    recipe = parsed(required(name), rollout={"paradigm": paradigm}, training={"optimizer_steps": steps})
    assert recipe.algorithm.type == name
    assert type(recipe.algorithm) is OBJECTIVES[name]
    assert parse_recipe(tomllib.loads(recipe.dumps())).model_dump() == recipe.model_dump()
    assert parse_recipe(tomllib.loads(recipe.source_toml())) == recipe


def test_an_algorithm_without_a_type_is_grpo() -> None:
    assert parsed({"clip_low": 0.1}).algorithm.type == "grpo"


def anchored_on_the_proximal_policy() -> list[str]:
    """Objectives whose anchor may be the policy at the start of the update."""
    anchors = {name: kind.model_fields.get("anchor") for name, kind in OBJECTIVES.items()}
    return [name for name, field in anchors.items() if field is not None and "proximal" in field.annotation.__args__]  # type: ignore[union-attr]


@pytest.mark.parametrize("name", anchored_on_the_proximal_policy())
@pytest.mark.parametrize(("steps", "words"), [(1, "every ratio is 1"), (4, "it covers these steps and nothing older")])
def test_where_the_ratio_knows_no_age_and_nothing_else_corrects_a_stale_run_is_refused(
    name: str, steps: int, words: str
) -> None:
    algorithm, training = required(name) | PROXIMAL, {"optimizer_steps": steps}
    made = parsed(algorithm, training=training, **FRESH).algorithm
    if made.corrects_off_policy:
        if steps > 1:
            parsed(algorithm, training=training, **STALE)
            return
        with pytest.raises(RecipeError, match=r"every ratio is 1 and nothing is ever clipped.*optimizer_steps"):
            parsed(algorithm, training=training, **STALE)
        return
    with pytest.raises(RecipeError, match=rf"does not correct for staleness.*{words}.*`\[algorithm.correction\]`"):
        parsed(algorithm, training=training, **STALE)
    parsed(algorithm | {"correction": {}}, training=training, **STALE)
    parsed(algorithm | {"correction": {"mode": "filter"}}, training=training, **STALE)


@pytest.mark.parametrize(
    ("algorithm", "sections", "words"),
    [
        (PROXIMAL | {"correction": {}, "clip_low": 0.1}, STALE, "`algorithm.clip_low` has no effect"),
        (PROXIMAL | {"correction": {}, "dual_clip": 3.0}, STALE, "`algorithm.dual_clip` has no effect"),
        ({"type": "cispo", "mask": True}, FRESH, "`algorithm.mask` has no effect"),
        ({"type": "decoupled-ppo", "clip_high": 0.3}, STALE, "or raise `training.optimizer_steps`"),
        ({"correction": {}}, STALE, "would correct for staleness twice"),
        ({"average_tokens": 30}, STALE, "`algorithm.average_tokens = 30` has no effect"),
        ({"whiten_over": "version"}, STALE, '`algorithm.whiten_over = "version"` has no effect'),
        ({"type": "reinforce-plus-plus", "whiten_over": "version"}, FRESH, "has no effect without staleness"),
        ({"mask_older_tokens": True}, STALE, "`algorithm.mask_older_tokens` has no effect"),
        ({"staleness_correction": {}, "anchor": "proximal"}, FRESH, "`[algorithm.staleness_correction]` has no effect"),
        ({"discrepancy_correction": {"level": "turn"}, "anchor": "sampled"}, STALE, 'level = "turn"` has no effect'),
        ({"discrepancy_correction": {}}, STALE, "correct for the discrepancy between engine and trainer twice"),
        ({"staleness_correction": {}, "anchor": "sampled"}, STALE, "correct for staleness twice"),
        ({"correction": {}, "staleness_correction": {}, "anchor": "proximal"}, STALE, "is the product of"),
        ({"advantage": "gae"}, STALE, '`algorithm.advantage = "gae"` needs a critic'),
        ({"critic": {}}, STALE, '`algorithm.critic` is not an option here: it belongs to `algorithm.type = "ppo"`'),
        ({"tau": 0.1}, STALE, 'it belongs to `algorithm.type = "kimi"`, and this recipe has `grpo`'),
        ({"type": "cispo", "clip_lwo": 0.1}, STALE, "did you mean `algorithm.clip_low`?"),
        ({"type": "gpro"}, STALE, ' must be one of "grpo", '),
        ({"dual_clip": 1.0}, STALE, "`algorithm.dual_clip = 1.0` must be more than 1"),
        ({"clip_low": -0.1}, STALE, "`algorithm.clip_low = -0.1`"),
        ({"type": "kimi", "tau": -1.0}, STALE, "`algorithm.tau = -1.0`"),
        (PROXIMAL | {"correction": {"high": 0.5}}, STALE, "`algorithm.correction.high = 0.5`"),
        (PROXIMAL | {"correction": {"level": "segment"}}, STALE, "`algorithm.correction.segment_tokens` is missing"),
        (PROXIMAL | {"correction": {"mode": "filter", "high": 5e8}}, STALE, "filter nothing"),
        ({"entropy": {"coefficient": -0.1}}, STALE, "`algorithm.entropy.coefficient = -0.1`"),
        ({"supervised": {}}, STALE, "`algorithm.supervised.coefficient` is missing"),
        ({"kl": {"coefficient": 0.1}}, STALE, "`algorithm.kl.reference` is missing: without `model.lora`"),
        (
            {"kl": {"coefficient": 0.1, "estimator": "k1"}},
            LORA,
            '`algorithm.kl.estimator = "k1"` has no effect in the loss',
        ),
        ({"kl": {"coefficient": 0.0}}, LORA, "`algorithm.kl.coefficient = 0.0`"),
        ({"length": {"type": "short"}}, STALE, '`algorithm.length.type = "short"` must be one of "overlong", "rel'),
        (
            {"length": {"type": "overlong", "cache": 256}},
            STALE,
            "`algorithm.length.cache = 256` penalizes every",
        ),
        ({"length": {"type": "overlong", "max_tokens": 0, "cache": 3}}, STALE, "`algorithm.length.max_tokens = 0`"),
        (
            {"type": "topr", "positive_weight": 0.0, "negative_weight": 0.0},
            STALE,
            "`algorithm.negative_weight = 0` train nothing",
        ),
        ({"type": "topr", "negative_weight": 0.0, "cap": 2.0}, STALE, "`algorithm.cap = 2.0` has no effect"),
        (
            {"type": "topr", "negative_weight": 0.0, "anchor": "proximal", "correction": {}},
            STALE,
            "`algorithm.anchor = 'proximal'` has no effect",
        ),
        ({"type": "topr", "threshold": 0.5}, FRESH, "`algorithm.threshold` has no effect"),
        ({"supervised": {"coefficient": 0.1}}, FILTER, "is refused with `[algorithm.supervised]`"),
        (
            {"kl": {"coefficient": 0.1, "place": "reward"}},
            LORA | FILTER,
            'refused with `algorithm.kl.place = "reward"`',
        ),
        ({"length": {"type": "relative"}}, FILTER, 'is refused with `algorithm.length.type = "relative"`'),
        ({}, STALE | {"training": {"replay": {"ratio": 0.5, "uses": 3}}}, "`training.replay.uses = 3` has no effect"),
        ({}, STALE | {"training": {"replay": {"ratio": 2.5}}}, "`training.replay.ratio = 2.5` has no effect above 2"),
        (
            {},
            {"rollout": {"staleness": "auto"}, "training": {"replay": {"ratio": 0.5, "uses": 5}}},
            "`training.replay.uses = 5` has no effect above 4",
        ),
        ({}, {"training": {"optimizer_steps": 17}}, "`training.optimizer_steps = 17` needs a group for each step"),
        ({}, {"training": {"optimizer_steps": 0}}, "`training.optimizer_steps = 0`"),
        (
            {"advantage": "whiten"},
            {"rollout": {"prompts": 1, "group": 1}},
            "`rollout.prompts = 1` with `rollout.group = 1` gives every trajectory an advantage of 0",
        ),
        ({"type": "rloo"}, {"rollout": {"group": 1}}, "`rollout.group = 1` gives every trajectory an advantage of 0"),
    ],
)
def test_what_cannot_be_meant_is_refused_by_the_name_of_its_option(
    algorithm: dict[str, Any], sections: dict[str, Any], words: str
) -> None:
    with pytest.raises(RecipeError) as caught:
        parsed(algorithm, **sections)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("algorithm", "sections"),
    [
        ({"clip_low": 0.1}, {**FRESH, "training": {"optimizer_steps": 2}}),
        (PROXIMAL | {"correction": {}, "clip_low": 0.1}, {**STALE, "training": {"optimizer_steps": 2}}),
        ({"correction": {"mode": "filter"}}, STALE),
        (PROXIMAL | {"correction": {"level": "sequence"}}, FRESH),
        ({"kl": {"coefficient": 0.1}}, LORA),
        ({"kl": {"coefficient": 0.1, "place": "reward"}}, LORA),
        ({"kl": {"coefficient": 0.1, "reference": "tiny"}}, {}),
        ({"advantage": "whiten"}, {"rollout": {"group": 1}}),
        ({"type": "naive"}, STALE),
        ({"type": "topr", "negative_weight": 0.0, "correction": {}}, STALE),
        ({"type": "topr", "positive_weight": 0.0, "cap": 2.0}, STALE),
        ({"type": "topr", "threshold": 0.5}, STALE),
        ({"type": "topr", "threshold": 0.5, "positive_weight": 2.0}, FRESH),
        ({"length": {"type": "overlong", "cache": 64}}, FILTER),
        ({"kl": {"coefficient": 0.1}, "entropy": {"coefficient": 0.1}}, LORA | FILTER),
        ({}, STALE | {"training": {"replay": {"ratio": 2.0, "uses": 2}}}),
    ],
)
def test_what_can_act_is_a_recipe(algorithm: dict[str, Any], sections: dict[str, Any]) -> None:
    parsed(algorithm, **sections)


def test_compare_drops_clips_that_a_paradigm_leaves_without_effect_and_keeps_them_where_they_act() -> None:
    raw = {
        "model": {"path": "tiny"},
        "task": {"type": "countdown-chain"},
        "rollout": {"staleness": 2},
        "algorithm": {"type": "cispo", "clip_high": 3.0},
    }
    for paradigm in PARADIGM_NAMES:
        options = parse_recipe(paradigm_overrides(raw, paradigm)).algorithm
        assert getattr(options, "clip_high") == (4.0 if paradigm == "synchronous" else 3.0)  # noqa: B009
    assert raw["algorithm"] == {"type": "cispo", "clip_high": 3.0}, "the recipe itself is not changed"


def test_the_estimator_of_a_divergence_follows_its_place_unless_it_is_named() -> None:
    def estimate(**options: Any) -> str:
        return str(parsed({"kl": {"coefficient": 0.1, **options}}, **LORA).algorithm.kl.estimate)

    assert estimate() == "k2"
    assert estimate(place="reward") == "k1"
    assert estimate(estimator="k3") == estimate(place="reward", estimator="k3") == "k3"


# -- credit by turn ----------------------------------------------------------------------------------------------------

GUESS = {"task": {"type": "guess"}}


def test_credit_by_turn_is_for_tasks_of_several_turns() -> None:
    assert parsed({"turns": {}}, **GUESS).algorithm.turns.gamma == 1.0
    with pytest.raises(
        RecipeError, match=r"`\[algorithm.turns\]` has no effect with `task.type = \"countdown-chain\"`, whose episodes"
    ):
        parsed({"turns": {}})
    with pytest.raises(RecipeError, match=r"has no effect with `task.turns = 1`, whose episodes have one turn"):
        parsed({"turns": {}}, task={"type": "guess", "turns": 1})


def test_a_filter_that_would_throw_away_what_turns_tell_apart_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"refused with `\[algorithm.turns\]`, which distinguishes the turns"):
        parsed({"turns": {}}, **GUESS, **FILTER)


def test_a_critic_has_a_discount_of_its_own() -> None:
    assert parsed({"type": "ppo", "turns": {}}, **GUESS).algorithm.turns is not None
    with pytest.raises(RecipeError, match=r"`algorithm.turns.gamma = 0.9` has no effect with a critic"):
        parsed({"type": "ppo", "turns": {"gamma": 0.9}}, **GUESS)


@pytest.mark.parametrize("paradigm", PARADIGM_NAMES)
def test_compare_drops_what_is_for_older_versions_alone_where_there_are_none(paradigm: str) -> None:
    task = {"model": {"path": "tiny"}, "task": {"type": "countdown-chain"}, **STALE}
    weighted = {"type": "naive", "advantage": "whiten", "whiten_over": "version", "staleness_correction": {"high": 1.5}}
    fresh = paradigm == "synchronous"
    made = parse_recipe(paradigm_overrides({**task, "algorithm": weighted}, paradigm)).algorithm
    assert (made.staleness_correction is None) == fresh
    assert made.whiten_over == ("batch" if fresh else "version")
    made = parse_recipe(paradigm_overrides({**task, "training": {"mismatch_samples": 2}}, paradigm))
    assert made.training.mismatch_samples == (4 if fresh else 2)


# -- teachers ----------------------------------------------------------------------------------------------------------

TEACHER = {"path": "somewhere"}
FILE = {"type": "file", "path": "prompts.jsonl"}


@pytest.mark.parametrize(
    ("algorithm", "sections", "said"),
    [
        ({"type": "distill"}, {}, '`algorithm.type = "distill"` needs a teacher'),
        ({"teachers": [TEACHER, TEACHER]}, {}, "`algorithm.teachers[1]` and `algorithm.teachers[0]` both teach every"),
        ({"teachers": [{**TEACHER, "tasks": ["math"]}]}, {}, "`algorithm.teachers[0].tasks` names 'math', which is no"),
        ({"teachers": [{**TEACHER, "coefficient": 0.0}]}, {}, "`algorithm.teachers[0].coefficient = 0.0` must be more"),
        ({"teachers": [{**TEACHER, "coefficient": -1.0}]}, {}, "`algorithm.teachers[0].coefficient = -1.0` must be"),
        ({"teachers": [{**TEACHER, "top_k": 0}]}, {}, "`algorithm.teachers[0].top_k = 0` must be at least 1"),
        ({"teachers": [{}]}, {}, "`algorithm.teachers[0].path` is missing"),
        ({"teachers": [{**TEACHER, "weight": 1.0}]}, {}, "`algorithm.teachers[0].weight` is not an option"),
        ({"teachers": [{**TEACHER, "form": "sampled", "top_k": 4}]}, {}, "`algorithm.teachers[0].top_k = 4` has no"),
        ({"teachers": [TEACHER]}, FILTER, '`rollout.filter = "no-signal"` is refused with `[[algorithm.teachers]]`'),
        ({"type": "distill", "teachers": [TEACHER], "advantage": "whiten"}, {}, "`algorithm.advantage` has no effect"),
        ({"type": "distill", "teachers": [TEACHER], "correction": {}}, {}, "`algorithm.correction` has no effect"),
        ({"teachers": [TEACHER]}, {"task": FILE}, '`task.reward` is missing: `algorithm.type = "grpo"` learns from'),
        ({"type": "distill", "teachers": [TEACHER]}, {"task": FILE}, "`evaluation.prompts = 64` needs `task.reward`"),
    ],
)
def test_a_teacher_that_cannot_teach_is_refused_with_its_option(
    algorithm: dict[str, Any], sections: dict[str, Any], said: str
) -> None:
    with pytest.raises(RecipeError) as caught:
        parsed(algorithm, **sections)
    assert said in str(caught.value)


def test_distillation_needs_neither_a_reward_nor_a_group() -> None:
    algorithm = {"type": "distill", "teachers": [TEACHER]}
    recipe = parsed(algorithm, task=FILE, evaluation={"prompts": 0}, rollout={"group": 1})
    assert recipe.task.reward is None
    assert parse_recipe(tomllib.loads(recipe.dumps())).model_dump() == recipe.model_dump()


def test_a_task_with_a_label_has_the_teacher_that_names_it_and_others_the_one_that_names_none() -> None:
    teachers = [TeacherOptions(path="a", tasks=("math", "code")), TeacherOptions(path="b")]
    assert [teacher_index(teachers, label) for label in ("math", "code", "else", None)] == [0, 0, 1, 1]
    assert [teacher_index(teachers[:1], label) for label in ("math", "else", None)] == [0, None, None]
    assert not teacher_refusals(teachers, ["math", "code", "else"])
    (said,) = teacher_refusals([teachers[0], TeacherOptions(path="c", tasks=("code",))], ["math", "code"])
    assert "both teach the task 'code': a task has one teacher" in said
    (said,) = teacher_refusals(teachers, ["math"])
    assert "names 'code', which is no label of a task: the labels are 'math'" in said
