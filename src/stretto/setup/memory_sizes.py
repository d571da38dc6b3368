"""The size of each thing that a run keeps in memory, in bytes, from the model's configuration and the recipe.

Nothing is allocated; parameters were counted on the meta device (`parameter_counts.py`). Activations and the engine's
buffers are estimates; `tests/setup/test_memory.py` compares them with what the parts really hold.
"""

from __future__ import annotations

from typing import Any

import torch

from stretto.engines.native.cache import PAGE
from stretto.engines.native.prefill import CHUNKS as PREFILL_CHUNKS
from stretto.engines.native.prefill import SIZES as PREFILL_SIZES
from stretto.models.float32_products import HALF
from stretto.models.routing import is_mixture, shape_of_config
from stretto.recipe.schema import Recipe
from stretto.setup.parameter_counts import ParameterCounts
from stretto.training.logprobs import CHUNK_ELEMENTS, CHUNK_ELEMENTS_TRAINED_HEAD

GIB = 1 << 30
ENGINE_BYTES = 2 * GIB  # graphs, workspaces of libraries, plans of attention
STOCK_FACTORS = (1.4, 2.0)  # stock modules against the lean decoder: in float32, and in half precision
EAGER_FACTOR = 1.5  # attention of the lean decoder that is not compiled, against one that is
TRUNCATION_BYTES = 60  # for each logit, to sample from a part of the vocabulary: sorted values and places, sums
SPARE_TOKENS = 32  # beside prompt and completion: pages that are not full


def context_length(config: Any) -> int:
    """Returns the longest prompt plus completion that the model was made for."""
    return int(getattr(config, "max_position_embeddings", 1 << 20))


def head_size(config: Any) -> int:
    """Returns the size of one attention head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def longest_trajectory(recipe: Recipe, longest_prompt: int) -> int:
    """Returns the most tokens that one trajectory may need in the cache."""
    return longest_prompt + max(recipe.rollout.max_tokens, recipe.evaluation.max_tokens or 0) + SPARE_TOKENS


def engine_rows(recipe: Recipe) -> int:
    """Returns the rows of one instance: twice its share of the rollout's target, and some for evaluation beside it.

    Trajectories are not spread evenly over versions, so an instance may have to take more than its share, but never
    more than the whole target.
    """
    rows = min(recipe.plan.rows, 2 * -(-recipe.plan.rows // recipe.runtime.instances))
    return rows + min(recipe.num_answers, max(8, rows // 4))


def batch_rows(recipe: Recipe) -> int:
    """Returns the trajectories that are started for one update."""
    plan = recipe.plan
    return (plan.batch + plan.reserve_groups) * plan.members


def wanted_kv_tokens(recipe: Recipe, one: int) -> int:
    """Returns the KV tokens that the rows of an instance should have. `one` is the length of the longest trajectory.

    Trajectories of one batch may start together and reach their longest together. If there are more rows, the others
    began at other times, and are half grown on average.
    """
    rows = engine_rows(recipe)
    beyond = min(rows, max(0, recipe.plan.rows - batch_rows(recipe)))
    return (rows - beyond) * one + beyond * one // 2


def kv_copies(recipe: Recipe, config: Any) -> int:
    """Returns how often an instance has the keys and values of a token: more devices than heads hold some twice."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return max(1, recipe.engine.tensor_parallel // int(heads))


def kv_bytes_per_token(config: Any, dtype: torch.dtype = torch.float32, *, records_routing: bool) -> int:
    """Returns the bytes of keys and values of one token over all layers. On the CPU they are always float32.

    With `records_routing`, the record of a token's routing is kept beside them.
    """
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    routing = shape_of_config(config) if records_routing else None
    record = 0 if routing is None else routing.bytes_per_token
    return int(2 * config.num_hidden_layers * heads * head_size(config) * dtype.itemsize) + record


def scored_ahead_bytes(recipe: Recipe) -> int:
    """Returns the size of the float32 values for each completion token that are computed before the first step.

    The passes that compute them need less than training: one micro-batch at a time, and no backward pass.
    """
    algorithm, plan = recipe.algorithm, recipe.plan
    values = (recipe.training.optimizer_steps > 1) + 2 * algorithm.uses_critic + (algorithm.kl is not None)
    rows = (plan.batch + plan.replay_groups) * plan.group_size * recipe.max_lineages
    tokens = rows * recipe.rollout.max_tokens
    return values * tokens * torch.float32.itemsize


def micro_batch_tokens(recipe: Recipe, longest: int) -> int:
    """Returns the tokens of the largest micro-batch: at least one whole lineage, at most a batch of them."""
    return min(max(recipe.training.micro_batch_tokens, longest), batch_tokens(recipe, longest))


def batch_tokens(recipe: Recipe, longest: int) -> int:
    """Returns the most tokens of a batch whose lineages have up to `longest` tokens."""
    return recipe.rollout.prompts * recipe.rollout.group * recipe.max_lineages * longest


