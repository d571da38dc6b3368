"""Records of routing beside the journal: read back as recorded, deleted when nothing needs them, and verified."""

from __future__ import annotations

import sqlite3
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from journal_cases import FACTS, Recorder

from stretto.store.checkpoint_files import _arrays, _tensors_of
from stretto.store.journal import JOURNAL_NAME
from stretto.store.reader import JournalReader
from stretto.store.routing_files import FOLDER, read_record, stamp, stamp_size, write_record
from stretto.store.verify import exit_code, format_findings, verify
from stretto.types import Completion, Lineage


def record_of(id: int, tokens: int) -> np.ndarray:
    return np.random.default_rng(id).integers(0, 8, (tokens, 3, 2)).astype(np.uint8)


class Routed(Recorder):
    """The run of `Recorder` with a mixture of experts."""

    def generate(self, id: int, token_versions: list[int] | None = None) -> None:
        journal = self.journal

        class Adding:
            def generated(self, id: int, lineages: list[Lineage], texts: list[str], at: float) -> None:
                (lineage,) = lineages
                routing = record_of(id, len(lineage.context) + len(lineage.completion.tokens) - 1)
                journal.generated(
                    id, [replace(lineage, completion=replace(lineage.completion, routing=routing))], texts, at=at
                )

        self.journal = Adding()  # type: ignore[assignment]
        super().generate(id, token_versions)
        self.journal = journal


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    Routed(tmp_path, FACTS).run()
    return tmp_path


@pytest.mark.parametrize("dtype", [np.uint8, np.int16])
def test_a_record_is_read_back_as_it_was_written(tmp_path: Path, dtype: type) -> None:
    record = np.arange(60).reshape(5, 4, 3).astype(dtype)
    write_record(tmp_path, 1234, 2, record)
    assert (tmp_path / FOLDER / "1" / "1234-2.bin").stat().st_size == stamp_size(stamp(record)) == record.nbytes
    found = read_record(tmp_path, 1234, 2, stamp(record))
    assert found is not None
    assert found.dtype == dtype
    assert np.array_equal(found, record)
    assert read_record(tmp_path, 1234, 3, stamp(record)) is None
    with pytest.raises(ValueError, match="is not the one that the journal has the digest of"):
        read_record(tmp_path, 1234, 2, stamp(record[:4]))
    with pytest.raises(ValueError, match="its stamp of routing has 3 bytes"):
        stamp_size(b"abc")


def test_samples_and_lineages_come_with_their_records(folder: Path) -> None:
    with JournalReader(folder) as reader:
        samples = reader.batch(1)
        (lineage,), *_ = reader.load_lineages(samples[0].trajectory)
    for sample in samples:
        expected = record_of(sample.trajectory, len(sample.prompt) + len(sample.completion.tokens) - 1)
        assert np.array_equal(sample.completion.routing, expected)
    assert np.array_equal(lineage.completion.routing, samples[0].completion.routing)
    assert exit_code(verify(folder)) == 0


def test_verify_names_a_record_that_was_changed_and_a_stamp_that_was_changed(folder: Path) -> None:
    path = folder / FOLDER / "0" / "7-0.bin"
    data = bytearray(path.read_bytes())
    data[0] ^= 1
    path.write_bytes(bytes(data))
    findings = verify(folder)
    assert exit_code(findings) == 1
    assert "trajectory 7: its record of routing in `routing/` is not the one" in format_findings(findings)
    path.unlink()
    assert exit_code(verify(folder)) == 0
    with sqlite3.connect(folder / JOURNAL_NAME) as db:
        db.execute("UPDATE completions SET routing = ? WHERE trajectory = 7", (stamp(record_of(99, 6)),))
    assert exit_code(verify(folder)) == 1


def test_records_are_deleted_up_to_a_checkpoint(tmp_path: Path) -> None:
    recorder = Routed(tmp_path, FACTS)
    recorder.publish(0)
    recorder.update(0)
    recorder.update(1)
    recorder.admit(4)
    recorder.generate(recorder.ids(4)[0])  # not trained yet
    recorder.journal.routing_forgotten(1)
    recorder.journal.close()
    left = {int(path.name.split("-")[0]) for path in (tmp_path / FOLDER).rglob("*.bin")}
    with JournalReader(tmp_path) as reader:
        assert left == {*reader.members(1), recorder.ids(4)[0]}
        assert all(sample.completion.routing is None for sample in reader.batch(0))
        assert all(sample.completion.routing is not None for sample in reader.batch(1))
    assert exit_code(verify(tmp_path)) == 0


def test_a_checkpoint_carries_the_record_of_a_trajectory() -> None:
    tokens, logprobs = np.arange(4, dtype=np.int32), np.zeros(4, dtype=np.float32)
    made = Completion(3, 0, tokens, logprobs, "stop", "sum", routing=record_of(3, 6))
    found = _arrays("3", _tensors_of(made, "3"))
    assert np.array_equal(found["routing"], record_of(3, 6))
