"""Recipes: what is read, what is refused, and in which words."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from stretto.environments.task_options import ScoredTaskOptions
from stretto.errors import RecipeError
from stretto.options import shown_variable
from stretto.recipe.error_messages import all_keys
from stretto.recipe.foreign_names import ELSEWHERE, OURS
from stretto.recipe.reading import load_recipe, parse_recipe
from stretto.recipe.schema import PARADIGM_NAMES, Recipe
from stretto.types import MAX_SUPPORT

MINIMAL: dict[str, Any] = {"model": {"path": "tiny"}, "task": {"type": "countdown-chain"}}
RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.toml"))


def with_(**sections: dict[str, Any]) -> dict[str, Any]:
    return {**MINIMAL, **sections}


@pytest.mark.parametrize(
    ("rollout", "expected"),
    [
        ({"staleness": 2}, 48),
        ({"staleness": "auto"}, 80),
        ({"staleness": "auto", "staleness_cap": 7}, 128),
        ({"paradigm": "partial", "staleness": 1}, 32),
        ({"paradigm": "drop", "staleness": 3}, 64),
    ],
)
def test_in_flight_full_is_as_many_groups_as_the_staleness_allows(rollout: dict[str, Any], expected: int) -> None:
    raw = {"model": {"path": "tiny"}, "task": {"type": "countdown-chain"}}
    made = parse_recipe({**raw, "rollout": {"prompts": 16, "in_flight": "full", **rollout}})
    assert made.plan.in_flight == expected
    assert parse_recipe(tomllib.loads(made.dumps())).plan == made.plan
    with pytest.raises(RecipeError, match=r"`rollout.in_flight = 'full'` has no effect"):
        parse_recipe({**raw, "rollout": {"in_flight": "full", "paradigm": "synchronous"}})
    with pytest.raises(RecipeError, match=r"`rollout.in_flight"):
        parse_recipe({**raw, "rollout": {"in_flight": "most"}})


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_shipped_recipe_parses_and_survives_being_written_out(path: Path) -> None:
    recipe = load_recipe(path)
    assert parse_recipe(tomllib.loads(recipe.source_toml())) == recipe


def test_twenty_lines_are_a_complete_run_and_the_rest_has_defaults() -> None:
    recipe = parse_recipe(MINIMAL)
    assert recipe.rollout.paradigm == "multi-version"
    assert recipe.plan.staleness == 2
    assert recipe.plan.in_flight == 24
    assert recipe.plan.rows == 16 * 8


def test_an_unknown_key_names_the_nearest_real_one() -> None:
    with pytest.raises(RecipeError, match=r"`rollout.stalenes` is not an option; did you mean `rollout.staleness`"):
        parse_recipe(with_(rollout={"stalenes": 2}))
    with pytest.raises(RecipeError, match=r"`model\.lora\.rnak` is not an option; did you mean `model\.lora\.rank`"):
        parse_recipe({**MINIMAL, "model": {"path": "tiny", "lora": {"rnak": 8}}})
    with pytest.raises(RecipeError, match=r"did you mean `task\.reward_seconds`"):
        parse_recipe({**MINIMAL, "task": {"type": "countdown-chain", "reward_second": 1.0}})
    with pytest.raises(RecipeError, match="`trainig` is not an option; did you mean `training`"):
        parse_recipe(with_(trainig={"steps": 2}))


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"rollout": {"paradigm": "synchronous", "staleness": 2}}, "`rollout.staleness = 2` has no effect"),
        ({"rollout": {"paradigm": "one-step-off", "in_flight": 20}}, "`rollout.in_flight = 20` has no effect"),
        ({"rollout": {"staleness_cap": 3}}, "`rollout.staleness_cap` has no effect"),
        ({"training": {"final_fraction": 0.1}}, "`training.final_fraction` has no effect"),
        ({"rollout": {"filter_limit": 3}}, "`rollout.filter_limit` has no effect"),
        ({"task": {"type": "countdown-chain", "pass_reward": 2.0}}, "`task.pass_reward` has no effect"),
        (
            {"rollout": {"paradigm": "synchronous"}, "training": {"replay": {"ratio": 0.25}}},
            "`training.replay` has no effect: under `synchronous` every group has reached its largest age",
        ),
        (
            {"rollout": {"paradigm": "one-step-off"}, "training": {"replay": {"ratio": 0.25}}},
            "`training.replay` has no effect: under `one-step-off` every group",
        ),
        (
            {"rollout": {"staleness": 0}, "training": {"replay": {"ratio": 0.25}}},
            "with `rollout.staleness = 0` a group is too old after its first update",
        ),
        ({"training": {"replay": {"ratio": 0.03}}}, "`training.replay.ratio = 0.03` of `rollout.prompts = 16` is less"),
        ({"rollout": {"filter": "no-signal", "group": 1}}, "`rollout.group = 1` would filter everything"),
        (
            {"rollout": {"filter": "no-signal"}, "algorithm": {"type": "grpo", "advantage": "whiten"}},
            '`rollout.filter = "no-signal"` is refused with `algorithm.advantage = "whiten"`',
        ),
        ({"evaluation": {"prompts": 0, "every": 5}}, "`evaluation.every` has no effect"),
        ({"evaluation": {"prompts": 0, "greedy": True}}, "`evaluation.greedy` has no effect"),
        (
            {"evaluation": {"temperature": 0, "greedy": True}},
            "`evaluation.greedy = true` has no effect with `evaluation.temperature = 0`, where every answer is greedy",
        ),
        (
            {"evaluation": {"every": 5}, "training": {"steps": 5}},
            "`evaluation.every = 5` has no effect in a run of `training.steps = 5`",
        ),
        (
            {"rollout": {"paradigm": "synchronous"}, "algorithm": {"clip_low": 0.1}},
            "`algorithm.clip_low` has no effect",
        ),
        ({"rollout": {"staleness": 0}, "algorithm": {"clip_high": 0.3}}, "`algorithm.clip_high` has no effect"),
        (
            {"model": {"path": "somewhere", "warm_start": {"steps": 3}}},
            "`model.warm_start` has no effect on `model.path = 'somewhere'`",
        ),
        (
            {"task": {"type": "guess"}, "serve": {"port": 8_000}},
            '`serve.port` has no effect with `task.type = "guess"`',
        ),
        (
            {"task": {"type": "agent", "path": "rows", "command": ["true"], "sandbox": {}}, "serve": {"host": "::"}},
            "`serve.host` has no effect with `task.sandbox`",
        ),
    ],
)
def test_a_key_without_effect_is_an_error(sections: dict[str, Any], words: str) -> None:
    with pytest.raises(RecipeError) as caught:
        parse_recipe(with_(**sections))
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"rollout": {"top_k": MAX_SUPPORT + 1}}, "`rollout.top_k"),
        ({"rollout": {"top_k": 1}}, "`rollout.top_k = 1` leaves nothing to learn from"),
        ({"rollout": {"stop": ["a", ""]}}, '`rollout.stop[1] = ""` must be a string that is not empty'),
        (
            {"rollout": {"rows": 193}, "runtime": {"device": "cpu"}},
            "`rollout.rows = 193` has no effect above 192",
        ),
        ({"rollout": {"rows": 193, "in_flight": 24}}, "`rollout.rows = 193` has no effect above 192"),
        (
            {"rollout": {"rows": 385}, "model": {"path": "tiny", "lora": {"rank": 4}}},
            "`rollout.rows = 385` has no effect above 384",
        ),
        ({"rollout": {"rows": 193}, "engine": {"type": "vllm"}}, "`rollout.rows = 193` has no effect above 192"),
        ({"rollout": {"kv_tokens": 271}}, "`rollout.kv_tokens = 271` is too small for one completion"),
        ({"training": {"steps": 5, "warmup_steps": 5}}, "`training.warmup_steps = 5` never ends"),
        (
            {"runtime": {"instances": 129, "device": "cpu"}},
            "`runtime.instances = 129` has no effect above `rollout.rows = 128`",
        ),
        (
            {"model": {"path": "tiny", "lora": {"rank": 4}}, "runtime": {"durable_versions": False}},
            "`runtime.durable_versions = false` has no effect with `model.lora`",
        ),
        ({"runtime": {"instances": 4, "slots": 4}}, "`runtime.slots = 4` has no effect above 3"),
        ({"runtime": {"instances": 2, "slots": 1}}, "hold 2 versions at once, and the run needs 3 (K = 2)"),
        ({"runtime": {"slots": 3}, "evaluation": {"every": 2}}, "the run needs 4, evaluation's included"),
        ({"runtime": {"trainers": 2}}, '`runtime.trainers` has no effect with `runtime.type = "local"`'),
        ({"runtime": {"instance_cpus": 0.5}}, "`runtime.instance_cpus` has no effect with `runtime.type"),
        ({"rollout": {"in_flight": 100}}, "in_flight"),
        ({"rollout": {"in_flight": 3}}, "in_flight"),
        ({"rollout": {"group": 1}}, "`rollout.group = 1`"),
        ({"rollout": {"temperature": 0.0}}, "`rollout.temperature = 0.0`"),
        ({"rollout": {"prefill_tokens": 8}}, '`rollout.prefill_tokens = 8` must be at least 16 or "auto"'),
        ({"training": {"learning_rate": -1.0}}, "`training.learning_rate = -1.0` must be more than 0"),
        ({"training": {"betas": [0.9, 1.0]}}, "`training.betas[1] = 1.0` must be less than 1"),
        ({"training": {"micro_token": 5}}, "`training.micro_token` is not an option; did you mean `training.micro_t"),
        ({"model": {"path": "tiny", "lora": {"rank": 0}}}, "`model.lora.rank = 0` must be at least 1"),
        ({"task": {"type": "guess", "size": 0}}, "`task.size = 0` must be at least 1"),
        ({"training": {"steps": "many"}}, '`training.steps = "many"` must be a whole number'),
        ({"task": {"type": "unheard-of"}}, '`task.type = "unheard-of"` must be one of'),
        ({"rollout": {"paradigm": "asynchronous"}}, '`rollout.paradigm = "asynchronous"` must be "synchronous"'),
        (
            {"runtime": {"type": "ray", "trainers": 2, "trainer_gpus": 0.5}},
            "`runtime.trainer_gpus = 0.5` with `runtime.trainers = 2`",
        ),
        (
            {"task": {"type": "agent", "path": "rows"}, "serve": {"url": "http://here:80"}},
            '`serve.url = "http://here:80"` leads nowhere with `serve.port = 0`',
        ),
        (
            {"task": {"type": "agent", "path": "rows"}, "serve": {"url": "here:80"}},
            '`serve.url = "here:80"` must begin with',
        ),
    ],
)
def test_what_cannot_be_run_is_refused_by_the_name_of_its_option(sections: dict[str, Any], words: str) -> None:
    with pytest.raises(RecipeError) as caught:
        parse_recipe(with_(**sections))
    assert words in str(caught.value)


def test_instances_of_few_slots_are_a_pool_that_holds_all_versions_together() -> None:
    recipe = parse_recipe(with_(runtime={"instances": 3, "slots": 1}))
    assert (recipe.num_slots, recipe.plan.slots) == (1, 3)
    assert parse_recipe(with_(runtime={"instances": 3})).num_slots == 3


def test_every_problem_is_told_at_once() -> None:
    with pytest.raises(RecipeError) as caught:
        parse_recipe(with_(rollout={"stalenes": 2}, training={"step": 3}))
    assert "stalenes" in str(caught.value)
    assert "training.step" in str(caught.value)


def test_an_option_with_several_kinds_of_values_is_told_on_one_line() -> None:
    with pytest.raises(RecipeError) as caught:
        parse_recipe(with_(rollout={"staleness": -1}))
    assert str(caught.value).splitlines()[1:] == ['  `rollout.staleness = -1` must be at least 0 or "auto"']


@pytest.mark.parametrize(
    ("rollout", "instead"),
    [
        ({"staleness": 0.5}, "`rollout.staleness = 1` with `rollout.in_flight = 24` (1.5 * `rollout.prompts`)"),
        ({"staleness": 2.25, "prompts": 8}, "`rollout.staleness = 3` with `rollout.in_flight = 26` (3.25 * "),
    ],
)
def test_a_ratio_of_other_systems_is_turned_into_staleness_and_in_flight(rollout: dict[str, Any], instead: str) -> None:
    with pytest.raises(RecipeError) as caught:
        parse_recipe(with_(rollout=rollout))
    (line,) = str(caught.value).splitlines()[1:]
    assert line.startswith(f'  `rollout.staleness = {rollout["staleness"]}` must be a whole number or "auto"; ')
    assert instead in line
    prompts = rollout.get("prompts", 16)
    made = re.findall(r"`rollout\.(\w+) = (\d+)`", line)
    parse_recipe(with_(rollout={"prompts": prompts, **{key: int(value) for key, value in made}}))


JUDGE = {"address": "http://host/v1", "model": "m", "prompt": "{completion}", "scale": [0, 10]}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"address": "host/v1"}, '`{table}.address = "host/v1"` must be an address that begins with `http://` or'),
        ({"api_key_env": "1A"}, '`{table}.api_key_env = "1A"` must be the name of an environment variable: letters'),
        ({"prompt_path": "q.txt"}, "set `{table}.prompt` or `{table}.prompt_path`, and not both"),
        ({"scale": [3, 3]}, "`{table}.scale = [3, 3]`: the lowest score comes first"),
        ({"scale": None}, "set `{table}.scale = [0, 10]` or `{table}.choices = {{ A = 1.0, B = 0.0 }}`, and not both"),
        ({"pattern": "("}, "`{table}.pattern` is not a regular expression"),
        ({"pattern": "a"}, "`{table}.pattern` has 0 groups, and needs one"),
        ({"budget": {}}, "`{table}.budget` limits nothing: set `calls`, `tokens` or `dollars`"),
        (
            {"budget": {"dollars": 3.0}},
            "`{table}.budget.dollars` needs both prices, `{table}.budget.input_price` and `{table}.budget.output_pri",
        ),
        ({"modle": "m"}, "`{table}.modle` is not an option; did you mean `task."),
    ],
)
@pytest.mark.parametrize("form", ["alone", "one of several", "of one of several tasks"])
def test_a_refused_option_of_a_judge_is_named_with_its_table(changes: dict[str, Any], said: str, form: str) -> None:
    judge, rows = {**JUDGE, **changes}, {"type": "file", "path": "rows.jsonl"}
    tables: dict[str, Any] = {
        "task.judge": {**rows, "judge": judge},
        "task.rewards[1].judge": {**rows, "rewards": [{"function": "a:b"}, {"judge": judge}]},
        "task.math.judge": [{"type": "guess", "label": "guess"}, {**rows, "label": "math", "judge": judge}],
    }
    table = list(tables)[["alone", "one of several", "of one of several tasks"].index(form)]
    with pytest.raises(RecipeError) as caught:
        parse_recipe(with_(task=tables[table]))
    assert said.format(table=table) in str(caught.value)
    assert "[^" not in str(caught.value), "no regular expression"


def test_the_keys_of_one_of_several_tasks_are_named_with_its_label() -> None:
    tasks: Any = [{"type": "guess", "label": "guess"}, {"type": "file", "label": "math", "reward": "a:b"}]
    with pytest.raises(RecipeError, match=r"`task\.math\.path` is missing: .* with `task\.math\.dataset = "):
        parse_recipe(with_(task=tasks))


@pytest.mark.parametrize("system", ["", "  "])
def test_an_empty_system_message_is_refused(system: str) -> None:
    task = {"type": "file", "path": "rows.jsonl", "reward": "a:b", "system": system}
    with pytest.raises(RecipeError, match=r"`task\.system` is empty: write the system message there, or leave it out"):
        parse_recipe(with_(task=task))


@pytest.mark.parametrize("sections", [{}, {"evaluation": {"prompts": 0}}, {"training": {"schedule": "cosine"}}])
@pytest.mark.parametrize("paradigm", PARADIGM_NAMES)
def test_what_is_written_out_whole_is_a_recipe_of_the_same_run(paradigm: str, sections: dict[str, Any]) -> None:
    recipe = parse_recipe(with_(rollout={"paradigm": paradigm}, **sections))
    again = parse_recipe(tomllib.loads(recipe.dumps()))
    assert again.plan == recipe.plan
    assert again.dumps() == recipe.dumps()
    assert again.model_dump() == recipe.model_dump()


def test_a_key_that_is_set_to_its_default_is_never_without_effect() -> None:
    off = parse_recipe(with_(evaluation={"prompts": 0, "every": 0}, training={"schedule": "constant"}))
    assert off.plan.evaluate_every == 0
    parse_recipe(with_(rollout={"paradigm": "synchronous"}, algorithm={"clip_low": 0.2}))


def test_a_seed_that_no_generator_takes_is_refused() -> None:
    assert parse_recipe({**MINIMAL, "seed": 2**63 - 1}).seed == 2**63 - 1
    with pytest.raises(RecipeError, match=r"`seed = 9223372036854775808` must be at most"):
        parse_recipe({**MINIMAL, "seed": 2**63})


def test_every_key_is_known_with_the_types_of_task_that_have_it() -> None:
    keys = all_keys(Recipe)
    assert keys["seed"] == keys["task.order"] == keys["model.lora.rank"] == ()
    assert keys["task.path"] == ("file", "environment", "agent")
    assert keys["task.size"] == ("countdown-chain", "reasoning-gym", "guess")
    assert keys["task.reward_seconds"] == ("countdown-chain", "reasoning-gym", "file", "agent")
    assert keys["task.turns"] == ("guess", "environment", "agent")


@pytest.mark.parametrize("names", [["OUR_KEY=secret"], [""], ["OUR KEY"], "OUR_KEY"])
def test_variables_to_pass_are_a_list_of_names(names: Any) -> None:
    recipe = parse_recipe({**MINIMAL, "task": {"type": "countdown-chain", "pass_env": ["OUR_KEY", "_other2"]}})
    assert isinstance(recipe.task, ScoredTaskOptions)
    assert recipe.task.pass_env == ("OUR_KEY", "_other2")
    with pytest.raises(RecipeError, match=r"`task\.pass_env"):
        parse_recipe({**MINIMAL, "task": {"type": "countdown-chain", "pass_env": names}})


def test_variables_to_pass_are_refused_where_no_reward_has_a_process() -> None:
    with pytest.raises(RecipeError, match=r"`task\.pass_env` is not an option here: .*this recipe has `guess`"):
        parse_recipe({**MINIMAL, "task": {"type": "guess", "pass_env": ["OUR_KEY"]}})


def test_the_rules_of_the_data_reach_the_plan() -> None:
    plan = parse_recipe(MINIMAL).plan
    assert (plan.filter_limit, plan.replay_groups, plan.replay_uses) == (0, 0, 0)
    asked = with_(rollout={"filter": "no-signal"}, training={"replay": {"ratio": 0.25, "uses": 2}})
    plan = parse_recipe(asked).plan
    assert (plan.filter_limit, plan.replay_groups, plan.replay_uses) == (160, 4, 2)
    assert parse_recipe(with_(rollout={"filter": "no-signal", "filter_limit": 7})).plan.filter_limit == 7
    assert parse_recipe(with_(rollout={"prompts": 6}, training={"replay": {"ratio": 0.25}})).plan.replay_groups == 2


WORDS_OF_PYDANTIC = ("input", "valid", "tuple", "dictionary", "instance", "integer", "NoneType", "should")


@pytest.mark.parametrize(
    "wrong", ["some text", "", -1, 10**30, 0.5, True, [], [1, "", [2]], {}, {"a": 1}, float("inf")]
)
def test_no_message_speaks_the_language_of_pydantic(wrong: Any) -> None:
    asked = 0
    for key, types in all_keys(Recipe).items():
        section, _, leaf = key.partition(".")
        raw: dict[str, Any] = {**MINIMAL, "algorithm": {"type": "grpo"}}
        if types:
            raw[section] = {**raw.get(section, {}), "type": types[0]}
        table = raw[section] = dict(raw.get(section, {})) if leaf else wrong
        for part in leaf.split(".")[:-1]:
            table = table.setdefault(part, {})
        if leaf:
            table[leaf.rpartition(".")[2]] = wrong
        try:
            parse_recipe(raw)
        except RecipeError as error:
            asked += 1
            said = str(error).replace("some text", "").replace("has no effect", "")
            assert not [word for word in WORDS_OF_PYDANTIC if word.lower() in said.lower().split()], said
    assert asked > 20


@pytest.mark.parametrize(
    ("section", "keys", "words"),
    [
        ("training", {"lr": 1e-6}, "`training.lr` is not an option; did you mean `training.learning_rate`?"),
        ("algorithm", {"beta": 0.1}, "`algorithm.beta` is not an option; did you mean `algorithm.kl.coefficient`?"),
        ("algorithm", {"epsilon": 0.2}, "did you mean `algorithm.clip_low` or `algorithm.clip_high`?"),
        ("rollout", {"n": 8}, "did you mean `rollout.group`?"),
        ("rollout", {"async_generation_ratio": 2}, "did you mean `rollout.staleness`?"),
        ("data", {"train_batch_size": 8}, "`data.train_batch_size` is not an option; did you mean `rollout.prompts`?"),
        ("data", {"max_prompt_length": 8}, "a prompt may be as long as the model's context leaves"),
        ("actor_rollout_ref", {"actor": {"optim": {"lr": 1e-6}}}, "`actor_rollout_ref.actor.optim.lr` is not an opt"),
    ],
)
def test_names_of_other_packages_are_understood(section: str, keys: dict[str, Any], words: str) -> None:
    with pytest.raises(RecipeError) as caught:
        parse_recipe(with_(**{section: keys}))
    assert words in str(caught.value)


def test_a_name_of_another_package_at_the_top_is_understood() -> None:
    with pytest.raises(RecipeError, match=r"`num_generations` is not an option; did you mean `rollout\.group`\?"):
        parse_recipe({**MINIMAL, "num_generations": 8})


def test_every_name_of_another_package_leads_to_an_option() -> None:
    known = {*all_keys(Recipe), *Recipe.model_fields}
    assert not {key for keys in OURS.values() for key in keys} - known
    assert not OURS.keys() & ELSEWHERE.keys()


def refused(**changes: Any) -> str:
    """Returns why a recipe with these tables is refused."""
    with pytest.raises(RecipeError) as caught:
        parse_recipe({"model": {"path": "tiny"}, "task": {"type": "countdown-chain"}, **changes})
    return str(caught.value)


def test_names_of_other_packages_that_are_no_option_of_ours_come_with_what_to_do() -> None:
    for mode in ("vllm_mode", "use_vllm"):
        assert '`engine.type = "vllm"`' in refused(rollout={mode: "colocate"})
    assert "did you mean `model.lora`?" in refused(model={"path": "tiny", "peft_config": 1})
    assert "scale the reward" in refused(task={"type": "countdown-chain", "reward_clip": 5})
    assert '`task.order = "pass-rate"`' in refused(algorithm={"difficulty_mask": True})
    assert "`algorithm.advantage`" in refused(algorithm={"norm_mean_type": "group"})
    assert "`rollout.filter`" in refused(algorithm={"query_filter_config": {"type": "mean"}})
    assert "penalize repetition in the reward" in refused(rollout={"repetition_penalty": 1.1})
    assert 'did you mean "dr-grpo"?' in refused(algorithm={"type": "dr_grpo"})


def test_a_value_of_one_of_several_tasks_is_refused_without_a_word_on_their_number() -> None:
    tasks = [{"type": "countdown-chain", "label": "a", "share": "70%"}, {"type": "guess", "label": "b", "share": "30%"}]
    lines = refused(task=tasks).splitlines()[1:]
    assert [line.strip() for line in lines] == [
        '`task.a.share = "70%"` must be a number',
        '`task.b.share = "30%"` must be a number',
    ]
    assert "`task = []` must be a list of at least 1 values" in refused(task=[])


def test_a_key_that_was_pasted_for_the_name_of_its_variable_is_not_shown() -> None:
    judge = {"address": "http://host/v1", "model": "m", "prompt": "{completion}", "scale": [0, 1]}
    file = {"type": "file", "path": "a.jsonl"}
    said = refused(task={**file, "judge": {**judge, "api_key_env": "sk-proj-secret1234"}})
    assert "`task.judge.api_key_env` must be the name of an environment variable" in said
    assert "secret" not in said
    assert "looks like a key" in shown_variable("AbCdEf0123456789abcdefABCDEF0123")
    assert "looks like a key" in shown_variable("hf_abcdefGHIJKLmnop")
    assert shown_variable("OPENAI_API_KEY") == "`OPENAI_API_KEY`"


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"training": {"steps": 10**300}}, "`training.steps = 100000...000000 (301 digits)` must be at most 10000000"),
        ({"rollout": {"retries": 10**12 + 1}}, "`rollout.retries = 1000000000001` must be at most 1000000000000"),
        ({"rollout": {"in_flight": 10**300}}, "`rollout.in_flight = 100000...000000 (301 digits)` must be at most"),
        ({"training": {"replay": {"ratio": 0.5, "uses": 10**300}}}, "`training.replay.uses = 100000...000000 (301"),
    ],
)
def test_no_integer_is_larger_than_a_journal_can_hold(sections: dict[str, Any], words: str) -> None:
    with pytest.raises(RecipeError) as caught:
        parse_recipe(with_(**sections))
    assert words in str(caught.value)


def test_an_integer_with_a_bound_of_its_own_has_no_other() -> None:
    assert parse_recipe({**MINIMAL, "seed": 2**63 - 1}).seed == 2**63 - 1
    assert parse_recipe(with_(training={"steps": 10**12})).training.steps == 10**12


@pytest.mark.parametrize(
    ("task", "words"),
    [
        ({"workers": 0, "worker_gib": 2.0}, "`task.worker_gib` has no effect with `task.workers = 0`"),
        ({"workers": 0, "sandbox": {}}, "`task.sandbox` has no effect with `task.workers = 0`"),
        ({"sandbox": {}, "pass_env": ["KEY"]}, "would hand these variables to the code in `task.sandbox`"),
        ({"workers": -1}, "`task.workers = -1`"),
        ({"episode_seconds": 0.0}, "`task.episode_seconds = 0.0`"),
        ({"budget": -1.0}, "`task.budget = -1.0`"),
    ],
)
def test_options_of_worker_processes_that_cannot_be_are_refused(task: dict[str, Any], words: str) -> None:
    given = {"type": "environment", "path": "p.jsonl", "environment": "m:C", "turns": 2, **task}
    with pytest.raises(RecipeError) as caught:
        parse_recipe({"model": {"path": "tiny"}, "task": given})
    assert words in str(caught.value)


# -- redundancy --------------------------------------------------------------------------------------------------------


def with_redundancy(redundancy: dict[str, int], **rollout: object) -> Recipe:
    table = {"prompts": 32, "group": 8, "redundancy": redundancy, **rollout}
    return parse_recipe({"model": {"path": "tiny"}, "task": {"type": "countdown-chain"}, "rollout": table})


@pytest.mark.parametrize("paradigm", ["synchronous", "one-step-off", "partial", "multi-version"])
def test_redundancy_starts_more_groups_and_members(paradigm: str) -> None:
    plan = with_redundancy({"groups": 36, "members": 9}, paradigm=paradigm).plan
    assert (plan.reserve_groups, plan.reserve_members, plan.members, plan.rows) == (4, 1, 9, 36 * 9)
    assert with_redundancy({"members": 9}).plan.reserve_groups == 0
    assert with_redundancy({"groups": 33}).plan.members == 8


@pytest.mark.parametrize(
    ("redundancy", "rollout", "said"),
    [
        ({"groups": 32, "members": 8}, {}, "`rollout.redundancy` has no effect: it starts no more than the 32 groups"),
        ({}, {}, "`rollout.redundancy` has no effect: it starts no more than the 32 groups of 8"),
        ({"groups": 31}, {}, "`rollout.redundancy.groups = 31` is less than `rollout.prompts = 32`"),
        ({"groups": 36, "members": 7}, {}, "`rollout.redundancy.members = 7` is less than `rollout.group = 8`"),
        ({"groups": 36}, {"paradigm": "drop"}, "`rollout.redundancy` has no effect under `drop`"),
        ({"groups": 36}, {"rows": 500, "in_flight": 48}, "`rollout.rows = 500` has no effect above 416"),
    ],
)
def test_redundancy_that_does_nothing_or_cannot_be_is_refused(
    redundancy: dict[str, int], rollout: dict[str, object], said: str
) -> None:
    with pytest.raises(RecipeError, match=re.escape(said)) as caught:
        with_redundancy(redundancy, **rollout)
    assert "reserve" not in str(caught.value), "a name of the core's"


@pytest.mark.parametrize(
    ("in_flight", "said"),
    [
        (3, "`rollout.in_flight` is 3; it must be at least 16, which is `rollout.prompts`: an update takes"),
        (99, "lower `rollout.in_flight` or raise `rollout.staleness`"),
    ],
)
def test_the_options_of_a_plan_are_refused_by_their_names_in_a_recipe(in_flight: int, said: str) -> None:
    with pytest.raises(RecipeError, match=re.escape(said)):
        parse_recipe(with_(rollout={"in_flight": in_flight}))


def test_redundancy_is_written_to_the_configuration_and_read_again() -> None:
    made = with_redundancy({"groups": 36, "members": 9})
    assert parse_recipe(tomllib.loads(made.dumps())).plan == made.plan


def test_a_written_recipe_has_the_endpoint_only_if_something_calls_it() -> None:
    assert "[serve]" not in parse_recipe(with_()).dumps()
    agent = parse_recipe(with_(task={"type": "agent", "path": "rows"}, serve={"port": 8_000}))
    assert parse_recipe(tomllib.loads(agent.dumps())).serve == agent.serve


ROWS = {"type": "file", "reward": "rewards:score"}


@pytest.mark.parametrize(
    ("task", "pattern"),
    [
        ({}, r"`task.path` is missing: name a file of rows there, or a data set of the hub with `task.dataset"),
        ({"path": "a.csv", "dataset": {"name": "a/b"}}, r"`task.path` and `task.dataset` are both given"),
        (
            {"path": "a.csv", "evaluation_path": "b.csv", "evaluation_dataset": {"name": "a/b"}},
            r"`task.evaluation_path` and `task.evaluation_dataset` are both given",
        ),
        ({"path": []}, r"`task.path` is an empty list"),
        ({"path": 3}, r"`task.path = 3` must be a string in quotes or a list"),
        ({"path": ["a.csv", 3]}, r"`task.path\[1\] = 3` must be a string in quotes"),
        ({"dataset": {"config": "main"}}, r"`task.dataset.name` is missing"),
        ({"dataset": "openai/gsm8k"}, r"`task.dataset` is a table, not a value"),
        ({"path": "a.csv", "columns": {"prompt": 3}}, r"`task.columns.prompt = 3` must be a string in quotes"),
        ({"dataset_name": "openai/gsm8k", "path": "a.csv"}, r"did you mean `task.dataset.name`\?"),
        ({"train_files": "a.csv", "path": "a.csv"}, r"did you mean `task.path`\?"),
        (
            {"path": "a.csv", "columns": {"completion": "a"}},
            r"`task.columns.completion`: the name `completion` is reserved .* `task.columns = { answer = \"a\" }`",
        ),
        ({"prompt_key": "q", "path": "a.csv"}, r"did you mean `task.columns`\?"),
        ({"filter_overlong_prompts": True, "path": "a.csv"}, r"did you mean `task.too_long`\?"),
        ({"max_prompt_length": 9, "path": "a.csv"}, r"`task.too_long` says what becomes of longer ones"),
    ],
)
def test_rows_have_one_source_that_is_named_as_ours_is(task, pattern):
    with pytest.raises(RecipeError, match=pattern):
        parse_recipe({"model": {"path": "tiny"}, "task": {**ROWS, **task}})


def test_held_out_rows_of_a_data_set_have_no_effect_without_evaluation():
    task = {**ROWS, "path": "a.csv", "evaluation_dataset": {"name": "a/b"}}
    parse_recipe({"model": {"path": "tiny"}, "task": task})
    with pytest.raises(RecipeError, match=r"`task.evaluation_dataset` has no effect with `evaluation.prompts = 0`"):
        parse_recipe({"model": {"path": "tiny"}, "task": task, "evaluation": {"prompts": 0}})


def test_files_and_a_data_set_survive_being_written():
    for source in ({"path": ["a.csv", "b/*.csv"]}, {"dataset": {"name": "a/b", "split": "train[:9]"}}):
        recipe = parse_recipe({"model": {"path": "tiny"}, "task": {**ROWS, **source, "template": {"x": [1, "a"]}}})
        assert parse_recipe(tomllib.loads(recipe.dumps())) == recipe