def holds_several(recipe: Recipe, longest_prompt: int) -> bool:
    """True if a smaller `training.micro_tokens` needs less memory: a micro-batch has more than one trajectory."""
    return recipe.training.micro_batch_tokens > longest_trajectory(recipe, longest_prompt)


def activation_bytes(
    config: Any,
    tokens: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    packed: bool,
    trains_head: bool,
    checkpointing: bool,
    adapts_experts: bool = False,
) -> int:
    """Estimates what a micro-batch of so many tokens needs between its forward and its backward pass.

    A layer keeps, in elements a token: its input, the stream after attention and both norms (4 widths); queries, keys
    and values before and after their rotation, and the output of attention; gate, up and their product. The backward
    pass of one layer has as much again in gradients. `packed` is the lean decoder with flash attention: compiled, it
    keeps that to within 2 %, with adapters and without. The stock modules keep 1.2 to 1.4 times as many elements, in
    half precision many of them in float32. With `checkpointing` every layer keeps its input alone.

    Of a mixture of experts, the kernels on CUDA, in bfloat16, keep gate and up for each of a token's experts
    (`models/expert_kernels.py`). Without them, which is so with adapters on experts, each expert keeps what a
    feed-forward layer keeps, its input, and its output in float32. On a CPU attention is not compiled, and keeps more.
    """
    width, size = config.hidden_size, head_size(config)
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    dense = getattr(config, "intermediate_size", None) or 4 * width
    mixture = is_mixture(config)
    stream = 2 if packed and dtype in HALF else 1  # the lean decoder's is float32
    factor = STOCK_FACTORS[dtype != torch.float32]
    if packed:
        factor = EAGER_FACTOR if mixture and device.type != "cuda" else 1.0
    feed_forward, of_experts_backward = factor * 3 * dense, 0
    if mixture:
        inner, wide = getattr(config, "moe_intermediate_size", None) or dense, 2 if dtype in HALF else 1
        of_expert = (1 + wide) * width + (3 + 2 * wide) * inner
        if packed and device.type == "cuda" and dtype == torch.bfloat16 and not adapts_experts:
            feed_forward, of_expert = 0.0, 2 * inner
            of_experts_backward = config.num_experts_per_tok * (2 * width + 2 * inner)  # beside as much as is kept
        shared = getattr(config, "shared_expert_intermediate_size", None) or 0
        feed_forward = max(feed_forward, config.num_experts_per_tok * of_expert + factor * 3 * shared)
    layer = int(factor * ((2 + 2 * stream) * width + (3 * heads + 4 * kv_heads) * size) + feed_forward)
    layers = config.num_hidden_layers
    kept = layers * stream * width + layer if checkpointing else layers * layer
    ends = 4 * width  # embedding, last norm, directions or their gradient
    total = tokens * (kept + layer + of_experts_backward + ends) * dtype.itemsize
    chunks = CHUNK_ELEMENTS_TRAINED_HEAD if trains_head else CHUNK_ELEMENTS
    logits = min(chunks[device.type], tokens * config.vocab_size)
    total += 2 * logits * torch.float32.itemsize
    if trains_head:
        total += config.vocab_size * width * torch.float32.itemsize  # the head's gradient, summed over chunks
    return int(total)


def engine_bytes(recipe: Recipe, config: Any, counts: ParameterCounts, dtype: torch.dtype) -> int:
    """Estimates the buffers of one instance on CUDA: graphs, and what grows with rows, prefills and the context."""
    rows, rollout = engine_rows(recipe), recipe.rollout
    # Captured steps keep their buffers, those of each module tree in a separate pool.
    pools = recipe.num_slots if recipe.model.lora is None else 1
    logits = (pools + 2) * rows * config.vocab_size * torch.float32.itemsize  # gathered, and sampled from
    prefill = (rollout.prefill_chunk_tokens + rows) * 4 * min(counts.widest, 1 << 15) * dtype.itemsize
    # Captured prefills keep what a layer makes of each token, and the logits of finished prompts.
    largest = next((size for size in PREFILL_SIZES if size >= rollout.prefill_chunk_tokens), PREFILL_SIZES[-1])
    captured = largest * 6 * counts.widest_inner * dtype.itemsize
    captured += PREFILL_CHUNKS * config.vocab_size * torch.float32.itemsize
    prefill += pools * captured
    tables = context_length(config) * (2 * head_size(config) + rows // PAGE) * torch.float32.itemsize
    truncation = 0
    if rollout.top_k > 0 or rollout.top_p < 1.0 or rollout.min_p > 0.0:
        truncation = (pools + 1) * rows * config.vocab_size * TRUNCATION_BYTES  # one more for the first draws
    return int(ENGINE_BYTES + logits + prefill + tables + truncation)


def gib(num_bytes: int) -> str:
    """Returns a size as text."""
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB // 10 else f"{num_bytes / (1 << 20):.1f} MiB"
