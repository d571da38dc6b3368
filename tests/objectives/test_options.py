"""The options of the objectives: which there are, what they refuse, and what they cost to import."""

import pkgutil
import subprocess
import sys
from pathlib import Path
from typing import get_args

import numpy as np
import objective_cases
import pytest
import torch
from objective_cases import options_of, random_data
from pydantic import TypeAdapter, ValidationError

import stretto.objectives
from stretto.errors import RecipeError, TrainerError
from stretto.objectives import DEFAULT_TYPE, OBJECTIVES, AlgorithmOptions
from stretto.objectives.base import ObjectiveOptions, RatioOptions
from stretto.recipe.objective_reference import describe_objectives, own_options

SECTION = TypeAdapter(AlgorithmOptions)
DOCUMENT = Path(__file__).parents[2] / "docs" / "algorithms.md"


def needed(name):
    """The options that a recipe must set besides the type."""
    return {"function": "objective_cases:square"} if name == "custom" else {}


def anchors_of(name):
    """The anchors that an objective may have; None if it has no ratio."""
    field = OBJECTIVES[name].model_fields.get("anchor")
    return (None,) if field is None else get_args(field.annotation)


def refusal(raw):
    with pytest.raises(ValidationError) as caught:
        SECTION.validate_python(raw)
    (problem,) = caught.value.errors()
    return problem


def test_every_objective_is_a_file_of_its_name_and_the_default_comes_first():
    files = {module.name for module in pkgutil.iter_modules(stretto.objectives.__path__)}
    assert next(iter(OBJECTIVES)) == DEFAULT_TYPE == "grpo"
    for name, kind in OBJECTIVES.items():
        assert name.replace("-", "_") in files
        assert kind.__module__ == f"stretto.objectives.{name.replace('-', '_')}"
        assert kind.model_fields["type"].default == name


@pytest.mark.parametrize("name", OBJECTIVES)
def test_an_objective_says_what_it_is_when_to_use_it_and_what_each_option_means(name):
    kind = OBJECTIVES[name]
    assert kind.formula
    assert kind.when.endswith(".")
    assert kind.__doc__ != ObjectiveOptions.__doc__
    for option, field in kind.model_fields.items():
        assert option == "type" or field.description, option
    assert set(kind.ratio_options) <= set(own_options(kind))


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_type_alone_chooses_the_objective_and_its_table_parses_again(name):
    chosen = SECTION.validate_python({"type": name, **needed(name)})
    assert type(chosen) is OBJECTIVES[name]
    assert SECTION.validate_python(chosen.model_dump(exclude_none=True)) == chosen


def test_without_a_type_it_is_the_default_one():
    assert SECTION.validate_python({"clip_low": 0.1}) == OBJECTIVES["grpo"](clip_low=0.1)


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        ("grpo", "dual_clip", 1.0),
        ("grpo", "dual_clip", 0.5),
        ("grpo", "clip_low", -0.1),
        ("grpo", "clip_low", 1.0),
        ("grpo", "clip_high", -0.2),
        ("grpo", "clip_high", 0.0),
        ("grpo", "clip_high", float("nan")),
        ("grpo", "clip_high", "0.2"),
        ("grpo", "average", "batch"),
        ("grpo", "average_tokens", 0),
        ("grpo", "advantage", "critic"),
        ("grpo", "anchor", "reference"),
        ("grpo", "tau", 0.1),
        ("dapo", "clip_high", -0.28),
        ("dr-grpo", "dual_clip", 1.0),
        ("reinforce", "cap", 0.9),
        ("reinforce", "level", "segment"),
        ("rloo", "cap", 0.0),
        ("reinforce-plus-plus", "clip_low", 0.0),
        ("gspo", "clip_low", -3e-4),
        ("cispo", "clip_low", 1.1),
        ("cispo", "clip_high", -1.0),
        ("cispo", "mask", "yes"),
        ("tis", "cap", 0.9),
        ("topr", "positive_weight", -1.0),
        ("topr", "negative_weight", -1.0),
        ("topr", "cap", 0.5),
        ("decoupled-ppo", "weight_cap", 0.5),
        ("decoupled-ppo", "anchor", "behaviour"),
        ("kimi", "tau", 0.0),
        ("dora", "weight_cap", 0.0),
        ("dora", "dual_clip", 1.0),
        ("hispo", "sequence_bound", 0.0),
        ("hispo", "token_bound", -0.1),
        ("hispo", "anchor", "proximal"),
        ("hispo", "anchor", "behaviour"),
        ("topr", "level", "segment"),
        ("grpo", "whiten_over", "group"),
        ("grpo", "mask_truncated", 1),
        ("grpo", "mask_older_tokens", "yes"),
        ("ppo", "advantage", "group"),
        ("naive", "clip_low", 0.2),
        ("naive", "anchor", "behaviour"),
    ],
)
def test_a_value_that_cannot_be_is_refused_under_its_name(name, option, value):
    problem = refusal({"type": name, **needed(name), option: value})
    assert problem["loc"] == (name, option)


