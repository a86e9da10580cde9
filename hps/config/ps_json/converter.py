"""Convert HPS's ``ps.json`` to settings and models. ``keys.py`` describes each key."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hps.config.cache_settings import GpuCacheSettings
from hps.config.checks import Path as KeyPath
from hps.config.model_schema import REMOTE_PATH
from hps.config.ps_json.kafka import kafka_settings
from hps.config.ps_json.keys import (
    EVICTIONS,
    FUSED_ALREADY,
    HASH_MAPS,
    KAFKA,
    MAX_U64,
    NO_TLS,
    REDIS,
    SHARED,
    SOURCE_TYPES,
    VDB_TYPES,
    M,
    P,
    U,
    V,
)
from hps.config.ps_json.legacy import PsJson
from hps.config.ps_json.model import PsModel
from hps.config.ps_json.redis import TLS, redis_settings
from hps.config.ps_json.tables import PsTable
from hps.config.ps_json.values import PsJsonReader, PsJsonSection, parse_json


def read_ps_json(path: Path) -> PsJson:
    """Read and check the file. Raises InvalidConfiguration with all problems.

    Relative paths start at the file's folder. Of the tables' files, only the sizes are read."""
    data = parse_json(path)
    reader = PsJsonReader(path)
    top = reader.section("", data, ())
    memory_type = _memory_type(top)
    source_type = _type(top, U, SOURCE_TYPES, "null")
    memory = reader.section(V, top[V] or {}, (V,), memory_type, source_type)
    disk = reader.section(P, top[P] or {}, (P,), source_type)
    source = reader.section(U, top[U] or {}, (U,), source_type)
    _inert_databases(reader, memory, disk, memory_type)
    raw_models = top["models"] if isinstance(top["models"], list) else []
    if "models" in top and not raw_models:
        reader.wrong(("models",), "is empty; expected at least one model")
    sections = [reader.section(M, raw, ("models", i)) for i, raw in enumerate(raw_models)]
    float32_store = _float32_store(memory_type, disk)
    stores = bool(float32_store) or source_type == KAFKA
    fuses = _fuses(reader, top, sections, stores=stores)
    models = [
        PsModel(
            reader,
            i,
            section,
            _key_dtype(top),
            memory_type,
            fuses=fuses,
            float32_store=float32_store,
        )
        for i, section in enumerate(sections)
    ]
    _unique_names(reader, models)
    legacy = [model.legacy() for model in models]
    settings = _ConvertedSettings(reader)
    settings.disk(disk)
    if memory_type == REDIS:
        settings.redis(memory, disk)
    settings.cache(models, memory, memory_type)
    settings.gpu(models)
    settings.threads(models)
    if source_type == KAFKA:
        for below, value, key in kafka_settings(reader, source, memory, disk):
            settings.set(("updates", "kafka", *below), value, key)
    reader.done()
    found = tuple(model for model in legacy if model is not None)
    return PsJson(settings.data, settings.origins, found, reader.warnings())


def _memory_type(top: PsJsonSection) -> str:
    return "parallel_hash_map" if V not in top else _type(top, V, VDB_TYPES, "disabled")


def _type(top: PsJsonSection, section: str, names: Mapping[str, str], default: str) -> str:
    """Canonical name of the section's type; the default if it is wrong, which the reader reports."""
    given = (top[section] or {}).get("type", default)
    return names.get(given, default) if isinstance(given, str) else default


def _float32_store(memory_type: str, disk: PsJsonSection) -> str:
    """Key and value of a store in HPS's layout, which holds only float32 rows; empty if there is none."""
    if disk["type"] == "rocks_db":
        return f"{P}.type is rocks_db"
    return f"{V}.type is {REDIS}" if memory_type == REDIS else ""


def _inert_databases(
    reader: PsJsonReader, memory: PsJsonSection, disk: PsJsonSection, memory_type: str
) -> None:
    """Report keys without effect because of the database's type."""
    bounds = ("num_partitions", "overflow_margin", "overflow_policy")
    if memory_type == REDIS:
        if not memory["enable_tls"]:
            reader.inert((V,), memory, TLS, NO_TLS)
    elif memory_type not in HASH_MAPS:
        is_default = "" if "type" in memory else " (the default of type)"
        reader.inert((V,), memory, bounds, f"{V}.type is {memory_type}{is_default}")
    elif "overflow_margin" not in memory:
        acting = ("num_partitions", "overflow_policy")
        reader.inert((V,), memory, acting, "it needs overflow_margin")
    if disk["type"] != "rocks_db":
        is_default = "" if "type" in disk else " (the default of type)"
        names = ("path", "num_threads", "read_only", "initialize_after_startup")
        reader.inert((P,), disk, names, f"{P}.type is {disk['type']}{is_default}")


