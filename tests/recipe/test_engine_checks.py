"""The engine of a recipe: what vLLM cannot serve is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stretto.errors import RecipeError
from stretto.recipe.reading import load_recipe, parse_recipe
from stretto.recipe.schema import Recipe

LORA = {"path": "tiny", "lora": {"rank": 8}}


def recipe_of(**sections: Any) -> Recipe:
    base: dict[str, Any] = {"model": LORA, "task": {"type": "countdown-chain"}, "engine": {"type": "vllm"}}
    return parse_recipe({**base, **sections})


def test_the_native_engine_is_the_default_and_vllm_serves_adapters() -> None:
    assert parse_recipe({"model": {"path": "tiny"}, "task": {"type": "countdown-chain"}}).engine.type == "native"
    made = recipe_of()
    assert made.num_slots == made.plan.slots == 3


@pytest.mark.parametrize(
    ("sections", "told"),
    [
        ({"rollout": {"paradigm": "partial"}}, '`rollout.paradigm = "partial"` is refused'),
        ({"rollout": {"top_p": 0.9}}, "`rollout.top_p = 0.9` is refused"),
        ({"rollout": {"min_p": 0.1}}, "`rollout.min_p = 0.1` is refused"),
        ({"rollout": {"temperature": 2.5}}, "`rollout.temperature = 2.5` is refused"),
        ({"evaluation": {"temperature": 2.5}}, "`evaluation.temperature = 2.5` is refused"),
        ({"rollout": {"temperature": 0.005}}, "`rollout.temperature = 0.005` is refused"),
        ({"evaluation": {"temperature": 1e-9}}, "`evaluation.temperature = 1e-09` is refused"),
        ({"model": {"path": "tiny", "lora": {"rank": 1024}}}, "`model.lora.rank = 1024` is refused"),
        ({"runtime": {"deterministic": True}}, "`runtime.deterministic = true` is refused"),
        ({"engine": {"type": "vllm", "tensor_parallel": 2}}, "`engine.tensor_parallel = 2` needs a cluster"),
        ({"engine": {"tensor_parallel": 2}}, "`engine.tensor_parallel` has no effect"),
        (
            {"engine": {"type": "vllm", "tensor_parallel": 2}, "runtime": {"type": "ray", "instance_gpus": 1}},
            "`runtime.instance_gpus = 1` is less than `engine.tensor_parallel = 2`",
        ),
        (
            {"runtime": {"type": "ray", "instance_gpus": 2}},
            "`runtime.instance_gpus = 2` is more than the 1 that an instance uses",
        ),
        (
            {"engine": {"type": "native"}, "runtime": {"type": "ray", "trainer_gpus": 2}},
            "`runtime.trainer_gpus = 2` is more than the 1 that a rank uses",
        ),
        ({"engine": {"gpu_memory": 0.5}}, "`engine.gpu_memory` has no effect"),
        ({"engine": {"type": "sglang"}}, "`engine.type"),
        ({"model": {"path": "tiny"}}, "an instance holds one version of full weights, and the run needs 3 at once"),
        (
            {"model": {"path": "tiny"}, "runtime": {"instances": 3, "slots": 2}},
            "`runtime.slots = 2` has no effect",
        ),
    ],
)
def test_what_vllm_cannot_serve_is_refused_by_name(sections: dict[str, Any], told: str) -> None:
    with pytest.raises(RecipeError) as raised:
        recipe_of(**sections)
    assert told in str(raised.value)


def test_an_instance_may_reserve_the_gpus_that_it_is_cut_over() -> None:
    made = recipe_of(engine={"type": "vllm", "tensor_parallel": 2}, runtime={"type": "ray", "instance_gpus": 2})
    assert made.runtime.instance_gpus == 2


@pytest.mark.parametrize("more", [{}, {"top_p": 0.9}, {"min_p": 0.1}])
def test_truncated_sampling_is_served_with_a_top_k(more: dict[str, float]) -> None:
    assert recipe_of(rollout={"top_k": 20, **more}).rollout.top_k == 20


def test_full_weights_need_an_instance_for_each_version() -> None:
    made = recipe_of(model={"path": "tiny"}, runtime={"instances": 3})
    assert made.num_slots == 1
    assert recipe_of(model={"path": "tiny"}, rollout={"paradigm": "synchronous"}).num_slots == 1


FULL: dict[str, Any] = {"path": "tiny"}
EVALUATED = {"every": 5}


@pytest.mark.parametrize(
    ("sections", "advice"),
    [
        ({"rollout": {"paradigm": "synchronous"}, "evaluation": EVALUATED}, ["evaluation.every = 0"]),
        ({"rollout": {"staleness": 1}}, ["rollout.staleness = 0"]),
        ({"rollout": {"staleness": 0}, "evaluation": EVALUATED}, ["evaluation.every = 0"]),
        ({"rollout": {"staleness": 2}, "evaluation": EVALUATED}, ["rollout.staleness = 0", "evaluation.every = 0"]),
    ],
)
def test_versions_that_are_too_many_can_be_lowered_as_the_error_says(
    sections: dict[str, Any], advice: list[str]
) -> None:
    with pytest.raises(RecipeError) as raised:
        recipe_of(model=FULL, **sections)
    said = str(raised.value)
    set_to = " and ".join(f"set `{each}`" for each in advice)
    assert f", {set_to}, or train adapters" in said
    assert ("staleness" in said) == any("staleness" in each for each in advice), "nothing that is 0 can be lowered"
    assert ("one more to evaluate" in said) == ("evaluation" in sections)
    overrides = [each.replace(" = ", "=") for each in advice]
    tables = {"model": FULL, "task": {"type": "countdown-chain"}, "engine": {"type": "vllm"}} | sections
    assert load_recipe(tables, overrides).plan.slots == 1


def test_a_staleness_that_is_enough_is_named_and_one_that_the_paradigm_fixes_is_not() -> None:
    several = {"model": FULL, "runtime": {"instances": 3}}
    with pytest.raises(RecipeError, match=r"instances, lower `rollout.staleness` to at most 2, or train"):
        recipe_of(**several, rollout={"staleness": 7})
    with pytest.raises(RecipeError, match=r"instances, lower `rollout.staleness_cap` to at most 2, or train"):
        recipe_of(**several, rollout={"staleness": "auto"})
    with pytest.raises(RecipeError, match=r"use at least 2 instances, or train adapters"):
        recipe_of(model=FULL, rollout={"paradigm": "one-step-off"})


@pytest.mark.parametrize("name", ["tiny-moe", "Qwen/Qwen3-30B-A3B", "folder"])
def test_a_mixture_of_experts_is_refused_before_too_few_instances(tmp_path: Path, name: str) -> None:
    if name == "folder":
        (tmp_path / "config.json").write_text(json.dumps({"text_config": {"num_local_experts": 4}}))
        name = str(tmp_path)
    with pytest.raises(RecipeError, match="a mixture of experts") as raised:
        recipe_of(model={"path": name})
    assert "runtime.instances" not in str(raised.value)


@pytest.mark.parametrize("text", [None, "{", "[]", '{"num_experts": null}', '{"num_experts": 1}'])
def test_a_model_that_is_not_known_as_a_mixture_is_told_of_instances(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(RecipeError, match=r"`runtime.instances = 1` is too few"):
        recipe_of(model={"path": str(tmp_path)})
