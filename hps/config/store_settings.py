"""The settings of the stores, `tiers.rocksdb` and `tiers.redis`, and of what protects lookups from them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from hps.config import checks
from hps.config.model_schema import StrictModel

ADDRESS_PATTERN = r"^(\[[0-9a-fA-F:.]+\]|[^\s:/\[\],;]+):[0-9]{1,5}$"
TABLE_PATTERN = r"^[a-zA-Z0-9_\-]{1,120}/[a-zA-Z0-9_\-]{1,120}$"


class GuardSettings(StrictModel):
    """Protection around a tier that may block."""

    deadline_ms: float = Field(1000.0, gt=0)
    """Longest time a fetch may take, within the request's own deadline; beyond 10,000 keys in proportion."""
    failures_to_open: int = Field(5, ge=1)
    """Failures in a row after which the tier is skipped."""
    retry_after_s: float = Field(1.0, gt=0)
    """Time until a skipped tier is tried again with one request."""
    concurrency: int | None = Field(None, ge=1)
    """Fetches at a time, further ones skip the tier; null: one per thread that may ask."""


class RocksDbSettings(StrictModel):
    """The store on the local disk; it holds every row."""

    enabled: bool = True
    """Off: every row is kept in `tiers.redis` alone, which then must not lose any."""
    path: Path = Path("hps-data/rocksdb")
    """Folder of the database; owned by one node process."""
    layout: Literal["native", "hps"] = "native"
    """`native` keeps a version per row; `hps` is HPS's own layout, where the last write wins."""
    block_cache_bytes: int = Field(0, ge=0)
    """Memory for blocks read from disk; 0 leaves it to the operating system's file cache: faster."""
    block_size: int = Field(1024, ge=256)
    """Bytes per data block; small blocks make point reads cheap."""
    threads: int = Field(2, ge=1)
    """Background threads for compaction; flushes have two of their own."""
    mmap_reads: bool = False
    """Read mapped files: a seventh faster, but a disk that fails under them ends the process."""
    min_free_bytes: int = Field(256 << 20, ge=0)
    """Space on the disk that is left to others: below it writes are refused, and rows are still served."""
    access: Literal["primary", "read_only", "secondary"] = "primary"
    """`primary` owns the folder. Others may read tables it has loaded: `read_only` as they are when it
    opens, `secondary` following the primary's writes."""
    on_corruption: Literal["degrade", "not_ready"] = "degrade"
    """When a table file is damaged: mark answers without its rows `degrade`d, or be `not_ready` as well."""
    on_lost_writes: Literal["refuse", "accept"] = "refuse"
    """When acknowledged writes are missing from the write-ahead log: `refuse` to start, or `accept` that."""
    catch_up_s: float = Field(1.0, ge=0)
    """How far a `secondary` may be behind the primary when it answers."""
    checkpoints: Path | None = None
    """Folder in which a running node makes checkpoints when it is asked to; null: it makes none."""
    load: bool = True
    """Load tables that the database does not hold yet; off: what is there is served as it is."""
    guard: GuardSettings = GuardSettings()
    """What happens when it fails or is late."""


class RedisGuardSettings(GuardSettings):
    """Protection around Redis."""

    deadline_ms: float = Field(50.0, gt=0)
    """Longest time a fetch may take, within the request's own deadline; beyond 10,000 keys in proportion."""
    concurrency: int | None = Field(None, ge=1)
    """Fetches at a time, further ones skip the tier; null: fewer than `lookup_threads` and `connections`."""


class RedisTlsSettings(StrictModel):
    """Encryption of the connections to Redis."""

    ca: Path | None = None
    """Certificates to trust: a file, or a folder of them; null: the system's."""
    certificate: Path | None = None
    """This client's certificate, where the server asks for one."""
    key: Path | None = None
    """The key of `certificate`."""
    server_name: str | None = None
    """Name the servers' certificates must bear, sent to them (SNI); null: each server's address."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        return self.consistent(checks.pair("certificate", self.certificate, "key", self.key))


class RedisSettings(StrictModel):
    """Warm rows in a Redis or Valkey that all nodes share."""

    addresses: list[Annotated[str, Field(pattern=ADDRESS_PATTERN)]] = Field(
        ["127.0.0.1:6379"], min_length=1
    )
    """`host:port` of the server; of some nodes of the cluster; or of the sentinels."""
    mode: Literal["single", "sentinel", "cluster"] = "single"
    """One server, one that sentinels name, or a cluster."""
    sentinel_service: str | None = None
    """The name under which the sentinels watch the server."""
    sentinel_username: str | None = None
    """User for the sentinels, where they ask for one."""
    sentinel_password: str | None = Field(None, repr=False)
    """Password for the sentinels, where they ask for one."""
    sentinel_password_file: Path | None = None
    """File with that password instead; read again for each connection."""
    username: str | None = None
    """User of Redis' access control lists; null: Redis' default user."""
    password: str | None = Field(None, repr=False)
    """Password of that user; better in `password_file`, or given as HPS__TIERS__REDIS__PASSWORD."""
    password_file: Path | None = None
    """File with that password instead; read again for each connection."""
    database: int = Field(0, ge=0)
    """Number of the database; a cluster has only 0."""
    tls: RedisTlsSettings | None = None
    """Encrypt the connections; null: plain TCP."""
    layout: Literal["native", "hps"] = "native"
    """`native` keeps a version per row; `hps` is HPS's own layout, where the last write wins."""
    partitions: int = Field(8, ge=1, le=4096)
    """Parts each table is spread over; must stay the same as long as its rows are there."""
    connections: int = Field(8, ge=1, le=1024)
    """Connections to each server, and calls at a time; above `guard.concurrency`, so that writes get one."""
    connect_timeout_ms: float = Field(500.0, gt=0)
    """Longest time to connect to a server, within the call's own deadline."""
    timeout_ms: float = Field(5000.0, gt=0)
    """Longest time for a write, and for a read that brings no deadline."""
    overflow_margin: int | None = Field(None, ge=1)
    """Most entries per partition; beyond it, entries are evicted. null: no limit of ours."""
    overflow_policy: Literal["random", "least_used", "oldest"] = "random"
    """Which entries go: any, those used least often, or those whose last use is longest ago."""
    overflow_resolution_target: float = Field(0.8, gt=0, le=1)
    """A partition with too many entries is shrunk to this share of `overflow_margin`."""
    ttl_s: float | None = Field(None, gt=0)
    """Rows whose version is older than this are not served and are removed; `native` layout only."""
    table_ttl_s: dict[Annotated[str, Field(pattern=TABLE_PATTERN)], float | None] = {}
    """`ttl_s` for single tables, by `model/table`; null: no end."""
    initial_cache_rate: float = Field(0.0, ge=0, le=1)
    """Share of a table's rows that is put into Redis when a model is loaded."""
    cache_missed_embeddings: bool = True
    """Put rows that only RocksDB held into Redis as well; never defaults."""
    guard: RedisGuardSettings = RedisGuardSettings()
    """What happens when it fails or is late."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        twice = [
            finding
            for name in ("password", "sentinel_password")
            for finding in checks.either(
                name, getattr(self, name), f"{name}_file", getattr(self, f"{name}_file")
            )
        ]
        return self.consistent(
            twice
            + checks.redis(
                self.mode,
                self.addresses,
                self.sentinel_service,
                self.database,
                self.layout,
                self.ttls,
            )
        )

    @property
    def ttls(self) -> list[str]:
        """The settings that limit the age of rows."""
        given = ["ttl_s"] if self.ttl_s is not None else []
        return given + (["table_ttl_s"] if any(self.table_ttl_s.values()) else [])
