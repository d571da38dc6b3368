"""The paged cache: what leaves it and comes back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from stretto.engines.native import cache as module
from stretto.engines.native.cache import PAGE, KVCache


class Gathered(TorchDispatchMode):
    """The most values that an operation gathered, or that a write took, at once."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        if function.overloadpacket is torch.ops.aten.index_select:
            self.most = max(self.most, found.numel())
        if function.overloadpacket is torch.ops.aten.index_copy_:
            self.most = max(self.most, args[3].numel())
        return found


def test_a_row_leaves_and_comes_back_a_layer_at_a_time() -> None:
    layers, tokens = 5, 3 * PAGE + 7
    cache = KVCache(layers, 2, 8, 12, torch.float32, torch.device("cpu"))
    cache.storage.normal_(generator=torch.Generator().manual_seed(0))
    pages = cache.take(4)
    expected = cache.storage.index_select(2, cache.slots(pages, tokens).long())
    with Gathered() as gathered:
        kv = cache.read(pages, tokens)
        others = cache.take(4)
        cache.write(others, kv)
    assert torch.equal(kv, expected)
    assert torch.equal(cache.read(others, tokens), expected)
    assert 0 < gathered.most <= kv.numel() // layers, "a long row is gigabytes, and it leaves where memory is short"


@pytest.mark.parametrize("count", [1, 2, 7])
def test_pages_are_copied_in_parts_of_bounded_size(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = KVCache(3, 2, 8, 20, torch.float32, torch.device("cpu"))
    cache.storage.normal_(generator=torch.Generator().manual_seed(0))
    page_values = cache.storage[:, :, :PAGE].numel()
    monkeypatch.setattr(module, "COPY_BYTES", 3 * page_values * cache.storage.element_size())
    sources, targets = cache.take(count), cache.take(count)
    sources = [sources[0], *sources[: count - 1]]  # two samples of one prompt share the page
    expected = [cache.read([page], PAGE) for page in sources]
    untouched = cache.read(others := cache.take(3), 3 * PAGE)
    with Gathered() as gathered:
        cache.copy_pages(list(zip(sources, targets, strict=True)))
    assert all(torch.equal(cache.read([page], PAGE), kv) for page, kv in zip(targets, expected, strict=True))
    assert torch.equal(cache.read(others, 3 * PAGE), untouched)
    assert gathered.most <= 3 * page_values


def test_many_pages_are_consecutive_again_after_others_were_released(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CONSECUTIVE", 4)
    cache = KVCache(1, 1, 8, 20, torch.float32, torch.device("cpu"))
    first, second, third = (cache.take(5) for _ in range(3))
    assert (first, third) == ([1, 2, 3, 4, 5], [11, 12, 13, 14, 15])
    cache.release(third)
    cache.release(first)
    assert cache.take(2) == [5, 4]  # few are taken as they come
    assert cache.take(4) == [1, 2, 3, 11]
    cache.release([5, 4])
    cache.release(second)
    assert cache.take(7) == [4, 5, 6, 7, 8, 9, 10]
