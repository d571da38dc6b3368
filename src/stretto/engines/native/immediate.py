"""Steps of an engine on a processor: each token is known before the next step begins."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stretto.engines.native.forward import Forward
from stretto.engines.native.rows import Rows
from stretto.engines.native.schedule import Schedule
from stretto.engines.native.trajectory import Ended, Trajectory


class ImmediateSteps:
    """One forward, one draw, what has ended. The forward is the lean one or that of transformers' modules."""

    def __init__(
        self,
        forward: Forward,
        rows: Rows,
        schedule: Schedule,
        ends_in_string: Callable[[Trajectory, NDArray[np.int32]], bool],
    ) -> None:
        self.forward, self._rows, self._schedule = forward, rows, schedule
        self._ends_in_string = ends_in_string
        self.tokens = 0
        self.observed: list[Tensor] | None = None

    def run(self) -> list[Ended]:
        """One token for every running row; what has ended."""
        schedule = self._schedule
        schedule.provide()
        logits = self.forward(schedule.chunks())
        ready = schedule.ready()
        for prefix in ready:
            assert prefix.logits is not None
            logits.append(prefix.logits.expand(len(prefix.waiting), -1))
        schedule.fork(ready)
        if not len(self._rows):
            return []
        return self._draw(logits[0] if len(logits) == 1 else torch.cat(logits))

    def flush(self) -> list[Ended]:
        """Nothing is ever on its way."""
        return []

    def forget(self) -> None:
        """Nothing is captured."""

    def wait(self) -> None:
        """Wait until nothing launched runs any more: what it reads and writes may go afterwards."""
        if self._rows.device.type == "cuda":
            torch.cuda.current_stream(self._rows.device).synchronize()

    def _draw(self, logits: Tensor) -> list[Ended]:
        rows = self._rows
        if self.observed is not None:
            self.observed.append(logits.clone())
        self.tokens += len(rows)
        ended, stopped, broken = rows.sample(logits)
        if not rows.any_strings and not ended.any():
            return []
        finish = {row: bool(stopped[row]) for row in np.nonzero(ended)[0].tolist()}
        for row in np.nonzero(rows.strings[: len(rows)])[0].tolist():
            if not finish.get(row) and self._ends_in_string(rows.trajectories[row], rows.output(row)[0]):
                finish[row] = True
        gone: list[Ended] = []
        for row, stop in finish.items():
            trajectory = rows.trajectories[row]
            rows.save(trajectory)
            gone.append((trajectory, "stop" if stop else "length", bool(broken[row])))
        if gone:
            rows.remove(list(finish))
            for trajectory, _, broke in gone:
                self._schedule.end(trajectory, broken=broke)
        return gone