def test_an_unknown_type_is_answered_with_those_that_there_are():
    message = refusal({"type": "grop"})["msg"]
    assert all(f"'{name}'" in message for name in OBJECTIVES)


@pytest.mark.parametrize("name", [name for name, kind in OBJECTIVES.items() if not kind.uses_critic])
def test_a_critic_is_refused_where_there_is_none(name):
    message = refusal({"type": name, **needed(name), "advantage": "gae"})["msg"]
    assert '`algorithm.advantage = "gae"` needs a critic' in message
    assert f'"{name}"' in message


def test_a_constant_average_may_leave_its_divisor_to_the_trainer_and_no_other_has_one():
    for options in (OBJECTIVES["dr-grpo"](), OBJECTIVES["grpo"](average="constant")):
        assert (options.average, options.average_tokens) == ("constant", None)
        assert "average_tokens" not in options.without_effect()
    assert "average_tokens" not in OBJECTIVES["grpo"](average="constant", average_tokens=5).without_effect()
    reason = OBJECTIVES["grpo"](average_tokens=5).without_effect()["average_tokens"]
    assert reason.startswith("`algorithm.average_tokens = 5` has no effect")


def test_samples_are_whitened_over_something_only_where_they_are_whitened():
    reason = OBJECTIVES["grpo"](whiten_over="version").without_effect()["whiten_over"]
    assert reason.startswith('`algorithm.whiten_over = "version"` has no effect')
    assert "whiten_over" not in OBJECTIVES["grpo"](advantage="whiten", whiten_over="version").without_effect()


def test_dora_and_hispo_sum_their_losses_and_anchor_on_the_version_that_sampled():
    for name in ("dora", "hispo"):
        options = OBJECTIVES[name]()
        assert (options.average, options.anchor) == ("constant", "sampled")
    assert anchors_of("hispo") == ("sampled",)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_capped_weight_is_refused_where_the_formula_holds_it_already(name):
    """The engine's share of it is the discrepancy, that of age the staleness; the correction is both."""
    for anchor in anchors_of(name):
        raw = {"type": name, **needed(name)} | ({} if anchor is None else {"anchor": anchor})
        weighted = anchor is not None and name != "kimi"  # whose ratio is a distance, and no weight
        by_age = weighted and (anchor in ("behaviour", "sampled") or name in ("decoupled-ppo", "dora"))
        by_engine = weighted and (anchor == "behaviour" or name in ("decoupled-ppo", "dora", "hispo"))
        plain = SECTION.validate_python(raw)
        assert (plain.corrects_off_policy, plain.corrects_discrepancy) == (by_age, by_engine), anchor
        for table, twice in (
            ("correction", by_age),
            ("staleness_correction", by_age),
            ("discrepancy_correction", by_engine),
        ):
            SECTION.validate_python({**raw, table: {"mode": "filter"}})
            if twice:
                message = refusal({**raw, table: {}})["msg"]
                assert f"`algorithm.{table}`" in message
                assert "twice" in message
            else:
                SECTION.validate_python({**raw, table: {}})


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_version_that_sampled_is_scored_only_for_an_objective_that_uses_it(name):
    for anchor in anchors_of(name):
        raw = {"type": name, **needed(name)} | ({} if anchor is None else {"anchor": anchor})
        assert SECTION.validate_python(raw).needs_sampled is (anchor == "sampled")
        filtered = {"mode": "filter"}
        assert not SECTION.validate_python(raw).needs_turns
        for table in ("discrepancy_correction", "staleness_correction"):
            assert SECTION.validate_python({**raw, table: filtered}).needs_sampled
        assert SECTION.validate_python({**raw, "correction": filtered}).needs_sampled is (anchor == "sampled")
        for table in ("correction", "discrepancy_correction", "staleness_correction"):
            assert SECTION.validate_python({**raw, table: {**filtered, "level": "turn"}}).needs_turns


