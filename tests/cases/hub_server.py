"""A stand-in for the Hugging Face hub: it takes one model repository, and keeps what is committed to it."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TypeVar

TOKEN = "hf_" + "a" * 34


class Hub(ThreadingHTTPServer):
    """What the server was told."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.made: dict[str, object] = {}  # the request that made the repository
        self.files: dict[str, bytes] = {}  # that were committed
        self.objects: dict[str, bytes] = {}  # large files by their digest

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        if self.path == "/api/whoami-v2":
            known = self.headers.get("Authorization") == f"Bearer {TOKEN}"
            self._answer({"name": "me", "type": "user"} if known else {"error": "Invalid credentials"}, known)
        else:
            self._answer({"error": "not found"}, ok=False, status=404)

    def do_PUT(self) -> None:
        self.server.objects[self.path.rpartition("/")[2]] = self._body()
        self._answer({})

    def do_POST(self) -> None:
        body = self._body()
        match self.path.split("/"):
            case ["", "api", "repos", "create"]:
                self.server.made = json.loads(body)
                self._answer({"url": f"{self.server.url}/me/policy", "name": "me/policy"})
            case ["", "api", "validate-yaml"]:
                self._answer({"errors": [], "warnings": []})
            case [*_, "preupload", "main"]:
                files = json.loads(body)["files"]
                large = [{"path": f["path"], "uploadMode": _mode(f["path"]), "shouldIgnore": False} for f in files]
                self._answer({"files": large})
            case [*_, "objects", "batch"]:
                self._answer({"transfer": "basic", "objects": [self._action(o) for o in json.loads(body)["objects"]]})
            case [*_, "commit", "main"]:
                for line in map(json.loads, body.splitlines()):
                    if line["key"] == "file":
                        self.server.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
                    elif line["key"] == "lfsFile":
                        self.server.files[line["value"]["path"]] = self.server.objects[line["value"]["oid"]]
                self._answer({"commitUrl": f"{self.server.url}/me/policy/commit/1", "commitOid": "1" * 40})
            case _:
                self._answer({"error": f"not found: {self.path}"}, ok=False, status=404)

    def _action(self, asked: dict[str, object]) -> dict[str, object]:
        return {**asked, "actions": {"upload": {"href": f"{self.server.url}/objects/{asked['oid']}"}}}

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _answer(self, value: object, ok: bool = True, status: int = 401) -> None:
        data = json.dumps(value).encode()
        self.send_response(200 if ok else status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


def _mode(path: str) -> str:
    return "lfs" if path.endswith(".safetensors") else "regular"


Server = TypeVar("Server", bound=ThreadingHTTPServer)


@contextmanager
def served(server: Server) -> Iterator[Server]:
    """Serves from a thread."""
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def served_hub() -> AbstractContextManager[Hub]:
    """Serves a hub from a thread."""
    return served(Hub())
