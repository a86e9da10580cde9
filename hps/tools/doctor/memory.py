"""Checks of memory: what the configuration needs, and what the process may use."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from hps.tools.doctor import machine
from hps.tools.doctor.check import DoctorCheck, Verdict
from hps.tools.output import plural, size

if TYPE_CHECKING:
    from hps.config.schema import Settings
    from hps.models.tables import TableFiles
    from hps.tiers.gpu.plan import Plan
    from hps.types import EmbeddingTable

    Files = Mapping[EmbeddingTable, TableFiles]

_CGROUPS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
# Share of memory for caches; the rest is for requests, networks and the process itself.
_FOR_CACHES = 0.8


def memory(settings: Settings, table_bytes: int, files: Files) -> Iterator[DoctorCheck]:
    """Check total, shared, locked and GPU memory; ``table_bytes``: size of all served rows."""
    yield processes(settings, table_bytes)
    wanted = cache_bytes(settings, table_bytes) + settings.tiers.rocksdb.block_cache_bytes
    pinned = pinned_bytes(settings, files) if machine.has_gpu() else 0
    yield enough(wanted + pinned, limit())
    yield from gpus(settings, files)
    triton = settings.dense.triton
    if settings.server.shared_memory or (triton is not None and triton.shared_memory == "system"):
        yield machine.shared_memory(Path("/dev/shm"))
    if pinned:
        yield locked(pinned, resource.getrlimit(resource.RLIMIT_MEMLOCK)[0])


def gpus(settings: Settings, files: Files) -> Iterator[DoctorCheck]:
    """Check that the configured GPUs exist and have room for the rows."""
    from hps.cuda.loader import cupy, missing_requirement
    from hps.node.gpu_caches import is_gpu_expected
    from hps.tiers.gpu.plan import device_bytes

    wanted, name = settings.tiers.gpu, "tiers.gpu"
    if wanted.use == "off":
        return
    if why := missing_requirement():
        if wanted.use == "required":
            remedy = "give this machine or container its GPUs, or set tiers.gpu.use to auto"
            yield DoctorCheck(name, "FAIL", f"use is required, but {why}", remedy)
        elif is_gpu_expected(wanted):
            remedy = "see docs/gpu.md, or set tiers.gpu.use to off"
            yield DoctorCheck(name, "WARN", f"rows are served from the CPU cache: {why}", remedy)
        return
    verdict: Verdict = "FAIL" if wanted.use == "required" else "WARN"
    cuda = cupy().cuda
    there = cuda.runtime.getDeviceCount()
    for number in wanted.devices:
        if number >= there:
            remedy = "correct tiers.gpu.devices, or give the container more of them"
            yield DoctorCheck(name, verdict, f"device {number} of {there} (from 0 on)", remedy)
            continue
        free, total = cuda.Device(number).mem_info
        needed = device_bytes(planned(settings, files, total))
        found = f"device {number}: {size(free)} of {size(total)} free, the rows take {size(needed)}"
        if needed <= total:
            yield DoctorCheck(name, "OK", found)
            continue
        remedy = "lower tiers.gpu.capacity_bytes or tiers.gpu.share"
        yield DoctorCheck(name, verdict, found, remedy)


def cache_bytes(settings: Settings, table_bytes: int) -> int:
    """Largest size of the CPU cache."""
    cache = settings.tiers.cpu_cache
    if not cache.enabled:
        return 0
    if cache.share is not None:
        return int(cache.share * table_bytes)
    return min(cache.capacity_bytes, table_bytes) if table_bytes else cache.capacity_bytes


def planned(settings: Settings, files: Files, free_bytes: int | None = None) -> Plan:
    """The GPU caches of a start on a GPU with ``free_bytes``, in which versions may share rows."""
    from hps.node.gpu_sharing import find_joins, may_share, plan_shared

    joins = find_joins(files, {}) if may_share(settings) else {}
    return plan_shared(settings, files, joins, free_bytes)


def pinned_bytes(settings: Settings, files: Files) -> int:
    """Host memory that GPUs read directly."""
    from hps.tiers.gpu.plan import host_bytes_of

    gpu = settings.tiers.gpu
    if gpu.use == "off" or not gpu.host_bytes:
        return 0
    return host_bytes_of(planned(settings, files)) * len(gpu.devices)


def limit() -> int:
    """Memory of the machine, or the smaller limit of this container."""
    total = [_of_machine()]
    for path in _CGROUPS:
        try:
            text = path.read_text().strip()
        except OSError:
            continue
        if text.isdigit():
            total.append(int(text))
    return min(total)


def _of_machine() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def enough(wanted: int, there: int) -> DoctorCheck:
    found = f"{size(there)}, of which caches may take {size(wanted)}"
    if wanted <= _FOR_CACHES * there:
        return DoctorCheck("memory", "OK", found)
    remedy = (
        "lower tiers.cpu_cache.capacity_bytes, tiers.gpu.host_bytes or tiers.rocksdb.block_cache_bytes, or "
        "give the machine or container more"
    )
    return DoctorCheck("memory", "WARN" if wanted <= there else "FAIL", found, remedy)


def locked(wanted: int, allowed: int) -> DoctorCheck:
    """Check the limit of locked memory: pages that GPUs read must not be swapped out."""
    name = "locked memory"
    if allowed in (-1, resource.RLIM_INFINITY):
        return DoctorCheck(name, "OK", f"unlimited; {size(wanted)} will be pinned")
    if allowed >= wanted:
        return DoctorCheck(name, "OK", f"up to {size(allowed)}; {size(wanted)} will be pinned")
    remedy = (
        "ulimit -l unlimited; docker run --ulimit memlock=-1; LimitMEMLOCK=infinity of a service; or lower "
        "tiers.gpu.host_bytes"
    )
    return DoctorCheck(
        name, "WARN", f"up to {size(allowed)}, {size(wanted)} would be pinned", remedy
    )


def processes(settings: Settings, table_bytes: int = 0) -> DoctorCheck:
    """The processes; check that workers can read the node's cache and that shared memory has room for it."""
    count, cache = settings.server.workers, settings.tiers.cpu_cache
    shared = cache.shared.name is not None
    if not count and not shared:
        return DoctorCheck("processes", "OK", "the node alone")
    found = f"the node and {plural(count, 'worker')}" if count else "the node, its cache shared"
    if not cache.enabled:
        remedy = "set tiers.cpu_cache.enabled to true"
        return DoctorCheck(
            "processes", "WARN", f"{found}, which ask the node for every row", remedy
        )
    from hps.native import COMPILED

    if not COMPILED:
        remedy = "build it (make setup), or set server.workers to 0"
        return DoctorCheck(
            "processes", "FAIL", f"{found}, but a shared cache needs the native core", remedy
        )
    folder, wanted = cache.shared.folder, cache_bytes(settings, table_bytes)
    free = shutil.disk_usage(folder).free if folder.is_dir() else 0
    if free + _taken(folder, cache.shared.name) < wanted:
        found += f"; the cache may take {size(wanted)}, {folder} has {size(free)} free"
        remedy = (
            "enlarge it (docker run --shm-size, shm_size of compose, an emptyDir of medium Memory), or lower "
            "tiers.cpu_cache.capacity_bytes"
        )
        return DoctorCheck("processes", "WARN", found, remedy)
    return DoctorCheck("processes", "OK", f"{found}, {folder} has {size(free)} free")


def _taken(folder: Path, name: str | None) -> int:
    """Bytes of the cache of a running node.

    ``name`` None: of any node, since the name is chosen at the start."""
    sizes = []
    for table in folder.glob(f"hps.{name or '*'}/*.table"):
        with suppress(OSError):  # removed meanwhile
            sizes.append(table.stat().st_size)
    return sum(sizes)
