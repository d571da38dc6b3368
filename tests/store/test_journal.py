"""The journal writes behind its callers, in order, and never hides that it could not."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from stretto.errors import JournalError, RunError
from stretto.run.seeds import trajectory_seed
from stretto.store.journal import JOURNAL_NAME, Journal, JournalReader, RunFacts
from stretto.store.verify import verify
from stretto.types import Completion, Lineage, Prompt

FACTS = RunFacts(
    paradigm="multi-version", staleness=2, auto=False, batch=2, group=3, updates=4, seed=7, data_rows=8, retries=1
)


def test_what_was_recorded_is_read_back(recorder, tmp_path):
    run = recorder()
    run.publish(0)
    run.admit(0)
    run.journal.state_changed(1, "running", at=2.0, reason="instance 0 was lost", instance=4)
    run.journal.attempt_failed(2, "generation", "out of memory", at=2.0)
    run.journal.state_changed(2, "running", at=2.0)
    run.generate(0, token_versions=[0, 0, 1, 1])
    run.journal.scored(0, 0.75, at=3.0)
    run.journal.flush()
    with JournalReader(tmp_path) as reader:
        (lineage,), reward, turn_rewards = reader.load_lineages(0)
        completion = lineage.completion
        assert (lineage.context, lineage.train, lineage.turn_numbers) == ((1, 2, 0), True, None)
        assert (reward, turn_rewards, completion.turns, completion.num_sampled) == (0.75, None, None, 4)
        assert completion.tokens.tolist() == [0, 1, 2, 3]
        assert completion.tokens.dtype == np.int32
        assert completion.logprobs.tolist() == [-0.5] * 4
        assert completion.token_versions is not None
        assert completion.token_versions.tolist() == [0, 0, 1, 1]
        assert (completion.checksum, completion.finish, completion.version) == ("sum1", "stop", 0)
        assert reader.counts() == {"running": 2, "scored": 1}
        assert reader.ids("scored", "scoring") == [0]
        assert reader.trajectory(1).instance == 4
        assert reader.trajectory(2).failures == 1
        assert reader.failures() == [(2, "generation", "out of memory")]
        assert reader.facts() == FACTS
        assert reader.versions() == {0: "sum0"}
        assert reader.num_groups() == 1
        with pytest.raises(JournalError, match="no completion of trajectory 1"):
            reader.load_lineages(1)
        with pytest.raises(JournalError, match="no trajectory 99"):
            reader.trajectory(99)


def test_a_batch_is_read_back_as_the_trainer_got_it(recorder, tmp_path):
    run = recorder()
    run.run()
    with JournalReader(tmp_path) as reader:
        batch = reader.batch(1)
        assert [sample.trajectory for sample in batch] == reader.members(1)
        assert [(s.version, s.group) for s in batch] == sorted((s.version, s.group) for s in batch)
        assert batch[0].prompt == [1, 2, batch[0].group]
        assert batch[0].completion.id == batch[0].trajectory
        records = reader.updates()
        assert [r.update for r in records] == [0, 1, 2, 3]
        assert all(r.num_samples == 6 and r.metrics == {"loss": 0.5} for r in records)
        assert reader.num_updates() == 4
        assert [s.outcome for s in reader.sessions()] == ["finished"]


def test_outstanding_groups_have_all_that_a_resumed_run_needs(recorder, tmp_path):
    run = recorder()
    run.publish(0)
    run.update(0)
    run.admit(2)
    run.admit(3)
    run.generate(6)
    run.journal.flush()
    with JournalReader(tmp_path) as reader:
        groups = reader.outstanding()
    assert [g.group for g in groups] == [2, 3]
    assert groups[0].prompt == Prompt(2, "2 + 2 =", (1, 2, 2), {"answer": 4})
    assert [t.state for t in groups[0].trajectories] == ["scoring", "running", "running"]
    assert [t.seed for t in groups[0].trajectories] == [trajectory_seed(7, id) for id in (6, 7, 8)]
    assert groups[0].deadline == groups[0].version + groups[0].staleness


def test_changes_are_committed_without_anyone_asking(recorder, tmp_path):
    run = recorder()
    run.publish(0)
    deadline = time.monotonic() + 5
    with JournalReader(tmp_path) as reader:
        while reader.versions() != {0: "sum0"}:
            assert time.monotonic() < deadline, "nothing was committed in 5 s"
            time.sleep(0.005)


def test_durable_waits_for_the_commit_and_not_for_the_interval(tmp_path):
    async def scenario() -> None:
        with Journal.open(tmp_path / JOURNAL_NAME, interval_s=30.0) as journal:
            journal.begin(FACTS, at=1.0)
            started = time.monotonic()
            await journal.durable()
            await journal.durable()  # nothing new: returns at once
            assert time.monotonic() - started < 5.0
            with JournalReader(tmp_path) as reader:
                assert reader.facts() == FACTS

    asyncio.run(scenario())


def test_durable_also_covers_what_an_ordinary_commit_wrote_before(recorder, tmp_path):
    log = tmp_path / f"{JOURNAL_NAME}-wal"
    for _ in range(3):  # of several sessions: what one of them wrote must not stand for the next
        run = recorder(resume=(tmp_path / JOURNAL_NAME).exists())
        for number in range(2):
            run.journal.note("a note", str(number), at=1.0)
            while run.journal.backlog:
                time.sleep(0.002)
            before = log.stat().st_size
            run.journal.flush()
            assert log.stat().st_size > before, "SQLite syncs nothing where no page is written"
            before = log.stat().st_size
            run.journal.flush()
            assert log.stat().st_size == before, "there was nothing new to sync"
        run.journal.close()


def test_the_event_loop_runs_on_while_durable_waits(tmp_path):
    async def scenario() -> int:
        with Journal.open(tmp_path / JOURNAL_NAME) as journal:
            journal.begin(FACTS, at=1.0)
            journal._writer.record(lambda db: time.sleep(0.2))
            waiting = asyncio.ensure_future(journal.durable())
            ticks = 0
            while not waiting.done():
                await asyncio.sleep(0.005)
                ticks += 1
            await waiting
            return ticks

    assert asyncio.run(scenario()) > 10


def test_durable_gives_up_at_its_deadline_by_name(tmp_path):
    async def scenario() -> None:
        journal = Journal.open(tmp_path / JOURNAL_NAME)
        released = threading.Event()
        journal._writer.record(lambda db: released.wait(10) and None)
        with pytest.raises(JournalError, match=r"journal\.sqlite.*waited 0\.05 s to be on disk"):
            await journal.durable(timeout_s=0.05)
        with pytest.raises(JournalError, match="to be on disk"):
            journal.flush(timeout_s=0.05)
        released.set()
        await journal.durable()
        journal.close()

    asyncio.run(scenario())


def test_a_full_queue_is_a_wait_with_a_deadline(tmp_path):
    async def scenario() -> None:
        journal = Journal.open(tmp_path / JOURNAL_NAME, capacity=10)
        journal.begin(FACTS, at=1.0)
        await journal.room()
        released = threading.Event()
        journal._writer.record(lambda db: released.wait(10) and None)
        for i in range(12):
            journal.note("wait", str(i), at=1.0)
        with pytest.raises(JournalError, match=r"for room in its queue, 1\d changes behind"):
            await journal.room(timeout_s=0.05)
        while journal.backlog < 20:
            journal.note("wait", "more", at=1.0)
        with pytest.raises(JournalError, match="the disk is too slow"):
            journal.note("wait", "too many", at=1.0)
        waiting = asyncio.ensure_future(journal.room(timeout_s=10))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        released.set()
        await waiting
        journal.close()

    asyncio.run(scenario())


def test_many_who_wait_for_room_do_not_overflow_it_together(tmp_path):
    async def scenario() -> None:
        journal = Journal.open(tmp_path / JOURNAL_NAME, capacity=10)
        journal.begin(FACTS, at=1.0)

        async def record(number: int) -> None:
            await journal.room(timeout_s=10)
            journal.note("wait", str(number), at=1.0)

        await asyncio.gather(*(record(number) for number in range(100)))
        journal.close()

    asyncio.run(scenario())


def test_changes_of_many_threads_all_arrive(tmp_path):
    journal = Journal.open(tmp_path / JOURNAL_NAME, capacity=100_000)
    journal.begin(FACTS, at=1.0)

    def write(name: int) -> None:
        for i in range(500):
            journal.note(f"thread {name}", str(i), at=float(i))

    threads = [threading.Thread(target=write, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    journal.close()
    with JournalReader(tmp_path) as reader:
        notes = reader.notes()
    for name in range(4):
        assert [text for _, kind, text in notes if kind == f"thread {name}"] == [str(i) for i in range(500)]


def test_a_full_disk_ends_the_journal_by_name_and_keeps_what_was_written(recorder, tmp_path):
    run = recorder()
    run.publish(0)
    run.admit(0)
    run.journal.flush()

    def fill(db: sqlite3.Connection) -> None:
        (pages,) = db.execute("PRAGMA page_count").fetchone()
        db.execute(f"PRAGMA max_page_count = {pages + 4}")

    run.journal._writer.record(fill)
    for _ in range(200):
        run.journal.note("wait", "x" * 1000, at=2.0)
    with pytest.raises(JournalError, match=r"journal\.sqlite` cannot be written: database or disk is full.*note"):
        run.journal.flush()
    with pytest.raises(JournalError, match="database or disk is full") as caught:
        run.journal.scored(0, 1.0, at=3.0)
    causes = [caught.value.__cause__, caught.value.__cause__.__cause__]
    assert isinstance(causes[-1], sqlite3.OperationalError)
    for call in (run.journal.durable, run.journal.room):
        with pytest.raises(JournalError, match="database or disk is full"):
            asyncio.run(call())
    with pytest.raises(JournalError, match="database or disk is full"):
        run.journal.close()
    run.journal.close()  # said once
    with JournalReader(tmp_path) as reader:
        assert reader.counts() == {"running": 3}
        assert reader.notes() == []


def test_a_locked_file_ends_the_journal_by_name(tmp_path, monkeypatch):
    monkeypatch.setattr("stretto.store.writer.LOCKED_TIMEOUT_S", 0.05)
    journal = Journal.open(tmp_path / JOURNAL_NAME)
    journal.begin(FACTS, at=1.0)
    journal.flush()
    other = sqlite3.connect(tmp_path / JOURNAL_NAME, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    journal.note("wait", "behind a lock", at=1.0)
    with pytest.raises(JournalError, match="database is locked"):
        journal.flush()
    other.close()
    with pytest.raises(JournalError, match="database is locked"):
        journal.close()


def test_the_file_refuses_to_train_a_trajectory_twice(recorder, tmp_path):
    run = recorder()
    run.publish(0)
    run.update(0)
    run.journal.flush()
    run.journal.batch_taken(1, [0], at=9.0)
    with pytest.raises(JournalError, match=r"UNIQUE constraint failed.*batch_taken\(1\)"):
        run.journal.flush()
    with JournalReader(tmp_path) as reader:
        assert reader.members(1) == []
        assert reader.counts() == {"trained": 6}


def test_an_end_is_final_and_so_is_a_completion(recorder):
    run = recorder()
    run.publish(0)
    run.admit(0)
    run.journal.failed(0, "out of tries", at=2.0)
    run.journal.flush()
    run.journal.state_changed(0, "running", at=3.0)
    with pytest.raises(JournalError, match="trajectory 0 has already ended as `failed` and cannot become `running`"):
        run.journal.flush()


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (lambda j: j.state_changed(99, "running", at=1.0), "trajectory 99 was never admitted"),
        (lambda j: j.update_done(5, {}, at=1.0), "update 5 is done, but its batch was never recorded"),
        (lambda j: j.version_published(0, "other", at=1.0), "version 0 was published with checksum other.*sum0"),
        (lambda j: j.version_loaded(3, "sum3", at=1.0), "version 3 was loaded .* never published"),
    ],
)
def test_what_cannot_be_true_is_not_recorded(recorder, record, message):
    run = recorder()
    run.publish(0)
    record(run.journal)
    with pytest.raises(JournalError, match=message):
        run.journal.flush()


def test_a_reward_that_is_no_number_is_refused_at_once(recorder):
    run = recorder()
    with pytest.raises(JournalError, match="a reward is a finite number"):
        run.journal.scored(0, float("nan"), at=1.0)


def test_text_that_is_no_unicode_does_not_stop_a_run(recorder, tmp_path):
    run = recorder()
    run.publish(0)
    run.journal.note("wait", "half a pair: \ud800", at=1.0)
    run.journal.flush()
    with JournalReader(tmp_path) as reader:
        assert reader.notes()[0][2].startswith("half a pair: ")


def test_opening_says_what_to_do(recorder, tmp_path):
    with pytest.raises(RunError, match="nothing to resume"):
        Journal.open(tmp_path / JOURNAL_NAME, resume=True)
    run = recorder()
    run.journal.flush()
    with pytest.raises(RunError, match="exists already"):
        Journal.open(tmp_path / JOURNAL_NAME)
    with pytest.raises(RunError, match="written by another process"):
        Journal.open(tmp_path / JOURNAL_NAME, resume=True)
    run.journal.close()
    with pytest.raises(JournalError, match="is closed"):
        run.journal.note("wait", "", at=1.0)
    (tmp_path / "empty").mkdir()
    with pytest.raises(RunError, match=r"no `journal\.sqlite`"):
        JournalReader(tmp_path / "empty")
    with pytest.raises(RunError, match="here` does not exist; give the folder"):
        JournalReader(tmp_path / "nothing" / "here")
    with pytest.raises(JournalError, match="cannot be opened"):
        Journal.open(tmp_path / "nothing" / "here" / JOURNAL_NAME)


def test_a_resumed_run_keeps_what_it_is(recorder, tmp_path):
    run = recorder()
    run.journal.finished(stopped=True, at=2.0)
    run.journal.close()
    with (
        Journal.open(tmp_path / JOURNAL_NAME, resume=True) as journal,
        pytest.raises(RunError, match=r"`group = 8` cannot resume .* recorded with `3`"),
    ):
        journal.begin(replace(FACTS, group=8), at=3.0)
    with Journal.open(tmp_path / JOURNAL_NAME, resume=True) as journal:
        journal.begin(replace(FACTS, updates=6), at=3.0)
    with JournalReader(tmp_path) as reader:
        assert reader.facts().updates == 6
        assert [s.outcome for s in reader.sessions()] == ["stopped", None]


def test_a_journal_of_another_schema_is_refused(recorder, tmp_path):
    recorder().journal.close()
    with sqlite3.connect(tmp_path / JOURNAL_NAME) as db:
        db.execute("PRAGMA user_version = 6")
    named = "was written with schema version 6, and .* reads schema version 12: use the version of stretto that wrote"
    for read in (JournalReader, verify, lambda folder: Journal.open(folder / JOURNAL_NAME, resume=True)):
        with pytest.raises(JournalError, match=named):
            read(tmp_path)


def test_the_laws_that_a_paradigm_gives_up_are_a_fact_of_the_run(recorder, tmp_path):
    run = recorder(replace(FACTS, paradigm="drop", laws_broken=(2,)))
    run.journal.close()
    with JournalReader(tmp_path) as reader:
        assert reader.facts() == run.facts


def test_a_reader_sees_one_moment_while_the_run_goes_on(recorder, tmp_path):
    run = recorder()
    run.publish(0)
    run.update(0)
    run.journal.flush()
    with JournalReader(tmp_path) as reader:
        with reader.moment():
            assert reader.num_updates() == 1
            run.update(1)
            run.journal.flush()
            assert reader.num_updates() == 1
        assert reader.num_updates() == 2


def test_a_folder_that_cannot_be_written_can_be_read(finished_run):
    os.chmod(finished_run, 0o555)
    try:
        with JournalReader(finished_run) as reader:
            assert reader.num_updates() == 4
    finally:
        os.chmod(finished_run, 0o755)


WRITING = """
import sys
from stretto.store.journal import Journal, RunFacts
journal = Journal.open(sys.argv[1], interval_s=0.01)
journal.begin(RunFacts("multi-version", 2, False, 2, 3, 4, 7, 8, 1), at=1.0)
for i in range(300):
    journal.note("durable", str(i), at=float(i))
