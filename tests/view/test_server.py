"""The server answers the page, refuses what is not for it, and says what is wrong in words."""

from __future__ import annotations

import http.client
import json
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from view_cases import record_run, served_folders

from stretto.errors import RunError
from stretto.view.api import Api
from stretto.view.runs import open_runs
from stretto.view.server import ViewServer

Ask = Callable[..., tuple[int, dict[str, str], Any]]


@pytest.fixture
def serve() -> Iterator[Callable[..., Ask]]:
    with served_folders() as started:

        def start(*folders: Path) -> Ask:
            port = started(*folders).server_address[1]

            def ask(path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], Any]:
                connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
                connection.putrequest(method, path, skip_host=True)
                for name, value in (
                    {"Host": f"127.0.0.1:{port}"} | {k.replace("_", "-"): v for k, v in headers.items()}
                ).items():
                    connection.putheader(name, value)
                connection.endheaders()
                response = connection.getresponse()
                content = response.read()
                connection.close()
                is_json = response.headers.get("Content-Type") == "application/json"
                return response.status, dict(response.headers), json.loads(content) if is_json else content

            return ask

        yield start


@pytest.fixture
def ask(serve: Callable[..., Ask], tmp_path: Path) -> Ask:
    record_run(tmp_path / "run")
    return serve(tmp_path / "run")


def test_the_page_and_its_files_are_served_with_a_policy(ask: Ask) -> None:
    status, headers, content = ask("/")
    assert status == 200
    assert b"<main" in content
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe-inline" not in policy
    assert headers["X-Content-Type-Options"] == "nosniff"
    for name in ("style.css", "app.js", "timeline.js"):
        assert ask(f"/page/{name}")[0] == 200


@pytest.mark.parametrize(
    "path",
    ["/page/../server.py", "/page/%2e%2e/server.py", "/../../etc/passwd", "/page//etc/passwd", "/server.py", "/app.js",
     "/api/../page", "/api/_run", "/api/__init__", "/page/"],
)  # fmt: skip
def test_no_path_leaves_the_files_of_the_page(ask: Ask, path: str) -> None:
    status, _, content = ask(path)
    assert status == 404
    assert "there is no" in content["error"]


def test_a_request_for_another_host_is_refused(ask: Ask) -> None:
    for host in ("evil.example", "evil.example:8800", "127.0.0.1.evil.example", "", "[::"):
        status, _, content = ask("/api/state", Host=host)
        assert status == 421, host
        assert "this server is not" in content["error"]
    assert ask("/api/state", Host="localhost:1")[0] == 200


def test_another_site_cannot_start_a_verification(ask: Ask) -> None:
    assert ask("/api/verify", method="POST")[0] == 403
    assert ask("/api/verify")[2]["state"] == "not started"
    assert ask("/api/state", method="POST", X_Stretto="1")[0] == 404


def test_every_question_of_the_page_has_an_answer(ask: Ask) -> None:
    for question in (
        *(
            "runs",
            "state",
            "curves",
            "notes",
            "recipe",
            "compare",
            "verify",
            "trajectories?update=1",
            "trajectory?id=4",
        ),
        *("group?id=1", "answers?evaluation=1", "answer?evaluation=1&index=0", "timeline?from=0&to=50&now=50"),
    ):
        assert ask(f"/api/{question}")[0] == 200, question
    status, _, content = ask("/api/trajectory?id=999")
    assert (status, content["error"]) == (400, "there is no trajectory 999")
    assert ask("/api/timeline?from=a&to=2")[2]["error"] == "`from` is `a`: give a number"


def test_only_new_updates_are_sent(ask: Ask) -> None:
    assert ask("/api/curves")[2]["updates"]["update"] == [0, 1, 2, 3]
    assert ask("/api/curves?after=2")[2]["updates"]["reward_mean"] == [0.75]


def test_a_damaged_journal_is_named_and_the_other_runs_are_shown(serve: Callable[..., Ask], tmp_path: Path) -> None:
    record_run(tmp_path / "good")
    shutil.copytree(tmp_path / "good", tmp_path / "bad")
    journal = tmp_path / "bad" / "journal.sqlite"
    content = bytearray(journal.read_bytes())
    content[4096:40960] = b"\xff" * (40960 - 4096)
    journal.write_bytes(content)
    ask = serve(tmp_path / "good", tmp_path / "bad")
    assert ask("/api/state?run=0")[0] == 200
    status, _, content = ask("/api/state?run=1")
    assert status == 503
    assert str(journal) in content["error"]


def test_values_that_make_no_sense_are_an_error_in_words(serve: Callable[..., Ask], tmp_path: Path) -> None:
    record_run(tmp_path)
    with sqlite3.connect(tmp_path / "journal.sqlite") as db:
        db.execute("UPDATE groups SET prompt_text = x'00ff' WHERE group_id = 1")
        db.execute("UPDATE updates SET metrics = 'no json' WHERE update_id = 1")
    ask = serve(tmp_path)
    for question in ("group?id=1", "curves"):
        status, _, content = ask(f"/api/{question}")
        assert status == 503, content
        assert "journal" in content["error"]


def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    record_run(tmp_path)
    first = ViewServer(Api(open_runs([tmp_path])), "127.0.0.1", 0)
    port = first.server_address[1]
    with pytest.raises(RunError, match=rf"port {port} of `127.0.0.1` is taken .* `--port 0`"):
        ViewServer(Api(open_runs([tmp_path])), "127.0.0.1", port)
    with pytest.raises(RunError, match=r"`--host 203.0.113.9` .* cannot be used"):
        ViewServer(Api(open_runs([tmp_path])), "203.0.113.9", 0)
    first.server_close()
