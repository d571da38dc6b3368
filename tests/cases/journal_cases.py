"""A small run recorded through the journal's own methods."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from stretto.run.seeds import trajectory_seed
from stretto.store.journal import JOURNAL_NAME, Journal, RunFacts
from stretto.store.reader import JournalReader
from stretto.types import Completion, Lineage, Prompt

FACTS = RunFacts(
    paradigm="multi-version", staleness=2, auto=False, batch=2, group=3, updates=4, seed=7, data_rows=8, retries=1
)


class Recorder:
    """Records a run update by update; group `g` trains at update `g // B`, `g % (K + 1)` versions old at most."""

    def __init__(
        self, folder: Path, facts: RunFacts, *, resume: bool = False, at: float = 1.0, recipe: str | None = None
    ) -> None:
        self.folder = folder
        self.facts = facts
        self.journal = Journal.open(folder / JOURNAL_NAME, resume=resume, interval_s=0.01)
        self.journal.begin(facts, at=at, recipe=recipe)
        self.journal.instance_joined(0, 4, at=at)
        self.at = at

    def now(self) -> float:
        self.at += 0.25
        return self.at

    def version_of(self, group: int) -> int:
        update = group // self.facts.batch
        return max(0, update - group % (self.facts.staleness + 1))

    def ids(self, group: int) -> list[int]:
        return [group * self.members + member for member in range(self.members)]

    @property
    def members(self) -> int:
        """The trajectories that a group starts with."""
        return self.facts.group + self.facts.reserve_members

    def publish(self, version: int) -> None:
        self.journal.version_published(version, f"sum{version}", at=self.now())
        self.journal.version_loaded(version, f"sum{version}", at=self.now())

    def admit(self, group: int, version: int | None = None) -> None:
        version = self.version_of(group) if version is None else version
        self.journal.group_admitted(
            group,
            version=version,
            deadline=version + self.facts.staleness,
            staleness=self.facts.staleness,
            prompt=Prompt(group, f"{group} + {group} =", (1, 2, group), {"answer": 2 * group}),
            epoch=group // self.facts.data_rows,
            row_number=(3 * group + 1) % self.facts.data_rows,
            trajectories=self.ids(group),
            seeds=[trajectory_seed(self.facts.seed, id) for id in self.ids(group)],
            instances=[0] * self.members,
            at=self.now(),
        )

    def generate(self, id: int, token_versions: list[int] | None = None) -> None:
        version = self.version_of(id // self.members)
        n = 4 + id % 3
        completion = Completion(
            id=id,
            version=version,
            tokens=np.arange(n, dtype=np.int32) + id,
            logprobs=np.full(n, -0.5, dtype=np.float32),
            finish="stop",
            checksum=f"sum{version if token_versions is None else token_versions[-1]}",
            token_versions=None if token_versions is None else np.array(token_versions, dtype=np.int32),
            started_at=self.now(),
            finished_at=self.now(),
        )
        prompt = (1, 2, id // self.members)
        self.journal.generated(id, [Lineage(prompt, completion)], [f"answer of {id}"], at=self.now())

    def finish(self, group: int) -> list[int]:
        for id in self.ids(group):
            self.generate(id)
            self.journal.scored(id, float(id % 2), at=self.now())
        return self.ids(group)

    def take(self, update: int) -> list[int]:
        groups = sorted(range(update * self.facts.batch, (update + 1) * self.facts.batch), key=self.version_of)
        members = [id for group in groups for id in self.ids(group)]
        self.journal.batch_taken(update, members, at=self.now())
        return members

    def update(self, update: int) -> None:
        for group in range(update * self.facts.batch, (update + 1) * self.facts.batch):
            self.admit(group)
            self.finish(group)
        self.take(update)
        self.done(update)

    def done(self, update: int) -> None:
        self.journal.flush()
        with JournalReader(self.folder) as reader:
            samples = reader.batch(update)
        self.journal.update_done(
            update, {"loss": 0.5}, at=self.now(), checksum=f"sum{update + 1}", samples=samples, advantages="none"
        )
        self.publish(update + 1)

    def run(self) -> None:
        self.publish(0)
        for update in range(self.facts.updates):
            self.update(update)
        self.journal.finished(stopped=False, at=self.now())
        self.journal.close()
