"""An S3-compatible server (moto) behind a relay that can cut, slow down and refuse."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from moto.server import ThreadedMotoServer
from pyarrow import fs

BUCKET = "bucket"
EXPIRED = "ExpiredToken", "The provided token has expired."
DENIED = "AccessDenied", "Access Denied"


class FaultyRelay:
    """A port that forwards to another one.

    ``cut_after``: bytes of answers after which a connection is closed, for as many connections as
    ``cuts``; with ``stall_after`` it passes nothing more instead. ``budget``: bytes of answers after which
    all connections are closed. ``bytes_per_s``: of all connections. ``refusal``: code and message of the S3
    error that answers each request."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.cut_after: int | None = None
        self.stall_after: int | None = None
        self.cuts = 0
        self.budget: int | None = None
        self.bytes_per_s: float | None = None
        self.refusal: tuple[str, str] | None = None
        self.passed = 0
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with suppress(OSError), client:
            if self.refusal is not None:
                self._refuse(client, *self.refusal)
                return
            with socket.create_connection(("127.0.0.1", self._to)) as server:
                forward = threading.Thread(target=self._forward, args=(client, server), daemon=True)
                forward.start()
                self._answer(server, client)
                client.shutdown(socket.SHUT_RDWR)

    def _refuse(self, client: socket.socket, code: str, message: str) -> None:
        client.recv(65536)
        body = (
            f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{message}</Message></Error>"
        )
        head = f"HTTP/1.1 403 Forbidden\r\nContent-Type: application/xml\r\nContent-Length: {len(body)}"
        client.sendall(f"{head}\r\nConnection: close\r\n\r\n{body}".encode())

    def _forward(self, client: socket.socket, server: socket.socket) -> None:
        with suppress(OSError):
            while data := client.recv(65536):
                server.sendall(data)
            server.shutdown(socket.SHUT_WR)

    def _answer(self, server: socket.socket, client: socket.socket) -> None:
        sent = 0
        while data := server.recv(16384):
            if (rate := self.bytes_per_s) is not None:
                with self._lock:
                    time.sleep(len(data) / rate)
            sent += len(data)
            with self._lock:
                self.passed += len(data)
                if self.budget is not None:
                    self.budget -= len(data)
                    if self.budget < 0:
                        return
                if self.cut_after is not None and sent > self.cut_after and self.cuts:
                    self.cuts -= 1
                    return
                stalls = self.stall_after is not None and sent > self.stall_after and self.cuts > 0
                self.cuts -= stalls
            if stalls:
                client.settimeout(60)
                client.recv(1)  # until the client closes it
                return
            client.sendall(data)


class ObjectStore:
    """A bucket of an S3 server; clients use ``environment``, and go through ``relay``."""

    def __init__(self, port: int) -> None:
        self.relay = FaultyRelay(port)
        self._fs = fs.S3FileSystem(
            access_key="test",
            secret_key="test",
            region="us-east-1",
            endpoint_override=f"http://127.0.0.1:{port}",
            allow_bucket_creation=True,
            allow_bucket_deletion=True,
        )
        self._fs.create_dir(BUCKET)

    @property
    def environment(self) -> Mapping[str, str]:
        return {
            "AWS_ENDPOINT_URL": self.relay.url,
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test-secret-key",
            "AWS_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def upload(self, folder: Path, prefix: str) -> str:
        """Copy a folder's files to the bucket; return the URI."""
        for path in sorted(p for p in folder.rglob("*") if p.is_file()):
            self.write(f"{prefix}/{path.relative_to(folder)}", path.read_bytes())
        return f"s3://{BUCKET}/{prefix}"

    def write(self, path: str, data: bytes) -> None:
        with self._fs.open_output_stream(f"{BUCKET}/{path}") as file:
            file.write(data)

    def read(self, path: str) -> bytes:
        with self._fs.open_input_stream(f"{BUCKET}/{path}") as file:
            return bytes(file.read())

    def remove(self, path: str) -> None:
        self._fs.delete_file(f"{BUCKET}/{path}")

    def files(self, prefix: str) -> list[str]:
        found = self._fs.get_file_info(
            fs.FileSelector(f"{BUCKET}/{prefix}", allow_not_found=True, recursive=True)
        )
        return sorted(info.path.partition("/")[2] for info in found if info.is_file)


@contextmanager
def object_store() -> Iterator[ObjectStore]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    _, port = server.get_host_and_port()
    store = ObjectStore(port)
    try:
        yield store
    finally:
        store.relay.close()
        server.stop()
