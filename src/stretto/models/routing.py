"""Records and replay of the routing in a mixture of experts.

A router gives each token the `k` experts with the largest probabilities. Engine and trainer round differently, so near
a tie they choose different experts, and the same token gets another log-probability. So the engine records its choice,
and the trainer replays it: the experts come from the record, and their weights from the trainer's own router, so
gradients flow through the weights as they do with free routing.

A *record* has the ids of the chosen experts, [tokens, layers, k], for the layers that have experts, in their order. An
id takes one byte for up to 256 experts, and two bytes for more.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from stretto.errors import RecipeError
from stretto.models.mixture_configs import EXPERT_COUNTS
from stretto.models.packed_attention import LAYOUT_ARGUMENT

# Routers of transformers that return (logits, weights of the chosen experts, their ids), the weights being the softmax
# over all experts, made to add up to 1 if `norm_topk_prob` says so; Mixtral's always are.
ROUTERS = ("MixtralTopKRouter", "OlmoeTopKRouter", "Qwen2MoeTopKRouter", "Qwen3MoeTopKRouter")
MODEL_TYPES = ("mixtral", "olmoe", "qwen2_moe", "qwen3_moe")  # that have these routers


@dataclass(frozen=True, slots=True)
class RoutingShape:
    """The size of a token's record."""

    layers: int  # that have experts
    chosen: int  # experts of a token in a layer
    experts: int

    @property
    def dtype(self) -> torch.dtype:
        return torch.uint8 if self.experts <= 256 else torch.int16

    @property
    def bytes_per_token(self) -> int:
        return self.layers * self.chosen * self.dtype.itemsize


def num_experts(config: Any) -> int:
    """Returns the experts of a layer, by a configuration of transformers; 0 if it names none."""
    text = config.get_text_config()
    return max(getattr(text, name, None) or 0 for name in EXPERT_COUNTS)


def is_mixture(config: Any) -> bool:
    """True if a configuration of transformers is that of a mixture of experts."""
    return num_experts(config) > 1


def shape_of_config(config: Any) -> RoutingShape | None:
    """Returns the shape of the records of a configuration's model, as `routing_shape` does of a model."""
    text = config.get_text_config()
    if not is_mixture(config) or text.model_type not in MODEL_TYPES:
        return None
    step, dense = getattr(text, "decoder_sparse_step", 1), getattr(text, "mlp_only_layers", None) or ()
    layers = [n for n in range(text.num_hidden_layers) if n not in dense and (n + 1) % step == 0]
    return RoutingShape(len(layers), text.num_experts_per_tok, num_experts(config))


def expert_elements(model: nn.Module) -> int:
    """Returns the weights of routers and experts that one token is multiplied with."""
    total = 0
    for router in routers_of(model):
        total += router.weight.numel()
    for module in model.modules():
        up, down = getattr(module, "gate_up_proj", None), getattr(module, "down_proj", None)
        if isinstance(up, nn.Parameter) and isinstance(down, nn.Parameter) and up.dim() == 3:
            config: Any = model.config
            total += (up[0].numel() + down[0].numel()) * int(config.get_text_config().num_experts_per_tok)
    return total


def routers_of(model: nn.Module) -> list[Any]:
    """Returns the routers of the layers that have experts, in their order; empty if it has other ones, or none."""
    layers = getattr(getattr(model, "base_model", model), "layers", ())
    found = []
    for layer in layers:
        own = [module for module in layer.modules() if type(module).__name__ in ROUTERS]
        if len(own) > 1:
            return []
        found += own
    return found


def routing_shape(model: nn.Module) -> RoutingShape | None:
    """Returns the shape of a model's records; None if its routing cannot be recorded, or it has no experts."""
    routers = routers_of(model)
    shapes = {(int(router.top_k), int(router.num_experts)) for router in routers}
    if len(shapes) != 1:
        return None
    chosen, experts = shapes.pop()
    return RoutingShape(len(routers), chosen, experts)


def replayed_shape(config: Any, option: str, *, keeps: bool = False) -> RoutingShape | None:
    """Returns the shape of the records that `training.routing = option` replays; None if nothing is replayed.

    Raises `RecipeError` if the option has no effect on the model, or cannot be had; `keeps` is `training.keep_routing`.
    """
    shape = shape_of_config(config)
    kind = f"`{config.get_text_config().model_type}`"
    if not is_mixture(config) and (option != "auto" or keeps):
        named = f'routing = "{option}"' if option != "auto" else "keep_routing = true"
        raise RecipeError(f"`training.{named}` is for mixtures of experts, and {kind} is none: leave it out")
    if shape is None and (option == "replay" or keeps):
        named = 'routing = "replay"' if option == "replay" else "keep_routing = true"
        raise RecipeError(
            f"`training.{named}` needs a router that can be recorded, and that of {kind} is none of "
            f'{", ".join(MODEL_TYPES)}: use `training.routing = "free"`'
        )
    return None if option == "free" else shape


def normalizes(router: Any) -> bool:
    """True if the weights of a token's experts add up to 1."""
    return bool(getattr(router, "norm_topk_prob", type(router).__name__ == "MixtralTopKRouter"))


