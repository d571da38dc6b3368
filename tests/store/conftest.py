"""Journals of small runs: one that a test records, and one that is finished."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from journal_cases import FACTS, Recorder

from stretto.store.journal import JOURNAL_NAME, RunFacts


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[Callable[..., Recorder]]:
    made: list[Recorder] = []

    def make(facts: RunFacts = FACTS, *, resume: bool = False) -> Recorder:
        made.append(Recorder(tmp_path, facts, resume=resume))
        return made[-1]

    yield make
    for one in made:
        try:
            one.journal.close()
        except Exception:
            assert one.journal.backlog  # a test that broke the writer has seen the error itself


@pytest.fixture(scope="session")
def finished_journal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    Recorder(folder, FACTS).run()
    return folder / JOURNAL_NAME


@pytest.fixture
def finished_run(finished_journal: Path, tmp_path: Path) -> Path:
    """A run folder of its own with the journal of a finished run, for a test to damage."""
    shutil.copy(finished_journal, tmp_path / JOURNAL_NAME)
    return tmp_path
