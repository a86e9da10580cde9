"""Rules that span several settings.

They take plain values, so that the schema can run them; those of ``model.yaml`` are in
``model_checks.py``. Each returns findings: a path below the checked object, and one sentence."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address

_HOST = re.compile(r"[^\s:/\[\],;]+|\[[0-9a-fA-F:.]+\]")

Path = tuple[str | int, ...]


@dataclass(frozen=True)
class ConfigFinding:
    """A violated rule: ``path`` below the checked object, ``message`` for users.

    ``also``: the other paths involved."""

    path: Path
    message: str
    also: tuple[Path, ...] = ()


def duplicates(names: Sequence[str], where: str, what: str) -> list[ConfigFinding]:
    """One finding per repeated name; it names both positions."""
    first: dict[str, int] = {}
    findings = []
    for i, name in enumerate(names):
        if name in first:
            message = f"two {what} are called {name!r} ({where}[{first[name]}] and {where}[{i}])"
            findings.append(
                ConfigFinding((where, i, "name"), message, ((where, first[name], "name"),))
            )
        else:
            first[name] = i
    return findings


def is_loopback(host: str) -> bool:
    """True if only this machine can reach ``host``; an unknown name counts as reachable."""
    if host.lower() == "localhost":
        return True
    try:
        address = ip_address(host.strip("[]"))
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def shared_memory(on: bool, workers: int) -> list[ConfigFinding]:
    """Shared memory needs a single worker: a region is registered with one process only."""
    if on and workers > 1:
        message = (
            f"can't be used with {workers} workers: a region is registered with one worker only; "
            "set workers to 0 or 1"
        )
        return [ConfigFinding(("shared_memory",), message, (("workers",),))]
    return []


def ports(listeners: Mapping[str, tuple[str, int]]) -> list[ConfigFinding]:
    """Two listeners must not share a port, unless their addresses differ."""
    findings = []
    seen: list[tuple[str, str, int]] = []
    for name, (host, port) in listeners.items():
        for other, other_host, other_port in seen:
            overlap = host == other_host or {host, other_host} & {"0.0.0.0", "::", ""}
            if port and port == other_port and overlap:
                message = (
                    f"is {port}, the same as server.{other}.port; every listener needs its own"
                )
                one, two = tuple(name.split(".")), tuple(other.split("."))
                also = ((*two, "port"), (*two, "host"), (*one, "host"))
                findings.append(ConfigFinding((*one, "port"), message, also))
        seen.append((name, host, port))
    return findings


def auth(mode: str | None, sources: Sequence[str]) -> list[ConfigFinding]:
    """API keys need an explicit ``auth.mode``: without it, they would have no effect."""
    if mode is None and sources:
        message = f"must be set with auth.{sources[0]}: api_key or off"
        return [ConfigFinding(("mode",), message, ((sources[0],),))]
    if mode == "api_key" and not sources:
        return [
            ConfigFinding(("mode",), "is api_key, but neither auth.keys_file nor auth.keys is set")
        ]
    return []


def caller(key: bool, certificate: bool) -> list[ConfigFinding]:
    """A caller has either a key or a certificate."""
    if key and certificate:
        return [
            ConfigFinding(("certificate",), "is set together with key; a caller has one of them")
        ]
    if not key and not certificate:
        return [ConfigFinding(("key",), "is missing, and so is certificate; one of them is needed")]
    return []


def pair(name: str, value: object, other: str, other_value: object) -> list[ConfigFinding]:
    """Two settings that must be set together."""
    for present, present_value, missing, missing_value in (
        (name, value, other, other_value),
        (other, other_value, name, value),
    ):
        if present_value is not None and missing_value is None:
            message = f"must be set together with {present}"
            return [ConfigFinding((missing,), message, ((present,),))]
    return []


def either(name: str, value: object, other: str, other_value: object) -> list[ConfigFinding]:
    """Two settings that exclude each other."""
    if value is not None and other_value is not None:
        return [
            ConfigFinding((other,), f"is set together with {name}; remove one of them", ((name,),))
        ]
    return []


def redis(
    mode: str,
    addresses: Sequence[str],
    service: str | None,
    database: int,
    layout: str,
    ttls: Sequence[str],
) -> list[ConfigFinding]:
    findings = []
    if mode == "single" and len(addresses) > 1:
        message = f"has {len(addresses)} entries, but mode single has one server"
        findings.append(ConfigFinding(("addresses",), message, (("mode",),)))
    for i, address in enumerate(addresses):
        port = int(address.rpartition(":")[2])
        if not 0 < port < 65_536:
            message = f"has port {port}; a port is a number from 1 to 65535"
            findings.append(ConfigFinding(("addresses", i), message))
    if mode == "sentinel" and service is None:
        message = "must be set with mode sentinel: the sentinels' name of the monitored server"
        findings.append(ConfigFinding(("sentinel_service",), message, (("mode",),)))
    if mode == "cluster" and database:
        message = f"is {database}, but a cluster has only database 0"
        findings.append(ConfigFinding(("database",), message, (("mode",),)))
    if layout == "hps":
        message = (
            "needs layout native: rows of HPS's layout have no version, so their age is unknown"
        )
        findings += [ConfigFinding((name,), message, (("layout",),)) for name in ttls]
    return findings


def stores(redis: str | None, rocksdb: str | None, *, overflow: bool) -> list[ConfigFinding]:
    """Every row needs a store that keeps it, and all stores the same layout.

    The stores are given by their layouts; ``overflow``: Redis drops rows. Rows without versions would
    always
    count as older than rows with versions."""
    if redis is None and rocksdb is None:
        message = "is false, and tiers.redis is not set; one of them must store the rows"
        return [ConfigFinding(("rocksdb", "enabled"), message, (("redis",),))]
    if rocksdb is None and overflow:
        message = (
            "would lose rows permanently, because tiers.rocksdb.enabled is false; set it to null"
        )
        return [ConfigFinding(("redis", "overflow_margin"), message, (("rocksdb", "enabled"),))]
    if redis is None or rocksdb is None or redis == rocksdb:
        return []
    message = (
        f"is {redis}, but tiers.rocksdb.layout is {rocksdb}; rows without versions would always "
        "count as older than rows with versions: use the same layout for both"
    )
    return [ConfigFinding(("redis", "layout"), message, (("rocksdb", "layout"),))]


def cpu_cache(*, shared: bool, huge_pages: str) -> list[ConfigFinding]:
    if shared and huge_pages == "reserved":
        message = "reserved pages can't be shared by name; use transparent"
        return [ConfigFinding(("huge_pages",), message, (("shared", "name"),))]
    return []


def workers(count: int, gpu: str, huge_pages: str) -> list[ConfigFinding]:
    """Workers read the node's CPU cache in shared memory; they cannot read a GPU cache."""
    findings = []
    if count and gpu == "required":
        message = (
            f"is {count}, but workers can't use the node's GPU cache; set tiers.gpu.use to off"
        )
        findings.append(ConfigFinding(("server", "workers"), message, (("tiers", "gpu", "use"),)))
    if count and huge_pages == "reserved":
        message = "is reserved, which can't be shared with server.workers; use transparent"
        also = (("server", "workers"),)
        findings.append(ConfigFinding(("tiers", "cpu_cache", "huge_pages"), message, also))
    return findings


