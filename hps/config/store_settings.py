"""The settings of the stores, `tiers.rocksdb` and `tiers.redis`, and of their guards."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from hps.config.checks import ConfigFinding, both_set, finding, incomplete_pair
from hps.config.model_schema import StrictModel

ADDRESS_PATTERN = r"^(\[[0-9a-fA-F:.]+\]|[^\s:/\[\],;]+):[0-9]{1,5}$"
TABLE_PATTERN = r"^[a-zA-Z0-9_\-]{1,120}/[a-zA-Z0-9_\-]{1,120}$"


class GuardSettings(StrictModel):
    """The guard of a tier that may block."""

    deadline_ms: float = Field(1000.0, gt=0)
    """Timeout of a fetch, within the request's deadline; in proportion for more than 10,000 keys."""
    failures_to_open: int = Field(5, ge=1)
    """Consecutive failures after which the tier is skipped."""
    retry_after_s: float = Field(1.0, gt=0)
    """Time after which a skipped tier is probed with one request."""
    concurrency: int | None = Field(None, ge=1)
    """Concurrent fetches, further ones skip the tier; null: one per lookup thread."""


class MappedSettings(StrictModel):
    """Tables served from the file `mapped` of their version; RocksDB holds what was written since."""

    enabled: bool = True
    """Map tables that RocksDB does not hold yet; off: load every table into RocksDB."""
    memory_bytes: int | None = Field(None, ge=0)
    """Bytes of files that lookups read directly, instead of the CPU cache, once these are in memory; null:
    half of the memory limit."""
    verify: Literal["later", "before_switch"] = "later"
    """When the files of a version that is loaded are verified: `later`, in the background, unless the load
    reads them into memory; `before_switch`: all of them in the load, which fails if one is damaged."""
    verify_bytes_per_s: int = Field(256 << 20, ge=0)
    """Highest rate at which the files are verified after the start, in the background, in a fiftieth of a
    processor's time, and in a load with `before_switch`; 0: not in the background, and in a load without
    a limit."""


class RocksDbSettings(StrictModel):
    """The store on the local disk; it holds every row that is not in a mapped file."""

    enabled: bool = True
    """Off: rows are in `tiers.redis` only, which then must not lose any; without it, in mapped files only,
    and no updates are taken."""
    path: Path = Path("hps-data/rocksdb")
    """Folder of the database; owned by one node process."""
    layout: Literal["native", "hps"] = "native"
    """`native` keeps a version per row; `hps` is HPS's own layout, where the last write wins."""
    block_cache_bytes: int = Field(0, ge=0)
    """Memory for blocks read from disk; 0: only the operating system's file cache, which is faster."""
    block_size: int = Field(1024, ge=256)
    """Bytes per data block; small blocks make point reads cheap."""
    threads: int = Field(2, ge=1)
    """Background threads for compaction; flushes have two more."""
    mmap_reads: bool = False
    """Read memory-mapped files: a seventh faster, but a disk failure ends the process."""
    min_free_bytes: int = Field(256 << 20, ge=0)
    """Free space to keep on the disk: below it, writes are rejected and rows are still served."""
    access: Literal["primary", "read_only", "secondary"] = "primary"
    """`primary` owns the folder and writes; `read_only` reads the tables as they are when it opens them,
    `secondary` also follows the primary's writes."""
    on_corruption: Literal["degrade", "not_ready"] = "degrade"
    """On a damaged table file, mark answers without its rows degraded; `not_ready`: also be not ready."""
    on_lost_writes: Literal["refuse", "accept"] = "refuse"
    """If acknowledged writes are missing from the write-ahead log, `refuse` to start or `accept` the loss."""
    catch_up_s: float = Field(1.0, ge=0)
    """Longest delay of a `secondary` behind the primary."""
    checkpoints: Path | None = None
    """Folder in which a running node makes checkpoints on request; null: it makes none."""
    load: bool = True
    """Load tables that the database does not hold yet; off: the database is served unchanged."""
    guard: GuardSettings = GuardSettings()
    """Limits after which the tier is skipped."""


class RedisGuardSettings(GuardSettings):
    """The guard of Redis."""

    deadline_ms: float = Field(50.0, gt=0)
    """Timeout of a fetch, within the request's deadline; in proportion for more than 10,000 keys."""
    concurrency: int | None = Field(None, ge=1)
    """Concurrent fetches, further ones skip the tier; null: fewer than `lookup_threads` and `connections`."""


