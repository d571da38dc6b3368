"""The cost by which KV between turns goes to the host or is dropped."""

from __future__ import annotations

import pytest
import torch

from stretto.engines.native import host_kv
from stretto.engines.native.cache import PAGE, KVCache
from stretto.engines.native.host_kv import COPY_S, LEAST_PREFILLED, WINDOW_S, HostKV, Rates


def test_a_copy_pays_if_it_takes_less_time_than_prefilling():
    rates = Rates(bytes_per_s=1e9, prefill_tokens_per_s=1e4)
    assert rates.copy_pays(1000, 10_000_000, copies=1)  # 11 ms against 100 ms
    assert not rates.copy_pays(1000, 200_000_000, copies=1)
    assert rates.copy_pays(1000, 60_000_000, copies=1)
    assert not rates.copy_pays(1000, 60_000_000, copies=2)
    assert not rates.copy_pays(int(COPY_S * 1e4), 0, copies=1), "a short context is read again as quickly"


def test_rates_follow_what_is_measured():
    rates = Rates(bytes_per_s=1e9, prefill_tokens_per_s=5e3)
    rates.copied(10**9, 0.1)
    assert 1e9 < rates.bytes_per_s < 1e10
    rates.copied(10**9, 0.0)
    assert rates.bytes_per_s < 1e10
    rates.worked(100, WINDOW_S)
    assert rates.prefill_tokens_per_s == 5e3, "a few tokens say nothing"
    rates.worked(100 + LEAST_PREFILLED, 2 * WINDOW_S)
    assert rates.prefill_tokens_per_s == LEAST_PREFILLED / WINDOW_S
    rates.worked(101 + LEAST_PREFILLED, 100.0)  # of decoding
    assert rates.prefill_tokens_per_s == LEAST_PREFILLED / WINDOW_S


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no GPU"))])  # fmt: skip
def test_pages_come_back_as_they_went(device):
    cache = KVCache(3, 2, 4, 20, torch.float32, torch.device(device))
    cache.storage.copy_(torch.randn(cache.storage.shape))
    before = cache.storage.clone()
    host = HostKV(cache)
    copy = host.copy_out([5, 2, 9])
    assert host.num_tokens == 3 * PAGE
    host.order_after(copy)
    cache.storage.zero_()
    host.copy_in(copy, [1, 2, 3])
    host.order_after(copy)
    for old, new in ((5, 1), (2, 2), (9, 3)):
        there, here = (slice(page * PAGE, (page + 1) * PAGE) for page in (old, new))
        assert torch.equal(cache.storage[:, :, here], before[:, :, there])
    host.wait()
    host.release(copy)
    assert host.num_tokens == host.num_bytes == 0
    assert host.rates.bytes_per_s != Rates().bytes_per_s


def test_nothing_goes_to_the_host_on_a_gpu_until_that_is_switched_on(monkeypatch):
    host = HostKV(KVCache(3, 2, 4, 20, torch.float32, torch.device("cpu")))
    host.rates = Rates(bytes_per_s=1e18, prefill_tokens_per_s=1.0)
    assert host.pays(1, at_once=False)
    host.overlaps = True
    assert not host.pays(1, at_once=False)
    monkeypatch.setattr(host_kv, "USED_ON_GPUS", True)
    assert host.pays(1, at_once=False)
