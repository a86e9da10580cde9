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
from redis.exceptions import TimeoutError as Late

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
from hps.tiers.redis.topology import RedisTopology, topology

# Attempts at a server that no other can replace.
_ATTEMPTS = 3
_BACKOFF = Backoff(0.002, 0.1)
# The share of a call's time for reads; the rest is for returning the partial answers.
_SHARE_OF_PARTLY = 0.85
_PASSING = (AskError, TryAgainError, ClusterDownError, ReadOnlyError, NoScriptError)
_ASKING = b"*1\r\n$6\r\nASKING\r\n"


class RedisClient:
    """Sends commands to the server of each key.

    ``scripts`` are loaded into a server that reports them missing. Connects at the first use.
    Thread-safe; ``settings.connections`` calls run at a time."""

    def __init__(self, settings: RedisSettings, scripts: Iterable[bytes] = ()) -> None:
        self._wires = RedisConnectionFactory(settings)
        self._topology: RedisTopology = topology(settings, self._wires)
        self._scripts = tuple(scripts)
        self._cluster = settings.mode == "cluster"
        self._timeout_s = settings.timeout_ms / 1000
        self._connections = settings.connections
        self._places = threading.BoundedSemaphore(settings.connections)
        self._nodes = RedisServers(settings, self._wires, self._topology)
        self._topology.away = self._nodes.problem
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
        partly: bool = False,
    ) -> list[Any]:
        """Send one command per key and return the replies. ``partly``: see `run`."""
        commands = [RedisCommand(self.slot(key), pack(*arguments)) for key, arguments in calls]
        self.run(commands, read_replies, deadline or self.deadline(), partly=partly)
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
        return self._nodes.losses

    def is_away(self, slot: int) -> bool:
        """Return whether the server of ``slot`` is known to be unhealthy and gets no commands."""
        return self._nodes.problem(self._topology.known(slot)) is not None

    def run(
        self,
        commands: Sequence[RedisCommand],
        receive: Receive,
        deadline: float,
        *,
        partly: bool = False,
    ) -> None:
        """Send every command and read its reply with ``receive``.

        Raises TierTimeout or TierError; some commands may have been executed then, even more than once.
        ``partly``: if some server of the cluster is healthy, commands that other servers did not answer
        get an exception as their reply instead. Such a call returns a little before the deadline."""
        if self._closed:
            raise TierError(NAME, "the connections are closed")
        if os.getpid() != self._process:
            raise TierError(
                NAME, "this process was forked from the one that opened the connections"
            )
        if not self._places.acquire(timeout=max(0.0, deadline - time.monotonic())):
            number = self._connections
            raise TierTimeout(NAME, f"all {number} connections are busy (tiers.redis.connections)")
        try:
            if partly and self._cluster:
                self._run_partly(commands, receive, deadline)
            else:
                self._run(commands, receive, deadline)
        except RedisError as error:  # from the topology
            raise translate_redis_error(error, self._topology.known(0)) from None
        finally:
            self._places.release()

    def close(self) -> None:
        """Close idle connections, and those in use when they are returned. Idempotent."""
        self._closed = True
        self._nodes.close()
        self._wires.close()

    # -- attempts ---------------------------------------------------------------------------------

    def _run(self, commands: Sequence[RedisCommand], receive: Receive, deadline: float) -> None:
        waiting = commands
        for attempt in count(1):
            self._once(waiting, receive, deadline)
            waiting = _failed(waiting)
            if not waiting:
                return
            for command in waiting:
                if not _may_pass(command.reply):
                    raise self.failure(command)
            pause = _BACKOFF.pause_s(attempt)
            hopeless = attempt == _ATTEMPTS and self._topology.fixed
            if hopeless or time.monotonic() + pause >= deadline:
                raise self.failure(waiting[0])
            time.sleep(pause)
            self._learn(waiting, deadline)

    def _run_partly(
        self, commands: Sequence[RedisCommand], receive: Receive, deadline: float
    ) -> None:
        now = time.monotonic()
        until = now + _SHARE_OF_PARTLY * (deadline - now)
        waiting = commands
        for attempt in count(1):
            self._once(waiting, receive, until, partly=True)
            waiting = [each for each in _failed(waiting) if self._may_answer(each, attempt)]
            pause = _BACKOFF.pause_s(attempt)
            if not waiting or time.monotonic() + pause >= until:
                break
            time.sleep(pause)
            try:
                self._learn(waiting, until)
            except RedisError:  # no server reported a topology: keep what was answered
                break
        failed = _failed(commands)
        if len(failed) == len(commands) and commands:
            tried = {self._topology.known(command.slot) for command in failed}
            if all(a in tried or self._nodes.problem(a) for a in self._topology.addresses()):
                raise self.failure(failed[0])

    def _may_answer(self, command: RedisCommand, attempt: int) -> bool:
        if self.is_away(command.slot) and not isinstance(command.reply, MovedError):
            return False
        if isinstance(command.reply, ClusterDownError) and attempt >= _ATTEMPTS:
            return False
        return _may_pass(command.reply)

    def failure(self, command: RedisCommand) -> TierError:
        """Return the error of an unanswered command."""
        address = command.asking or self._topology.known(command.slot)
        return translate_redis_error(command.reply, address)

    def _learn(self, failed: Sequence[RedisCommand], deadline: float) -> None:
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
                self._nodes.at(address).scripts_loaded = False
            elif not isinstance(error, TryAgainError):
                lost = True
        if lost:
            self._nodes.losses += 1
            self._topology.refresh(deadline)
            self._nodes.forget(self._topology.addresses())

    def _once(
        self,
        commands: Sequence[RedisCommand],
        receive: Receive,
        until: float,
        *,
        partly: bool = False,
    ) -> None:
        """Make one attempt; a failed command has an exception as its reply.

        Raises TierTimeout unless ``partly``."""
        legs: list[ServerBatch] = []
        try:
            shares = self._by_address(commands, until, partly=partly)
            legs = [
                ServerBatch(self._nodes.at(address), share) for address, share in shares.items()
            ]
            for leg in sorted(legs, key=lambda leg: not leg.node.idle):
                self._attempt(leg, self._send, _until(until, partly and len(legs) > 1))
            self._receive(legs, receive, until, partly=partly)
        finally:
            for leg in legs:
                self._nodes.give_back(leg)
        if not partly:
            late = next((c for c in commands if isinstance(c.reply, Late)), None)
            if late is not None:
                raise self.failure(late)

    def _receive(
        self, legs: Sequence[ServerBatch], receive: Receive, until: float, *, partly: bool
    ) -> None:
        """Read replies in the order of arrival: an unresponsive server does not delay the others."""
        began = time.monotonic()
        waiting = [leg for leg in legs if leg.wire is not None]

        def read(leg: ServerBatch, until: float) -> None:
            assert leg.wire is not None
            receive(leg.wire, leg.commands, until)
            leg.clean = True
            self._nodes.record_reply(leg.node)

        while waiting:
            some = waiting if len(waiting) == 1 else readable_servers(waiting, until) or waiting
            for leg in some:
                self._attempt(leg, read, _until(until, partly and len(waiting) > 1))
                if isinstance(error := leg.commands[0].reply, Late):
                    self._nodes.record_timeout(leg.node, error, until - began)
            waiting = [leg for leg in waiting if leg not in some]

    def _attempt(self, leg: ServerBatch, step: Callable[[Any, float], None], until: float) -> None:
        try:
            step(leg, until)
        except RedisError as error:
            if leg.wire is not None:
                leg.wire.disconnect()
                leg.wire = None
            for command in leg.commands:
                command.reply = error

    def _by_address(
        self, commands: Sequence[RedisCommand], deadline: float, *, partly: bool
    ) -> dict[Address, list[RedisCommand]]:
        shares: dict[Address, list[RedisCommand]] = {}
        for command in commands:
            command.reply = None
            try:
                address = command.asking or self._topology.address(command.slot, deadline)
            except RedisError as error:
                command.reply = error
                continue
            if partly and (problem := self._nodes.problem(address)):
                command.reply = problem
                continue
            shares.setdefault(address, []).append(command)
        return shares

    def _send(self, leg: ServerBatch, until: float) -> None:
        leg.wire = wire = self._nodes.take(leg.node, until)
        if self._scripts and not leg.node.scripts_loaded:
            wire.set_deadline(until)
            wire.send_packed_command([pack("SCRIPT", "LOAD", each) for each in self._scripts])
            for _ in self._scripts:
                wire.read_response()
            leg.node.scripts_loaded = True
        requests = []
        for command in leg.commands:
            if command.asking:
                requests.append(_ASKING)
            requests.append(command.request)
        wire.set_deadline(until)
        wire.send_packed_command([b"".join(requests)], check_health=False)


def _failed(commands: Sequence[RedisCommand]) -> list[RedisCommand]:
    return [command for command in commands if isinstance(command.reply, Exception)]


def _may_pass(error: Exception) -> bool:
    return isinstance(error, _PASSING) or is_retryable(error)


def _until(until: float, others: bool) -> float:
    """Return a server's deadline: half of the remaining time, if other servers need some too."""
    now = time.monotonic()
    return now + 0.5 * (until - now) if others else until
