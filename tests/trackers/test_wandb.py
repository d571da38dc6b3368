"""Weights & Biases, offline: what the run file holds that `wandb sync` would upload."""

from __future__ import annotations

import json
import struct
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from tracker_cases import begin, evaluation, report, rows_of, update

from stretto.errors import RecipeError
from stretto.observe.options import ObserveOptions, WandbOptions
from stretto.observe.trackers.catalogue import check_trackers
from stretto.observe.trackers.sample_rows import Samples

pytest.importorskip("wandb")

BLOCK = 32_768  # of a run file
OFFLINE = {"mode": "offline", "project": "ours", "tags": ["a"]}


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the key nor the settings of whoever runs the tests."""
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "config"))


def records(path: Path) -> list[Any]:
    """The records of a run file, which another process writes."""
    deadline = time.monotonic() + 30.0
    found = _records(path)
    while not any(record.HasField("exit") for record in found):
        assert time.monotonic() < deadline, "the file has no end"
        time.sleep(0.05)
        found = _records(path)
    return found


def _records(path: Path) -> list[Any]:
    """The records so far: a LevelDB log, in blocks of 32 KiB, after a head of 7 bytes."""
    from wandb.proto import wandb_internal_pb2

    data, place, parts, found = path.read_bytes(), 7, b"", []
    while place + 7 <= len(data):
        if (left := BLOCK - place % BLOCK) < 7:
            place += left
            continue
        _, length, kind = struct.unpack("<IHB", data[place : place + 7])
        parts += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            found.append(record)
            parts = b""
    return found


def history(path: Path) -> list[dict[str, Any]]:
    return [
        {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
        for record in records(path)
        if record.WhichOneof("record_type") == "history"
    ]


def test_a_run_and_its_continuation_are_one_run_with_their_own_axes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Samples, "rows", lambda self, number: rows_of(number, 2))
    said: list[str] = []
    folder = tmp_path / "my-run"
    options = begin(folder, sinks=["wandb"], samples=2, wandb=OFFLINE)
    report(folder, options, [evaluation(0), update(0), update(1)], outcome="stopped", say=said.append)
    time.sleep(1.1)  # wandb names a session by its second
    report(folder, options, [update(2), evaluation(3)])
    first, second = sorted((folder / "wandb").glob("offline-run-*/*.wandb"))
    ids = {record.run.run_id for path in (first, second) for record in records(path) if record.HasField("run")}
    assert ids == {json.loads((folder / "trackers" / "wandb.json").read_text())["id"]}
    runs = [record.run for record in records(first) if record.HasField("run")]
    assert (runs[0].project, runs[0].display_name, list(runs[0].tags)) == ("ours", "my-run", ["a"])
    lines = history(first) + history(second)
    rewards = [(line["update/number"], line["update/reward_mean"]) for line in lines if "update/reward_mean" in line]
    assert rewards == [(0, 0.0), (1, 0.1), (2, 0.2)]
    scores = [(line["evaluation/version"], line["evaluation/score"]) for line in lines if "evaluation/score" in line]
    assert scores == [(0, 0.25), (3, 0.25)]
    assert sum("samples" in name for line in lines for name in line) > 0
    tables = list((folder / "wandb").glob("offline-run-*/files/media/table/*.json"))
    assert len(tables) == 3
    assert "1+1=" in tables[0].read_text()
    assert said[0].startswith("wandb: `wandb sync ")


def test_a_tracker_without_a_key_is_refused_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"has no key: log in with `wandb login`, set `WANDB_API_KEY`"):
        check_trackers(ObserveOptions(sinks=("wandb",)))
    assert check_trackers(ObserveOptions(sinks=("wandb",), wandb=WandbOptions(mode="offline")))
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password 0\n")
    assert check_trackers(ObserveOptions(sinks=("wandb",)))


def test_a_server_that_cannot_be_reached_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setattr("stretto.observe.trackers.wandb.INIT_S", 2.0)
    folder = tmp_path / "run"
    report(folder, begin(folder, sinks=["wandb"], wandb={"mode": "online"}), [update(0)], close_s=90.0)
    first, *_, last = (record.getMessage() for record in caplog.records if "tracker" in record.getMessage())
    assert first.startswith("`on_start` of the tracker `wandb` raised ")
    assert last == "the tracker `wandb` did not start, and missed 1 lines of the run"


class Refusing(BaseHTTPRequestHandler):
    """A server of Weights & Biases that knows no key."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        content = b'{"errors": [{"message": "user is not logged in"}]}'
        self.send_response(401)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST  # noqa: N815

    def log_message(self, *args: object) -> None:
        """Says nothing."""


def test_a_wrong_key_is_one_warning_that_says_what_to_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import wandb

    wandb.teardown()  # it keeps the address of its server for all runs of a process
    server = ThreadingHTTPServer(("127.0.0.1", 0), Refusing)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.server_port}")
    folder = tmp_path / "run"
    options = begin(folder, sinks=["wandb"])
    report(folder, options, [update(0), update(1), evaluation(2)])
    wandb.teardown()
    server.shutdown()
    server.server_close()
    warnings = [record.getMessage() for record in caplog.records if record.name.startswith("stretto")]
    assert len([text for text in warnings if "wandb login" in text]) == 1
    assert any("missed 3 lines" in text for text in warnings)
    assert len(warnings) == 2, warnings
