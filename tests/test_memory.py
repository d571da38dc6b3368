"""What a run is told to need in memory, against what its parts hold."""

from typing import Any

import pytest

from stretto.config import Recipe, parse_recipe
from stretto.runtime.memory import footprint, kv_tokens
from stretto.tiny import tiny_config


def recipe(dtype: str, lora: bool = False, **rollout: Any) -> Recipe:
    model: dict[str, Any] = {"path": "tiny", "dtype": dtype}
    if lora:
        model["lora"] = {"rank": 4}
    return parse_recipe({"model": model, "task": {"type": "countdown-chain"}, "rollout": rollout})


def test_keys_and_values_are_float32_whatever_the_weights_are() -> None:
    need = {dtype: footprint(recipe(dtype), tiny_config(), 16) for dtype in ("float32", "bfloat16")}
    assert need["float32"].kv == need["bfloat16"].kv
    assert need["float32"].base == 2 * need["bfloat16"].base


def test_full_training_in_bfloat16_has_masters_moments_and_gradients_in_float32() -> None:
    plain, half = (footprint(recipe(dtype), tiny_config(), 16) for dtype in ("float32", "bfloat16"))
    assert (plain.trained, half.trained) == (0, plain.base)
    assert half.optimizer == plain.optimizer == 2 * plain.base
    assert half.gradients == plain.gradients == plain.base


@pytest.mark.parametrize("lora", [True, False])
def test_the_weight_store_has_a_copy_of_every_live_version(lora: bool) -> None:
    made = recipe("bfloat16", lora, staleness=3)
    need = footprint(made, tiny_config(), 16)
    assert made.num_slots == 4
    assert need.store * 4 == need.versions * 5


def test_the_cache_has_room_for_the_longest_completion_of_evaluation() -> None:
    raw = {"model": {"path": "tiny"}, "task": {"type": "countdown-chain"}, "rollout": {"rows": 1, "max_tokens": 8}}
    made = parse_recipe({**raw, "evaluation": {"prompts": 1, "max_tokens": 500}})
    assert kv_tokens(made, tiny_config(), 16) >= 516
