"""The scheduler: the queue, the prefixes, admission, and preemption when pages run out.

The order is (priority, arrival), fixed for the life of a trajectory. The first running trajectory in that order is
never preempted for another, so it always finishes. A preempted trajectory keeps its tokens and its KV, so nothing is
computed twice and the result is the same bit for bit.

A trajectory that has ended and may be followed by another turn leaves its full pages behind. They are given back when
that turn comes, or when the version is unloaded. If memory gets short, those that have waited longest leave the device:
to host memory if bringing them back costs less than prefilling them again (`host_kv.py`), else they are dropped.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from stretto.clock import now
from stretto.engines.native.cache import PAGE, KVCache, num_pages
from stretto.engines.native.host_kv import HostKV
from stretto.engines.native.rows import Rows
from stretto.engines.native.sequence import Chunk, Prefix, RetainedKV, SequenceState

# If fewer pages than the first share are free, retained KV leaves the device until the second share is free. The first
# is what a few admissions take, so pages are free before they are asked for. The second is far enough above it that
# copies are made now and then, many at once.
LOW_MARK, HIGH_MARK = 0.05, 0.1

CPU = torch.device("cpu")  # prompts and lists of pages stay there until a forward takes them


class Schedule:
    """Moves trajectories between the queue, the prefixes and the rows; owns what each of them holds."""

    def __init__(
        self, cache: KVCache, rows: Rows, prefill_tokens: int, *, retains: bool = True, host: HostKV | None = None
    ) -> None:
        """`retains`: KV of an ended turn is retained for the next one, which rounds differently from a prefill."""
        self.host = HostKV(cache) if host is None else host
        self.cache, self.rows, self.prefill_tokens, self._retains = cache, rows, prefill_tokens, retains
        self.queue: list[SequenceState] = []  # the next one last
        self._prefixes: dict[object, Prefix] = {}
        self._retained: dict[int, RetainedKV] = {}  # by request, the oldest first; those with pages on the device
        self._on_host: dict[int, RetainedKV] = {}  # the same, on the host alone
        self._leaving: deque[tuple[int, RetainedKV]] = deque()  # of `_retained`: being copied, in the order of copies
        self._active: list[Prefix] = []  # being prefilled, or done, with trajectories that wait for this step's draw
        self.preemptions = 0
        self.prefilled = 0

    # -- in and out ----------------------------------------------------------------------------------------------------

    def submit(self, trajectory: SequenceState) -> None:
        """Queues a trajectory at its place in the order."""
        insort(self.queue, trajectory, key=lambda t: (-t.order[0], -t.order[1]))
        if trajectory.kv is None:
            self._join(trajectory)

    def _join(self, trajectory: SequenceState) -> None:
        request = trajectory.request
        retained = self._kv_of_last_turn(trajectory)
        if retained is not None and retained.owner is not None and trajectory.routing is None:
            routing = retained.owner.settle_routing()
            trajectory.routing = None if routing is None else routing[: len(retained.tokens)]
        shared = request.group >= 0 and not len(trajectory.tokens) and retained is None
        key = (request.group, request.version, request.prompt) if shared else trajectory.arrival
        prefix = self._prefixes.get(key)
        if prefix is None:
            # By way of an array: torch takes three times as long to read a tuple, and prompts may be long.
            prompt = np.array(request.prompt, dtype=np.int64)
            tokens = torch.from_numpy(np.concatenate((prompt, trajectory.tokens)) if len(trajectory.tokens) else prompt)
            prefix = self._prefixes[key] = Prefix(key, tokens, trajectory.slot)
            if retained is not None:
                prefix.retained, prefix.host = retained.pages, retained.host
        prefix.queued += 1
        trajectory.prefix = prefix

    def _kv_of_last_turn(self, trajectory: SequenceState) -> RetainedKV | None:
        """Returns the KV that the last turn left, if the prompt begins with its tokens; the caller owns it.

        It is on the device, or on the host.
        """
        id = trajectory.request.id
        retained = self._retained.get(id) or self._on_host.get(id)
        if retained is None:
            return None
        prompt, tokens = trajectory.request.prompt, retained.tokens
        # A prompt that ends where the pages do has to prefill at least one token, for its logits.
        if prompt[: len(tokens)] != tokens or retained.slot != trajectory.slot or len(prompt) <= len(tokens):
            self._drop_one(id)
            return None
        if self._on_host.pop(id, None) is None:
            del self._retained[id]
            self.cache.claim(retained.pages)
            if retained.host is not None:  # it came back while it was leaving
                self.host.release(retained.host)
                retained.host = None
        return retained

    def _free_unused(self, prefix: Prefix) -> None:
        """Frees a prefix if no trajectory needs it any more."""
        if not prefix.queued and not prefix.waiting and not prefix.children:
            self._restart(prefix)
            if prefix in self._active:
                self._active.remove(prefix)
            del self._prefixes[prefix.key]
            if prefix.host is not None:
                self.host.release(prefix.host)
                prefix.host = None

    def _restart(self, prefix: Prefix) -> None:
        if prefix.host is not None and prefix.pages:
            self.host.order_after(prefix.host)  # it is being copied to these pages
        self.cache.release([*prefix.pages, *prefix.retained])
        prefix.retained, prefix.pages, prefix.cache_slots, prefix.done, prefix.logits = [], [], None, 0, None

    def everyone(self) -> Iterator[SequenceState]:
        """Yields all trajectories, in no particular order."""
        yield from self.queue
        yield from self.running()

    def running(self) -> Iterator[SequenceState]:
        """Yields the trajectories that have a row, or one reserved while their prefix is prefilled."""
        yield from self.rows.trajectories
        for prefix in self._active:
            yield from prefix.waiting

    @property
    def num_waiting(self) -> int:
        return sum(len(prefix.waiting) for prefix in self._active)

    def withdraw(self, trajectory: SequenceState, *, kv: bool) -> None:
        """Takes a trajectory out, wherever it is. It keeps its tokens and, with `kv`, its KV."""
        if trajectory.row >= 0:
            self._out_of_row(trajectory, kv=kv)
        elif trajectory in self.queue:
            self.queue.remove(trajectory)
            if trajectory.prefix is not None:
                trajectory.prefix.queued -= 1
                self._free_unused(trajectory.prefix)
        else:
            assert trajectory.prefix is not None
            self._unwait(trajectory)
            self._free_unused(trajectory.prefix)
        trajectory.prefix = None
        if not kv:
            trajectory.kv = None

    def _out_of_row(self, trajectory: SequenceState, *, kv: bool) -> None:
        row = trajectory.row
        self.rows.save(trajectory)
        if kv:
            trajectory.kv = self.cache.read(trajectory.pages, int(self.rows.context[row]) - 1)
        self._take_routing(trajectory, int(self.rows.context[row]) - 1)
        self.rows.remove(row)
        self.release(trajectory)

    def _take_routing(self, trajectory: SequenceState, tokens: int) -> None:
        """Starts to read the routing of a trajectory's first `tokens` tokens, before its pages are released."""
        if self.cache.routing is not None and trajectory.sampling.routing:
            trajectory.settle_routing()
            start = min(trajectory.routing_recorded, tokens)
            trajectory.routing_read = self.cache.read_routing(trajectory.pages, start, tokens)

    def _unwait(self, trajectory: SequenceState) -> None:
        assert trajectory.prefix is not None
        trajectory.prefix.waiting.remove(trajectory)
        self.release(trajectory)

    def end(self, trajectory: SequenceState, *, broken: bool) -> None:
        """Releases the pages of a trajectory that has ended, except those that another turn may begin with."""
        if trajectory.request.id in self._retained or trajectory.request.id in self._on_host:
            self._drop_one(trajectory.request.id)  # of an earlier turn, before it was suspended and came back
        if not broken:
            self._take_routing(trajectory, len(trajectory.request.prompt) + len(trajectory.tokens) - 1)
        if trajectory.request.keep and self._retains and not broken:
            tokens = (*trajectory.request.prompt, *trajectory.tokens.tolist())
            full = (len(tokens) - 1) // PAGE  # the last token was drawn, and its KV was never computed
            pages = trajectory.pages[:full]
            if pages:
                self.cache.retain(pages)
                own = None if self.cache.routing is None else trajectory
                retained = RetainedKV(tokens[: full * PAGE], trajectory.slot, pages, owner=own)
                self._retained[trajectory.request.id] = retained
        self.release(trajectory)

    def drop_retained(self, slot: int | None = None) -> None:
        """Releases the KV retained for trajectories of a slot, or of all slots."""
        everything = [*self._retained.items(), *self._on_host.items()]
        for id in [id for id, retained in everything if slot in (None, retained.slot)]:
            self._drop_one(id)

    def reclaim(self, pages: int) -> None:
        """Takes retained KV off the device, the oldest first, until so many pages are free or nothing is retained."""
        while self._retained and self.cache.num_free < pages:
            id, retained = next(iter(self._retained.items()))
            if retained.host is None and not self._send_to_host(retained, at_once=True):
                self._drop_one(id)
                continue
            assert retained.host is not None
            self.host.order_after(retained.host)
            self._leave_device(id)

    def spill(self) -> None:
        """Takes retained KV off the device before its pages are asked for, if few are free."""
        while self._leaving:
            id, retained = self._leaving[0]
            leaves = self._retained.get(id) is retained  # else its turn has come, or it left at once, or was dropped
            if leaves and retained.host is not None and not retained.host.is_done:
                break
            self._leaving.popleft()
            if leaves:
                self._leave_device(id)
        if self.cache.num_free >= LOW_MARK * self.cache.num_pages or not self._retained:
            return
        coming = sum(len(retained.pages) for id, retained in self._leaving if self._retained.get(id) is retained)
        most = HIGH_MARK * self.cache.num_pages
        for id, retained in list(self._retained.items()):
            if self.cache.num_free + coming >= most:
                return
            if retained.host is not None:
                continue
            if not self._send_to_host(retained, at_once=False):
                self._drop_one(id)
            elif self.host.overlaps:
                self._leaving.append((id, retained))
                coming += len(retained.pages)
            else:
                self._leave_device(id)

    def _send_to_host(self, retained: RetainedKV, *, at_once: bool) -> bool:
        """Starts to copy retained KV to the host; returns False if it should rather be dropped."""
        size = self.host.size(len(retained.pages))
        if size > self.host.limit_bytes or not self.host.pays(len(retained.pages), at_once=at_once):
            return False
        while self._on_host and self.host.num_bytes + size > self.host.limit_bytes:
            self._drop_one(next(iter(self._on_host)))
        if self.host.num_bytes + size > self.host.limit_bytes:
            return False
        retained.host = self.host.copy_out(retained.pages)
        return True

    def _leave_device(self, id: int) -> None:
        """Releases the pages of retained KV that is on the host too. No launch may overwrite them before the copy."""
        retained = self._on_host[id] = self._retained.pop(id)
        assert retained.host is not None
        self.host.measure(retained.host)
        self.cache.claim(retained.pages)
        self.cache.release(retained.pages)
        retained.pages = []

    def _drop_one(self, id: int) -> None:
        retained = self._retained.pop(id, None) or self._on_host.pop(id)
        if retained.host is not None:
            self.host.order_after(retained.host)
            self.host.release(retained.host)
            retained.host = None
        self.cache.claim(retained.pages)
        self.cache.release(retained.pages)
        retained.pages = []

    def release(self, trajectory: SequenceState) -> None:
        """Releases the pages of a trajectory."""
        self.cache.release(trajectory.pages)
        trajectory.pages = []
        if trajectory.origin is not None:
            trajectory.origin.children -= 1
            self._free_unused(trajectory.origin)
            trajectory.origin = None

    # -- admission -----------------------------------------------------------------------------------------------------

    def admit(self) -> None:
        """Starts what fits, in order. A trajectory that does not fit holds up those behind it, so it cannot starve."""
        busy = len(self.rows) + self.num_waiting
        while self.queue and busy < self.rows.capacity:
            head = self.queue[-1]
            # Running rows will need pages soon: giving the last ones to a new row would only lead to preemption.
            spare = (busy + 1) // 2 if busy else 0
            need = self._need(head) + spare
            if self.cache.num_free + self.cache.num_idle >= need:
                self.reclaim(need)
            if self.cache.num_free < need:
                if self._evict_idle(head.prefix):
                    continue
                break
            self.queue.pop()
            self._start(head)
            busy += 1

    def _need(self, trajectory: SequenceState) -> int:
        if trajectory.kv is not None:
            return num_pages(trajectory.kv.shape[2]) + 1
        assert trajectory.prefix is not None
        prefix = trajectory.prefix
        return 1 + (0 if prefix.pages else num_pages(len(prefix.tokens)) - len(prefix.retained))

    def _start(self, trajectory: SequenceState) -> None:
        trajectory.started_at = trajectory.started_at or now()
        if trajectory.kv is not None:
            trajectory.pages = self.cache.take(num_pages(trajectory.kv.shape[2]))
            self.cache.write(trajectory.pages, trajectory.kv)
            trajectory.kv = None
            self.rows.append([trajectory])
            return
        prefix = trajectory.prefix
        assert prefix is not None
        length = len(prefix.tokens)
        if not prefix.pages:
            have, prefix.retained = prefix.retained, []
            prefix.done = len(have) * PAGE
            prefix.pages = [*have, *self.cache.take(num_pages(length) - len(have))]
            if prefix.host is not None:
                prefix.done = prefix.host.num_pages * PAGE
                self.host.copy_in(prefix.host, prefix.pages[: prefix.host.num_pages])
            prefix.cache_slots = self.cache.slots(prefix.pages, length, CPU)
        if length % PAGE:
            trajectory.pages = self.cache.take(1)  # for its own copy of the page that the prefix ends in
        if prefix not in self._active:
            self._active.append(prefix)
        prefix.queued -= 1
        prefix.waiting.append(trajectory)

    # -- pages ---------------------------------------------------------------------------------------------------------

    def _evict_idle(self, spare: Prefix | None = None) -> bool:
        """Frees the pages of one prefix that only queued or later trajectories need; returns False if there is none."""
        for prefix in self._prefixes.values():
            if (prefix.pages or prefix.retained) and not prefix.waiting and prefix is not spare:
                self._restart(prefix)
                if prefix in self._active:
                    self._active.remove(prefix)
                return True
        return False

    def provide(self) -> None:
        """Gives every decoding row the page of its next token, and preempts the last in order while none is free."""
        granted = []
        lacking = sorted(self.rows.lacking(), key=lambda t: t.order)
        self.reclaim(len(lacking))
        for trajectory in lacking:
            if trajectory.row >= 0 and self._make_room(trajectory):
                page = self.cache.take(1)[0]
                trajectory.pages.append(page)
                granted.append((trajectory, page))
        granted = [(t, page) for t, page in granted if t.row >= 0]
        if granted:
            self.rows.grant(granted)

    def _make_room(self, trajectory: SequenceState) -> bool:
        """Frees one page for a row; returns False if the row itself was the last in order and was preempted."""
        while not self.cache.num_free:
            if self._evict_idle():
                continue
            prefixes = [prefix for prefix in self._active if prefix.waiting]
            candidates: list[SequenceState | Prefix] = [*self.rows.trajectories, *prefixes]
            victim = max(candidates, key=lambda v: v.order)
            self.preemptions += 1
            if isinstance(victim, Prefix):
                self._give_up(victim)
                continue
            self._out_of_row(victim, kv=True)
            self.submit(victim)
            if victim is trajectory:
                return False
        return True

    def _give_up(self, prefix: Prefix) -> None:
        """Sends the trajectories that wait for a prefix back to the queue; it is prefilled again later, in the same
        chunks."""
        for trajectory in list(prefix.waiting):
            self._unwait(trajectory)
            trajectory.prefix = None
            self.submit(trajectory)
        self._restart(prefix)
        self._active.remove(prefix)
        self._free_unused(prefix)  # without the pages of an earlier turn, they may start with their group

    def vacate(self) -> None:
        """Sends everything back to the queue, decoding rows with their KV in host memory. No page is in use then."""
        for trajectory in list(self.rows.trajectories):
            self._out_of_row(trajectory, kv=True)
            self.submit(trajectory)
        for prefix in list(self._active):
            self._give_up(prefix)
        for prefix in self._prefixes.values():
            self._restart(prefix)
        for id in list(self._retained):
            self._drop_one(id)
        self.host.wait()

    # -- prefill -------------------------------------------------------------------------------------------------------

    def chunks(self) -> list[Chunk]:
        """Returns the chunks to prefill in this step.

        A sequence is cut at fixed positions and a chunk is never split, so the result does not depend on what else is
        prefilled. A step takes as many chunks as its budget holds, and at least one. It takes one chunk of a sequence,
        because the next one reads the KV of that one.
        """
        chosen: list[Chunk] = []
        budget = self.prefill_tokens
        for prefix in self._active:
            if not prefix.waiting or prefix.done == len(prefix.tokens) or not self._is_there(prefix):
                continue
            start, end = prefix.done, min(prefix.done + self.prefill_tokens, len(prefix.tokens))
            if chosen and end - start > budget:
                break
            budget -= end - start
            assert prefix.cache_slots is not None
            last = end == len(prefix.tokens)
            slots = prefix.cache_slots[:end]
            chosen.append(Chunk(prefix, prefix.tokens[start:end], slots, start, end, prefix.slot, last))
            prefix.done = end
            prefix.waiting[0].prefilled += end - start
            self.prefilled += end - start
        return chosen

    def _is_there(self, prefix: Prefix) -> bool:
        """Returns False while KV of a prefix is on its way from the host and others can decode meanwhile."""
        if prefix.host is None:
            return True
        if len(self.rows) and not prefix.host.is_done:
            return False
        self.host.order_after(prefix.host)
        self.host.release(prefix.host)
        prefix.host = None
        return True

    def ready(self) -> list[Prefix]:
        """Returns the prefixes that have logits, and trajectories that wait for their first draw."""
        return [prefix for prefix in self._active if prefix.logits is not None and prefix.waiting]

    def fork(self, prefixes: Sequence[Prefix]) -> None:
        """Turns the trajectories that wait for finished prefixes into rows; shares full pages and copies the last."""
        copies: list[tuple[int, int]] = []
        started: list[SequenceState] = []
        for prefix in prefixes:
            forked, prefix.waiting = prefix.waiting, []
            full = len(prefix.tokens) // PAGE
            for trajectory in forked:
                self.cache.share(prefix.pages[:full])
                if trajectory.pages:
                    copies.append((prefix.pages[full], trajectory.pages[0]))
                trajectory.pages = [*prefix.pages[:full], *trajectory.pages]
                trajectory.prefix = None
                if trajectory.request.group >= 0 and not len(trajectory.tokens):
                    trajectory.origin = prefix
                    prefix.children += 1
            started += forked
        self.cache.copy_pages(copies)
        self.rows.append(started)
        for prefix in prefixes:
            self._active.remove(prefix)
            self._free_unused(prefix)

    # -- a change of weights under running work ------------------------------------------------------------------------

    def change_version(self, slot: int, version: int) -> None:
        """Moves every trajectory of `slot` to `version`. Their KV is dropped and will be computed again."""
        self.drop_retained(slot)
        changed = [trajectory for trajectory in self.everyone() if trajectory.slot == slot]
        for trajectory in changed:
            self.withdraw(trajectory, kv=False)
            trajectory.change_version(version)
        for trajectory in changed:
            self.submit(trajectory)
