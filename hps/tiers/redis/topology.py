"""Topology of Redis: which server holds each slot; fixed, from Sentinel, or from a cluster."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from redis.crc import REDIS_CLUSTER_HASH_SLOTS
from redis.exceptions import ConnectionError as ConnectionLost
from redis.exceptions import RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeout

from hps.config.store_settings import RedisSettings
from hps.tiers.redis.connection import Address, RedisConnection, RedisConnectionFactory

# The share of a call's time for one server, so that others can still answer if it is unresponsive.
_SHARE = 0.5


class RedisTopology:
    """Maps slots to addresses: here of a single server. Thread-safe; raises redis-py's errors.

    ``fixed``: the addresses never change, so no other server can replace one."""

    fixed = True

    def __init__(self, seeds: Sequence[Address]) -> None:
        self._seeds = list(seeds)
        self.is_down: Callable[[Address], object] = lambda _address: False
        """Returns a true value for a server that is known to be down, to query it last."""

    def address(self, slot: int, deadline: float) -> Address:
        """Return the address of ``slot``; queries the servers if it is unknown."""
        return self.known(slot)

    def known(self, slot: int) -> Address:
        """Return the known address of ``slot``, else a configured one; never queries a server."""
        return self._seeds[0]

    def addresses(self) -> set[Address]:
        return {self._seeds[0]}

    def some_slots(self, deadline: float) -> list[int]:
        """Return a slot of each server that holds any."""
        return [0]

    def refresh(self, deadline: float) -> None:
        """Query the servers again; keeps the current state if none answers."""

    def moved(self, slot: int, address: Address) -> None:
        """Record a redirection of ``slot`` to another server."""
        raise ConnectionLost(
            f"slot {slot} is at {address[0]}:{address[1]}: the server is part of a cluster; set "
            "tiers.redis.mode: cluster"
        )


class _QueriedTopology(RedisTopology):
    """A topology that servers report: the first one that responds; one thread queries at a time."""

    fixed = False

    def __init__(
        self,
        seeds: Sequence[Address],
        connect: Callable[[Address], RedisConnection],
        connect_s: float,
    ) -> None:
        super().__init__(seeds)
        self._connect = connect
        self._connect_s = connect_s
        self._lock = threading.Lock()
        self._epoch = 0

    def refresh(self, deadline: float) -> None:
        try:
            self._query(deadline)
        except RedisError:
            if not self._epoch:
                raise

    def _query(self, deadline: float) -> None:
        epoch = self._epoch
        if not self._lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise RedisTimeout("the topology is not known yet")
        try:
            if epoch == self._epoch:  # else another thread has just queried
                self._query_first(deadline)
        finally:
            self._lock.release()

    def _query_first(self, deadline: float) -> None:
        failure: Exception = ConnectionLost("no server to ask")
        for address in self._candidates():
            now = time.monotonic()
            connection = self._connect(address)
            try:
                connection.open(now + _SHARE * (deadline - now), self._connect_s)
                self._load(connection, address)
                self._epoch += 1
                return
            except RedisError as error:
                failure = error
            finally:
                connection.disconnect()
        raise failure

    def _candidates(self) -> list[Address]:
        return self._seeds

    def _load(self, connection: RedisConnection, address: Address) -> None:
        raise NotImplementedError


class SentinelTopology(_QueriedTopology):
    """The primary of one service, from the first Sentinel that responds."""

    _primary: Address | None = None

    def __init__(
        self,
        seeds: Sequence[Address],
        service: str,
        factory: RedisConnectionFactory,
        connect_s: float,
    ) -> None:
        super().__init__(seeds, factory.to_sentinel, connect_s)
        self._service = service

    def address(self, slot: int, deadline: float) -> Address:
        if self._primary is None:
            self._query(deadline)
        return self.known(slot)

    def known(self, slot: int) -> Address:
        return self._primary or self._seeds[0]

    def addresses(self) -> set[Address]:
        return {self._primary} if self._primary else set()

    def _load(self, connection: RedisConnection, address: Address) -> None:
        connection.send_command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self._service)
        reply = connection.read_response()
        if not reply:
            raise ResponseError(
                f"the sentinel {address[0]}:{address[1]} knows no service {self._service!r}; "
                "check tiers.redis.sentinel_service"
            )
        self._primary = (reply[0].decode(), int(reply[1]))


class RedisClusterTopology(_QueriedTopology):
    """The slots of a cluster, from the first node that responds."""

    def __init__(
        self, seeds: Sequence[Address], factory: RedisConnectionFactory, connect_s: float
    ) -> None:
        super().__init__(seeds, factory.to_server, connect_s)
        self._slots: list[Address | None] = [None] * REDIS_CLUSTER_HASH_SLOTS
        self._nodes: list[Address] = []

    def address(self, slot: int, deadline: float) -> Address:
        if self._slots[slot] is None:
            self._query(deadline)
        address = self._slots[slot]
        if address is None:
            raise ConnectionLost(f"no node of the cluster holds slot {slot}")
        return address

    def known(self, slot: int) -> Address:
        return self._slots[slot] or self._seeds[0]

    def addresses(self) -> set[Address]:
        return {each for each in self._slots if each is not None}

    def some_slots(self, deadline: float) -> list[int]:
        self._query(deadline)
        return list({address: slot for slot, address in enumerate(self._slots) if address}.values())

    def moved(self, slot: int, address: Address) -> None:
        self._slots[slot] = (address[0] or self.known(slot)[0], address[1])

    def _candidates(self) -> list[Address]:
        known = dict.fromkeys([*self._nodes, *self._seeds])
        return sorted(known, key=lambda address: bool(self.is_down(address)))

    def _load(self, connection: RedisConnection, address: Address) -> None:
        connection.send_command("CLUSTER", "SLOTS")
        slots: list[Address | None] = [None] * REDIS_CLUSTER_HASH_SLOTS
        nodes: dict[Address, None] = {}
        for first, last, *servers in connection.read_response():
            reported = [_node_address(server, address) for server in servers]
            slots[first : last + 1] = [reported[0]] * (last + 1 - first)
            nodes.update(dict.fromkeys(reported))
        if not nodes:
            raise ResponseError("the cluster has not assigned its slots yet")
        self._slots, self._nodes = slots, list(nodes)


def topology(settings: RedisSettings, factory: RedisConnectionFactory) -> RedisTopology:
    """Return the topology for the settings. Does not connect."""
    addresses = [parse_address(each) for each in settings.addresses]
    connect_s = settings.connect_timeout_ms / 1000
    if settings.mode == "cluster":
        return RedisClusterTopology(addresses, factory, connect_s)
    if settings.mode == "sentinel":
        assert settings.sentinel_service is not None
        return SentinelTopology(addresses, settings.sentinel_service, factory, connect_s)
    return RedisTopology(addresses)


def parse_address(text: str) -> Address:
    """Parse ``host:port``; an IPv6 host is in brackets."""
    host, _, port = text.rpartition(":")
    return host.strip("[]"), int(port)


def _node_address(server: Sequence[Any], queried: Address) -> Address:
    """Return a node's address; a node that reports no host is the ``queried`` one."""
    host = server[0].decode() if server[0] else ""
    return (host if host and host != "?" else queried[0]), int(server[1])
