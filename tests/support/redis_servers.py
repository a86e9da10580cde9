"""Redis in every form the tests need: one server, six cluster nodes with TLS, sentinels; certificates; and
a proxy that cuts, delays and swallows. Those that many tests share are started once and end with the process.
"""

from __future__ import annotations

import atexit
import os
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers.process import free_ports
from benchmarks.peers.redis_server import PROGRAM, RedisServer
from hps.config.store_settings import RedisSettings, RedisTlsSettings
from tests.support.waiting import until

SERVER_NAME = "redis.test"


def need(*programs: str) -> None:
    """Skip the test where one is missing; fail where ``CI`` is set."""
    for name in programs:
        if shutil.which(name) is None:
            message = f"{name} is not installed: run `make test-services`"
            if os.environ.get("CI"):
                pytest.fail(message)
            pytest.skip(message)


def _folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="hps-redis-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


# -- one server ------------------------------------------------------------------------------------


@cache
def _shared_server() -> RedisServer:
    server = RedisServer(_folder() / "one")
    atexit.register(server.kill)
    return server.start()


def shared_server() -> RedisServer:
    """A running server that other tests use too, with nothing in it."""
    need(PROGRAM)
    server = _shared_server()
    server.ask("FLUSHALL")
    return server


def settings(server: RedisServer | Sequence[RedisServer], **given: Any) -> RedisSettings:
    """Client settings for the server, with long timeouts."""
    servers = [server] if isinstance(server, RedisServer) else list(server)
    base: dict[str, Any] = {"addresses": [each.address for each in servers], "timeout_ms": 20_000}
    return RedisSettings(**{**base, **given})


# -- certificates ----------------------------------------------------------------------------------


class Certificates:
    """An authority of our own, and certificates by it, made with openssl."""

    def __init__(self, folder: Path) -> None:
        need("openssl")
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.ca = folder / "ca.pem"
        self._run("req", "-x509", *_KEY, "-keyout", "ca.key", "-out", "ca.pem", "-days", "30",
                  "-subj", "/CN=hps test", "-addext", "basicConstraints=critical,CA:TRUE",
                  "-addext", "keyUsage=critical,keyCertSign,cRLSign")  # fmt: skip

    def make(
        self, name: str, *, days: int = 30, host: str = SERVER_NAME, key: Path | None = None
    ) -> tuple[Path, Path]:
        """The files of a certificate and its ``key``, by default a new one; negative ``days``: it has
        expired."""
        chosen = ["-key", str(key)] if key else [*_KEY, "-keyout", f"{name}.key"]
        self._run("req", "-new", *chosen, "-out", f"{name}.csr", "-subj", f"/CN={name}")
        extensions = self.folder / f"{name}.ext"
        extensions.write_text(f"subjectAltName=DNS:{host}\n")
        dates: list[str] = ["-days", str(days)]
        if days < 0:
            dates = ["-not_before", "20200101000000Z", "-not_after", "20200201000000Z"]
        try:
            self._sign(name, extensions, dates)
        except subprocess.CalledProcessError:  # an older openssl knows no dates, but negative days
            self._sign(name, extensions, ["-days", str(days)])
        return self.folder / f"{name}.pem", key or self.folder / f"{name}.key"

    def _sign(self, name: str, extensions: Path, dates: list[str]) -> None:
        self._run("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key",
                  "-CAcreateserial", "-out", f"{name}.pem", "-extfile", str(extensions), *dates)  # fmt: skip

    def _run(self, *arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=self.folder, check=True, capture_output=True)

    def server_options(self, name: str = "server", **given: Any) -> dict[str, Any]:
        """redis-server's options for a port with TLS that asks for a client's certificate."""
        certificate, key = self.make(name, **given)
        return {"tls-cert-file": certificate, "tls-key-file": key, "tls-ca-cert-file": self.ca}

    def client_settings(self, **given: Any) -> RedisTlsSettings:
        certificate, key = self.make("client")
        mine = {"ca": self.ca, "certificate": certificate, "key": key, "server_name": SERVER_NAME}
        return RedisTlsSettings(**{**mine, **given})

    def redis_py(self) -> dict[str, Any]:
        """Arguments of redis-py for the test's administrative connections."""
        certificate, key = self.make("admin")
        return {
            "ssl": True, "ssl_ca_certs": str(self.ca), "ssl_certfile": str(certificate),
            "ssl_keyfile": str(key), "ssl_check_hostname": False,
        }  # fmt: skip


