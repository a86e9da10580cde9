"""Topology of Redis: which server holds each slot; fixed, from Sentinel, or from a cluster."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from redis.crc import REDIS_CLUSTER_HASH_SLOTS
from redis.exceptions import ConnectionError as Lost
from redis.exceptions import RedisError, ResponseError
from redis.exceptions import TimeoutError as Late

from hps.config.store_settings import RedisSettings
from hps.tiers.redis.connection import Address, RedisConnection, RedisConnectionFactory

# The share of a call's time for one server, so that others can still answer if it is unresponsive.
_SHARE = 0.5


Away = Callable[[Address], object]


class RedisTopology(Protocol):
    """Maps slots to addresses. Thread-safe; raises redis-py's errors.

    ``fixed``: the addresses never change, so no other server can replace one."""

    fixed: bool
    away: Away
    """Returns a true value for a server that is known to be down, to query it last."""

    def address(self, slot: int, deadline: float) -> Address:
        """Return the address of ``slot``; asks the servers if it is unknown."""
        ...

    def known(self, slot: int) -> Address:
        """Return the known address of ``slot``, else a configured one; never queries a server."""
        ...

    def addresses(self) -> set[Address]: ...

    def some_slots(self, deadline: float) -> list[int]:
        """Return a slot of each server that holds any."""
        ...

    def refresh(self, deadline: float) -> None:
        """Ask the servers again; keeps the current state if none answers."""
        ...

    def moved(self, slot: int, address: Address) -> None:
        """Record a redirection of ``slot`` to another server."""
        ...


def topology(settings: RedisSettings, wires: RedisConnectionFactory) -> RedisTopology:
    """Return the topology for the settings. Does not connect."""
    addresses = [parse_address(each) for each in settings.addresses]
    connect_s = settings.connect_timeout_ms / 1000
    if settings.mode == "cluster":
        return RedisClusterTopology(addresses, wires, connect_s)
    if settings.mode == "sentinel":
        assert settings.sentinel_service is not None
        return SentinelTopology(addresses, settings.sentinel_service, wires, connect_s)
    return SingleServerTopology(addresses[0])


def parse_address(text: str) -> Address:
    """Parse ``host:port``; an IPv6 host is in brackets."""
    host, _, port = text.rpartition(":")
    return host.strip("[]"), int(port)


class SingleServerTopology:
    fixed = True
    away: Away

    def __init__(self, address: Address) -> None:
        self._address = address

    def address(self, slot: int, deadline: float) -> Address:
        return self._address

    def known(self, slot: int) -> Address:
        return self._address

    def addresses(self) -> set[Address]:
        return {self._address}

    def some_slots(self, deadline: float) -> list[int]:
        return [0]

    def refresh(self, deadline: float) -> None: ...

    def moved(self, slot: int, address: Address) -> None:
        raise Lost(
            f"slot {slot} is at {address[0]}:{address[1]}: the server is part of a cluster; set "
            "tiers.redis.mode: cluster"
        )


class _QueriedTopology:
    """A topology that servers report: the first one that responds; one thread queries at a time."""

    fixed = False
    away: Away

    def __init__(self, seeds: Sequence[Address], connect_s: float) -> None:
        self._seeds = list(seeds)
        self._connect_s = connect_s
        self._lock = threading.Lock()
        self._epoch = 0
        self.away = lambda _address: False

    def refresh(self, deadline: float) -> None:
        try:
            self._ask(deadline)
        except RedisError:
            if not self._epoch:
                raise

    def _ask(self, deadline: float) -> None:
        epoch = self._epoch
        if not self._lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise Late("the topology is not known yet")
        try:
            if epoch != self._epoch:  # another thread has just queried
                return
            failure: Exception = Lost("no server to ask")
            for address in self._candidates():
                now = time.monotonic()
                wire = self._wire(address)
                try:
                    wire.open(now + _SHARE * (deadline - now), self._connect_s)
                    self._learn(wire, address)
                    self._epoch += 1
                    return
                except RedisError as error:
                    failure = error
                finally:
                    wire.disconnect()
            raise failure
        finally:
            self._lock.release()

    def _candidates(self) -> list[Address]:
        return self._seeds

    def _wire(self, address: Address) -> RedisConnection:
        raise NotImplementedError

    def _learn(self, wire: RedisConnection, address: Address) -> None:
        raise NotImplementedError


class SentinelTopology(_QueriedTopology):
    """The primary of one service, from the first Sentinel that responds."""

    def __init__(
        self,
        seeds: Sequence[Address],
        service: str,
        wires: RedisConnectionFactory,
        connect_s: float,
    ) -> None:
        super().__init__(seeds, connect_s)
        self._service = service
        self._wire = wires.to_sentinel  # type: ignore[method-assign]
        self._primary: Address | None = None

    def address(self, slot: int, deadline: float) -> Address:
        if self._primary is None:
            self._ask(deadline)
        return self.known(slot)

    def known(self, slot: int) -> Address:
        return self._primary or self._seeds[0]

    def addresses(self) -> set[Address]:
        return {self._primary} if self._primary else set()

    def some_slots(self, deadline: float) -> list[int]:
        return [0]

    def moved(self, slot: int, address: Address) -> None:
        SingleServerTopology(address).moved(slot, address)

    def _learn(self, wire: RedisConnection, address: Address) -> None:
        wire.send_command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self._service)
        reply = wire.read_response()
        if not reply:
            raise ResponseError(
                f"the sentinel {address[0]}:{address[1]} knows no service {self._service!r}; "
                "check tiers.redis.sentinel_service"
            )
        self._primary = (reply[0].decode(), int(reply[1]))


class RedisClusterTopology(_QueriedTopology):
    """The slots of a cluster, from the first node that responds."""

    def __init__(
        self, seeds: Sequence[Address], wires: RedisConnectionFactory, connect_s: float
    ) -> None:
        super().__init__(seeds, connect_s)
        self._wire = wires.to_server  # type: ignore[method-assign]
        self._slots: list[Address | None] = [None] * REDIS_CLUSTER_HASH_SLOTS
        self._nodes: list[Address] = []

    def address(self, slot: int, deadline: float) -> Address:
        found = self._slots[slot]
        if found is None:
            self._ask(deadline)
            found = self._slots[slot]
        if found is None:
            raise Lost(f"no node of the cluster holds slot {slot}")
        return found

    def known(self, slot: int) -> Address:
        return self._slots[slot] or self._seeds[0]

    def addresses(self) -> set[Address]:
        return {each for each in self._slots if each is not None}

    def some_slots(self, deadline: float) -> list[int]:
        self._ask(deadline)
        return list({address: slot for slot, address in enumerate(self._slots) if address}.values())

    def moved(self, slot: int, address: Address) -> None:
        self._slots[slot] = (address[0] or self.known(slot)[0], address[1])

    def _candidates(self) -> list[Address]:
        return sorted(dict.fromkeys([*self._nodes, *self._seeds]), key=lambda a: bool(self.away(a)))

    def _learn(self, wire: RedisConnection, address: Address) -> None:
        wire.send_command("CLUSTER", "SLOTS")
        slots: list[Address | None] = [None] * REDIS_CLUSTER_HASH_SLOTS
        nodes: dict[Address, None] = {}
        for first, last, *servers in wire.read_response():
            found = [_node(server, address) for server in servers]
            slots[first : last + 1] = [found[0]] * (last + 1 - first)
            nodes.update(dict.fromkeys(found))
        if not nodes:
            raise ResponseError("the cluster has not assigned its slots yet")
        self._slots, self._nodes = slots, list(nodes)


def _node(server: Sequence[Any], queried: Address) -> Address:
    """Return a node's address; a node that reports no host is the ``queried`` one."""
    host = server[0].decode() if server[0] else ""
    return (host if host and host != "?" else queried[0]), int(server[1])
