"""The support of each token, as the engine records it and by a full pass of the model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from engine_cases import adapter, drive, native, prompt_of, sets_of
from kernel_references import REFERENCE

from stretto.engines.native import token_supports as table_module
from stretto.engines.native.kernels.kernel_set import CPU, Kernels
from stretto.engines.native.sampling import Truncation, truncate
from stretto.engines.native.token_supports import SupportTable, support_width
from stretto.engines.threaded import Failed
from stretto.training.logit_kernels import LogitScale
from stretto.types import MAX_SUPPORT, Request, Sampling, Supports

HOW: dict[str, Any] = {"temperature": 0.8, "top_k": 9, "top_p": 0.9, "min_p": 0.02}


def requests(count: int, tokens: int = 20, **how: Any) -> list[Request]:
    return [
        Request(i, 0, prompt_of(5 + i, i), 31 + i, Sampling(tokens - i % 7, **{**HOW, **how}), group=i)
        for i in range(count)
    ]


def same(one: Any, other: Any) -> bool:
    fields = (
        (one.tokens, other.tokens),
        (one.supports.counts, other.supports.counts),
        (one.supports.tokens, other.supports.tokens),
    )
    return all(np.array_equal(a, b) for a, b in fields)


@pytest.mark.parametrize("kernels", [CPU, REFERENCE], ids=["mixed", "overlapped"])
def test_supports_are_those_of_a_full_pass_and_renormalize_to_the_reported_log_probability(
    model: Any, kernels: Kernels
) -> None:
    weights = adapter(model, 0, zero=True)  # the base itself
    engine = native(model, versions=(), kernels=kernels)
    engine.load(weights)
    for request in requests(6):
        done = drive(engine, [request])[request.id]
        ids = torch.tensor([[*request.prompt, *done.tokens.tolist()]])
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=False).logits[0, len(request.prompt) - 1 : -1].float()
        scaled = LogitScale(HOW["temperature"]).apply_(logits.clone())
        rows = [torch.full((len(scaled),), HOW[name]) for name in ("top_k", "top_p", "min_p")]
        expected, _ = truncate(scaled.log_softmax(-1), Truncation(*rows))
        for logprobs, support in zip(expected, sets_of(done.supports), strict=True):
            assert support == set(logprobs.isfinite().nonzero()[:, 0].tolist())
        drawn = expected.gather(1, torch.from_numpy(done.tokens).long()[:, None])[:, 0]
        np.testing.assert_allclose(done.logprobs, drawn.numpy(), atol=2e-5)


@pytest.mark.parametrize("kernels", [CPU, REFERENCE], ids=["mixed", "overlapped"])
def test_supports_do_not_depend_on_neighbours_preemption_or_rows_that_move(model: Any, kernels: Kernels) -> None:
    work = requests(14)
    alone = {}
    for request in work:
        alone |= drive(native(model, rows=2, kernels=kernels), [request])
    engine = native(model, rows=6, kv_tokens=112, kernels=kernels)
    others = [replace(r, id=100 + r.id, sampling=Sampling(9)) for r in work]
    together = drive(engine, [one for pair in zip(work, others, strict=True) for one in pair])
    assert engine.report().preemptions > 0
    for number, done in alone.items():
        assert same(together[number], done)
        assert together[100 + number].supports is None


@pytest.mark.parametrize("kernels", [CPU, REFERENCE], ids=["mixed", "overlapped"])
@pytest.mark.parametrize(
    ("how", "said"), [({"top_k": 0}, "`top_p = 0.9`"), ({"top_k": 0, "top_p": 1.0}, "`min_p = 0.02`")]
)
def test_a_support_too_large_to_record_fails_its_request_and_names_the_option(
    model: Any, kernels: Kernels, how: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("token_supports", "rows", "mixed_batches", "engine"):
        monkeypatch.setattr(f"stretto.engines.native.{module}.MAX_SUPPORT", 3)
    engine = native(model, kernels=kernels)
    (broken,) = requests(1, temperature=3.0, **how)
    fine = [replace(broken, id=1, sampling=replace(broken.sampling, supports=False))]
    fine += [replace(broken, id=2, sampling=replace(broken.sampling, top_k=3))]
    done = drive(engine, [broken, *fine])
    failed = done[0]
    assert isinstance(failed, Failed)
    assert said in str(failed.error)
    assert "no more than 3 are recorded" in str(failed.error)
    assert len(done[1].tokens) == len(done[2].tokens) == 20
    assert (done[2].supports.counts <= 3).all()


def test_a_suspended_trajectory_without_its_supports_is_refused(model: Any) -> None:
    engine = native(model)
    drive(engine, requests(1), until=lambda: engine.report().tokens > 3)
    (out,) = engine.suspend([0], kv=True)
    assert len(out.supports) == len(out.tokens) > 0
    with pytest.raises(Exception, match="the supports of 0"):
        engine.add(replace(out, supports=None))


def test_a_table_keeps_ragged_rows_apart() -> None:
    draw = np.random.default_rng(0)
    table = SupportTable(4)
    kept: list[list[list[int]]] = [[[8]], [], [], []]
    table.put(0, Supports(np.array([1], np.int32), np.array([8], np.int32)))
    for _ in range(40):
        rows = np.sort(draw.choice(3, int(draw.integers(0, 4)), replace=False)).astype(np.int64)
        counts = draw.integers(1, 9, len(rows)).astype(np.int32)
        tokens = draw.integers(0, 99, (len(rows), 8)).astype(np.int32)
        table.record(rows, counts, tokens)
        for row, count, own in zip(rows.tolist(), counts.tolist(), tokens.tolist(), strict=True):
            kept[row].append(own[:count])
    table.move([0, 3], [2, 1])
    for row, expected in ((0, kept[2]), (1, kept[1]), (3, kept[1])):
        got = table.of(row)
        assert got.counts.tolist() == [len(one) for one in expected]
        assert got.tokens.tolist() == [token for one in expected for token in one]
    table.put(1, table_module.NO_SUPPORTS)
    assert len(table.of(1)) == 0


def test_the_width_of_a_support_is_known_from_its_sampling() -> None:
    assert support_width(Sampling(1)) == 0
    assert support_width(Sampling(1, top_k=7)) == 7
    assert support_width(Sampling(1, top_p=0.9)) == MAX_SUPPORT
    assert support_width(Sampling(1, top_p=0.9, temperature=0.0)) == 0
    assert support_width(Sampling(1, top_p=0.9, supports=False)) == 0
