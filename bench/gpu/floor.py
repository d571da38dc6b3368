"""The least time that a decode step can take, and what this device really moves and multiplies.

    floor of a step = KV bytes / bandwidth + max(weight bytes / bandwidth, FLOPs / peak)

Weights are read once a step whatever the batch, and their multiplications may hide behind that; the KV of every row is
read for that row alone, and nothing hides it. Activations, sampling and launches count as zero. Of a mixture of
experts, those count that have rows if each row chooses its own at random: an expectation, below which a router that
prefers some experts can stay.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from bench.gpu.shapes import RANK, config_of, dtype_of, skeleton
from stretto.models.lora import adapted_modules
from stretto.models.routing import routing_shape

COPY_BYTES = 4 << 30
MATMUL_SIZES = ((8_192, 8_192, 8_192), (16_384, 8_192, 8_192), (4_096, 12_288, 4_096))


@dataclass(frozen=True, slots=True)
class Rates:
    """What a device does, measured: bytes moved and floating-point operations, a second."""

    bandwidth: float
    peak: float


@dataclass(frozen=True, slots=True)
class Traffic:
    """What one decode step of a model must read and multiply."""

    weight_bytes: int  # without experts; the embedding is a look-up and counts only if it is also the head
    weight_flops_per_row: int
    adapter_bytes: int  # of one version
    adapter_flops_per_row: int
    kv_bytes_per_token: int  # of context, over all layers
    expert_bytes: int = 0  # of one expert, over all layers
    experts: int = 1
    chosen: int = 0  # experts of a row

    @property
    def all_bytes(self) -> int:
        """Bytes of all weights that are read."""
        return self.weight_bytes + self.experts * self.expert_bytes

    def read_bytes(self, rows: int) -> float:
        """Bytes of the weights that a forward over so many rows reads."""
        used = self.experts * (1 - (1 - self.chosen / self.experts) ** rows)
        return self.weight_bytes + used * self.expert_bytes

    def step_s(self, rates: Rates, rows: int, context_tokens: float, versions: int = 0) -> float:
        """Floor of one step: `context_tokens` over all rows together, `versions` adapters live (0: none)."""
        read = self.read_bytes(rows) + versions * self.adapter_bytes
        flops = rows * (self.weight_flops_per_row + bool(versions) * self.adapter_flops_per_row)
        kv = context_tokens * self.kv_bytes_per_token
        return kv / rates.bandwidth + max(read / rates.bandwidth, flops / rates.peak)

    def generation_s(self, rates: Rates, rows: int, prompt: int, tokens: int, versions: int = 0) -> float:
        """Floor of `rows` prompts prefilled together and decoded to `tokens` each, side by side.

        The prefill draws the first token; step `i` after it reads a context of `prompt + i` tokens a row. Attention
        inside the prefill counts as zero.
        """
        flops = rows * prompt * (self.weight_flops_per_row + bool(versions) * self.adapter_flops_per_row)
        prefill = max(self.read_bytes(rows * prompt) / rates.bandwidth, flops / rates.peak)
        steps = tokens - 1
        fixed = steps * self.step_s(rates, rows, 0, versions)
        read = rows * sum(prompt + i for i in range(1, tokens))
        return prefill + fixed + read * self.kv_bytes_per_token / rates.bandwidth


def traffic(size: str, dtype: torch.dtype = torch.bfloat16, rank: int = RANK) -> Traffic:
    """Count a size's parameters without making them."""
    model, config = skeleton(size), config_of(size)
    total = sum(parameter.numel() for parameter in model.parameters())
    table = model.get_input_embeddings().weight.numel()
    read = total if config.tie_word_embeddings else total - table
    routing = routing_shape(model)
    expert = 0 if routing is None else sum(each.numel() for each in _expert_weights(model)) // routing.experts
    experts, chosen = (1, 0) if routing is None else (routing.experts, routing.chosen)
    read -= experts * expert
    low = sum(rank * (module.in_features + module.out_features) for module in adapted_modules(model).values())
    return Traffic(
        weight_bytes=read * dtype.itemsize,
        weight_flops_per_row=2 * (read + chosen * expert),
        adapter_bytes=low * dtype.itemsize,
        adapter_flops_per_row=2 * low,
        kv_bytes_per_token=2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * dtype.itemsize,
        expert_bytes=expert * dtype.itemsize,
        experts=experts,
        chosen=chosen,
    )


def _expert_weights(model: Any) -> list[torch.Tensor]:
    return [p for name, p in model.named_parameters() if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]


def measure_rates(device: torch.device | str, *, quick: bool = False, dtype: str | None = None) -> Rates:
    """A large copy and large matrix products, the best of several each: about a second on a GPU."""
    device, kept = torch.device(device), dtype_of(device, dtype)
    count = (1 << 22) if quick else COPY_BYTES
    source = torch.zeros(count, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    bandwidth = 2 * count / _best_s(lambda a=source, b=target: b.copy_(a), device)
    del source, target
    peak = 0.0
    for m, n, k in ((128, 128, 128),) if quick else MATMUL_SIZES:
        left = torch.randn(m, k, device=device, dtype=kept)
        right = torch.randn(k, n, device=device, dtype=kept)
        out = torch.empty(m, n, device=device, dtype=kept)
        peak = max(peak, 2.0 * m * n * k / _best_s(lambda a=left, b=right, c=out: torch.mm(a, b, out=c), device))
    return Rates(bandwidth, peak)


def _best_s(work: Callable[[], object], device: torch.device, repeats: int = 10) -> float:
    """Seconds of the fastest call, by the device's own clock where it has one."""
    for _ in range(3):
        work()
    if device.type != "cuda":
        seconds = []
        for _ in range(repeats):
            began = time.perf_counter()
            work()
            seconds.append(time.perf_counter() - began)
        return min(seconds)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    marks[0].record()
    for mark in marks[1:]:
        work()
        mark.record()
    torch.cuda.synchronize(device)
    return min(a.elapsed_time(b) for a, b in itertools.pairwise(marks)) / 1e3


def describe(rates: Rates) -> dict[str, Any]:
    return asdict(rates)
