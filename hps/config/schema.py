"""The server's settings: one YAML file, top keys ``models tiers updates lookup dense server auth``.

One field, one sentence. ``hps config schema`` prints this as JSON Schema; ``hps config show`` prints
what is in force and where each value came from.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from hps.config import checks, update_checks
from hps.config.cache_settings import (
    CpuCacheSettings,
    Eviction,
    GpuCacheSettings,
    GpuEviction,
)
from hps.config.dense_settings import DenseSettings
from hps.config.lookup_settings import LookupSettings
from hps.config.model_schema import DenseSpec, MissPolicySpec, Name, StrictModel
from hps.config.server_settings import AuthSettings, ServerSettings
from hps.config.store_settings import RedisSettings, RocksDbSettings
from hps.config.update_settings import UpdatesSettings


class TableOverride(StrictModel):
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
    gpu_rows: int | None = Field(None, ge=0)
    """GPU cache capacity of this table, in rows; 0 keeps it out of the cache."""
    gpu_share: float | None = Field(None, gt=0, le=1)
    """GPU cache capacity as a share of this table's rows; `gpu_rows` goes first."""
    gpu_eviction: GpuEviction | None = None
    """Which row of this table makes room in the GPU cache; null: as `tiers.gpu.eviction` says."""
    gpu_static: bool | None = None
    """Whether the whole table is in the GPU cache, read-only; null: as `tiers.gpu.static` says."""


class ModelOverride(StrictModel):
    """Overrides parts of one model's `model.yaml`."""

    version: int | None = Field(None, ge=1)
    """The version to serve; default: the highest one in the repository."""
    tables: dict[Name, TableOverride] = {}
    """Overrides by table name."""
    dense: DenseSpec | None = None
    """Takes the place of the model's whole dense part."""
    max_batch_size: int | None = Field(None, ge=1)
    """Largest batch of one request."""


class ModelsSettings(StrictModel):
    """What is served."""

    repository: Path = Path("models")
    """Folder of the model repository."""
    serve: dict[Name, ModelOverride] | None = None
    """The models to serve, with overrides; null: every model of the repository."""
    control: Literal["admin", "all"] = "admin"
    """Ports that take `load` and `unload`: those of administration, or all, as Triton's clients want it."""
    catch_up_s: float = Field(60.0, gt=0)
    """Longest wait for the update streams before a version that was loaded is served."""
    linger_s: float = Field(5.0, ge=0)
    """How long a version that was replaced still answers the lookups of front ends that have not noticed."""


class TiersSettings(StrictModel):
    """Where rows are kept, fastest first, and how lookups reach them."""

    gpu: GpuCacheSettings = GpuCacheSettings()
    """The cache in the memory of GPUs."""
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


class Settings(StrictModel):
    """The server's settings."""

    models: ModelsSettings = ModelsSettings()
    """What is served."""
    tiers: TiersSettings = TiersSettings()
    """Where rows are kept."""
    updates: UpdatesSettings = UpdatesSettings()
    """How rows change while they are served."""
    lookup: LookupSettings = LookupSettings()
    """The nodes that front ends ask."""
    dense: DenseSettings = DenseSettings()
    """How dense networks run."""
    server: ServerSettings = ServerSettings()
    """Ports and limits of the server."""
    auth: AuthSettings = AuthSettings()
    """Who may use the server."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        tiers, server = self.tiers, self.server
        findings = checks.workers(server.workers, tiers.gpu.use, tiers.cpu_cache.huge_pages)
        findings += checks.role(
            server.role, server.workers, grpc=server.grpc is not None, nodes=bool(self.lookup.nodes)
        )
        findings += update_checks.updates(
            tiers.rocksdb.access if tiers.rocksdb.enabled else None,
            redis=tiers.redis is not None,
            kafka=self.updates.kafka is not None,
            directory=self.updates.directory is not None,
        )
        return self.consistent(findings)
