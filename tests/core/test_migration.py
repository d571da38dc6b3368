import pytest

from stretto.core.migration import MoveRates, carries_kv


def test_kv_is_carried_where_that_takes_less_time_than_the_prefill():
    rates = MoveRates(bytes_per_s=1e6, prefill_tokens_per_s=1e3)
    assert carries_kv(100, 1_000, rates)  # 0.1 s either way
    assert not carries_kv(100, 1_001, rates)


def test_nothing_is_carried_where_there_is_nothing_or_the_engine_cannot():
    assert not carries_kv(0, 1_000, MoveRates())
    assert not carries_kv(1_000, 0, MoveRates())


def test_the_rate_of_moves_follows_what_was_measured_and_ignores_what_was_too_quick_to_measure():
    rates = MoveRates(bytes_per_s=100.0, prefill_tokens_per_s=100.0)
    for _ in range(30):
        rates = rates.moved(1_000, 2.0)
    assert rates.bytes_per_s == pytest.approx(500, rel=0.01)
    assert rates.prefill_tokens_per_s == 100.0
    assert rates.moved(10, 0.0) == rates.moved(0, 1.0) == rates


def test_rates_that_no_device_has_are_refused():
    with pytest.raises(ValueError, match="`bytes_per_s` is 0"):
        MoveRates(bytes_per_s=0)
    with pytest.raises(ValueError, match="`prefill_tokens_per_s` is -1"):
        MoveRates(prefill_tokens_per_s=-1)
