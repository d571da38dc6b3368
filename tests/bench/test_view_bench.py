"""The journal that the bench of the page makes has the tables of a real one."""

from __future__ import annotations

from pathlib import Path

from bench.view import Server, make_journal
from stretto.store.journal import JOURNAL_NAME


def test_the_page_of_a_made_journal_shows_its_trajectories(tmp_path: Path) -> None:
    make_journal(tmp_path / JOURNAL_NAME, updates=10, trajectories=160, instances=4)
    server = Server(tmp_path)
    try:
        _, runs = server.ask("api/runs")
        _, found = server.ask("api/trajectories", run=0)
    finally:
        server.close()
    assert len(runs) == 1
    assert found["matching"] == 160
