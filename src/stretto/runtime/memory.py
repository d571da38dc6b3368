"""What a run will need in memory, told before anything starts.

On CUDA the KV cache gets what the rest leaves. Free memory, less:

| purpose       | bytes                                                                                            |
|---------------|--------------------------------------------------------------------------------------------------|
| base          | the parameters, once: engine and trainer share them; matrices of the layers again for every      |
|               | instance but one, because on CUDA those of an instance lie in one block with its adapters        |
| versions      | a slot each, of every instance: adapters, or a whole set of weights                              |
| weight store  | a copy of every live version, and of the one that is being published                             |
| trained       | float32 adapters and their rounded copies, or float32 masters                                    |
| optimizer     | AdamW's two averages, float32                                                                    |
| gradients     | float32; with full half-precision weights those of one backward pass too                         |
| undo          | a copy of what is stepped and its averages, where an update has several steps or a critic        |
| working       | activations and logits of a micro-batch, or a checkpoint's copy of the trainer: never both; what |
|               | the passes before the first step leave of each token                                             |
| engine        | captured graphs, workspaces, logits of every row, and what sorts them where `rollout` truncates  |
| slack         | what the allocator cannot use                                                                    |

Versions, engine and KV are those of all instances that share the device. Activations are an estimate. Where it is too
low, an update runs out of memory and the engines give KV back (`runtime/roles.py`); where it is too high, the cache is
smaller than it could be.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from stretto.config import Recipe
from stretto.engines.native.cache import PAGE
from stretto.engines.native.fused import has_kernels
from stretto.engines.native.lean import is_plain
from stretto.engines.native.prefill import CHUNKS as PREFILL_CHUNKS
from stretto.engines.native.prefill import SIZES as PREFILL_SIZES
from stretto.errors import RecipeError
from stretto.models import load_config
from stretto.runtime.device import choose_device, choose_dtype, describe_device
from stretto.training import decoder
from stretto.training.logprobs import CHUNK_ELEMENTS, CHUNK_ELEMENTS_TRAINED_HEAD
from stretto.training.lora import inject_lora
from stretto.training.sharding import SHARDED_FROM
from stretto.training.varlen import HALF, flash_fits

GIB = 1 << 30
UNBOUNDED = 1 << 60  # bytes that are free where only what is needed is asked for
KV_BYTES_BY_DEFAULT = 4 * GIB  # cap of the KV cache on the CPU, where the recipe does not name one
ENGINE_BYTES = 2 * GIB  # graphs, libraries' workspaces, plans of attention
SLACK_SHARE = 0.05  # of the memory that is free at the start
STOCK_FACTORS = (1.4, 2.0)  # what stock modules keep against the lean decoder: in float32, and in half precision
CUT_BYTES = 60  # a logit, to draw from a part of the distribution: values and places sorted, scratch, sums in float64
SPARE_TOKENS = 32  # beside prompt and completion: pages that are not full
LEAST_TRAJECTORIES = 2  # of the longest kind that must fit at once; with one alone nothing is ever batched


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes by purpose."""

    base: int
    versions: int
    store: int
    trained: int  # 0 where it is the base itself that is stepped
    reference: int  # a second model, where a divergence is measured against one
    undo: int  # a copy of what is stepped, while an update of several steps, or with a critic, may still fail
    optimizer: int
    gradients: int
    working: int
    engine: int
    slack: int
    kv: int  # of all instances here
    kv_tokens: int  # of one

    @property
    def total(self) -> int:
        return self.without_kv + self.kv

    @property
    def without_kv(self) -> int:
        return sum(num_bytes for _, num_bytes in self._purposes())

    def _purposes(self) -> Iterator[tuple[str, int]]:
        yield "base", self.base
        yield "versions", self.versions
        yield "weight store", self.store
        yield "trained", self.trained
        yield "reference", self.reference
        yield "undo", self.undo
        yield "optimizer", self.optimizer
        yield "gradients", self.gradients
        yield "working (estimate)", self.working
        yield "engine", self.engine
        yield "slack", self.slack

    def __str__(self) -> str:
        return ", ".join(f"{name} {gib(num_bytes)}" for name, num_bytes in self._purposes() if num_bytes)