class RedisTlsSettings(StrictModel):
    """TLS of the connections to Redis."""

    ca: Path | None = None
    """Trusted roots: a file, or a folder of files; null: the system's."""
    certificate: Path | None = None
    """This client's certificate, if the server requires one."""
    key: Path | None = None
    """The private key of `certificate`."""
    server_name: str | None = None
    """Name that the servers' certificates must have, sent as SNI; null: each server's address."""

    def violations(self) -> Iterator[ConfigFinding]:
        return incomplete_pair(self, "certificate", "key")


class RedisSettings(StrictModel):
    """The shared store: a Redis or Valkey that all nodes use."""

    addresses: list[Annotated[str, Field(pattern=ADDRESS_PATTERN)]] = Field(
        ["127.0.0.1:6379"], min_length=1
    )
    """`host:port` of the server, of some nodes of the cluster, or of the sentinels."""
    mode: Literal["single", "sentinel", "cluster"] = "single"
    """One server, one that sentinels elect, or a cluster."""
    sentinel_service: str | None = None
    """The sentinels' name of the monitored server."""
    sentinel_username: str | None = None
    """User at the sentinels, if they require one."""
    sentinel_password: str | None = Field(None, repr=False)
    """Password at the sentinels, if they require one."""
    sentinel_password_file: Path | None = None
    """File with that password; read again for each connection."""
    username: str | None = None
    """User of Redis' access control lists; null: Redis' default user."""
    password: str | None = Field(None, repr=False)
    """Password of that user; prefer `password_file` or HPS__TIERS__REDIS__PASSWORD."""
    password_file: Path | None = None
    """File with that password; read again for each connection."""
    database: int = Field(0, ge=0)
    """Number of the database; a cluster has only 0."""
    tls: RedisTlsSettings | None = None
    """TLS of the connections; null: plain TCP."""
    layout: Literal["native", "hps"] = "native"
    """`native` keeps a version per row; `hps` is HPS's own layout, where the last write wins."""
    partitions: int = Field(8, ge=1, le=4096)
    """Partitions per table; must not change while its rows exist."""
    connections: int = Field(8, ge=1, le=1024)
    """Connections per server, one per concurrent call; above `guard.concurrency`, so that writes get one."""
    connect_timeout_ms: float = Field(500.0, gt=0)
    """Timeout of connecting to a server, within the call's deadline."""
    timeout_ms: float = Field(5000.0, gt=0)
    """Timeout of a write, and of a read without a deadline."""
    overflow_margin: int | None = Field(None, ge=1)
    """Largest number of entries per partition, beyond which entries are evicted. null: no limit."""
    overflow_policy: Literal["random", "least_used", "oldest"] = "random"
    """The entries to evict: random, least frequently used, or least recently used."""
    overflow_resolution_target: float = Field(0.8, gt=0, le=1)
    """An overfull partition is shrunk to this share of `overflow_margin`."""
    ttl_s: float | None = Field(None, gt=0)
    """Rows whose version is older than this are not served and are removed; `native` layout only."""
    table_ttl_s: dict[Annotated[str, Field(pattern=TABLE_PATTERN)], float | None] = {}
    """`ttl_s` of single tables, by `model/table`; null: unlimited."""
    initial_cache_rate: float = Field(0.0, ge=0, le=1)
    """Share of a table's rows that is put into Redis when a model is loaded."""
    cache_missed_embeddings: bool = True
    """Copy rows found only in RocksDB into Redis, except default vectors."""
    guard: RedisGuardSettings = RedisGuardSettings()
    """Limits after which the tier is skipped."""

    def violations(self) -> Iterator[ConfigFinding]:
        yield from both_set(self, "password", "password_file")
        yield from both_set(self, "sentinel_password", "sentinel_password_file")
        if self.mode == "single" and len(self.addresses) > 1:
            message = f"has {len(self.addresses)} entries, but mode single has one server"
            yield finding("addresses", message, "mode")
        for i, address in enumerate(self.addresses):
            port = int(address.rpartition(":")[2])
            if not 0 < port < 65_536:
                message = f"has port {port}; a port is a number from 1 to 65535"
                yield ConfigFinding(("addresses", i), message)
        if self.mode == "sentinel" and self.sentinel_service is None:
            message = "must be set with mode sentinel: the sentinels' name of the monitored server"
            yield finding("sentinel_service", message, "mode")
        if self.mode == "cluster" and self.database:
            message = f"is {self.database}, but a cluster has only database 0"
            yield finding("database", message, "mode")
        if self.layout == "hps":
            message = (
                "needs layout native: rows of HPS's layout have no version, so their age is unknown"
            )
            for name in self.ttls:
                yield finding(name, message, "layout")

    @property
    def ttls(self) -> list[str]:
        """The settings that limit the age of rows."""
        names = ["ttl_s"] if self.ttl_s is not None else []
        return names + (["table_ttl_s"] if any(self.table_ttl_s.values()) else [])
