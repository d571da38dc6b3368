"""The numbers of a run over HTTP."""

from __future__ import annotations

import socket
import urllib.request
from pathlib import Path

import pytest
from tracker_cases import begin, evaluation, report, update

PATIENCE_S = 30


def test_the_last_numbers_are_served_until_the_run_ends(tmp_path: Path) -> None:
    said: list[str] = []
    scraped: list[str] = []
    folder = tmp_path / "run"

    def scrape() -> None:
        address = said[0].removeprefix("prometheus: ")
        assert address.startswith("http://127.0.0.1:")
        for _ in range(200):  # the tracker has a thread of its own
            with urllib.request.urlopen(address, timeout=PATIENCE_S) as answer:
                text = answer.read().decode()
            if "evaluation_score" in text:
                break
        scraped.append(text)

    def wait_and_scrape() -> None:
        import time

        until = time.monotonic() + PATIENCE_S
        while not said and time.monotonic() < until:
            time.sleep(0.01)
        scrape()

    options = begin(folder, sinks=["prometheus"], prometheus={"port": 0})
    report(folder, options, [update(0), update(1), evaluation(2)], say=said.append, before_end=wait_and_scrape)
    lines = dict(line.rsplit(" ", 1) for line in scraped[0].splitlines() if not line.startswith("#"))
    assert float(lines['stretto_update_reward_mean{run="run"}']) == 0.1
    assert float(lines['stretto_update_number{run="run"}']) == 1
    assert float(lines['stretto_evaluation_score{run="run"}']) == 0.25
    with pytest.raises(OSError):
        urllib.request.urlopen(said[0].removeprefix("prometheus: "), timeout=PATIENCE_S)


def test_a_port_that_is_taken_is_named_and_the_run_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "run"
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        options = begin(folder, sinks=["prometheus"], prometheus={"port": port})
        report(folder, options, [update(0), update(1)])
    first, last = (record.getMessage() for record in caplog.records)
    assert "`on_start` of the tracker `prometheus` raised OSError: it cannot listen on 127.0.0.1" in first
    assert "choose another `observe.prometheus.port`" in first
    assert last == "the tracker `prometheus` did not start, and missed 2 lines of the run"
