"""The native engine: continuous batching over a paged cache, with the versions of a policy side by side.

A step admits requests, provides pages, chooses the tokens to prefill, runs one forward (with full weights one for each
version), draws, and finishes trajectories (`steps.py`). The same code runs on a CPU and on a GPU: they differ by their
set of kernels (`kernels/kernel_set.py`). The engine is synchronous; `ThreadedEngine` runs it in a thread and implements
the protocol of an engine.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from stretto import clock
from stretto.engines.native import model_checks
from stretto.engines.native.cache import PAGE, KVCache, num_pages
from stretto.engines.native.decoder_protocol import Decoder
from stretto.engines.native.fused import FusedDecoder, fits
from stretto.engines.native.host_kv import Rates
from stretto.engines.native.kernels.kernel_set import Kernels, kernels_for
from stretto.engines.native.rows import Rows
from stretto.engines.native.schedule import Schedule
from stretto.engines.native.sequence import Ended, SequenceState
from stretto.engines.native.steps import Steps
from stretto.engines.native.token_supports import support_width, too_wide
from stretto.engines.native.transformers_forward import Attention, StockDecoder
from stretto.engines.native.versions import make_slots
from stretto.engines.protocol import Capabilities
from stretto.engines.stop_strings import ends_in_string
from stretto.engines.threaded import Failed
from stretto.errors import ChecksumError, EngineError, ModelError, RequestError, VersionNotResidentError
from stretto.models.checksums import checksum
from stretto.models.float16_range import range_hint
from stretto.models.routing import replaying, routing_shape
from stretto.types import MAX_SUPPORT, Capacity, Completion, EngineStats, KVRef, Request, Sampling, Suspended, Weights

logger = logging.getLogger(__name__)
P = ParamSpec("P")
R = TypeVar("R")

CHECK_LENGTHS = (40, 80)  # prompt tokens of the check at construction, below and above `cpu_attention.SHORT`


def _on_device(method: Callable[Concatenate[NativeEngine, P], R]) -> Callable[Concatenate[NativeEngine, P], R]:
    """Runs a method without gradients and, on a GPU, on the engine's own stream."""

    @functools.wraps(method)
    def wrapped(self: NativeEngine, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with torch.inference_mode():
            if self._stream is None:
                return method(self, *args, **kwargs)
            with torch.cuda.stream(self._stream):
                return method(self, *args, **kwargs)

    return wrapped


def _draw_error(trajectory: SequenceState, dtype: torch.dtype) -> str:
    """Explains why no token could be drawn, or none that can be trained on, from a model of this type."""
    request, how = trajectory.request, trajectory.sampling
    if size := too_wide(trajectory.supports):
        name = "top_k" if how.top_k else "top_p" if how.top_p < 1.0 else "min_p"
        return (
            f"`{name} = {getattr(how, name)}` left request {request.id} {size:,} tokens to draw token "
            f"{len(trajectory.tokens)} from, and no more than {MAX_SUPPORT:,} are recorded for training: set `top_k` "
            f"to at most {MAX_SUPPORT}, or cut more of the distribution off"
        )
    return f"the logits of request {request.id} under version {request.version} are not finite{range_hint(dtype)}"


class NativeEngine:
    """Generates under several versions at once. Not thread-safe: one thread calls everything.

    If `exact` is true, a trajectory's tokens and log-probabilities do not change by a bit with its neighbours, the
    versions beside it, a preemption, or a suspension with its KV. That holds in float32 on a CPU, and on a GPU with
    `deterministic`, which runs every step at its full number of rows and every prompt alone. Without `deterministic`, a
    request that follows one with `keep` may continue from the KV of that request, which changes it by rounding.

    `kernels` are those of the model's device unless given. With `records_routing`, requests of a mixture of experts
    may ask for the experts of their tokens, if its router is one that can be recorded (`models/routing.py`). Without
    it, routing is recorded for the check at construction alone.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        kind: Literal["lora", "full"],
        slots: int,
        rows: int,
        kv_tokens: int,
        max_context: int,
        lora_rank: int | None = None,
        lora_targets: Sequence[str] | None = None,
        prefill_tokens: int = 512,
        decode: Callable[[Sequence[int]], str] | None = None,
        deterministic: bool = False,
        kernels: Kernels | None = None,
        records_routing: bool = True,
    ) -> None:
        for name, value in (("slots", slots), ("rows", rows), ("kv_tokens", kv_tokens), ("max_context", max_context)):
            if value < 1:
                raise ModelError(f"`{name} = {value}` must be at least 1")
        if prefill_tokens < 16:
            raise ModelError(f"`prefill_tokens = {prefill_tokens}` must be at least 16")
        model_checks.refuse_by_config(model)
        self.capacity = Capacity(slots, rows, kv_tokens, max_context)
        device, dtype = next(model.parameters()).device, next(model.parameters()).dtype
        self.capabilities = Capabilities(exact=deterministic or device.type == "cpu")
        self._dtype = dtype
        # Its steps are short and many: they go before the trainer's long kernels on the same device.
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        targets = None if lora_targets is None else tuple(lora_targets)
        self._slots = make_slots(model, kind, slots, lora_rank, targets)
        attention, layers, heads, kv_heads, head_size = model_checks.discover(self._slots.trees)
        kernels = kernels_for(device) if kernels is None else kernels
        cache_dtype = torch.float32 if kernels.float32_cache else dtype
        # One page more than the budget: a prompt's last page exists twice while its first sample gets a copy.
        routing = routing_shape(self._slots.trees[0])
        self._cache = KVCache(layers, kv_heads, head_size, num_pages(kv_tokens) + 1, cache_dtype, device, routing)
        self.capacity = replace(self.capacity, kv_bytes_per_token=self._cache.bytes_per_token)
        attention.cache = self._cache
        self._rows = Rows(rows, max_context, device, mixed=kernels.mixed_batches)
        self._schedule = Schedule(self._cache, self._rows, prefill_tokens, retains=not deterministic)
        self._decode = decode
        self._finished: list[Completion | Failed] = []
        self._arriving: list[Ended] = []  # their records of routing are on their way to the host
        self._vocabulary = int(model.get_input_embeddings().weight.shape[0])  # type: ignore[operator]
        self._versions: dict[int, int] = {}  # version -> slot
        self._checksums: dict[int, str] = {}  # version -> checksum of the resident weights
        self._trajectories: dict[int, SequenceState] = {}
        self._counts = [0] * slots  # trajectories, by slot
        self._num_evaluation = 0  # trajectories with a priority after rollout's
        self._arrivals = self._num_steps = 0
        self._busy_s = self._row_s = 0.0
        self._running, self._accounted_at = 0, time.perf_counter()
        self._prepare_steps(model, attention, heads, kernels, deterministic)
        if not records_routing:
            self._stop_recording()

    def _prepare_steps(
        self, model: nn.Module, attention: Attention, heads: int, kernels: Kernels, deterministic: bool
    ) -> None:
        """Chooses decoders that agree with the model: fused ones if they do, else the modules of transformers.

        Raises `ModelError` if these do not agree with the model either.
        """
        trees, max_tokens = self._slots.trees, self.capacity.rows + self._schedule.prefill_tokens
        for fused in (True, False) if all(fits(tree, kernels) for tree in trees) else (False,):
            decoders: list[Decoder] = []
            alone = True  # experts are computed token by token, not grouped by what neighbours chose
            for tree in trees:
                if fused:
                    decoders.append(FusedDecoder(tree, self._cache, heads, kernels, self.capacity.max_context))
                    continue
                if kernels.mixed_batches:
                    model_checks.fuse_norms(tree)
                alone &= model_checks.batch_experts(tree, max_tokens)
                decoders.append(StockDecoder(tree, attention, self._slots))
            self._decoders = decoders
            exact, padding = deterministic, 0
            if kernels.mixed_batches:
                padding, exact = model_checks.exact_padding(decoders[0].layers, max_tokens)
                exact &= self._dtype == torch.float32
                for decoder in decoders:
                    decoder.pad_experts(padding)
            self.exact = exact and alone
            self._steps = Steps(
                self._slots, decoders, self._cache, self._rows, self._schedule, heads, kernels, self._ends_in_string,
                deterministic=deterministic, padding=padding,
            )  # fmt: skip
            if self._stream is not None:
                # The engine's stream must see the tensors made so far. The whole device must not be waited for:
                # another instance may be capturing.
                torch.cuda.current_stream(self._rows.device).synchronize()
            try:
                self._compare(model)
                return
            except ModelError as error:
                if not fused:
                    raise
                logger.warning("the modules of transformers run instead of the fused decoder: %s", error)

    # -- versions ------------------------------------------------------------------------------------------------------

    @_on_device
    def load(self, weights: Weights) -> None:
        """Loads a version into a free slot. Raises `ChecksumError`, and holds nothing, if it arrived damaged."""
        if weights.version in self._versions:
            raise RequestError(f"version {weights.version} is resident already")
        free = sorted(set(range(self.capacity.slots)) - set(self._versions.values()))
        if not free:
            held = sorted(self._versions)
            raise RequestError(f"no slot is free for version {weights.version}: all {len(held)} slots hold {held}")
        self._slots.put(free[0], weights)
        self._versions[weights.version] = free[0]
        self._checksums[weights.version] = weights.checksum

    @_on_device
    def swap(self, old: int, weights: Weights) -> None:
        """Overwrites a version; its trajectories continue under the new one, from caches that are computed again."""
        self._flush()
        slot = self._slot_of(old)
        if weights.version in self._versions and weights.version != old:
            raise RequestError(f"version {weights.version} is resident already")
        found = checksum(weights.tensors, weights.scale)
        if found != weights.checksum:
            raise ChecksumError(f"version {weights.version} has checksum `{found}`, expected `{weights.checksum}`")
        try:
            self._slots.put(slot, weights)
        except ChecksumError as error:
            # They arrived whole and were damaged in the slot. The old weights are gone, so nothing may continue.
            raise EngineError(f"version {weights.version} cannot take the slot of version {old}: {error}") from error
        del self._versions[old], self._checksums[old]
        self._versions[weights.version] = slot
        self._checksums[weights.version] = weights.checksum
        self._schedule.change_version(slot, weights.version)

    @_on_device
    def unload(self, version: int) -> None:
        """Frees a version's slot. Raises `RequestError` while it has trajectories."""
        self._flush()
        slot = self._slot_of(version)
        if self._counts[slot]:
            left = sorted(t.request.id for t in self._trajectories.values() if t.slot == slot)
            raise RequestError(f"version {version} has {len(left)} trajectories, among them {left[:4]}")
        self._schedule.drop_retained(slot)
        self._slots.clear(slot)
        del self._versions[version], self._checksums[version]

    def _slot_of(self, version: int) -> int:
        if version not in self._versions:
            raise VersionNotResidentError(f"version {version} is not resident; these are: {sorted(self._versions)}")
        return self._versions[version]

    # -- trajectories --------------------------------------------------------------------------------------------------

    @_on_device
    def add(self, work: Request | Suspended) -> None:
        """Queues a request, or a trajectory that was suspended. Raises `RequestError` if it can never be served."""
        request = work.request if isinstance(work, Suspended) else work
        self._check(request)
        trajectory = SequenceState(request, self._arrivals, self._slot_of(request.version))
        if isinstance(work, Suspended):
            self._restore(trajectory, work)
        self._arrivals += 1
        self._trajectories[request.id] = trajectory
        self._counts[trajectory.slot] += 1
        self._num_evaluation += request.priority > 0
        self._schedule.submit(trajectory)

    def _check(self, request: Request) -> None:
        what, limit = f"request {request.id}", self.capacity
        length = len(request.prompt) + request.sampling.max_tokens
        if request.id in self._trajectories or any(done.id == request.id for done in self._finished):
            raise RequestError(f"{what} is here already")
        if not request.prompt or request.sampling.max_tokens < 1:
            raise RequestError(
                f"{what} has {len(request.prompt)} prompt tokens and `max_tokens` {request.sampling.max_tokens}:"
                " both must be above 0"
            )
        most = min(limit.max_context, limit.kv_tokens)
        if length > most:
            raise RequestError(
                f"{what} may grow to {length} tokens ({len(request.prompt)} of prompt, `max_tokens`"
                f" {request.sampling.max_tokens}); `max_context` is {limit.max_context}, `kv_tokens` {limit.kv_tokens}"
            )
        lowest, highest = min(request.prompt), max(request.prompt)
        if lowest < 0 or highest >= self._vocabulary:
            token = lowest if lowest < 0 else highest
            raise RequestError(f"{what} has token {token} in its prompt, outside of a vocabulary of {self._vocabulary}")
        if request.sampling.stop_strings and self._decode is None:
            raise RequestError(f"{what} has `stop_strings`, but the engine was made without `decode`")

    def _restore(self, trajectory: SequenceState, suspended: Suspended) -> None:
        request, made = suspended.request, len(suspended.tokens)
        if made >= request.sampling.max_tokens:
            raise RequestError(f"request {request.id} has all of its {made} tokens already")
        resident, versions = self._checksums[request.version], suspended.token_versions
        # If other weights made its last token, the checksum is theirs, and it continues under this version.
        own = bool(made) and (versions is None or int(versions[-1]) == request.version)
        if own and suspended.checksum != resident:
            raise RequestError(
                f"request {request.id} was made by weights `{suspended.checksum}`,"
                f" version {request.version} is `{resident}` here"
            )
        recorded = len(suspended.supports) if suspended.supports is not None else 0
        if support_width(request.sampling) and recorded != made:
            raise RequestError(f"request {request.id} has {made} tokens and the supports of {recorded}")
        kv = suspended.kv
        if isinstance(kv, KVRef):
            raise RequestError(f"request {request.id} has KV on another machine, which has to be fetched first")
        if kv is not None:
            cache = self._cache
            shape = (cache.layers, 2, len(request.prompt) + made - 1, cache.kv_heads, cache.head_size)
            if tuple(kv.shape) != shape or not made:
                raise RequestError(f"request {request.id} has KV of {tuple(kv.shape)}, expected {shape}")
            if versions is not None and not own:
                raise RequestError(
                    f"request {request.id} has KV of version {versions[-1]}, and goes on under version"
                    f" {request.version}: it has to come without"
                )
        trajectory.tokens = np.asarray(suspended.tokens, dtype=np.int32)
        trajectory.logprobs = np.asarray(suspended.logprobs, dtype=np.float32)
        trajectory.supports = suspended.supports
        trajectory.routing = self._restored_routing(suspended)
        trajectory.past_versions = None if versions is None else np.asarray(versions, dtype=np.int32)
        trajectory.kv = kv
        trajectory.started_at, trajectory.prefilled = suspended.started_at, suspended.prefilled

    def _restored_routing(self, suspended: Suspended) -> NDArray[Any] | None:
        """Returns the record that a trajectory brings. Raises `RequestError` if it lacks one, or has another shape."""
        request, made = suspended.request, len(suspended.tokens)
        if self._cache.routing is None or not request.sampling.routing:
            return None
        own, record = tuple(self._cache.routing.shape[1:]), suspended.routing
        if record is None:
            if made:
                raise RequestError(f"request {request.id} has {made} tokens and no record of their routing")
            return None
        expected = len(request.prompt) + made - 1
        if record.shape[1:] != own or not (len(record) == expected or (not made and len(record) <= expected)):
            raise RequestError(
                f"request {request.id} has a record of routing of {tuple(record.shape)}, expected {(expected, *own)}"
            )
        return record

    @_on_device
    def suspend(self, ids: Sequence[int], *, kv: bool) -> list[Suspended]:
        """Takes trajectories out. Skips ids that are not here."""
        return [t.suspended(self._checksums[t.request.version]) for t in self._take(ids, kv=kv)]

    @_on_device
    def abort(self, ids: Sequence[int]) -> list[int]:
        """Throws trajectories away; returns those that were here, including ended ones that `step` had not returned."""
        taken = [trajectory.request.id for trajectory in self._take(ids, kv=False)]
        unreported = {done.id for done in self._finished}.intersection(ids)
        self._finished = [done for done in self._finished if done.id not in unreported]
        return [*taken, *unreported]

    def _take(self, ids: Sequence[int], *, kv: bool) -> list[SequenceState]:
        self._account()
        self._flush()
        taken = [self._trajectories.pop(i) for i in dict.fromkeys(ids) if i in self._trajectories]
        for trajectory in taken:
            self._counts[trajectory.slot] -= 1
            self._num_evaluation -= trajectory.request.priority > 0
            self._schedule.withdraw(trajectory, kv=kv)
        self._running = self._rollout_rows()
        return taken

    @_on_device
    def shrink(self, kv_tokens: int) -> None:
        """Gives KV memory back, down to `kv_tokens` tokens. Running trajectories wait in host memory and then continue.

        Raises `RequestError`, and changes nothing, if a trajectory that is here would no longer fit.
        """
        self._flush()
        longest = max((len(t.request.prompt) + t.sampling.max_tokens for t in self._trajectories.values()), default=1)
        if kv_tokens < longest:
            raise RequestError(f"`kv_tokens = {kv_tokens}` cannot hold a trajectory that may grow to {longest} tokens")
        self._schedule.vacate()
        self._steps.wait()
        self._steps.forget()
        self._cache.resize(num_pages(kv_tokens) + 1)
        self.capacity = replace(self.capacity, kv_tokens=kv_tokens)

    # -- the step ------------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return bool(self._trajectories or self._finished)

    @_on_device
    def step(self) -> list[Completion | Failed]:
        """Launches one token for every running row; returns the trajectories that have finished."""
        self._account()
        self._schedule.spill()
        self._schedule.admit()
        self._running = self._rollout_rows()
        ended = self._steps.run()
        finished, self._finished = self._finished, []
        finished += self._close(ended, waits=False)
        self._num_steps += 1
        self._account()
        self._schedule.host.rates.worked(self._schedule.prefilled, self._busy_s)
        self._running = self._rollout_rows()
        return finished

    def _flush(self) -> None:
        """Takes in everything that was drawn; the next step returns the trajectories that ended with it."""
        self._finished += self._close(self._steps.flush())

    def _rollout_rows(self) -> int:
        """Returns the number of running rows that do not belong to evaluation."""
        num_rows = len(self._rows) + self._schedule.num_waiting
        if not self._num_evaluation:
            return num_rows
        return num_rows - sum(t.request.priority > 0 for t in self._schedule.running())

    def _close(self, ended: Sequence[Ended], *, waits: bool = True) -> list[Completion | Failed]:
        """Returns what ended. Unless it `waits`, records of routing that are not on the host are left for later."""
        now = clock.now()
        done: list[Completion | Failed] = []
        closing, self._arriving = [*self._arriving, *ended], []
        for trajectory, finish, broken in closing:
            request = trajectory.request
            if not (waits or broken or trajectory.has_arrived):
                self._arriving.append((trajectory, finish, broken))
                continue
            if broken:
                done.append(Failed(request.id, RequestError(_draw_error(trajectory, self._dtype))))
            else:
                resident = self._checksums[request.version]
                done.append(trajectory.completion(finish, resident, now))
            self._counts[trajectory.slot] -= 1
            self._num_evaluation -= request.priority > 0
            del self._trajectories[request.id]
        return done

    def _ends_in_string(self, trajectory: SequenceState, tokens: NDArray[np.int32]) -> bool:
        assert self._decode is not None
        return ends_in_string(self._decode, tokens, trajectory.sampling.stop_strings)

    # -- statistics ----------------------------------------------------------------------------------------------------

    def _account(self) -> None:
        now = time.perf_counter()
        if self._running:
            self._busy_s += now - self._accounted_at
            self._row_s += (now - self._accounted_at) * self._running
        self._accounted_at = now

    def report(self) -> EngineStats:
        """Returns the current load and the counters since the start."""
        self._account()
        of_slot = [0] * self.capacity.slots
        for slot, made in self._rows.made_by_slot():
            of_slot[slot] = max(of_slot[slot], made)
        return EngineStats(
            running=len(self._rows) + self._schedule.num_waiting,
            queued=len(self._schedule.queue),
            kv_between_turns=self._cache.num_idle * PAGE,
            kv_on_host=self._schedule.host.num_tokens,
            kv_tokens=(self._cache.num_pages - self._cache.num_free - self._cache.num_idle) * PAGE,
            versions={version: self._counts[slot] for version, slot in self._versions.items()},
            longest={version: of_slot[slot] for version, slot in self._versions.items()},
            steps=self._num_steps,
            tokens=self._steps.tokens,
            prefilled=self._schedule.prefilled,
            preemptions=self._schedule.preemptions,
            busy_s=self._busy_s,
            row_s=self._row_s,
        )

    @_on_device
    def close(self) -> None:
        """Drops everything. Its memory may be freed afterwards: nothing that was launched uses it any more."""
        self._trajectories.clear()
        self._steps.wait()
        self._schedule.host.wait()

    # -- the check at construction -------------------------------------------------------------------------------------

    def _compare(self, model: nn.Module) -> None:
        """Generates a few tokens under the base weights. Raises `ModelError` if the model's own forward differs."""
        training = model.training
        model.eval()
        try:
            for length in CHECK_LENGTHS:
                self._compare_one(model, min(length, self.capacity.max_context - 4, self.capacity.kv_tokens - 4))
        finally:
            model.train(training)
        self._arrivals = self._num_steps = self._steps.tokens = 0
        self._busy_s = self._row_s = 0.0
        self._schedule.prefilled = self._schedule.preemptions = 0
        self._schedule.host.rates = Rates()

    @_on_device
    def _stop_recording(self) -> None:
        self._steps.wait()
        for decoder in self._decoders:
            decoder.stop_recording()
        self._cache.stop_recording()

    def _compare_one(self, model: nn.Module, length: int) -> None:
        if length < 1:
            return
        generator = torch.Generator().manual_seed(length)
        prompt = tuple(torch.randint(0, self._vocabulary, (length,), generator=generator).tolist())
        self._versions, self._checksums, self._steps.observed = {-1: 0}, {-1: ""}, []
        self.add(Request(-1, -1, prompt, 0, Sampling(4, temperature=0.0)))
        tokens: list[int] = []
        routing: NDArray[Any] | None = None
        while self.has_work:
            for done in self.step():
                tokens = [] if isinstance(done, Failed) else done.tokens.tolist()
                routing = None if isinstance(done, Failed) else done.routing
        ours = torch.cat(self._steps.observed).float()[: len(tokens)]
        self._versions, self._checksums, self._steps.observed = {}, {}, None
        inputs = torch.tensor([[*prompt, *tokens[:-1]]], device=self._rows.device)
        # Near a tie, rounding decides between experts, which is no error of the forward: both use the same ones.
        with torch.inference_mode(), replaying(model, routing):
            theirs = model(input_ids=inputs, use_cache=False).logits[0, length - 1 :].float()
        model_checks.refuse_other_logits(model, ours, theirs)
