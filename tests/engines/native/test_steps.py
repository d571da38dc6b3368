"""Steps of a GPU, with the host one launch behind, against mixed batches, whose tokens are known at once.

On a CPU the kernels are the references of Triton's and nothing is captured, so these tests are about the bookkeeping;
on a GPU the same tests run over Triton's kernels and captured graphs, in float32.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from engine_cases import SHAPE, assert_same_supports, build, drive, native, prompt_of, weights_of
from kernel_references import REFERENCE
from transformers import LlamaConfig, LlamaForCausalLM

from stretto.engines.native import decode, prefill
from stretto.engines.native import graph_cache as graphs
from stretto.engines.native.cache import PAGE
from stretto.engines.native.capture_lock import CAPTURE
from stretto.engines.native.kernels import prefill_attention
from stretto.engines.native.kernels.decode_work_list import DecodePlan
from stretto.engines.native.kernels.kernel_set import TRITON
from stretto.engines.threaded import Failed
from stretto.errors import RequestError
from stretto.models.checksums import checksum
from stretto.types import Request, Sampling, Weights

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]
pytestmark = pytest.mark.parametrize("device", DEVICES)


def moved(weights: Weights, device: str) -> Weights:
    tensors = {name: tensor.to(device) for name, tensor in weights.tensors.items()}
    return Weights(weights.version, weights.kind, tensors, weights.checksum, weights.scale)


def kernels_of(device: str) -> Any:
    return TRITON if device == "cuda" else REFERENCE


def overlapped(
    device: str, architecture: str = "qwen3", kind: str = "lora", versions: Any = (0,), **options: Any
) -> Any:
    model = build(architecture)
    engine = native(model.to(device), kind, (), **{"kernels": kernels_of(device), **options})
    assert engine._steps._mixed is None
    source = build(architecture)
    for version in versions:
        engine.load(moved(weights_of(kind, source, version), device))
    return engine


def mixed(architecture: str = "qwen3", kind: str = "lora", versions: Any = (0,), **options: Any) -> Any:
    engine = native(build(architecture), kind, versions, **options)
    assert engine._steps._mixed is not None
    return engine


def requests(count: int = 12, versions: tuple[int, ...] = (0,), **how: Any) -> list[Request]:
    return [
        Request(
            i,
            versions[i % len(versions)],
            prompt_of(5 + 7 * (i // 4), i // 4),
            900 + i,
            Sampling(3 + 5 * i % 37, **how),
            group=i // 4 * len(versions) + i % len(versions),
        )
        for i in range(count)
    ]


def agree(ours: dict[int, Any], theirs: dict[int, Any]) -> None:
    assert ours.keys() == theirs.keys()
    for number, expected in theirs.items():
        assert ours[number].tokens.tolist() == expected.tokens.tolist()
        assert np.allclose(ours[number].logprobs, expected.logprobs, atol=1e-4)
        assert (ours[number].finish, ours[number].checksum) == (expected.finish, expected.checksum)
        assert ours[number].prefilled == expected.prefilled
        assert_same_supports(ours[number], expected)


@pytest.mark.parametrize("architecture", ["qwen3", "llama", "qwen3-moe"])
@pytest.mark.parametrize("kind", ["lora", "full"])
def test_several_versions_generate_the_same_tokens(device, architecture, kind):
    work = requests(versions=(0, 1, 2))
    ours = drive(overlapped(device, architecture, kind, (0, 1, 2)), work)
    agree(ours, drive(mixed(architecture, kind, (0, 1, 2)), work))


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_without_overlap_the_host_knows_each_token_at_once(device, kind):
    work = requests(versions=(0, 1), stop_tokens=(3, 7))
    engine = overlapped(device, kind=kind, versions=(0, 1), kernels=replace(kernels_of(device), overlap=False))
    for one in work:
        engine.add(one)
    done: dict[int, Any] = {}
    while engine.has_work:
        done.update({c.id: c for c in engine.step()})
        assert not engine._steps._pending
    agree(done, drive(mixed(kind=kind, versions=(0, 1)), work))


@pytest.mark.parametrize("kind", ["lora", pytest.param("full", marks=pytest.mark.slow)])
def test_interpreted_kernels_generate_the_same_tokens(device, kind, interpreted):
    if torch.cuda.is_available():
        pytest.skip("the other tests run the compiled ones")
    engine = overlapped(device, kind=kind, versions=(0, 1), rows=4, kernels=TRITON)
    hows = ({}, {"top_k": 5}, {"temperature": 0.6})
    work = [Request(i, i % 2, prompt_of(4 + 9 * i, i), i, Sampling(2 + i, **hows[i])) for i in range(3)]
    agree(drive(engine, work), drive(mixed(kind=kind, versions=(0, 1), rows=4), work))


def typed(device: str, kind: str, dtype: torch.dtype, versions: Any = (0, 1)) -> Any:
    """An engine of values that float16 holds, in any type."""
    model = build("qwen3").half()
    engine = native(model.to(device, dtype), kind, (), kernels=kernels_of(device))
    for version in versions:
        made = weights_of(kind, build("qwen3"), version)
        tensors = {name: tensor.half().to(device, dtype) for name, tensor in made.tensors.items()}
        engine.load(Weights(version, made.kind, tensors, checksum(tensors, made.scale), made.scale))
    return engine


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_in_float16_log_probabilities_are_those_of_float32_and_caches_move(device, kind):
    work = requests(versions=(0, 1))
    expected = drive(typed(device, kind, torch.float32), work)
    first, second = typed(device, kind, torch.float16), typed(device, kind, torch.float16)
    done: dict[int, Any] = {}
    for one in work:
        first.add(one)
    for _ in range(3):
        done.update({c.id: c for c in first.step()})
    out = first.suspend([i for i in (1, 2, 5) if i not in done], kv=True)
    done.update(drive(first) | drive(second, out))
    assert done.keys() == expected.keys()
    same, apart = 0, []
    for number, completion in expected.items():
        # A number on the edge between two tokens may draw another one, and from there on they are other texts.
        pairs = zip(done[number].tokens.tolist(), completion.tokens.tolist(), strict=False)
        common = next((i for i, (one, other) in enumerate(pairs) if one != other), len(completion.tokens))
        same += common
        apart.append(np.abs(done[number].logprobs[:common] - completion.logprobs[:common]))
    assert same > 0.7 * sum(len(completion.tokens) for completion in expected.values())
    assert 0 < np.concatenate(apart).max() < 5e-3


def test_more_requests_than_rows_go_through(device):
    work = requests(30)
    agree(drive(overlapped(device, rows=5), work), drive(mixed(rows=5), work))


def test_a_stop_token_ends_a_row_and_nothing_after_it_is_returned(device):
    work = requests(12, stop_tokens=(3, 7, 11))
    theirs = drive(mixed(), work)
    assert sum(c.finish == "stop" for c in theirs.values()) > 3
    agree(drive(overlapped(device), work), theirs)


def test_a_stop_string_ends_a_row(device):
    def decode(tokens: Any) -> str:
        return "".join(chr(65 + token) for token in tokens)

    work = requests(12, stop_strings=("C", "GH"))
    theirs = drive(mixed(decode=decode), work)
    assert sum(c.finish == "stop" for c in theirs.values()) > 3
    agree(drive(overlapped(device, decode=decode), work), theirs)


def test_a_stop_string_that_the_last_token_completes_is_a_stop(device):
    def decode(tokens: Any) -> str:
        return "".join(chr(65 + token) for token in tokens)

    plain = [Request(i, 0, prompt_of(9, i), i, Sampling(4)) for i in range(6)]
    ends = {number: decode(done.tokens[-1:].tolist()) for number, done in drive(mixed(), plain).items()}
    work = [replace(one, sampling=Sampling(4, stop_strings=(ends[one.id],))) for one in plain]
    theirs = drive(mixed(decode=decode), work)
    assert {(c.finish, len(c.tokens)) for c in theirs.values()} >= {("stop", 4)}
    agree(drive(overlapped(device, decode=decode), work), theirs)


@pytest.mark.parametrize("how", [{}, {"stop_tokens": (3, 7, 11)}])
def test_tokens_that_are_not_returned_are_not_counted(device, how):
    engine = overlapped(device, rows=5)
    done = drive(engine, requests(12, **how))
    assert engine.report().tokens == sum(len(completion.tokens) for completion in done.values())


def test_a_plain_decoder_whose_activation_no_kernel_knows_runs_through_its_own_modules(device):
    model = LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=False, hidden_act="relu")).eval()
    work = requests(6)
    theirs = drive(native(model, "full"), work)
    again = native(model.to(device), "full", (), kernels=kernels_of(device))
    again.load(moved(weights_of("full", model.cpu(), 0), device))
    agree(drive(again, work), theirs)


def test_instances_over_one_base_have_blocks_of_their_own_and_go_on_as_before(device):
    model, work = build("qwen3").to(device), requests()
    first = native(model, "lora", (), kernels=kernels_of(device))
    second = native(model, "lora", (), kernels=kernels_of(device))
    blocks = [engine._steps._decodes._decoders[0]._layers[0].qkv.weight.data_ptr() for engine in (first, second)]
    assert blocks[0] != blocks[1], "`setup/memory.py` plans for one an instance"
    for engine, version in ((first, 0), (second, 1)):
        engine.load(moved(weights_of("lora", build("qwen3"), version), device))
    agree(drive(first, work), drive(mixed(), work))
    others = [replace(one, version=1) for one in work]
    agree(drive(second, others), drive(mixed(versions=(1,)), others))


def test_the_logits_of_a_prompt_hold_no_others_in_memory(device):
    engine = overlapped(device)
    for number in range(3):
        engine.add(Request(number, 0, prompt_of(9, number), number, Sampling(20), group=number))
    engine.step()
    kept = [prefix.logits for prefix in engine._schedule._prefixes.values()]
    assert len(kept) == 3
    assert all(logits.untyped_storage().nbytes() == logits.numel() * logits.element_size() for logits in kept)


@pytest.mark.parametrize(
    "how", [{"temperature": 0.0}, {"temperature": 0.6}, {"top_k": 5}, {"top_p": 0.7, "min_p": 0.1}]
)
def test_all_ways_of_drawing_agree(device, how):
    work = requests(8, **how)
    agree(drive(overlapped(device), work), drive(mixed(), work))


def test_pages_run_out_and_nothing_is_lost(device):
    work = requests(16)
    ours, theirs = overlapped(device, kv_tokens=160), mixed(kv_tokens=160)
    agree_but_prefill = drive(ours, work), drive(theirs, work)
    for number, expected in agree_but_prefill[1].items():
        assert agree_but_prefill[0][number].tokens.tolist() == expected.tokens.tolist()
    assert ours.report().preemptions > 0
    assert ours.report().kv_tokens == 0


@pytest.mark.parametrize("kv", [True, False])
@pytest.mark.parametrize("steps", [1, 2, 9])
def test_a_suspended_trajectory_goes_on_elsewhere_as_if_nothing_had_happened(device, kv, steps):
    work = requests(6)
    expected = drive(mixed(), work)
    first, second = overlapped(device), overlapped(device)
    done: dict[int, Any] = {}
    for one in work:
        first.add(one)
    for _ in range(steps):
        done.update({c.id: c for c in first.step()})
    out = first.suspend([1, 3, 5], kv=kv)
    done.update(drive(first))
    done.update(drive(second, out))
    assert done.keys() == expected.keys()
    for number, completion in expected.items():
        assert done[number].tokens.tolist() == completion.tokens.tolist()
        assert np.allclose(done[number].logprobs, completion.logprobs, atol=1e-4)


def test_what_ended_unseen_is_told_after_a_suspension_of_others(device):
    engine = overlapped(device)
    for one in requests(2):
        engine.add(one)
    done: dict[int, Any] = {}
    while 0 not in done:
        taken = engine.suspend([], kv=False)
        assert taken == []
        assert engine.has_work
        done.update({c.id: c for c in engine.step()})


def test_what_ended_unseen_and_is_aborted_is_gone(device):
    engine, again = overlapped(device), Request(0, 0, prompt_of(9, 7), 8, Sampling(5))
    engine.add(Request(0, 0, prompt_of(9, 1), 3, Sampling(1)))
    assert engine.step() == []
    assert engine.abort([0]) == [0]
    assert not engine.has_work
    engine.add(again)
    done = [one for _ in range(20) for one in engine.step()]
    agree(dict(enumerate(done)), drive(mixed(), [again]))


def test_what_ended_is_here_until_it_is_told(device):
    engine, work = overlapped(device), Request(0, 0, prompt_of(9, 1), 3, Sampling(1))
    engine.add(work)
    assert engine.step() == []
    assert engine.suspend([0], kv=False) == []
    with pytest.raises(RequestError, match="request 0 is here already"):
        engine.add(work)
    assert [one.id for one in engine.step()] == [0]
    assert len(drive(engine, [work])) == 1


def test_a_version_can_be_swapped_under_running_work(device):
    engine = overlapped(device)
    for number in range(4):
        engine.add(Request(number, 0, prompt_of(9, number), number, Sampling(20)))
    for _ in range(6):
        assert engine.step() == []
    engine.swap(0, moved(weights_of("lora", build("qwen3"), 5), device))
    done = drive(engine)
    for completion in done.values():
        assert completion.token_versions is not None
        assert set(completion.token_versions.tolist()) == {0, 5}
        assert len(completion.tokens) == len(completion.token_versions) == 20


def test_an_aborted_row_leaves_no_trace(device):
    engine = overlapped(device)
    work = requests(8)
    for one in work:
        engine.add(one)
    for _ in range(3):
        engine.step()
    assert sorted(engine.abort([4, 6, 99])) == [4, 6]
    done = drive(engine)
    assert not {4, 6} & done.keys()
    assert engine.report().kv_tokens == 0
    again = drive(engine, [work[4], work[6]])
    expected = drive(mixed(), [work[4], work[6]])
    assert all(again[i].tokens.tolist() == expected[i].tokens.tolist() for i in (4, 6))


def test_logits_that_are_no_numbers_fail_the_request_alone(device):
    engine = overlapped(device, versions=(0, 1))
    for linear in engine._slots._adapted.values():
        linear.resident(1)[1].fill_(float("nan"))
    done = drive(engine, requests(8, versions=(0, 1)))
    expected = drive(mixed(versions=(0, 1)), requests(8, versions=(0, 1)))
    for number, one in done.items():
        assert isinstance(one, Failed) == (number % 2 == 1)
        if number % 2 == 0:
            assert one.tokens.tolist() == expected[number].tokens.tolist()


@pytest.mark.parametrize("steps", [1, 5])
def test_memory_is_given_back_in_the_middle_and_nothing_is_lost(device, steps):
    engine, work = overlapped(device, rows=8), requests(12)
    for one in work:
        engine.add(one)
    done: dict[int, Any] = {}
    for _ in range(steps):
        done.update({c.id: c for c in engine.step()})
    with pytest.raises(RequestError, match="kv_tokens = 16"):
        engine.shrink(16)
    engine.shrink(128)
    assert engine.capacity.kv_tokens == 128
    assert engine._cache.storage.shape[2] == 16 * 10  # a scratch page, and one for a prompt's last page
    done.update(drive(engine))
    for number, expected in drive(mixed(), work).items():
        assert done[number].tokens.tolist() == expected.tokens.tolist()
    assert engine.report().kv_tokens == 0


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_a_deterministic_engine_gives_the_same_bits_beside_any_neighbours(device, kind):
    def generate(numbers: Any, **options: Any) -> dict[int, Any]:
        work = requests(14, versions=(0, 1))
        return drive(
            overlapped(device, kind=kind, versions=(0, 1), deterministic=True, **options), [work[i] for i in numbers]
        )

    assert overlapped(device, kind=kind, deterministic=True)._steps._decodes._sizes == [16]
    together = generate(range(14))
    for number in (0, 5, 9, 13):
        alone = generate([number])[number]
        assert together[number].tokens.tolist() == alone.tokens.tolist()
        # On a CPU the reference of `draw` takes the logarithms of several rows at once, to the last bit but one.
        assert np.allclose(together[number].logprobs, alone.logprobs, rtol=0.0, atol=0.0 if device == "cuda" else 1e-6)
    agree(together, drive(mixed(kind=kind, versions=(0, 1)), requests(14, versions=(0, 1))))


def test_a_deterministic_engine_draws_the_first_tokens_of_a_group_one_by_one(device):
    engine, counts = overlapped(device, deterministic=True), list[int]()
    draw = engine._steps._decodes.draw

    def watched(logits: Any, *others: Any) -> None:
        counts.append(len(logits))
        draw(logits, *others)

    engine._steps._decodes.draw = watched
    work = requests(8, top_p=0.7)
    done = drive(engine, work)
    assert counts.count(1) == 8
    assert set(counts) == {1, 16}, "the others are a whole step"
    agree(done, drive(mixed(), work))


def test_a_row_that_is_not_cut_draws_the_same_beside_one_that_is(device):
    def marked(*arguments: Any) -> None:
        kernel(*arguments)
        arguments[5].sub_(1.0)  # log-probabilities: rounding that `sample` does not have

    def generate(neighbour: Sampling) -> tuple[Any, Any]:
        nonlocal kernel
        engine = overlapped(device, deterministic=True)
        decodes = engine._steps._decodes
        kernel = decodes._kernels.draw
        decodes._kernels = replace(decodes._kernels, draw=marked)
        both = [Request(0, 0, prompt_of(9, 0), 7, Sampling(20)), Request(1, 0, prompt_of(9, 1), 8, neighbour)]
        done = drive(engine, both)
        return done[0], done[1]

    kernel: Any = None
    (plain, _), (beside, cut) = generate(Sampling(20)), generate(Sampling(20, top_k=5))
    assert plain.tokens.tolist() == beside.tokens.tolist()
    assert plain.logprobs.tolist() == beside.logprobs.tolist()
    assert (beside.logprobs <= -1.0).all()
    assert (cut.logprobs > -1.7).any(), "one that is cut is drawn by `sample`"


def recorded(monkeypatch: pytest.MonkeyPatch, steps: Any) -> list[Any]:
    """Lets steps be captured on any device, by what is replayed as it was first run; the bodies that were."""
    bodies: list[Any] = []

    def capture(self: Any, body: Any, lane: int, keeping: Any) -> Any:
        with keeping():
            body()
        bodies.append(body)
        return SimpleNamespace(replay=body)

    monkeypatch.setattr(graphs.Graphs, "_capture_once", capture)
    monkeypatch.setattr(steps._graphs, "_captures", True)
    return bodies


def test_what_was_captured_reads_what_it_is_given_later(device, monkeypatch):
    engine = overlapped(device, versions=(0, 1))
    bodies = recorded(monkeypatch, engine._steps)
    work = [Request(i, i % 2, prompt_of(5 + 9 * (i % 7), i), i, Sampling(3 + i % 5)) for i in range(40)]
    agree(drive(engine, work), drive(mixed(versions=(0, 1)), work))
    assert 3 < len(bodies) == len(engine._steps._graphs) < 20
    assert len([key for key in engine._steps._graphs._graphs if key[0] == "prefill"]) >= 2


def test_a_step_that_cannot_be_captured_now_runs_as_it_is(device, monkeypatch):
    def generate(*, held: bool) -> tuple[dict[int, Any], int]:
        engine, work = overlapped(device), requests(6)
        bodies = recorded(monkeypatch, engine._steps)
        holds, ended = threading.Event(), threading.Event()

        def hold() -> None:
            with CAPTURE:
                holds.set()
                ended.wait(60.0)

        thread = threading.Thread(target=hold)
        if held:
            thread.start()
            assert holds.wait(10.0)
        try:
            return drive(engine, work), len(bodies)
        finally:
            ended.set()
            if held:
                thread.join()

    captured, tries = generate(held=False)
    assert tries > 0
    plain, tries = generate(held=True)
    assert tries == 0
    agree(plain, captured)


def test_a_capture_that_fails_half_way_changes_no_token(device, monkeypatch):
    def capture(self: Any, body: Any, lane: int, keeping: Any) -> Any:
        with keeping():
            body()
        raise RuntimeError("operation not permitted when stream is capturing")

    engine = overlapped(device)
    recorded(monkeypatch, engine._steps)
    monkeypatch.setattr(graphs.Graphs, "_capture_once", capture)
    agree(drive(engine, requests(8)), drive(mixed(), requests(8)))


@pytest.mark.parametrize(("sizes", "chunks"), [((16,), 32), ((64, 2048), 2), ((8, 24, 48), 3)])
@pytest.mark.parametrize("kind", ["lora", "full"])
def test_prompts_of_any_size_and_number_are_prefilled(device, monkeypatch, sizes, chunks, kind):
    monkeypatch.setattr(prefill, "SIZES", sizes)
    monkeypatch.setattr(prefill, "CHUNKS", chunks)
    work = [Request(i, i % 2, prompt_of(3 + 11 * (i % 8), i), i, Sampling(4)) for i in range(24)]
    options = {"kind": kind, "versions": (0, 1), "prefill_tokens": 48}
    agree(drive(overlapped(device, **options), work), drive(mixed(**options), work))


def test_long_first_chunks_are_prefilled_without_pages(device, monkeypatch):
    """Later chunks of a sequence and short ones run over pages, in the same forward."""
    monkeypatch.setattr(prefill, "SIZES", (8,))
    monkeypatch.setattr(prefill_attention, "DENSE_TOKENS", 24)
    monkeypatch.setattr(prefill_attention, "DENSE_MULTIPLE", 16)
    monkeypatch.setattr(prefill, "dense_fits", lambda *_: True)
    lengths = [30, 5, 100, 24, 61, 47, 90, 25, 32, 32, 31, 30]
    work = [Request(i, i % 2, prompt_of(length, i), i, Sampling(4)) for i, length in enumerate(lengths)]
    engine = overlapped(device, versions=(0, 1), prefill_tokens=64, kernels=REFERENCE)
    prefills, seen = engine._steps._prefills, []

    def watched(q: Any, keys: Any, values: Any, slots: Any, groups: Any, *rest: Any) -> Any:
        seen.append((q.shape[0], groups))
        return REFERENCE.paged.dense_causal(q, keys, values, slots, groups, *rest)

    prefills._dense_causal = watched
    agree(drive(engine, work), drive(mixed(versions=(0, 1), prefill_tokens=64), work))
    groups = [group for _, groups in seen for group in groups]
    ran = {length for group in groups for length in group.lengths}
    assert {30, 47, 61, 64} <= ran
    assert not {5, 24, 25} & ran  # 24 and 25 would be padded to 32
    assert any(len(group.lengths) > 1 for group in groups)
    assert any(groups[-1].end < tokens for tokens, groups in seen)


def test_the_last_layer_runs_for_the_tokens_whose_logits_are_wanted(device, monkeypatch):
    """A chunk that does not end its prompt leaves keys and values alone behind."""
    monkeypatch.setattr(prefill, "SIZES", (8,))
    engine = overlapped(device, versions=(0, 1), prefill_tokens=48, kernels=REFERENCE)
    paged, seen = engine._steps._prefills._kernels, []

    def watched(q: Any, *rest: Any) -> Any:
        seen.append(q.shape[0])
        return paged.paged_extend(q, *rest)

    engine._steps._prefills._kernels = replace(paged, paged_extend=watched)
    work = [Request(0, 0, prompt_of(100, 0), 0, Sampling(3)), Request(1, 1, prompt_of(21, 1), 1, Sampling(3))]
    agree(drive(engine, work), drive(mixed(versions=(0, 1), prefill_tokens=48), work))
    layers = engine._cache.layers
    first, between = [48] * (layers - 1), [48] * (layers - 1)
    assert seen[: 2 * layers - 2] == first + between
    assert seen[2 * layers - 2 :] == [25] * (layers - 1) + [2]


def test_rows_that_have_all_of_their_tokens_are_not_decoded_once_more(device):
    engine = overlapped(device)
    launches, launch = [], engine._steps._decodes.launch

    def counted(observed: Any) -> Any:
        launches.append(len(engine._rows))
        return launch(observed)

    engine._steps._decodes.launch = counted
    first = [Request(i, 0, prompt_of(9, i), i, Sampling(1)) for i in range(6)]
    agree(drive(engine, first), drive(mixed(), first))
    assert launches == []
    later = [Request(10 + i, 0, prompt_of(9, i), i, Sampling(4)) for i in range(6)]
    agree(drive(engine, later), drive(mixed(), later))
    assert len(launches) == 3  # the first token is drawn from the prompt's logits


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_capture_that_breaks_off_on_the_device_changes_no_token(device):
    if device == "cpu":
        pytest.skip("nothing is captured there")
    engine = overlapped(device)
    forward = engine._steps._prefills._forward

    def breaks(*arguments: Any, **named: Any) -> Any:
        found = forward(*arguments, **named)
        found.sum().item()  # waits for the device, which no capture survives
        return found

    engine._steps._prefills._forward = breaks
    agree(drive(engine, requests(8)), drive(mixed(), requests(8)))
    assert len(engine._steps._graphs) == 0
    agree(drive(overlapped(device), requests(8)), drive(mixed(), requests(8)))  # another engine captures as before


def test_what_fills_a_prefill_up_reaches_nothing(device):
    engine = overlapped(device)
    engine._cache.storage[:, :, :PAGE] = float("nan")  # the scratch page
    agree(drive(engine, requests(8)), drive(mixed(), requests(8)))


@pytest.mark.parametrize("least", [1_000_000, 0])
def test_rows_that_share_a_long_prompt_read_it_together_if_that_saves_enough(device, least, monkeypatch):
    monkeypatch.setattr(decode, "SHARED_BYTES", least)
    engine = overlapped(device, rows=24, versions=(0, 1))
    shared, shape_of = set(), engine._steps._decodes._shape_of

    def noted(*arguments: Any, **named: Any) -> Any:
        shape = shape_of(*arguments, **named)
        shared.add(shape.shares)
        return shape

    engine._steps._decodes._shape_of = noted
    work = [
        Request(i, i % 2, prompt_of(40 + 30 * (i % 2), i % 2), i, Sampling(5 + 3 * (i % 11)), group=i % 2)
        for i in range(24)
    ]
    for one in work:
        engine.add(one)
    saved = 0
    done: dict[int, Any] = {}
    while engine.has_work:
        done.update({c.id: c for c in engine.step()})
        saved = max(saved, engine._rows.shared.saved)
    # Twelve rows of each group are two lists; the full pages of the prompts hold 32 and 64 tokens.
    assert saved == 10 * 32 + 10 * 64
    assert engine._rows.shared.saved == 0
    assert (True in shared) == (least == 0)
    agree(done, drive(mixed(rows=24, versions=(0, 1)), work))


def test_attention_makes_room_where_many_rows_share_a_long_prompt(device):
    engine = overlapped(device, rows=16, deterministic=True)
    engine._steps._decodes._memory[0] = replace(
        engine._steps._decodes._memory[0], plan=DecodePlan.allocate(17, 20, 4, 32, engine._rows.device)
    )
    work = [Request(i, 0, prompt_of(70, 0), i, Sampling(5 + i), group=0) for i in range(16)]
    agree(drive(engine, work), drive(mixed(rows=16), work))
    assert engine._steps._decodes._memory[0].plan.capacity >= 80


def test_a_draining_batch_moves_into_smaller_ones(device):
    engine = overlapped(device, rows=16)
    work = [Request(i, 0, prompt_of(9, i), i, Sampling(60 if i == 15 else 4 + i)) for i in range(16)]
    sizes = []
    for one in work:
        engine.add(one)
    while engine.has_work:
        engine.step()
        if len(engine._rows):
            sizes.append(engine._steps._decodes.size_of(int(engine._rows.numbers()[-1]) + 1))
    assert sizes[3] == 16
    assert sizes[-1] == 1
    agree(drive(overlapped(device, rows=16), work), drive(mixed(rows=16), work))
