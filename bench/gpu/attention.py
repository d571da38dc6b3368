"""Attention over the paged cache, alone: our kernels against FlashInfer's, and against torch's without pages.

    python -m bench.gpu.attention --out bench/results/gpu/attention.json
    python -m bench.gpu.attention --tune                     # tries the shapes of our prefill kernel's blocks

All sides read the same cache, with pages of 16 tokens in random order. Decode is timed as the replay of a CUDA graph,
which is how every engine runs it. `torch` is `scaled_dot_product_attention` by cuDNN over equal prompts that lie side
by side: it knows no pages, and so shows what they cost. FlashInfer compiles its kernels when they are first used; that
is not timed. Each side's result is compared with attention in float32.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.gpu.cells import write_results
from stretto.engines.native.cache import PAGE
from stretto.engines.native.kernels import prefill_attention
from stretto.engines.native.kernels.decode_attention import paged_decode
from stretto.engines.native.kernels.decode_work_list import DecodePlan, choose_chunk, plan_items
from stretto.engines.native.kernels.prefill_attention import paged_extend

HEADS = {"qwen3-1.7b": (16, 8, 128), "qwen2.5-1.5b": (12, 2, 128)}  # heads, kv heads, size
DECODES = [("256 rows of 640", [640] * 256), ("32 rows of 8,192", [8_192] * 32)]
PREFILLS = [("1 of 8,192", 0, [8_192]), ("8 of 1,024", 0, [1_024] * 8), ("32 of 256", 0, [256] * 32),
            ("16 of 512 after 8,192", 8_192, [512] * 16)]  # fmt: skip
WORKSPACE = 256 * 2**20


@dataclass
class Cache:
    """Sequences of `contexts` tokens in pages of random order, and the tables of both conventions."""

    contexts: list[int]
    keys: Tensor  # [slots, kv heads, size]
    values: Tensor
    table: Tensor  # [rows, pages] int32
    indptr: Tensor  # [rows + 1] int32, in host memory
    indices: Tensor  # [pages] int32
    last: Tensor  # [rows] int32, in host memory: tokens in the last page

    @classmethod
    def of(cls, contexts: list[int], kv_heads: int, size: int) -> Cache:
        counts = [-(-context // PAGE) for context in contexts]
        order = torch.randperm(sum(counts), device="cuda").int() + 1
        keys, values = (
            torch.randn((sum(counts) + 1) * PAGE, kv_heads, size, device="cuda", dtype=torch.bfloat16) for _ in "kv"
        )
        table = torch.zeros(len(contexts), max(counts), dtype=torch.int32, device="cuda")
        for row, pages in enumerate(order.split(counts)):
            table[row, : len(pages)] = pages
        indptr = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32)
        last = torch.tensor([(context - 1) % PAGE + 1 for context in contexts], dtype=torch.int32)
        return cls(contexts, keys, values, table, indptr, order, last)

    @property
    def paged(self) -> tuple[Tensor, Tensor]:
        shape = (-1, PAGE, *self.keys.shape[1:])
        return self.keys.view(shape), self.values.view(shape)

    def sequence(self, row: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one sequence, [tokens, kv heads, size]."""
        slots = (self.table[row, :, None].long() * PAGE + torch.arange(PAGE, device="cuda")).view(-1)
        slots = slots[: self.contexts[row]]
        return self.keys[slots], self.values[slots]


def exact(q: Tensor, cache: Cache, row: int, scale: float) -> Tensor:
    """The attention of the last tokens of a sequence in float32, [tokens, heads, size]."""
    keys, values = (x.float().transpose(0, 1) for x in cache.sequence(row))
    count, group = q.shape[0], q.shape[1] // keys.shape[0]
    keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
    first = keys.shape[1] - count
    mask = torch.arange(keys.shape[1], device="cuda") <= first + torch.arange(count, device="cuda")[:, None]
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(
            q.float().transpose(0, 1), keys, values, attn_mask=mask, scale=scale
        ).transpose(0, 1)


