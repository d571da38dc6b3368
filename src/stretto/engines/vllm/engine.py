"""The engine over a child process with vLLM in it: a step-based core for `engines/threaded.py`.

A step takes in the tokens that the child has sent. The child generates meanwhile, whatever this side does. A version is
loaded in four steps: its files are written, the child reads them and compares the checksum, vLLM loads them, and the
child scores the probe (`receipts.py`). Only then does the engine hold the version.

A suspended trajectory is its tokens: where it goes on, its context is prefilled again, and the next tokens are drawn
from a seed that follows from the trajectory's and from its length. Stop strings are looked for here, because the child
makes no text.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from stretto import clock
from stretto.engines.load_reports import Counters, report_of
from stretto.engines.protocol import Capabilities
from stretto.engines.stop_strings import ends_in_string
from stretto.engines.threaded import Failed
from stretto.engines.vllm import frames
from stretto.engines.vllm.process import ChildProcess
from stretto.engines.vllm.receipts import make_receipt
from stretto.engines.vllm.weight_folders import write_folder
from stretto.errors import ChecksumError, EngineError, RequestError, VersionNotResidentError
from stretto.types import (
    Capacity,
    Completion,
    EngineStats,
    FinishReason,
    Probe,
    Receipt,
    Request,
    Supports,
    Suspended,
    Weights,
)

log = logging.getLogger(__name__)

WAIT_S = 0.005  # for tokens, in a step: calls wait as long
CAPABILITIES = Capabilities(
    confirms="receipt",
    swaps=False,
    shrinks=False,
    carries_kv=False,
    same_draws=False,
    exact=False,
)


@dataclass(frozen=True, slots=True)
class _Version:
    """A version that the child holds."""

    number: int  # of its load
    checksum: str
    receipt: Receipt
    probe: Probe
    answer: tuple[float, ...]


@dataclass(slots=True, eq=False)
class _Trajectory:
    request: Request
    key: int
    tokens: list[int] = field(default_factory=list)
    supports: list[tuple[int, ...]] = field(default_factory=list)  # of the tokens; empty ones if not recorded
    logprobs: list[float] = field(default_factory=list)
    receipts: tuple[str, ...] = ()
    started_at: float = 0.0  # 0: it has no token from here yet, and was not started elsewhere
    prefilled: int = 0
    is_running: bool = False
    step: int = 0  # of the engine, that its last token is of

    @property
    def made(self) -> int:
        return len(self.tokens)

    @property
    def recorded(self) -> Supports | None:
        """The tokens that each token was drawn from; None if the request does not record it."""
        if not (self.request.sampling.truncates and self.request.sampling.supports):
            return None
        counts = np.array([len(each) for each in self.supports], dtype=np.int32)
        return Supports(counts, np.array([token for each in self.supports for token in each], dtype=np.int32))


class VllmEngine:
    """One rollout instance on vLLM. Made and used in one thread."""

    def __init__(
        self,
        process: ChildProcess,
        options: frames.ChildOptions,
        *,
        kv_tokens: int,
        decode: Callable[[Sequence[int]], str] | None = None,
    ) -> None:
        """`process` was started with `options`. `decode` is needed for stop strings."""
        self.capacity = Capacity(options.slots, options.rows, kv_tokens, options.max_context)
        self.capabilities = replace(CAPABILITIES, records_supports=options.masks)
        self._process, self._options, self._decode = process, options, decode
        self._layout = f"{options.tensor_parallel} x {options.device}, {options.dtype}"
        self._versions: dict[int, _Version] = {}
        self._held: dict[tuple[int, str], str] = {}  # by version and checksum: what vLLM held when it was loaded
        self._trajectories: dict[int, _Trajectory] = {}  # by the id of the request
        self._by_key: dict[int, _Trajectory] = {}
        self._ended: list[Completion | Failed] = []
        self._counters = Counters()
        self._accounted_at = time.perf_counter()
        self._num_rollouts = 0  # trajectories that the child has had since then, without those of evaluation

    # -- versions ------------------------------------------------------------------------------------------------------

    def load(self, weights: Weights) -> Receipt:
        """Loads a version and returns its receipt. Raises `ChecksumError`, and holds nothing, if that fails."""
        if weights.version in self._versions:
            raise RequestError(f"version {weights.version} is resident already")
        if len(self._versions) >= self.capacity.slots:
            held = sorted(self._versions)
            raise RequestError(f"no slot is free for version {weights.version}: all {len(held)} slots hold {held}")
        if weights.kind != self._options.kind:
            raise RequestError(f"version {weights.version} has {weights.kind} weights, {self._options.kind} are served")
        probe = weights.probe
        if probe is None:
            raise RequestError(f"version {weights.version} came without a probe, which a receipt needs")
        number = self._process.new_number()
        folder, began = self._process.folder / f"load-{number}", time.perf_counter()
        try:
            write_folder(folder, weights, self._options.model)
            written = time.perf_counter()
            answer = self._call(
                lambda call: frames.Load(
                    call, number, weights.kind, str(folder), weights.checksum, weights.scale, probe.tokens
                )
            )
            assert isinstance(answer, frames.Loaded)
            others = {version: (held.probe, held.answer) for version, held in self._versions.items()}
            try:
                receipt = make_receipt(
                    version=weights.version,
                    checksum=answer.checksum,
                    probe=probe,
                    found=answer.logprobs,
                    others=others,
                    dtype=self._options.dtype,
                    served_by=self._process.served_by,
                    layout=self._layout,
                    held=answer.held,
                    first_held=self._held.get((weights.version, weights.checksum)),
                )
            except ChecksumError:
                self._call(lambda call: frames.Unload(call, number))
                raise
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        if weights.kind == "full":
            shutil.rmtree(folder, ignore_errors=True)  # vLLM reads a file of full weights once
        if receipt.held is not None:
            self._held[weights.version, weights.checksum] = receipt.held
        self._versions[weights.version] = _Version(number, weights.checksum, receipt, probe, answer.logprobs)
        log.info(
            "version %d is loaded in %.2f s: file written %.2f, read back %.2f, loaded by vLLM %.2f, probe scored %.2f",
            weights.version, time.perf_counter() - began, written - began, answer.read_s, answer.load_s, answer.probe_s,
        )  # fmt: skip
        return receipt

    def swap(self, old: int, weights: Weights) -> None:
        """Raises `RequestError`: vLLM cannot change the weights of a trajectory."""
        self._version(old)
        raise RequestError(
            f"version {old} cannot be swapped for version {weights.version}: the vLLM engine does not continue "
            "trajectories under other weights"
        )

    def unload(self, version: int) -> None:
        """Frees a version's slot, and then removes its files. Raises `RequestError` while it has trajectories."""
        held = self._version(version)
        left = sorted(t.request.id for t in self._trajectories.values() if t.request.version == version)
        if left:
            raise RequestError(f"version {version} has {len(left)} trajectories, among them {left[:4]}")
        self._call(lambda call: frames.Unload(call, held.number))
        del self._versions[version]
        shutil.rmtree(self._process.folder / f"load-{held.number}", ignore_errors=True)

    def _version(self, version: int) -> _Version:
        if version not in self._versions:
            raise VersionNotResidentError(f"version {version} is not resident; these are: {sorted(self._versions)}")
        return self._versions[version]

    def _call(self, make: Callable[[int], frames.ToChild]) -> frames.Ready | frames.Loaded | None:
        return self._process.call(make, on_tokens=self._take_in)

    # -- trajectories --------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return bool(self._trajectories or self._ended)

    def add(self, work: Request | Suspended) -> None:
        """Hands a request, or a trajectory that was suspended, to the child. Raises `RequestError` if it cannot be."""
        request = work.request if isinstance(work, Suspended) else work
        held = self._version(request.version)
        self._check(request)
        trajectory = _Trajectory(request, self._process.new_number())
        if isinstance(work, Suspended):
            self._restore(trajectory, work, held)
        if held.receipt.id not in trajectory.receipts:
            trajectory.receipts = (*trajectory.receipts, held.receipt.id)
        how, made = request.sampling, trajectory.made
        self._process.send(
            frames.Generate(
                key=trajectory.key,
                number=held.number,
                prompt=(*request.prompt, *trajectory.tokens),
                seed=_seed(request.seed, made),
                max_tokens=how.max_tokens - made,
                temperature=max(how.temperature, 0.0),
                top_p=how.top_p,
                top_k=how.top_k,
                min_p=how.min_p,
                stop_tokens=how.stop_tokens,
                priority=request.priority,
                supports=how.truncates and how.supports,
            )
        )
        self._account()
        self._num_rollouts += request.priority == 0
        self._trajectories[request.id] = self._by_key[trajectory.key] = trajectory

    def _check(self, request: Request) -> None:
        what, limit, how = f"request {request.id}", self.capacity, request.sampling
        length = len(request.prompt) + how.max_tokens
        if request.id in self._trajectories or any(done.id == request.id for done in self._ended):
            raise RequestError(f"{what} is here already")
        if not request.prompt or how.max_tokens < 1:
            raise RequestError(
                f"{what} has {len(request.prompt)} prompt tokens and `max_tokens` {how.max_tokens}: both must be "
                "above 0"
            )
        if length > min(limit.max_context, limit.kv_tokens):
            raise RequestError(
                f"{what} may grow to {length} tokens ({len(request.prompt)} of prompt, `max_tokens` {how.max_tokens}); "
                f"`max_context` is {limit.max_context}, `kv_tokens` {limit.kv_tokens}"
            )
        if self._options.masks and how.temperature > 0 and not how.top_k:
            raise RequestError(f"{what} has no `top_k`, and the vLLM engine was made for requests that have one")
        if how.truncates and how.supports and not self._options.masks:
            raise RequestError(
                f"{what} has `top_p`, `top_k` or `min_p`, and the vLLM engine cannot record what they leave of each "
                "distribution"
            )
        if how.stop_strings and self._decode is None:
            raise RequestError(f"{what} has `stop_strings`, but the engine was made without `decode`")

    def _restore(self, trajectory: _Trajectory, suspended: Suspended, held: _Version) -> None:
        request, made = trajectory.request, len(suspended.tokens)
        if made >= request.sampling.max_tokens:
            raise RequestError(f"request {request.id} has all of its {made} tokens already")
        if made and suspended.checksum != held.checksum:
            raise RequestError(
                f"request {request.id} was made by weights `{suspended.checksum}`, version {request.version} is "
                f"`{held.checksum}` here"
            )
        trajectory.tokens, trajectory.logprobs = suspended.tokens.tolist(), suspended.logprobs.tolist()
        trajectory.receipts = suspended.receipts
        if suspended.supports is not None and made:  # else there is nothing to split, not one empty part
            ends = np.cumsum(suspended.supports.counts)[:-1]
            trajectory.supports = [tuple(each.tolist()) for each in np.split(suspended.supports.tokens, ends)]
        trajectory.started_at, trajectory.prefilled = suspended.started_at, suspended.prefilled

    def suspend(self, ids: Sequence[int], *, kv: bool) -> list[Suspended]:
        """Takes trajectories out, without KV. Skips ids that are not here."""
        return [
            Suspended(
                t.request,
                np.array(t.tokens, dtype=np.int32),
                np.array(t.logprobs, dtype=np.float32),
                self._version(t.request.version).checksum,
                started_at=t.started_at,
                prefilled=t.prefilled,
                receipts=t.receipts,
                supports=t.recorded,
            )
            for t in self._take(ids)
        ]

    def abort(self, ids: Sequence[int]) -> list[int]:
        """Throws trajectories away; returns those that were here, including ended ones that `step` had not returned."""
        taken = [trajectory.request.id for trajectory in self._take(ids)]
        unreported = {done.id for done in self._ended}.intersection(ids)
        self._ended = [done for done in self._ended if done.id not in unreported]
        return [*taken, *unreported]

    def _take(self, ids: Sequence[int]) -> list[_Trajectory]:
        asked = [self._trajectories[id] for id in dict.fromkeys(ids) if id in self._trajectories]
        if not asked:
            return []
        self._call(lambda call: frames.Abort(call, tuple(t.key for t in asked)))
        left = [t for t in asked if t.key in self._by_key]  # the others ended before the child heard of it
        for trajectory in left:
            self._forget(trajectory)
        return left

    def _forget(self, trajectory: _Trajectory) -> None:
        self._account()
        del self._trajectories[trajectory.request.id], self._by_key[trajectory.key]
        self._num_rollouts -= trajectory.request.priority == 0

    def shrink(self, kv_tokens: int) -> None:
        """Raises `RequestError`: vLLM's cache has one size for its life."""
        raise RequestError(f"the KV cache of the vLLM engine cannot be reduced to {kv_tokens} tokens")

    # -- the step ------------------------------------------------------------------------------------------------------

    def step(self) -> list[Completion | Failed]:
        """Takes in what the child has sent; waits a moment if that is nothing. Returns the trajectories that ended.

        Those that ended before the child did are returned first; the next step raises `EngineError`.
        """
        wait_s = 0.0 if self._ended else WAIT_S
        try:
            while (frame := self._process.receive(wait_s)) is not None:
                if isinstance(frame, frames.Tokens):
                    self._take_in(frame)
                wait_s = 0.0
        except EngineError:
            if not self._ended:
                raise
        self._account()
        ended, self._ended = self._ended, []
        return ended

    def _take_in(self, frame: frames.Tokens) -> None:
        self._account()
        now = clock.now()
        for piece in frame.pieces:
            trajectory = self._by_key.get(piece.key)
            if trajectory is not None:  # else it was aborted because a string stopped it
                self._continue(trajectory, piece, now)

    def _count_steps(self, trajectory: _Trajectory, num_tokens: int) -> None:
        """Counts the steps of vLLM: as many as the trajectory that is furthest has tokens of.

        A running one has a token of every step. Its tokens may come several at once, and those of one step in several
        frames. The first token of a trajectory is of a step that others have a token of, if there are others.
        """
        if not trajectory.is_running:
            trajectory.step = max(self._counters.steps, 1) - 1
        trajectory.step += num_tokens
        self._counters.steps = max(self._counters.steps, trajectory.step)

    def _continue(self, trajectory: _Trajectory, piece: frames.Piece, now: float) -> None:
        request = trajectory.request
        if piece.finish == "error":
            self._forget(trajectory)
            self._ended.append(Failed(request.id, RequestError(f"request {request.id} failed: {piece.error}")))
            return
        self._count_steps(trajectory, len(piece.tokens))
        if not trajectory.is_running:
            trajectory.is_running = True
            trajectory.started_at = trajectory.started_at or now
            prefilled = max(0, len(request.prompt) + trajectory.made - piece.num_cached)
            trajectory.prefilled += prefilled
            self._counters.prefilled += prefilled
        stopped = self._extend(trajectory, piece)
        finish: FinishReason | None = "stop" if stopped else piece.finish
        if stopped and piece.finish is None:
            self._process.send(frames.Abort(0, (trajectory.key,)))  # nobody waits for its answer
        if finish is not None:
            self._forget(trajectory)
            self._ended.append(self._completion(trajectory, finish, now))

    def _extend(self, trajectory: _Trajectory, piece: frames.Piece) -> bool:
        """Adds tokens up to the one that completes a stop string, if there is one. Returns True if there is."""
        greedy, strings = trajectory.request.sampling.temperature <= 0, trajectory.request.sampling.stop_strings
        supports = piece.supports or ((),) * len(piece.tokens)
        for token, logprob, support in zip(piece.tokens, piece.logprobs, supports, strict=True):
            trajectory.tokens.append(token)
            trajectory.supports.append(support)
            trajectory.logprobs.append(0.0 if greedy else min(logprob, 0.0))
            self._counters.tokens += 1
            if strings and self._decode is not None and ends_in_string(self._decode, trajectory.tokens, strings):
                return True
        return False

    def _completion(self, trajectory: _Trajectory, finish: FinishReason, now: float) -> Completion:
        request = trajectory.request
        return Completion(
            request.id,
            request.version,
            np.array(trajectory.tokens, dtype=np.int32),
            np.array(trajectory.logprobs, dtype=np.float32),
            finish,
            self._version(request.version).checksum,
            started_at=trajectory.started_at,
            finished_at=now,
            prefilled=trajectory.prefilled,
            receipts=trajectory.receipts,
            supports=trajectory.recorded,
        )

    # -- statistics ----------------------------------------------------------------------------------------------------

    def _account(self) -> None:
        """Adds the time since the last call. A trajectory has a row as soon as there is one: it is prefilled then."""
        now = time.perf_counter()
        if rows := min(self._num_rollouts, self.capacity.rows):
            self._counters.busy_s += now - self._accounted_at
            self._counters.row_s += (now - self._accounted_at) * rows
        self._accounted_at = now

    def report(self) -> EngineStats:
        """Returns the current load and the counters since the start."""
        self._account()
        running = [each for each in self._trajectories.values() if each.is_running]
        queued = [each for each in self._trajectories.values() if not each.is_running]
        return report_of(self._versions, running, queued, self._counters)

    def close(self) -> None:
        """Ends the child."""
        self._trajectories.clear()
        self._by_key.clear()
        self._process.close()


def _seed(seed: int, num_tokens: int) -> int:
    """Returns the seed of the tokens that follow so many of a trajectory: its own if they are the first."""
    if not num_tokens:
        return seed
    digest = hashlib.blake2b(f"{seed} {num_tokens}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
