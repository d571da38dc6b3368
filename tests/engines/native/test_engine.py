"""The native engine against transformers and PEFT, and its promise that neighbours change nothing."""

from __future__ import annotations

import copy
import time
from dataclasses import replace
from typing import Any

import numpy as np
import peft
import pytest
import torch
from engine_cases import RANK, SCALE, SHAPE, adapter, build, drive, full, native, prompt_of, weights_of
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from stretto.engines.native import versions
from stretto.engines.native.kernels.resident_weights import PlainResident
from stretto.engines.threaded import Failed
from stretto.errors import EngineError, ModelError, RequestError
from stretto.models.checksums import checksum
from stretto.models.lora import adapted_modules
from stretto.types import Completion, KVRef, Request, Sampling


def request_of(number: int, version: int = 0, length: int = 21, tokens: int = 12, **options: Any) -> Request:
    how = Sampling(tokens, **{k: options.pop(k) for k in list(options) if k in Sampling.__slots__})
    return Request(number, version, options.pop("prompt", prompt_of(length, number)), 900 + number, how, **options)


def equal(left: Completion, right: Completion) -> bool:
    return np.array_equal(left.tokens, right.tokens) and np.array_equal(left.logprobs, right.logprobs)


def logprobs_of(model: Any, request: Request, tokens: list[int], temperature: float = 1.0) -> torch.Tensor:
    sequence = torch.tensor([[*request.prompt, *tokens]])
    with torch.no_grad():
        logits = model(input_ids=sequence, use_cache=False).logits[0, len(request.prompt) - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(1, sequence[0, len(request.prompt) :, None]).squeeze(1)


def with_adapter(model: Any, weights: Any) -> Any:
    """The same adapter through PEFT."""
    names = sorted({name.rpartition(".")[0] for name in weights.tensors})
    config = peft.LoraConfig(r=RANK, lora_alpha=int(RANK * SCALE), target_modules=names)
    wrapped = peft.get_peft_model(copy.deepcopy(model), config).eval()
    for name in names:
        layer = wrapped.get_submodule(f"base_model.model.{name}")
        layer.lora_A["default"].weight.data.copy_(weights.tensors[f"{name}.lora_A"])
        layer.lora_B["default"].weight.data.copy_(weights.tensors[f"{name}.lora_B"])
    return wrapped


@pytest.mark.parametrize("architecture", ["qwen3", "llama", "qwen3-moe"])
def test_greedy_is_what_transformers_generates(architecture: str) -> None:
    model = build(architecture)
    engine = native(model, "full", prefill_tokens=32)
    assert engine.exact
    lengths = (1, 15, 16, 17, 40, 70, 100)
    requests = [request_of(i, length=n, temperature=0.0) for i, n in enumerate(lengths)]
    done = drive(engine, requests)
    for request in requests:
        prompt = torch.tensor([request.prompt])
        expected = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12, do_sample=False)
        assert done[request.id].tokens.tolist() == expected[0, len(request.prompt) :].tolist()
        assert done[request.id].finish == "length"


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_log_probabilities_are_those_of_a_full_pass_under_the_same_version(model: Any, kind: str) -> None:
    engine = native(model, kind, versions=(0, 1, 2))
    requests = [request_of(i, i % 3, length=9 + 13 * i, temperature=0.7) for i in range(6)]
    done = drive(engine, requests)
    for request in requests:
        if kind == "lora":
            policy = with_adapter(model, adapter(model, request.version))
        else:
            policy = copy.deepcopy(model)
            policy.load_state_dict(dict(full(model, request.version).tensors), strict=False)
        expected = logprobs_of(policy, request, done[request.id].tokens.tolist(), 0.7)
        torch.testing.assert_close(torch.from_numpy(done[request.id].logprobs), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3-moe"])
@pytest.mark.parametrize("kind", ["lora", "full"])
def test_neighbours_and_other_versions_change_nothing(kind: str, architecture: str) -> None:
    model = build(architecture)
    engine = native(model, kind, versions=(0, 1, 2), prefill_tokens=48)
    requests = [request_of(i, i % 3, length=5 + 9 * (i % 11), tokens=20) for i in range(24)]
    crowd = drive(engine, requests)
    for request in requests[:8]:
        assert equal(drive(engine, [request])[request.id], crowd[request.id])


def test_a_neighbour_that_truncates_or_is_greedy_changes_nothing(model: Any) -> None:
    engine = native(model)
    alone = drive(engine, [request_of(0)])[0]
    others = [
        request_of(1, top_k=3),
        request_of(2, top_p=0.5),
        request_of(3, min_p=0.2),
        request_of(4, temperature=0.0),
    ]
    assert equal(drive(engine, [request_of(0), *others])[0], alone)


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_suspended_with_its_cache_a_trajectory_goes_on_bit_for_bit(model: Any, kind: str) -> None:
    first, second = (native(model, kind, versions=(0, 1)) for _ in range(2))
    requests = [request_of(i, i % 2, length=14 + i, tokens=40) for i in range(6)]
    whole = drive(first, requests)
    for stop in (1, 2, 17):
        steps = first.report().steps
        drive(first, requests, until=lambda steps=steps, stop=stop: first.report().steps >= steps + stop)
        taken = first.suspend(range(6), kv=True)
        assert all(s.kv is not None and s.kv.shape[2] == len(s.request.prompt) + len(s.tokens) - 1 for s in taken)
        done = drive(second, reversed(taken))
        assert all(equal(done[i], whole[i]) for i in range(6))
    assert not first.has_work
    assert first.report().kv_tokens == 0


def test_a_cache_that_other_weights_made_is_refused(model: Any) -> None:
    engine = native(model, versions=(0, 1))
    engine.add(request_of(0))
    engine.step()
    (taken,) = engine.suspend([0], kv=True)
    request, versions = replace(taken.request, version=1), np.zeros(len(taken.tokens), dtype=np.int32)
    moved = replace(taken, request=request, token_versions=versions)
    with pytest.raises(RequestError, match="request 0 has KV of version 0, and goes on under version 1"):
        engine.add(moved)
    done = drive(engine, [replace(moved, kv=None)])[0]
    assert done.token_versions is not None
    assert set(done.token_versions.tolist()) == {0, 1}


def test_a_cache_on_another_machine_is_refused_and_never_prefilled_instead(model: Any) -> None:
    engine = native(model)
    engine.add(request_of(0))
    engine.step()
    (taken,) = engine.suspend([0], kv=True)
    with pytest.raises(RequestError, match="request 0 has KV on another machine, which has to be fetched first"):
        engine.add(replace(taken, kv=KVRef(taken.kv.nbytes)))


def test_suspended_without_its_cache_it_goes_on_to_rounding(model: Any) -> None:
    engine = native(model)
    requests = [request_of(i, length=30, tokens=30, temperature=0.0) for i in range(3)]
    sampled = [replace(r, id=r.id + 10, sampling=Sampling(30)) for r in requests]
    whole = drive(engine, [*requests, *sampled])
    steps = engine.report().steps
    drive(engine, [*requests, *sampled], until=lambda: engine.report().steps >= steps + 13)
    taken = engine.suspend([r.id for r in (*requests, *sampled)], kv=False)
    assert all(s.kv is None for s in taken)
    done = drive(engine, taken)
    for number, completion in done.items():
        assert np.array_equal(completion.tokens, whole[number].tokens)
        np.testing.assert_allclose(completion.logprobs, whole[number].logprobs, atol=1e-4)
        assert completion.prefilled == whole[number].prefilled + 30 + 13


def test_without_pages_for_all_rows_some_wait_and_nothing_changes(model: Any) -> None:
    roomy = native(model, versions=(0, 1))
    requests = [
        request_of(i, i % 2, length=30, tokens=60, group=i // 3, prompt=prompt_of(30, i // 3)) for i in range(12)
    ]
    expected = drive(roomy, requests)
    tight = native(model, versions=(0, 1), kv_tokens=16 * 14)
    done = drive(tight, requests)
    assert tight.report().preemptions > 3
    assert sorted(done) == list(range(12))
    assert all(equal(done[i], expected[i]) for i in range(12))
    assert tight.report().kv_tokens == 0
    single = native(model, versions=(0, 1), kv_tokens=90)
    assert all(equal(c, expected[i]) for i, c in drive(single, requests).items())


def test_evaluation_gives_way_when_pages_run_out(model: Any) -> None:
    engine = native(model, kv_tokens=16 * 12)
    requests = [request_of(i, length=30, tokens=60, priority=1 - i // 4) for i in range(8)]
    ended: list[int] = []
    for request in requests:
        engine.add(request)
    while engine.has_work:
        ended += [c.id for c in engine.step()]
    assert np.mean([ended.index(i) for i in range(4, 8)]) < np.mean([ended.index(i) for i in range(4)])


def test_a_groups_prompt_is_prefilled_once_and_its_pages_are_shared(model: Any) -> None:
    engine = native(model, rows=8)
    prompt = prompt_of(70)
    requests = [request_of(i, prompt=prompt, group=5, tokens=10) for i in range(12)]  # more than there are rows
    for request in requests:
        engine.add(request)
    done = {c.id: c for c in engine.step()}
    # Four full pages once, the page that the prompt ends in for the prefix and for each of eight rows.
    assert engine.report().kv_tokens == (4 + 1 + 8) * 16
    done |= drive(engine)
    assert engine.report().prefilled == 70
    assert sum(c.prefilled for c in done.values()) == 70
    assert engine.report().kv_tokens == 0
    apart = drive(engine, [replace(r, group=-1) for r in requests])
    assert engine.report().prefilled == 70 * 13
    assert all(equal(done[i], apart[i]) for i in range(12))


def test_a_group_of_another_version_or_prompt_shares_nothing(model: Any) -> None:
    engine = native(model, versions=(0, 1))
    prompt = prompt_of(20)
    drive(engine, [request_of(0, 0, prompt=prompt, group=1), request_of(1, 1, prompt=prompt, group=1)])
    assert engine.report().prefilled == 40
    drive(engine, [request_of(0, prompt=prompt, group=1), request_of(1, prompt=prompt_of(20, 9), group=1)])
    assert engine.report().prefilled == 80


def test_members_that_come_a_moment_later_still_share_the_prompt(model: Any) -> None:
    engine = native(model)
    engine.add(request_of(0, prompt=prompt_of(33), group=1, tokens=20))
    engine.step()
    engine.step()
    drive(engine, [request_of(1, prompt=prompt_of(33), group=1)])
    assert engine.report().prefilled == 33


def test_long_prompts_are_prefilled_in_chunks_while_others_decode(model: Any) -> None:
    engine = native(model, prefill_tokens=32)
    short = request_of(0, length=10, tokens=5)
    engine.add(short)
    engine.step()
    done = drive(engine, [request_of(1, length=200), request_of(2, length=200)])
    steps = native(model, prefill_tokens=512)
    whole = drive(steps, [short, request_of(1, length=200), request_of(2, length=200)])
    assert equal(done[0], whole[0])
    assert engine.report().steps > steps.report().steps
    for number in (1, 2):
        assert np.array_equal(done[number].tokens, whole[number].tokens)
        np.testing.assert_allclose(done[number].logprobs, whole[number].logprobs, atol=1e-4)


def test_the_base_is_in_memory_once_and_stays_trainable(model: Any) -> None:
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    engine = native(model)
    (tree,) = engine._slots.trees
    own = {p.data_ptr() for p in tree.parameters()}
    assert own == {p.data_ptr() for p in model.parameters()}
    drive(engine, [request_of(0)])
    assert model.config._attn_implementation != "stretto_paged"
    assert all(torch.equal(p, before[name]) and not p.is_inference() for name, p in model.named_parameters())
    model(input_ids=torch.tensor([[1, 2, 3]]), labels=torch.tensor([[1, 2, 3]])).loss.backward()
    model.zero_grad()


def test_nan_in_one_version_does_not_reach_another(model: Any) -> None:
    engine = native(model)
    expected = drive(engine, [request_of(0)])[0]
    good = adapter(model, 1)
    name = next(iter(good.tensors))
    tensors = {**good.tensors, name: torch.full_like(good.tensors[name], torch.nan)}
    with pytest.raises(ModelError, match="not finite"):
        engine.load(replace(good, tensors=tensors, checksum=checksum(tensors, SCALE)))
    huge = {name: t * 1e30 if name.endswith("A") else t for name, t in good.tensors.items()}
    engine.load(replace(good, tensors=huge, checksum=checksum(huge, SCALE)))
    done = drive(engine, [request_of(0), request_of(1, 1), request_of(2, 1, temperature=0.0)])
    assert equal(done[0], expected)
    assert all(isinstance(done[i], Failed) and "version 1" in str(done[i].error) for i in (1, 2))
    engine.unload(1)
    engine.load(adapter(model, 2))
    fresh = native(model, versions=(2,))
    assert equal(drive(engine, [request_of(1, 2)])[1], drive(fresh, [request_of(1, 2)])[1])


def test_a_swap_makes_the_caches_again_under_the_new_weights(model: Any) -> None:
    for kind in ("lora", "full"):
        engine = native(model, kind, slots=1)
        requests = [request_of(i, prompt=prompt_of(20), group=0, tokens=16) for i in range(20)]
        drive(engine, requests, until=lambda engine=engine: engine.report().steps >= 6)
        engine.swap(0, weights_of(kind, model, 1))
        done = drive(engine)
        policy = with_adapter(model, adapter(model, 1)) if kind == "lora" else copy.deepcopy(model)
        if kind == "full":
            policy.load_state_dict(dict(full(model, 1).tensors), strict=False)
        assert {c.token_versions is None for c in done.values()} == {True, False}
        for request in requests:
            completion = done[request.id]
            made = 0 if completion.token_versions is None else int((completion.token_versions == 0).sum())
            expected = logprobs_of(policy, request, completion.tokens.tolist()).numpy()
            np.testing.assert_allclose(completion.logprobs[made:], expected[made:], atol=1e-4)
        # The queued ones start from a prompt that was prefilled again, once.
        assert engine.report().prefilled == 20 + 16 * (20 + 6) + 20


def test_stop_tokens_end_a_trajectory_and_belong_to_it(model: Any) -> None:
    engine = native(model)
    plain = drive(engine, [request_of(0, tokens=40)])[0].tokens.tolist()
    wanted = (plain[7], plain[11])
    cut = min(plain.index(t) for t in wanted) + 1
    done = drive(engine, [request_of(0, tokens=40, stop_tokens=wanted), request_of(1, tokens=40)])
    assert done[0].tokens.tolist() == plain[:cut]
    assert done[0].finish == "stop"
    assert len(done[1].tokens) == 40


def test_stop_strings_end_with_the_token_that_completes_one(model: Any) -> None:
    def decode(tokens: Any) -> str:
        return "".join(chr(97 + t % 26) + chr(65 + t // 26) for t in tokens)

    engine = native(model, decode=decode)
    plain = drive(engine, [request_of(0, tokens=40)])[0].tokens.tolist()
    string = decode(plain[9:12])[1:-1]
    end = next(i for i in range(1, 41) if string in decode(plain[:i]))
    done = drive(engine, [request_of(0, tokens=40, stop_strings=("never", string)), request_of(1)])
    assert done[0].tokens.tolist() == plain[:end]
    assert done[0].finish == "stop"
    with pytest.raises(RequestError, match="stop_strings"):
        native(model).add(request_of(0, stop_strings=("a",)))


def test_models_that_cannot_be_served_exactly_are_refused_by_name() -> None:
    shape = {**SHAPE, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    sliding = MistralForCausalLM(MistralConfig(**shape, sliding_window=8))
    with pytest.raises(ModelError, match=r"`mistral`.*sliding"):
        native(sliding, "full")
    with pytest.raises(ModelError, match="`gemma2`"):
        native(Gemma2ForCausalLM(Gemma2Config(**shape)), "full")
    config = Qwen2Config(**shape, use_sliding_window=True, sliding_window=8, max_window_layers=1)
    with pytest.raises(ModelError, match=r"`qwen2`.*sliding"):
        native(Qwen2ForCausalLM(config), "full")
    served = native(Qwen2ForCausalLM(Qwen2Config(**shape)), "full")
    assert len(drive(served, [request_of(0)])[0].tokens) == 12
    assert native(MistralForCausalLM(MistralConfig(**shape, sliding_window=None)), "full").exact


def test_rotary_angles_that_depend_on_the_batch_are_refused_by_name() -> None:
    rotary = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
    model = LlamaForCausalLM(LlamaConfig(**SHAPE, rope_parameters=rotary))
    with pytest.raises(ModelError, match=r"`llama` with `rope_type = 'dynamic'`"):
        native(model, "full")


def test_rows_of_evaluation_are_no_work_of_rollout(model: Any) -> None:
    engine = native(model)
    drive(engine, [request_of(0, priority=1), request_of(1, priority=1)])
    assert engine.report().steps > 0
    assert (engine.report().busy_s, engine.report().row_s) == (0.0, 0.0)
    drive(engine, [request_of(2), request_of(3, priority=1)])
    assert 0.0 < engine.report().row_s <= engine.report().busy_s


def test_logits_that_the_cache_does_not_reproduce_are_refused() -> None:
    model = build("llama")
    forward = model.model.layers[0].self_attn.forward

    def peeking(hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        # Looks at all tokens of the forward, as a recurrent state would.
        return forward(hidden_states + hidden_states.mean(dim=1, keepdim=True), *args, **kwargs)

    model.model.layers[0].self_attn.forward = peeking
    with pytest.raises(ModelError, match="`llama`"):
        native(model, "full")


def test_requests_that_could_never_fit_are_refused_with_numbers(model: Any) -> None:
    engine = native(model, kv_tokens=64)
    with pytest.raises(RequestError, match=r"`kv_tokens` 64"):
        engine.add(request_of(0, length=60))
    for token in (-1, 40):
        with pytest.raises(RequestError, match=f"token {token} in its prompt, outside of a vocabulary of 40"):
            engine.add(request_of(0, prompt=(1, token)))
    with pytest.raises(RequestError, match="prompt"):
        engine.add(request_of(0, prompt=()))
    assert not engine.has_work


def test_an_adapter_that_does_not_fit_is_refused_by_name(model: Any) -> None:
    engine = native(model, versions=())
    good = adapter(model, 0)
    with pytest.raises(ModelError, match="lora_A"):
        engine.load(adapter(model, 0, rank=RANK + 1))
    with pytest.raises(ModelError, match="full"):
        engine.load(full(model, 0))
    name = next(n for n in good.tensors if n.endswith("lora_B"))
    with pytest.raises(ModelError, match="other half"):
        engine.load(replace(good, tensors={n: t for n, t in good.tensors.items() if n != name}))
    engine.load(good)
    with pytest.raises(ModelError, match="scale"):
        engine.load(replace(adapter(model, 1), scale=3.0))
    assert dict(engine.report().versions) == {0: 0}


def test_full_weights_that_do_not_fit_are_refused_by_name(model: Any) -> None:
    engine, good = native(model, "full", versions=()), full(model, 0)
    name = "model.norm.weight"
    with pytest.raises(ModelError, match=r"`model.norm.weight` of version 0 is \(3,\).*holds \(64,\)"):
        engine.load(replace(good, tensors={**good.tensors, name: torch.ones(3)}))
    assert not engine.report().versions


def test_lora_targets_limit_what_is_adapted(model: Any) -> None:
    engine = native(model, versions=(), lora_targets=("q_proj", "v_proj"))
    whole = adapter(model, 0)
    tensors = {n: t for n, t in whole.tensors.items() if "q_proj" in n or "v_proj" in n}
    weights = replace(whole, tensors=tensors, checksum=checksum(tensors, SCALE))
    engine.load(weights)
    request = request_of(0)
    tokens = drive(engine, [request])[0]
    expected = logprobs_of(with_adapter(model, weights), request, tokens.tokens.tolist())
    torch.testing.assert_close(torch.from_numpy(tokens.logprobs), expected, rtol=0, atol=1e-4)


def test_engine_and_trainer_read_lora_targets_alike(model: Any) -> None:
    targets = ("self_attn.q_proj",)
    engine = native(model, versions=(), lora_targets=targets)
    assert engine._slots._adapted.keys() == adapted_modules(model, targets).keys()  # type: ignore[union-attr]
    with pytest.raises(ModelError, match=r"`model.lora.targets` has 'q_prj'"):
        native(model, versions=(), lora_targets=("q_proj", "q_prj"))


def test_outputs_grow_beyond_what_was_reserved(model: Any) -> None:
    done = drive(native(model), [request_of(0, length=3, tokens=200), request_of(1, length=3, tokens=70)])
    assert (len(done[0].tokens), len(done[1].tokens)) == (200, 70)
    assert (done[0].logprobs < 0).all()


def test_an_engine_emptied_by_a_suspension_is_idle(model):
    engine = native(model)
    for number in range(3):
        engine.add(request_of(number, tokens=30))
    for _ in range(4):
        engine.step()
    assert len(engine.suspend([0, 1, 2], kv=False)) == 3
    before = engine.report()
    time.sleep(0.02)
    after = engine.report()
    assert (after.busy_s, after.row_s) == (before.busy_s, before.row_s)


def test_a_stop_string_of_many_bytes_a_character_is_found(model):
    # Every token is one byte of UTF-8: nine characters are twenty-seven tokens.
    text = "\N{CJK UNIFIED IDEOGRAPH-4E00}" * 9
    made: list[int] = []

    def decode(tokens: Any) -> str:
        made[:] = list(tokens)
        return text.encode()[: len(tokens)].decode(errors="ignore")

    engine = native(model, decode=decode)
    done = drive(engine, [request_of(0, tokens=60, stop_strings=(text,))])
    assert (done[0].finish, len(done[0].tokens)) == ("stop", 27)


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_a_swap_that_is_damaged_in_the_slot_ends_the_engine(model, kind, monkeypatch):
    engine = native(model, kind)
    engine.add(request_of(0))
    engine.step()
    receive = PlainResident.receive
    monkeypatch.setattr(PlainResident, "receive", lambda *given: receive(*given)._replace(checksum="other"))
    monkeypatch.setattr(versions, "checksum", lambda *_: "other")  # of what a slot of full weights holds
    with pytest.raises(EngineError, match=r"version 1 cannot take the slot of version 0: .*`other`"):
        engine.swap(0, weights_of(kind, model, 1))


def test_a_refused_swap_changes_nothing(model):
    engine, expected = native(model), native(model)
    work = [request_of(number, tokens=20) for number in range(3)]
    for one in work:
        engine.add(one)
    for _ in range(4):
        assert engine.step() == []
    bad = adapter(model, 5)
    next(iter(bad.tensors.values())).fill_(float("nan"))
    with pytest.raises(ModelError, match="not finite"):
        engine.swap(0, replace(bad, checksum=checksum(bad.tensors, bad.scale)))
    theirs = drive(expected, work)
    assert all(equal(done, theirs[number]) for number, done in drive(engine).items())