def _fuses(
    reader: PsJsonReader, top: PsJsonSection, models: Sequence[PsJsonSection], *, stores: bool
) -> bool:
    """True if tables of equal vector size are fused. Only ``stores``, HPS's databases and topics, show it."""
    name, why = "fuse_embedding_table", ""
    if not stores:
        reader.inert((), top, (name,), why := FUSED_ALREADY)
    elif not top[name]:
        why = f"the file's {name} is false"
    for i, model in enumerate(models):
        if why:
            reader.inert(("models", i), model, (name,), why)
    return not why


def _key_dtype(top: PsJsonSection) -> str:
    return "int64" if top["supportlonglong"] else "uint32"


def _unique_names(reader: PsJsonReader, models: Sequence[PsModel]) -> None:
    seen: dict[str, int] = {}
    for i, model in enumerate(models):
        if model.name and model.name in seen:
            other = f"models[{seen[model.name]}]"
            reader.wrong(("models", i, "model"), f"{model.name!r} is the name of {other} too")
        seen.setdefault(model.name, i)


@dataclass(frozen=True)
class _TableLimit:
    """The row limit of a table in HPS's hash map, and its eviction."""

    rows: int
    eviction: str | None
    key: str = f"{V}.overflow_margin"


class _ConvertedSettings:
    """The settings equivalent to a ``ps.json``, and the key of each."""

    def __init__(self, reader: PsJsonReader) -> None:
        self._reader = reader
        file = self._file = reader.file
        self.data: dict[str, Any] = {"models": {"serve": {}}, "tiers": {}}
        self.origins: dict[KeyPath, str] = {("models", "serve"): f"{file}: models"}

    def set(self, path: KeyPath, value: Any, key: str) -> None:
        """Record a setting, and the ``key`` of the file that it comes from."""
        at = self.data
        for part in path[:-1]:
            at = at.setdefault(str(part), {})
        at[str(path[-1])] = value
        self.origins[path] = f"{self._file}: {key}"

    def disk(self, values: PsJsonSection) -> None:
        """RocksDB: HPS's at its path, or a new one if there was none."""
        if values["type"] != "rocks_db":
            return
        path = str(values["path"]) if "path" in values else f"{tempfile.gettempdir()}/rocksdb"
        if "://" in path:
            self._reader.wrong((P, "path"), f"is {path}: {REMOTE_PATH}")
        load = bool(values["initialize_after_startup"]) and not values["read_only"]
        at = ("tiers", "rocksdb")
        self.set((*at, "layout"), "hps", f"{P}.type")
        self.set((*at, "path"), str(self._reader.folder / path), f"{P}.path")
        self.set((*at, "threads"), int(values["num_threads"]), f"{P}.num_threads")
        access = "read_only" if values["read_only"] else "primary"
        self.set((*at, "access"), access, f"{P}.read_only")
        key = "read_only" if values["read_only"] else "initialize_after_startup"
        self.set((*at, "load"), load, f"{P}.{key}")

    def redis(self, memory: PsJsonSection, disk: PsJsonSection) -> None:
        """Redis, in HPS's layout. A new RocksDB below it gets the same layout."""
        if disk["type"] != "rocks_db":
            self.set(("tiers", "rocksdb", "layout"), "hps", f"{V}.type")
        for path, value, key in redis_settings(self._reader, memory):
            self.set(("tiers", "redis", *path), value, f"{V}.{key}")

    def cache(self, models: Sequence[PsModel], memory: PsJsonSection, memory_type: str) -> None:
        """The CPU cache: one share for all tables, and overrides for models that differ."""
        at: KeyPath = ("tiers", "cpu_cache")
        share, key = max((model.cache_share for model in models), default=(0.0, "gpucacheper"))
        if share > 0:
            self.set((*at, "share"), share, f"models[].{key}")
        else:
            self.set((*at, "enabled"), False, f"models[].{key}")
        if memory_type == SHARED:
            key = "shared_memory_name" if "shared_memory_name" in memory else "type"
            self.set((*at, "shared", "name"), str(memory["shared_memory_name"]), f"{V}.{key}")
        limit = _limit(memory) if memory_type in HASH_MAPS else None
        for model in models:
            self._exceptions(model, share, limit)
        self._warm(models, memory)

    def gpu(self, models: Sequence[PsModel]) -> None:
        """The GPU cache: one share for all tables, and overrides for models that differ."""
        at: KeyPath = ("tiers", "gpu")
        using = [model for model in models if model.gpu_share]
        if not using:
            self.set((*at, "use"), "off", "models[].gpucache")
            return
        share = max(model.gpu_share for model in using)
        self.set((*at, "share"), share, "models[].gpucacheper")
        devices = sorted({device for m in using for device in m.values["deployed_device_list"]})
        if devices:
            self.set((*at, "devices"), devices, "models[].deployed_device_list")
        buffers = max(int(m.values["num_of_worker_buffer_in_pool"]) for m in using)
        usual = GpuCacheSettings().workspaces
        self.set((*at, "workspaces"), max(buffers, usual), "models[].num_of_worker_buffer_in_pool")
        host_bytes = 0
        for model in models:
            host_bytes += self._gpu_exceptions(model, share)
        if host_bytes:
            self.set((*at, "host_bytes"), host_bytes, "models[].embedding_cache_type")

    def _gpu_exceptions(self, model: PsModel, common: float) -> int:
        """Override settings for one model; return the bytes of its rows in pinned host memory."""
        host_bytes = 0
        for table in model.tables:
            at: KeyPath = ("models", "serve", model.name, "tables", table.name)
            if not model.gpu_share:
                self.set((*at, "gpu_rows"), 0, "models[].gpucache")
            elif model.static:
                self.set((*at, "gpu_static"), True, f"models[].{model.cache_share[1]}")
            elif model.gpu_share != common:
                self.set((*at, "gpu_share"), model.gpu_share, "models[].gpucacheper")
            if model.uvm:
                rows = int(_rows(table) * (1 - model.cache_share[0]))
                host_bytes += rows * _padded(table.dim * 4)
        return host_bytes

    def _warm(self, models: Sequence[PsModel], memory: PsJsonSection) -> None:
        cold = [model for model in models if not model.values["init_ec"]]
        at: KeyPath = ("tiers", "cpu_cache", "warm")
        if not memory["initialize_after_startup"]:
            self.set(at, False, f"{V}.initialize_after_startup")
        elif len(cold) == len(models):
            self.set(at, False, "models[].init_ec")
        else:
            for model in cold:
                reason = "the CPU cache is warmed for all models or none, and others want it"
                self._reader.ignored((*model.path, "init_ec"), reason)

    def _exceptions(self, model: PsModel, common: float, limit: _TableLimit | None) -> None:
        share, key = model.cache_share
        for table in model.tables:
            at: KeyPath = ("models", "serve", model.name, "tables", table.name)
            if share <= 0 < common:
                self.set((*at, "cache_rows"), 0, f"models[].{key}")
            elif share != common:
                self.set((*at, "cache_share"), share, f"models[].{key}")
            if limit is not None and math.ceil(_rows(table) * share) > limit.rows:
                self.set((*at, "cache_rows"), limit.rows, limit.key)
                if limit.eviction is not None:
                    self.set((*at, "cache_eviction"), limit.eviction, f"{V}.overflow_policy")

    def threads(self, models: Sequence[PsModel]) -> None:
        wanted = max((int(model.values["thread_pool_size"]) for model in models), default=1)
        count = max(wanted, os.cpu_count() or 1)
        self.set(("tiers", "lookup_threads"), count, "models[].thread_pool_size")


def _limit(memory: PsJsonSection) -> _TableLimit | None:
    if "overflow_margin" not in memory or memory["overflow_margin"] >= MAX_U64:
        return None
    partitions = min(16, os.cpu_count() or 1)
    if "num_partitions" in memory:
        partitions = max(int(memory["num_partitions"]), 1)
    eviction = EVICTIONS[memory["overflow_policy"]] if "overflow_policy" in memory else None
    return _TableLimit(int(memory["overflow_margin"]) * partitions, eviction)


def _padded(row_bytes: int) -> int:
    """Bytes of a row on a GPU."""
    return -(-row_bytes // 32) * 32


def _rows(table: PsTable) -> int:
    """Rows of a table by its key files' sizes; 0 if one is missing (the loader reports it)."""
    try:
        return sum((folder / "key").stat().st_size // 8 for folder in table.folders)
    except OSError:
        return 0
