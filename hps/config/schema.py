"""The server's settings: one YAML file, top keys ``models tiers updates lookup dense server auth``.

One field, one sentence. ``hps config schema`` prints this as JSON Schema; ``hps config show`` prints
the effective values and their origins."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, StringConstraints, field_validator
from pydantic_core import PydanticCustomError

from hps.config.cache_settings import (
    CpuCacheSettings,
    Eviction,
    GpuCacheSettings,
    GpuEviction,
)
from hps.config.checks import ConfigFinding, finding
from hps.config.dense_settings import DenseSettings
from hps.config.download_settings import PEER_PATTERN, DownloadSettings
from hps.config.lookup_settings import LookupSettings
from hps.config.model_schema import DenseSpec, MissPolicySpec, Name, StrictModel
from hps.config.repository_uri import RepositoryUri, parse_location
from hps.config.server_settings import AuthSettings, ServerSettings
from hps.config.store_settings import MappedSettings, RedisSettings, RocksDbSettings
from hps.config.traffic_settings import TrafficRule
from hps.config.update_settings import UpdatesSettings
from hps.errors import ConfigError


class TableOverride(StrictModel):
    """Overrides one table's entry of `model.yaml`."""

    default: float | list[float] | None = None
    """The vector of an unknown key: one number, or `dim` of them."""
    miss_policy: MissPolicySpec | None = None
    """Rule for keys that are not in memory."""
    tombstone_ttl_s: float | None = Field(None, ge=0)
    """Seconds for which a deletion is kept, so that an older row cannot come back."""
    ttl_s: float | None = Field(None, gt=0)
    """Seconds after its last write at which a row expires in every tier; null: as in `model.yaml`."""
    cache_rows: int | None = Field(None, ge=0)
    """CPU cache capacity of this table, in rows; 0 keeps it out of the cache."""
    cache_share: float | None = Field(None, gt=0, le=1)
    """CPU cache capacity as a share of this table's rows; `cache_rows` takes precedence."""
    cache_eviction: Eviction | None = None
    """The row of this table to evict from the CPU cache; null: as `tiers.cpu_cache.eviction`."""
    cache_admit_after: int = Field(1, ge=1, le=15)
    """A row enters the caches once it was missed so often, by an estimate that fades. 1: at once."""
    gpu_rows: int | None = Field(None, ge=0)
    """GPU cache capacity of this table, in rows; 0 keeps it out of the cache."""
    gpu_share: float | None = Field(None, gt=0, le=1)
    """GPU cache capacity as a share of this table's rows; `gpu_rows` takes precedence."""
    gpu_eviction: GpuEviction | None = None
    """The row of this table to evict from the GPU cache; null: as `tiers.gpu.eviction`."""
    gpu_static: bool | None = None
    """Keep the whole table in the GPU cache, read-only; null: as `tiers.gpu.static`."""


class VersionPolicy(StrictModel):
    """The versions of a model that are served at the same time."""

    latest: int = Field(1, ge=1)
    """The number of highest versions; the highest one answers requests without a version."""
    specific: list[Annotated[int, Field(ge=1)]] = []
    """These versions, in place of the highest ones."""
    all: bool = False
    """Every version of the repository."""

    def select(self, available: Sequence[int]) -> list[int]:
        """The versions to serve of the ``available`` ones, which ascend."""
        if self.all:
            return list(available)
        if self.specific:
            return [each for each in available if each in self.specific]
        return list(available[-self.latest :])


class ModelOverride(StrictModel):
    """Overrides parts of one model's `model.yaml`."""

    version: int | None = Field(None, ge=1)
    """The version to serve; default: the highest one in the repository."""
    versions: VersionPolicy | None = None
    """The versions served at the same time; null: those of `models.versions`."""
    traffic: TrafficRule | None = None
    """The versions of requests that name none; null: the current version."""
    tables: dict[Name, TableOverride] = {}
    """Overrides by table name."""
    dense: DenseSpec | None = None
    """Replaces the model's `dense` section."""
    max_batch_size: int | None = Field(None, ge=1)
    """Largest batch of one request."""
    hps_version: int | None = Field(None, ge=1)
    """The version with HPS's own names in stores of layout `hps`."""


class ModelsSettings(StrictModel):
    """The served models."""

    repository: Path | RepositoryUri = Path("models")
    """Folder of the model repository, or the URI of a remote one, such as `s3://bucket/models`."""
    download: DownloadSettings = DownloadSettings()
    """Download of versions from a remote repository."""
    peers: list[Annotated[str, StringConstraints(pattern=PEER_PATTERN)]] = []
    """Admin ports of sibling nodes, as `http://node:8002`, from which versions of a remote repository are
    downloaded first."""
    peers_api_key_file: Path | None = None
    """File with an API key of role admin, sent to `peers`."""
    serve: dict[Name, ModelOverride] | None = None
    """The models to serve, with overrides; null: every model of the repository."""
    versions: VersionPolicy = VersionPolicy()
    """The versions of each model that are served at the same time."""
    watch_s: float | None = Field(None, gt=0)
    """Interval of checks of the repository for new and removed versions; null: it is not watched."""
    rollback_s: float = Field(300.0, ge=0)
    """Time for which a replaced version stays in memory for a rollback, at most one of each model."""
    state: Path | None = None
    """File with the versions and labels chosen at run time; null: in the folder of RocksDB."""
    control: Literal["admin", "all"] = "admin"
    """Ports that accept `load` and `unload`: those of administration, or all, as Triton's clients expect."""
    warm_up_s: float = Field(5.0, ge=0)
    """Longest time for which sampled requests are replayed on a version before it becomes the current one; 0:
    none are sampled."""
    catch_up_s: float = Field(60.0, gt=0)
    """Longest wait for the update streams before a loaded version is served."""
    linger_s: float = Field(5.0, ge=0)
    """Time for which a replaced version still answers lookups of front ends that have not switched yet."""

    @field_validator("repository", mode="before")
    @classmethod
    def _location(cls, value: object) -> object:
        """Turn text with a scheme into a RepositoryUri."""
        if not isinstance(value, str):
            return value
        try:
            return parse_location(value)
        except ConfigError as error:
            raise PydanticCustomError("remote_path", "{text}", {"text": str(error)}) from None


