"""``volatile_db`` of a ``ps.json`` with type ``redis_cluster``, as ``tiers.redis``."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Any

from hps.config.checks import Path as KeyPath
from hps.config.ps_json.keys import MAX_U64, V
from hps.config.ps_json.values import PsJsonReader, PsJsonSection
from hps.config.store_settings import ADDRESS_PATTERN

# HPS's default file names.
_FILES = {
    "ca": "tls_ca_certificate",
    "certificate": "tls_client_certificate",
    "key": "tls_client_key",
}
TLS = (*_FILES.values(), "tls_server_name_identification")

Setting = tuple[KeyPath, Any, str]
"""A path below ``tiers.redis``, its value, and the key of ``volatile_db`` behind it."""


def redis_settings(reader: PsJsonReader, memory: PsJsonSection) -> Iterator[Setting]:
    """Convert the keys; ``reader`` records the errors."""
    yield ("mode",), "cluster", "type"
    yield ("layout",), "hps", "type"
    yield ("addresses",), _addresses(reader, str(memory["address"])), "address"
    if memory["user_name"] != "default":
        yield ("username",), str(memory["user_name"]), "user_name"
    if memory["password"]:
        yield ("password",), str(memory["password"]), "password"
    yield ("partitions",), _partitions(reader, memory), "num_partitions"
    yield (
        ("connections",),
        _at_least_one(reader, memory, "num_node_connections"),
        ("num_node_connections"),
    )
    if memory["enable_tls"]:
        yield from _tls(reader, memory)
    if memory["overflow_margin"] < MAX_U64:
        yield (
            ("overflow_margin",),
            _at_least_one(reader, memory, "overflow_margin"),
            ("overflow_margin"),
        )
    policy = str(memory["overflow_policy"]).removeprefix("evict_")
    yield ("overflow_policy",), policy, "overflow_policy"
    target = "overflow_resolution_target"
    yield (target,), float(memory[target]), target
    yield (
        ("cache_missed_embeddings",),
        bool(memory["cache_missed_embeddings"]),
        ("cache_missed_embeddings"),
    )
    if memory["initialize_after_startup"]:
        rate = float(memory["initial_cache_rate"])
        yield ("initial_cache_rate",), rate, "initial_cache_rate"
    else:
        yield ("initial_cache_rate",), 0.0, "initialize_after_startup"


def _addresses(reader: PsJsonReader, given: str) -> list[str]:
    found = [part.strip() for part in re.split("[,;]", given) if part.strip()]
    for address in found:
        if not re.match(ADDRESS_PATTERN, address):
            reader.wrong((V, "address"), f"expected host:port, found {address!r}")
    if not found:
        reader.wrong((V, "address"), "is empty; expected host:port")
    return found


def _partitions(reader: PsJsonReader, memory: PsJsonSection) -> int:
    """Number of partitions. HPS's default depends on its machine's threads, so it may differ from ours."""
    if "num_partitions" in memory:
        return _at_least_one(reader, memory, "num_partitions")
    return min(16, os.cpu_count() or 1)


def _at_least_one(reader: PsJsonReader, memory: PsJsonSection, name: str) -> int:
    value = int(memory[name])
    if value < 1:
        reader.wrong((V, name), f"expected a whole number from 1, found {value}")
    return value


def _tls(reader: PsJsonReader, memory: PsJsonSection) -> Iterator[Setting]:
    for name, key in _FILES.items():
        path = reader.folder / str(memory[key])
        if key in memory or path.exists():
            yield ("tls", name), str(path), key
    name = "tls_server_name_identification"
    yield ("tls", "server_name"), str(memory[name]), name
