"""Addresses of lookup nodes, from the configuration and the name server."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

_MANY = "dns:///"

Resolve = Callable[[str], Sequence[str]]
"""Resolves a host name to addresses. Raises OSError."""


class NodeAddress(NamedTuple):
    """The address of one node. ``name``: the name in its certificate, if it differs from the host."""

    address: str
    name: str | None = None


class NodeResolver:
    """Resolves `lookup.nodes`. For one thread at a time.

    A name that cannot be resolved keeps its last addresses."""

    def __init__(self, nodes: Sequence[str], resolve: Resolve | None = None) -> None:
        self._nodes = list(dict.fromkeys(nodes))
        self._resolve = resolve or resolve_addresses
        self._known: dict[str, list[NodeAddress]] = {}
        self.problems: dict[str, str] = {}
        """Errors of names that could not be resolved, by node."""

    @property
    def may_change(self) -> bool:
        """True if a name's addresses may change, so that it must be resolved again."""
        return any(node.startswith(_MANY) for node in self._nodes)

    def now(self) -> list[NodeAddress]:
        """Resolve all nodes, each once. May wait for a name server."""
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
            self.problems[node] = f"cannot resolve {host}: {error.strerror or error}"
        else:
            self.problems.pop(node, None)
            self._known[node] = [
                NodeAddress(f"[{at}]:{port}" if ":" in at else f"{at}:{port}", host)
                for at in sorted(set(hosts))
            ]
        return self._known.get(node, [])


def resolve_addresses(host: str) -> list[str]:
    """Resolve ``host`` with the system's resolver.

    Returns the IPv4 addresses if the name and this machine have any, else the IPv6 ones: with both
    kinds, a node that has both would count twice. Raises OSError."""
    try:
        found = _resolved(host, socket.AI_ADDRCONFIG)
    except OSError:
        found = []
    if all(sockaddr[0] == "::1" for *_, sockaddr in found):
        found = _resolved(host, 0)  # AI_ADDRCONFIG ignores loopback addresses
    ipv4 = [each for each in found if each[0] == socket.AF_INET]
    return [str(sockaddr[0]) for *_, sockaddr in ipv4 or found]


def _resolved(host: str, flags: int) -> list[Any]:
    return socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=flags)
