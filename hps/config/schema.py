"""The server's settings: one YAML file, top keys ``models tiers updates dense server auth``.

One field, one sentence. ``hps config schema`` prints this as JSON Schema; ``hps config show`` prints
what is in force and where each value came from.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from hps.config import checks
from hps.config.model_schema import DenseSpec, MissPolicySpec, Name, Strict

Eviction = Literal["lru", "lfu", "random", "fifo"]
KEY_PATTERN = r"^[\x21-\x7e]{16,512}$"
ADDRESS_PATTERN = r"^(\[[0-9a-fA-F:.]+\]|[^\s:/\[\],;]+):[0-9]{1,5}$"
TABLE_PATTERN = r"^[a-zA-Z0-9_\-]{1,120}/[a-zA-Z0-9_\-]{1,120}$"


class TableOverride(Strict):
    """Overrides one table's entry of `model.yaml`."""

    default: float | list[float] | None = None
    """What an unknown key gets: one number, or `dim` of them."""
    miss_policy: MissPolicySpec | None = None
    """What a lookup does with keys that no memory tier holds."""
    tombstone_ttl_s: float | None = Field(None, ge=0)
    """How long a deletion is remembered, in seconds."""
    cache_rows: int | None = Field(None, ge=0)
    """CPU cache capacity of this table, in rows; 0 keeps it out of the cache."""
    cache_share: float | None = Field(None, gt=0, le=1)
    """CPU cache capacity as a share of this table's rows; `cache_rows` goes first."""
    cache_eviction: Eviction | None = None
    """Which row of this table makes room in the CPU cache; null: as `tiers.cpu_cache.eviction` says."""


class ModelOverride(Strict):
    """Overrides parts of one model's `model.yaml`."""

    version: int | None = Field(None, ge=1)
    """The version to serve; default: the highest one in the repository."""
    tables: dict[Name, TableOverride] = {}
    """Overrides by table name."""
    dense: DenseSpec | None = None
    """Takes the place of the model's whole dense part."""
    max_batch_size: int | None = Field(None, ge=1)
    """Largest batch of one request."""


class ModelsSettings(Strict):
    """What is served."""

    repository: Path = Path("models")
    """Folder of the model repository."""
    serve: dict[Name, ModelOverride] | None = None
    """The models to serve, with overrides; null: every model of the repository."""


class SharedCacheSettings(Strict):
    """The cache in memory that other processes of this machine can attach to."""

    name: str | None = Field(None, pattern=r"^[a-zA-Z0-9_\-]{1,100}$")
    """Name of the cache, which one process at a time owns; null: it is this process's alone."""
    folder: Path = Path("/dev/shm")
    """Folder of a memory file system with room for all of it."""
    take_over: bool = False
    """Keep the rows of an owner that was killed; only where nothing else changes the stores meanwhile."""


class SnapshotSettings(Strict):
    """Which keys are hot, kept in a file, so that the cache is warm after a restart."""

    path: Path | None = None
    """File of the hot keys; null: none is kept."""
    interval_s: float = Field(60.0, gt=0)
    """Seconds from one writing to the next; it is written at the end too."""
    keys: int | None = Field(None, ge=1)
    """Most keys per table; null: all that are in the cache."""
    bytes_per_s: int = Field(64 << 20, ge=1024)
    """How fast it is written at most; a key takes 9 bytes."""


class CpuCacheSettings(Strict):
    """The cache in host memory."""

    enabled: bool = True
    """Off: every lookup asks the store."""
    capacity_bytes: int = Field(1 << 30, ge=0)
    """Bytes shared out over the tables by their size, unless `cache_rows` or `share` says otherwise."""
    share: float | None = Field(None, gt=0, le=1)
    """Capacity as a share of each table's rows instead of bytes."""
    eviction: Eviction = "lru"
    """Which row makes room: the one used longest ago, the one used least, any, the one that came first."""
    threads: int = Field(1, ge=1, le=256)
    """Threads that one lookup of many keys may use."""
    huge_pages: Literal["try", "transparent", "reserved", "off"] = "try"
    """`try`: where the system gives them; `transparent`, or `reserved` by vm.nr_hugepages: or an error."""
    numa_node: int | None = Field(None, ge=0, lt=1024)
    """Keep the cache in the memory of this NUMA node; null: wherever the system puts it."""
    shared: SharedCacheSettings = SharedCacheSettings()
    """Lets other processes attach to the cache."""
    snapshot: SnapshotSettings = SnapshotSettings()
    """Keeps the hot keys over a restart."""
    warm: bool = True
    """Fill the cache before the node is ready: with the snapshot's keys, or else the first of the files."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        return self.consistent(
            checks.cpu_cache(shared=self.shared.name is not None, huge_pages=self.huge_pages)
        )


class GuardSettings(Strict):
    """Protection around a tier that may block."""

    deadline_ms: float = Field(1000.0, gt=0)
    """Longest time a fetch may take, within the request's own deadline; beyond 10,000 keys in proportion."""
    failures_to_open: int = Field(5, ge=1)
    """Failures in a row after which the tier is skipped."""
    retry_after_s: float = Field(1.0, gt=0)
    """Time until a skipped tier is tried again with one request."""
    concurrency: int | None = Field(None, ge=1)
    """Fetches at a time, further ones skip the tier; null: one per thread that may ask."""


