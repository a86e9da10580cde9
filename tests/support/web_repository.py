"""A web server of files that honours ranges, as nginx does, with credentials and faults at will."""

from __future__ import annotations

import base64
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


class WebRepository:
    """``status``: of each answer, if set. ``login``: user and password that are required.

    ``ranges``: whether range requests are honoured. ``reads``: paths that were read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.status: int | None = None
        self.login: tuple[str, str] | None = None
        self.ranges = True
        self.reads: list[str] = []
        self.seen: list[str | None] = []
        handler: Any = type("Handler", (_Handler,), {"web": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.port: int = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def tls(self, context: Any) -> None:
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    web: WebRepository

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        web = self.web
        web.reads.append(self.path)
        web.seen.append(self.headers.get("Authorization"))
        if web.login is not None:
            expected = "Basic " + base64.b64encode(":".join(web.login).encode()).decode()
            if self.headers.get("Authorization") != expected:
                self._send(401, b"")
                return
        if web.status is not None:
            self._send(web.status, b"")
            return
        file = web.folder / self.path.lstrip("/")
        if not file.is_file():
            self._send(404, b"")
            return
        data = file.read_bytes()
        wanted = self.headers.get("Range")
        if wanted is None or not web.ranges:
            self._send(200, data)
            return
        first, last = map(int, wanted.removeprefix("bytes=").split("-"))
        self._send(206, data[first : last + 1])

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_args: Any) -> None:
        pass


@contextmanager
def web_repository(folder: Path) -> Iterator[WebRepository]:
    server = WebRepository(folder)
    try:
        yield server
    finally:
        server.close()
