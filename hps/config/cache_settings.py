"""The settings of the caches, `tiers.cpu_cache` and `tiers.gpu`: rows in memory that are a copy of a
store's."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from hps.config import checks
from hps.config.model_schema import StrictModel

Eviction = Literal["lru", "lfu", "random", "fifo"]
GpuEviction = Literal["lru", "lfu", "version"]


class SharedCacheSettings(StrictModel):
    """The cache in memory that other processes of this machine can attach to."""

    name: str | None = Field(None, pattern=r"^[a-zA-Z0-9_\-]{1,100}$")
    """Name of the cache, which one process at a time owns; null: it is this process's alone."""
    folder: Path = Path("/dev/shm")
    """Folder of a memory file system with room for all of it."""
    take_over: bool = False
    """Keep the rows of an owner that was killed; only where nothing else changes the stores meanwhile."""


class SnapshotSettings(StrictModel):
    """Which keys are hot, kept in a file, so that the cache is warm after a restart."""

    path: Path | None = None
    """File of the hot keys; null: none is kept."""
    interval_s: float = Field(60.0, gt=0)
    """Seconds from one writing to the next; it is written at the end too."""
    keys: int | None = Field(None, ge=1)
    """Most keys per table; null: all that are in the cache."""
    bytes_per_s: int = Field(64 << 20, ge=1024)
    """How fast it is written at most; a key takes 9 bytes."""


class CpuCacheSettings(StrictModel):
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


class GpuCacheSettings(StrictModel):
    """The cache in the memory of GPUs, above the one in host memory."""

    use: Literal["auto", "required", "off"] = "auto"
    """`auto`: where there is a GPU and CuPy, else the log says why not; `required`: there, or an error."""
    devices: list[Annotated[int, Field(ge=0)]] = Field([0], min_length=1)
    """The GPUs, by number; each holds a copy, requests are spread over them, updates reach all."""
    capacity_bytes: int = Field(1 << 30, ge=0)
    """Memory of each GPU, shared out over the tables by their size; `gpu_rows`, `share` go first."""
    host_bytes: int = Field(0, ge=0)
    """Pinned host memory for further rows, per GPU, which it reads by itself."""
    share: float | None = Field(None, gt=0, le=1)
    """Capacity as a share of each table's rows instead of bytes, those in pinned memory included."""
    eviction: GpuEviction = "lru"
    """Which row makes room: the one used longest ago, the one used least, the one with the oldest version."""
    clock_ticks: int = Field(64, ge=1, le=64)
    """How finely `lru` tells ages apart: ticks of its clock while the cache turns over once."""
    epoch_s: float | None = Field(None, gt=0)
    """With `lfu`, rows last used in an earlier such span of time go first; null: uses count for ever."""
    static: bool = False
    """Keep whole tables, read-only: faster, but an update of such a table is refused."""
    fill: float = Field(1.0, ge=0, le=1)
    """Share of the capacity filled before the node is ready; more where the CPU cache, which is filled with
    the same rows, takes more. None when `cpu_cache.warm` is off."""
    workspaces: int = Field(4, ge=1, le=64)
    """Lookups at a time on each GPU; further ones wait for their turn."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        return self.consistent(
            checks.gpu(
                self.devices, self.eviction, self.epoch_s, self.host_bytes, static=self.static
            )
        )