class RocksDbSettings(Strict):
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
    catch_up_s: float = Field(1.0, ge=0)
    """How far a `secondary` may be behind the primary when it answers."""
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


class RedisTlsSettings(Strict):
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


class RedisSettings(Strict):
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
    username: str | None = None
    """User of Redis' access control lists; null: Redis' default user."""
    password: str | None = Field(None, repr=False)
    """Password of that user; better given as HPS__TIERS__REDIS__PASSWORD than in the file."""
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
        return self.consistent(
            checks.redis(
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


class TiersSettings(Strict):
    """Where rows are kept, fastest first, and how lookups reach them."""

    cpu_cache: CpuCacheSettings = CpuCacheSettings()
    """The cache in host memory."""
    rocksdb: RocksDbSettings = RocksDbSettings()
    """The store on the local disk."""
    redis: RedisSettings | None = None
    """A store that all nodes share, asked before the local one; null: none."""
    lookup_threads: int = Field(4, ge=1)
    """Threads for lookups that must ask a store."""
    lookup_queue: int = Field(1024, ge=1)
    """Lookups that may wait for such a thread before new ones are refused (503)."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        redis = self.redis.layout if self.redis is not None else None
        rocksdb = self.rocksdb.layout if self.rocksdb.enabled else None
        overflow = self.redis is not None and self.redis.overflow_margin is not None
        return self.consistent(checks.stores(redis, rocksdb, overflow=overflow))


class UpdatesSettings(Strict):
    """How rows change while they are served."""

    promote_queue_keys: int = Field(1 << 20, ge=1)
    """Keys waiting to be promoted into the caches; more are dropped and counted."""


class DenseSettings(Strict):
    """How dense networks run."""

    provider: Literal["auto", "cpu", "cuda"] = "auto"
    """Where ONNX Runtime runs; `auto` takes CUDA when onnxruntime-gpu and a GPU are there."""
    threads: int = Field(1, ge=0)
    """Threads inside one run of the network; 0 lets ONNX Runtime choose."""
    inline_us: float = Field(150.0, ge=0)
    """Networks that answer faster than this, measured at start, run without a thread hop."""
    runs: int = Field(4, ge=1)
    """Longer runs at a time; each has a thread of its own."""
    queue: int = Field(1024, ge=1)
    """Runs that may wait for such a thread before new ones are refused (503)."""


class HttpSettings(Strict):
    """The port of the Open Inference Protocol."""

    host: str = Field("127.0.0.1", min_length=1)
    """Address to listen on; beyond loopback `auth.mode` must be stated."""
    port: int = Field(8000, ge=0, le=65_535)
    """0 picks a free port, printed at start."""


class AdminSettings(Strict):
    """The port of status, metrics and administration."""

    host: str = Field("127.0.0.1", min_length=1)
    """Address to listen on; beyond loopback `auth.mode` must be stated."""
    port: int = Field(8002, ge=0, le=65_535)
    """0 picks a free port, printed at start."""


class ServerSettings(Strict):
    """Ports and limits of the server."""

    http: HttpSettings = HttpSettings()
    """The port of the Open Inference Protocol."""
    admin: AdminSettings = AdminSettings()
    """The port of status, metrics and administration."""
    max_body_bytes: int = Field(64 << 20, ge=1024)
    """Largest request body, after decompression; larger ones get 413."""
    max_keys: int = Field(4_000_000, ge=1)
    """Most keys in one request; more get 413."""
    request_timeout_ms: float = Field(10_000.0, gt=0)
    """Deadline of a request that brings none."""
    drain_s: float = Field(10.0, ge=0)
    """How long a stopping server finishes what it has accepted."""
    docs: bool = True
    """Serve /docs and /openapi.json on the admin port."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """`debug` also logs every request, one line each."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        listeners = {
            "http": (self.http.host, self.http.port),
            "admin": (self.admin.host, self.admin.port),
        }
        return self.consistent(checks.ports(listeners))


class ApiKey(Strict):
    """One caller of the server."""

    name: str = Field(min_length=1, max_length=120)
    """Who uses this key; shown in logs, never the key itself."""
    role: Literal["read", "write", "admin"]
    """`read` asks, `write` changes rows too, `admin` does everything."""
    key: str = Field(pattern=KEY_PATTERN, repr=False)
    """The secret itself, at least 16 printable ASCII characters; better kept in `keys_file`."""


class AuthSettings(Strict):
    """Who may use the server."""

    mode: Literal["off", "api_key"] | None = None
    """Must be stated when a port listens beyond loopback or keys are given; else null means `off`."""
    keys_file: Path | None = None
    """YAML list of {name, role, key}, read again when it changes; keep it readable by the server only."""
    keys: list[ApiKey] = []
    """API keys given here instead; they add to those of `keys_file`."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        given = [name for name in ("keys_file", "keys") if getattr(self, name)]
        return self.consistent(checks.auth(self.mode, given))


class Settings(Strict):
    """The server's settings."""

    models: ModelsSettings = ModelsSettings()
    """What is served."""
    tiers: TiersSettings = TiersSettings()
    """Where rows are kept."""
    updates: UpdatesSettings = UpdatesSettings()
    """How rows change while they are served."""
    dense: DenseSettings = DenseSettings()
    """How dense networks run."""
    server: ServerSettings = ServerSettings()
    """Ports and limits of the server."""
    auth: AuthSettings = AuthSettings()
    """Who may use the server."""
