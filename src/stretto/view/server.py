"""Serves the page and its data over HTTP, on the loopback interface unless asked otherwise.

Safety, because what a model wrote is shown, and because any page of a browser may call a port of its machine:

- The only files are those of the page, read at the start: no path of a request reaches the file system.
- A request must name this server as its host, so that a name that somebody points here (DNS rebinding) is refused.
- The page may load nothing from elsewhere and run no inline script (Content-Security-Policy). No other origin may read
  an answer, and no other site may start a verification.
- Journals are opened to be read alone.
"""

from __future__ import annotations

import errno
import gzip
import ipaddress
import json
import logging
import socket
from collections.abc import Callable, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from stretto.errors import JournalError, RunError, StrettoError
from stretto.view.api import Api

log = logging.getLogger(__name__)

KINDS = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
COMPRESS_FROM = 4_096  # bytes
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")


def page_files() -> dict[str, bytes]:
    """Returns the files of the page by name."""
    folder = files("stretto.view") / "page"
    return {each.name: each.read_bytes() for each in folder.iterdir() if each.name.endswith(tuple(KINDS))}


class ViewServer(ThreadingHTTPServer):
    """The server of one page. Raises `RunError` if its address cannot be used."""

    daemon_threads = True

    def __init__(self, api: Api, host: str, port: int) -> None:
        self.api = api
        self.pages = page_files()
        self.host_names = _host_names(host)
        if ":" in host:
            self.address_family = socket.AF_INET6
        try:
            super().__init__((host, port), _Handler)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise RunError(
                    f"port {port} of `{host}` is taken by another program: give another `--port`, or `--port 0` for "
                    "any that is free"
                ) from error
            raise RunError(f"`--host {host}` and `--port {port}` cannot be used: {error.strerror or error}") from error
        except OverflowError as error:
            raise RunError(f"`--port {port}` is no port: give a number from 0 to 65535") from error

    @property
    def url(self) -> str:
        """The address of the page."""
        host, port = str(self.server_address[0]), self.server_address[1]
        shown = "127.0.0.1" if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
        return f"http://{shown}:{port}/"

    def server_close(self) -> None:
        super().server_close()
        self.api.close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that goes away is no error."""
        log.debug("a request of %s failed", client_address, exc_info=True)


def _host_names(host: str) -> frozenset[str] | None:
    """The names by which a request may call this server; None: any, if it listens on every address."""
    if host in ("0.0.0.0", "::", ""):
        return None
    return frozenset({host.lower(), *LOOPBACK_NAMES}) if _is_loopback(host) else frozenset({host.lower()})


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


class _Handler(BaseHTTPRequestHandler):
    """One connection."""

    server: ViewServer
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "stretto", ""
    timeout = 60.0

    def do_GET(self) -> None:
        if not self._is_for_us():
            return
        address = urlsplit(self.path)
        if address.path.startswith("/api/"):
            self._answer(address.path.removeprefix("/api/"), dict(parse_qsl(address.query)))
            return
        name = "index.html" if address.path == "/" else address.path.removeprefix("/page/")
        content = self.server.pages.get(name)
        if content is None or (address.path != "/" and not address.path.startswith("/page/")):
            self._send_json({"error": f"there is no `{address.path}`"}, HTTPStatus.NOT_FOUND)
            return
        self._send(content, KINDS[name[name.rindex(".") :]])

    do_HEAD = do_GET  # noqa: N815

    def do_POST(self) -> None:
        if not self._is_for_us():
            return
        if self.headers.get("X-Stretto") != "1":  # another site's page cannot send this without asking first
            self._send_json({"error": "this needs the header `X-Stretto: 1`"}, HTTPStatus.FORBIDDEN)
            return
        address = urlsplit(self.path)
        if address.path != "/api/verify":
            self._send_json({"error": f"there is no `{address.path}`"}, HTTPStatus.NOT_FOUND)
            return
        self._guarded(lambda: self.server.api.start_verification(dict(parse_qsl(address.query))))

    def _is_for_us(self) -> bool:
        """Tells if the request names this server as its host; refuses it if not."""
        names = self.server.host_names
        try:
            named = urlsplit(f"//{self.headers.get('Host', '')}").hostname or ""
        except ValueError:
            named = ""
        if names is None or named.lower() in names:
            return True
        self.close_connection = True
        self._send_json(
            {"error": f"this server is not `{named}`: open it by its own address"}, HTTPStatus.MISDIRECTED_REQUEST
        )
        return False

    def _answer(self, name: str, parameters: Mapping[str, str]) -> None:
        self._guarded(lambda: self.server.api.answer(name, parameters))

    def _guarded(self, answer: Callable[[], Any]) -> None:
        """Sends an answer, or what is wrong in words: the page shows it."""
        try:
            content = encoded(answer())
        except JournalError as error:
            self._send_json({"error": str(error), "kind": "journal"}, HTTPStatus.SERVICE_UNAVAILABLE)
        except StrettoError as error:
            self._send_json({"error": str(error), "kind": "request"}, HTTPStatus.BAD_REQUEST)
        except LookupError:
            self._send_json({"error": f"there is no `{urlsplit(self.path).path}`"}, HTTPStatus.NOT_FOUND)
        except OSError as error:
            self._send_json({"error": str(error), "kind": "journal"}, HTTPStatus.SERVICE_UNAVAILABLE)
        except (TypeError, ValueError) as error:  # a value of another type, or a NaN
            words = f"the journal is damaged: it has values that make no sense ({error})"
            self._send_json({"error": words, "kind": "journal"}, HTTPStatus.SERVICE_UNAVAILABLE)
        else:
            self._send(content, "application/json")

    def _send_json(self, value: Any, status: HTTPStatus = HTTPStatus.OK) -> None:
        self._send(encoded(value), "application/json", status)

    def _send(self, content: bytes, kind: str, status: HTTPStatus = HTTPStatus.OK) -> None:
        self.send_response(status)
        if (
            len(content) >= COMPRESS_FROM
            and self.server.host_names is None
            and "gzip" in (self.headers.get("Accept-Encoding") or "")
        ):  # over a network; on this machine it would only cost time
            content = gzip.compress(content, compresslevel=3)
            self.send_header("Content-Encoding", "gzip")
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Content-Security-Policy", POLICY)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        log.debug(format, *args)


def encoded(value: Any) -> bytes:
    """Returns JSON. Text of models goes in as it is: the page never makes markup of it."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False, ensure_ascii=True).encode()
