"""Redis servers in use, their idle connections, and their health.

A cluster's server that is unreachable, or timed out several times in a row, gets no more commands: reads
skip its rows immediately instead of waiting for a timeout each time. Until it responds again, a background
thread, not a request, probes it and asks the cluster for the current owners of its slots."""

from __future__ import annotations

import logging
import select
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from redis.exceptions import RedisError
from redis.exceptions import TimeoutError as RedisTimeout

from hps.config.store_settings import RedisSettings
from hps.periodic import PeriodicThread
from hps.tiers.redis.connection import (
    NAME,
    Address,
    RedisCommand,
    RedisConnection,
    RedisConnectionFactory,
    translate_redis_error,
)
from hps.tiers.redis.topology import RedisTopology

log = logging.getLogger(__name__)

_PROBE_EVERY_S = 0.25
# If a call had less than this share of the guard's deadline, its timeout says nothing about the server.
_FAIR_SHARE = 0.25


@dataclass(slots=True, eq=False)
class RedisServer:
    """A server and its idle connections. ``problem``: why it gets no commands; None if healthy."""

    address: Address
    idle: deque[RedisConnection] = field(default_factory=deque)
    scripts_loaded: bool = True  # until the server reports them missing
    timeouts: int = 0
    problem: RedisError | None = None

    def drop_idle(self) -> None:
        while self.idle:
            with suppress(IndexError):  # another thread took the last one
                self.idle.pop().disconnect()


@dataclass(slots=True, eq=False)
class ServerBatch:
    """The commands of one attempt that go to one server. ``clean``: every reply was read."""

    server: RedisServer
    commands: list[RedisCommand]
    connection: RedisConnection | None = None
    clean: bool = False


def readable_servers(batches: Sequence[ServerBatch], until: float) -> list[ServerBatch]:
    """Wait until a server has sent bytes; return the batches of those that have; empty after a timeout."""
    poll, by_file = select.poll(), {}
    for batch in batches:
        assert batch.connection is not None
        if batch.connection.has_bytes:
            return [batch]
        by_file[batch.connection.fileno()] = batch
        poll.register(batch.connection.fileno(), select.POLLIN)
    left_ms = max(0.0, until - time.monotonic()) * 1e3
    return [by_file[file] for file, _ in poll.poll(left_ms)]


class RedisServers:
    """The servers in use. Thread-safe. Only a cluster's servers are skipped for a problem."""

    def __init__(
        self, settings: RedisSettings, factory: RedisConnectionFactory, topology: RedisTopology
    ) -> None:
        self._factory = factory
        self._topology = topology
        self._skips_servers = settings.mode == "cluster"
        self._connect_s = settings.connect_timeout_ms / 1000
        self._deadline_s = settings.guard.deadline_ms / 1000
        self._timeouts_to_skip = settings.guard.failures_to_open
        self._servers: dict[Address, RedisServer] = {}
        self.losses = 0  # see `RedisClient.losses`
        self._lock = threading.Lock()
        self._closed = False
        self._prober = PeriodicThread(
            self._probe_all, _PROBE_EVERY_S, f"hps-{NAME}-probe", idle_rounds=1
        )

    @property
    def all(self) -> list[RedisServer]:
        return list(self._servers.values())

    def at(self, address: Address) -> RedisServer:
        server = self._servers.get(address)
        if server is None:
            with self._lock:
                server = self._servers.setdefault(address, RedisServer(address))
        return server

    def problem(self, address: Address) -> RedisError | None:
        """Return why the server is skipped; None if it is not."""
        server = self._servers.get(address)
        return server.problem if server is not None else None

    # -- connections ------------------------------------------------------------------------------

    def take(self, server: RedisServer, until: float) -> RedisConnection:
        """Return an idle connection, or open one by ``until``. Failures count against the server's health."""
        while server.idle:
            try:
                connection = server.idle.pop()
            except IndexError:  # another thread took the last one
                break
            if not connection.stale:
                return connection
            connection.disconnect()
        connection = self._factory.to_server(server.address)
        began = time.monotonic()
        try:
            connection.open(until, self._connect_s)
        except RedisError as error:
            connection.disconnect()
            if isinstance(error, RedisTimeout):
                self.record_timeout(server, error, until - began)
            else:
                self._mark_down(server, error)
            raise
        return connection

    def give_back(self, batch: ServerBatch) -> None:
        connection, batch.connection = batch.connection, None
        if connection is None:
            return
        gone = self._closed or self._servers.get(batch.server.address) is not batch.server
        if gone or not batch.clean:
            connection.disconnect()
            return
        batch.server.idle.append(connection)
        if self._closed or self._servers.get(batch.server.address) is not batch.server:
            batch.server.drop_idle()

    def keep_only(self, known: Iterable[Address]) -> None:
        """Drop all servers but ``known``, with their idle connections."""
        with self._lock:
            gone = [self._servers.pop(each) for each in set(self._servers) - set(known)]
        for server in gone:
            server.drop_idle()

    def close(self) -> None:
        """Close idle connections, and stop probing. Idempotent."""
        self._closed = True
        self.keep_only(())
        self._prober.close()

    # -- health -----------------------------------------------------------------------------------

    def record_reply(self, server: RedisServer) -> None:
        if server.timeouts or server.problem is not None:
            server.timeouts, server.problem = 0, None

    def record_timeout(self, server: RedisServer, error: RedisError, had_s: float) -> None:
        """Record a timeout of the server, which had ``had_s`` to answer; skip it after several in a row."""
        if had_s < _FAIR_SHARE * self._deadline_s:
            return
        server.timeouts += 1
        if server.timeouts >= self._timeouts_to_skip:
            self._mark_down(server, error)

    def _mark_down(self, server: RedisServer, problem: RedisError) -> None:
        if not self._skips_servers or server.problem is not None or self._closed:
            return
        with self._lock:
            if self._servers.get(server.address) is not server:
                return
            server.problem = problem
        log.warning(
            "%s; skipping its rows until it responds",
            translate_redis_error(problem, server.address),
        )
        server.drop_idle()
        self._prober.start()

    def _probe_all(self) -> bool:
        """Probe the servers with a problem; return whether any has one still."""
        with suppress(RedisError):
            self._topology.refresh(time.monotonic() + self._connect_s)
            self.keep_only(self._topology.addresses())
        for server in self.all:
            if server.problem is not None:
                self._probe(server)
        return any(server.problem for server in self.all)

    def _probe(self, server: RedisServer) -> None:
        batch = ServerBatch(server, [])
        batch.connection = connection = self._factory.to_server(server.address)
        try:
            connection.open(time.monotonic() + self._connect_s, self._connect_s)
            connection.set_deadline(time.monotonic() + self._deadline_s)
            connection.send_command("PING", check_health=False)
            connection.read_response()
        except RedisError as error:
            server.problem = error
        else:
            batch.clean = True
            self.losses += 1
            self.record_reply(server)
            log.info("%s:%d responds again", *server.address)
        finally:
            self.give_back(batch)
