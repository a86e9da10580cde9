"""Folder of a node's socket and name of its shared cache, by which other processes find it.

Both derive from something that only one node at a time can own. A node that restarts after a kill thus
finds the leftovers, and reuses or removes them."""

from __future__ import annotations

import hashlib
import os
import secrets
import tempfile
from pathlib import Path

from hps.config.schema import Settings


def for_workers(settings: Settings) -> Settings:
    """Adapt ``settings`` to a node with workers: set ``server.runtime`` and share the CPU cache."""
    runtime = settings.server.runtime or _own_folder(settings)
    server = settings.server.model_copy(update={"runtime": runtime})
    return with_shared_cache(settings.model_copy(update={"server": server}))


def with_shared_cache(settings: Settings) -> Settings:
    """Add a shared CPU cache to ``settings`` if ``server.runtime`` lets others attach."""
    runtime, cache = settings.server.runtime, settings.tiers.cpu_cache
    if runtime is None or not cache.enabled or cache.shared.name is not None:
        return settings
    shared = cache.shared.model_copy(update={"name": f"node-{_digest(str(runtime.absolute()))}"})
    tiers = settings.tiers.model_copy(
        update={"cpu_cache": cache.model_copy(update={"shared": shared})}
    )
    return settings.model_copy(update={"tiers": tiers})


def _own_folder(settings: Settings) -> Path:
    rocksdb, http = settings.tiers.rocksdb, settings.server.http
    if rocksdb.enabled and rocksdb.access == "primary":
        own = f"rocksdb {rocksdb.path.absolute()}"
    elif http.port:
        own = f"port {http.host} {http.port}"
    else:
        own = secrets.token_hex()
    return Path(tempfile.gettempdir()) / f"hps-{os.getuid()}-{_digest(own)}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]
