"""How much memory of each GPU is taken, for metrics."""

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

_LOOK_EVERY_S = 5.0


class GpuMemoryUsage(NamedTuple):
    """A device's memory in bytes, and its UUID as NVIDIA's tools show it."""

    gpu: int
    uuid: str
    used: int
    total: int


def publish_memory(metrics: Metrics, devices: Sequence[int], resources: ExitStack) -> None:
    """Gauges of it, looked at in the background; ``resources`` ends that."""
    memory = BackgroundValue(partial(_look, devices), _LOOK_EVERY_S, "gpu-memory")
    resources.callback(memory.close)

    def read(which: str) -> list[tuple[tuple[str, ...], float]]:
        return [((str(of.gpu), of.uuid), getattr(of, which)) for of in memory.value or ()]

    metrics.gauges(m.GPU_MEMORY_USED, partial(read, "used"))
    metrics.gauges(m.GPU_MEMORY_TOTAL, partial(read, "total"))


def _look(devices: Sequence[int]) -> list[GpuMemoryUsage]:
    """Of those that answer: a device that fails is told of by its absence."""
    found = []
    for device in devices:
        try:
            found.append(read_memory(device))
        except Exception as error:  # whatever the driver says
            log.warning("GPU %d does not answer: %s", device, error)
    return found


def read_memory(device: int) -> GpuMemoryUsage:
    from hps.cuda.memory import device_memory

    return GpuMemoryUsage(device, *device_memory(device))
