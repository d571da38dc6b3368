"""The sizes that memory decides are chosen together: each beside those before it."""

import torch
from transformers import Qwen2Config

from stretto.recipe.reading import parse_recipe
from stretto.recipe.schema import Recipe
from stretto.setup.chosen_sizes import with_chosen_sizes
from stretto.setup.counted_models import count_models
from stretto.setup.device import CUDA, resolved
from stretto.setup.memory_sizes import GIB
from stretto.setup.micro_batch_size import with_micro_tokens
from stretto.setup.prefill_chunk_size import with_prefill_tokens
from stretto.setup.rollout_rows import with_rows

CPU = torch.device("cpu")
CONFIG = Qwen2Config(
    vocab_size=151_936, hidden_size=896, num_hidden_layers=24, num_attention_heads=14, num_key_value_heads=2,
    intermediate_size=4864, tie_word_embeddings=True,
)  # fmt: skip
PROMPT = 250  # tokens of the longest prompt


def recipe(device: torch.device) -> Recipe:
    made = parse_recipe(
        {
            "model": {"path": "tiny", "lora": {"rank": 32}},
            "task": {"type": "countdown-chain"},
            "rollout": {"prompts": 64, "group": 8, "max_tokens": 512},
        }
    )
    return resolved(made, device)


def test_a_gpu_has_fewer_rows_than_by_default_and_sizes_beside_them() -> None:
    asked, free = recipe(CUDA), 24 * GIB
    made = with_chosen_sizes(asked, CONFIG, PROMPT, CUDA, counted=count_models(asked, CONFIG, CUDA), free=free)
    rows = with_rows(asked, CONFIG, PROMPT, CUDA, free=free)
    prefill = with_prefill_tokens(rows, CONFIG, PROMPT, CUDA, free=free)
    micro = with_micro_tokens(prefill, CONFIG, PROMPT, CUDA, free=free)
    assert made.plan.rows == rows.plan.rows < asked.plan.rows
    assert made.rollout.prefill_tokens == prefill.rollout.prefill_tokens != "auto"
    assert made.training.micro_tokens == micro.training.micro_tokens != "auto"


def test_a_cpu_leaves_the_recipe_as_it_is() -> None:
    asked = recipe(CPU)
    assert with_chosen_sizes(asked, CONFIG, PROMPT, CPU) == asked
