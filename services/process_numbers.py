"""Metrics of a process's CPU time and memory; see `services.container_memory` for the limits."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

from hps.observability import metric_names as m
from hps.observability.metrics import Metrics

_STATUS = Path("/proc/self/status")
_RESIDENT = {"Anon": "anonymous", "File": "file", "Shmem": "shared"}


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
