"""The options of the objectives: which there are, what they refuse, and what they cost to import."""

import pkgutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import objective_cases
import pytest
import torch
from objective_cases import options_of, random_data
from pydantic import TypeAdapter, ValidationError

import stretto.objectives
from stretto.errors import RecipeError, TrainerError
from stretto.objectives import DEFAULT_TYPE, OBJECTIVES, AlgorithmOptions
from stretto.objectives.base import Anchor, ObjectiveOptions, RatioOptions
from stretto.recipe.key_reference import write_between_marks
from stretto.recipe.objective_reference import describe_objectives, own_options

SECTION = TypeAdapter(AlgorithmOptions)
DOCUMENT = Path(__file__).parents[2] / "docs" / "algorithms.md"


def needed(name):
    """The options that a recipe must set besides the type."""
    constant = OBJECTIVES[name].model_fields["average"].default == "constant"
    needs = {"average_tokens": 64} if constant else {}
    return needs | ({"function": "objective_cases:square"} if name == "custom" else {})


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


def test_a_constant_average_needs_its_divisor_and_no_other_has_one():
    assert "`algorithm.average_tokens` is missing" in refusal({"type": "dr-grpo"})["msg"]
    assert "`algorithm.average_tokens` is missing" in refusal({"type": "grpo", "average": "constant"})["msg"]
    assert OBJECTIVES["grpo"](average="constant", average_tokens=5).without_effect() == {}
    reason = OBJECTIVES["grpo"](average_tokens=5).without_effect()["average_tokens"]
    assert reason.startswith("`algorithm.average_tokens = 5` has no effect")


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_capped_correction_is_refused_where_the_formula_holds_the_weight_already(name):
    kind = OBJECTIVES[name]
    anchors = ["behaviour", "proximal"] if kind.model_fields.get("anchor", None) is not None else [None]
    if anchors != [None] and kind.model_fields["anchor"].annotation != Anchor:
        anchors = [kind.model_fields["anchor"].default]
    for anchor in anchors:
        raw = {"type": name, **needed(name)} | ({} if anchor is None else {"anchor": anchor})
        twice = name in ("decoupled-ppo", "dora") or (anchor == "behaviour" and name != "kimi")
        assert SECTION.validate_python(raw).corrects_off_policy is twice
        SECTION.validate_python({**raw, "correction": {"mode": "filter"}})
        if twice:
            message = refusal({**raw, "correction": {}})["msg"]
            assert "`algorithm.correction`" in message
            assert "twice" in message
        else:
            SECTION.validate_python({**raw, "correction": {}})


def test_a_truncated_weight_beside_a_ratio_that_holds_it_has_no_effect():
    options = options_of("dora", {"average_tokens": 8, "anchor": "behaviour", "weight_cap": 1.5})
    assert "`algorithm.weight_cap = 1.5` has no effect" in options.without_effect()["weight_cap"]
    assert "weight_cap" not in options_of("dora", {"average_tokens": 8}).without_effect()


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


def test_the_documentation_says_what_the_types_say(tmp_path):
    text = DOCUMENT.read_text(encoding="utf-8")
    copy = tmp_path / "algorithms.md"
    copy.write_text(text, encoding="utf-8")
    write_between_marks(copy, describe_objectives)
    brought_up = "`python -m stretto.recipe.objective_reference docs/algorithms.md` brings it up to date"
    assert copy.read_text(encoding="utf-8") == text, brought_up
    for name, kind in OBJECTIVES.items():
        assert f"## `{name}`" in text
        assert kind.when in text
    assert "| `algorithm.dual_clip` | number | none |" in text
