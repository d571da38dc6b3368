"""What the journal costs: microseconds a recorded change on the caller's side, and changes a second of the writer.

    python bench/journal.py [--groups 2000] [--tokens 512]

The caller's side is what the event loop pays. The writer's side has to keep up with the trajectories that end in a
second, each of which is three changes (generated, scored, its share of a batch) and two blobs.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from pathlib import Path

import numpy as np

from stretto.run.seeds import trajectory_seed
from stretto.store.journal import JOURNAL_NAME, Journal, RunFacts
from stretto.store.verify import exit_code, format_findings, verify
from stretto.types import Completion, Lineage, Prompt, Sample

GROUP = 8
BATCH = 64


async def record(folder: Path, num_groups: int, num_tokens: int) -> None:
    journal = Journal.open(folder / JOURNAL_NAME, capacity=10 * GROUP * num_groups)
    updates = num_groups // BATCH
    journal.begin(RunFacts("multi-version", 0, False, BATCH, GROUP, updates, 0, num_groups, 0), at=time.time())
    prompt_tokens = tuple(range(128))
    tokens = np.arange(num_tokens, dtype=np.int32)
    logprobs = np.full(num_tokens, -1.0, np.float32)
    text = "word " * num_tokens
    caller: dict[str, list[float]] = {"group_admitted": [], "generated": [], "scored": [], "batch_taken": []}
    durable: list[float] = []
    started = time.perf_counter()
    for update in range(updates):
        checksum = f"{update:032x}"
        journal.version_published(update, checksum, at=time.time())
        journal.version_loaded(update, checksum, at=time.time())
        groups = range(update * BATCH, (update + 1) * BATCH)
        for group in groups:
            prompt = Prompt(group, "prompt", prompt_tokens, {"answer": group})
            members = [group * GROUP + member for member in range(GROUP)]
            seeds = [trajectory_seed(0, id) for id in members]
            now = time.time()
            with timed(caller["group_admitted"]):
                journal.group_admitted(
                    group,
                    version=update,
                    deadline=update,
                    staleness=0,
                    prompt=prompt,
                    epoch=0,
                    row_number=group,
                    trajectories=members,
                    seeds=seeds,
                    at=now,
                )
        samples: list[Sample] = []
        ids = [group * GROUP + member for group in groups for member in range(GROUP)]
        for id in ids:
            completion = Completion(id, update, tokens, logprobs, "stop", checksum)
            samples.append(Sample(id, id // GROUP, update, prompt_tokens, completion, 1.0))
            with timed(caller["generated"]):
                journal.generated(id, [Lineage(prompt_tokens, completion)], [text], at=now)
            with timed(caller["scored"]):
                journal.scored(id, 1.0, at=now)
        with timed(caller["batch_taken"]):
            journal.batch_taken(update, ids, at=now)
        with timed(durable):
            await journal.durable()
        journal.update_done(update, {"loss": 0.0}, at=time.time(), checksum=f"{update + 1:032x}", samples=samples)
    journal.version_published(updates, f"{updates:032x}", at=time.time())
    journal.finished(stopped=False, at=time.time())
    await journal.durable()
    elapsed = time.perf_counter() - started
    journal.close()
    trajectories = updates * BATCH * GROUP
    rows = trajectories * 8 + updates * (BATCH + 2)  # trajectory, completion, five transitions, member; group, ...
    size = (folder / JOURNAL_NAME).stat().st_size
    print(f"{trajectories:,} trajectories of {num_tokens} tokens in {updates} updates")
    for name, seconds in caller.items():
        median, mean = np.median(seconds) * 1e6, np.mean(seconds) * 1e6
        print(f"  {name:<16} {median:7.2f} us median, {mean:7.2f} us mean on the caller")
    print(
        f"  durable          {np.median(durable) * 1e3:7.1f} ms median behind {BATCH * GROUP * 2 + BATCH + 1} changes"
    )
    print(f"  writer           {trajectories / elapsed:,.0f} trajectories/s, {rows / elapsed:,.0f} rows/s")
    print(f"  file             {size / 1e6:.1f} MB, {size / trajectories:,.0f} bytes a trajectory")


class timed:  # noqa: N801 - reads as a word at its use
    def __init__(self, into: list[float]) -> None:
        self.into = into

    def __enter__(self) -> None:
        self.started = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.into.append(time.perf_counter() - self.started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--groups", type=int, default=640)
    parser.add_argument("--tokens", type=int, default=512)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(record(Path(folder), options.groups, options.tokens))
        started = time.perf_counter()
        findings = verify(folder)
        print(f"  verify           {time.perf_counter() - started:.2f} s")
        print(format_findings(findings))
        raise SystemExit(exit_code(findings))


if __name__ == "__main__":
    main()
