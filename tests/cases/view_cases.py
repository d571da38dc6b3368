"""Run folders for the tests of `stretto view`, recorded through the journal's own methods."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from journal_cases import FACTS, Recorder

from stretto.types import Completion, HeldOutAnswer, Lineage, Prompt, TokenReport
from stretto.view.api import Api
from stretto.view.runs import open_runs
from stretto.view.server import ViewServer

HOSTILE = "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>"

CONFIG = """seed = 7
[model]
path = "somewhere/model"
[task]
type = "countdown-chain"
[rollout]
prompts = 2
group = 3
[training]
steps = 4
learning_rate = 0.001
"""


@contextmanager
def served_folders() -> Iterator[Callable[..., ViewServer]]:
    """Returns a function that serves folders of runs. The servers are closed at the end."""
    servers: list[ViewServer] = []

    def start(*folders: Path) -> ViewServer:
        server = ViewServer(Api(open_runs(list(folders))), "127.0.0.1", 0)
        servers.append(server)
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return server

    try:
        yield start
    finally:
        for server in servers:
            server.shutdown()
            server.server_close()


class ViewRecorder(Recorder):
    """A run with metrics, turns, answers of an evaluation, values of tokens, and text that tries to be markup."""

    def generate(self, id: int, token_versions: list[int] | None = None) -> None:
        if id != 4:
            super().generate(id, token_versions)
            return
        made = Completion(
            id=id,
            version=self.version_of(id // self.facts.group),
            tokens=np.arange(6, dtype=np.int32),
            logprobs=np.array([-0.5, -1.0, 0.0, 0.0, -2.0, -0.25], dtype=np.float32),
            finish="length",
            checksum="sum0",
            started_at=self.now(),
            finished_at=self.now(),
            turns=np.array([[0, 2], [4, 6]], dtype=np.int32),
        )
        prompt = (1, 2, id // self.facts.group)
        self.journal.generated(id, [Lineage(prompt, made)], [HOSTILE], at=self.now())

    def done(self, update: int) -> None:
        self.journal.flush()
        from stretto.store.reader import JournalReader

        with JournalReader(self.folder) as reader:
            samples = reader.batch(update)
        metrics = {
            "kind": "update", "update": update, "reward_mean": 0.25 * update, "tokens": 30, "tokens_per_second": 60.0,
            "staleness_mean": 1.0, "staleness_max": 2, "cycle_seconds": 2.0, "trainer_idle_seconds": 0.75,
            "trainer_waited_for": f"group {update}", "warnings": [HOSTILE] if update == 1 else [],
        }  # fmt: skip
        self.journal.update_done(update, metrics, at=self.now(), checksum=f"sum{update + 1}", samples=samples,
                                 advantages="none")  # fmt: skip
        place = next((place for place, sample in enumerate(samples) if sample.trajectory == 4), None)
        if place is not None:
            values = np.array([1.0, 2.0, 3.0, 4.0], dtype=np.float32)
            self.journal.token_values(update, [TokenReport(place, -values, values, 0.5 * values, 0.0 * values)])
        self.publish(update + 1)

    def evaluate(self, version: int, score: float) -> None:
        prompt = Prompt(0, f"what is {HOSTILE}?", (5, 6), {"answer": 1})
        made = Completion(-1, version, np.arange(3, dtype=np.int32), np.zeros(3, np.float32), "stop", f"sum{version}")
        answers = [
            HeldOutAnswer(0, prompt, False, (Lineage((5, 6), made),), (HOSTILE,), (None,), score, None),
            HeldOutAnswer(0, prompt, True, (Lineage((5, 6), made),), ("greedy words",), (None,), 1.0, None),
            HeldOutAnswer(1, Prompt(1, "other", (7,), {}), False, (), (), (), None, "the reward raised"),
        ]
        kind = "before" if version == 0 else "after"
        self.journal.evaluation(version, kind, self.now(), reward=score, num=1, seconds=0.2, answers=answers)


def record_run(folder: Path, *, end: str | None = "finished", updates: int = 4, config: str = CONFIG) -> ViewRecorder:
    """Records a run of so many updates. `end`: `finished`, `stopped`, or None for one that goes on or was killed."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.toml").write_text(config)
    run = ViewRecorder(folder, FACTS)
    run.publish(0)
    run.evaluate(0, 0.25)
    for update in range(updates):
        run.update(update)
    if end == "finished":
        run.evaluate(updates, 0.75)
    run.journal.status(
        {"update": updates, "training": None, "newest": updates, "staleness": 2, "versions": {"0": 1}, "running": 1,
         "queued": 0, "instances": [], "num_instances": 1, "waits": ["trainer: update 4: group 9"]},
        at=run.now(),
    )  # fmt: skip
    if end is None:
        run.admit(FACTS.batch * updates)
        run.journal.flush()
        return run
    run.journal.finished(stopped=end == "stopped", at=run.now())
    run.journal.close()
    return run


