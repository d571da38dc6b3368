"""The paged cache: what leaves it and comes back."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

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