journal.flush()
print("durable", flush=True)
i = 300
while True:
    journal.note("later", str(i), at=float(i))
    i += 1
    if i % 100 == 0:
        journal.flush()
"""


def test_what_was_durable_survives_kill_9(tmp_path):
    path = tmp_path / JOURNAL_NAME
    process = subprocess.Popen([sys.executable, "-c", WRITING, str(path)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "durable\n"
        time.sleep(0.05)  # let it be in the middle of something
        process.send_signal(signal.SIGKILL)
    finally:
        process.kill()
        process.wait()
    with JournalReader(path) as reader:
        texts = [text for _, _, text in reader.notes()]
    assert len(texts) >= 300
    assert texts == [str(i) for i in range(len(texts))]  # a prefix, without holes
    with Journal.open(path, resume=True) as journal:  # the lock went with the process
        journal.begin(FACTS, at=2.0)
        journal.note("resumed", "", at=2.0)
    with JournalReader(path) as reader:
        assert reader.notes()[-1][1] == "resumed"
        assert [s.outcome for s in reader.sessions()] == [None, None]


def test_recording_encodes_nothing_on_the_callers_side(recorder):
    """The call stays an append: a completion of two million tokens costs the loop no more than a short one."""
    run = recorder()
    run.publish(0)
    run.admit(0)
    tokens, logprobs = np.zeros(2_000_000, np.int32), np.zeros(2_000_000, np.float32)
    seconds = []
    for id in run.ids(0):
        completion = Completion(id, 0, tokens, logprobs, "length", "sum0", started_at=1.0)
        started = time.perf_counter()
        run.journal.generated(id, [Lineage((1, 2, 0), completion)], ["text"], at=1.0)
        seconds.append(time.perf_counter() - started)
    assert min(seconds) < 0.001  # copying 16 MB takes longer; the others may have lost the processor meanwhile
    run.journal.flush()


def test_the_journal_can_be_opened_as_a_path_or_by_its_folder(finished_run: Path):
    with JournalReader(finished_run) as by_folder, JournalReader(finished_run / JOURNAL_NAME) as by_file:
        assert by_folder.counts() == by_file.counts()


def test_instances_and_moves_are_recorded_with_their_session(recorder, tmp_path):
    run = recorder()
    run.publish(0)
    run.admit(0)
    run.journal.instance_joined(1, 1, at=2.0)
    run.journal.instance_left(0, "lost", "it hangs", at=3.0)
    run.journal.trajectory_moved(
        1, version=0, source=0, target=1, context=40, num_bytes=0, prefilled=40, reason="0 is lost", at=4.0
    )
    run.journal.flush()
    with sqlite3.connect(tmp_path / JOURNAL_NAME) as db:
        joined = db.execute("SELECT session, instance, slots, left_at, outcome, reason FROM instances").fetchall()
        moves = db.execute("SELECT trajectory, source, target, context, num_bytes, prefilled FROM moves").fetchall()
    assert joined == [(1, 0, 4, 3.0, "lost", "it hangs"), (1, 1, 1, None, None, None)]
    assert moves == [(1, 0, 1, 40, 0, 40)]


def test_turns_and_what_each_earned_are_read_back(recorder, tmp_path):
    run = recorder()
    run.publish(0)
    run.admit(0)
    made = Completion(
        id=0,
        version=0,
        tokens=np.array([4, 5, 90, 6], dtype=np.int32),
        logprobs=np.array([-0.5, -0.5, 0.0, -0.5], dtype=np.float32),
        finish="stop",
        checksum="sum0",
        turns=np.array([[0, 2], [3, 4]], dtype=np.int32),
    )
    run.journal.generated(0, [Lineage((1, 2, 0), made)], ["45Z6"], at=2.0)
    run.journal.scored(0, 1.5, at=3.0, turns=(0.5, 1.0))
    run.journal.flush()
    with JournalReader(tmp_path) as reader:
        (lineage,), reward, turn_rewards = reader.load_lineages(0)
    completion = lineage.completion
    assert (reward, turn_rewards) == (1.5, (0.5, 1.0))
    assert completion.turns is not None
    assert completion.turns.tolist() == [[0, 2], [3, 4]]
    assert completion.num_sampled == 3


def test_an_update_that_trained_another_batch_than_the_recorded_one_is_refused(recorder, tmp_path):
    run = recorder()
    run.publish(0)
    for group in (0, 1):
        run.admit(group)
        run.finish(group)
    run.take(0)
    run.journal.flush()
    with JournalReader(tmp_path) as reader:
        samples = reader.batch(0)
    run.journal.update_done(0, {}, at=9.0, checksum="sum1", samples=samples[::-1])
    with pytest.raises(JournalError, match="update 0 has a recorded batch, and has trained another one"):
        run.journal.flush()
