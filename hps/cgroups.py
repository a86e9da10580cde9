"""Control groups of this process, and the cores and the memory that it may use."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

PROC, GROUPS = Path("/proc"), Path("/sys/fs/cgroup")


def own_groups(controller: str, proc: Path = PROC, groups: Path = GROUPS) -> Iterator[Path]:
    """Folders of this process's control groups, from the innermost up.

    ``controller`` names a hierarchy of version 1; "" means version 2, which has one tree. A container
    may hide some of the folders. Raises OSError without /proc."""
    for line in (proc / "self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            root = groups / controller
            own = root / path.lstrip("/")
            for group in dict.fromkeys((own, *own.parents, root)):
                if group.is_relative_to(root):
                    yield group


def available_cores(proc: Path = PROC, groups: Path = GROUPS) -> int:
    """Number of cores that this process may use: its affinity, or its container's limit rounded up."""
    has_affinity = hasattr(os, "sched_getaffinity")
    limits = [len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1]
    with suppress(OSError):
        limits += [math.ceil(cores) for cores in _quotas(proc, groups)]
    return max(1, min(limits))


def _quotas(proc: Path, groups: Path) -> Iterator[float]:
    """CPU limits in cores, of all groups that have one."""
    for group in own_groups("", proc, groups):
        with suppress(OSError):
            quota, period = (group / "cpu.max").read_text().split()
            if quota != "max":
                yield int(quota) / int(period)
    for group in own_groups("cpu", proc, groups):
        with suppress(OSError):
            quota, period = (
                (group / name).read_text() for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")
            )
            if int(quota) > 0:
                yield int(quota) / int(period)


def memory_left(proc: Path = PROC, groups: Path = GROUPS) -> int | None:
    """Bytes that this process's groups may still allocate, file cache that can be dropped included.

    None without a limit."""
    files = {
        "": ("memory.max", "memory.current", "inactive_file"),
        "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    }
    left = []
    for controller, names in files.items():
        with suppress(OSError):
            for group in own_groups(controller, proc, groups):
                with suppress(OSError, ValueError):  # no limit is "max"
                    left.append(_memory_left(group, *names))
    return min(left, default=None)


def free_host_bytes(proc: Path = PROC, groups: Path = GROUPS) -> int:
    """Bytes of memory that can be allocated without taking any from other processes.

    A limit of the container counts. Raises OSError without /proc."""
    free = int((proc / "meminfo").read_text().split("MemAvailable:")[1].split()[0]) * 1024
    left = memory_left(proc, groups)
    return free if left is None else min(free, left)


def memory_limit(proc: Path = PROC, groups: Path = GROUPS) -> int:
    """Bytes that this process may use: the machine's memory, or its container's limit. Raises OSError."""
    limits = [int((proc / "meminfo").read_text().split("MemTotal:")[1].split()[0]) * 1024]
    for controller, name in (("", "memory.max"), ("memory", "memory.limit_in_bytes")):
        with suppress(OSError):
            for group in own_groups(controller, proc, groups):
                with suppress(OSError, ValueError):  # no limit is "max"
                    limits.append(int((group / name).read_text()))
    return min(limits)


def _memory_left(group: Path, limit: str, usage: str, inactive: str) -> int:
    free = int((group / limit).read_text()) - int((group / usage).read_text())
    for line in (group / "memory.stat").read_text().splitlines():
        name, _, value = line.partition(" ")
        if name == inactive:
            free += int(value)
    return max(0, free)
