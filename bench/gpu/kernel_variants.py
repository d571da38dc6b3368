"""Kernels of a decode step, alone: those of the product against the candidates of `bench.gpu.kernel_candidates`.

    python -m bench.gpu.kernel_variants --out RESULTS
    python -m bench.gpu.kernel_variants --kernels gate,attention --shapes qwen2.5-0.5b --rows 512,1536 --out RESULTS
    python -m bench.gpu.kernel_variants --compile-only       # registers, spills and shared memory; needs no GPU

Each cell is a kernel, a model's shape and a number of rows. Its `variants` are microseconds a call: `CALLS` calls in
one CUDA graph, the median of several replays. Each call has a `b` or a cache of its own, as each layer has, and the
second level cache is emptied before a replay; activations are the same memory in every call, because the kernel before
has just written them. `floor_us` is the time of the bytes that must move, at the rate of a copy that is measured in the
same process. Each candidate is compared with the product's result. One that does not compile, or is wrong, is recorded
with its error, and is never the best.

The kernels are compiled by several processes first, which need no GPU; what they compile is found in Triton's cache.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.gpu import kernel_candidates as candidates
from bench.gpu.cells import Cell, add_options, from_options, integers, release_memory, words
from bench.gpu.floor import measure_rates
from bench.gpu.kernel_candidates import Attending, Merging, Tiling
from stretto.engines.native.cache import PAGE
from stretto.engines.native.kernels import decode_attention, layers
from stretto.engines.native.kernels.decode_work_list import (
    DecodePlan,
    Sharing,
    choose_chunk,
    items_bound,
    plan_items,
)
from stretto.models.triton_jit import power_of_two

KERNELS = ("gate", "add_norm", "split_heads", "merge", "attention")
PEERS = 8  # rows of a prompt
LONG_ROWS, LONG_CONTEXT = 16, 8_192
CALLS, REPEATS = 24, 5
COLD_BYTES = 160 * 2**20  # of what differs between the calls of a replay
FLUSH_BYTES = 256 * 2**20
LARGEST_ERROR = 5e-3  # relative difference from the product's result
EPSILON, SCALE = 1e-6, 0.5
REGISTERS, SHARED_BYTES, MOST_WARPS = 65_536, 233_472, 64  # of a multiprocessor of an H100 or H200


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a model's layers, and the rank of its adapters."""

    hidden: int
    heads: int
    kv_heads: int
    size: int
    width: int
    rank: int


SHAPES = {
    "qwen2.5-0.5b": Shape(896, 14, 2, 64, 4864, 32),
    "qwen2.5-1.5b": Shape(1536, 12, 2, 128, 8960, 32),
    "smollm2-135m": Shape(576, 9, 3, 64, 1536, 16),
}
TINY = {"tiny": Shape(24, 2, 1, 16, 24, 3)}


@dataclass(frozen=True, slots=True)
class Batch:
    """The rows of a step; `slots` are the versions, of which groups of rows have one each."""

    rows: int
    slots: int
    context: int = 0  # of every row; 0: mixed contexts of rows that share their prompts
    prompt: int = 128  # tokens of the shortest prompt; with what follows, contexts of 130 to 600 tokens
    prompts: int = 256  # by which prompts differ
    answers: int = 216  # by which answers differ


@dataclass
class Case:
    """One kernel at one shape: the product's call, candidates by their constants, and what they write.

    A call takes the number of a layer, which chooses the memory that differs between layers.
    """

    floor_bytes: float
    product: Callable[[int], object]
    candidates: Mapping[str, Callable[[int], object]]
    results: Sequence[Tensor]  # that a call writes
    reset: Callable[[], object] = lambda: None  # before a call whose result is compared
    facts: dict[str, Any] = field(default_factory=dict)


