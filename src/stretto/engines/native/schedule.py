"""Who runs: the queue, the prefixes, admission, and preemption when pages run out.

Order is (priority, arrival), fixed for the life of a trajectory. The first in that order among the running ones is
never preempted for another, so it always finishes; and what is preempted keeps its tokens and its KV, so nothing is
done twice and the result is the same bit for bit.

What has ended and may be followed by another turn leaves its full pages behind, until that comes, its version goes, or
somebody else needs them, those first that have waited longest.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator, Sequence

import torch

from stretto.clock import now
from stretto.engines.native.attention import Chunk
from stretto.engines.native.cache import PAGE, KVCache, num_pages
from stretto.engines.native.device_rows import DeviceRows
from stretto.engines.native.rows import Rows
from stretto.engines.native.trajectory import Kept, Prefix, Trajectory


class Schedule:
    """Moves trajectories between the queue, the prefixes and the rows; owns what each of them holds."""

    def __init__(self, cache: KVCache, rows: Rows | DeviceRows, prefill_tokens: int, *, keeps: bool = True) -> None:
        """`keeps`: what may be followed by another turn leaves its KV behind, which rounds otherwise than a prefill."""
        self.cache, self.rows, self.prefill_tokens, self._keeps = cache, rows, prefill_tokens, keeps
        self.queue: list[Trajectory] = []  # the next one last
        self._prefixes: dict[object, Prefix] = {}
        self._kept: dict[int, Kept] = {}  # by request, the longest there first
        self._active: list[Prefix] = []  # being prefilled, or done with trajectories that wait for this step's draw
        self.preemptions = 0
        self.prefilled = 0

    # -- in and out ----------------------------------------------------------------------------------------------------

    def submit(self, trajectory: Trajectory) -> None:
        """Queue a trajectory at its place in the order."""
        insort(self.queue, trajectory, key=lambda t: (-t.order[0], -t.order[1]))
        if trajectory.kv is None:
            self._join(trajectory)

    def _join(self, trajectory: Trajectory) -> None:
        request = trajectory.request
        kept = self._of_turn_before(trajectory)
        shared = request.group >= 0 and not len(trajectory.tokens) and not kept
        key = (request.group, request.version, request.prompt) if shared else trajectory.arrival
        prefix = self._prefixes.get(key)
        if prefix is None:
            tokens = torch.tensor([*request.prompt, *trajectory.tokens.tolist()], device=self.rows.token_device)
            prefix = self._prefixes[key] = Prefix(key, tokens, trajectory.slot, kept=kept)
        prefix.queued += 1
        trajectory.prefix = prefix

    def _of_turn_before(self, trajectory: Trajectory) -> list[int]:
        """The pages that the turn before has left of what a trajectory begins with; they are the caller's now."""
        kept = self._kept.pop(trajectory.request.id, None)
        if kept is None:
            return []
        self.cache.take_over(kept.pages)
        follows = trajectory.request.prompt[: len(kept.tokens)] == kept.tokens
        # A prompt that ends where the pages do has to prefill something: its last token has the logits.
        if follows and kept.slot == trajectory.slot and len(trajectory.request.prompt) > len(kept.tokens):
            return kept.pages
        self.cache.release(kept.pages)
        return []

    def _leave(self, prefix: Prefix) -> None:
        """Free a prefix that nobody needs any more."""
        if not prefix.queued and not prefix.waiting and not prefix.children:
            self._restart(prefix)
            if prefix in self._active:
                self._active.remove(prefix)
            del self._prefixes[prefix.key]

    def _restart(self, prefix: Prefix) -> None:
        self.cache.release([*prefix.pages, *prefix.kept])
        prefix.kept, prefix.pages, prefix.cache_slots, prefix.done, prefix.logits = [], [], None, 0, None

    def everyone(self) -> Iterator[Trajectory]:
        """All trajectories here, in no particular order."""
        yield from self.queue
        yield from self.running()

    def running(self) -> Iterator[Trajectory]:
        """Those that have a row, or one reserved while their prefix is made."""
        yield from self.rows.trajectories
        for prefix in self._active:
            yield from prefix.waiting

    @property
    def num_waiting(self) -> int:
        return sum(len(prefix.waiting) for prefix in self._active)

    def withdraw(self, trajectory: Trajectory, *, kv: bool) -> None:
        """Take a trajectory out wherever it is; its tokens, and with `kv` its cache, stay with it."""
        if trajectory.row >= 0:
            self._out_of_row(trajectory, kv=kv)
        elif trajectory in self.queue:
            self.queue.remove(trajectory)
            if trajectory.prefix is not None:
                trajectory.prefix.queued -= 1
                self._leave(trajectory.prefix)
        else:
            assert trajectory.prefix is not None
            self._unwait(trajectory)
            self._leave(trajectory.prefix)
        trajectory.prefix = None
        if not kv:
            trajectory.kv = None

    def _out_of_row(self, trajectory: Trajectory, *, kv: bool) -> None:
        row = trajectory.row
        self.rows.save(trajectory)
        if kv:
            trajectory.kv = self.cache.read(trajectory.pages, int(self.rows.context[row]) - 1)
        self.rows.remove([row])
        self.release(trajectory)

    def _unwait(self, trajectory: Trajectory) -> None:
        assert trajectory.prefix is not None
        trajectory.prefix.waiting.remove(trajectory)
        self.release(trajectory)

    def end(self, trajectory: Trajectory, *, broken: bool) -> None:
        """Give back the pages of a trajectory that has ended, but for those that another turn may begin with."""
        if trajectory.request.id in self._kept:
            self._give_back(trajectory.request.id)  # of a turn before it went away, and came back with its KV
        if trajectory.request.keep and self._keeps and not broken:
            tokens = (*trajectory.request.prompt, *trajectory.tokens.tolist())
            full = (len(tokens) - 1) // PAGE  # the last token has been drawn and never read
            pages = trajectory.pages[:full]
            if pages:
                self.cache.keep(pages)
                self._kept[trajectory.request.id] = Kept(tokens[: full * PAGE], trajectory.slot, pages)
        self.release(trajectory)

    def drop_kept(self, slot: int | None = None) -> None:
        """Give back what trajectories of a slot, or of all, have left behind."""
        for id in [id for id, kept in self._kept.items() if slot in (None, kept.slot)]:
            self._give_back(id)

    def reclaim(self, pages: int) -> None:
        """Give back what trajectories have left behind until so many pages are free, or nothing is left of it."""
        while self._kept and self.cache.num_free < pages:
            self._give_back(next(iter(self._kept)))

    def _give_back(self, id: int) -> None:
        pages = self._kept.pop(id).pages
        self.cache.take_over(pages)
        self.cache.release(pages)

    def release(self, trajectory: Trajectory) -> None:
        """Give back the pages of a trajectory."""
        self.cache.release(trajectory.pages)
        trajectory.pages = []
        if trajectory.origin is not None:
            trajectory.origin.children -= 1
            self._leave(trajectory.origin)
            trajectory.origin = None

    # -- admission -----------------------------------------------------------------------------------------------------

    def admit(self) -> None:
        """Start what fits, in order. What does not fit holds up what stands behind it, so that it cannot starve."""
        busy = len(self.rows) + self.num_waiting
        while self.queue and busy < self.rows.capacity:
            head = self.queue[-1]
            # Rows that run will need pages soon; starting into the last ones would only preempt.
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

    def _need(self, trajectory: Trajectory) -> int:
        if trajectory.kv is not None:
            return num_pages(trajectory.kv.shape[2]) + 1
        assert trajectory.prefix is not None
        prefix = trajectory.prefix
        return 1 + (0 if prefix.pages else num_pages(len(prefix.tokens)) - len(prefix.kept))

    def _start(self, trajectory: Trajectory) -> None:
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
            prefix.done = len(prefix.kept) * PAGE
            prefix.pages, prefix.kept = [*prefix.kept, *self.cache.take(num_pages(length) - len(prefix.kept))], []
            prefix.cache_slots = self.cache.slots(prefix.pages, length, self.rows.token_device)
        if length % PAGE:
            trajectory.pages = self.cache.take(1)  # for its own copy of the page that the prefix ends in
        if prefix not in self._active:
            self._active.append(prefix)
        prefix.queued -= 1
        prefix.waiting.append(trajectory)

    # -- pages ---------------------------------------------------------------------------------------------------------

    def _evict_idle(self, but: Prefix | None = None) -> bool:
        """Free a prefix that is only kept for trajectories in the queue, or still to come."""
        for prefix in self._prefixes.values():
            if (prefix.pages or prefix.kept) and not prefix.waiting and prefix is not but:
                self._restart(prefix)
                if prefix in self._active:
                    self._active.remove(prefix)
                return True
        return False

    def provide(self) -> None:
        """Give every decoding row the page of its next token, preempting the last in order while there is none."""
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

    def _make_room(self, trajectory: Trajectory) -> bool:
        """Free one page for a row; False where the row itself was the last in order and gave way."""
        while not self.cache.num_free:
            if self._evict_idle():
                continue
            prefixes = [prefix for prefix in self._active if prefix.waiting]
            candidates: list[Trajectory | Prefix] = [*self.rows.trajectories, *prefixes]
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
        """Send those who wait for a prefix back to the queue; it is prefilled again in the same chunks later."""
        for trajectory in list(prefix.waiting):
            self._unwait(trajectory)
            trajectory.prefix = None
            self.submit(trajectory)
        self._restart(prefix)
        self._active.remove(prefix)
        self._leave(prefix)  # without the pages of the turn before, those who waited may begin with their group

    def vacate(self) -> None:
        """Send everything back to the queue, decoding rows with their KV in host memory: no page is in use after."""
        for trajectory in list(self.rows.trajectories):
            self._out_of_row(trajectory, kv=True)
            self.submit(trajectory)
        for prefix in list(self._active):
            self._give_up(prefix)
        for prefix in self._prefixes.values():
            self._restart(prefix)
        self.drop_kept()

    # -- prefill -------------------------------------------------------------------------------------------------------

    def chunks(self) -> list[tuple[Prefix, Chunk]]:
        """What to prefill in this step.

        A sequence is cut at fixed positions and a chunk is never split, so that the result does not depend on what else
        is prefilled; a step takes as many chunks as its budget holds, and at least one. Of one sequence it takes one,
        because the next reads what that writes.
        """
        chosen: list[tuple[Prefix, Chunk]] = []
        budget = self.prefill_tokens
        for prefix in self._active:
            if not prefix.waiting or prefix.done == len(prefix.tokens):
                continue
            start, end = prefix.done, min(prefix.done + self.prefill_tokens, len(prefix.tokens))
            if chosen and end - start > budget:
                break
            budget -= end - start
            assert prefix.cache_slots is not None
            last = end == len(prefix.tokens)
            slots = prefix.cache_slots[:end]
            chosen.append((prefix, Chunk(prefix.tokens[start:end], slots, start, end, prefix.slot, last)))
            prefix.done = end
            prefix.waiting[0].prefilled += end - start
            self.prefilled += end - start
        return chosen

    def ready(self) -> list[Prefix]:
        """Prefixes whose logits are there, with trajectories that wait for their first draw."""
        return [prefix for prefix in self._active if prefix.logits is not None and prefix.waiting]

    def fork(self, prefixes: Sequence[Prefix]) -> None:
        """Turn those who wait for finished prefixes into rows: full pages shared, the last one copied."""
        copies: list[tuple[int, int]] = []
        started: list[Trajectory] = []
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
            self._leave(prefix)

    # -- a change of weights under running work ------------------------------------------------------------------------

    def change_version(self, slot: int, version: int) -> None:
        """Everything of `slot` goes on under `version`: caches made by the old weights are dropped and made again."""
        self.drop_kept(slot)
        changed = [trajectory for trajectory in self.everyone() if trajectory.slot == slot]
        for trajectory in changed:
            self.withdraw(trajectory, kv=False)
            trajectory.change_version(version)
        for trajectory in changed:
            self.submit(trajectory)
