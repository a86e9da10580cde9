"""The server's settings: one YAML file, top keys ``models tiers updates dense server auth``.

One field, one sentence. ``hps config schema`` prints this as JSON Schema; ``hps config show`` prints
what is in force and where each value came from.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from hps.config.model_schema import DenseSpec, MissPolicySpec, Name, Strict


class TableOverride(Strict):
    """Overrides one table's entry of `model.yaml`."""

    default: float | list[float] | None = None
    miss_policy: MissPolicySpec | None = None
    tombstone_ttl_s: float | None = Field(None, ge=0)
    cache_rows: int | None = Field(None, ge=0)
    """CPU cache capacity of this table, in rows; 0 keeps it out of the cache."""


class ModelOverride(Strict):
    """Overrides parts of one model's `model.yaml`."""

    version: int | None = Field(None, ge=1)
    """The version to serve; default: the highest one in the repository."""
    tables: dict[Name, TableOverride] = {}
    dense: DenseSpec | None = None
    max_batch_size: int | None = Field(None, ge=1)


class ModelsSettings(Strict):
    repository: Path = Path("models")
    """Folder of the model repository."""
    serve: dict[Name, ModelOverride] | None = None
    """The models to serve, with overrides; default: every model of the repository."""


class CpuCacheSettings(Strict):
    enabled: bool = True
    capacity_bytes: int = Field(1 << 30, ge=0)
    """Bytes shared out over the tables by their size, unless `cache_rows` or `share` says otherwise."""
    share: float | None = Field(None, gt=0, le=1)
    """Capacity as a share of each table's rows instead of bytes."""
    eviction: Literal["lru"] = "lru"
    warm: bool = True
    """Fill the cache from the start of the model files before the node is ready."""


class RocksDbSettings(Strict):
    path: Path = Path("hps-data/rocksdb")
    """Folder of the database; owned by one node process."""
    layout: Literal["native", "hps"] = "native"
    """`native` keeps a version per row; `hps` is HPS's own layout, where the last write wins."""
    block_cache_bytes: int = Field(256 << 20, ge=0)
    block_size: int = Field(1024, ge=256)
    """Bytes per data block; small blocks make point reads cheap."""
    threads: int = Field(2, ge=1)
    """Background threads for flush and compaction."""
    read_only: bool = False
    """Open without the right to write; the tables must have been loaded before."""


class GuardSettings(Strict):
    """Protection around every blocking tier."""

    deadline_ms: float = Field(1000.0, gt=0)
    """Longest time one fetch may take, within the request's own deadline."""
    failures_to_open: int = Field(5, ge=1)
    """Failures in a row after which the tier is skipped."""
    retry_after_s: float = Field(1.0, gt=0)
    """Time until a skipped tier is tried again with one request."""


class TiersSettings(Strict):
    cpu_cache: CpuCacheSettings = CpuCacheSettings()
    rocksdb: RocksDbSettings = RocksDbSettings()
    guard: GuardSettings = GuardSettings()
    lookup_threads: int = Field(4, ge=1)
    """Threads for lookups that must ask a store."""
    lookup_queue: int = Field(1024, ge=1)
    """Lookups that may wait for such a thread before new ones are refused (503)."""


class UpdatesSettings(Strict):
    promote_queue_keys: int = Field(1 << 20, ge=1)
    """Keys waiting to be promoted into the caches; more are dropped and counted."""


class DenseSettings(Strict):
    provider: Literal["auto", "cpu", "cuda"] = "auto"
    """Where ONNX Runtime runs; `auto` takes CUDA when onnxruntime-gpu and a GPU are there."""
    threads: int = Field(1, ge=0)
    """Threads inside one run of the network; 0 lets ONNX Runtime choose."""
    inline_us: float = Field(150.0, ge=0)
    """Networks that answer faster than this, measured at start, run without a thread hop."""


class HttpSettings(Strict):
    host: str = "127.0.0.1"
    port: int = Field(8000, ge=0, le=65_535)
    """0 picks a free port, printed at start."""


class AdminSettings(Strict):
    host: str = "127.0.0.1"
    port: int = Field(8002, ge=0, le=65_535)


class ServerSettings(Strict):
    http: HttpSettings = HttpSettings()
    admin: AdminSettings = AdminSettings()
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


class ApiKey(Strict):
    name: str
    role: Literal["read", "write", "admin"]
    key: str = Field(min_length=16, repr=False)
    """The secret itself; better kept out of the YAML, in `keys_file`."""


class AuthSettings(Strict):
    mode: Literal["off", "api_key"] | None = None
    """Must be stated when a port listens beyond loopback; None means `off` on loopback."""
    keys_file: Path | None = None
    """YAML list of {name, role, key}; readable by the server only."""
    keys: list[ApiKey] = []


class Settings(Strict):
    models: ModelsSettings = ModelsSettings()
    tiers: TiersSettings = TiersSettings()
    updates: UpdatesSettings = UpdatesSettings()
    dense: DenseSettings = DenseSettings()
    server: ServerSettings = ServerSettings()
    auth: AuthSettings = AuthSettings()