def test_a_correction_is_whole_or_in_its_two_parts():
    both = {"discrepancy_correction": {"high": 1.5}, "staleness_correction": {"mode": "filter"}}
    options = SECTION.validate_python({"anchor": "proximal", **both})
    assert options.corrections == (None, options.discrepancy_correction, options.staleness_correction)
    for name, part in both.items():
        message = refusal({"anchor": "proximal", "correction": {}, name: part})["msg"]
        assert "`algorithm.correction` is the product of `algorithm.discrepancy_correction`" in message


@pytest.mark.parametrize("table", ["correction", "discrepancy_correction", "staleness_correction"])
def test_a_refused_weight_is_named_by_its_table(table):
    message = refusal({"anchor": "proximal", table: {"level": "segment"}})["msg"]
    assert f"`algorithm.{table}.segment_tokens` is missing" in message


def test_a_truncated_weight_beside_a_ratio_that_holds_it_has_no_effect():
    options = options_of("dora", {"anchor": "behaviour", "weight_cap": 1.5})
    assert "`algorithm.weight_cap = 1.5` has no effect" in options.without_effect()["weight_cap"]
    for anchor in ("sampled", "proximal"):
        assert "weight_cap" not in options_of("dora", {"anchor": anchor}).without_effect()


def test_only_objectives_with_a_ratio_have_options_that_act_through_it():
    for kind in OBJECTIVES.values():
        assert bool(kind.ratio_options) is issubclass(kind, RatioOptions)


def test_importing_the_objectives_does_not_import_torch():
    check = "import sys, stretto.objectives, stretto.recipe.objective_reference; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


# -- an objective of the user's own ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("objective_cases.square", "write `package.module:function`"),
        ("objective_cases:", "write `package.module:function`"),
        ("no_such_module:square", "there is no module `no_such_module`"),
        ("objective_cases:sqare", "did you mean `square`?"),
        ("objective_cases:NUMBER", "cannot be called"),
        ("objective_cases:too_few", "cannot be called with (tokens, options): it is defined as `too_few(tokens)`"),
    ],
)
def test_a_function_that_cannot_be_an_objective_is_refused_when_the_recipe_is_read(function, said):
    message = refusal({"type": "custom", "function": function})["msg"]
    assert f'`algorithm.function = "{function}"`' in message
    assert said in message


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("one_number", r"returned the loss with shape \[\]; return one number for each token, \[\d+\]"),
        ("loss_alone", r"returned Tensor; return \(loss, diagnostics\)"),
        ("two_tensors", r"returned tuple; return \(loss, diagnostics\), a tensor and a dict"),
        ("long_diagnostic", "returned scale with no shape"),
        ("detached", r"returned a loss without a gradient by `tokens\.logprobs`"),
        ("doubled", r"returned the loss as float64; `tokens\.logprobs` is float32: .*`loss\.to\(tokens"),
        ("not_a_number", r"returned a loss of nan for token 0, whose log-probability is -[\d.]+ .*; return finite num"),
        ("numbered", "returned a diagnostic with the name 1"),
    ],
)
def test_what_a_function_returns_is_checked_and_the_function_named(function, said):
    options = options_of("custom", {"function": f"objective_cases:{function}"})
    line = getattr(objective_cases, function).__code__.co_firstlineno
    message = f"`objective_cases:{function}` \\(objective_cases.py:{line}\\) {said}"
    with pytest.raises(TrainerError, match=message):
        options.loss(random_data(0).tokens(torch.float32))
    with pytest.raises(RecipeError, match=f"fails on a made-up batch: {message}"):
        options.try_out()


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("raising", r"raised KeyError: 'factor' \(objective_cases.py:{}\)"),
        ("raising_in_torch", r"raised .*\(obj.*:{}\)"),
        ("exiting", r"raised SystemExit: 0 \(objective_cases.py:{}\)"),
    ],
)
def test_a_function_that_raises_is_named_with_its_own_line(function, said):
    options = options_of("custom", {"function": f"objective_cases:{function}"})
    said = said.format(getattr(objective_cases, function).__code__.co_firstlineno + 1)
    with pytest.raises(TrainerError, match=f"`objective_cases:{function}` {said}"):
        options.loss(random_data(0).tokens())
    with pytest.raises(RecipeError, match=f"made-up batch: `objective_cases:{function}` {said}"):
        options.try_out()


