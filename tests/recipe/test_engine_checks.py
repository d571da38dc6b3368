"""The engine of a recipe: what vLLM cannot serve is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from stretto.errors import RecipeError
from stretto.recipe.reading import parse_recipe
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
