"""What a server process takes for itself, for metrics; see `services.container_memory` for what there is."""

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
    """Its CPU time and memory, read when metrics are asked for; of several processes of one role they can be
    added up."""
    metrics.gauge(m.PROCESS_CPU, time.process_time, role)
    metrics.gauges(
        m.PROCESS_MEMORY,
        lambda: [((role, kind), size) for kind, size in resident_bytes(_STATUS.read_text())],
    )


def resident_bytes(status: str) -> Iterator[tuple[str, int]]:
    """The kinds of resident memory that ``/proc/PID/status`` tells of, in bytes."""
    for kind, kilobytes in re.findall(r"^Rss(\w+):\s+(\d+) kB$", status, re.MULTILINE):
        yield _RESIDENT.get(kind, kind.lower()), int(kilobytes) * 1024
