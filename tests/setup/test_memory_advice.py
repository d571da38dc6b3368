"""What is advised if a run does not fit: every number is said, and no option that cannot be enough."""

from typing import Any

import pytest
import torch
from transformers import Qwen3Config

from stretto.errors import RecipeError
from stretto.models.loading import load_config
from stretto.models.shapes import shape_folder
from stretto.recipe.reading import parse_recipe
from stretto.recipe.schema import Recipe
from stretto.setup.device import CUDA
from stretto.setup.memory import footprint
from stretto.setup.memory_advice import out_of_memory, remedies
from stretto.setup.memory_sizes import GIB

BILLIONS = Qwen3Config(
    vocab_size=151_936, hidden_size=2048, num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8,
    head_dim=128, intermediate_size=6144, max_position_embeddings=40_960, tie_word_embeddings=True,
)  # fmt: skip
"""The shapes of Qwen3-1.7B."""


def recipe(lora: bool = False, **sections: Any) -> Recipe:
    model = {"path": "tiny", **({"lora": {"rank": 8}} if lora else {})}
    return parse_recipe({"model": model, "task": {"type": "countdown-chain"}, **sections})


def test_where_two_of_the_longest_trajectories_do_not_fit_every_number_is_said() -> None:
    made = recipe(lora=True, rollout={"max_tokens": 30_000})
    with pytest.raises(RecipeError) as refused:
        footprint(made, BILLIONS, 1000, CUDA, free=24 * GIB)
    said = str(refused.value)
    for part in ("24.00 GiB of the device are free", "base 3.20 GiB", "versions ", "weight store ", "optimizer "):
        assert part in said, said
    for part in ("gradients ", "working (estimate) ", "engine ", "slack 1.20 GiB", "2 trajectories of up to 31,032"):
        assert part in said, said
    for option in ("Lower `rollout.rows`", "`rollout.max_tokens`", "`rollout.staleness`"):
        assert option in said, said
    assert "`training.micro_tokens`" not in said, "a micro-batch has one trajectory"
    wide = recipe(lora=True, rollout={"max_tokens": 30_000}, training={"micro_tokens": 65_536})
    with pytest.raises(RecipeError, match=r"Lower `training\.micro_tokens` \(now 65536\), `rollout\.rows`"):
        footprint(wide, BILLIONS, 1000, CUDA, free=24 * GIB)
    assert "`model.lora" not in said, "it has adapters already"
    with pytest.raises(RecipeError, match=r"train adapters, `model.lora = \{ rank = 16 \}`"):
        footprint(recipe(), BILLIONS, 1000, CUDA, free=24 * GIB)


def test_memory_that_runs_out_while_the_run_is_built_is_said_with_the_plan() -> None:
    made = recipe(lora=True)
    need = footprint(made, BILLIONS, 100, CUDA, free=140 * GIB)
    said = str(
        out_of_memory(made, need, 100, torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB\nmore"))
    )
    assert "CUDA out of memory. Tried to allocate 2.00 GiB)" in said
    assert "base 3.20 GiB" in said
    assert "`training.micro_tokens` (now 8192)" in said


@pytest.mark.parametrize("size", [40, 60])
def test_one_gpu_that_is_too_small_for_two_copies_of_the_weights_is_told_of_the_native_engine(size: int) -> None:
    config = load_config(str(shape_folder("Qwen/Qwen3-8B")))
    options: dict[str, Any] = {"rollout": {"max_tokens": 2048}, "training": {"micro_tokens": 2048}}

    def planned(**sections: Any) -> Any:
        made = recipe(lora=True, **{**options, **sections})
        return footprint(made, config, 2048, CUDA, free=size * GIB, here=False)

    with pytest.raises(RecipeError) as refused:
        planned(engine={"type": "vllm"})
    said = str(refused.value)
    assert ("The weights alone take 30.51 GiB, because the trainer and vLLM have a copy each" in said) == (size == 40)
    assert ("Lower `rollout.rows`" in said) == (size == 60), "what cannot be enough is not named"
    checkpointing = " with `training.checkpointing = true`" if size == 40 else ""
    assert said.endswith(f'. `engine.type = "native"` would fit{checkpointing}')
    planned(engine={"type": "native"}, training={"micro_tokens": 2048, "checkpointing": size == 40})


def test_a_staleness_of_0_is_not_to_be_lowered() -> None:
    assert "`rollout.staleness` (now 2: 3 versions)" in remedies(recipe(lora=True), 40)
    assert "`rollout.staleness_cap` (now 4: 5 versions)" in remedies(
        recipe(lora=True, rollout={"staleness": "auto"}), 40
    )
    for rollout in ({"staleness": 0}, {"paradigm": "synchronous"}, {"paradigm": "one-step-off"}):
        assert "staleness" not in remedies(recipe(lora=True, rollout=rollout), 40)


def test_changes_that_are_enough_alone_are_named_with_their_values() -> None:
    made = recipe(lora=True, rollout={"prompts": 32, "group": 8, "max_tokens": 512})
    enough = "Each of these alone is enough: "
    said = {}
    for gib in (8, 18):
        with pytest.raises(RecipeError) as refused:
            footprint(made, BILLIONS, 250, CUDA, free=gib * GIB)
        said[gib] = str(refused.value)
    assert enough not in said[8], "no change of one option is enough there"
    changes = said[18].partition(enough)[2]
    assert "`training.checkpointing = true`" in changes
    assert "`training.micro_tokens = 4096`" in changes
    for change in ({"checkpointing": True}, {"micro_tokens": 4_096}):
        footprint(
            recipe(lora=True, rollout={"prompts": 32, "group": 8, "max_tokens": 512}, training=change),
            BILLIONS,
            250,
            CUDA,
            free=18 * GIB,
        )
