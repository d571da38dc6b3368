"""The step machine: what is launched in a step, in which order, and when its results are taken in.

The kernels decide between two orders. In a mixed batch (on a CPU), one forward runs the decoding rows and the chunks of
prompts, and one draw gives every row its token, which the host knows at once. Otherwise (on a GPU), a step launches the
chunks, the first draw of trajectories whose prompt is done, and one decode of all rows; then it takes in the results of
the step *before*. So the device has the next launch queued while the host looks at stop tokens. A row that has ended is
decoded once more than it needed, into its own pages; that token is never seen.

| waits                  | for                          | until                                       |
|------------------------|------------------------------|---------------------------------------------|
| the host, in `run`     | the results of the last step | their copy has arrived: one step at most    |
| the host, in `flush`   | everything launched          | a row must leave whole: suspend, preempt    |
| the device             | the host                     | only if a step is shorter than a launch     |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stretto.engines.native.cache import KVCache
from stretto.engines.native.decode import Decodes
from stretto.engines.native.decoder_protocol import Decoder
from stretto.engines.native.device_memory import to_device
from stretto.engines.native.graph_cache import Graphs
from stretto.engines.native.kernels.kernel_set import Kernels
from stretto.engines.native.mixed_batches import MixedForward
from stretto.engines.native.prefill import Prefills
from stretto.engines.native.rows import Drawn, Pending, Rows
from stretto.engines.native.schedule import Schedule
from stretto.engines.native.sequence import Chunk, Ended, Prefix, SequenceState
from stretto.engines.native.versions import Slots


class Steps:
    """Launches steps over the rows and takes their results in. One thread calls everything, on one stream.

    `padding` is the fewest tokens of a forward over a mixed batch. `deterministic` keeps the sizes of all other
    launches fixed, so that results do not depend on neighbours.
    """

    def __init__(
        self,
        slots: Slots,
        decoders: Sequence[Decoder],  # one a tree
        cache: KVCache,
        rows: Rows,
        schedule: Schedule,
        heads: int,
        kernels: Kernels,
        ends_in_string: Callable[[SequenceState, NDArray[np.int32]], bool],
        *,
        deterministic: bool = False,
        padding: int = 0,
    ) -> None:
        self._slots, self._num_trees, self._cache, self._rows = slots, len(decoders), cache, rows
        self._schedule, self._overlap, self._ends_in_string = schedule, kernels.overlap, ends_in_string
        self._deterministic = deterministic
        self._graphs = Graphs(self.wait, captures=rows.device.type == "cuda")
        self._mixed: MixedForward | None = None
        self._decodes: Decodes | None = None
        self._prefills: Prefills | None = None
        if kernels.paged is None:
            self._mixed = MixedForward(slots, decoders, cache, rows, heads, padding)
        else:
            graphs, options = self._graphs, {"deterministic": deterministic}
            self._decodes = Decodes(slots, decoders, cache, rows, heads, kernels.paged, graphs, **options)
            self._prefills = Prefills(decoders, cache, rows, kernels.paged, graphs, **options)
        self._pending: list[Pending] = []
        self._ended: list[Ended] = []
        self.tokens = 0
        self.observed: list[Tensor] | None = None  # logits, for the check at construction

    # -- the step ------------------------------------------------------------------------------------------------------

    def run(self) -> list[Ended]:
        """Launches one token for every running row; returns the trajectories found to have ended."""
        if self._mixed is not None:
            self._run_mixed(self._mixed)
        else:
            assert self._decodes is not None
            assert self._prefills is not None
            self._run_apart(self._decodes, self._prefills)
        ended, self._ended = self._ended, []
        return ended

    def _run_mixed(self, mixed: MixedForward) -> None:
        schedule, rows = self._schedule, self._rows
        schedule.provide()
        rows.compact()
        rows.upload()
        logits = mixed.run(schedule.chunks())
        ready = schedule.ready()
        if ready:
            logits += [_logits_of(prefix).expand(len(prefix.waiting), -1) for prefix in ready]
            schedule.fork(ready)
            rows.upload()
        if not len(rows):
            return
        numbers, chosen = rows.numbers(), logits[0] if len(logits) == 1 else torch.cat(logits)
        if self.observed is not None:
            self.observed.append(chosen.clone())
        self._record(numbers, mixed.draw(chosen))

    def _run_apart(self, decodes: Decodes, prefills: Prefills) -> None:
        schedule, rows = self._schedule, self._rows
        before = len(self._pending)
        chunks = schedule.chunks()
        if chunks:
            self._prefill(prefills, chunks)
        self._first_draws(decodes, schedule.ready())
        lacking = len(rows.lacking())
        schedule.reclaim(lacking)
        if lacking > self._cache.num_free:
            before = self._collect(0)  # a row leaves with all that it has made
        schedule.provide()
        if not schedule.queue and not schedule.num_waiting and not rows.dense and decodes.shrinks():
            before = self._collect(0)
            rows.compact()
        if rows.any_due:
            drawn, numbers = decodes.launch(self.observed), rows.numbers()
            self._expect(numbers, drawn, numbers)
        self._collect(len(self._pending) - before if self._overlap else 0)

    def flush(self) -> list[Ended]:
        """Takes in everything launched; returns the trajectories that have ended."""
        self._collect(0)
        ended, self._ended = self._ended, []
        return ended

    def forget(self) -> None:
        """Drops the captured graphs: the memory that they point at is about to be freed."""
        self._graphs.forget()

    def wait(self) -> None:
        """Waits until nothing launched runs any more: the memory that it uses may be freed afterwards."""
        if self._rows.device.type == "cuda":
            torch.cuda.current_stream(self._rows.device).synchronize()
        if self._decodes is not None:
            self._decodes.wait()

    # -- launches ------------------------------------------------------------------------------------------------------

    def _prefill(self, prefills: Prefills, chunks: Sequence[Chunk]) -> None:
        for tree in range(self._num_trees):
            own = [chunk for chunk in chunks if self._slots.one_tree or chunk.weights_slot == tree]
            for together in [[chunk] for chunk in own] if self._deterministic else [own]:
                if together:
                    prefills.run(tree, together, captured=self.observed is None)

    def _first_draws(self, decodes: Decodes, prefixes: Sequence[Prefix]) -> None:
        """Turns the trajectories that wait for finished prefixes into rows, and draws the next token of each."""
        if not prefixes:
            return
        logits = [_logits_of(prefix) for prefix in prefixes]
        place = [i for i, prefix in enumerate(prefixes) for _ in prefix.waiting]
        starting = [trajectory for prefix in prefixes for trajectory in prefix.waiting]
        self._schedule.fork(prefixes)
        rows, device, count = self._rows, self._rows.device, len(starting)
        rows.upload()
        numbers = np.array([t.row for t in starting], dtype=np.int64)
        index = to_device(numbers, device)
        chosen = torch.stack(logits).index_select(0, to_device(np.array(place, dtype=np.int64), device))
        if self.observed is not None:
            self.observed.append(chosen.clone())
        ints, floats = rows.ints.index_select(1, index), rows.floats.index_select(1, index)
        drawn = torch.empty(decodes.lines(numbers), count, dtype=torch.int32, device=device)
        # Sums over a vocabulary are split by the number of rows: if it must not matter, each row is drawn alone.
        for own in [slice(i, i + 1) for i in range(count)] if self._deterministic else [slice(count)]:
            decodes.draw(chosen[own], ints[:, own], floats[:, own], drawn[:, own])
        rows.ints.index_copy_(1, index, ints)
        self._expect(numbers, drawn, np.arange(count))

    # -- results -------------------------------------------------------------------------------------------------------

    def _expect(self, numbers: NDArray[np.int64], drawn: Tensor, places: NDArray[np.int64]) -> None:
        """Starts the copy of a launch's results to the host."""
        serials = self._rows.launched(numbers)
        arrived = None
        if drawn.device.type == "cuda":
            outputs = torch.empty(drawn.shape, dtype=torch.int32, pin_memory=True)
            outputs.copy_(drawn, non_blocking=True)
            arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrived.record()
        else:
            outputs = drawn.clone()
        self._pending.append(Pending(numbers, serials, outputs, places, arrived))

    def _collect(self, keep: int) -> int:
        """Takes in the results of all launches but the last `keep`; returns how many are left."""
        while len(self._pending) > keep:
            self._record(*self._rows.current(self._pending.pop(0)))
        return len(self._pending)

    def _record(self, numbers: NDArray[np.int64], drawn: Drawn) -> None:
        """Takes in one draw for each of the rows `numbers`, and removes those that end with it."""
        rows = self._rows
        self.tokens += len(numbers)
        for row, finish, broken in rows.record(numbers, drawn):
            trajectory = rows.at(row)
            may_stop = trajectory.sampling.stop_strings and finish != "stop" and not broken
            if may_stop and self._ends_in_string(trajectory, rows.output(row)[0]):
                finish = "stop"
            if finish is None:
                continue
            rows.save(trajectory)
            rows.remove(row)
            self._schedule.end(trajectory, broken=broken)
            self._ended.append((trajectory, finish, broken))


def _logits_of(prefix: Prefix) -> Tensor:
    assert prefix.logits is not None
    return prefix.logits