CALLING = (
    "I add. ", "<tool_call>", '{"name": "calculator", ', '"arguments": {"expression": "1 + 1"}}', "</tool_call>",
    "<|im_end|>", "<tool_response>2</tool_response>", "<|im_start|>", "It is 2.",
)  # fmt: skip
"""The tokens of trajectory 7 of `record_tool_run`: a turn with a call, what came back, and another turn."""


class ToolRecorder(ViewRecorder):
    """A run in which trajectory 7 calls a tool."""

    def generate(self, id: int, token_versions: list[int] | None = None) -> None:
        if id != 7:
            super().generate(id, token_versions)
            return
        tokens = np.arange(len(CALLING), dtype=np.int32)
        made = Completion(
            id=id,
            version=self.version_of(id // self.facts.group),
            tokens=tokens,
            logprobs=np.where((tokens < 6) | (tokens > 7), np.float32(-0.5), np.float32(0.0)),
            finish="stop",
            checksum=f"sum{self.version_of(id // self.facts.group)}",
            started_at=self.now(),
            finished_at=self.now(),
            turns=np.array([[0, 6], [8, 9]], dtype=np.int32),
        )
        prompt = (1, 2, id // self.facts.group)
        self.journal.generated(id, [Lineage(prompt, made)], ["".join(CALLING)], at=self.now())


def record_tool_run(folder: Path) -> None:
    """Records two updates of a run in which a tool is called, with the tokenizer of `CALLING`."""
    from tokenizers import Tokenizer, decoders, models

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.toml").write_text(CONFIG)
    tokenizer = Tokenizer(models.WordLevel({word: id for id, word in enumerate(CALLING)}, unk_token=CALLING[0]))
    tokenizer.decoder = decoders.Fuse()
    (folder / "policy").mkdir()
    tokenizer.save(str(folder / "policy" / "tokenizer.json"))
    run = ToolRecorder(folder, FACTS)
    run.publish(0)
    run.update(0)
    run.update(1)
    run.journal.finished(stopped=True, at=run.now())
    run.journal.close()


PAUSE_S = 1_000.0  # of `record_extended_run`


def record_extended_run(folder: Path) -> float:
    """Records two updates with a learning rate of 0.001, a pause, and two with 0.0005. Returns when the pause began.

    The second session takes 40 seconds by its sums, of which the trainer is busy for 10.
    """
    folder.mkdir(parents=True, exist_ok=True)
    first, second = CONFIG.replace("steps = 4", "steps = 2"), CONFIG.replace("0.001", "0.0005")
    short = dataclasses.replace(FACTS, updates=2)
    run = ViewRecorder(folder, short, recipe=first)
    run.publish(0)
    for update in range(2):
        run.update(update)
    run.journal.status({"waits": ["trainer: every group that 2 updates need is admitted"]}, at=run.now())
    stopped_at = run.now()
    run.journal.finished(stopped=False, at=stopped_at)
    run.journal.close()
    (folder / "config.toml").write_text(second)
    run = ViewRecorder(folder, FACTS, resume=True, at=stopped_at + PAUSE_S, recipe=second)
    for update in range(2, 4):
        run.update(update)
    run.journal.finished(stopped=False, at=run.now(), totals={"tokens": 120, "wall_s": 40.0, "trainer_busy_s": 10.0})
    run.journal.close()
    return stopped_at


def record_second_update(recorder: ViewRecorder) -> None:
    """Records update 1 of a run of `record_run(..., end=None, updates=1)`, which goes on."""
    recorder.admit(3)
    for group in (2, 3):
        recorder.finish(group)
    recorder.take(1)
    recorder.done(1)
    recorder.journal.flush()
