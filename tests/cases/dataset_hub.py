"""A stand-in for the data sets of the Hugging Face hub: it serves files of repositories by their commits."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import AbstractContextManager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

from hub_server import served

Files = Mapping[str, bytes]


class DatasetHub(ThreadingHTTPServer):
    """The repositories of a hub. `commit` adds to them; the newest commit of one is `main`."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories: dict[str, dict[str, Files]] = {}  # name -> commit -> files

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def commit(self, name: str, files: Files) -> str:
        """Adds a commit and returns its hash."""
        sha = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
        self.repositories.setdefault(name, {})[sha] = files
        return sha


class _Handler(BaseHTTPRequestHandler):
    server: DatasetHub

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = [unquote(part) for part in urlsplit(self.path).path.split("/")[1:]]
        match path:
            case ["datasets", owner, name, "resolve", revision, *parts]:
                self._file(f"{owner}/{name}", revision, "/".join(parts))
            case ["api", "datasets", owner, name]:
                self._info(f"{owner}/{name}", "main")
            case ["api", "datasets", owner, name, "revision", revision]:
                self._info(f"{owner}/{name}", revision)
            case ["api", "datasets", owner, name, "tree", revision, *parts]:
                self._tree(f"{owner}/{name}", revision, "/".join(parts))
            case _:
                self._refuse("not found", "")

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
        match [unquote(part) for part in urlsplit(self.path).path.split("/")[1:]]:
            case ["api", "datasets", owner, name, "paths-info", revision]:
                found = self._commit(f"{owner}/{name}", revision)
                asked = json.loads(body)["paths"] if body.startswith("{") else parse_qs(body)["paths"]
                if found is not None:
                    self._answer([_entry(path, found[1][path]) for path in asked if path in found[1]])
            case _:
                self._refuse("not found", "")

    def _commit(self, name: str, revision: str) -> tuple[str, Files] | None:
        commits = self.server.repositories.get(name)
        if commits is None:
            return self._refuse("Repository not found", "RepoNotFound")
        sha = list(commits)[-1] if revision == "main" else revision
        if sha not in commits:
            return self._refuse("Revision not found", "RevisionNotFound")
        return sha, commits[sha]

    def _file(self, name: str, revision: str, path: str) -> None:
        found = self._commit(name, revision)
        if found is None:
            return
        sha, files = found
        if path not in files:
            self._refuse("Entry not found", "EntryNotFound", {"X-Repo-Commit": sha})
            return
        etag = f'"{hashlib.sha1(files[path]).hexdigest()}"'
        self._send(200, files[path], {"X-Repo-Commit": sha, "ETag": etag, "Accept-Ranges": "bytes"})

    def _info(self, name: str, revision: str) -> None:
        if (found := self._commit(name, revision)) is not None:
            sha, files = found
            siblings = [{"rfilename": path} for path in files]
            self._answer({"_id": "1", "id": name, "sha": sha, "siblings": siblings, "private": False, "tags": []})

    def _tree(self, name: str, revision: str, folder: str) -> None:
        if (found := self._commit(name, revision)) is None:
            return
        prefix = f"{folder}/" if folder else ""
        inside = {path: data for path, data in found[1].items() if path.startswith(prefix)}
        recursive = parse_qs(urlsplit(self.path).query).get("recursive", ["false"])[0].lower() == "true"
        entries = [_entry(path, data) for path, data in inside.items() if recursive or "/" not in path[len(prefix) :]]
        folders = {path[: path.index("/", len(prefix))] for path in inside if "/" in path[len(prefix) :]}
        entries += [{"type": "directory", "path": each, "size": 0, "oid": "0" * 40} for each in sorted(folders)]
        if entries:
            self._answer(entries)
        else:
            self._refuse("Entry not found", "EntryNotFound")

    def _answer(self, value: object) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _refuse(self, said: str, code: str, headers: Mapping[str, str] | None = None) -> None:
        self._send(404, json.dumps({"error": said}).encode(), {"X-Error-Code": code, **(headers or {})})

    def _send(self, status: int, data: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


def _entry(path: str, data: bytes) -> dict[str, object]:
    return {"type": "file", "path": path, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}


def served_datasets() -> AbstractContextManager[DatasetHub]:
    """Serves a hub from a thread."""
    return served(DatasetHub())