_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


@cache
def certificates() -> Certificates:
    return Certificates(_folder() / "certificates")


# -- a cluster -------------------------------------------------------------------------------------


class Cluster:
    """Three primaries with a replica each. TLS on every connection, a user with a password."""

    USER, PASSWORD = "hps", "a-password-of-the-tests"

    def __init__(self, folder: Path, *, failover: bool = False) -> None:
        """With ``failover`` a primary that does not answer for a second is replaced, on a busy machine as
        well; without, never."""
        need(PROGRAM)
        made = certificates()
        options: dict[str, Any] = {
            "port": 0, "tls-cluster": "yes", "tls-replication": "yes", "cluster-enabled": "yes",
            "cluster-node-timeout": 1000 if failover else 5000,
            "cluster-replica-no-failover": "no" if failover else "yes", "repl-diskless-sync-delay": 0,
            "cluster-require-full-coverage": "no",
            "repl-ping-replica-period": 1,  # a replica is named once its primary has said something
            "user": f"{self.USER} on >{self.PASSWORD} ~hps* +@all",
        }  # fmt: skip
        self._client = made.redis_py()
        options |= made.server_options()
        self.tls = made.client_settings()
        self.servers: list[RedisServer] = []
        for _ in range(6):
            (port,) = free_ports(1)
            mine = options | {"tls-port": port, "cluster-config-file": f"{port}.nodes"}
            server = RedisServer(folder / str(port), mine, port=port, client=self._client)
            self.servers.append(server)

    def start(self) -> Cluster:
        for server in self.servers:
            server.start()
        for server in self.servers:
            server.ask("CLUSTER", "MEET", "127.0.0.1", self.servers[0].port)
        shares = [(0, 5460), (5461, 10922), (10923, 16383)]
        for server, (first, last) in zip(self.servers, shares, strict=False):
            server.ask("CLUSTER", "ADDSLOTS", *range(first, last + 1))
        until(lambda: all(len(self._known(each)) == 6 for each in self.servers))
        for primary, replica in zip(self.servers[:3], self.servers[3:], strict=True):
            replica.ask("CLUSTER", "REPLICATE", primary.ask("CLUSTER", "MYID"))
        until(self.complete)
        return self

    def complete(self) -> bool:
        """Every node knows three primaries with a replica each, and all are in step."""
        for server in self.servers:
            if b"cluster_state:ok" not in _bytes(server.ask("CLUSTER", "INFO")):
                return False
            shares = server.ask("CLUSTER", "SLOTS")
            if len({share[2][1] for share in shares}) != 3 or any(len(s) != 4 for s in shares):
                return False
            role = server.ask("ROLE")
            if _bytes(role[0]) == b"slave" and _bytes(role[3]) != b"connected":
                return False
        return True

    def _known(self, server: RedisServer) -> list[bytes]:
        return [line for line in _bytes(server.ask("CLUSTER", "NODES")).splitlines() if line]

    def settings(self, **given: Any) -> RedisSettings:
        mine = {
            "mode": "cluster", "tls": self.tls, "username": self.USER,
            "password": self.PASSWORD,
        }  # fmt: skip
        return settings(self.servers[:2], **{**mine, **given})

    def holder(self, key: bytes) -> RedisServer:
        """The primary of a key's slot, as any living node has it."""
        for server in self.servers:
            try:
                slot = server.ask("CLUSTER", "KEYSLOT", key)
                for first, last, primary, *_ in server.ask("CLUSTER", "SLOTS"):
                    if first <= slot <= last:
                        return next(each for each in self.servers if each.port == primary[1])
            except Exception:
                continue
        raise AssertionError("no node answers")

    def flush(self) -> None:
        for server in self.servers:
            if _bytes(server.ask("ROLE")[0]) == b"master":
                server.ask("FLUSHALL")

    def kill(self) -> None:
        for server in self.servers:
            server.kill()


@cache
def _shared_cluster() -> Cluster:
    cluster = Cluster(_folder() / "cluster")
    atexit.register(cluster.kill)
    return cluster.start()


