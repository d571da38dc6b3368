"""The tables of sizes of `docs/howto/gpu.md`: the memory plan of the package for models and cards that are not here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2Config, Qwen3Config

from stretto.errors import RecipeError
from stretto.models.loading import load_config
from stretto.models.shapes import FOLDER
from stretto.recipe.reading import load_recipe
from stretto.recipe.schema import Recipe
from stretto.setup.chosen_sizes import with_chosen_sizes
from stretto.setup.counted_models import CountedModels, count_models
from stretto.setup.device import device_limit, resolved
from stretto.setup.memory import footprint
from stretto.setup.memory_sizes import engine_rows, longest_trajectory
from stretto.setup.micro_batch_size import with_micro_tokens
from stretto.setup.prefill_chunk_size import with_prefill_tokens

CARDS = (24, 48, 80, 141)  # GB, as they are sold
PROMPT, TOKENS = 256, 1024
CUDA = torch.device("cuda", 0)
RECIPES = {"recipes/gsm8k-small.toml": "0.5B (Qwen2.5)", "recipes/gsm8k.toml": "1.5B (Qwen2.5)"}
RECIPE_CARDS = (10, 12, 16, 22, 32, 48)  # GiB
STEP = 0.5  # GiB, between the sizes that are tried for the least one

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


def recipes_table(cards: Sequence[int] = RECIPE_CARDS) -> str:
    """Returns a Markdown table: the rows and the tokens of KV that the recipes of GSM8K have on each card."""
    sizes = [name.partition(" ")[0] for name in RECIPES.values()]
    head = "| memory | " + " | ".join(f"{size}: rows | {size}: tokens of KV" for size in sizes) + " |"
    lines = [head, "|---" * (1 + 2 * len(sizes)) + "|"]
    planned = [PlannedRecipe(path) for path in RECIPES]
    for card in cards:
        cells = (f"{found[0]} | {found[1]:,}" if (found := each.on(card)) else "- | -" for each in planned)
        lines.append(f"| {card} GiB | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def least_memory_table() -> str:
    """Returns a Markdown table: the least memory that the recipes of GSM8K fit into."""
    head = "| recipe | least memory | least memory with `training.checkpointing = true` |"
    lines = [head, "|---|---|---|"]
    for path, name in RECIPES.items():
        least = (PlannedRecipe(path).least(), PlannedRecipe(path, {"training.checkpointing": True}).least())
        lines.append(f"| `{path}` ({name.partition(' ')[0]}) | " + " | ".join(f"{each:g} GiB" for each in least) + " |")
    return "\n".join(lines) + "\n"


class PlannedRecipe:
    """A recipe of this repository, planned for cards that are not here."""

    def __init__(self, path: str, overrides: dict[str, Any] | None = None) -> None:
        self._recipe = resolved(load_recipe(Path(__file__).parents[2] / path, overrides or {}), CUDA)
        self._config = MODELS[RECIPES[path]]
        self._counted = count_models(self._recipe, self._config, CUDA)

    def on(self, gib: float) -> tuple[int, int] | None:
        """Returns the rows and the tokens of KV on a card of so many GiB; None if the recipe does not fit."""
        free = device_limit(gib)
        chosen = with_chosen_sizes(self._recipe, self._config, PROMPT, CUDA, counted=self._counted, free=free)
        try:
            plan = footprint(chosen, self._config, PROMPT, CUDA, counted=self._counted, free=free)
        except RecipeError:
            return None
        return chosen.plan.rows, plan.kv_tokens

    def least(self) -> float:
        """Returns the least GiB that the recipe fits into, in steps of `STEP`."""
        gib = STEP
        while self.on(gib) is None:
            gib += STEP
        return gib


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