def context_length(config: Any) -> int:
    """The longest prompt plus completion that the model was made for."""
    return int(getattr(config, "max_position_embeddings", 1 << 20))


def kv_bytes_per_token(config: Any, dtype: torch.dtype = torch.float32) -> int:
    """Bytes of keys and values of one token over all layers; on the CPU float32, whatever the type of the weights."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return int(2 * config.num_hidden_layers * heads * _head_size(config) * dtype.itemsize)


def engine_rows(recipe: Recipe) -> int:
    """Rows of one instance: twice its share of the rollout's target, and some for the evaluation that runs beside it.

    Trajectories are not spread evenly over versions, so that an instance may have to take more than its share; more
    than the whole target never runs.
    """
    rows = min(recipe.plan.rows, 2 * -(-recipe.plan.rows // recipe.runtime.instances))
    return rows + (min(recipe.evaluation.prompts, max(8, rows // 4)) if recipe.evaluation.prompts else 0)


def instances_here(recipe: Recipe) -> int:
    """Instances that share the memory of one device: all of one process, one on a cluster."""
    return recipe.runtime.instances if recipe.runtime.type == "local" else 1


def free_for_instance(recipe: Recipe, device: torch.device) -> int | None:
    """Bytes that an instance on a cluster may plan with: others have the rest of a GPU that it has a fraction of.

    None on a processor.
    """
    if device.type != "cuda":
        return None
    left, total = torch.cuda.mem_get_info(device)
    share = 1.0 if recipe.runtime.instance_gpus is None else min(1.0, recipe.runtime.instance_gpus)
    return min(left, int(total * share))


def longest_trajectory(recipe: Recipe, longest_prompt: int) -> int:
    """Tokens that one trajectory may need in the cache."""
    return longest_prompt + max(recipe.rollout.max_tokens, recipe.evaluation.max_tokens or 0) + SPARE_TOKENS


def kv_tokens(recipe: Recipe, config: Any, longest_prompt: int) -> int:
    """Tokens of context of an instance on the CPU: its share of the recipe's, or what rows need under a cap."""
    if recipe.rollout.kv_tokens is not None:
        return recipe.rollout.kv_tokens // recipe.runtime.instances
    one = longest_trajectory(recipe, longest_prompt)
    cap = KV_BYTES_BY_DEFAULT // (kv_bytes_per_token(config) * instances_here(recipe))
    return max(one, min(engine_rows(recipe) * one, cap))


def footprint(
    recipe: Recipe,
    config: Any,
    longest_prompt: int,
    device: torch.device,
    *,
    free: int | None = None,
    trains: bool = True,
) -> Footprint:
    """Plan the memory of a run on `device`, of which `free` bytes are there: on CUDA, by default, what it says itself.

    Without `trains` it is that of an instance alone: the trainer is elsewhere, and so is the store of weights. Counts
    parameters on the meta device; nothing is allocated. On CUDA it raises `RecipeError`, with every number and the
    options to change, where too little is left for the KV cache.
    """
    dtype, on_cuda = choose_dtype(recipe.model.dtype, device), device.type == "cuda"
    text = config.get_text_config()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    packed = decoder.is_plain(model) and flash_fits(device, dtype, _head_size(text))
    lora, instances = recipe.model.lora, instances_here(recipe)
    base = one_base = sum(parameter.numel() for parameter in model.parameters()) * dtype.itemsize
    if on_cuda and lora is not None and is_plain(model) and has_kernels(model):
        base += (instances - 1) * _matrix_elements(model) * dtype.itemsize
    if lora is not None:
        inject_lora(model, lora.rank, 2.0 * lora.rank, lora.targets)
    count = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    version, stepped = count * dtype.itemsize, count * torch.float32.itemsize
    half, full = dtype != torch.float32, lora is None
    one = longest_trajectory(recipe, longest_prompt)
    activations = activation_bytes(
        text,
        _micro_tokens(recipe, one),
        dtype,
        device,
        packed=packed,
        trains_head=full,
        checkpointing=recipe.training.checkpointing,
    )
    if on_cuda and free is None:
        free = torch.cuda.mem_get_info(device)[0]
    need = Footprint(
        base=base,
        versions=instances * recipe.num_slots * version,
        store=(recipe.plan.slots + 1) * version,
        trained=(stepped if half else 0) if full else stepped + (version if half else 0),
        reference=_reference_bytes(recipe, one_base, dtype),
        undo=3 * stepped if recipe.training.optimizer_steps > 1 or recipe.algorithm.uses_critic else 0,
        optimizer=2 * stepped,
        gradients=stepped + (version if half and full else 0),
        working=(max(activations, 3 * stepped) if on_cuda else activations) + _ahead_bytes(recipe),
        engine=instances * _engine_bytes(recipe, text, model, dtype) if on_cuda else 0,
        slack=int(SLACK_SHARE * (free or 0)) if on_cuda else 0,
        kv=0,
        kv_tokens=0,
    )
    if not trains:
        need = replace(need, store=0, trained=0, reference=0, undo=0, optimizer=0, gradients=0, working=0)
    per_token = kv_bytes_per_token(text, dtype if on_cuda else torch.float32)
    if on_cuda:
        assert free is not None
        tokens = _tokens_left(recipe, need, one, per_token, free)
    else:
        tokens = kv_tokens(recipe, text, longest_prompt)
    return replace(need, kv=instances * tokens * per_token, kv_tokens=tokens)


