"""A run over the real loop, core and journal, with an engine and a trainer that sleep instead of computing.

`bench/environments.py` and `bench/judge.py` measure with it what the loop itself costs.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from stretto.core.controller import Controller
from stretto.core.plan import Plan
from stretto.engines.fake import FakeSteppedEngine
from stretto.engines.threaded import Failed, ThreadedEngine
from stretto.environments.data import PromptStream, Row
from stretto.local.trainer import ThreadedTrainer
from stretto.observe.metrics import JsonLines, Tally
from stretto.observe.progress import Observer
from stretto.run.loop import Loop, Settings
from stretto.run.task_play import TaskPlay
from stretto.store.journal import Journal
from stretto.store.schema import RunFacts
from stretto.store.verify import exit_code, verify
from stretto.training.fake import FakeTrainer
from stretto.types import Completion

VOCABULARY = 100


class PacedEngine(FakeSteppedEngine):
    """A fake whose steps take `step_s` with all that they compute. Lengths are log-normal."""

    def __init__(self, *, rows: int, slots: int, median_tokens: float, sigma: float, step_s: float) -> None:
        super().__init__(rows=rows, slots=slots, median_tokens=median_tokens, sigma=sigma)
        self._pace_s, self._computed_s = step_s, 0.0

    def step(self) -> list[Completion | Failed]:
        began, self._step_s = time.perf_counter(), max(0.0, self._pace_s - self._computed_s)
        ended = super().step()
        self._computed_s = max(0.0, time.perf_counter() - began - self._step_s)  # the next step sleeps less by this
        return ended


class Characters:
    """A tokenizer: one token a character."""

    chat_template = None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(character) % VOCABULARY for character in text]

    def __call__(self, texts: Sequence[str], add_special_tokens: bool = True) -> dict[str, list[list[int]]]:
        return {"input_ids": [self.encode(text) for text in texts]}


def decode(tokens: Sequence[int]) -> str:
    """Returns numbers: nobody reads what a fake says."""
    return " ".join(map(str, tokens))


async def run_paced(
    plan: Plan,
    play: TaskPlay,
    rows: Sequence[Row],
    folder: Path,
    *,
    engine: ThreadedEngine,
    trainer: FakeTrainer,
    observer: Observer,
    reward_s: float = 0.0,
    interval_s: float = 0.05,  # between two commits of the journal
) -> None:
    """Runs to the last update, closes the engine, and verifies the run in `folder`."""
    role = ThreadedTrainer(trainer, 1, deadline_s=600.0)
    journal = Journal.open(folder / "journal.sqlite", resume=False, interval_s=interval_s)
    prompts = PromptStream(rows, Characters(), seed=0, max_prompt_tokens=16)
    try:
        facts = RunFacts(
            plan.paradigm.name, plan.staleness, plan.auto, plan.batch, plan.group_size, plan.updates, seed=0,
            data_rows=prompts.num_rows, retries=plan.retries, filter_limit=0, order="shuffled", replay_groups=0,
            replay_uses=0, laws_broken=plan.paradigm.breaks,
        )  # fmt: skip
        journal.begin(facts, at=time.time())
        weights = {0: trainer.weights(0)}
        journal.version_published(0, weights[0].checksum, at=time.time())
        loop = Loop(
            Controller(plan), engines={0: engine}, trainer=role, tasks=play, prompts=prompts, decode=decode,
            evaluator=None, journal=journal, tally=Tally(rows=plan.rows, sink=JsonLines(folder / "metrics.jsonl")),
            observer=observer,
            settings=Settings(seed=0, stall_s=600.0, reward_s=reward_s, instance_s=600.0, vocabulary=VOCABULARY),
            weights=weights, rollouts={},
        )  # fmt: skip
        assert await loop.run()
        journal.finished(stopped=False, at=time.time())
        await journal.durable()
    finally:
        await engine.close()
        role.close()
        journal.close()
    assert exit_code(verify(folder)) == 0