def milliseconds(work: Callable[[], object], *, graph: bool, repeats: int) -> float:
    """The median over single runs, between events."""
    work()
    torch.cuda.synchronize()
    run: Callable[[], object] = work
    if graph:
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            work()
        run = captured.replay
    flush = torch.empty(256 * 2**20, dtype=torch.uint8, device="cuda")  # so that no run finds its cache in L2
    times = []
    for _ in range(repeats):
        flush.zero_()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[len(times) // 2]


def decode_sides(cache: Cache, q: Tensor, out: Tensor, scale: float) -> Iterator[tuple[str, Callable[[], object]]]:
    """Each side's attention of one token a row, into `out`."""
    rows, heads, size = q.shape
    contexts = torch.tensor(cache.contexts, dtype=torch.int32, device="cuda")
    chunk, items = choose_chunk(rows, sum(cache.contexts), max(cache.contexts), cache.keys.shape[1])
    plan = DecodePlan.allocate(rows, max(items, rows + 1), heads, size, "cuda")
    plan_items(plan, contexts, chunk, items)
    yield (
        "stretto",
        lambda: paged_decode(q, cache.keys, cache.values, cache.table, contexts, plan, chunk, items, scale, out),
    )
    flashinfer = module("flashinfer")
    if flashinfer is None:
        return
    for cores in (False, True):
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            torch.empty(WORKSPACE, dtype=torch.uint8, device="cuda"), "NHD", use_cuda_graph=True,
            use_tensor_cores=cores, paged_kv_indptr_buffer=cache.indptr.cuda(),
            paged_kv_indices_buffer=cache.indices.clone(), paged_kv_last_page_len_buffer=cache.last.cuda(),
        )  # fmt: skip
        wrapper.plan(
            cache.indptr, cache.indices, cache.last, heads, cache.keys.shape[1], size, PAGE, q_data_type=q.dtype,
            kv_data_type=q.dtype, sm_scale=scale,
        )  # fmt: skip
        yield f"flashinfer{' on tensor cores' if cores else ''}", lambda own=wrapper: own.run(q, cache.paged, out=out)


def prefill_sides(
    cache: Cache, start: int, lengths: list[int], q: Tensor, out: Tensor, scale: float
) -> Iterator[tuple[str, Callable[[], object]]]:
    """Each side's attention of the last `lengths` tokens of each sequence, into `out`."""
    chunks, heads, size = len(lengths), q.shape[1], q.shape[2]
    offsets = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    starts, places = torch.full((chunks,), start, dtype=torch.int32, device="cuda"), offsets.cuda()
    yield (
        "stretto",
        lambda: paged_extend(
            q, cache.keys, cache.values, cache.table, starts, places, max(lengths), scale, out
        ),
    )  # fmt: skip
    if not start:
        batch = (x.view(chunks, lengths[0], -1, size).transpose(1, 2) for x in (q, out))
        dense_q, dense_out = batch
        parts = zip(*map(cache.sequence, range(chunks)), strict=True)
        keys, values = (torch.stack(each).transpose(1, 2) for each in parts)

        def cudnn() -> None:
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                made = F.scaled_dot_product_attention(
                    dense_q, keys, values, is_causal=True, scale=scale, enable_gqa=True
                )
            dense_out.copy_(made)

        yield "torch by cuDNN, without pages", cudnn
    flashinfer = module("flashinfer")
    if flashinfer is None:
        return
    for backend in ("fa2", "fa3"):
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
            torch.empty(WORKSPACE, dtype=torch.uint8, device="cuda"), "NHD", backend=backend
        )
        wrapper.plan(
            offsets, cache.indptr, cache.indices, cache.last, heads, cache.keys.shape[1], size, PAGE, causal=True,
            sm_scale=scale, q_data_type=q.dtype, kv_data_type=q.dtype,
        )  # fmt: skip
        yield f"flashinfer {backend}", lambda own=wrapper: own.run(q, cache.paged, out=out)


def module(name: str) -> Any:
    """A module, or None if it is not installed."""
    try:
        return __import__(name)
    except ImportError as error:
        print(f"{name} is left out: {error}", flush=True)
        return None


