"""Checks of RocksDB's folder and of Redis."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hps.errors import TierError, TierTimeout
from hps.tools.doctor.check import DoctorCheck, Verdict, attempt, failed
from hps.tools.doctor.clocks import clock, skew
from hps.tools.output import plural, size

if TYPE_CHECKING:
    from hps.config.store_settings import RedisSettings, RocksDbSettings
    from hps.tiers.redis.client import RedisClient
    from hps.types import EmbeddingTable

# While tables are loaded, they are on disk twice: in the model's files and in the database; compaction
# needs more space.
DISK_FACTOR = 2
_TIMEOUT_MS = 2000.0
_REMEDY = "start it, or correct tiers.redis"
# Above this share of maxmemory, evictions or rejected writes are near.
_FULL = 0.9
_SAVING = {"rdb_last_bgsave_status": "its last snapshot", "aof_last_write_status": "its last write"}


def rocksdb(settings: RocksDbSettings, table_bytes: int) -> DoctorCheck:
    """Check that the folder is writable and has room for the tables and for ``min_free_bytes``."""
    if settings.access != "primary":
        there = settings.path.is_dir() and os.access(settings.path, os.R_OK | os.X_OK)
        if there:
            return DoctorCheck("database", "OK", f"{settings.path}, {settings.access}")
        remedy = "start the node that owns it first, or set tiers.rocksdb.path"
        return DoctorCheck("database", "FAIL", f"{settings.path} is no folder one may read", remedy)
    found = database(settings.path, table_bytes)
    if found.verdict != "OK" or not settings.path.exists():
        return found
    free = shutil.disk_usage(settings.path).free
    if free < 2 * settings.min_free_bytes:
        remedy = "make room: below tiers.rocksdb.min_free_bytes writes are refused"
        verdict: Verdict = "FAIL" if free < settings.min_free_bytes else "WARN"
        return DoctorCheck("database", verdict, f"{settings.path}, only {size(free)} free", remedy)
    return found


def database(path: Path, table_bytes: int) -> DoctorCheck:
    """Check that the folder is writable and has room for tables that it does not hold yet."""
    there = path.absolute()
    while not there.exists():
        there = there.parent
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        remedy = "give this user the right, or set tiers.rocksdb.path"
        return DoctorCheck("database", "FAIL", f"{there} is not a folder one may write to", remedy)
    free = shutil.disk_usage(there).free
    if path.exists() or free >= DISK_FACTOR * table_bytes:
        return DoctorCheck("database", "OK", f"{path}, {size(free)} free")
    found = f"{path}: {size(free)} free, the tables need about {size(DISK_FACTOR * table_bytes)}"
    return DoctorCheck(
        "database", "FAIL", found, "make room, or set tiers.rocksdb.path to a larger disk"
    )


def redis(settings: RedisSettings, tables: Sequence[EmbeddingTable]) -> Iterator[DoctorCheck]:
    """Check each Redis server, and that each table is stored as it would be read."""
    from hps.tiers.redis import RedisTier
    from hps.tiers.redis.client import RedisClient

    timeout_ms = min(settings.timeout_ms, _TIMEOUT_MS)
    checked = settings.model_copy(update={"timeout_ms": timeout_ms})
    client = RedisClient(checked)
    try:
        slots = client.primaries()
        for number, slot in enumerate(slots):
            name = "Redis" if len(slots) == 1 else f"Redis, server {number + 1} of {len(slots)}"
            answers = attempt(name, partial(_server, name, client, slot))
            yield answers
            if answers.verdict == "FAIL" and len(slots) == 1:
                return
            if answers.verdict != "FAIL":
                yield attempt(f"{name}: clock", partial(_clock, f"{name}: clock", client, slot))
    except TierError as error:
        yield failed("Redis", error, _REMEDY)
        return
    finally:
        client.close()
    tier = RedisTier(checked)
    try:
        for table in tables:
            name = f"Redis: {table.model}/{table.name}"
            try:
                tier.check(table)
                used = tier.usage(table)
            except TierTimeout as error:
                yield failed("Redis", error, _REMEDY)
                return
            except TierError as error:
                yield failed(name, error)
            else:
                found = f"{plural(used.entries, 'row')}, {size(used.bytes)}, {settings.layout}"
                yield DoctorCheck(name, "OK", found)
    finally:
        tier.close()


def _server(name: str, client: RedisClient, slot: int) -> DoctorCheck:
    """Check version, memory, replication and persistence of one server."""
    try:
        info = _facts(client.call_slot(slot, "INFO"))
    except TierError as error:
        if "NOPERM" not in str(error) and "permission" not in str(error):
            raise
        return DoctorCheck(name, "OK", "it answers; its user may not ask for more (INFO)")
    kind = "Valkey" if "valkey_version" in info else "Redis"
    version = info.get("valkey_version") or info.get("redis_version", "")
    used, most = int(info.get("used_memory", 0)), int(info.get("maxmemory", 0))
    found = f"{kind} {version}, {size(used)} used" + (f" of {size(most)}" if most else "")
    if most and used > _FULL * most:
        policy = info.get("maxmemory_policy", "")
        remedy = "give it more memory (maxmemory), or set tiers.redis.overflow_margin"
        return DoctorCheck(name, "WARN", f"{found}, policy {policy}", remedy)
    if info.get("loading") == "1":
        return DoctorCheck(name, "WARN", f"{found}; it loads its data", "wait until it has")
    if info.get("role") == "slave":
        remedy = "name its primary in tiers.redis.addresses, or its sentinels"
        return DoctorCheck(name, "FAIL", f"{found}; it is a replica, which takes no writes", remedy)
    for fact, what in _SAVING.items():
        if info.get(fact, "ok") != "ok":
            remedy = "see its log; make room on its disk: meanwhile it may refuse writes (MISCONF)"
            return DoctorCheck(name, "WARN", f"{found}; {what} failed", remedy)
    return DoctorCheck(name, "OK", found)


def _facts(info: Any) -> dict[str, str]:
    lines = (line.partition(":") for line in bytes(info).decode("utf-8", "replace").splitlines())
    return {fact: value for fact, colon, value in lines if colon}


def _clock(name: str, client: RedisClient, slot: int) -> DoctorCheck:
    def now() -> float:
        seconds, micros = client.call_slot(slot, "TIME")
        return int(seconds) + int(micros) * 1e-6

    return clock(name, skew(now))
