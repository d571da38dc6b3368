"""Phases of the start of a run: all are logged, and those that take long are told while they last."""

from __future__ import annotations

import logging
import re
import threading

import pytest

from stretto.observe.start_phases import start_phase

log = logging.getLogger("phases")


def test_a_phase_that_takes_long_is_told_while_it_lasts(caplog: pytest.LogCaptureFixture) -> None:
    told, heard = [], threading.Event()

    def say(text: str) -> None:
        told.append(text)
        heard.set()

    with caplog.at_level(logging.INFO), start_phase(log, "model", say, long_s=0.01):
        assert heard.wait(10.0)
        assert caplog.messages == []
    assert told == ["starting: model"]
    assert caplog.messages[0].startswith("start: model: ")


def test_a_phase_that_takes_very_long_is_told_again_with_its_seconds() -> None:
    told, heard = [], threading.Event()

    def say(text: str) -> None:
        told.append(text)
        if len(told) == 3:
            heard.set()

    with start_phase(log, "model", say, long_s=0.01, every_s=0.01):
        assert heard.wait(10.0)
    assert told[0] == "starting: model"
    assert all(re.fullmatch(r"starting: model, for \d+ s now", text) for text in told[1:])


def test_a_short_phase_is_logged_and_not_told(caplog: pytest.LogCaptureFixture) -> None:
    told: list[str] = []
    with caplog.at_level(logging.INFO), start_phase(log, "model", told.append):
        pass
    assert told == []
    assert caplog.messages[0].startswith("start: model: ")


def test_a_phase_that_fails_is_neither_logged_nor_told_later(caplog: pytest.LogCaptureFixture) -> None:
    told: list[str] = []
    before = set(threading.enumerate())
    with (
        caplog.at_level(logging.INFO),
        pytest.raises(ValueError, match="no model"),
        start_phase(log, "model", told.append, long_s=60.0),
    ):
        raise ValueError("no model")
    assert (told, caplog.messages) == ([], [])
    assert not set(threading.enumerate()) - before


def test_a_phase_goes_on_if_it_cannot_be_told(caplog: pytest.LogCaptureFixture) -> None:
    tried = threading.Event()

    def say(text: str) -> None:
        tried.set()
        raise BrokenPipeError("nobody reads")

    with caplog.at_level(logging.INFO), start_phase(log, "model", say, long_s=0.01):
        assert tried.wait(10.0)
    assert caplog.messages[0] == "a message could not be shown: `model` takes long"
    assert caplog.messages[1].startswith("start: model: ")
