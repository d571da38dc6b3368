"""Warnings that come by the hundred."""

from __future__ import annotations

import logging

import pytest

from stretto.observe.repeated_warnings import MOST_KINDS, Repeats

LOG = logging.getLogger("test of repeats")


def test_the_first_of_a_kind_is_said_and_the_others_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    repeats = Repeats(LOG)
    for number in range(64):
        repeats.warn(f"trajectory {number} failed for good: `r:f` raised KeyError: 'column {number}' (r.py:3)")
    repeats.warn("trajectory 64 failed for good: its prompt is too long")
    assert [record.getMessage().partition(" (further")[0] for record in caplog.records] == [
        "trajectory 0 failed for good: `r:f` raised KeyError: 'column 0' (r.py:3)",
        "trajectory 64 failed for good: its prompt is too long",
    ]
    caplog.clear()
    repeats.close()
    repeats.close()
    assert [record.getMessage() for record in caplog.records] == [
        "and 63 more like it: trajectory ... failed for good: `r:f` raised KeyError: ... (r.py:...)"
    ]


def test_addresses_of_objects_make_no_kinds_of_their_own(caplog: pytest.LogCaptureFixture) -> None:
    repeats = Repeats(LOG)
    for address in ("0x7f12aa00bc10", "0x7f12AA00BC50", "0xdeadbeef"):
        repeats.warn(f"`r:f` returned <r.Score object at {address}> (Score)")
    repeats.close()
    assert [record.getMessage().partition(" (")[0] for record in caplog.records] == [
        "`r:f` returned <r.Score object at 0x7f12aa00bc10>",
        "and 2 more like it: `r:f` returned <r.Score object at ...>",
    ]


def test_reasons_that_all_differ_do_not_flood_either(caplog: pytest.LogCaptureFixture) -> None:
    repeats = Repeats(LOG)
    for number in range(500):
        repeats.warn(f"reason {'x' * number}")
    repeats.close()
    assert len(caplog.records) == MOST_KINDS + 2
    assert "and 479 more of other kinds" in caplog.records[-1].getMessage()
