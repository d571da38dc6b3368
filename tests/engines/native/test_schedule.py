"""KV that is retained for the next turn: the same tokens with less to prefill, and no page is lost by it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from engine_cases import build, drive, native, prompt_of, weights_of
from kernel_references import REFERENCE

from stretto.engines.native import host_kv
from stretto.engines.native.cache import PAGE
from stretto.engines.native.host_kv import HostCopy, HostKV, Rates
from stretto.engines.native.kernels.kernel_set import CPU, TRITON, Kernels
from stretto.models.checksums import checksum
from stretto.types import Request, Sampling, Weights

KINDS = [
    pytest.param((CPU, "cpu"), id="mixed"),
    pytest.param((REFERENCE, "cpu"), id="overlapped"),
    pytest.param((TRITON, "cuda"), id="cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")),
]
pytestmark = pytest.mark.parametrize("how", KINDS)
OBSERVED = (7, 3, 5)


@pytest.fixture(autouse=True)
def _copies_on_every_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_kv, "USED_ON_GPUS", True)


def made(how: tuple[Kernels, str], versions: tuple[int, ...] = (0,), **options: Any) -> Any:
    kernels, device = how
    engine = native(build("qwen3").to(device), "lora", (), kernels=kernels, **options)
    for version in versions:
        engine.load(weights(version, device))
    return engine


def weights(version: int, device: str) -> Weights:
    given = weights_of("lora", build("qwen3"), version)
    tensors = {name: tensor.to(device) for name, tensor in given.tensors.items()}
    return Weights(version, given.kind, tensors, checksum(tensors, given.scale), given.scale)


def first(number: int, *, keep: bool = True, tokens: int = 30, version: int = 0, group: int = -1) -> Request:
    prompt = prompt_of(21, number if group < 0 else group)
    return Request(number, version, prompt, 50 + number, Sampling(tokens), group=group, keep=keep)


def after(request: Request, done: Any, observed: tuple[int, ...] = OBSERVED) -> Request:
    """The turn behind a turn."""
    prompt = (*request.prompt, *done.tokens.tolist(), *observed)
    return replace(request, prompt=prompt, seed=request.seed + 1000)


def turns(engine: Any, requests: list[Request], count: int = 3) -> list[dict[int, Any]]:
    """So many turns of all, each begun when all have ended the one before."""
    found = []
    for _ in range(count):
        done = drive(engine, requests)
        found.append(done)
        requests = [after(request, done[request.id]) for request in requests]
    return found


@pytest.mark.parametrize("group", [-1, 0])
def test_a_turn_prefills_what_is_new_and_draws_the_same_tokens(how, group):
    kept, again = (turns(made(how), [first(i, keep=keep, group=group) for i in range(4)]) for keep in (True, False))
    for ours, theirs in zip(kept, again, strict=True):
        for number, expected in theirs.items():
            assert ours[number].tokens.tolist() == expected.tokens.tolist()
            assert np.allclose(ours[number].logprobs, expected.logprobs, atol=1e-4)
    for turn, (ours, theirs) in enumerate(zip(kept[1:], again[1:], strict=True), 1):
        context = 21 + turn * (30 + len(OBSERVED))
        pages = (context - len(OBSERVED) - 1) // PAGE * PAGE
        assert {done.prefilled for done in theirs.values()} == {context}
        assert {done.prefilled for done in ours.values()} == {context - pages}


def test_what_is_kept_counts_as_free_and_goes_with_its_version(how):
    engine = made(how, versions=(0, 1))
    drive(engine, [first(i, version=i % 2) for i in range(4)])
    assert engine.report().kv_tokens == 0
    held = engine._cache.num_pages - engine._cache.num_free
    assert held == 4 * ((21 + 30 - 1) // PAGE) == engine._cache.num_idle
    engine.unload(1)
    assert engine._cache.num_pages - engine._cache.num_free == held // 2
    engine.unload(0)
    assert engine._cache.num_free == engine._cache.num_pages


def test_pages_of_a_prompt_that_several_left_behind_count_as_free_too(how):
    engine = made(how)
    drive(engine, [first(i, group=0) for i in range(4)])
    assert engine.report().kv_tokens == 0
    # One full page of the prompt for all, and two more of each.
    assert engine._cache.num_pages - engine._cache.num_free == 1 + 4 * 2


def test_whoever_needs_the_pages_gets_them_and_nobody_is_preempted_for_what_is_kept(how):
    requests = [first(i) for i in range(4)]
    room = 4 * 96
    engine, plenty = made(how, kv_tokens=room, rows=4), made(how)
    done = drive(engine, requests)
    assert engine._cache.num_idle == 12
    others = [Request(100 + i, 0, prompt_of(40, 90 + i), i, Sampling(50)) for i in range(4)]
    expected = drive(plenty, others)
    for number, completion in drive(engine, others).items():
        assert completion.tokens.tolist() == expected[number].tokens.tolist()
    assert engine.report().preemptions == 0
    assert engine._cache.num_idle < 12
    second = [after(request, done[request.id]) for request in requests]
    expected = drive(plenty, second)
    for number, completion in drive(engine, second).items():
        assert completion.tokens.tolist() == expected[number].tokens.tolist()


def test_what_is_kept_is_not_given_up_for_one_that_cannot_start_all_the_same(how):
    engine = made(how, kv_tokens=256, rows=4)
    long = Request(50, 0, prompt_of(150, 50), 50, Sampling(60))
    request = first(0)
    done = drive(engine, [request])[0]
    engine.add(long)
    engine.step()
    engine.add(replace(long, id=51))  # has to wait until the first has ended
    engine.step()
    assert engine.report().queued == 1
    assert engine._cache.num_idle == 3
    second = after(request, done)
    assert (
        drive(engine, [second])[0].tokens.tolist() == drive(made(how), [replace(second, keep=False)])[0].tokens.tolist()
    )


def test_what_does_not_begin_with_it_all_starts_from_its_prompt(how):
    engine, request = made(how, versions=(0, 1)), first(0)
    done = drive(engine, [request])[0]
    follows = after(request, done)
    for other in (
        replace(follows, prompt=(follows.prompt[0] + 1, *follows.prompt[1:])),
        replace(follows, version=1),
        replace(follows, prompt=follows.prompt[:48]),
    ):
        drive(engine, [replace(request, keep=True)])
        plain = drive(made(how, versions=(0, 1)), [replace(other, keep=False)])[0]
        ours = drive(engine, [replace(other, keep=False)])[0]
        assert ours.prefilled == len(other.prompt)
        assert ours.tokens.tolist() == plain.tokens.tolist()
        assert engine._cache.num_free == engine._cache.num_pages, "and what was kept is gone"


def test_a_turn_that_is_withdrawn_before_it_starts_gives_back_what_it_was_to_begin_with(how):
    engine, request = made(how, rows=1), first(0)
    done = drive(engine, [request])[0]
    engine.add(Request(9, 0, prompt_of(5, 9), 9, Sampling(20)))
    engine.step()
    engine.add(after(request, done))
    assert engine.abort([0]) == [0]
    drive(engine)
    assert engine._cache.num_free == engine._cache.num_pages


def test_memory_that_is_given_back_takes_along_what_was_kept(how):
    engine, request = made(how), first(0)
    done = drive(engine, [request])[0]
    engine.shrink(256)
    assert engine._cache.num_free == engine._cache.num_pages
    second = after(request, done)
    assert drive(engine, [second])[0].prefilled == len(second.prompt)


def test_new_weights_under_a_version_drop_what_the_old_ones_made(how):
    engine, request = made(how), first(0)
    done = drive(engine, [request])[0]
    engine.swap(0, weights(5, how[1]))
    second = replace(after(request, done), version=5)
    assert drive(engine, [second])[0].prefilled == len(second.prompt)


def test_where_results_must_not_depend_on_neighbours_every_turn_is_prefilled(how):
    if how[0].mixed_batches:
        pytest.skip("mixed batches are deterministic by how they are computed")
    engine = made(how, deterministic=True)
    found = turns(engine, [first(0)], 2)
    assert found[1][0].prefilled == 21 + 30 + len(OBSERVED)


def test_a_turn_that_comes_back_with_its_cache_replaces_what_was_kept_before_it_went(how):
    engine, other, request = made(how), made(how), first(0)
    second = after(request, drive(engine, [request])[0])
    other.add(second)
    for _ in range(4):
        other.step()
    drive(engine, other.suspend([0], kv=True))
    assert len(engine._schedule._retained) == 1
    engine.unload(0)
    assert (engine._cache.num_free, engine._cache.num_idle) == (engine._cache.num_pages, 0)


def test_a_turn_whose_prefill_gives_way_leaves_nothing_behind(how):
    engine, request = made(how, prefill_tokens=16), first(0, group=0)
    second = after(request, drive(engine, [request])[0], prompt_of(40, 5))
    engine.add(second)
    engine.step()
    engine.shrink(256)
    assert len(drive(engine)[0].tokens) == 30
    assert not engine._schedule._prefixes


def test_logits_that_are_no_numbers_leave_nothing_behind(how):
    engine = made(how)
    for linear in engine._slots._adapted.values():
        linear.resident(0)[1].fill_(float("nan"))
    drive(engine, [first(0)])
    assert engine._cache.num_free == engine._cache.num_pages


# -- the third way: to the host ----------------------------------------------------------------------------------------


class FixedRates(Rates):
    """Rates that stay as they are."""

    def copied(self, num_bytes: int, seconds: float) -> None:
        pass

    def worked(self, tokens: int, busy_s: float) -> None:
        pass


CHEAP, DEAR = (1e18, 1.0), (1.0, 1e18)  # bytes/s of copies, tokens/s of prefilling


def with_rates(engine: Any, rates: tuple[float, float]) -> Any:
    engine._schedule.host.rates = FixedRates(*rates)
    return engine


def waits(engine: Any) -> tuple[int, int]:
    """Tokens that wait for their next turn: on the device, and on the host."""
    report = engine.report()
    return report.kv_between_turns, report.kv_on_host


def crowd(engine: Any, count: int = 4) -> None:
    """Others need the memory."""
    drive(engine, [Request(100 + i, 0, prompt_of(40, 90 + i), i, Sampling(50)) for i in range(count)])


def test_retained_carried_or_dropped_an_episode_has_the_same_tokens(how):
    requests = [first(i) for i in range(4)]
    expected = turns(made(how), requests)
    for rates in (CHEAP, DEAR):
        engine, wanted, found = with_rates(made(how, kv_tokens=4 * 96, rows=4), rates), requests, []
        for number in range(3):
            done = drive(engine, wanted)
            found.append(done)
            wanted = [after(request, done[request.id]) for request in wanted]
            if number < 2:
                crowd(engine)
                assert bool(waits(engine)[1]) == (rates is CHEAP)
        for ours, theirs in zip(found, expected, strict=True):
            for id, completion in theirs.items():
                assert ours[id].tokens.tolist() == completion.tokens.tolist()
                if rates is CHEAP:  # the KV is the same bit for bit, and nothing is prefilled again
                    assert ours[id].prefilled == completion.prefilled
        if rates is DEAR:
            contexts = {each.id: len(after(each, expected[0][each.id]).prompt) for each in requests}
            assert {id: done.prefilled for id, done in found[1].items()} == contexts


def test_below_the_low_mark_the_coldest_leave_before_their_pages_are_asked_for(how):
    engine = with_rates(made(how, kv_tokens=160, rows=2), CHEAP)  # 11 pages
    drive(engine, [first(0)])
    drive(engine, [first(1)])
    drive(engine, [first(2)])
    assert waits(engine) == (9 * PAGE, 0)
    assert engine._cache.num_free == 2
    engine._cache.take(2)  # none is free
    engine._schedule.spill()
    engine._schedule.host.wait()
    engine._schedule.spill()
    assert waits(engine) == (6 * PAGE, 3 * PAGE)
    assert list(engine._schedule._on_host) == [0]


def test_above_the_low_mark_nothing_leaves(how):
    engine = with_rates(made(how, kv_tokens=160, rows=2), CHEAP)
    drive(engine, [first(0)])
    engine._schedule.spill()
    assert waits(engine) == (3 * PAGE, 0)


def test_what_is_on_the_host_goes_with_its_version_with_new_weights_and_with_another_beginning(how):
    for end in ("unload", "swap", "other"):
        engine = with_rates(made(how, kv_tokens=4 * 96, rows=4), CHEAP)
        done = drive(engine, [first(i) for i in range(4)])
        crowd(engine)
        assert waits(engine)[1] > 0
        if end == "unload":
            engine.unload(0)
        elif end == "swap":
            engine.swap(0, weights(5, how[1]))
        else:
            for number in range(4):
                second = after(first(number), done[number])
                changed = replace(second, prompt=(second.prompt[0] + 1, *second.prompt[1:]), keep=False)
                assert drive(engine, [changed])[number].prefilled == len(second.prompt)
        assert waits(engine) == (0, 0)
        assert engine._cache.num_free == engine._cache.num_pages


def test_memory_of_the_host_is_bounded_and_the_coldest_are_dropped(how):
    engine = with_rates(made(how, kv_tokens=4 * 96, rows=4), CHEAP)
    host = engine._schedule.host
    host.limit_bytes = host.size(3)
    drive(engine, [first(i) for i in range(4)])
    crowd(engine)
    assert waits(engine)[1] == 3 * PAGE
    assert len(engine._schedule._on_host) == 1
    assert 0 not in engine._schedule._on_host
    host.limit_bytes = host.size(3) - 1
    engine.unload(0)
    engine.load(weights(0, how[1]))
    drive(engine, [first(i) for i in range(4)])
    crowd(engine)
    assert waits(engine)[1] == 0


def test_a_turn_that_is_taken_back_before_its_kv_has_arrived_leaves_nothing_behind(how):
    engine = with_rates(made(how, kv_tokens=4 * 96, rows=4), CHEAP)
    done = drive(engine, [first(i) for i in range(4)])
    crowd(engine)
    (id,) = list(engine._schedule._on_host)[:1]
    engine.add(after(first(id), done[id]))
    engine._schedule.admit()
    assert engine.abort([id]) == [id]
    engine.unload(0)
    assert waits(engine) == (0, 0)
    assert engine._cache.num_free == engine._cache.num_pages


def test_a_turn_gives_way_with_its_kv_on_the_host_and_comes_back(how):
    engine = with_rates(made(how, kv_tokens=4 * 96, rows=4), CHEAP)
    done = drive(engine, [first(i) for i in range(4)])
    crowd(engine)
    (id,) = list(engine._schedule._on_host)[:1]
    second = after(first(id), done[id])
    engine.add(second)
    engine._schedule.admit()
    engine.shrink(256)
    expected = drive(made(how), [replace(second, keep=False)])[id]
    assert drive(engine)[id].tokens.tolist() == expected.tokens.tolist()


class LateCopies(HostKV):
    """Copies as a stream of their own makes them, as late as it may: when somebody waits for them, or at random.

    So a page that is used before its copy was waited for has the wrong contents.
    """

    def __init__(self, cache: Any, draw: np.random.Generator) -> None:
        super().__init__(cache)
        self.overlaps, self._draw = True, draw
        self._stream_of_copies: list[tuple[HostCopy, torch.Tensor, bool, Any]] = []
        self.num_late = 0

    def _run(self, copy: HostCopy, pages: Any, *, out: bool) -> None:
        copy.began = copy.done = _Event(self)  # type: ignore[assignment]
        self._stream_of_copies.append((copy, torch.tensor(pages), out, copy.done))

    def next(self) -> None:
        copy, index, out, event = self._stream_of_copies.pop(0)
        self._copy(copy.kv, index, out=out)
        event.is_done = True

    def order_after(self, copy: HostCopy) -> None:
        self.num_late += not copy.is_done
        while copy.done is not None and not copy.done.is_done:  # type: ignore[attr-defined]
            self.next()

    def wait(self) -> None:
        while self._stream_of_copies:
            self.next()

    def step(self) -> None:
        if self._stream_of_copies and self._draw.random() < 0.2:
            self.next()

    def copy_out(self, pages: Any) -> HostCopy:
        copy = HostCopy(torch.full(self._shape(pages), float("nan")))
        self.num_bytes += self.size(len(pages))
        self._run(copy, pages, out=True)
        return copy

    def _shape(self, pages: Any) -> tuple[int, ...]:
        cache = self._cache
        return (cache.layers, 2, len(pages), PAGE, cache.kv_heads, cache.head_size)


class _Event:
    """The end of a copy."""

    def __init__(self, copies: LateCopies) -> None:
        self.is_done, self._copies = False, copies

    def query(self) -> bool:
        self._copies.step()
        return self.is_done

    def elapsed_time(self, other: _Event) -> float:
        return 1.0


def test_pages_are_given_back_only_after_the_copy_to_them(how):
    if how[1] != "cpu":
        pytest.skip("there copies have a stream of their own")
    engine = made(how, kv_tokens=4 * 96, rows=4)
    host = engine._schedule.host = LateCopies(engine._cache, np.random.default_rng(0))
    with_rates(engine, CHEAP)
    done = drive(engine, [first(i) for i in range(4)])
    crowd(engine)
    (id,) = list(engine._schedule._on_host)[:1]
    host.wait()
    engine.add(after(first(id), done[id]))
    engine._schedule.admit()
    assert len(host._stream_of_copies) == 1
    assert engine.abort([id]) == [id]
    assert not host._stream_of_copies


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("late", [False, True], ids=["", "late"])
def test_whatever_happens_between_turns_tokens_are_the_same_and_no_page_is_lost(how, seed, late):
    draw = np.random.default_rng(seed)
    engine, plenty = made(how, kv_tokens=320, rows=5, prefill_tokens=32), made(how, rows=16)
    if late:
        if how[1] != "cpu":
            pytest.skip("there copies have a stream of their own")
        engine._schedule.host = LateCopies(engine._cache, draw)
    with_rates(engine, DEAR if seed == 0 else CHEAP)
    episodes = {i: first(i, tokens=int(draw.integers(3, 40)), group=i // 3) for i in range(9)}
    done_turns, running, finished = dict.fromkeys(episodes, 0), set[int](), 0
    while episodes:
        waiting = [i for i in episodes if i not in running]
        what = draw.choice(["start", "step", "step", "step", "abort", "suspend"])
        if what == "start" and waiting:
            number = int(draw.choice(waiting))
            engine.add(episodes[number])
            running.add(number)
        elif what == "abort" and running and draw.random() < 0.2:
            number = int(draw.choice(sorted(running)))
            assert engine.abort([number]) == [number], "one that has ended unseen too"
            running.discard(number)
        elif what == "suspend" and running and draw.random() < 0.4:
            for out in engine.suspend([int(draw.choice(sorted(running)))], kv=bool(draw.integers(2))):
                engine.add(out)
        elif engine.has_work:
            for done in engine.step():
                expected = drive(plenty, [replace(episodes[done.id], keep=False)])[done.id]
                assert done.tokens.tolist() == expected.tokens.tolist()
                running.discard(done.id)
                done_turns[done.id] += 1
                finished += 1
                episodes[done.id] = after(episodes[done.id], done)
                if done_turns[done.id] == 3 or len(episodes[done.id].prompt) > 200:
                    del episodes[done.id]
    drive(engine)
    cache = engine._cache
    assert finished >= 9
    assert not late or seed == 0 or engine._schedule.host.num_late, "somebody waited for a copy"
    assert cache.num_free + cache.num_idle == cache.num_pages
    engine.unload(0)
    assert waits(engine) == (0, 0)
    assert (cache.num_free, cache.num_idle) == (cache.num_pages, 0)