def _matrix_elements(model: Any) -> int:
    """Of the linear layers but the head."""
    head = model.get_output_embeddings()
    return sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear) and m is not head)


def _reference_bytes(recipe: Recipe, base: int, dtype: torch.dtype) -> int:
    """Of the model that a divergence is measured against; the policy without its adapters takes nothing."""
    kl = recipe.algorithm.kl
    if kl is None or kl.reference is None:
        return 0
    if kl.reference == recipe.model.path:
        return base
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(load_config(kl.reference, option="algorithm.kl.reference"))
    return int(sum(parameter.numel() for parameter in model.parameters())) * dtype.itemsize


def _ahead_bytes(recipe: Recipe) -> int:
    """Of what is kept of every completion token from the passes before the first step of an update, in float32.

    The passes themselves need less than those that train: one micro-batch at a time, and no backward pass.
    """
    algorithm, plan = recipe.algorithm, recipe.plan
    kept = (recipe.training.optimizer_steps > 1) + 2 * algorithm.uses_critic + (algorithm.kl is not None)
    tokens = (plan.batch + plan.replay_groups) * plan.group_size * recipe.rollout.max_tokens
    return kept * tokens * torch.float32.itemsize


def activation_bytes(
    config: Any,
    tokens: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    packed: bool,
    trains_head: bool,
    checkpointing: bool,
) -> int:
    """What a micro-batch of so many tokens needs between its forward and its backward pass: an estimate.

    Kept of a layer, elements a token: its input, the stream after attention, both norms (4 widths); queries, keys and
    values before and after their rotation, and what attention made of them; gate, up and their product. The backward
    pass of one layer has as much again in gradients. `packed` is the lean decoder with flash attention: compiled, it
    keeps that to within 2 %, with adapters and without. The stock modules keep 1.2 to 1.4 times as many elements, in
    half precision many of them in float32. With `checkpointing` every layer keeps its input alone.
    """
    width, size = config.hidden_size, _head_size(config)
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    experts = getattr(config, "num_experts_per_tok", None) or 0
    dense = getattr(config, "intermediate_size", None) or 4 * width
    feed_forward = max(dense, experts * (getattr(config, "moe_intermediate_size", None) or dense))
    stream = 2 if packed and dtype in HALF else 1  # the lean decoder's is float32
    layer = (2 + 2 * stream) * width + (3 * heads + 4 * kv_heads) * size + 3 * feed_forward
    layer = int(layer * (1.0 if packed else STOCK_FACTORS[dtype != torch.float32]))
    layers = config.num_hidden_layers
    kept = layers * stream * width + layer if checkpointing else layers * layer
    ends = 4 * width  # embedding, last norm, directions or their gradient
    held = tokens * (kept + layer + ends) * dtype.itemsize
    chunks = CHUNK_ELEMENTS_TRAINED_HEAD if trains_head else CHUNK_ELEMENTS
    logits = min(chunks[device.type], tokens * config.vocab_size)
    held += 2 * logits * torch.float32.itemsize
    if trains_head:
        held += config.vocab_size * width * torch.float32.itemsize  # the head's gradient, summed over chunks
    return int(held)


