"""Commands to one Redis server, to a Sentinel service or to a cluster.

All commands are sent before the first reply is read, so that the servers work in parallel without threads.

Within its deadline a call follows redirections, waits for failovers and for servers that are loading, and
retries, each time after a random pause. A call that accepts partial answers does not wait for a cluster's
server that is gone or unresponsive (`hps.tiers.redis.servers`). A connection is reused only if its last
reply was read completely, and closed otherwise, so no reply is ever taken for another command's.

redis-py's own cluster client is not used: it has no deadline and no packed requests, and while one call
learns the topology under its lock, every other call waits."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import Any

from redis.crc import key_slot
from redis.exceptions import (
    AskError,
    ClusterDownError,
    MovedError,
    NoScriptError,
    ReadOnlyError,
    RedisError,
    TryAgainError,
)
from redis.exceptions import TimeoutError as RedisTimeout

from hps.backoff import Backoff
from hps.config.store_settings import RedisSettings
from hps.errors import TierError, TierTimeout
from hps.tiers.redis.connection import (
    NAME,
    Address,
    Receive,
    RedisCommand,
    RedisConnectionFactory,
    is_retryable,
    read_replies,
    translate_redis_error,
)
from hps.tiers.redis.layout import pack
from hps.tiers.redis.servers import RedisServers, ServerBatch, readable_servers
from hps.tiers.redis.topology import topology

# Attempts at a server that no other can replace.
_ATTEMPTS = 3
_BACKOFF = Backoff(0.002, 0.1)
# The share of a call's time for reads; the rest is for returning the partial answers.
_PARTIAL_TIME_SHARE = 0.85
_TRANSIENT = (AskError, TryAgainError, ClusterDownError, ReadOnlyError, NoScriptError)
_ASKING = b"*1\r\n$6\r\nASKING\r\n"


class RedisClient:
    """Sends commands to the server of each key.

    ``scripts`` are loaded into a server that reports them missing. Connects at the first use.
    Thread-safe; ``settings.connections`` calls run at a time."""

    def __init__(self, settings: RedisSettings, scripts: Iterable[bytes] = ()) -> None:
        self._factory = RedisConnectionFactory(settings)
        self._topology = topology(settings, self._factory)
        self._scripts = tuple(scripts)
        self._cluster = settings.mode == "cluster"
        self._timeout_s = settings.timeout_ms / 1000
        self._connections = settings.connections
        self._permits = threading.BoundedSemaphore(settings.connections)
        self._servers = RedisServers(settings, self._factory, self._topology)
        self._topology.is_down = self._servers.problem
        self._process = os.getpid()
        self._closed = False

    def slot(self, key: bytes) -> int:
        """Return the cluster's slot of a key; commands of one slot go to one server."""
        return int(key_slot(key)) if self._cluster else 0

    def deadline(self) -> float:
        """Return the deadline of a call that sets none."""
        return time.monotonic() + self._timeout_s

    def call(self, key: bytes, *arguments: Any, deadline: float | None = None) -> Any:
        """Send one command on ``key`` and return its reply."""
        (reply,) = self.call_all([(key, arguments)], deadline=deadline)
        return reply

    def call_all(
        self,
        calls: Iterable[tuple[bytes, Sequence[Any]]],
        *,
        deadline: float | None = None,
        allow_partial: bool = False,
    ) -> list[Any]:
        """Send one command per key and return the replies. ``allow_partial``: see `run`."""
        commands = [RedisCommand(self.slot(key), pack(*arguments)) for key, arguments in calls]
        self.run(commands, read_replies, deadline or self.deadline(), allow_partial=allow_partial)
        return [command.reply for command in commands]

    def primaries(self, deadline: float | None = None) -> list[int]:
        """Return a slot of each server."""
        try:
            return self._topology.some_slots(deadline or self.deadline())
        except RedisError as error:
            raise translate_redis_error(error, self._topology.known(0)) from None

    def call_slot(self, slot: int, *arguments: Any, deadline: float | None = None) -> Any:
        """Send a command without a key to the server that holds ``slot``."""
        command = RedisCommand(slot, pack(*arguments))
        self.run([command], read_replies, deadline or self.deadline())
        return command.reply

    @property
    def losses(self) -> int:
        """Number of times that a connection broke or a server was unavailable: its data may be lost."""
        return self._servers.losses

    def is_down(self, slot: int) -> bool:
        """Return whether the server of ``slot`` is known to be unhealthy and gets no commands."""
        return self._servers.problem(self._topology.known(slot)) is not None

    def run(
        self,
        commands: Sequence[RedisCommand],
        receive: Receive,
        deadline: float,
        *,
        allow_partial: bool = False,
    ) -> None:
        """Send every command and read its reply with ``receive``.

        Raises TierTimeout or TierError; some commands may have been executed then, even more than once.
        ``allow_partial``: if some server of the cluster is healthy, commands that other servers did not
        answer get an exception as their reply instead. Such a call returns a little before the deadline."""
        if self._closed:
            raise TierError(NAME, "the connections are closed")
        if os.getpid() != self._process:
            raise TierError(
                NAME, "this process was forked from the one that opened the connections"
            )
        if not self._permits.acquire(timeout=max(0.0, deadline - time.monotonic())):
            number = self._connections
            raise TierTimeout(NAME, f"all {number} connections are busy (tiers.redis.connections)")
        try:
            if allow_partial and self._cluster:
                self._run_partial(commands, receive, deadline)
            else:
                self._run(commands, receive, deadline)
        except RedisError as error:  # from the topology
            raise translate_redis_error(error, self._topology.known(0)) from None
        finally:
            self._permits.release()

    def close(self) -> None:
        """Close idle connections, and those in use when they are returned. Idempotent."""
        self._closed = True
        self._servers.close()
        self._factory.close()

    # -- attempts ---------------------------------------------------------------------------------

    def _run(self, commands: Sequence[RedisCommand], receive: Receive, deadline: float) -> None:
        waiting = commands
        for attempt in count(1):
            self._attempt(waiting, receive, deadline)
            waiting = _failed(waiting)
            if not waiting:
                return
            for command in waiting:
                if not _is_transient(command.reply):
                    raise self.failure(command)
            pause = _BACKOFF.pause_s(attempt)
            hopeless = attempt == _ATTEMPTS and self._topology.fixed
            if hopeless or time.monotonic() + pause >= deadline:
                raise self.failure(waiting[0])
            time.sleep(pause)
            self._update_topology(waiting, deadline)

    def _run_partial(
        self, commands: Sequence[RedisCommand], receive: Receive, deadline: float
    ) -> None:
        now = time.monotonic()
        until = now + _PARTIAL_TIME_SHARE * (deadline - now)
        waiting = commands
        for attempt in count(1):
            self._attempt(waiting, receive, until, allow_partial=True)
            waiting = [each for each in _failed(waiting) if self._is_worth_retrying(each, attempt)]
            pause = _BACKOFF.pause_s(attempt)
            if not waiting or time.monotonic() + pause >= until:
                break
            time.sleep(pause)
            try:
                self._update_topology(waiting, until)
            except RedisError:  # no server reported a topology: keep what was answered
                break
        if commands and len(_failed(commands)) == len(commands):
            tried = {self._topology.known(command.slot) for command in commands}
            if all(a in tried or self._servers.problem(a) for a in self._topology.addresses()):
                raise self.failure(commands[0])

    def _is_worth_retrying(self, command: RedisCommand, attempt: int) -> bool:
        if self.is_down(command.slot) and not isinstance(command.reply, MovedError):
            return False
        if isinstance(command.reply, ClusterDownError) and attempt >= _ATTEMPTS:
            return False
        return _is_transient(command.reply)

    def failure(self, command: RedisCommand) -> TierError:
        """Return the error of an unanswered command."""
        address = command.asking or self._topology.known(command.slot)
        return translate_redis_error(command.reply, address)

    def _update_topology(self, failed: Sequence[RedisCommand], deadline: float) -> None:
        """Update the topology, and drop servers that have left it, after failed commands."""
        lost = False
        for command in failed:
            error, address = command.reply, command.asking or self._topology.known(command.slot)
            command.asking = None
            if isinstance(error, MovedError):
                self._topology.moved(error.slot_id, (error.host, error.port))
            elif isinstance(error, AskError):
                command.asking = (error.host, error.port)
            elif isinstance(error, NoScriptError):
                self._servers.at(address).scripts_loaded = False
            elif not isinstance(error, TryAgainError):
                lost = True
        if lost:
            self._servers.losses += 1
            self._topology.refresh(deadline)
            self._servers.keep_only(self._topology.addresses())

    def _attempt(
        self,
        commands: Sequence[RedisCommand],
        receive: Receive,
        until: float,
        *,
        allow_partial: bool = False,
    ) -> None:
        """Make one attempt; a failed command has an exception as its reply.

        Raises TierTimeout unless ``allow_partial``."""
        batches: list[ServerBatch] = []
        try:
            shares = self._by_address(commands, until, allow_partial=allow_partial)
            batches = [ServerBatch(self._servers.at(a), share) for a, share in shares.items()]
            for batch in sorted(batches, key=lambda batch: not batch.server.idle):
                self._run_step(batch, self._send, _until(until, allow_partial and len(batches) > 1))
            self._receive(batches, receive, until, allow_partial=allow_partial)
        finally:
            for batch in batches:
                self._servers.give_back(batch)
        if not allow_partial:
            for command in commands:
                if isinstance(command.reply, RedisTimeout):
                    raise self.failure(command)

    def _receive(
        self, batches: Sequence[ServerBatch], receive: Receive, until: float, *, allow_partial: bool
    ) -> None:
        """Read replies in the order of arrival: an unresponsive server does not delay the others."""
        began = time.monotonic()
        waiting = [batch for batch in batches if batch.connection is not None]

        def read(batch: ServerBatch, until: float) -> None:
            assert batch.connection is not None
            receive(batch.connection, batch.commands, until)
            batch.clean = True
            self._servers.record_reply(batch.server)

        while waiting:
            some = waiting if len(waiting) == 1 else readable_servers(waiting, until) or waiting
            for batch in some:
                self._run_step(batch, read, _until(until, allow_partial and len(waiting) > 1))
                if isinstance(error := batch.commands[0].reply, RedisTimeout):
                    self._servers.record_timeout(batch.server, error, until - began)
            waiting = [batch for batch in waiting if batch not in some]

    def _run_step(
        self, batch: ServerBatch, step: Callable[[Any, float], None], until: float
    ) -> None:
        try:
            step(batch, until)
        except RedisError as error:
            if batch.connection is not None:
                batch.connection.disconnect()
                batch.connection = None
            for command in batch.commands:
                command.reply = error

    def _by_address(
        self, commands: Sequence[RedisCommand], deadline: float, *, allow_partial: bool
    ) -> dict[Address, list[RedisCommand]]:
        shares: dict[Address, list[RedisCommand]] = {}
        for command in commands:
            command.reply = None
            try:
                address = command.asking or self._topology.address(command.slot, deadline)
            except RedisError as error:
                command.reply = error
                continue
            if allow_partial and (problem := self._servers.problem(address)):
                command.reply = problem
                continue
            shares.setdefault(address, []).append(command)
        return shares

    def _send(self, batch: ServerBatch, until: float) -> None:
        batch.connection = connection = self._servers.take(batch.server, until)
        if self._scripts and not batch.server.scripts_loaded:
            connection.set_deadline(until)
            connection.send_packed_command([pack("SCRIPT", "LOAD", each) for each in self._scripts])
            for _ in self._scripts:
                connection.read_response()
            batch.server.scripts_loaded = True
        requests = b"".join(
            _ASKING + command.request if command.asking else command.request
            for command in batch.commands
        )
        connection.set_deadline(until)
        connection.send_packed_command([requests], check_health=False)


def _failed(commands: Sequence[RedisCommand]) -> list[RedisCommand]:
    return [command for command in commands if isinstance(command.reply, Exception)]


def _is_transient(error: Exception) -> bool:
    return isinstance(error, _TRANSIENT) or is_retryable(error)


def _until(until: float, others: bool) -> float:
    """Return a server's deadline: half of the remaining time, if other servers need some too."""
    now = time.monotonic()
    return now + 0.5 * (until - now) if others else until
