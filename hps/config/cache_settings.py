"""The settings of the caches, `tiers.cpu_cache` and `tiers.gpu`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from hps.config.checks import ConfigFinding, finding
from hps.config.model_schema import StrictModel

Eviction = Literal["lru", "lfu", "random", "fifo"]
GpuEviction = Literal["lru", "lfu", "version"]


class SharedCacheSettings(StrictModel):
    """The shared cache: other processes of this machine can attach to it."""

    name: str | None = Field(None, pattern=r"^[a-zA-Z0-9_\-]{1,100}$")
    """Name of the cache, which one process at a time owns; null: private to this process."""
    folder: Path = Path("/dev/shm")
    """Folder of a memory file system with enough space for the cache."""
    take_over: bool = False
    """Keep the rows of an owner that was killed; only if no other process changes the stores meanwhile."""


class SnapshotSettings(StrictModel):
    """File of the hot keys, from which the cache is warmed after a restart."""

    path: Path | None = None
    """File of the hot keys; null: none is written."""
    interval_s: float = Field(60.0, gt=0)
    """Seconds between writes; it is also written at shutdown."""
    keys: int | None = Field(None, ge=1)
    """Largest number of keys per table; null: all that are in the cache."""
    bytes_per_s: int = Field(64 << 20, ge=1024)
    """Limit on the write rate; a key takes 9 bytes."""


class CpuCacheSettings(StrictModel):
    """The cache in host memory."""

    enabled: bool = True
    """Off: every lookup reads from the store."""
    capacity_bytes: int = Field(1 << 30, ge=0)
    """Bytes, divided among the tables in proportion to their sizes unless `cache_rows` or `share` is set. A
    table whose mapped file is in memory needs room only for rows that updates change, which takes memory as
    they arrive: all such tables together get at most half of the bytes, each at least for an eighth of its
    rows."""
    share: float | None = Field(None, gt=0, le=1)
    """Capacity as a share of each table's rows instead of bytes."""
    eviction: Eviction = "lru"
    """The row to evict: least recently used, least frequently used, random, or first inserted."""
    threads: int = Field(1, ge=1, le=256)
    """Threads per lookup of many keys."""
    huge_pages: Literal["try", "transparent", "reserved", "off"] = "try"
    """`try`: if available; `transparent`, or `reserved` by vm.nr_hugepages: required, else an error."""
    numa_node: int | None = Field(None, ge=0, lt=1024)
    """NUMA node for the cache's memory; null: the system decides."""
    shared: SharedCacheSettings = SharedCacheSettings()
    """Lets other processes attach to the cache."""
    snapshot: SnapshotSettings = SnapshotSettings()
    """Hot key snapshot, from which a restart warms the cache."""
    warm: bool = True
    """Fill the cache before the node is ready: with the snapshot's keys, else with the files' first rows."""

    def violations(self) -> Iterator[ConfigFinding]:
        if self.shared.name is not None and self.huge_pages == "reserved":
            message = "reserved pages can't be shared by name; use transparent"
            yield finding("huge_pages", message, "shared.name")


class GpuCacheSettings(StrictModel):
    """The cache in the memory of GPUs, alongside the one in host memory."""

    use: Literal["auto", "required", "off"] = "auto"
    """`auto`: if a GPU and CuPy are available, else the log has the reason; `required`: else an error."""
    devices: list[Annotated[int, Field(ge=0)]] = Field([0], min_length=1)
    """The GPUs, by number; each has a copy of the cache, requests are spread over them, updates reach all."""
    capacity_bytes: int = Field(1 << 30, ge=0)
    """Bytes per GPU, divided among the tables by their sizes unless `gpu_rows` or `share` is set."""
    host_bytes: int = Field(0, ge=0)
    """Pinned host memory in bytes per GPU for further rows, which the GPU reads directly; what other tables
    leave of it has rows of static ones."""
    share: float | None = Field(None, gt=0, le=1)
    """Capacity as a share of each table's rows instead of bytes, including pinned memory."""
    eviction: GpuEviction = "lru"
    """The row to evict: least recently used, least frequently used, or of the oldest version."""
    clock_ticks: int = Field(64, ge=1, le=64)
    """Resolution of ages with `lru`: ticks of its clock while the cache turns over once."""
    epoch_s: float | None = Field(None, gt=0)
    """With `lfu`, rows last used in an earlier period of this length are evicted first; null: no periods."""
    static: bool = False
    """Keep whole tables, read-only: faster, but updates of such a table are rejected."""
    fill: float = Field(1.0, ge=0, le=1)
    """Share of the capacity to fill before the node is ready; more if the CPU cache, which is filled with
    the same rows, takes more. Beyond 64 MB of mapped tables, those that fit whole are filled after it is
    ready. Without effect if `cpu_cache.warm` is off."""
    workspaces: int = Field(4, ge=1, le=64)
    """Concurrent lookups per GPU; further ones wait."""
    miss_threads: int | None = Field(None, ge=1, le=256)
    """Threads that copy missing rows from the CPU cache; null: one per processor core, at most 16."""

    def violations(self) -> Iterator[ConfigFinding]:
        if len(set(self.devices)) != len(self.devices):
            yield finding("devices", f"names a GPU twice: {self.devices}")
        if self.epoch_s is not None and self.eviction != "lfu":
            message = f"needs eviction lfu, found {self.epoch_s:g} with eviction {self.eviction}"
            yield finding("epoch_s", message, "eviction")
