"""Paged attention: the kernels against their twins in plain torch, under the interpreter or on a device."""

from __future__ import annotations

import math

import kernel_references
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from stretto.engines.native.cache import PAGE
from stretto.engines.native.kernels import decode_attention as attention
from stretto.engines.native.kernels import decode_work_list as plans
from stretto.engines.native.kernels import prefill_attention as extend
from stretto.engines.native.kernels.decode_work_list import DecodePlan, Sharing, choose_chunk, items_bound

pytest.importorskip("triton")

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
# Interpreted products are wrong in bfloat16.
DTYPES = [torch.float32, torch.float16, torch.bfloat16] if CUDA else [torch.float32, torch.float16]
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@pytest.fixture(autouse=True)
def loops_over_device_values(interpreted: None) -> None:
    """All of these kernels loop up to loaded numbers."""


class Cached:
    """Sequences of random keys and values on scattered pages. Whatever no context covers is NaN."""

    def __init__(self, contexts: list[int], kv_heads: int, size: int, dtype: torch.dtype, seed: int = 0) -> None:
        pages = [-(-context // PAGE) for context in contexts]
        generator = torch.Generator().manual_seed(seed)
        scattered = (torch.randperm(sum(pages), generator=generator) + 1).split(pages)
        storage = torch.full((2, (sum(pages) + 1) * PAGE, kv_heads, size), math.nan)
        self.table = torch.full((len(contexts), max(pages) + 2), 1 << 28, dtype=torch.int32)
        for row, (own, context) in enumerate(zip(scattered, contexts, strict=True)):
            self.table[row, : pages[row]] = own
            drawn = torch.randn(2, context, kv_heads, size, generator=torch.Generator().manual_seed(seed + context))
            storage[:, kernel_references.context_slots(self.table[row], context)] = drawn
        self.keys, self.values = storage.to(DEVICE, dtype)
        self.table = self.table.to(DEVICE)
        self.contexts = torch.tensor(contexts, device=DEVICE)

    def share(self, groups: dict[int, list[int]], pages: list[int], width: int) -> Sharing:
        """Give the rows of each leader's list its first pages."""
        peers = torch.full((len(pages), width), -1, dtype=torch.int32)
        for leader, rows in groups.items():
            peers[leader, : len(rows)] = torch.tensor(rows)
            for row in rows:
                self.table[row, : pages[row]] = self.table[leader, : pages[row]]
        return Sharing(torch.tensor(pages, dtype=torch.int32, device=DEVICE), peers.to(DEVICE))


def queries(tokens: int, heads: int, size: int, dtype: torch.dtype, seed: int = 1) -> Tensor:
    """[tokens, heads, size], laid out heads first as a projection leaves them."""
    drawn = torch.randn(heads, tokens, size, generator=torch.Generator().manual_seed(seed))
    return drawn.to(DEVICE, dtype).transpose(0, 1)


def decode(
    cached: Cached, q: Tensor, chunk: int, max_items: int | None = None, sharing: Sharing | None = None
) -> Tensor:
    """The kernels' output; `max_items` is exactly enough if not given."""
    rows, heads, size = q.shape
    if max_items is None:
        max_items = int(sum(-(-context // chunk) for context in cached.contexts.tolist()))
    plan = DecodePlan.allocate(rows, max(max_items, rows + 1), heads, size, DEVICE)
    plans.plan_items(plan, cached.contexts, chunk, max_items, sharing)
    out = torch.full_like(q, math.nan)
    return attention.paged_decode(
        q, cached.keys, cached.values, cached.table, cached.contexts, plan, chunk, max_items, 0.3, out, sharing
    )


def expected(cached: Cached, q: Tensor) -> Tensor:
    plan = DecodePlan.allocate(0, 0, 0, 0, DEVICE)
    return kernel_references.paged_decode(
        q, cached.keys, cached.values, cached.table, cached.contexts, plan, 64, 0, 0.3, torch.empty_like(q)
    )


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "contexts", "chunk"),
    [
        (4, 2, 32, [1, 64, 65, 200, 16], 64),
        (1, 1, 64, [129, 300], 128),
        (7, 1, 96, [70, 3], 64),
        (4, 2, 128, [130], 64),
        (6, 2, 48, [257, 31], 256),
        (16, 1, 256, [20, 90], 64),
    ],
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_decoding_in_chunks_equals_dense_attention(
    heads: int, kv_heads: int, size: int, contexts: list[int], chunk: int, dtype: torch.dtype
) -> None:
    cached, q = Cached(contexts, kv_heads, size, dtype), queries(len(contexts), heads, size, dtype)
    torch.testing.assert_close(decode(cached, q, chunk), expected(cached, q), atol=TOLERANCE[dtype], rtol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_one_item_need_no_plan_whatever_their_context(dtype: torch.dtype) -> None:
    contexts = [1, 130, 17, 64]
    cached, q = Cached(contexts, 2, 64, dtype), queries(4, 4, 64, dtype)
    found = decode(cached, q, 64, max_items=len(contexts))
    torch.testing.assert_close(found, expected(cached, q), atol=TOLERANCE[dtype], rtol=0)


def test_a_row_does_not_depend_on_its_neighbours_or_on_the_bound() -> None:
    q = queries(3, 4, 32, torch.float32)
    first = decode(Cached([150, 20, 64], 2, 32, torch.float32), q, 64)
    other = decode(Cached([150, 70, 1], 2, 32, torch.float32, seed=0), q, 64, max_items=12)
    alone = decode(Cached([150], 2, 32, torch.float32), q[:1], 64)
    assert torch.equal(first[0], other[0])
    assert torch.equal(first[0], alone[0])


def test_a_row_within_its_chunk_has_the_same_bits_under_every_chunk() -> None:
    cached, q = Cached([60, 150], 1, 32, torch.float32), queries(2, 2, 32, torch.float32)
    whole = decode(cached, q, 2048, max_items=3)
    assert torch.equal(decode(cached, q, 64)[0], whole[0])
    assert torch.equal(decode(cached, q, 256, max_items=3), whole)


def test_output_goes_where_its_strides_say_and_contexts_may_be_short_integers() -> None:
    cached, q = Cached([5, 80], 2, 32, torch.float32), queries(2, 4, 32, torch.float32)
    cached.contexts = cached.contexts.int()
    plan, room = DecodePlan.allocate(2, 5, 4, 32, DEVICE), torch.zeros(2, 6, 64, device=DEVICE)
    plans.plan_items(plan, cached.contexts, 64, 5)
    out = room[:, 1:5, 16:48]
    attention.paged_decode(q, cached.keys, cached.values, cached.table, cached.contexts, plan, 64, 5, 0.3, out)
    torch.testing.assert_close(out, expected(cached, q), atol=2e-5, rtol=0)
    assert room.count_nonzero() == out.numel()


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_a_bound_that_is_too_small_gives_nan_and_not_a_part_of_the_context() -> None:
    cached, q = Cached([64, 200, 30], 1, 32, torch.float32), queries(3, 1, 32, torch.float32)
    found = decode(cached, q, 64, max_items=4)
    assert not found[0].isnan().any()
    assert found[1:].isnan().all()


def test_many_items_of_one_row_are_merged() -> None:
    cached, q = Cached([64 * 33 + 7], 1, 32, torch.float32), queries(1, 2, 32, torch.float32)
    torch.testing.assert_close(decode(cached, q, 64), expected(cached, q), atol=2e-5, rtol=0)


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(4, 2, 32), (7, 1, 48), (20, 1, 16)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_pages_that_rows_share_are_read_by_their_leader_for_all(
    heads: int, kv_heads: int, size: int, dtype: torch.dtype
) -> None:
    contexts = [100, 90, 30, 49, 200, 85, 1]
    cached, q = Cached(contexts, kv_heads, size, dtype), queries(len(contexts), heads, size, dtype)
    # One list over two chunks and out of order, one with room left, rows that share nothing between them.
    sharing = cached.share({0: [0, 5, 1], 3: [3, 4]}, [5, 5, 0, 3, 3, 5, 0], width=3)
    found = decode(cached, q, 64, max_items=18, sharing=sharing)
    torch.testing.assert_close(found, expected(cached, q), atol=TOLERANCE[dtype], rtol=0)


def test_common_pages_of_several_chunks_are_split_among_programs() -> None:
    contexts = [300, 290, 420]
    cached, q = Cached(contexts, 1, 32, torch.float32), queries(3, 2, 32, torch.float32)
    sharing = cached.share({0: [0, 1, 2]}, [17, 17, 17], width=3)  # 272 tokens: five chunks
    found = decode(cached, q, 64, max_items=24, sharing=sharing)  # four programs for each kv head
    torch.testing.assert_close(found, expected(cached, q), atol=2e-5, rtol=0)


def test_too_small_a_bound_with_common_pages_shows_as_nan_and_never_as_a_wrong_number() -> None:
    contexts = [100, 90, 200, 30]
    cached, q = Cached(contexts, 1, 32, torch.float32), queries(4, 2, 32, torch.float32)
    sharing = cached.share({0: [0, 1, 2]}, [2, 2, 2, 0], width=3)
    wanted, needed = expected(cached, q), 2 + 2 + 1 + 4 + 1 + 1  # items of the rows: 3, 2, 4, 1 at most
    for bound in range(5, needed):
        found = decode(cached, q, 64, max_items=bound, sharing=sharing)
        for row in range(4):
            if not found[row].isnan().all():
                torch.testing.assert_close(found[row], wanted[row], atol=2e-5, rtol=0)
    assert decode(cached, q, 64, max_items=5, sharing=sharing)[3].isnan().all()


@pytest.mark.parametrize(
    ("size", "element", "tile"),
    [(64, 2, (32, 5)), (128, 2, (32, 5)), (256, 2, (32, 3)), (128, 4, (32, 3)), (256, 4, (16, 3))],
)
def test_tiles_of_common_pages_fit_into_99_kb(size: int, element: int, tile: tuple[int, int]) -> None:
    """Compiled for sm_89, these take 25 to 74 KB; five stages of larger tiles took more than a small card has."""
    assert attention.shared_tile(size, element) == tile


def test_only_the_leader_reads_the_shared_pages() -> None:
    contexts = [40, 37]
    cached, q = Cached(contexts, 1, 32, torch.float32), queries(2, 2, 32, torch.float32)
    sharing = cached.share({0: [0, 1]}, [2, 2], width=2)
    wanted = expected(cached, q)
    cached.table[1, :2] = 1 << 28  # would be out of bounds
    torch.testing.assert_close(decode(cached, q, 64, 4, sharing), wanted, atol=2e-5, rtol=0)


def test_a_row_that_shares_does_not_depend_on_who_its_peers_are() -> None:
    cached, q = Cached([40, 37, 90], 1, 32, torch.float32), queries(3, 2, 32, torch.float32)
    all_three = decode(cached, q, 64, 8, cached.share({0: [0, 1, 2]}, [2, 2, 2], width=4))
    two = decode(cached, q, 64, 8, cached.share({0: [0, 2]}, [2, 0, 2], width=4))
    assert torch.equal(all_three[[0, 2]], two[[0, 2]])


@given(
    rows=st.lists(st.tuples(st.integers(0, 300), st.integers(1, 6000)), min_size=1, max_size=64),
    chunk=st.sampled_from(plans.CHUNKS),
)
def test_twice_the_rows_bound_the_items_of_rows_that_share(rows: list[tuple[int, int]], chunk: int) -> None:
    pages = torch.tensor([pages for pages, _ in rows])
    contexts = torch.tensor([pages * PAGE + rest for pages, rest in rows])
    bound = items_bound(2 * len(rows), int(contexts.sum()), chunk)
    plan = DecodePlan.allocate(len(rows), bound, 1, 1, "cpu")
    kernel_references.plan_items(plan, contexts, chunk, bound, Sharing(pages, pages[:, None]))
    assert int(plan.first_item[len(rows)]) <= bound


@pytest.mark.parametrize("rows", [1, 3, 9])
def test_the_plan_lists_every_chunk_once_and_in_order(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "PLAN_ROWS", 4)  # several blocks of rows
    contexts = torch.randint(1, 5000, (rows,), generator=torch.Generator().manual_seed(rows)).to(DEVICE)
    bound = items_bound(2 * rows, int(contexts.sum()), 64)
    made, wanted = (DecodePlan.allocate(rows, bound, 1, 32, DEVICE) for _ in range(2))
    shared = ((contexts - 1) // PAGE // 2).int()
    for sharing in (Sharing(shared, shared[:, None]), None):
        plans.plan_items(made, contexts, 64, bound, sharing)
        kernel_references.plan_items(wanted, contexts, 64, bound, sharing)
        assert torch.equal(made.first_item, wanted.first_item)
        assert torch.equal(made.item_row, wanted.item_row)
        assert torch.equal(made.item_chunk, wanted.item_chunk)
    assert int(made.first_item[-1]) == sum(math.ceil(context / 64) for context in contexts.tolist())


@given(
    contexts=st.lists(st.integers(1, 40_000), min_size=1, max_size=600),
    filling=st.integers(0, 64),
    kv_heads=st.sampled_from([1, 2, 4, 8, 16, 32]),
)
def test_the_chosen_bound_holds_all_items(contexts: list[int], filling: int, kv_heads: int) -> None:
    rows = len(contexts) + filling
    chunk, max_items = choose_chunk(rows, sum(contexts), max(contexts), kv_heads)
    assert chunk in plans.CHUNKS
    assert sum(math.ceil(context / chunk) for context in contexts) + filling <= max_items
    if max_items == rows:
        assert max(contexts) <= plans.CHUNKS[-1]


@given(rows=st.integers(1, 1024), kv_heads=st.sampled_from([1, 2, 8]))
def test_few_graphs_cover_all_lengths(rows: int, kv_heads: int) -> None:
    pairs = {
        choose_chunk(rows, rows * mean, longest, kv_heads)
        for mean in range(1, 32_000, 250)
        for longest in (mean, min(4 * mean, 32_768), 32_768)
    }
    assert len(pairs) <= 24


def test_few_long_rows_are_cut_small_enough_to_fill_the_device() -> None:
    chunk, _ = choose_chunk(rows=1, total_tokens=32_000, longest=32_000, kv_heads=8)
    assert 32_000 // chunk * 8 >= 4 * 132
    assert choose_chunk(rows=256, total_tokens=256 * 400, longest=500, kv_heads=8)[1] == 256


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "starts", "lengths"),
    [
        (4, 2, 32, [0, 5, 37], [7, 1, 70]),
        (7, 1, 96, [0, 100, 16], [3, 33, 16]),
        (2, 2, 64, [3], [150]),
        (4, 2, 128, [0, 0], [17, 2]),
        (8, 1, 256, [30], [9]),
        (3, 1, 48, [0, 1, 2, 3, 4], [1, 1, 40, 1, 1]),
    ],
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_extending_packed_chunks_equals_dense_attention(
    heads: int, kv_heads: int, size: int, starts: list[int], lengths: list[int], dtype: torch.dtype
) -> None:
    cached = Cached([start + length for start, length in zip(starts, lengths, strict=True)], kv_heads, size, dtype)
    q = queries(sum(lengths), heads, size, dtype)
    offsets = torch.tensor([0, *lengths], device=DEVICE).cumsum(0)
    operands = (q, cached.keys, cached.values, cached.table, torch.tensor(starts, device=DEVICE), offsets)
    made, wanted = torch.full_like(q, math.nan), torch.empty_like(q)
    extend.paged_extend(*operands, max(lengths), 0.3, made)
    kernel_references.paged_extend(*operands, max(lengths), 0.3, wanted)
    torch.testing.assert_close(made, wanted, atol=TOLERANCE[dtype], rtol=0)


def check_dense(
    lengths: list[int], heads: int, kv_heads: int, size: int, dtype: torch.dtype, *, consecutive: bool
) -> None:
    """Compares `dense_causal` with its reference, for sequences on consecutive or on scattered pages."""
    cached = Cached(lengths, kv_heads, size, dtype)
    tables, firsts = list(cached.table), [-1] * len(lengths)
    if consecutive:
        pages = [-(-length // PAGE) for length in lengths]
        begins = [1 + sum(pages[:i]) for i in range(len(pages))]
        tables = [torch.arange(b, b + n, device=DEVICE) for b, n in zip(begins, pages, strict=True)]
        firsts = [begin * PAGE for begin in begins]
        cached.keys, cached.values = (torch.randn_like(each) for each in (cached.keys, cached.values))
    slots = torch.cat([kernel_references.context_slots(row, n) for row, n in zip(tables, lengths, strict=True)])
    groups = extend.dense_groups(lengths, firsts, torch.device(DEVICE))
    whole = any(length % extend.DENSE_MULTIPLE == 0 for length in lengths)
    assert any(group.first_slot >= 0 for group in groups) == (consecutive and whole)
    q = queries(sum(lengths), heads, size, dtype)
    wanted = torch.empty_like(q)
    made = extend.dense_causal(q, cached.keys, cached.values, slots, groups, 0.1, torch.full_like(q, math.nan))
    kernel_references.dense_causal(q, cached.keys, cached.values, slots, groups, 0.1, wanted)
    torch.testing.assert_close(made, wanted, atol=TOLERANCE[dtype], rtol=0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("consecutive", [True, False])
@pytest.mark.parametrize("lengths", [[2048], [1024] * 7, [512, 1000, 1024], [2049, 3000], [2048, 2048, 2050, 4096]])
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(16, 8, 128), (12, 2, 128), (9, 3, 64)])
def test_first_chunks_without_pages_equal_those_over_pages(
    lengths: list[int], heads: int, kv_heads: int, size: int, consecutive: bool
) -> None:
    if not extend.dense_fits(torch.device("cuda"), torch.bfloat16, size):
        pytest.skip("not on this GPU")
    check_dense(lengths, heads, kv_heads, size, torch.bfloat16, consecutive=consecutive)


@pytest.mark.parametrize("consecutive", [True, False])
@pytest.mark.parametrize("lengths", [[32], [32] * 7, [16, 31, 32], [30, 47], [32, 32, 45, 64]])
def test_sequences_are_cut_and_padded_for_cudnn_as_they_lie(
    lengths: list[int], consecutive: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another attention of torch computes what cuDNN's does, so that the rest can be tested anywhere."""

    def stand_in(q: Tensor, k: Tensor, v: Tensor, *_: object, scale: float) -> tuple[Tensor]:
        assert q.shape[2] % 16 == 0
        return (F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True),)

    monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_cudnn_attention", stand_in)
    monkeypatch.setattr(extend, "DENSE_MULTIPLE", 16)
    monkeypatch.setattr(extend, "DENSE_TOKENS", 16)
    check_dense(lengths, 4, 2, 16, torch.float32, consecutive=consecutive)


@pytest.mark.parametrize(
    ("length", "padded"), [(511, 0), (512, 512), (700, 0), (820, 1024), (1024, 1024), (2049, 2560), (8192, 8192)]
)
def test_a_first_chunk_does_without_pages_if_little_pads_it(length: int, padded: int) -> None:
    assert extend.dense_length(length) == padded


def test_first_chunks_of_one_padded_length_are_one_call() -> None:
    """A group has a power of two of them. It reads the cache in place if nothing pads it and its slots are one run."""
    lengths = [512, 512, 512, 1024, 1000, 2048]
    firsts = [16, 528, 4096, 8192, 9216, -1]
    groups = extend.dense_groups(lengths, firsts, torch.device("cpu"))
    assert [(group.begin, group.lengths, group.padded) for group in groups] == [
        (0, (512, 512), 512),
        (1024, (512,), 512),
        (1536, (1024, 1000), 1024),
        (3560, (2048,), 2048),
    ]
    assert [group.first_slot for group in groups] == [16, 4096, -1, -1]
    assert [group.end for group in groups] == [1024, 1536, 3560, 5608]
    padded = groups[2]
    assert padded.rows is not None
    assert padded.back is not None
    assert padded.rows.tolist() == [*range(1536, 3560), *[3559] * 24]
    assert padded.rows[padded.back].tolist() == list(range(1536, 3560))


def test_a_chunk_does_not_see_later_tokens_or_other_chunks() -> None:
    q = queries(60, 2, 32, torch.float32)
    results = []
    for contexts, count in (([40, 20], 60), ([40, 33], 60), ([40], 40)):
        cached = Cached(contexts, 1, 32, torch.float32)
        offsets = torch.tensor([0, 40, count][: len(contexts) + 1], device=DEVICE)
        starts = torch.zeros(len(contexts), dtype=torch.int64, device=DEVICE)
        out = torch.empty_like(q[:count])
        extend.paged_extend(q[:count], cached.keys, cached.values, cached.table, starts, offsets, 40, 0.3, out)
        results.append(out)
    assert torch.equal(results[0][:40], results[1][:40])
    assert torch.equal(results[0][:40], results[2])