def lookup_nodes(nodes: Sequence[str]) -> list[ConfigFinding]:
    """Each node is ``host:port``, or a DNS name that stands for several nodes."""
    findings = []
    for i, node in enumerate(nodes):
        host, _, port = node.removeprefix("dns:///").rpartition(":")
        if not _HOST.fullmatch(host) or not port.isdecimal() or not 0 < int(port) < 65_536:
            message = f"expected host:port or dns:///name:port, found {node!r}"
            findings.append(ConfigFinding(("nodes", i), message))
    return findings


def role(role: str, workers: int, *, grpc: bool, nodes: bool) -> list[ConfigFinding]:
    """Each role has the settings that it needs; one file may serve all roles."""
    findings = []
    if role == "frontend" and not nodes:
        message = "is empty, but server.role is frontend; name the gRPC ports of the lookup nodes"
        findings.append(ConfigFinding(("lookup", "nodes"), message, (("server", "role"),)))
    if role == "frontend" and workers:
        message = f"is {workers}, but server.role is frontend; start several front ends instead"
        findings.append(ConfigFinding(("server", "workers"), message, (("server", "role"),)))
    if role == "lookup" and not grpc:
        message = "is null, but server.role is lookup: front ends use gRPC"
        findings.append(ConfigFinding(("server", "grpc"), message, (("server", "role"),)))
    return findings


def gpu(
    devices: Sequence[int], eviction: str, epoch_s: float | None, host_bytes: int, *, static: bool
) -> list[ConfigFinding]:
    findings = []
    if len(set(devices)) != len(devices):
        findings.append(ConfigFinding(("devices",), f"names a GPU twice: {list(devices)}"))
    if epoch_s is not None and eviction != "lfu":
        message = f"needs eviction lfu, found {epoch_s:g} with eviction {eviction}"
        findings.append(ConfigFinding(("epoch_s",), message, (("eviction",),)))
    if static and host_bytes:
        message = f"is {host_bytes}, but static tables are entirely in GPU memory"
        findings.append(ConfigFinding(("host_bytes",), message, (("static",),)))
    return findings


def triton(shared_memory: str, url: str) -> list[ConfigFinding]:
    """Shared memory needs a Triton on this machine."""
    findings = []
    host, _, port = url.rpartition(":")
    if not _HOST.fullmatch(host) or not port.isdecimal() or not 0 < int(port) < 65_536:
        findings.append(
            ConfigFinding(("triton", "url"), f"expected host:port without a scheme, found {url!r}")
        )
    elif shared_memory != "none" and not is_loopback(url.rpartition(":")[0]):
        message = f"is {shared_memory}, but {url} is not this machine"
        findings.append(ConfigFinding(("triton", "shared_memory"), message, (("triton", "url"),)))
    return findings
