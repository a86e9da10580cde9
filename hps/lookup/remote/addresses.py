"""Where lookup nodes are: addresses as they are configured, names of several looked up."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

_MANY = "dns:///"

Resolve = Callable[[str], Sequence[str]]
"""The addresses that a host's name stands for. Raises OSError."""


class NodeAddress(NamedTuple):
    """One node. ``name``: whose certificate it shows, where that is not what is connected to."""

    address: str
    name: str | None = None


class NodeResolver:
    """What `lookup.nodes` stands for at the moment: those of a name that can't be looked up now are what they
    were. For one thread at a time."""

    def __init__(self, nodes: Sequence[str], resolve: Resolve | None = None) -> None:
        self._nodes = list(dict.fromkeys(nodes))
        self._resolve = resolve or resolve_addresses
        self._known: dict[str, list[NodeAddress]] = {}
        self.problems: dict[str, str] = {}
        """Why a name could not be looked up, by node."""

    @property
    def change(self) -> bool:
        """Whether there are names to be looked up again."""
        return any(node.startswith(_MANY) for node in self._nodes)

    def now(self) -> list[NodeAddress]:
        """All of them, each once. May wait for a name server."""
        found: dict[str, NodeAddress] = {}
        for node in self._nodes:
            for each in self._many(node) if node.startswith(_MANY) else [NodeAddress(node)]:
                found.setdefault(each.address, each)
        return list(found.values())

    def _many(self, node: str) -> list[NodeAddress]:
        host, _, port = node.removeprefix(_MANY).rpartition(":")
        try:
            hosts = self._resolve(host.strip("[]"))
        except OSError as error:
            self.problems[node] = f"{host} can't be looked up: {error.strerror or error}"
        else:
            self.problems.pop(node, None)
            self._known[node] = [
                NodeAddress(f"[{at}]:{port}" if ":" in at else f"{at}:{port}", host)
                for at in sorted(set(hosts))
            ]
        return self._known.get(node, [])


def resolve_addresses(host: str) -> list[str]:
    """By the system's resolver: IPv4, where the name has such and this machine, too; else IPv6. Both would
    be every node twice where nodes have both. Raises OSError."""
    try:
        found = _resolved(host, socket.AI_ADDRCONFIG)
    except OSError:
        found = []
    if all(sockaddr[0] == "::1" for *_, sockaddr in found):
        found = _resolved(host, 0)  # to the flag, 127.0.0.1 is no address that this machine has
    ipv4 = [each for each in found if each[0] == socket.AF_INET]
    return [str(sockaddr[0]) for *_, sockaddr in ipv4 or found]


def _resolved(host: str, flags: int) -> list[Any]:
    return socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=flags)