def shared_cluster() -> Cluster:
    """A running cluster that other tests use too, with nothing in it. Leave its nodes alone."""
    need(PROGRAM, "openssl")
    cluster = _shared_cluster()
    cluster.flush()
    return cluster


def _bytes(value: Any) -> bytes:
    if isinstance(value, dict):
        return "\n".join(f"{k}:{v}" for k, v in value.items()).encode()
    return value if isinstance(value, bytes) else str(value).encode()


# -- a server that sentinels watch ------------------------------------------------------------------


class Watched:
    """A primary, a replica and three sentinels, which have a password of their own."""

    SERVICE, PASSWORD = "rows", "a-password-of-the-sentinels"

    def __init__(self, folder: Path) -> None:
        need(PROGRAM)
        self.primary = RedisServer(folder / "primary", {"repl-diskless-sync-delay": 0})
        to = f"127.0.0.1 {self.primary.port}"
        self.replica = RedisServer(
            folder / "replica", {"replicaof": to, "repl-diskless-sync-delay": 0}
        )
        name = self.SERVICE
        self.sentinels = [
            RedisServer(
                folder / f"sentinel-{i}",
                {
                    "sentinel": [
                        f"monitor {name} {to} 2",
                        f"down-after-milliseconds {name} 1500",
                        f"failover-timeout {name} 3000",
                    ],
                    "requirepass": self.PASSWORD,
                    "sentinel sentinel-pass": self.PASSWORD,
                },
                client={"password": self.PASSWORD},
                sentinel=True,
            )
            for i in range(3)
        ]

    def start(self) -> Watched:
        for each in (self.primary, self.replica, *self.sentinels):
            each.start()
        until(lambda: _bytes(self.replica.ask("ROLE")[3]) == b"connected")
        until(lambda: all(self._ready(each) for each in self.sentinels))
        return self

    def _ready(self, sentinel: RedisServer) -> bool:
        flat = sentinel.ask("SENTINEL", "MASTER", self.SERVICE)
        fields = dict(zip(flat[::2], flat[1::2], strict=True))
        return (fields[b"num-slaves"], fields[b"num-other-sentinels"]) == (b"1", b"2")

    def settings(self, **given: Any) -> RedisSettings:
        mine = {"mode": "sentinel", "sentinel_service": self.SERVICE}
        return settings(self.sentinels, **{**mine, "sentinel_password": self.PASSWORD, **given})

    def kill(self) -> None:
        for each in (*self.sentinels, self.replica, self.primary):
            each.kill()


# -- a proxy ---------------------------------------------------------------------------------------


class Proxy:
    """Passes bytes on between clients and a server, and misbehaves on request. ``delay_s``: of every piece
    from the server. ``cut_after``: from the server's next bytes, this many still arrive, then all
    connections end. ``silent``: the server's bytes are held back."""

    def __init__(self, server: RedisServer) -> None:
        self._to = ("127.0.0.1", server.port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.delay_s = 0.0
        self.cut_after: int | None = None
        self.silent = False
        self._open: list[socket.socket] = []
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(self._to)
            except OSError:
                client.close()
                continue
            for each in (client, server):
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._open += [client, server]
            for work in (self._up, self._down):
                threading.Thread(target=work, args=(client, server), daemon=True).start()

    def _up(self, client: socket.socket, server: socket.socket) -> None:
        self._pump(client, server, lambda data: data)

    def _down(self, client: socket.socket, server: socket.socket) -> None:
        def spoiled(data: bytes) -> bytes:
            while self.silent:
                time.sleep(0.005)
            if self.delay_s:
                time.sleep(self.delay_s)
            if self.cut_after is None:
                return data
            kept, self.cut_after = data[: self.cut_after], self.cut_after - len(data)
            return kept

        self._pump(server, client, spoiled)

    def _pump(self, a: socket.socket, b: socket.socket, change: Callable[[bytes], bytes]) -> None:
        with suppress(OSError):
            while data := a.recv(65536):
                b.sendall(change(data))
                if self.cut_after is not None and self.cut_after <= 0:
                    self.cut_after = None
                    break
        for each in (a, b):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def close(self) -> None:
        self.silent = False
        self._listener.close()
        with self._lock:
            for each in self._open:
                each.close()
