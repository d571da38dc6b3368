"""The options to change if a run does not fit its memory. Names nothing that cannot be enough."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from stretto.errors import RecipeError, first_line
from stretto.recipe.reading import load_recipe
from stretto.recipe.schema import PREFILL_TOKENS, Recipe
from stretto.setup.counted_models import CountedModels
from stretto.setup.device import with_section
from stretto.setup.memory_needs import (
    Footprint,
    base_bytes,
    describe_kv,
    device_part,
    instances_per_device,
    share_limits,
    spare_bytes,
)
from stretto.setup.memory_sizes import gib, holds_several
from stretto.training.options import LEAST_MICRO_TOKENS

DOES_NOT_FIT = "the run does not fit: "
MOST_SHARE = 0.95  # of a device, that `engine.gpu_memory` is advised to be


@dataclass(frozen=True, slots=True)
class PlannedMemory:
    """The model and the memory of a plan, to try other options of its recipe with."""

    config: Any
    counted: CountedModels
    longest_prompt: int
    device: torch.device
    free: int | None  # as `footprint` was given it
    trains: bool

    def fits(self, recipe: Recipe) -> bool:
        """True if the run fits the same memory with other options, as of the engine or of the number of instances."""
        return self._spare(recipe, self.free) >= 0

    def fits_with_share(self, recipe: Recipe, share: float) -> bool:
        """True if the run fits with another `engine.gpu_memory`. On a cluster that changes the memory to plan with."""
        other, free = with_section(recipe, "engine", gpu_memory=share), self.free
        if free is not None and recipe.runtime.type == "ray":
            free = int(free * device_part(other) / device_part(recipe))
        return self._spare(other, free) >= 0

    def _spare(self, recipe: Recipe, free: int | None) -> int:
        prompt, device = self.longest_prompt, self.device
        return spare_bytes(recipe, self.config, self.counted, prompt, device, free=free, trains=self.trains)


def advice_on(recipe: Recipe, planned: PlannedMemory, need: Footprint, free: int, *, here: bool) -> str:
    """Returns what to change if too little memory is left for the KV cache. Names nothing that cannot be enough."""
    share = recipe.engine.gpu_memory
    if share is not None:
        shares = [each / 100 for each in range(int(share * 100) + 1, int(MOST_SHARE * 100) + 1)]
        at = bisect_left(shares, True, key=lambda each: planned.fits_with_share(recipe, each))
        if at < len(shares):
            return f"Raise `engine.gpu_memory` (now {share:g}) to at least {shares[at]:g}"
    cut = recipe.engine.type == "vllm" and recipe.runtime.type == "ray"
    if need.one_base > (free / device_part(recipe) if share_limits(recipe) else free):
        return weights_alone(need) + ", or raise `engine.tensor_parallel`" * cut
    advice = remedies(recipe, planned.longest_prompt, trains=planned.trains, here=here)
    if enough := _enough_alone(recipe, planned):
        advice += f". Each of these alone is enough: {', '.join(f'`{change}`' for change in enough)}"
    if recipe.engine.type != "vllm" or recipe.runtime.type != "local":
        return advice
    least = _least_options(recipe)
    if not planned.fits(least):
        two = base_bytes(least, planned.counted, planned.device)
        if two > free // 2:  # else long trajectories are the reason
            advice = (
                f"The weights alone take {gib(two)}, because the trainer and vLLM have a copy each: use a larger "
                "device or a smaller model"
            )
    native = with_section(recipe, "engine", type="native", gpu_memory=None)
    without_share = "" if share is None else " without `engine.gpu_memory`"
    for each in (native, with_section(native, "training", checkpointing=True)):
        if planned.fits(each):
            more = "" if each is native else " with `training.checkpointing = true`"
            return f'{advice}. `engine.type = "native"` would fit{more}{" and" * bool(more and share)}{without_share}'
    return advice


def _enough_alone(recipe: Recipe, planned: PlannedMemory) -> list[str]:
    """Returns changes of one option each with which the recipe is valid and the run fits.

    Of a number, they have the first of its halves, or of lower values, that does.
    """
    tried: list[tuple[str, Iterable[Any]]] = []
    if planned.trains:
        tried.append(("training.checkpointing", () if recipe.training.checkpointing else (True,)))
        if holds_several(recipe, planned.longest_prompt):
            tried.append(("training.micro_tokens", _halves(recipe.training.micro_batch_tokens, LEAST_MICRO_TOKENS)))
    tried.append(("rollout.rows", _halves(recipe.plan.rows, 1)))
    if recipe.paradigm.staleness is None and not recipe.plan.auto and recipe.rollout.in_flight is None:
        tried.append(("rollout.staleness", range(recipe.plan.staleness - 1, -1, -1)))
    enough = []
    for key, values in tried:
        section, _, name = key.partition(".")
        for value in values:
            if planned.fits(with_section(recipe, section, **{name: value})) and _is_valid(recipe, key, value):
                enough.append(f"{key} = {str(value).lower()}")
                break
    return enough


def _is_valid(recipe: Recipe, key: str, value: Any) -> bool:
    try:
        load_recipe(recipe, {key: value})
    except RecipeError:
        return False
    return True


def _halves(size: int, least: int) -> Iterator[int]:
    """Iterates over a half, a quarter and so on, down to `least`."""
    while (size := size // 2) >= least:
        yield size


def _least_options(recipe: Recipe) -> Recipe:
    """Returns the recipe with the least memory that options other than lengths can lead to."""
    rollout: dict[str, Any] = {"rows": 1, "kv_tokens": None, "prefill_tokens": PREFILL_TOKENS}
    if recipe.paradigm.staleness is None:
        rollout["staleness"] = 0
    lean = with_section(recipe, "rollout", **rollout)
    lean = with_section(lean, "engine", gpu_memory=None)
    lean = with_section(lean, "training", checkpointing=True, micro_tokens=LEAST_MICRO_TOKENS)
    return with_section(lean, "runtime", instances=1 if recipe.model.lora is not None else lean.plan.slots)


def remedies(recipe: Recipe, longest_prompt: int, *, trains: bool = True, here: bool = True) -> str:
    """Returns the options to change if a run does not fit, with their values.

    Without `trains` they are those of an instance alone. Without `here` the device is not one of this machine.
    """
    rollout = recipe.rollout
    micro_tokens = f"`training.micro_tokens` (now {recipe.training.micro_batch_tokens})"
    lower = [
        *[micro_tokens] * (trains and holds_several(recipe, longest_prompt)),
        f"`rollout.rows` (now {recipe.plan.rows})",
        f"`rollout.max_tokens` (now {rollout.max_tokens})",
    ]
    if recipe.plan.staleness and recipe.paradigm.staleness is None:
        cap = "_cap" if recipe.plan.auto else ""
        lower.append(f"`rollout.staleness{cap}` (now {recipe.plan.staleness}: {recipe.num_slots} versions)")
    if rollout.prefill_chunk_tokens > PREFILL_TOKENS:
        lower.append(f"`rollout.prefill_tokens` (now {rollout.prefill_chunk_tokens})")
    if instances_per_device(recipe) > 1:
        lower.insert(0, f"`runtime.instances` (now {recipe.runtime.instances})")
    if rollout.kv_tokens is not None:
        lower.insert(0, f"`rollout.kv_tokens` (now {rollout.kv_tokens}; left out, it is what fits)")
    full = recipe.model.lora is None
    if full and recipe.engine.type == "native" and recipe.runtime.instances > 1 and recipe.num_slots > 1:
        lower.append(f"`runtime.slots` (now {recipe.num_slots} for each instance)")
    checkpointing = ", or set `training.checkpointing = true`" if trains and not recipe.training.checkpointing else ""
    adapters = ", or train adapters, `model.lora = { rank = 16 }`" if full else ""
    free = ", or free memory that other processes hold" if here else ""
    share = recipe.engine.gpu_memory
    begun = "Lower" if share is None else f"Raise `engine.gpu_memory` (now {share:g}), or lower"
    return f"{begun} {', '.join(lower)}{checkpointing}{adapters}{free}"


def weights_alone(need: Footprint) -> str:
    """Returns what to do if not even the weights of the model fit, where no other option helps."""
    return f"The weights alone take {gib(need.one_base)}: use a larger device or a smaller model"


def out_of_memory(recipe: Recipe, need: Footprint, longest_prompt: int, error: BaseException) -> RecipeError:
    """Returns the error for a run whose plan was too low: memory ran out while engines and trainer were made."""
    return RecipeError(
        f"{DOES_NOT_FIT}memory ran out while it was built ({first_line(error)}). Planned were {need}, "
        f"{describe_kv(recipe, need)}; together {gib(need.total)}. {remedies(recipe, longest_prompt)}"
    )
