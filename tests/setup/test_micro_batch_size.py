"""The size of a micro-batch that memory has room for."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, Qwen2Config

from stretto.errors import RecipeError
from stretto.recipe.reading import parse_recipe
from stretto.recipe.schema import Recipe
from stretto.setup.device import CONTEXT_GIB, CUDA, as_begun, device_limit, resolved
from stretto.setup.memory import footprint
from stretto.setup.memory_sizes import GIB, engine_rows, longest_trajectory
from stretto.setup.micro_batch_size import SIZES, describe_micro_tokens, with_micro_tokens

CPU = torch.device("cpu")
QWEN = {
    "vocab_size": 151_936, "hidden_size": 1536, "num_hidden_layers": 28, "num_attention_heads": 12,
    "num_key_value_heads": 2, "intermediate_size": 8960, "tie_word_embeddings": True,
}  # fmt: skip
QWEN_1_5B = Qwen2Config(**QWEN)
QWEN_0_5B = Qwen2Config(
    **{**QWEN, "hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14, "intermediate_size": 4864}
)
SMOLLM2_135M = LlamaConfig(
    vocab_size=49_152, hidden_size=576, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3,
    intermediate_size=1536, tie_word_embeddings=True,
)  # fmt: skip
PROMPT = 250  # tokens of the longest prompt of GSM8K


def recipe(lora: bool = True, micro_tokens: int | str = "auto", **sections: Any) -> Recipe:
    model: dict[str, Any] = {"path": "tiny"}
    if lora:
        model["lora"] = {"rank": 32}
    rollout = {"prompts": 64, "group": 8, "max_tokens": 512, "staleness": 2, **sections.pop("rollout", {})}
    return parse_recipe(
        {
            "model": model, "task": {"type": "countdown-chain"}, "rollout": rollout,
            "training": {"micro_tokens": micro_tokens}, **sections,
        }
    )  # fmt: skip


def chosen(made: Recipe, config: Any, free_gib: float) -> Recipe:
    return with_micro_tokens(made, config, PROMPT, CUDA, free=int(free_gib * GIB))


def described(asked: Recipe, made: Recipe) -> str:
    (line,) = describe_micro_tokens(asked, made, PROMPT)
    return line


def test_a_large_device_has_large_micro_batches_and_every_row_its_cache() -> None:
    made = chosen(recipe(), QWEN_1_5B, 139)
    assert made.training.micro_tokens == 32_768
    need = footprint(made, QWEN_1_5B, PROMPT, CUDA, free=139 * GIB)
    assert need.kv_tokens == engine_rows(made) * longest_trajectory(made, PROMPT)


def test_a_small_model_has_larger_ones() -> None:
    assert chosen(recipe(), SMOLLM2_135M, 139).training.micro_tokens == 131_072


@pytest.mark.parametrize(("config", "lora"), [(QWEN_1_5B, True), (QWEN_0_5B, False)], ids=["1.5B LoRA", "0.5B full"])
def test_a_card_of_24_gb_is_planned_for(config: Any, lora: bool) -> None:
    free = device_limit(22) / GIB
    # Every version of full weights is on the device twice: in its slot, and for instances that join.
    whole = parse_recipe(
        {
            "model": {"path": "tiny"}, "task": {"type": "countdown-chain"}, "training": {"checkpointing": True},
            "rollout": {"paradigm": "synchronous", "prompts": 32, "group": 8, "max_tokens": 512},
        }
    )  # fmt: skip
    made = chosen(recipe(lora) if lora else whole, config, free)
    assert made.training.micro_tokens in SIZES
    need = footprint(made, config, PROMPT, CUDA, free=int(free * GIB))
    assert need.total <= free * GIB
    assert need.kv_tokens >= 128 * longest_trajectory(made, PROMPT), "rows enough to be worth it"


def test_more_memory_never_makes_them_smaller() -> None:
    sizes = [chosen(recipe(), QWEN_1_5B, free).training.micro_batch_tokens for free in (16, 22, 30, 44, 78, 139, 190)]
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[-1]


def test_they_are_no_larger_than_the_batch_needs() -> None:
    asked = recipe(rollout={"prompts": 2, "group": 4})
    made = chosen(asked, SMOLLM2_135M, 139)
    assert made.training.micro_tokens == 8_192  # eight trajectories of up to 794 tokens
    assert described(asked, made) == (
        "`training.micro_tokens = 8192` (auto): it holds the whole batch, which has at most 6,352 tokens"
    )


def test_a_batch_has_all_lineages_of_its_episodes() -> None:
    task = {"type": "agent", "path": "rows.jsonl", "function": "agents:solve", "lineages": 4}
    asked = recipe(task=task, rollout={"prompts": 2, "group": 4})
    assert asked.max_lineages == 4
    assert chosen(asked, SMOLLM2_135M, 139).training.micro_tokens == 32_768


def test_a_cache_of_very_long_contexts_keeps_its_share() -> None:
    long = chosen(recipe(rollout={"max_tokens": 8_000}), SMOLLM2_135M, 139)
    assert long.training.micro_batch_tokens < 131_072
    need = footprint(long, SMOLLM2_135M, PROMPT, CUDA, free=139 * GIB)
    assert need.kv > need.working


def test_a_number_and_a_cpu_are_left_alone() -> None:
    named = recipe(micro_tokens=1234)
    assert chosen(named, QWEN_1_5B, 139) is named
    assert with_micro_tokens(recipe(), QWEN_1_5B, PROMPT, CPU).training.micro_tokens == "auto"
    assert resolved(recipe(), CPU).training.micro_tokens == 8_192


def test_a_resumed_run_keeps_the_number_that_it_began_with(tmp_path: Path) -> None:
    begun = chosen(resolved(recipe(), CUDA), QWEN_1_5B, 139)
    (tmp_path / "config.toml").write_text(begun.dumps())
    assert as_begun(recipe(), tmp_path).training.micro_tokens == 32_768
    assert as_begun(recipe(micro_tokens=77), tmp_path).training.micro_tokens == 77


def test_what_was_chosen_is_said() -> None:
    asked = recipe()
    said = "`training.micro_tokens = {}` (auto): {}"
    assert described(asked, chosen(asked, QWEN_1_5B, 139)) == said.format(
        32_768, "the most that leaves KV enough memory"
    )
    assert described(asked, chosen(asked, SMOLLM2_135M, 139)) == said.format(131_072, "the largest")
    assert described(asked, chosen(asked, QWEN_1_5B, 12)) == said.format(2_048, "the smallest")
    assert describe_micro_tokens(asked, asked, PROMPT) == []


def test_a_limit_is_for_gpus_alone() -> None:
    limited = recipe(runtime={"device_gib": 22})
    with pytest.raises(RecipeError, match=r"`runtime.device_gib = 22` has no effect on the CPU.* --devices 1x22GiB`"):
        resolved(limited, CPU)
    assert resolved(limited, CUDA).runtime.device_gib == 22
    assert device_limit(22) == int((22 - CONTEXT_GIB) * GIB)


@pytest.mark.parametrize(("free", "tokens"), [(139, 3_300_000), (78, 1_800_000), (44, 900_000)])
def test_a_cache_that_the_recipe_names_always_fits(free: int, tokens: int) -> None:
    made = chosen(recipe(rollout={"kv_tokens": tokens}), QWEN_1_5B, free)
    assert footprint(made, QWEN_1_5B, PROMPT, CUDA, free=free * GIB).kv_tokens == tokens


def test_on_a_cluster_it_does_not_follow_the_memory_of_the_driver() -> None:
    asked = recipe(runtime={"type": "ray"})
    made = chosen(asked, QWEN_1_5B, 139)
    assert made.training.micro_tokens == 8_192
    assert described(asked, made) == "`training.micro_tokens = 8192` (auto): on a cluster it does not follow the memory"
