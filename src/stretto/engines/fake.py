"""An engine without a model, for tests and dry runs: the whole protocol, with tokens from a hash.

A trajectory's tokens, log-probabilities and length are functions of its prompt, version, seed and sampling, as the
protocol demands. Lengths have a long tail (log-normal). Options make single requests fail, or the whole engine.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import TypedDict, Unpack

import numpy as np
from numpy.typing import NDArray

from stretto.clock import now
from stretto.engines.load_reports import Counters, report_of
from stretto.engines.protocol import Capabilities
from stretto.engines.threaded import Failed, ThreadedEngine
from stretto.errors import ChecksumError, EngineError, RequestError, VersionNotResidentError
from stretto.types import Capacity, Completion, EngineStats, Request, Sampling, Supports, Suspended, Weights

_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MASK = (1 << 64) - 1


def _mix(z: int) -> int:
    z = (z + _GOLDEN) & _MASK
    z = ((z ^ (z >> 30)) * _FIRST) & _MASK
    z = ((z ^ (z >> 27)) * _SECOND) & _MASK
    return z ^ (z >> 31)


def _key(request: Request, version: int) -> int:
    key = _mix(request.seed & _MASK) ^ _mix(version + 1)
    for token in request.prompt:
        key = _mix(key ^ token)
    return key


@dataclass(slots=True, eq=False)
class _Running:
    request: Request
    arrival: int
    total: int  # tokens at its end
    made: int = 0
    past: Suspended | None = None  # its state when it arrived, or when its weights were last swapped
    started_at: float = 0.0
    prefilled: int = 0


class FakeOptions(TypedDict, total=False):
    """The options of a fake engine; the defaults are those of `FakeSteppedEngine`."""

    slots: int
    rows: int
    kv_tokens: int
    max_context: int
    step_s: float  # duration of a step, whatever the number of rows
    median_tokens: float  # lengths are log-normal
    sigma: float
    vocabulary: int
    failures: Mapping[int, int] | None  # by id of the request: how often it fails before it succeeds
    die_after: int | None  # steps


class FakeSteppedEngine:
    """The step-based core; see `FakeOptions`."""

    def __init__(
        self,
        *,
        slots: int = 4,
        rows: int = 64,
        kv_tokens: int = 1 << 20,
        max_context: int = 1 << 16,
        step_s: float = 0.0,
        median_tokens: float = 8.0,
        sigma: float = 1.0,
        vocabulary: int = 100,
        failures: Mapping[int, int] | None = None,
        die_after: int | None = None,
    ) -> None:
        self.capacity = Capacity(slots, rows, kv_tokens, max_context)
        self.capabilities = Capabilities(carries_kv=False)  # it has none, and needs none to go on
        self._step_s, self._median, self._sigma, self._vocabulary = step_s, median_tokens, sigma, vocabulary
        self._failures = dict(failures or {})
        self._die_after = die_after
        self._checksums: dict[int, str] = {}
        self._running: dict[int, _Running] = {}
        self._queue: dict[int, _Running] = {}
        self._arrivals = 0
        self._counters = Counters()

    # -- versions ------------------------------------------------------------------------------------------------------

    def load(self, weights: Weights) -> None:
        if weights.version in self._checksums:
            raise RequestError(f"version {weights.version} is resident already")
        if len(self._checksums) >= self.capacity.slots:
            held = sorted(self._checksums)
            raise RequestError(f"no slot is free for version {weights.version}: all {len(held)} slots hold {held}")
        _confirm(weights)
        self._checksums[weights.version] = weights.checksum

    def swap(self, old: int, weights: Weights) -> None:
        self._resident(old)
        if weights.version != old and weights.version in self._checksums:
            raise RequestError(f"version {weights.version} is resident already")
        _confirm(weights)
        for work in self._everyone():
            if work.request.version == old:
                if work.made:
                    past = self._suspended(work)
                    versions = past.token_versions
                    versions = np.full(work.made, old, np.int32) if versions is None else versions
                    work.past = replace(past, token_versions=versions)
                    self._counters.prefilled += len(work.request.prompt) + work.made
                work.request = replace(work.request, version=weights.version)
        del self._checksums[old]
        self._checksums[weights.version] = weights.checksum

    def unload(self, version: int) -> None:
        self._resident(version)
        left = [work.request.id for work in self._everyone() if work.request.version == version]
        if left:
            raise RequestError(f"version {version} has {len(left)} trajectories, among them {sorted(left)[:4]}")
        del self._checksums[version]

    def _resident(self, version: int) -> str:
        if version not in self._checksums:
            raise VersionNotResidentError(f"version {version} is not resident; these are: {sorted(self._checksums)}")
        return self._checksums[version]

    # -- trajectories --------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._queue)

    def _everyone(self) -> list[_Running]:
        return [*self._running.values(), *self._queue.values()]

    def add(self, work: Request | Suspended) -> None:
        past = work if isinstance(work, Suspended) else None
        request = work.request if isinstance(work, Suspended) else work
        self._resident(request.version)
        if request.id in self._running or request.id in self._queue:
            raise RequestError(f"request {request.id} is here already")
        length, limit = len(request.prompt) + request.sampling.max_tokens, self.capacity
        if not request.prompt or request.sampling.max_tokens < 1:
            raise RequestError(f"request {request.id} has an empty prompt or `max_tokens` below 1")
        if length > min(limit.max_context, limit.kv_tokens):
            raise RequestError(
                f"request {request.id} may grow to {length} tokens, `max_context` is {limit.max_context}"
            )
        entry = _Running(request, self._arrivals, self._length(request), past=past)
        if past is not None:
            entry.made, entry.started_at, entry.prefilled = len(past.tokens), past.started_at, past.prefilled
            entry.total = max(entry.total, entry.made + 1)
        self._arrivals += 1
        self._queue[request.id] = entry

    def _length(self, request: Request) -> int:
        uniform = (_mix(_key(request, request.version) ^ 1) + 0.5) / 2.0**64
        tokens = round(self._median * math.exp(self._sigma * NormalDist().inv_cdf(uniform)))
        return min(max(tokens, 1), request.sampling.max_tokens)

    def suspend(self, ids: Sequence[int], *, kv: bool) -> list[Suspended]:
        return [self._suspended(work) for work in self._take(ids)]

    def abort(self, ids: Sequence[int]) -> list[int]:
        return [work.request.id for work in self._take(ids)]

    def shrink(self, kv_tokens: int) -> None:
        self.capacity = replace(self.capacity, kv_tokens=kv_tokens)

    def _take(self, ids: Sequence[int]) -> list[_Running]:
        found = [self._running.pop(i, None) or self._queue.pop(i, None) for i in dict.fromkeys(ids)]
        return [work for work in found if work is not None]

    # -- the step ------------------------------------------------------------------------------------------------------

    def step(self) -> list[Completion | Failed]:
        began = time.perf_counter()
        if self._die_after is not None and self._counters.steps >= self._die_after:
            raise EngineError(f"the fake engine was told to die after {self._die_after} steps")
        free = self.capacity.rows - len(self._running)
        for work in sorted(self._queue.values(), key=lambda w: (w.request.priority, w.arrival))[:free]:
            del self._queue[work.request.id]
            self._running[work.request.id] = work
            work.started_at = work.started_at or now()
            work.prefilled += len(work.request.prompt)
            self._counters.prefilled += len(work.request.prompt)
        if self._step_s:
            time.sleep(self._step_s)
        ended: list[Completion | Failed] = []
        self._counters.steps += 1
        self._counters.tokens += len(self._running)
        num_rows = sum(work.request.priority == 0 for work in self._running.values())
        for work in list(self._running.values()):
            work.made += 1
            if self._failures.get(work.request.id, 0) > 0:
                self._failures[work.request.id] -= 1
                ended.append(Failed(work.request.id, RequestError(f"request {work.request.id} was told to fail")))
                del self._running[work.request.id]
            elif work.made >= work.total:
                ended.append(self._completion(work))
                del self._running[work.request.id]
        self._counters.busy_s += time.perf_counter() - began if num_rows else 0.0
        self._counters.row_s += (time.perf_counter() - began) * num_rows
        return ended

    def _completion(self, work: _Running) -> Completion:
        done = self._suspended(work)
        how = work.request.sampling
        stop = work.total < how.max_tokens
        if stop and how.stop_tokens:
            done.tokens[-1] = how.stop_tokens[0]
        versions = done.token_versions
        first = work.request.version if versions is None else int(versions[0])
        return Completion(
            work.request.id,
            first,
            done.tokens,
            done.logprobs,
            "stop" if stop else "length",
            done.checksum,
            versions,
            work.started_at,
            now(),
            work.prefilled,
            _supports(done.tokens, how, self._vocabulary),
        )

    def _suspended(self, work: _Running) -> Suspended:
        """Returns the trajectory so far: its past as it arrived, and the rest from the hash of its version."""
        request, past = work.request, work.past
        start = 0 if past is None else len(past.tokens)
        tokens, logprobs = self._draw(_key(request, request.version), start, work.made, request)
        versions = None
        if past is not None:
            tokens, logprobs = np.concatenate([past.tokens, tokens]), np.concatenate([past.logprobs, logprobs])
            if past.token_versions is not None:
                own = np.full(work.made - start, request.version, np.int32)
                versions = np.concatenate([past.token_versions, own])
        checksum = self._resident(request.version)
        supports = _supports(tokens, request.sampling, self._vocabulary)
        return Suspended(request, tokens, logprobs, checksum, versions, None, work.started_at, work.prefilled, supports)

    def _draw(self, key: int, start: int, end: int, request: Request) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        hashes = np.array([_mix(key + i) for i in range(start, end)], dtype=np.uint64)
        tokens = (hashes % np.uint64(self._vocabulary)).astype(np.int32)
        stops = [t for t in request.sampling.stop_tokens if t < self._vocabulary]
        if stops and len(stops) < self._vocabulary:
            # A stop token ends a trajectory, so it cannot occur inside of one.
            allowed = np.setdiff1d(np.arange(self._vocabulary, dtype=np.int32), np.array(stops, dtype=np.int32))
            tokens = allowed[tokens % len(allowed)]
        logprobs = -3.0 * ((hashes >> np.uint64(32)).astype(np.float64) / 2.0**32)
        if request.sampling.temperature <= 0:
            logprobs = np.zeros_like(logprobs)
        return tokens, logprobs.astype(np.float32)

    def report(self) -> EngineStats:
        return report_of(self._checksums, list(self._running.values()), list(self._queue.values()), self._counters)

    def close(self) -> None:
        self._running.clear()
        self._queue.clear()


def _supports(tokens: NDArray[np.int32], how: Sampling, vocabulary: int) -> Supports | None:
    """Returns a small support for each token, with the token first; it has `top_k` tokens if that is set."""
    if not (how.truncates and how.supports):
        return None
    width = min(how.top_k or 4, vocabulary)
    others = ((tokens[:, None] + np.arange(width)) % vocabulary).astype(np.int32)
    others[:, 0] = tokens  # a stop token may lie beyond the vocabulary
    return Supports(np.full(len(tokens), width, dtype=np.int32), others.reshape(-1))


def _confirm(weights: Weights) -> None:
    """Raises `ChecksumError` if the tensors, if there are any, do not have the checksum of the weights."""
    if not weights.tensors:
        return
    from stretto.models.checksums import checksum

    found = checksum(weights.tensors, weights.scale)
    if found != weights.checksum:
        raise ChecksumError(f"version {weights.version} has checksum `{found}`, expected `{weights.checksum}`")


class FakeEngine(ThreadedEngine):
    """A `FakeSteppedEngine` in a thread, with the same options."""

    def __init__(self, *, name: str = "fake", **options: Unpack[FakeOptions]) -> None:
        super().__init__(lambda: FakeSteppedEngine(**options), name=name)
