"""The part of Google Cloud Storage's JSON API that reads a repository, on the files of a folder."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

BUCKET = "bucket"


class _Handler(BaseHTTPRequestHandler):
    folder: Path

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        bucket = f"/storage/v1/b/{BUCKET}/o"
        if url.path == bucket:
            self._json(200, self._listing(query.get("prefix", ""), query.get("delimiter", "")))
            return
        path = url.path.removeprefix("/download")
        name = unquote(path.removeprefix(bucket).removeprefix("/"))
        file = self.folder / name
        if not path.startswith(bucket) or not file.is_file():
            self._json(404, {"error": {"code": 404, "message": f"{name}: not found"}})
        elif query.get("alt") == "media":
            self._media(file.read_bytes())
        else:
            self._json(200, self._item(name))

    def _listing(self, prefix: str, delimiter: str) -> dict[str, Any]:
        files = (p for p in sorted(self.folder.rglob("*")) if p.is_file())
        names = [str(p.relative_to(self.folder)) for p in files]
        items, prefixes = [], set()
        for name in names:
            rest = name.removeprefix(prefix)
            if not name.startswith(prefix):
                continue
            if delimiter and delimiter in rest:
                prefixes.add(prefix + rest.partition(delimiter)[0] + delimiter)
            else:
                items.append(self._item(name))
        return {"kind": "storage#objects", "items": items, "prefixes": sorted(prefixes)}

    def _item(self, name: str) -> dict[str, Any]:
        return {
            "kind": "storage#object",
            "name": name,
            "bucket": BUCKET,
            "generation": "1",
            "metageneration": "1",
            "size": str((self.folder / name).stat().st_size),
            "updated": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        }

    def _media(self, data: bytes) -> None:
        wanted, status, first = self.headers.get("Range"), 200, 0
        total = len(data)
        if wanted is not None:
            start, _, end = wanted.removeprefix("bytes=").partition("-")
            first = int(start)
            data, status = data[first : int(end) + 1 if end else None], 206
        self.send_response(status)
        if status == 206:
            self.send_header("Content-Range", f"bytes {first}-{first + len(data) - 1}/{total}")
        self.send_header("Content-Length", str(len(data)))
        self.send_header("x-goog-generation", "1")
        self.end_headers()
        self.wfile.write(data)

    def _json(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_args: Any) -> None:
        pass


@contextmanager
def gcs_server(folder: Path) -> Iterator[str]:
    """The URL of a server of bucket ``bucket``, whose objects are the files of ``folder``.

    A process: PyArrow keeps Python's lock during one of its requests."""
    command = [sys.executable, "-m", "tests.support.gcs_server", str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.kill()
        process.communicate()


if __name__ == "__main__":
    handler: Any = type("Handler", (_Handler,), {"folder": Path(sys.argv[1])})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    print(f"http://127.0.0.1:{server.server_address[1]}", flush=True)
    server.serve_forever()