def measure(
    kind: str, name: str, shape: str, sides: Iterator[tuple[str, Callable[[], object]]], q: Tensor, out: Tensor,
    wanted: Tensor, operations: float, repeats: int,
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """One line a side. A side that fails is named, and the next goes on."""
    while True:
        try:
            side, work = next(sides)
        except StopIteration:
            return
        except Exception as error:
            print(f"{kind} {name}: the next side failed: {type(error).__name__}: {str(error)[:300]}", flush=True)
            return
        out.fill_(float("nan"))
        try:
            work()
            off = float((out[: len(wanted)].float() - wanted).norm() / wanted.norm())
            spent = milliseconds(work, graph=kind == "decode", repeats=repeats)
        except Exception as failure:
            print(f"{kind} {name} {side}: {type(failure).__name__}: {str(failure)[:300]}", flush=True)
            continue
        found = {"kind": kind, "case": name, "shape": shape, "side": side, "ms": spent, "error": off,
                 "tflops": operations / spent / 1e9}  # fmt: skip
        line = f"{kind:8} {shape:13} {name:22} {side:30} {spent:8.4f} ms {found['tflops']:6.0f} TFLOP/s"
        print(f"{line}  error {off:.1e}", flush=True)
        yield found


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """All cases of all shapes."""
    found: list[dict[str, Any]] = []
    for shape, (heads, kv_heads, size) in HEADS.items():
        scale = size**-0.5
        for name, contexts in DECODES:
            cache = Cache.of(contexts, kv_heads, size)
            q = torch.randn(len(contexts), heads, size, device="cuda", dtype=torch.bfloat16)
            out, wanted = torch.empty_like(q), exact(q[:1], cache, 0, scale)
            sides = decode_sides(cache, q, out, scale)
            work = 4.0 * sum(contexts) * heads * size
            found += measure("decode", name, shape, sides, q, out, wanted, work, options.repeats)
        for name, start, lengths in PREFILLS:
            cache = Cache.of([start + length for length in lengths], kv_heads, size)
            q = torch.randn(sum(lengths), heads, size, device="cuda", dtype=torch.bfloat16)
            out, wanted = torch.empty_like(q), exact(q[: lengths[0]], cache, 0, scale)
            sides = prefill_sides(cache, start, lengths, q, out, scale)
            work = 4.0 * heads * size * sum(length * start + length * (length + 1) / 2 for length in lengths)
            found += measure("prefill", name, shape, sides, q, out, wanted, work, options.repeats)
    return found


def tune(options: argparse.Namespace) -> None:
    """Prints the time of our prefill kernel for each shape of its blocks."""
    heads, kv_heads, size = HEADS["qwen3-1.7b"]
    cases = []
    for name, start, lengths in PREFILLS:
        cache = Cache.of([start + length for length in lengths], kv_heads, size)
        q = torch.randn(sum(lengths), heads, size, device="cuda", dtype=torch.bfloat16)
        sides = prefill_sides(cache, start, lengths, q, torch.empty_like(q), size**-0.5)
        cases.append((name, next(sides)[1]))
    # Others spill registers or need more shared memory than there is.
    for pairs, tile, warps, stages in [
        (128, 64, 8, 2), (128, 64, 8, 3), (128, 64, 8, 4), (128, 64, 8, 5), (128, 128, 8, 2), (128, 128, 8, 3),
        (64, 64, 4, 3), (64, 64, 4, 5),
    ]:  # fmt: skip
        own = prefill_attention
        own.EXTEND_PAIRS, own.EXTEND_TILE, own.EXTEND_WARPS, own.EXTEND_STAGES = pairs, tile, warps, stages
        try:
            times = [milliseconds(work, graph=False, repeats=options.repeats) for _, work in cases]
        except Exception as error:  # too much shared memory
            print(f"pairs {pairs} tile {tile} warps {warps} stages {stages}: {str(error)[:80]}", flush=True)
            continue
        print(f"pairs {pairs:3} tile {tile:3} warps {warps} stages {stages}: " + " ".join(f"{t:8.4f}" for t in times),
              flush=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="a JSON file for the results")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--tune", action="store_true", help="try the shapes of our prefill kernel's blocks instead")
    options = parser.parse_args()
    torch.manual_seed(0)
    if options.tune:
        tune(options)
        return
    write_results(options.out, run(options))


if __name__ == "__main__":
    main()
