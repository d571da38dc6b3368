"""The evaluations that the core asks for during a run. `run/evaluation.py` makes one of them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine
from typing import Any

from stretto import clock
from stretto.core import messages as core
from stretto.errors import ScoringHaltedError
from stretto.observe.metrics import Tally
from stretto.observe.progress import Observer
from stretto.run.evaluation import Evaluator
from stretto.run.instance_membership import Instances
from stretto.store.journal import Journal
from stretto.types import EvaluationResult

log = logging.getLogger(__name__)


class Evaluations:
    """Carries out the core's commands to evaluate a version. For the loop's thread only."""

    def __init__(
        self,
        evaluator: Evaluator | None,
        *,
        instances: Instances,
        journal: Journal,
        tally: Tally,
        observer: Observer,
        post: Callable[[core.Event], None],
        halt: Callable[[ScoringHaltedError], None],
    ) -> None:
        """Without an evaluator the core plans no evaluation. `halt` is called if scoring cannot go on."""
        self.evaluator = evaluator
        self._instances = instances
        self._journal = journal
        self._tally = tally
        self._observer = observer
        self._post = post
        self._halt = halt
        self._ended: dict[int, EvaluationResult] = {}  # by version; the core has not counted them yet

    def evaluate(self, command: core.Evaluate, checksum: str) -> Coroutine[Any, Any, None]:
        """Returns the coroutine that evaluates a version, whose weights have this checksum, on an instance."""
        evaluator = self._expected_evaluator()

        async def evaluate() -> None:
            try:
                self._ended[command.version] = await self._instances.call(
                    command.instance,
                    lambda engine: evaluator.evaluate(engine, command.version, "during", checksum),
                    generates=False,
                )
            except ScoringHaltedError as error:
                self._halt(error)  # it is due again when the run is resumed
                return
            self._post(core.Evaluated(command.version))

        return self._instances.lose_on_error(command.instance, evaluate())

    def record(self, version: int, *, counts: bool) -> None:
        """Records an evaluation that ended, if the core counts it and has not skipped it meanwhile."""
        result = self._ended.pop(version)
        if counts:
            self._expected_evaluator().record(result, self._tally.evaluated(result))
            self._observer.evaluated(result)

    def skip(self, command: core.SkipEvaluation) -> None:
        """Records an evaluation that does not happen."""
        now = clock.now()
        self._journal.evaluation(command.version, "skipped", now)
        self._journal.note("evaluation skipped", f"version {command.version}: {command.reason}", at=now)
        log.info("evaluation of version %d skipped: %s", command.version, command.reason)

    def _expected_evaluator(self) -> Evaluator:
        assert self.evaluator is not None, "an evaluation is planned only if there is an evaluator"
        return self.evaluator
