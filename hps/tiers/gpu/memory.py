"""Metrics of each GPU's used and total memory."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import NamedTuple

from hps.observability import metric_names as m
from hps.observability.metrics import Metrics
from hps.tiers.background_refresh import BackgroundValue

log = logging.getLogger(__name__)

_REFRESH_S = 5.0


class GpuMemoryUsage(NamedTuple):
    """A device's memory in bytes, and its UUID as nvidia-smi prints it."""

    gpu: int
    uuid: str
    used: int
    total: int


def publish_memory(metrics: Metrics, devices: Sequence[int], resources: ExitStack) -> None:
    """Register the memory gauges, refreshed in the background until ``resources`` is closed."""
    memory = BackgroundValue(partial(_read_all, devices), _REFRESH_S, "gpu-memory")
    resources.callback(memory.close)

    def read(which: str) -> list[tuple[tuple[str, ...], float]]:
        return [((str(each.gpu), each.uuid), getattr(each, which)) for each in memory.value or ()]

    metrics.gauges(m.GPU_MEMORY_USED, partial(read, "used"))
    metrics.gauges(m.GPU_MEMORY_TOTAL, partial(read, "total"))


def _read_all(devices: Sequence[int]) -> list[GpuMemoryUsage]:
    """Read the memory of ``devices``; a device that fails is left out."""
    usages = []
    for device in devices:
        try:
            usages.append(read_memory(device))
        except Exception as error:  # the driver may raise anything
            log.warning("reading the memory of GPU %d failed: %s", device, error)
    return usages


def read_memory(device: int) -> GpuMemoryUsage:
    from hps.cuda.memory import device_memory

    return GpuMemoryUsage(device, *device_memory(device))