class Memory:
    """Makes the tensors of a case on a device; `meta` for kernels that are only compiled."""

    def __init__(self, device: str, dtype: torch.dtype, copies: int) -> None:
        self.device, self.dtype, self._copies = device, dtype, copies
        self._generator = None if device == "meta" else torch.Generator(device).manual_seed(0)

    def random(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        kept = dtype or self.dtype
        if self._generator is None:
            return torch.empty(*shape, dtype=kept, device=self.device)
        return torch.randn(*shape, generator=self._generator, dtype=kept, device=self.device)

    def integers(self, numbers: Any, dtype: torch.dtype) -> Tensor:
        return torch.tensor(numbers, dtype=dtype).to(self.device)

    def copies(self, make: Callable[[], Tensor]) -> list[Tensor]:
        """Tensors of one shape, so many that the calls of a replay do not find theirs in a cache."""
        first = make()
        count = -(-COLD_BYTES // (first.numel() * first.element_size()))
        return [first, *(make() for _ in range(min(self._copies, max(count, 2)) - 1))]


def slots_of(batch: Batch, memory: Memory) -> Tensor:
    """The slots of the rows: groups of `PEERS` rows have one version, as those of one prompt have."""
    return memory.integers([row // PEERS % batch.slots for row in range(batch.rows)], torch.int64)


def factors(shape: Shape, batch: Batch, out: int, memory: Memory) -> list[Tensor]:
    return memory.copies(lambda: memory.random(batch.slots * shape.rank, out) * 0.05)


def with_constants(call: Callable[[int], object], module: Any, **constants: Any) -> Callable[[int], object]:
    """A call that sees other constants of a module of the product."""

    def changed(layer: int) -> None:
        kept = {name: getattr(module, name) for name in constants}
        vars(module).update(constants)
        try:
            call(layer)
        finally:
            vars(module).update(kept)

    return changed


def label(*constants: Any) -> str:
    """The name of a variant: its constants."""
    return " ".join(
        "/".join(str(part) for part in each) if isinstance(each, tuple) else str(each) for each in constants
    )


# -- the cases ---------------------------------------------------------------------------------------------------------


def tilings(kernel: str, shape: Shape, batch: Batch) -> list[Tiling]:
    """The constants that are tried for a kernel with adapters: few, by the number of rows.

    They leave room for several programs on a multiprocessor, as `--compile-only` shows, and none of them spills.
    """
    depth = min(32, power_of_two(batch.slots * shape.rank, 16))
    few, middle = batch.rows <= 128, batch.rows <= 512
    fused: list[Tiling] = []
    if kernel == "split_heads":
        every = [(16, 0, 4, 3), (32, 0, 4, 3)] if middle else [(32, 0, 4, 3), (64, 0, 8, 3)]
        in_range = [(tile, 0, warps, 2) for tile, _, warps, _ in every]
    elif kernel == "add_norm":
        every = [(16, 64, 4, 3), (32, 64, 4, 3)] if middle else [(32, 64, 4, 3), (64, 64, 8, 3)]
        in_range = [(tile, columns, warps, 2) for tile, columns, warps, _ in every]
        if batch.rows > 256 and shape.hidden <= 1024:  # wider rows spill
            fused = [Tiling("all", 16, 0, 16, 16, 3), Tiling("range", 16, 0, 16, 16, 2)]
    elif few:
        every = [(16, 64, 4, 3), (16, 128, 4, 3), (64, 32, 4, 3)]
        in_range = [(16, 64, 4, 2), (64, 32, 4, 2)]
    elif middle:
        every = [(32, 64, 4, 3), (64, 64, 8, 3), (64, 32, 4, 3)]
        in_range = [(32, 64, 4, 2), (64, 32, 4, 2)]
    else:
        every = [(64, 64, 4, 3), (64, 64, 8, 3), (64, 32, 4, 3), (64, 128, 8, 2), (128, 128, 16, 3)]
        in_range = [(64, 64, 8, 3), (64, 32, 4, 2)]
    found = [Tiling("all", tile, columns, depth, warps, stages) for tile, columns, warps, stages in every]
    found += [Tiling("range", tile, columns, depth, warps, stages) for tile, columns, warps, stages in in_range]
    return [*found, *fused]


def gate_case(shape: Shape, batch: Batch, memory: Memory) -> Case:
    rows, width, rank, lines = batch.rows, shape.width, shape.rank, batch.slots * shape.rank
    gate_up, slots = memory.random(rows, 2 * width + 2 * lines), slots_of(batch, memory)
    of_gate, of_up = factors(shape, batch, width, memory), factors(shape, batch, width, memory)
    out = torch.empty(rows, width, dtype=memory.dtype, device=memory.device)

    def arguments(layer: int) -> tuple[Any, ...]:
        bs = (of_gate[layer % len(of_gate)], of_up[layer % len(of_up)])
        return gate_up, width, "silu", slots, bs, rank, SCALE, out

    def product(layer: int) -> None:
        layers.gate(*arguments(layer))

    # The product's kernel with smaller programs, of which more are resident.
    found: dict[str, Callable[[int], object]] = {
        f"product {tile}/64/4": with_constants(
            product, layers, TOKEN_TILES=((10**6, tile),), LARGEST_TILE=tile + 1, GATE_COLUMNS=64
        )
        for tile in ((32,) if rows <= 512 else (32, 64))
    }
    for tiling in tilings("gate", shape, batch):
        found[label(tiling)] = lambda layer, tiling=tiling: candidates.gate(*arguments(layer), tiling=tiling)
    moved = (gate_up.numel() + out.numel() + 2 * lines * width) * out.element_size()
    return Case(moved, product, found, [out])


def add_norm_case(shape: Shape, batch: Batch, memory: Memory) -> Case:
    rows, hidden, rank, lines = batch.rows, shape.hidden, shape.rank, batch.slots * shape.rank
    before, weight = memory.random(rows, hidden, dtype=torch.float32), memory.random(hidden)
    added, slots = memory.random(rows, hidden + lines, dtype=torch.float32), slots_of(batch, memory)
    stream, bs = before.clone(), factors(shape, batch, hidden, memory)
    out = torch.empty(rows, hidden, dtype=memory.dtype, device=memory.device)

    def arguments(layer: int) -> tuple[Any, ...]:
        return stream, added, weight, EPSILON, slots, bs[layer % len(bs)], rank, SCALE, out

    def product(layer: int) -> None:
        layers.add_norm(*arguments(layer))

    way = rows <= layers.ADD_NORM_ROWS
    other = with_constants(product, layers, ADD_NORM_ROWS=0 if way else rows)
    found: dict[str, Callable[[int], object]] = {f"product {'by tiles' if way else 'row by row'}": other}
    for tiling in tilings("add_norm", shape, batch):
        name = label(tiling) if tiling.columns else f"fused {label(tiling)}"
        found[name] = lambda layer, tiling=tiling: candidates.add_norm(*arguments(layer), tiling=tiling)
    moved = 4 * (2 * stream.numel() + rows * (hidden + rank)) + out.element_size() * (out.numel() + lines * hidden)
    return Case(moved, product, found, [stream, out], lambda: stream.copy_(before))


def split_heads_case(shape: Shape, batch: Batch, memory: Memory) -> Case:
    rows, heads, kv_heads, size, lines = batch.rows, shape.heads, shape.kv_heads, shape.size, batch.slots * shape.rank
    widths = (heads * size, kv_heads * size, kv_heads * size)
    qkv, slots = memory.random(rows, sum(widths) + 3 * lines), slots_of(batch, memory)
    bs = [factors(shape, batch, width, memory) for width in widths]
    table = memory.random(1024, 2 * size)
    positions = memory.integers([row % 1024 for row in range(rows)], torch.int64)
    writes = memory.integers(list(range(rows)), torch.int64)
    cache = torch.zeros(2, rows, kv_heads, size, dtype=memory.dtype, device=memory.device)
    q = torch.empty(rows, heads, size, dtype=memory.dtype, device=memory.device)

    def arguments(layer: int) -> tuple[Any, ...]:
        own = tuple(each[layer % len(each)] for each in bs)
        return (qkv, heads, kv_heads, size, None, None, EPSILON, table, positions, slots, own, shape.rank, SCALE,
                writes, cache[0], cache[1], q)  # fmt: skip

    return Case(
        (qkv.numel() + rows * sum(widths) + rows * 2 * size + lines * sum(widths)) * q.element_size(),
        lambda layer: layers.split_heads(*arguments(layer)),
        {
            label(tiling): lambda layer, tiling=tiling: candidates.split_heads(*arguments(layer), tiling=tiling)
            for tiling in tilings("split_heads", shape, batch)
        },
        [q, cache],
    )


@dataclass
class Attention:
    """The operands of a step's attention, with a cache for each layer."""

    q: Tensor
    caches: list[Tensor]  # [2, slots, kv heads, size] each
    table: Tensor
    contexts: Tensor
    plan: DecodePlan
    chunk: int
    max_items: int
    out: Tensor
    sharing: Sharing | None
    read_tokens: int  # of the cache
    items: int  # that the merge reads

    @classmethod
    def of(cls, shape: Shape, batch: Batch, memory: Memory) -> Attention:
        """Rows of one context, or groups of `PEERS` rows that share the full pages of their prompts."""
        rows, groups = batch.rows, -(-batch.rows // PEERS)
        shared, contexts = [0] * rows, [batch.context] * rows
        if not batch.context:
            shared = [(batch.prompt + row // PEERS * batch.prompts // groups) // PAGE for row in range(rows)]
            contexts = [shared[row] * PAGE + 2 + row * 37 % batch.answers for row in range(rows)]
        table = torch.zeros(rows, -(-max(contexts) // PAGE), dtype=torch.int32)
        peers, read, leader = torch.full((rows, PEERS), -1, dtype=torch.int32), 0, 0
        counts = [-(-context // PAGE) for context in contexts]
        free = iter((torch.randperm(sum(counts), generator=torch.Generator().manual_seed(0)) + 1).tolist())
        for row, count in enumerate(counts):
            leader = row - row % PEERS
            own = shared[row] if row != leader else 0  # a leader's pages are its own
            table[row, :own] = table[leader, :own]
            table[row, own:count] = torch.tensor([next(free) for _ in range(own, count)])
            read += contexts[row] - own * PAGE
            peers[leader, row - leader] = row
        total = sum(contexts)
        longest = max(contexts) if batch.context else sys.maxsize
        chunk, items = choose_chunk(rows, total, longest, shape.kv_heads)
        sharing = None
        if not batch.context:
            items = items_bound(2 * rows, total, chunk)
            sharing = Sharing(memory.integers(shared, torch.int32), peers.to(memory.device))
        plan = DecodePlan.allocate(rows, max(items, rows + 1), shape.heads, shape.size, memory.device)
        length = memory.integers(contexts, torch.int64)
        if memory.device != "meta":
            plan_items(plan, length, chunk, items, sharing)
        slots = (sum(counts) + 1) * PAGE
        return cls(
            memory.random(rows, shape.heads, shape.size),
            memory.copies(lambda: memory.random(2, slots, shape.kv_heads, shape.size)),
            table.to(memory.device), length, plan, chunk, items,
            torch.zeros(rows, shape.heads, shape.size, dtype=memory.dtype, device=memory.device), sharing, read,
            sum(-(-own * PAGE // chunk) + -(-(context - own * PAGE) // chunk)
                for own, context in zip(shared, contexts, strict=True)),
        )  # fmt: skip

    def arguments(self, layer: int) -> tuple[Any, ...]:
        keys, values = self.caches[layer % len(self.caches)]
        return (self.q, keys, values, self.table, self.contexts, self.plan, self.chunk, self.max_items,
                self.q.shape[2] ** -0.5, self.out, self.sharing)  # fmt: skip

    def merge(self, layer: int) -> None:
        """The second launch of the product's `paged_decode`, alone."""
        plan, out = self.plan, self.out
        rows, heads, size = out.shape
        decode_attention._merge_kernel[(rows * heads,)](
            plan.first_item, plan.partial_out, plan.partial_stats, out, self.max_items, plan.partial_stats.stride(0),
            *out.stride()[:2], HEADS=heads, SIZE=size, BLOCK_SIZE=power_of_two(size),
            BLOCK_ITEMS=decode_attention.MERGE_ITEMS, num_warps=decode_attention.MERGE_WARPS,
        )  # fmt: skip

    @property
    def facts(self) -> dict[str, Any]:
        return {"chunk": self.chunk, "max_items": self.max_items, "items": self.items}


def mergings(shape: Shape, batch: Batch) -> list[Merging]:
    if batch.context:
        return [Merging(1, 8, 1), Merging(2, 8, 1), Merging(4, 8, 2), Merging(1, 16, 2)]
    return [Merging(16, 2, 4), Merging(8, 2, 2), Merging(4, 2, 1), Merging(4, 4, 1)]


def merge_case(shape: Shape, batch: Batch, memory: Memory) -> Case:
    step = Attention.of(shape, batch, memory)
    if memory.device != "meta":
        decode_attention.paged_decode(*step.arguments(0))  # leaves the partials

    def call(layer: int, merging: Merging) -> None:
        candidates.merge(step.plan, step.contexts, step.chunk, step.max_items, step.out, step.sharing, merging)

    moved = step.items * shape.heads * (shape.size + 2) * 4 + step.out.numel() * step.out.element_size()
    found = {label(merging): partial(call, merging=merging) for merging in mergings(shape, batch)}
    return Case(moved, step.merge, found, [step.out], facts=step.facts)


def attention_case(shape: Shape, batch: Batch, memory: Memory) -> Case:
    step = Attention.of(shape, batch, memory)
    merging = mergings(shape, batch)[1]
    commons = [Attending(32, 4, 3), Attending(64, 4, 3), Attending(32, 4, 5)]
    owns = [Attending(32, 4, 3), Attending(64, 4, 3), Attending(32, 2, 3), Attending(32, 1, 3), Attending(32, 4, 5)]
    tried = [(commons[0], own, True) for own in owns]
    if step.sharing is not None:
        tried += [(common, owns[0], True) for common in commons[1:]] + [(commons[0], owns[0], False)]

    def call(layer: int, common: Attending, own: Attending, finish: bool) -> None:
        candidates.paged_decode(*step.arguments(layer), common=common, own=own, merging=merging, finish=finish)

    def product(layer: int) -> None:
        decode_attention.paged_decode(*step.arguments(layer))

    row_bytes = power_of_two(shape.size) * memory.dtype.itemsize
    found: dict[str, Callable[[int], object]] = {
        f"product {tokens}": with_constants(product, decode_attention, TILE_BYTES=tokens * row_bytes)
        for tokens in (32, 64)
        if tokens * row_bytes != decode_attention.TILE_BYTES
    }
    for common, own, finish in tried:
        name = f"{'finishing' if finish else 'two launches'} {label(common, own)}"
        found[name] = partial(call, common=common, own=own, finish=finish)
    moved = (step.read_tokens * 2 * shape.kv_heads * shape.size + 2 * step.out.numel()) * step.out.element_size()
    return Case(moved, product, found, [step.out], facts={**step.facts, "read_tokens": step.read_tokens})


CASES: dict[str, Callable[[Shape, Batch, Memory], Case]] = {
    "gate": gate_case,
    "add_norm": add_norm_case,
    "split_heads": split_heads_case,
    "merge": merge_case,
    "attention": attention_case,
}


def plan(options: argparse.Namespace) -> Iterator[tuple[str, str, Batch]]:
    """Every kernel, shape and batch that is measured."""
    if options.tiny:
        batches = {"layers": [Batch(9, 2)], "attention": [Batch(3, 1, 0, 16, 0, 20), Batch(1, 1, 520)]}
    else:
        mixed = [rows for rows in options.rows if rows > 64]
        few = [Batch(64, 1), Batch(64, 4)] if 64 in options.rows else []
        batches = {
            "layers": [*few, *(Batch(rows, 4) for rows in mixed)],
            "attention": [*(Batch(rows, 1) for rows in mixed), Batch(LONG_ROWS, 1, LONG_CONTEXT)],
        }
    for shape in TINY if options.tiny else options.shapes:
        for kernel in options.kernels:
            for batch in batches["attention" if kernel in ("merge", "attention") else "layers"]:
                yield kernel, shape, batch


# -- times -------------------------------------------------------------------------------------------------------------


def microseconds(call: Callable[[int], object], device: str) -> float:
    """Microseconds of a call: the median over replays of a graph of `CALLS` calls, each for another layer."""
    if device != "cuda":
        began = time.perf_counter()
        call(1)
        return (time.perf_counter() - began) * 1e6
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):  # `torch.cuda.graph` collects garbage first, which takes longer than the replays
        graph.capture_begin()
        try:
            for layer in range(CALLS):
                call(layer)
        finally:
            graph.capture_end()
    torch.cuda.synchronize()
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)
    times = []
    for _ in range(REPEATS):
        flush.zero_()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / CALLS)
    return sorted(times)[len(times) // 2]


def results_of(case: Case, call: Callable[[int], object]) -> list[Tensor]:
    """The tensors that a call writes, after memory that holds NaN or the state before."""
    for each in case.results:
        each.fill_(float("nan"))
    case.reset()
    call(0)
    return [each.float().clone() for each in case.results]


def difference(made: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """The largest relative difference of the results; infinite if one is NaN where the other is not."""
    found = 0.0
    for ours, theirs in zip(made, wanted, strict=True):
        if not torch.equal(ours.isnan(), theirs.isnan()):
            return float("inf")
        off = (ours - theirs).nan_to_num(0.0).norm() / theirs.nan_to_num(0.0).norm().clamp_min(1e-20)
        found = max(found, float(off))
    return found


def measure(case: Case, device: str, bandwidth: float) -> dict[str, Any]:
    """Times the product and every candidate; a candidate that fails or is wrong is named with its error."""
    wanted = results_of(case, case.product)
    variants: dict[str, float] = {}
    errors: dict[str, str] = {}
    product = microseconds(case.product, device)
    for name, call in case.candidates.items():
        try:
            off = difference(results_of(case, call), wanted)
            if off > LARGEST_ERROR:
                errors[name] = f"differs by {off:.1e}"
                continue
            variants[name] = round(microseconds(call, device), 2)
        except Exception as error:
            errors[name] = f"{type(error).__name__}: {str(error)[-200:]}"
    best = min(variants, key=lambda name: variants[name], default="")
    for name, text in errors.items():
        print(f"  {name}: {text}", flush=True)
    return {
        "floor_us": round(case.floor_bytes / bandwidth * 1e6, 2),
        "product_us": round(product, 2),
        "best_us": variants.get(best, float("nan")),
        "ratio": round(product / variants[best], 3) if best else float("nan"),
        "best": best or "none",
        "variants": variants,
        "errors": errors,
        **case.facts,
    }


def run(options: argparse.Namespace) -> int:
    """Measures all cells, one line each."""
    cells = from_options(options)
    device, dtype = options.device, torch.bfloat16 if options.device == "cuda" else torch.float32
    bandwidth = measure_rates(device, quick=device != "cuda").bandwidth
    began = time.perf_counter()
    lines = []
    for kernel, name, batch in plan(options):
        shape = (TINY if options.tiny else SHAPES)[name]
        parameters: dict[str, int | float | str] = {
            "kernel": kernel,
            "shape": name,
            "rows": batch.rows,
            "slots": batch.slots,
            "context": batch.context,
        }
        cell = Cell("kernel-variants", "native", parameters)
        if cells.has(cell):
            continue
        try:
            case = CASES[kernel](shape, batch, Memory(device, dtype, CALLS if device == "cuda" else 2))
            if options.tiny:
                case.candidates = dict(list(case.candidates.items())[-1:])
            found = measure(case, device, bandwidth)
        except Exception as error:  # of the product: the other cells go on
            print(f"{cell.name}: {type(error).__name__}: {str(error)[:300]}", flush=True)
            continue
        finally:
            release_memory(device)
        cells.write(cell, found)
        lines.append(
            f"{kernel:11} {name:13} {batch.rows:5} {batch.slots:5} {batch.context:7} {found['floor_us']:8.2f} "
            f"{found['product_us']:8.2f} {found['best_us']:8.2f} {found['ratio']:6.2f}  {found['best']}"
        )
        print(f"{lines[-1]}  ({time.perf_counter() - began:.0f} s)", flush=True)
    print(f"{'kernel':11} {'shape':13} {'rows':>5} {'slots':>5} {'context':>7} {'floor':>8} {'product':>8} {'best':>8} "
          f"{'ratio':>6}  constants (microseconds a call)")  # fmt: skip
    print("\n".join(lines), flush=True)
    return 0


# -- compilation without a GPU -----------------------------------------------------------------------------------------


@contextmanager
def compiled_only(capability: int, made: list[Any]) -> Iterator[None]:
    """Lets a launch compile its kernel for a CUDA device that need not be there, and append it to `made`."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    class Absent:
        """As much of a driver as a compilation asks for."""

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int) -> int:
            return 0

        def get_current_target(self) -> Any:
            return GPUTarget("cuda", capability, 32)

    kept, driver._active = driver._active, Absent()
    original = JITFunction.run

    def compile_it(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        found = original(self, *args, grid=grid, warmup=True, **kwargs)
        made.append(found)
        return found

    JITFunction.run = compile_it
    try:
        yield
    finally:
        JITFunction.run, driver._active = original, kept


def usage(compiled: Any) -> str:
    """Registers, spills and shared memory of a compiled kernel, and its programs on a multiprocessor at once.

    What the stack holds are spills.
    """
    from triton.backends import nvidia

    tool = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        text = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True).stdout
    numbers = {name: int(number) for name, number in re.findall(r"(REG|STACK):(\d+)", text)}
    meta, registers, stack = compiled.metadata, numbers.get("REG", 0), numbers.get("STACK", 0)
    by_registers = REGISTERS // max(1, -(-registers // 8) * 8 * 32 * meta.num_warps)
    resident = min(by_registers, SHARED_BYTES // (meta.shared + 1024), MOST_WARPS // meta.num_warps)
    return (f"{meta.name:20} warps {meta.num_warps:2} registers {registers:3} stack {stack:4} shared {meta.shared:6} "
            f"resident {resident:2}")  # fmt: skip


def compile_only(options: argparse.Namespace) -> int:
    """Compiles every variant of a share of the cells, and prints what each takes of a multiprocessor."""
    part, parts = options.share
    number, failed, seen = 0, 0, set[str]()
    for kernel, name, batch in plan(options):
        case = CASES[kernel](SHAPES[name], batch, Memory("meta", torch.bfloat16, 1))
        for variant, call in {"product": case.product, **case.candidates}.items():
            number += 1
            if number % parts != part:
                continue
            made: list[Any] = []
            try:
                with compiled_only(options.capability, made):
                    call(0)
            except Exception as error:
                failed += 1
                print(
                    f"{kernel} {name} {batch.rows} {variant}: {type(error).__name__}: {str(error)[-300:]}", flush=True
                )
                continue
            for each in made:
                if each.hash not in seen and not options.quiet:
                    seen.add(each.hash)
                    print(f"{kernel:11} {name:13} {batch.rows:5} {usage(each)}  {variant}", flush=True)
    return 1 if failed else 0


def compile_first(options: argparse.Namespace) -> None:
    """Fills Triton's cache by several processes at once."""
    began, workers = time.perf_counter(), options.workers
    command = [sys.executable, "-m", "bench.gpu.kernel_variants", "--compile-only", "--quiet",
               "--kernels", ",".join(options.kernels), "--shapes", ",".join(options.shapes),
               "--rows", ",".join(map(str, options.rows)), "--capability", str(options.capability)]  # fmt: skip
    running = [subprocess.Popen([*command, "--share", f"{part}/{workers}"]) for part in range(workers)]
    failed = sum(process.wait() != 0 for process in running)
    print(
        f"compiled by {workers} processes in {time.perf_counter() - began:.0f} s, {failed} of them with errors",
        flush=True,
    )


def interpreted_loops() -> None:
    """Lets interpreted kernels loop up to a loaded number, which newer versions of numpy do not convert."""
    from triton.runtime import interpreter

    original = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patched


def share(text: str) -> tuple[int, int]:
    part, parts = text.split("/")
    return int(part), int(parts)


def parser_of() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--kernels", type=words, default=list(KERNELS))
    parser.add_argument("--shapes", type=words, default=list(SHAPES))
    parser.add_argument("--rows", type=integers, default=[64, 256, 512, 1536])
    parser.add_argument("--compile-only", action="store_true", help="compile and print registers; needs no GPU")
    parser.add_argument(
        "--capability", type=int, default=0, help="of the device that is compiled for; default: this one's, or 90"
    )
    parser.add_argument("--share", type=share, default=(0, 1), help="compile only these variants: part/parts")
    parser.add_argument(
        "--workers", type=int, default=min(16, os.cpu_count() or 1), help="processes that compile; 0: none"
    )
    parser.add_argument("--quiet", action="store_true", help="print nothing of what compiles")
    return parser


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Returns the options, with the capability of the device."""
    options = parser_of().parse_args(arguments)
    if not options.capability:
        major, minor = torch.cuda.get_device_capability() if torch.cuda.is_available() else (9, 0)
        options.capability = 10 * major + minor
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    torch.manual_seed(0)
    if options.compile_only:
        return compile_only(options)
    if options.device == "cuda":
        if options.workers:
            compile_first(options)
        return run(options)
    if os.environ.get("TRITON_INTERPRET") != "1":  # it is read when the kernels are imported
        given = sys.argv[1:] if arguments is None else arguments
        command = [sys.executable, "-m", "bench.gpu.kernel_variants", *given]
        return subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, check=False).returncode
    options.tiny = True
    interpreted_loops()
    return run(options)


if __name__ == "__main__":
    raise SystemExit(main())
