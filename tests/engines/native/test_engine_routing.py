"""The native engine records the experts of every token, wherever its trajectory goes."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from engine_cases import full
from transformers import OlmoeConfig, OlmoeForCausalLM

from stretto.engines.native.cache import RoutingRead
from stretto.engines.native.engine import NativeEngine
from stretto.errors import RequestError
from stretto.models.routing import RoutingTap, routers_of
from stretto.models.tiny import random_mixture
from stretto.types import Completion, Request, Sampling

PROMPT = tuple(range(3, 40))


@pytest.fixture(scope="module")
def mixture() -> Any:
    return random_mixture(3)


def engine_of(model: Any, **options: Any) -> NativeEngine:
    sizes = {"slots": 1, "rows": 8, "kv_tokens": 1024, "max_context": 128, **options}
    engine = NativeEngine(model, kind="full", **sizes)
    engine.load(full(model, 0))
    return engine


def finish(engine: NativeEngine) -> dict[int, Completion]:
    done: dict[int, Completion] = {}
    while engine.has_work:
        done |= {each.id: each for each in engine.step() if isinstance(each, Completion)}
    return done


def own_routing(model: Any, tokens: list[int]) -> np.ndarray:
    """The experts by the model's own modules, over the whole sequence."""
    tap = RoutingTap(model)
    with torch.no_grad():
        model(torch.tensor([tokens]))
    return tap.take().numpy()


def assert_routed_as(model: Any, prompt: tuple[int, ...], done: Completion) -> None:
    assert done.routing is not None
    assert done.routing.dtype == np.uint8
    expected = own_routing(model, [*prompt, *done.tokens.tolist()][:-1])
    assert np.array_equal(np.sort(done.routing), np.sort(expected))


def test_the_record_of_a_completion_has_the_experts_that_the_model_itself_chooses(mixture: Any) -> None:
    engine = engine_of(mixture, prefill_tokens=16)
    for index in range(4):  # members of a group share the pages of the prompt, and its record
        engine.add(Request(index, 0, PROMPT, index, Sampling(6 + index), group=0))
    done = finish(engine)
    assert len(done) == 4
    for each in done.values():
        assert_routed_as(mixture, PROMPT, each)


def test_requests_that_do_not_ask_and_dense_engines_have_no_record(mixture: Any) -> None:
    engine = engine_of(mixture)
    engine.add(Request(0, 0, PROMPT, 0, Sampling(3, routing=False)))
    assert finish(engine)[0].routing is None
    engine = engine_of(mixture, records_routing=False)
    engine.add(Request(0, 0, PROMPT, 0, Sampling(3)))
    assert finish(engine)[0].routing is None
    assert engine._cache.routing is None


def test_an_engine_without_records_passes_its_check_where_rounding_decides_between_experts(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """With other experts, the logits of this model differ by 0.37 of their size, and a slower decoder would run."""
    mixture = random_mixture(9).to(torch.bfloat16)
    for records in (True, False):
        engine = NativeEngine(
            mixture, kind="full", slots=1, rows=8, kv_tokens=1024, max_context=128, records_routing=records
        )
        assert (engine._cache.routing is not None) == records
    assert not caplog.records


def test_modules_of_transformers_record_nothing_without_records() -> None:
    torch.manual_seed(3)
    sizes = {
        "vocab_size": 64,
        "hidden_size": 64,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    model = OlmoeForCausalLM(OlmoeConfig(num_experts=4, num_experts_per_tok=2, eos_token_id=1, **sizes)).eval()
    done = {}
    for records in (True, False):
        engine = engine_of(model, records_routing=records)
        hooks = [len(router._forward_hooks) for tree in engine._slots.trees for router in routers_of(tree)]
        assert hooks == [int(records)] * 2, "before the first step, and for good"
        engine.add(Request(0, 0, PROMPT, 0, Sampling(6)))
        done[records] = finish(engine)[0]
    assert done[True].routing is not None
    assert done[False].routing is None
    assert np.array_equal(done[True].tokens, done[False].tokens)


@pytest.mark.parametrize("kv", [True, False])
def test_a_suspended_trajectory_takes_its_record_along(mixture: Any, kv: bool) -> None:
    alone = engine_of(mixture)
    alone.add(Request(0, 0, PROMPT, 5, Sampling(20)))
    expected = finish(alone)[0]
    first, second = engine_of(mixture), engine_of(mixture)
    first.add(Request(0, 0, PROMPT, 5, Sampling(20)))
    for _ in range(9):
        first.step()
    (suspended,) = first.suspend([0], kv=kv)
    suspended = pickle.loads(pickle.dumps(suspended))
    assert suspended.routing is not None
    assert len(suspended.routing) == len(PROMPT) + len(suspended.tokens) - 1
    # A record that cannot be the forward's own shows that it is carried, not computed again.
    marked = suspended.routing.copy()
    marked[:3] = 7
    second.add(replace(suspended, routing=marked))
    done = finish(second)[0]
    assert np.array_equal(done.tokens, expected.tokens)
    assert done.routing is not None
    assert expected.routing is not None
    assert (done.routing[:3] == 7).all()
    assert np.array_equal(done.routing[3:], expected.routing[3:])


def test_a_preempted_trajectory_keeps_its_record(mixture: Any) -> None:
    engine = engine_of(mixture, kv_tokens=160)
    for index in range(4):
        engine.add(Request(index, 0, PROMPT, index, Sampling(40)))
    done = finish(engine)
    assert engine.report().preemptions > 0
    for each in done.values():
        assert_routed_as(mixture, PROMPT, each)


def test_a_turn_that_follows_another_has_the_record_of_both(mixture: Any) -> None:
    engine = engine_of(mixture)
    engine.add(Request(0, 0, PROMPT, 1, Sampling(12), keep=True))
    first = finish(engine)[0]
    context = (*PROMPT, *first.tokens.tolist(), 5, 6, 7)
    engine.add(Request(0, 0, context, 2, Sampling(6), keep=True))
    second = finish(engine)[0]
    assert second.prefilled < len(context)  # it began with the pages of the first turn
    assert_routed_as(mixture, context, second)


def test_a_trajectory_without_its_record_or_with_another_is_refused(mixture: Any) -> None:
    engine = engine_of(mixture)
    engine.add(Request(0, 0, PROMPT, 5, Sampling(20)))
    for _ in range(5):
        engine.step()
    (suspended,) = engine.suspend([0], kv=False)
    assert suspended.routing is not None
    with pytest.raises(RequestError, match="no record of their routing"):
        engine.add(replace(suspended, routing=None))
    with pytest.raises(RequestError, match="a record of routing of"):
        engine.add(replace(suspended, routing=suspended.routing[1:]))


def test_a_completion_waits_for_its_record_without_holding_up_the_next_step(
    mixture: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, done = engine_of(mixture), []
    engine.add(Request(0, 0, PROMPT, 0, Sampling(2)))
    engine.add(Request(1, 0, PROMPT, 1, Sampling(5)))
    monkeypatch.setattr(RoutingRead, "is_done", property(lambda read: False))  # as if its copy were on its way
    for _ in range(20):
        done += engine.step()
    assert not done
    assert engine.has_work
    monkeypatch.undo()
    assert {each.id for each in engine.step()} == {0, 1}
    assert not engine.has_work