def test_a_gradient_that_is_not_finite_is_blamed_on_the_function():
    options = options_of("custom", {"function": "objective_cases:steep"})
    losses, _ = options.loss(random_data(0).tokens())
    with pytest.raises(
        TrainerError, match=r"`objective_cases:steep` \(.*\) returned finite losses whose gradient .*nan"
    ):
        losses.sum().backward()


def test_numbers_that_were_not_finite_before_the_function_are_not_blamed_on_it():
    options = options_of("custom", {"function": "objective_cases:square", "options": {"scale": 1.0}})
    data = random_data(0)
    data.behaviour[2] = np.inf
    losses, _ = options.loss(data.tokens())
    assert not torch.isfinite(losses).all()


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("in_place", "returned a loss whose gradient cannot be computed: .*modified by an inplace operation"),
        ("of_another_leaf", "returned a loss without a gradient"),
    ],
)
def test_a_loss_that_cannot_be_trained_on_is_refused_when_it_is_tried(function, said):
    with pytest.raises(RecipeError, match=f"made-up batch: `objective_cases:{function}` \\(.*\\) {said}"):
        options_of("custom", {"function": f"objective_cases:{function}"}).try_out()


@pytest.mark.parametrize("function", ["square", "drawing"])
def test_a_function_that_works_is_tried_without_a_trace(function):
    before = torch.random.get_rng_state()
    options_of("custom", {"function": f"objective_cases:{function}", "options": {"scale": 2.0}}).try_out()
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_function_gets_the_scores_under_the_version_that_sampled_where_it_asks_for_them():
    asking = options_of("custom", {"function": "objective_cases:stale_ratio", "sampled": True})
    assert asking.needs_sampled
    asking.try_out()
    with pytest.raises(RecipeError, match=r"objective_cases:stale_ratio.*None without `algorithm.sampled = true`"):
        options_of("custom", {"function": "objective_cases:stale_ratio"}).try_out()


def test_a_function_may_lie_in_the_working_directory(tmp_path, monkeypatch):
    (tmp_path / "objective_lying_here.py").write_text(
        "def objective(tokens, options):\n    return -tokens.logprobs * options['factor'], {}\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    options = options_of("custom", {"function": "objective_lying_here:objective", "options": {"factor": 3.0}})
    tokens = random_data(0).tokens()
    assert options.loss(tokens)[0].tolist() == (-3.0 * tokens.logprobs).tolist()


# -- the documentation -------------------------------------------------------------------------------------------------


def test_the_documentation_says_what_the_types_say():
    text = DOCUMENT.read_text(encoding="utf-8")
    assert describe_objectives() in text, "run `make reference`"
    for name, kind in OBJECTIVES.items():
        assert f"## `{name}`" in text
        assert kind.when in text
    assert "| `algorithm.dual_clip` | number | none |" in text
