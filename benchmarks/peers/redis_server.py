"""A real Redis server as a process, for the benchmarks and for tests that need one."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from benchmarks.peers.process import free_ports

PROGRAM = os.environ.get("REDIS_SERVER", "redis-server")
"""Another Redis, or one that speaks its protocol: ``REDIS_SERVER=valkey-server``."""


def missing_requirement() -> str | None:
    """The remedy if Redis is not installed, else None."""
    if shutil.which(PROGRAM):
        return None
    return f"{PROGRAM} is not installed: run `make bench-peers`, or apt-get install redis-server"


class RedisServer:
    """A process on a loopback port that stays the same over restarts.

    ``options`` are those of redis-server without the dashes; ``client``: arguments of its redis-py
    clients."""

    def __init__(
        self,
        folder: Path,
        options: dict[str, Any] | None = None,
        *,
        port: int | None = None,
        client: dict[str, Any] | None = None,
        sentinel: bool = False,
    ) -> None:
        self.port = port or free_ports(1)[0]
        self.folder = folder
        self.options = {"port": self.port, "bind": "127.0.0.1", "save": "", "dir": folder}
        self.options |= {"daemonize": "no", "logfile": folder / f"{self.port}.log"} | (
            options or {}
        )
        self._client = client or {}
        self._sentinel = sentinel
        self._process: subprocess.Popen[bytes] | None = None
        self._command_client: redis.Redis | None = None
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self, timeout_s: float = 60.0) -> RedisServer:
        """Start it. Raises RuntimeError with the server's log when it does not answer."""
        if reason := missing_requirement():
            raise RuntimeError(reason)
        file = self.folder / f"{self.port}.conf"  # a sentinel also keeps its state there
        file.write_text("".join(f"{name} {value}\n" for name, value in self._lines()))
        command = [PROGRAM, str(file), *(["--sentinel"] if self._sentinel else [])]
        self._process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT, cwd=self.folder
        )
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                with self.client() as client:
                    client.ping()
                return self
            except redis.RedisError:
                time.sleep(0.02)
        self.kill()
        log = Path(self.options["logfile"])
        text = log.read_text(errors="replace")[-2000:] if log.exists() else ""
        raise RuntimeError(f"{command} does not answer:\n{text}")

    def _lines(self) -> list[tuple[str, str]]:
        lines = []
        for name, value in self.options.items():
            values = value if isinstance(value, list) else [value]
            lines += [(name, str(v) or '""') for v in values]
        return lines

    def client(self, **arguments: Any) -> redis.Redis:
        """A plain client, which the caller closes."""
        defaults = {"protocol": 2, "retry": Retry(NoBackoff(), 0), "socket_timeout": 60}
        return redis.Redis(port=self.port, **{**defaults, **self._client, **arguments})

    def ask(self, *command: Any) -> Any:
        """Send one command and return its reply, over a connection that is reused."""
        for fresh in (False, True):
            if self._command_client is None:
                self._command_client = self.client()
            try:
                return self._command_client.execute_command(*command)
            except redis.ConnectionError:
                self._close_client()
                if fresh:
                    raise
        return None

    def stop(self) -> None:
        """Stop the process by SIGTERM if it runs, by SIGKILL after 10 s."""
        self._close_client()
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self.kill()
            self._process = None

    def kill(self) -> None:
        """``kill -9``."""
        self._close_client()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _close_client(self) -> None:
        if self._command_client is not None:
            self._command_client.close()
            self._command_client = None

    def restart(self) -> None:
        """Kill and start it; it is empty afterwards, since it saves nothing."""
        self.kill()
        self.start()


@contextmanager
def redis_server(folder: Path, **options: Any) -> Iterator[RedisServer]:
    """A running server until the block ends."""
    server = RedisServer(folder, {k.replace("_", "-"): v for k, v in options.items()})
    try:
        yield server.start()
    finally:
        server.stop()
