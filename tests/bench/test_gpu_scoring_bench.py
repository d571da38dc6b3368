"""The bench of scoring under older versions, with a tiny shape on the processor."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.gpu import scoring


def test_every_setting_is_measured_against_a_forward_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "scoring.json"
    monkeypatch.setattr("sys.argv", ["scoring", "--tiny", "--versions", "2", "--repeats", "1", "--out", str(out)])
    scoring.main()
    found = json.loads(out.read_text())["settings"]
    assert [(each["kind"], each["versions_on"]) for each in found] == [
        ("lora", "device"),
        ("full", "device"),
        ("full", "host"),
    ]
    assert all(each["ratio"] == each["score_s"] / each["forward_s"] for each in found)
    assert capsys.readouterr().out.count("ratio") == 3