def _head_size(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _micro_tokens(recipe: Recipe, longest: int) -> int:
    """Tokens of the largest micro-batch: a sequence is never cut, and a batch has no more than its trajectories."""
    batch = recipe.rollout.prompts * recipe.rollout.group * longest
    return min(max(recipe.training.micro_tokens, longest), batch)


def _engine_bytes(recipe: Recipe, config: Any, model: Any, dtype: torch.dtype) -> int:
    """Graphs and workspaces, and what grows with rows, the tokens of a prefill, and the context."""
    # Captured steps hold theirs for good, those of each tree in a pool of its own.
    pools = recipe.num_slots if recipe.model.lora is None else 1
    logits = (pools + 2) * engine_rows(recipe) * config.vocab_size * torch.float32.itemsize  # gathered, drawn from
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    widest = max(linear.out_features for linear in linears)
    prefill = (recipe.rollout.prefill_tokens + engine_rows(recipe)) * 4 * min(widest, 1 << 15) * dtype.itemsize
    # The captured ones: what a layer makes of each token, and the logits of finished prompts.
    inner = max(linear.out_features for linear in linears if linear is not model.get_output_embeddings())
    largest = next((size for size in PREFILL_SIZES if size >= recipe.rollout.prefill_tokens), PREFILL_SIZES[-1])
    captured = largest * 6 * inner * dtype.itemsize
    captured += PREFILL_CHUNKS * config.vocab_size * torch.float32.itemsize
    prefill += pools * captured
    tables = context_length(config) * (2 * _head_size(config) + engine_rows(recipe) // PAGE) * torch.float32.itemsize
    cut = 0
    how = recipe.rollout
    if how.top_k > 0 or how.top_p < 1.0 or how.min_p > 0.0:
        # First draws come on top.
        cut = (pools + 1) * engine_rows(recipe) * config.vocab_size * CUT_BYTES
    return int(ENGINE_BYTES + logits + prefill + tables + cut)


def _tokens_left(recipe: Recipe, need: Footprint, one: int, per_token: int, free: int) -> int:
    """Tokens of KV of one instance: its share of what is left, and no more than its rows can need.

    Raises where that is too little.
    """
    rows, here = engine_rows(recipe), instances_here(recipe)
    left = max(0, free - need.without_kv) // (per_token * here)
    asked = None if recipe.rollout.kv_tokens is None else recipe.rollout.kv_tokens // recipe.runtime.instances
    least = min(LEAST_TRAJECTORIES, rows) * one if asked is None else asked
    if left < least:
        what = (
            f"{min(LEAST_TRAJECTORIES, rows)} trajectories of up to {one:,} tokens need"
            if asked is None
            else f"`rollout.kv_tokens = {recipe.rollout.kv_tokens}` needs"
        )
        if here > 1:
            what = f"on each of `runtime.instances = {here}` {what}"
        raise RecipeError(
            f"the run does not fit: {gib(free)} of the device are free; {need}; that leaves "
            f"{gib(max(0, free - need.without_kv))} for KV, and {what} {gib(least * per_token)}. {_remedies(recipe)}"
        )
    return asked or min(rows * one, left)


def _remedies(recipe: Recipe) -> str:
    rollout = recipe.rollout
    lower = [
        f"`training.micro_tokens` (now {recipe.training.micro_tokens})",
        f"`rollout.rows` (now {recipe.plan.rows})",
        f"`rollout.max_tokens` (now {rollout.max_tokens})",
        f"`rollout.staleness` (now {recipe.plan.staleness}: {recipe.num_slots} versions)",
    ]
    if instances_here(recipe) > 1:
        lower.insert(0, f"`runtime.instances` (now {recipe.runtime.instances})")
    if rollout.kv_tokens is not None:
        lower.insert(0, f"`rollout.kv_tokens` (now {rollout.kv_tokens}; left out, it is what fits)")
    adapters = " or train adapters, `model.lora = { rank = 16 }`," if recipe.model.lora is None else ""
    return f"Lower {', '.join(lower)},{adapters} or free memory that other processes hold"


def out_of_memory(recipe: Recipe, need: Footprint, error: BaseException) -> RecipeError:
    """What to say where the parts of a run could not be built after all."""
    said = str(error).partition("\n")[0]
    return RecipeError(
        f"the run does not fit: memory ran out while it was built ({said}). Planned were {need}, {_kv(recipe, need)}; "
        f"together {gib(need.total)}. {_remedies(recipe)}"
    )


def _kv(recipe: Recipe, need: Footprint) -> str:
    each = f" on each of {recipe.runtime.instances} instances" if instances_here(recipe) > 1 else ""
    return f"KV {gib(need.kv)} for {need.kv_tokens:,} tokens{each}"


def describe_memory(recipe: Recipe, longest_prompt: int | None = None) -> str:
    """The plan and its memory, for `stretto check`. Unless told, prompts are taken to be as long as completions."""
    plan, device = recipe.plan, choose_device(recipe.runtime.device)
    if recipe.model.path == "tiny":
        from stretto.tiny import tiny_config

        config = tiny_config()
    else:
        config = load_config(recipe.model.path)
    longest = longest_prompt or recipe.rollout.max_tokens
    on_cluster = recipe.runtime.type == "ray"
    needs = _on_cluster(recipe, config, longest, device) if on_cluster else _here(recipe, config, longest, device)
    bound = f"at most {plan.staleness} (auto)" if plan.auto else str(plan.staleness)
    dtype = str(choose_dtype(recipe.model.dtype, device)).removeprefix("torch.")
    free = f", {gib(torch.cuda.mem_get_info(device)[0])} free" if device.type == "cuda" else ""
    lines = [
        f"# {plan.paradigm.name}: K = {bound}, {plan.in_flight} groups in flight, {plan.rows} rows, "
        f"{_slots(recipe)}, {plan.updates} updates of {plan.batch} x {plan.group_size} trajectories",
        f"# device: {describe_device(device)}, weights in {dtype}{free}",
        *needs,
    ]
    return "\n".join(lines)


def _here(recipe: Recipe, config: Any, longest_prompt: int, device: torch.device) -> list[str]:
    need = footprint(recipe, config, longest_prompt, device)
    return [f"# memory: {need}, {_kv(recipe, need)}; together {gib(need.total)}"]


def _on_cluster(recipe: Recipe, config: Any, longest_prompt: int, device: torch.device) -> list[str]:
    """Of an instance and of the trainer apart: each has a device of its own, or a share of one."""
    free = free_for_instance(recipe, device)
    need = footprint(recipe, config, longest_prompt, device, free=free, trains=False)
    whole = footprint(recipe, config, longest_prompt, device, free=UNBOUNDED)
    trainer = replace(whole, versions=0, store=0, engine=0, slack=0, kv=0, kv_tokens=0)
    parameters, ranks = whole.base // choose_dtype(recipe.model.dtype, device).itemsize, recipe.runtime.trainers
    cut = recipe.model.lora is None and ranks > 1 and parameters >= SHARDED_FROM
    return [
        f"# memory of an instance: {need}, {_kv(recipe, need)}; together {gib(need.total)}",
        f"# memory of the trainer: {trainer}; together {gib(trainer.total)}"
        + (f", its layers cut over {ranks} ranks" if cut else ""),
    ]


def _slots(recipe: Recipe) -> str:
    slots, count = f"{recipe.num_slots} version slots", recipe.runtime.instances
    return f"{count} instances of {slots}" if count > 1 else slots


def gib(num_bytes: int) -> str:
    """Bytes for people."""
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB // 10 else f"{num_bytes / (1 << 20):.1f} MiB"
