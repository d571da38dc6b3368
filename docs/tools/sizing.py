"""The table of sizes of `docs/howto/gpu.md`: the memory plan of the package for models and cards that are not here."""

from __future__ import annotations

from typing import Any

import torch
from transformers import Qwen2Config, Qwen3Config

from stretto.errors import RecipeError
from stretto.models.loading import load_config
from stretto.models.shapes import FOLDER
from stretto.recipe.reading import load_recipe
from stretto.recipe.schema import Recipe
from stretto.setup.counted_models import CountedModels, count_models
from stretto.setup.device import device_limit
from stretto.setup.memory import footprint
from stretto.setup.memory_sizes import engine_rows, longest_trajectory
from stretto.setup.micro_batch_size import with_micro_tokens
from stretto.setup.prefill_chunk_size import with_prefill_tokens

CARDS = (24, 48, 80, 141)  # GB, as they are sold
PROMPT, TOKENS = 256, 1024
CUDA = torch.device("cuda", 0)

MODELS: dict[str, Any] = {
    "0.5B (Qwen2.5)": Qwen2Config(
        vocab_size=151_936, hidden_size=896, intermediate_size=4_864, num_hidden_layers=24, num_attention_heads=14,
        num_key_value_heads=2, max_position_embeddings=32_768, tie_word_embeddings=True,
    ),
    "1.5B (Qwen2.5)": Qwen2Config(
        vocab_size=151_936, hidden_size=1_536, intermediate_size=8_960, num_hidden_layers=28, num_attention_heads=12,
        num_key_value_heads=2, max_position_embeddings=32_768, tie_word_embeddings=True,
    ),
    "1.7B (Qwen3)": Qwen3Config(
        vocab_size=151_936, hidden_size=2_048, intermediate_size=6_144, num_hidden_layers=28, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=40_960, tie_word_embeddings=True,
    ),
    "4B (Qwen3)": Qwen3Config(
        vocab_size=151_936, hidden_size=2_560, intermediate_size=9_728, num_hidden_layers=36, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=40_960, tie_word_embeddings=True,
    ),
    "8B (Qwen3)": load_config(str(FOLDER / "Qwen3-8B")),
}  # fmt: skip


def sizing_table() -> str:
    """Returns a Markdown table: what a model needs without KV, and how many answers decode at once on each card."""
    head = "| model | trained | " + " | ".join(f"{card} GB" for card in CARDS) + " |"
    lines = [head, "|---|---|" + "---|" * len(CARDS)]
    for name, config in MODELS.items():
        ways: dict[str, dict[str, Any]] = {
            "LoRA, rank 32": {"model.lora": {"rank": 32}},
            "all weights, `K = 1`, checkpointing": {"rollout.staleness": 1, "training.checkpointing": True},
        }
        for trained, overrides in ways.items():
            recipe = _recipe(overrides)
            counted = count_models(recipe, config, CUDA)
            rows = " | ".join(_rows(recipe, config, counted, card) for card in CARDS)
            lines.append(f"| {name} | {trained} | {rows} |")
    return "\n".join(lines) + "\n"


def _recipe(overrides: dict[str, Any]) -> Recipe:
    tables = {
        "model": {"path": "model"},
        "task": {"type": "file", "path": "rows.jsonl", "reward": "rewards:score"},
        "rollout": {"prompts": 32, "group": 8, "max_tokens": TOKENS},
    }
    return load_recipe(tables, overrides)


def _rows(recipe: Recipe, config: Any, counted: CountedModels, card: int) -> str:
    """Returns how many of the longest answers fit into the KV cache at once; `-` if the run is refused."""
    free = device_limit(card * 1e9 / (1 << 30))
    try:
        chosen = with_prefill_tokens(recipe, config, PROMPT, CUDA, counted=counted, free=free)
        chosen = with_micro_tokens(chosen, config, PROMPT, CUDA, counted=counted, free=free)
        plan = footprint(chosen, config, PROMPT, CUDA, counted=counted, free=free)
    except RecipeError:
        return "-"
    rows = plan.kv_tokens // longest_trajectory(chosen, PROMPT)
    return "all" if rows >= engine_rows(chosen) else str(rows)


if __name__ == "__main__":
    print(sizing_table())
