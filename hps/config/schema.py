"""The server's settings: one YAML file, top keys ``models tiers updates lookup dense server auth``.

One field, one sentence. ``hps config schema`` prints this as JSON Schema; ``hps config show`` prints
the effective values and their origins."""

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
    """The vector of an unknown key: one number, or `dim` of them."""
    miss_policy: MissPolicySpec | None = None
    """Rule for keys that are not in memory."""
    tombstone_ttl_s: float | None = Field(None, ge=0)
    """Seconds for which a deletion is kept, so that an older row cannot come back."""
    cache_rows: int | None = Field(None, ge=0)
    """CPU cache capacity of this table, in rows; 0 keeps it out of the cache."""
    cache_share: float | None = Field(None, gt=0, le=1)
    """CPU cache capacity as a share of this table's rows; `cache_rows` takes precedence."""
    cache_eviction: Eviction | None = None
    """The row of this table to evict from the CPU cache; null: as `tiers.cpu_cache.eviction`."""
    gpu_rows: int | None = Field(None, ge=0)
    """GPU cache capacity of this table, in rows; 0 keeps it out of the cache."""
    gpu_share: float | None = Field(None, gt=0, le=1)
    """GPU cache capacity as a share of this table's rows; `gpu_rows` takes precedence."""
    gpu_eviction: GpuEviction | None = None
    """The row of this table to evict from the GPU cache; null: as `tiers.gpu.eviction`."""
    gpu_static: bool | None = None
    """Keep the whole table in the GPU cache, read-only; null: as `tiers.gpu.static`."""


class ModelOverride(StrictModel):
    """Overrides parts of one model's `model.yaml`."""

    version: int | None = Field(None, ge=1)
    """The version to serve; default: the highest one in the repository."""
    tables: dict[Name, TableOverride] = {}
    """Overrides by table name."""
    dense: DenseSpec | None = None
    """Replaces the model's `dense` section."""
    max_batch_size: int | None = Field(None, ge=1)
    """Largest batch of one request."""


class ModelsSettings(StrictModel):
    """The served models."""

    repository: Path = Path("models")
    """Folder of the model repository."""
    serve: dict[Name, ModelOverride] | None = None
    """The models to serve, with overrides; null: every model of the repository."""
    control: Literal["admin", "all"] = "admin"
    """Ports that accept `load` and `unload`: those of administration, or all, as Triton's clients expect."""
    catch_up_s: float = Field(60.0, gt=0)
    """Longest wait for the update streams before a loaded version is served."""
    linger_s: float = Field(5.0, ge=0)
    """Time for which a replaced version still answers lookups of front ends that have not switched yet."""


class TiersSettings(StrictModel):
    """The caches and stores of rows, fastest first, and the threads of lookups."""

    gpu: GpuCacheSettings = GpuCacheSettings()
    """The cache in GPU memory."""
    cpu_cache: CpuCacheSettings = CpuCacheSettings()
    """The cache in host memory."""
    rocksdb: RocksDbSettings = RocksDbSettings()
    """The store on the local disk."""
    redis: RedisSettings | None = None
    """A store that all nodes share, read before the local one; null: none."""
    lookup_threads: int = Field(4, ge=1)
    """Threads for lookups that must read a store."""
    lookup_queue: int = Field(1024, ge=1)
    """Lookups that may wait for such a thread; more get 503."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        redis = self.redis.layout if self.redis is not None else None
        rocksdb = self.rocksdb.layout if self.rocksdb.enabled else None
        overflow = self.redis is not None and self.redis.overflow_margin is not None
        return self.consistent(checks.stores(redis, rocksdb, overflow=overflow))


class Settings(StrictModel):
    """The server's settings."""

    models: ModelsSettings = ModelsSettings()
    """The served models."""
    tiers: TiersSettings = TiersSettings()
    """The caches and stores of rows."""
    updates: UpdatesSettings = UpdatesSettings()
    """How rows change while they are served."""
    lookup: LookupSettings = LookupSettings()
    """The lookup nodes of front ends."""
    dense: DenseSettings = DenseSettings()
    """How dense networks run."""
    server: ServerSettings = ServerSettings()
    """Ports and limits of the server."""
    auth: AuthSettings = AuthSettings()
    """Authentication of callers."""

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