class TiersSettings(StrictModel):
    """The caches and stores of rows, fastest first, and the threads of lookups."""

    gpu: GpuCacheSettings = GpuCacheSettings()
    """The cache in GPU memory."""
    cpu_cache: CpuCacheSettings = CpuCacheSettings()
    """The cache in host memory."""
    mapped: MappedSettings = MappedSettings()
    """Tables served from files of the model repository."""
    rocksdb: RocksDbSettings = RocksDbSettings()
    """The store on the local disk."""
    redis: RedisSettings | None = None
    """A store that all nodes share, read before the local one; null: none."""
    lookup_threads: int = Field(4, ge=1)
    """Threads for lookups that must read a store."""
    lookup_queue: int = Field(1024, ge=1)
    """Lookups that may wait for such a thread; more get 503."""

    def violations(self) -> Iterator[ConfigFinding]:
        """Every row needs a store that keeps it, and all stores the same layout."""
        redis, rocksdb = self.redis, self.rocksdb
        if redis is None:
            if not rocksdb.enabled and not self.mapped.enabled:
                message = (
                    "is false, tiers.redis is not set, and tiers.mapped.enabled is false; one of them must "
                    "have the rows"
                )
                yield finding("rocksdb.enabled", message, "redis")
        elif not rocksdb.enabled:
            if redis.overflow_margin is not None:
                cause = "because tiers.rocksdb.enabled is false"
                message = f"would lose rows permanently, {cause}; set it to null"
                yield finding("redis.overflow_margin", message, "rocksdb.enabled")
        elif redis.layout != rocksdb.layout:
            message = (
                f"is {redis.layout}, but tiers.rocksdb.layout is {rocksdb.layout}; rows without versions "
                "would always count as older than rows with versions: use the same layout for both"
            )
            yield finding("redis.layout", message, "rocksdb.layout")


class Settings(StrictModel):
    """The server's settings."""

    models: ModelsSettings = ModelsSettings()
    """The served models."""
    tiers: TiersSettings = TiersSettings()
    """The caches and stores of rows."""
    updates: UpdatesSettings = UpdatesSettings()
    """Updates of rows while they are served."""
    lookup: LookupSettings = LookupSettings()
    """The lookup nodes of front ends."""
    dense: DenseSettings = DenseSettings()
    """Execution of the dense networks."""
    server: ServerSettings = ServerSettings()
    """Ports and limits of the server."""
    auth: AuthSettings = AuthSettings()
    """Authentication of callers."""

    def violations(self) -> Iterator[ConfigFinding]:
        yield from self._worker_rules()
        yield from self._role_rules()
        yield from self._update_rules()

    def _worker_rules(self) -> Iterator[ConfigFinding]:
        """Workers read the node's CPU cache in shared memory."""
        if self.server.workers and self.tiers.cpu_cache.huge_pages == "reserved":
            message = "is reserved, which can't be shared with server.workers; use transparent"
            yield finding("tiers.cpu_cache.huge_pages", message, "server.workers")

    def _role_rules(self) -> Iterator[ConfigFinding]:
        """Each role has the settings that it needs; one file may serve all roles."""
        server = self.server
        if server.role == "frontend" and not self.lookup.nodes:
            message = (
                "is empty, but server.role is frontend; name the gRPC ports of the lookup nodes"
            )
            yield finding("lookup.nodes", message, "server.role")
        if server.role == "frontend" and server.workers:
            remedy = "start several front ends instead"
            message = f"is {server.workers}, but server.role is frontend; {remedy}"
            yield finding("server.workers", message, "server.role")
        if server.role == "lookup" and server.grpc is None:
            message = "is null, but server.role is lookup: front ends use gRPC"
            yield finding("server.grpc", message, "server.role")

    def _update_rules(self) -> Iterator[ConfigFinding]:
        """Updates need a store that gets them: caches evict rows and fetch them again from there."""
        rocksdb = self.tiers.rocksdb
        if self.tiers.redis is not None:
            return
        if not rocksdb.enabled:
            for name in ("directory", "kafka"):
                if getattr(self.updates, name) is not None:
                    message = (
                        "needs a store that gets the updates, but tiers.rocksdb.enabled is false and there "
                        "is no tiers.redis: mapped files do not change"
                    )
                    yield finding(f"updates.{name}", message, "tiers.rocksdb.enabled")
            return
        access = rocksdb.access
        if access == "primary":
            return
        if self.updates.directory is not None:
            message = (
                f"needs a store to write, but tiers.rocksdb.access is {access} and there is no "
                "tiers.redis: let the primary read the folder"
            )
            yield finding("updates.directory", message, "tiers.rocksdb.access")
        if self.updates.kafka is not None and access == "read_only":
            message = (
                "needs a store that gets the updates, but tiers.rocksdb.access is read_only and there is "
                "no tiers.redis: rows that leave a cache would come back as they were before; take access "
                "primary, or secondary alongside a primary that reads the same stream"
            )
            yield finding("updates.kafka", message, "tiers.rocksdb.access")
