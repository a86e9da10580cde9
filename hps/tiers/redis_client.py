"""Commands to one Redis server, to one that sentinels name, or to a cluster: all are sent, then all replies
are read, so that every node works at the same time without a thread.

Within the call's deadline it follows redirections, waits out failovers and loading servers and tries
again, each time after a random pause. A connection is used again only after its last reply was read to the
end; whatever else happens closes it. So no reply can ever be taken for the answer to another question.

redis-py's own cluster client is not used: it knows no deadline and no packed requests, and it learns the
topology under a lock that every call waits for.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections import deque
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

from hps.config.schema import RedisSettings
from hps.errors import TierError, TierTimeout
from hps.tiers.redis_commands import Command, Receive, read_replies
from hps.tiers.redis_connection import NAME, Address, Wire, Wires, is_retryable, translate
from hps.tiers.redis_layout import pack
from hps.tiers.redis_topology import Topology, topology

# Of a server that has no other to take its place.
_ATTEMPTS = 3
_PAUSE_S, _LONGEST_PAUSE_S = 0.002, 0.1
_PASSING = (AskError, TryAgainError, ClusterDownError, ReadOnlyError, NoScriptError)
_ASKING = b"*1\r\n$6\r\nASKING\r\n"


class Node:
    """A server and its idle connections."""

    __slots__ = ("address", "idle", "scripts_loaded")

    def __init__(self, address: Address) -> None:
        self.address = address
        self.idle: deque[Wire] = deque()
        self.scripts_loaded = True  # until the server says otherwise


class RedisClient:
    """``scripts`` are loaded into a server that says it lacks them. Connects when it is first used.
    May be called from many threads; ``settings.connections`` calls run at a time."""

    def __init__(self, settings: RedisSettings, scripts: Iterable[bytes] = ()) -> None:
        self._wires = Wires(settings)
        self._topology: Topology = topology(settings, self._wires)
        self._scripts = tuple(scripts)
        self._cluster = settings.mode == "cluster"
        self._connect_s = settings.connect_timeout_ms / 1000
        self._timeout_s = settings.timeout_ms / 1000
        self._connections = settings.connections
        self._places = threading.BoundedSemaphore(settings.connections)
        self._nodes: dict[Address, Node] = {}
        self._lock = threading.Lock()
        self._process = os.getpid()
        self._closed = False

    def slot(self, key: bytes) -> int:
        """The cluster's slot of a key; commands of one slot go to one server."""
        return int(key_slot(key)) if self._cluster else 0

    def deadline(self) -> float:
        """Of a call that brings none."""
        return time.monotonic() + self._timeout_s

    def call(self, key: bytes, *arguments: Any, deadline: float | None = None) -> Any:
        """One command on ``key``; its reply."""
        (reply,) = self.call_all([(key, arguments)], deadline=deadline)
        return reply

    def call_all(
        self, calls: Iterable[tuple[bytes, Sequence[Any]]], *, deadline: float | None = None
    ) -> list[Any]:
        """A command each on its key; the replies."""
        commands = [Command(self.slot(key), pack(*arguments)) for key, arguments in calls]
        self.run(commands, read_replies, deadline or self.deadline())
        return [command.reply for command in commands]

    def primaries(self, deadline: float | None = None) -> list[int]:
        """A slot of each server."""
        try:
            return self._topology.some_slots(deadline or self.deadline())
        except RedisError as error:
            raise translate(error, self._topology.known(0)) from None

    def call_slot(self, slot: int, *arguments: Any, deadline: float | None = None) -> Any:
        """A command without a key on the server that holds ``slot``."""
        command = Command(slot, pack(*arguments))
        self.run([command], read_replies, deadline or self.deadline())
        return command.reply

    def run(self, commands: Sequence[Command], receive: Receive, deadline: float) -> None:
        """Every command's reply, read by ``receive``. Raises TierTimeout or TierError; then some commands
        may have been carried out, and some more than once."""
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
            self._run(commands, receive, deadline)
        except RedisError as error:  # of the topology
            raise translate(error, self._topology.known(0)) from None
        finally:
            self._places.release()

    def close(self) -> None:
        """Close what is idle, and what is in use when it comes back. Idempotent."""
        with self._lock:
            self._closed = True
            nodes, self._nodes = list(self._nodes.values()), {}
        for node in nodes:
            self._drop_idle(node)

    # -- attempts ---------------------------------------------------------------------------------

    def _run(self, commands: Sequence[Command], receive: Receive, deadline: float) -> None:
        waiting = commands
        for attempt in count(1):
            self._once(waiting, receive, deadline)
            waiting = [command for command in waiting if isinstance(command.reply, Exception)]
            if not waiting:
                return
            for command in waiting:
                if not isinstance(command.reply, _PASSING) and not is_retryable(command.reply):
                    raise self._failure(command)
            pause = random.uniform(0, min(_LONGEST_PAUSE_S, _PAUSE_S * 2**attempt))
            hopeless = attempt == _ATTEMPTS and self._topology.fixed
            if hopeless or time.monotonic() + pause >= deadline:
                raise self._failure(waiting[0])
            time.sleep(pause)
            self._learn(waiting, deadline)

    def _failure(self, command: Command) -> TierError:
        address = command.asking or self._topology.known(command.slot)
        return translate(command.reply, address)

    def _learn(self, failed: Sequence[Command], deadline: float) -> None:
        """Where to ask next time."""
        lost = False
        for command in failed:
            error, address = command.reply, command.asking or self._topology.known(command.slot)
            command.asking = None
            if isinstance(error, MovedError):
                self._topology.moved(error.slot_id, (error.host, error.port))
            elif isinstance(error, AskError):
                command.asking = (error.host, error.port)
            elif isinstance(error, NoScriptError):
                self._node(address).scripts_loaded = False
            elif not isinstance(error, TryAgainError):
                lost = True
        if lost:
            self._topology.refresh(deadline)
            self._forget(self._topology.addresses())

    def _once(self, commands: Sequence[Command], receive: Receive, deadline: float) -> None:
        """One attempt; a command that failed has an exception as its reply."""
        legs: list[_Leg] = []
        try:
            for address, share in self._by_address(commands, deadline).items():
                legs.append(_Leg(self._node(address), share))
            for leg in legs:
                self._attempt(leg, self._send, deadline)
            for leg in legs:
                if leg.wire is not None:
                    self._attempt(
                        leg, lambda leg, until: receive(leg.wire, leg.commands, until), deadline
                    )
                    leg.clean = leg.wire is not None
        except Late as error:
            where = next((leg for leg in legs if not leg.clean), None)
            address = where.node.address if where else self._topology.known(commands[0].slot)
            raise translate(error, address) from None
        finally:
            for leg in legs:
                self._give_back(leg)

    def _attempt(self, leg: _Leg, step: Callable[[Any, float], None], deadline: float) -> None:
        try:
            step(leg, deadline)
        except Late:
            raise
        except RedisError as error:
            if leg.wire is not None:
                leg.wire.disconnect()
                leg.wire = None
            for command in leg.commands:
                command.reply = error

    def _by_address(
        self, commands: Sequence[Command], deadline: float
    ) -> dict[Address, list[Command]]:
        shares: dict[Address, list[Command]] = {}
        for command in commands:
            command.reply = None
            try:
                address = command.asking or self._topology.address(command.slot, deadline)
                shares.setdefault(address, []).append(command)
            except Late:
                raise
            except RedisError as error:
                command.reply = error
        return shares

    # -- connections ------------------------------------------------------------------------------

    def _send(self, leg: _Leg, deadline: float) -> None:
        leg.wire = wire = self._take(leg.node, deadline)
        if self._scripts and not leg.node.scripts_loaded:
            wire.until(deadline)
            wire.send_packed_command([pack("SCRIPT", "LOAD", each) for each in self._scripts])
            for _ in self._scripts:
                wire.read_response()
            leg.node.scripts_loaded = True
        requests = []
        for command in leg.commands:
            if command.asking:
                requests.append(_ASKING)
            requests.append(command.request)
        wire.until(deadline)
        wire.send_packed_command([b"".join(requests)], check_health=False)

    def _take(self, node: Node, deadline: float) -> Wire:
        while node.idle:
            try:
                wire = node.idle.pop()
            except IndexError:  # another thread was faster
                break
            if not wire.stale:
                return wire
            wire.disconnect()
        wire = self._wires.to_server(node.address)
        wire.open(deadline, self._connect_s)
        return wire

    def _give_back(self, leg: _Leg) -> None:
        wire, leg.wire = leg.wire, None
        if wire is None:
            return
        if not leg.clean or self._closed or self._nodes.get(leg.node.address) is not leg.node:
            wire.disconnect()
            return
        leg.node.idle.append(wire)
        if self._nodes.get(leg.node.address) is not leg.node:  # closed in between
            self._drop_idle(leg.node)

    def _node(self, address: Address) -> Node:
        node = self._nodes.get(address)
        if node is None:
            with self._lock:
                node = self._nodes.setdefault(address, Node(address))
        return node

    def _forget(self, known: set[Address]) -> None:
        """Close what is idle to servers that are gone."""
        with self._lock:
            gone = [self._nodes.pop(each) for each in set(self._nodes) - known]
        for node in gone:
            self._drop_idle(node)

    @staticmethod
    def _drop_idle(node: Node) -> None:
        while node.idle:
            node.idle.pop().disconnect()


class _Leg:
    """One server's share of an attempt. ``clean``: every reply was read."""

    __slots__ = ("clean", "commands", "node", "wire")

    def __init__(self, node: Node, commands: list[Command]) -> None:
        self.node = node
        self.commands = commands
        self.wire: Wire | None = None
        self.clean = False
