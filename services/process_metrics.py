"""Metrics of a process: its CPU time and memory, and the memory of its container.

The kernel kills a process when its container has no memory left."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from hps.cgroups import GROUPS, PROC, own_groups
from hps.observability import metric_names as m
from hps.observability.metrics import Metrics

_STATUS = Path("/proc/self/status")
_RESIDENT = {"Anon": "anonymous", "File": "file", "Shmem": "shared"}
_KILOBYTE = 1024
# The two versions of control groups: controller, files with a group's limit and use, and the part of
# the use that is file cache, which the kernel reclaims before it kills a process.
_FORMS = (
    ("", "memory.max", "memory.current", ("inactive_file", "active_file")),
    (
        "memory",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        ("total_inactive_file", "total_active_file"),
    ),
)


def publish_process(metrics: Metrics, role: str) -> None:
    """Export CPU time and memory, read at each exposition; processes of one role can be added up."""
    metrics.gauge(m.PROCESS_CPU, time.process_time, role)
    metrics.gauges(
        m.PROCESS_MEMORY,
        lambda: [((role, kind), size) for kind, size in resident_bytes(_STATUS.read_text())],
    )


def resident_bytes(status: str) -> Iterator[tuple[str, int]]:
    """Resident memory by kind from ``/proc/PID/status``, in bytes."""
    for kind, kilobytes in re.findall(r"^Rss(\w+):\s+(\d+) kB$", status, re.MULTILINE):
        yield _RESIDENT.get(kind, kind.lower()), int(kilobytes) * 1024


class ContainerMemory(NamedTuple):
    """Used and available bytes."""

    used: int
    limit: int


def publish_memory(metrics: Metrics) -> None:
    """Export the container's memory as gauges, read at each exposition."""
    metrics.gauges(m.MEMORY_USED, lambda: [((), each.used) for each in _visible_memory()])
    metrics.gauges(m.MEMORY_LIMIT, lambda: [((), each.limit) for each in _visible_memory()])


def _visible_memory() -> list[ContainerMemory]:
    """The memory as a list of one; empty if the system hides it (systemd's ProcSubset=pid)."""
    try:
        return [read_memory_limits()]
    except (OSError, KeyError):
        return []


def read_memory_limits(proc: Path = PROC, groups: Path = GROUPS) -> ContainerMemory:
    """Memory of this process's container, or of a parent group if a larger share of that is used.

    Without limits, that of the machine."""
    meminfo = dict(re.findall(r"^(\w+):\s+(\d+) kB$", (proc / "meminfo").read_text(), re.MULTILINE))
    total, free = (int(meminfo[name]) * _KILOBYTE for name in ("MemTotal", "MemAvailable"))
    limited = [each for each in _limited(proc, groups) if each.limit < total]
    return max(
        limited,
        key=lambda each: each.used / each.limit,
        default=ContainerMemory(total - free, total),
    )


def _limited(proc: Path, groups: Path) -> Iterator[ContainerMemory]:
    """Limited groups of this process, from the innermost up, as far as they are visible."""
    for controller, limit, use, files in _FORMS:
        for group in own_groups(controller, proc, groups):
            yield from _read(group, limit, use, files)


def _read(group: Path, limit: str, use: str, files: tuple[str, ...]) -> Iterator[ContainerMemory]:
    try:
        most, used = (group / limit).read_text().strip(), int((group / use).read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except OSError:
        return  # not visible from within the container
    if most.isdigit() and int(most):
        yield ContainerMemory(used - sum(int(stat.get(name, 0)) for name in files), int(most))