def gates(logits: Tensor, ids: Tensor, *, normalized: bool) -> Tensor:
    """Returns the weights [T, k] of the experts `ids` [T, k] by the router's logits [T, experts]; at least float32."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    weights = wide.softmax(-1).gather(1, ids)
    return weights / weights.sum(-1, keepdim=True) if normalized else weights


class RoutingTap:
    """Collects the experts that the routers of a tree choose in a forward. One thread at a time."""

    def __init__(self, tree: nn.Module) -> None:
        self._ids: list[Tensor] = []
        self._routers = routers_of(tree)
        self._hooks = [router.register_forward_hook(self._collect) for router in self._routers]

    def _collect(self, module: nn.Module, inputs: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:
        self._ids.append(output[2])

    def take(self) -> Tensor:
        """Returns the ids [T, layers, k] of the last forward, and forgets them."""
        ids, self._ids = self._ids, []
        return torch.stack(ids, 1)

    def close(self) -> Tensor | None:
        """Removes itself from the routers; returns the ids [T, layers, k] of all forwards, one after the other.

        None: there are no routers.
        """
        for hook in self._hooks:
            hook.remove()
        ids, count = self._ids, len(self._routers)
        forwards = [torch.stack(ids[at : at + count], 1) for at in range(0, len(ids), count or 1)]
        return torch.cat(forwards) if forwards else None


def replay_through_modules(model: nn.Module) -> None:
    """Lets the layers of a model take their experts from the `routing` of a `PackedLayout`, and count them in `loads`.

    Each layer hands its part of the record to its router as it runs, so a layer that is computed again in the backward
    pass replays the same record.
    """
    place = 0
    decoder: Any = getattr(model, "base_model", model)
    for layer in getattr(decoder, "layers", ()):
        own = [module for module in layer.modules() if type(module).__name__ in ROUTERS]
        if own:
            router = own[0]
            router.replayed_ids = router.count_ids = None
            router.register_forward_hook(_replay)
            layer.forward = functools.partial(_with_record, layer.forward, router, place)
            place += 1


def _with_record(forward: Callable[..., Any], router: Any, place: int, *args: Any, **kwargs: Any) -> Any:
    layout: Any = kwargs.get(LAYOUT_ARGUMENT)
    record: Tensor | None = getattr(layout, "routing", None)
    router.replayed_ids = None if record is None else record[:, place]
    router.count_ids = None if layout is None else layout.counts_of(place)
    try:
        return forward(*args, **kwargs)
    finally:
        router.replayed_ids = router.count_ids = None


def _replay(router: Any, inputs: Any, output: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    if router.replayed_ids is not None:
        output = _replay_these(router.replayed_ids, router, inputs, output)
    if router.count_ids is not None:
        router.count_ids(output[2])
    return output


@contextmanager
def replaying(model: nn.Module, record: NDArray[Any] | None) -> Iterator[None]:
    """Lets the routers of a model take their experts from a record [T, layers, k]; None: they choose."""
    hooks = []
    if record is not None:
        ids = torch.from_numpy(record.astype(np.int64)).to(next(model.parameters()).device)
        for place, router in enumerate(routers_of(model)):
            hooks.append(router.register_forward_hook(functools.partial(_replay_these, ids[:, place])))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _replay_these(
    ids: Tensor, router: Any, inputs: Any, output: tuple[Tensor, Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    logits, weights, found = output
    ids = ids.to(found.dtype)
    return logits, gates(logits, ids, normalized=normalizes(router)).to(weights.dtype), ids


class ExpertLoads:
    """Counts the experts that tokens go to, in the forwards whose layout has it. The host waits for nothing.

    A layer that is computed again in the backward pass counts its tokens twice, all of them, so shares are the same.
    """

    def __init__(self, shape: RoutingShape, device: torch.device) -> None:
        self.shape = shape
        self.counts = torch.zeros(shape.layers, shape.experts, dtype=torch.int64, device=device)

    def add(self, place: int, ids: Tensor) -> None:
        """Counts the experts `ids` [T, k] of the layer at `place` among those that have experts."""
        chosen = ids.reshape(-1)
        self.counts[place].scatter_add_(0, chosen.to(torch.int64), torch.ones_like(chosen, dtype=torch.int64))

    def taken(self) -> NDArray[np.float64]:
        """Returns the counts [layers, experts] since the last call, and begins again."""
        counts: NDArray[np.float64] = self.counts.double().cpu().numpy()
        self.counts.zero_()
        return counts


def recorded_loads(records: Sequence[NDArray[Any]], shape: RoutingShape) -> NDArray[np.int64]:
    """Returns how many times each expert was chosen [layers, experts], over records [tokens, layers, k]."""
    counts = np.zeros((shape.layers, shape.experts), dtype=np.int64)
    for record in records:
        for layer in range(shape.layers):
            counts[layer] += np.bincount(record[:, layer].reshape(-1), minlength=shape.experts)
    return counts


def expert_metrics(counts: NDArray[Any]) -> dict[str, float]:
    """Returns the imbalance and the entropy of the experts' loads, from counts [layers, experts]; empty without any.

    The imbalance of a layer is the share of its most loaded expert over that of an equal division: 1 is balanced. The
    entropy of a layer is that of its shares over the largest that it can have: 1 is balanced, 0 is one expert alone.
    """
    if not counts.any():
        return {}
    loads = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    experts = counts.shape[1]
    imbalance = loads.max(1) * experts
    logs = np.log(loads, out=np.zeros_like(loads), where=loads > 0)
    entropy = -(loads * logs).sum(1) / np.log(experts)
    return {
        "expert_imbalance": float(imbalance.mean()),
        "expert_imbalance_max": float(imbalance.max()),
        "expert_entropy": float(entropy.mean()),
    }
