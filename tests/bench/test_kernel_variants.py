"""The candidates of `bench.gpu.kernel_candidates` against the twins in plain torch, and their bench on a tiny shape."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kernel_references
import pytest
import torch
from kernel_interpreter import interpreted_kernels
from torch import Tensor

pytest.importorskip("triton")

from bench.gpu import kernel_candidates as candidates
from bench.gpu import kernel_variants
from bench.gpu.kernel_candidates import Attending, Merging, Tiling
from stretto.engines.native.cache import PAGE
from stretto.engines.native.kernels import decode_attention
from stretto.engines.native.kernels.decode_work_list import DecodePlan, Sharing, plan_items

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPSILON, SCALE = 1e-6, 0.75
WAYS = pytest.mark.parametrize("way", ["all", "range"])
LAYERS = [  # tokens, width, slots, rank
    (3, 24, 1, 3),
    (19, 40, 3, 5),
    (35, 72, 4, 16),
]


@pytest.fixture(autouse=True)
def loops_over_device_values(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with interpreted_kernels(monkeypatch):
        yield


def random(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + 31 * sum(shape))
    return torch.randn(*shape, generator=generator).to(DEVICE)


def factor(num_slots: int, rank: int, out: int, seed: int = 0) -> Tensor:
    return random(num_slots * rank, out, seed=seed) / rank**0.5


def chosen(tokens: int, num_slots: int) -> Tensor:
    """Slots of which the first tile of 16 tokens has none but the middle ones, if there are four."""
    slots = torch.randint(num_slots, (tokens,), generator=torch.Generator().manual_seed(tokens))
    if num_slots == 4:
        slots[:16] = slots[:16] % 2 + 1
    return slots.to(DEVICE)


def close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-5, equal_nan=True)


@WAYS
@pytest.mark.parametrize(("tokens", "width", "num_slots", "rank"), LAYERS)
def test_gate_and_up_get_their_adapters(tokens: int, width: int, num_slots: int, rank: int, way: str) -> None:
    gate_up = random(tokens, 2 * width + 2 * num_slots * rank)
    bs = (factor(num_slots, rank, width, 1), factor(num_slots, rank, width, 2))
    slots, made, wanted = chosen(tokens, num_slots), random(tokens, width), random(tokens, width)
    candidates.gate(gate_up, width, "silu", slots, bs, rank, SCALE, made, Tiling(way, 16, 32, 32, 4, 2))
    close(made, kernel_references.gate(gate_up, width, "silu", slots, bs, rank, SCALE, wanted))


@WAYS
@pytest.mark.parametrize("columns", [0, 32])
@pytest.mark.parametrize(("tokens", "width", "num_slots", "rank"), LAYERS)
def test_the_residual_gets_its_adapters_and_is_normalized(
    tokens: int, width: int, num_slots: int, rank: int, columns: int, way: str
) -> None:
    stream, added, weight = random(tokens, width), random(tokens, width + num_slots * rank, seed=1), random(width)
    twin, slots, b = stream.clone(), chosen(tokens, num_slots), factor(num_slots, rank, width)
    made = candidates.add_norm(
        stream, added, weight, EPSILON, slots, b, rank, SCALE, None, Tiling(way, 16, columns, 16, 4, 2)
    )
    close(made, kernel_references.add_norm(twin, added, weight, EPSILON, slots, b, rank, SCALE))
    close(stream, twin)


@WAYS
@pytest.mark.parametrize(
    ("tokens", "size", "num_slots", "rank", "normed"), [(3, 12, 1, 3, True), (19, 16, 3, 5, False)]
)
def test_heads_get_their_adapters(tokens: int, size: int, num_slots: int, rank: int, normed: bool, way: str) -> None:
    widths = (4 * size, 2 * size, 2 * size)
    norms = (random(size, seed=1), random(size, seed=2)) if normed else (None, None)
    inputs = (random(tokens, sum(widths) + 3 * num_slots * rank), 4, 2, size, *norms, EPSILON, random(32, 2 * size),
              torch.arange(tokens, device=DEVICE), chosen(tokens, num_slots),
              tuple(factor(num_slots, rank, width) for width in widths), rank, SCALE,
              torch.arange(tokens, device=DEVICE).flip(0))  # fmt: skip
    caches, qs = torch.zeros(2, 2, tokens, 2, size, device=DEVICE), torch.zeros(2, tokens, 4, size, device=DEVICE)
    candidates.split_heads(*inputs, caches[0, 0], caches[0, 1], qs[0], Tiling(way, 16, 0, 16, 4, 2))  # type: ignore[arg-type]
    kernel_references.split_heads(*inputs, caches[1, 0], caches[1, 1], qs[1])  # type: ignore[arg-type]
    close(caches[0], caches[1])
    close(qs[0], qs[1])


@WAYS
@pytest.mark.parametrize("kernel", ["gate", "tiled", "fused"])
def test_no_nan_of_another_version_reaches_a_token(kernel: str, way: str) -> None:
    """Slot 1 is broken in what its A gives for every token, and under `range` in its B too."""
    tokens, width, num_slots, rank = 6, 24, 3, 4
    slots = torch.tensor([0, 1, 2, 2, 1, 0], device=DEVICE)
    fused = 2 if kernel == "gate" else 1
    results = []
    for broken in (False, True):
        x, bs = random(tokens, fused * (width + num_slots * rank)), [factor(num_slots, rank, width, s) for s in (1, 2)]
        for layer in range(fused if broken else 0):
            at = fused * width + layer * num_slots * rank
            x[:, at + rank : at + 2 * rank] = torch.nan
            if way == "range":
                bs[layer][rank : 2 * rank] = torch.nan
        tiling = Tiling(way, 16, 0 if kernel == "fused" else 16, 16, 4, 2)
        if kernel == "gate":
            results.append(candidates.gate(x, width, "silu", slots, (bs[0], bs[1]), rank, SCALE, None, tiling))
        else:
            stream, weight = random(tokens, width, seed=5), random(width)
            results.append(candidates.add_norm(stream, x, weight, EPSILON, slots, bs[0], rank, SCALE, None, tiling))
    assert torch.equal(results[0][slots != 1], results[1][slots != 1])
    assert results[1][slots == 1].isnan().all()


@WAYS
def test_a_token_has_the_same_bits_whoever_stands_beside_it(way: str) -> None:
    width, num_slots, rank = 40, 3, 4
    gate_up, slots = random(20, 2 * width + 2 * num_slots * rank), chosen(20, num_slots)
    bs, tiling = (factor(num_slots, rank, width, 1), factor(num_slots, rank, width, 2)), Tiling(way, 16, 64, 16, 4, 2)
    together = candidates.gate(gate_up, width, "silu", slots, bs, rank, SCALE, None, tiling)
    for token in (0, 13, 19):
        own = slice(token, token + 1)
        alone = candidates.gate(gate_up[own], width, "silu", slots[own], bs, rank, SCALE, None, tiling)
        assert torch.equal(alone[0], together[token])


class Step:
    """The operands of `paged_decode` with scattered pages; what no context covers is NaN."""

    def __init__(
        self, contexts: list[int], heads: int, kv_heads: int, size: int, max_items: int, pages: list[int] | None = None,
        lists: dict[int, list[int]] | None = None,
    ) -> None:  # fmt: skip
        counts = [-(-context // PAGE) for context in contexts]
        order = (torch.randperm(sum(counts), generator=torch.Generator().manual_seed(0)) + 1).int().split(counts)
        self.table = torch.zeros(len(contexts), max(counts), dtype=torch.int32)
        for row, own in enumerate(order):
            self.table[row, : len(own)] = own
        self.sharing = None
        if pages is not None and lists is not None:
            peers = torch.full((len(contexts), 3), -1, dtype=torch.int32)
            for leader, rows in lists.items():
                peers[leader, : len(rows)] = torch.tensor(rows)
                for row in rows:
                    self.table[row, : pages[row]] = self.table[leader, : pages[row]]
            self.sharing = Sharing(torch.tensor(pages, dtype=torch.int32, device=DEVICE), peers.to(DEVICE))
        cache = torch.full((2, (sum(counts) + 1) * PAGE, kv_heads, size), math.nan)
        for row, context in enumerate(contexts):
            cache[:, kernel_references.context_slots(self.table[row], context)] = torch.randn(
                2, context, kv_heads, size, generator=torch.Generator().manual_seed(7 + row)
            )
        self.table, self.cache = self.table.to(DEVICE), cache.to(DEVICE)
        self.contexts, self.q = torch.tensor(contexts, device=DEVICE), random(len(contexts), heads, size)
        self.max_items = max_items
        self.plan = DecodePlan.allocate(len(contexts), max_items, heads, size, DEVICE)
        plan_items(self.plan, self.contexts, 64, max_items, self.sharing)

    def arguments(self) -> tuple[Any, ...]:
        return (self.q, *self.cache, self.table, self.contexts, self.plan, 64, self.max_items, 0.3,
                torch.full_like(self.q, math.nan), self.sharing)  # fmt: skip

    def attended(self, finish: bool) -> Tensor:
        own = Attending(32, 1, 2)
        return candidates.paged_decode(*self.arguments(), own, own, Merging(2, 2, 1), finish)


SHARED = [100, 90, 30, 49, 130, 85], [5, 5, 0, 2, 2, 5], {0: [0, 5, 1], 3: [3, 4]}


@pytest.mark.parametrize("finish", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(4, 2, 16), (7, 1, 24)])
def test_attention_in_two_launches_is_what_the_reference_computes(
    heads: int, kv_heads: int, size: int, finish: bool
) -> None:
    contexts, pages, lists = SHARED
    step = Step(contexts, heads, kv_heads, size, 17, pages, lists)
    close(step.attended(finish), kernel_references.paged_decode(*step.arguments()))


@pytest.mark.parametrize("finish", [False, True])
def test_rows_that_share_nothing_are_attended_to(finish: bool) -> None:
    step = Step([1, 64, 65, 200, 16], 3, 1, 16, 9)
    close(step.attended(finish), kernel_references.paged_decode(*step.arguments()))


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("finish", [False, True])
@pytest.mark.parametrize("shares", [False, True])
def test_a_bound_that_is_too_small_gives_nan_where_the_product_does(shares: bool, finish: bool) -> None:
    contexts, pages, lists = ([70, 70, 30, 75], [2, 2, 0, 0], {0: [0, 1]}) if shares else ([64, 200, 30], None, None)
    step = Step(contexts, 2, 1, 16, 5 if shares else 4, pages, lists)
    wanted = decode_attention.paged_decode(*step.arguments())
    assert wanted.isnan().any()
    assert not wanted[0].isnan().any()
    close(step.attended(finish), wanted)


@pytest.mark.parametrize("merging", [Merging(4, 2, 1), Merging(1, 8, 1)])
def test_rows_of_one_item_and_of_many_are_merged_as_the_product_merges(merging: Merging) -> None:
    step = Step([64 * 5 + 7, 20, 130], 3, 1, 16, 12)
    wanted = decode_attention.paged_decode(*step.arguments())
    made = torch.full_like(wanted, 7.0)
    candidates.merge(step.plan, step.contexts, 64, 12, made, None, merging)
    close(made[[0, 2]], wanted[[0, 2]])
    assert (made[1] == 7.0).all(), "a row of one item is done already"


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_the_bench_compares_every_kernel(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert kernel_variants.main(["--tiny", "--device", DEVICE, "--workers", "0", "--out", str(tmp_path)]) == 0
    records = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("*.json"))]
    assert {record["parameters"]["kernel"] for record in records} == set(kernel_variants.KERNELS)
    assert len(records) == 7
    for record in records:
        found = record["results"]
        assert found["errors"] == {}
        assert found["best"] in found["variants"]
        assert found["ratio"] == pytest.approx(found["product_us"] / found["best_us"], rel=0.01)
    assert capsys.readouterr().out.count("\nattention ") == 4, "as it goes, and in the table"


def test_a_candidate_that_fails_or_is_wrong_is_recorded_and_is_not_the_best() -> None:
    out = torch.zeros(4)

    def fails(layer: int) -> None:
        raise ValueError("too much shared memory")

    ways = {"fails": fails, "wrong": lambda layer: out.fill_(2.0), "right": lambda layer: out.fill_(1.0)}
    case = kernel_variants.Case(1e6, lambda layer: out.fill_(1.0), ways, [out])
    found = kernel_variants.measure(case, "cpu", 1e12)
    assert found["best"] == "right"
    assert found["errors"] == {"fails": "ValueError: too much shared memory", "wrong": "differs by 1.0e+00"}
    assert found["floor_us"] == 1.0
