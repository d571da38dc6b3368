"""The native engine: continuous batching over a paged cache, with the versions of a policy side by side.

A step is: admit, provide pages, choose what to prefill, one forward (one a version with full weights), draw, finish.
This is the synchronous core; `ThreadedEngine` runs it in a thread and gives it the protocol of an engine.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Concatenate, Literal, ParamSpec, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from stretto import clock
from stretto.checksums import checksum
from stretto.engines.native import probe
from stretto.engines.native.attention import Attention
from stretto.engines.native.cache import PAGE, KVCache, num_pages
from stretto.engines.native.device_rows import DeviceRows
from stretto.engines.native.forward import Forward
from stretto.engines.native.fused import FusedDecoder, has_kernels
from stretto.engines.native.immediate import ImmediateSteps
from stretto.engines.native.kernels.choice import kernels_for
from stretto.engines.native.late import LateSteps
from stretto.engines.native.lean import is_plain
from stretto.engines.native.rows import Rows
from stretto.engines.native.schedule import Schedule
from stretto.engines.native.stock import StockDecoder
from stretto.engines.native.supports import support_width, too_wide
from stretto.engines.native.trajectory import Ended, Trajectory
from stretto.engines.native.versions import make_slots
from stretto.engines.threaded import Failed
from stretto.errors import ChecksumError, EngineError, ModelError, RequestError, VersionNotResidentError
from stretto.narrowing import range_hint
from stretto.types import MAX_SUPPORT, Capacity, Completion, Load, Request, Sampling, Suspended, Weights

logger = logging.getLogger(__name__)
P = ParamSpec("P")
R = TypeVar("R")

PROBE_SHORT, PROBE_LONG = 40, 80  # prompt tokens of the check at construction, on both sides of `SHORT`
TAIL = 8  # tokens decoded beyond the bytes of the longest stop string


def _on_device(method: Callable[Concatenate[NativeEngine, P], R]) -> Callable[Concatenate[NativeEngine, P], R]:
    """Run without gradients and, on a GPU, on the engine's own stream."""

    @functools.wraps(method)
    def wrapped(self: NativeEngine, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            return method(self, *args, **kwargs)

    return wrapped


def _why_broken(trajectory: Trajectory, dtype: torch.dtype) -> str:
    """Why no token could be drawn, or none that can be trained on, by a model of this type."""
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

    Where `exact`, a trajectory's tokens and log-probabilities do not change by a bit with its neighbours, the versions
    beside it, a preemption, or a suspension with its KV: in float32 on the CPU, and on a GPU with `deterministic`,
    which runs every step at its full number of rows and every prompt alone. Without `deterministic`, a request that
    follows one with `keep` is the same to rounding alone: it goes on from its KV, where nobody needed those pages.

    `late` is whether the host runs one step behind, as it does on a GPU by default.
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
        late: bool | None = None,
        deterministic: bool = False,
    ) -> None:
        for name, value in (("slots", slots), ("rows", rows), ("kv_tokens", kv_tokens), ("max_context", max_context)):
            if value < 1:
                raise ModelError(f"`{name} = {value}` must be at least 1")
        if prefill_tokens < 16:
            raise ModelError(f"`prefill_tokens = {prefill_tokens}` must be at least 16")
        probe.refuse_by_config(model)
        self.capacity = Capacity(slots, rows, kv_tokens, max_context)
        device, dtype = next(model.parameters()).device, next(model.parameters()).dtype
        self._dtype = dtype
        # Its steps are short and many: they go first where the trainer's long kernels run beside them.
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        targets = None if lora_targets is None else tuple(lora_targets)
        self._slots = make_slots(model, kind, slots, lora_rank, targets)
        attention, layers, heads, kv_heads, head_size = probe.discover(self._slots.trees)
        late = device.type == "cuda" if late is None else late
        # The sampled product over the cache wants float32; a wider cache loses nothing.
        cache_dtype = dtype if late else torch.float32
        # One page more than the budget: a prompt's last page stands twice while its first sample gets a copy.
        self._cache = KVCache(layers, kv_heads, head_size, num_pages(kv_tokens) + 1, cache_dtype, device)
        self.capacity = replace(self.capacity, kv_bytes_per_token=self._cache.bytes_per_token)
        attention.cache = self._cache
        self._rows: Rows | DeviceRows = DeviceRows(rows, max_context, device) if late else Rows(rows, device)
        self._schedule = Schedule(self._cache, self._rows, prefill_tokens, keeps=not deterministic)
        self._decode = decode
        self._finished: list[Completion | Failed] = []
        self._vocabulary = int(model.get_input_embeddings().weight.shape[0])  # type: ignore[operator]
        self._versions: dict[int, int] = {}  # version -> slot
        self._checksums: dict[int, str] = {}  # version -> of what is resident
        self._here: dict[int, Trajectory] = {}
        self._counts = [0] * slots  # trajectories here, by slot
        self._behind = 0  # those of them with a priority after rollout's: evaluation
        self._arrivals = self._steps = 0
        self._busy_s = self._row_s = 0.0
        self._running, self._mark = 0, time.perf_counter()
        self._work: ImmediateSteps | LateSteps
        if isinstance(self._rows, DeviceRows):
            self.exact = deterministic
            self._work = self._late_steps(self._rows, attention, heads, deterministic)
            if self._stream is not None:
                # Everything made so far is there for the engine's stream. Not the device: another instance may capture.
                torch.cuda.current_stream(device).synchronize()
            self._compare(model)
        else:
            self.exact = self._immediate_steps(model, self._rows, attention, heads)

    def _late_steps(self, rows: DeviceRows, attention: Attention, heads: int, deterministic: bool) -> LateSteps:
        """Steps over fused decoders where the architecture is a plain one, over transformers' modules elsewhere."""
        kernels, trees = kernels_for(rows.device), self._slots.trees
        decoders: list[FusedDecoder | StockDecoder] = []
        for tree in trees:
            if is_plain(tree) and has_kernels(tree):
                decoders.append(FusedDecoder(tree, self._cache, heads, kernels, self.capacity.max_context))
            else:
                # Experts that are not batched are grouped by what neighbours chose.
                self.exact &= probe.batch_experts(tree, self.capacity.rows + self._schedule.prefill_tokens)
                decoders.append(StockDecoder(tree, attention, self._slots))
        return LateSteps(
            self._slots,
            decoders,
            self._cache,
            rows,
            self._schedule,
            heads,
            kernels,
            self._ends_in_string,
            deterministic=deterministic,
        )

    def _immediate_steps(self, model: nn.Module, rows: Rows, attention: Attention, heads: int) -> bool:
        """Find the way to compute that agrees with the model; whether a row comes out the same beside any others.

        Where the lean forward does not agree, the modules of transformers run; where they do not either, it raises.
        They run in float16 too: there a processor adds a product up by how its weight lies in memory, so that weights
        which the lean forward had moved would train to other bits than the same weights of a replay.
        """
        per_token, max_tokens = True, self.capacity.rows + self._schedule.prefill_tokens
        for tree in self._slots.trees:
            probe.fuse_norms(tree)
            per_token &= probe.batch_experts(tree, max_tokens)
        forward = Forward(self._slots, attention, self._cache, rows, heads)
        self._work = ImmediateSteps(forward, rows, self._schedule, self._ends_in_string)
        for lean in (False,) if self._dtype == torch.float16 else (True, False):
            forward.prepare(lean=lean, max_tokens=max_tokens, max_context=self.capacity.max_context)
            try:
                self._compare(model)
                break
            except ModelError as error:
                if not forward.lean:
                    raise
                logger.warning("the modules of transformers run instead of the lean forward: %s", error)
        weight = next(model.parameters())
        return forward.exact and per_token and weight.dtype == torch.float32 and weight.device.type == "cpu"

    # -- versions ------------------------------------------------------------------------------------------------------

    @_on_device
    def load(self, weights: Weights) -> None:
        """Put a version into a free slot; raises `ChecksumError` and holds nothing where it did not arrive whole."""
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
        """Overwrite a version; its trajectories go on under the new one, from caches made again."""
        self._flush()
        slot = self._slot(old)
        if weights.version in self._versions and weights.version != old:
            raise RequestError(f"version {weights.version} is resident already")
        found = checksum(weights.tensors, weights.scale)
        if found != weights.checksum:
            raise ChecksumError(f"version {weights.version} has checksum `{found}`, expected `{weights.checksum}`")
        try:
            self._slots.put(slot, weights)
        except ChecksumError as error:
            # They arrived whole and are not what is resident. What was there is gone, and nothing may go on under it.
            raise EngineError(f"version {weights.version} cannot take the slot of version {old}: {error}") from error
        del self._versions[old], self._checksums[old]
        self._versions[weights.version] = slot
        self._checksums[weights.version] = weights.checksum
        self._schedule.change_version(slot, weights.version)

    @_on_device
    def unload(self, version: int) -> None:
        """Free a version's slot; an error while it has trajectories."""
        self._flush()
        slot = self._slot(version)
        if self._counts[slot]:
            left = sorted(t.request.id for t in self._here.values() if t.slot == slot)
            raise RequestError(f"version {version} has {len(left)} trajectories, among them {left[:4]}")
        self._schedule.drop_kept(slot)
        self._slots.clear(slot)
        del self._versions[version], self._checksums[version]

    def _slot(self, version: int) -> int:
        if version not in self._versions:
            raise VersionNotResidentError(f"version {version} is not resident; these are: {sorted(self._versions)}")
        return self._versions[version]

    # -- trajectories --------------------------------------------------------------------------------------------------

    @_on_device
    def add(self, work: Request | Suspended) -> None:
        """Queue a request, or a trajectory that was suspended; raises `RequestError` where it can never be served."""
        request = work.request if isinstance(work, Suspended) else work
        self._check(request)
        trajectory = Trajectory(request, self._arrivals, self._slot(request.version))
        if isinstance(work, Suspended):
            self._restore(trajectory, work)
        self._arrivals += 1
        self._here[request.id] = trajectory
        self._counts[trajectory.slot] += 1
        self._behind += request.priority > 0
        self._schedule.submit(trajectory)

    def _check(self, request: Request) -> None:
        what, limit = f"request {request.id}", self.capacity
        length = len(request.prompt) + request.sampling.max_tokens
        if request.id in self._here or any(done.id == request.id for done in self._finished):
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

    def _restore(self, trajectory: Trajectory, suspended: Suspended) -> None:
        request, made = suspended.request, len(suspended.tokens)
        if made >= request.sampling.max_tokens:
            raise RequestError(f"request {request.id} has all of its {made} tokens already")
        resident, versions = self._checksums[request.version], suspended.token_versions
        # Where other weights made its last token, the checksum is theirs, and it goes on under this version.
        own = bool(made) and (versions is None or int(versions[-1]) == request.version)
        if own and suspended.checksum != resident:
            raise RequestError(
                f"request {request.id} was made by weights `{suspended.checksum}`,"
                f" version {request.version} is `{resident}` here"
            )
        recorded = len(suspended.supports) if suspended.supports is not None else 0
        if support_width(request.sampling) and recorded != made:
            raise RequestError(f"request {request.id} has {made} tokens and the supports of {recorded}")
        if suspended.kv is not None:
            cache = self._cache
            shape = (cache.layers, 2, len(request.prompt) + made - 1, cache.kv_heads, cache.head_size)
            if tuple(suspended.kv.shape) != shape or not made:
                raise RequestError(f"request {request.id} has KV of {tuple(suspended.kv.shape)}, expected {shape}")
            if versions is not None and not own:
                raise RequestError(
                    f"request {request.id} has KV of version {versions[-1]}, and goes on under version"
                    f" {request.version}: it has to come without"
                )
        trajectory.tokens = np.asarray(suspended.tokens, dtype=np.int32)
        trajectory.logprobs = np.asarray(suspended.logprobs, dtype=np.float32)
        trajectory.supports = suspended.supports
        trajectory.past_versions = None if versions is None else np.asarray(versions, dtype=np.int32)
        trajectory.kv = suspended.kv
        trajectory.started_at, trajectory.prefilled = suspended.started_at, suspended.prefilled

    @_on_device
    def suspend(self, ids: Sequence[int], *, kv: bool) -> list[Suspended]:
        """Take trajectories out. Ids that are not here are left out."""
        return [t.suspended(self._checksums[t.request.version]) for t in self._take(ids, kv=kv)]

    @_on_device
    def abort(self, ids: Sequence[int]) -> list[int]:
        """Throw trajectories away; returns those that were here, with those whose end had not been told."""
        taken = [trajectory.request.id for trajectory in self._take(ids, kv=False)]
        untold = {done.id for done in self._finished}.intersection(ids)
        self._finished = [done for done in self._finished if done.id not in untold]
        return [*taken, *untold]

    def _take(self, ids: Sequence[int], *, kv: bool) -> list[Trajectory]:
        self._account()
        self._flush()
        taken = [self._here.pop(i) for i in dict.fromkeys(ids) if i in self._here]
        for trajectory in taken:
            self._counts[trajectory.slot] -= 1
            self._behind -= trajectory.request.priority > 0
            self._schedule.withdraw(trajectory, kv=kv)
        self._running = self._rollout_rows()
        return taken

    @_on_device
    def shrink(self, kv_tokens: int) -> None:
        """Give KV memory back: keep room for `kv_tokens`. What runs waits in host memory and goes on from there.

        Raises `RequestError` and changes nothing where a trajectory that is here would not fit any more.
        """
        self._flush()
        longest = max((len(t.request.prompt) + t.sampling.max_tokens for t in self._here.values()), default=1)
        if kv_tokens < longest:
            raise RequestError(f"`kv_tokens = {kv_tokens}` cannot hold a trajectory that may grow to {longest} tokens")
        self._schedule.vacate()
        self._work.wait()
        self._work.forget()
        self._cache.resize(num_pages(kv_tokens) + 1)
        self.capacity = replace(self.capacity, kv_tokens=kv_tokens)

    # -- the step ------------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return bool(self._here or self._finished)

    @_on_device
    def step(self) -> list[Completion | Failed]:
        """One token for every running row; returns what has finished."""
        self._account()
        self._schedule.admit()
        self._running = self._rollout_rows()
        ended = self._work.run()
        finished, self._finished = self._finished, []
        finished += self._close(ended)
        self._steps += 1
        self._account()
        self._running = self._rollout_rows()
        return finished

    def _flush(self) -> None:
        """Learn all that was drawn; what has ended by it is told by the next step."""
        self._finished += self._close(self._work.flush())

    def _rollout_rows(self) -> int:
        """Running rows that are not evaluation's."""
        num_rows = len(self._rows) + self._schedule.num_waiting
        return num_rows - sum(t.request.priority > 0 for t in self._schedule.running()) if self._behind else num_rows

    def _close(self, ended: Sequence[Ended]) -> list[Completion | Failed]:
        now = clock.now()
        done: list[Completion | Failed] = []
        for trajectory, finish, broken in ended:
            request = trajectory.request
            if broken:
                done.append(Failed(request.id, RequestError(_why_broken(trajectory, self._dtype))))
            else:
                resident = self._checksums[request.version]
                done.append(trajectory.completion(finish, resident, now))
            self._counts[trajectory.slot] -= 1
            self._behind -= request.priority > 0
            del self._here[request.id]
        return done

    def _ends_in_string(self, trajectory: Trajectory, tokens: NDArray[np.int32]) -> bool:
        strings = trajectory.sampling.stop_strings
        assert self._decode is not None
        longest = max(len(string.encode()) for string in strings)  # a token may be no more than a byte
        text = self._decode(tokens[-(longest + TAIL) :].tolist())
        return any(string in text for string in strings)

    # -- what it says of itself ----------------------------------------------------------------------------------------

    def _account(self) -> None:
        now = time.perf_counter()
        if self._running:
            self._busy_s += now - self._mark
            self._row_s += (now - self._mark) * self._running
        self._mark = now

    def report(self) -> Load:
        """What it is doing and has done."""
        self._account()
        of_slot = [0] * self.capacity.slots
        for slot, made in self._rows.made_of_slots():
            of_slot[slot] = max(of_slot[slot], made)
        return Load(
            running=len(self._rows) + self._schedule.num_waiting,
            queued=len(self._schedule.queue),
            kv_tokens=(self._cache.num_pages - self._cache.num_free - self._cache.num_idle) * PAGE,
            versions={version: self._counts[slot] for version, slot in self._versions.items()},
            longest={version: of_slot[slot] for version, slot in self._versions.items()},
            steps=self._steps,
            tokens=self._work.tokens,
            prefilled=self._schedule.prefilled,
            preemptions=self._schedule.preemptions,
            busy_s=self._busy_s,
            row_s=self._row_s,
        )

    @_on_device
    def close(self) -> None:
        """Forget everything that is here. Its memory may go afterwards: nothing that was launched uses it any more."""
        self._here.clear()
        self._work.wait()

    # -- the check at construction -------------------------------------------------------------------------------------

    def _compare(self, model: nn.Module) -> None:
        """Generate a little under the base weights, and raise `ModelError` where the model's own forward differs."""
        training = model.training
        model.eval()
        try:
            for length in (PROBE_SHORT, PROBE_LONG):
                self._compare_one(model, min(length, self.capacity.max_context - 4, self.capacity.kv_tokens - 4))
        finally:
            model.train(training)
        self._arrivals = self._steps = self._work.tokens = 0
        self._busy_s = self._row_s = 0.0
        self._schedule.prefilled = self._schedule.preemptions = 0

    def _compare_one(self, model: nn.Module, length: int) -> None:
        if length < 1:
            return
        generator = torch.Generator().manual_seed(length)
        prompt = tuple(torch.randint(0, self._vocabulary, (length,), generator=generator).tolist())
        self._versions, self._checksums, self._work.observed = {-1: 0}, {-1: ""}, []
        self.add(Request(-1, -1, prompt, 0, Sampling(4, temperature=0.0)))
        tokens: list[int] = []
        while self.has_work:
            for done in self.step():
                tokens = [] if isinstance(done, Failed) else done.tokens.tolist()
        ours = torch.cat(self._work.observed).float()[: len(tokens)]
        self._versions, self._checksums, self._work.observed = {}, {}, None
        inputs = torch.tensor([[*prompt, *tokens[:-1]]], device=self._rows.device)
        with torch.inference_mode():
            theirs = model(input_ids=inputs, use_cache=False).logits[0, length - 1 :].float()
        probe.refuse_other_logits(model, ours, theirs)
