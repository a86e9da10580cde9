"""Connections that a rendering's NetworkPolicies allow, by Kubernetes' rules."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field
from typing import Any

from tests.deploy.charts import NAMESPACE, Rendered


@dataclass(frozen=True)
class Peer:
    """A pod, or an address outside of the cluster. ``ports``: a pod's, by their names."""

    labels: dict[str, str] = field(default_factory=dict)
    namespace: str = NAMESPACE
    address: str = ""
    ports: dict[str, int] = field(default_factory=dict)


def peers(rendered: Rendered) -> dict[str, Peer]:
    """The pods of a rendering by their role."""
    templates = [each["spec"]["template"] for each in rendered.of("StatefulSet", "Deployment")]
    templates += [
        job["spec"]["jobTemplate"]["spec"]["template"] for job in rendered.of("CronJob")
    ] + rendered.of("Pod")
    found = {}
    for each in templates:
        labels = each["metadata"]["labels"]
        # Without sidecars' ports: before Kubernetes 1.33 a name of theirs is found by nothing.
        containers = each["spec"]["containers"]
        listed = [port for container in containers for port in container.get("ports", [])]
        ports = {port["name"]: port["containerPort"] for port in listed}
        found[labels["app.kubernetes.io/component"]] = Peer(labels, ports=ports)
    return found


class Network:
    """``rendered``'s policies; other namespaces than its own have none."""

    def __init__(self, rendered: Rendered) -> None:
        self._policies = [each["spec"] for each in rendered.of("NetworkPolicy")]

    def lets(self, source: Peer, target: Peer, port: int, protocol: str = "TCP") -> bool:
        """Return True if the policies allow a packet from ``source`` to ``target``."""
        sent = self._passes(source, "Egress", target, target, port, protocol)
        return sent and self._passes(target, "Ingress", source, target, port, protocol)

    def _passes(
        self, pod: Peer, way: str, other: Peer, target: Peer, port: int, protocol: str
    ) -> bool:
        if pod.address or pod.namespace != NAMESPACE:
            return True
        policies = [
            policy
            for policy in self._policies
            if way in policy["policyTypes"] and _selects(policy["podSelector"], pod.labels)
        ]
        if not policies:
            return True
        side = "to" if way == "Egress" else "from"
        return any(
            _names(rule.get(side), other) and _has(rule.get("ports"), target, port, protocol)
            for policy in policies
            for rule in policy.get(way.lower(), [])
        )


def _selects(selector: Any, labels: dict[str, str]) -> bool:
    wanted = selector.get("matchLabels", {}).items()
    among = [(each["key"], each["values"]) for each in selector.get("matchExpressions", [])]
    return wanted <= labels.items() and all(labels.get(key) in values for key, values in among)


def _names(given: Any, other: Peer) -> bool:
    return given is None or any(_is(each, other) for each in given)


def _is(given: Any, other: Peer) -> bool:
    if (block := given.get("ipBlock")) is not None:
        address = other.address and ipaddress.ip_address(other.address)
        return bool(address) and address in ipaddress.ip_network(block["cidr"])
    if other.address:
        return False
    named = {"kubernetes.io/metadata.name": other.namespace}
    if (namespaces := given.get("namespaceSelector")) is None:
        there = other.namespace == NAMESPACE
    else:
        there = _selects(namespaces, named)
    return there and _selects(given.get("podSelector", {}), other.labels)


def _has(given: Any, target: Peer, port: int, protocol: str) -> bool:
    return given is None or any(
        target.ports.get(each["port"], each["port"]) == port
        and each.get("protocol", "TCP") == protocol
        for each in given
    )
