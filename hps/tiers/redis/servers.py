"""Redis servers in use, their idle connections, and their health.

A cluster's server that is unreachable, or was late several times in a row, gets no more commands: reads
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

from redis.exceptions import RedisError
from redis.exceptions import TimeoutError as Late

from hps.config.store_settings import RedisSettings
from hps.errors import Unavailable
from hps.threads import BoundedThreadPool
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


class RedisServer:
    """A server and its idle connections. ``problem``: why it gets no commands; None if healthy."""

    __slots__ = ("address", "idle", "late", "problem", "scripts_loaded")

    def __init__(self, address: Address) -> None:
        self.address = address
        self.idle: deque[RedisConnection] = deque()
        self.scripts_loaded = True  # until the server reports them missing
        self.late = 0
        self.problem: RedisError | None = None

    def drop_idle(self) -> None:
        while self.idle:
            with suppress(IndexError):  # another thread took the last one
                self.idle.pop().disconnect()


class ServerBatch:
    """The commands of one attempt that go to one server. ``clean``: every reply was read."""

    __slots__ = ("clean", "commands", "node", "wire")

    def __init__(self, node: RedisServer, commands: list[RedisCommand]) -> None:
        self.node = node
        self.commands = commands
        self.wire: RedisConnection | None = None
        self.clean = False


def readable_servers(legs: Sequence[ServerBatch], until: float) -> list[ServerBatch]:
    """Wait until a server has sent bytes; return the batches of those that have; empty after a timeout."""
    poll, by_file = select.poll(), {}
    for leg in legs:
        assert leg.wire is not None
        if leg.wire.has_bytes:
            return [leg]
        by_file[leg.wire.fileno()] = leg
        poll.register(leg.wire.fileno(), select.POLLIN)
    left_ms = max(0.0, until - time.monotonic()) * 1e3
    return [by_file[file] for file, _ in poll.poll(left_ms)]


class RedisServers:
    """The servers in use. Thread-safe. Only a cluster's servers are skipped for a problem."""

    def __init__(
        self, settings: RedisSettings, wires: RedisConnectionFactory, topology: RedisTopology
    ) -> None:
        self._wires = wires
        self._topology = topology
        self._keeps_out = settings.mode == "cluster"
        self._connect_s = settings.connect_timeout_ms / 1000
        self._deadline_s = settings.guard.deadline_ms / 1000
        self._late_to_keep_out = settings.guard.failures_to_open
        self._nodes: dict[Address, RedisServer] = {}
        self.losses = 0  # see `RedisClient.losses`
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._watching = False
        self._watcher = BoundedThreadPool(1, 1, name=f"{NAME}-away")

    @property
    def all(self) -> list[RedisServer]:
        return list(self._nodes.values())

    def at(self, address: Address) -> RedisServer:
        node = self._nodes.get(address)
        if node is None:
            with self._lock:
                node = self._nodes.setdefault(address, RedisServer(address))
        return node

    def problem(self, address: Address) -> RedisError | None:
        """Return why the server is skipped; None if it is not."""
        node = self._nodes.get(address)
        return node.problem if node is not None else None

    # -- connections ------------------------------------------------------------------------------

    def take(self, node: RedisServer, until: float) -> RedisConnection:
        """Return an idle connection, or open one by ``until``. Failures count against the server's health."""
        while node.idle:
            try:
                wire = node.idle.pop()
            except IndexError:  # another thread took the last one
                break
            if not wire.stale:
                return wire
            wire.disconnect()
        wire = self._wires.to_server(node.address)
        began = time.monotonic()
        try:
            wire.open(until, self._connect_s)
        except RedisError as error:
            wire.disconnect()
            if isinstance(error, Late):
                self.record_timeout(node, error, until - began)
            else:
                self._keep_out(node, error)
            raise
        return wire

    def give_back(self, leg: ServerBatch) -> None:
        wire, leg.wire = leg.wire, None
        if wire is None:
            return
        gone = self._closed.is_set() or self._nodes.get(leg.node.address) is not leg.node
        if gone or not leg.clean:
            wire.disconnect()
            return
        leg.node.idle.append(wire)
        if self._closed.is_set() or self._nodes.get(leg.node.address) is not leg.node:
            leg.node.drop_idle()

    def forget(self, known: Iterable[Address]) -> None:
        """Drop all servers but ``known``, with their idle connections."""
        with self._lock:
            gone = [self._nodes.pop(each) for each in set(self._nodes) - set(known)]
        for node in gone:
            node.drop_idle()

    def close(self) -> None:
        """Close idle connections, and stop probing. Idempotent."""
        self._closed.set()
        self.forget(())
        self._watcher.close(1.0)

    # -- health -----------------------------------------------------------------------------------

    def record_reply(self, node: RedisServer) -> None:
        if node.late or node.problem is not None:
            node.late, node.problem = 0, None

    def record_timeout(self, node: RedisServer, error: RedisError, had_s: float) -> None:
        """Record a timeout of the server, which had ``had_s`` to answer; skip it after several in a row."""
        if had_s < _FAIR_SHARE * self._deadline_s:
            return
        node.late += 1
        if node.late >= self._late_to_keep_out:
            self._keep_out(node, error)

    def _keep_out(self, node: RedisServer, problem: RedisError) -> None:
        if not self._keeps_out or node.problem is not None or self._closed.is_set():
            return
        with self._lock:
            if self._nodes.get(node.address) is not node:
                return
            node.problem = problem
            start, self._watching = not self._watching, True
        log.warning(
            "%s; skipping its rows until it responds",
            translate_redis_error(problem, node.address),
        )
        node.drop_idle()
        if start:
            with suppress(Unavailable):  # the pool is closed
                self._watcher.submit(self._watch)

    def _watch(self) -> None:
        while not self._closed.wait(_PROBE_EVERY_S):
            with suppress(RedisError):
                self._topology.refresh(time.monotonic() + self._connect_s)
                self.forget(self._topology.addresses())
            for node in self.all:
                if node.problem is not None:
                    self._try(node)
            with self._lock:
                if not any(node.problem for node in self._nodes.values()):
                    self._watching = False
                    return

    def _try(self, node: RedisServer) -> None:
        leg = ServerBatch(node, [])
        leg.wire = wire = self._wires.to_server(node.address)
        try:
            wire.open(time.monotonic() + self._connect_s, self._connect_s)
            wire.set_deadline(time.monotonic() + self._deadline_s)
            wire.send_command("PING", check_health=False)
            wire.read_response()
        except RedisError as error:
            node.problem = error
        else:
            leg.clean = True
            self.losses += 1
            self.record_reply(node)
            log.info("%s:%d responds again", *node.address)
        finally:
            self.give_back(leg)
