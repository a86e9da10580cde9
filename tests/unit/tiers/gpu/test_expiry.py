"""Expired rows on several GPUs: every device evicts its own. No device is needed."""

import pytest

from hps.tiers.gpu.replicas import GpuReplicas
from hps.tiers.gpu.split import GpuSplit
from hps.types import EmbeddingTable

TABLE = EmbeddingTable.make("t", 4, ttl_s=60)


class Device:
    def __init__(self, rows):
        self.rows, self.asked = rows, []

    def expire(self, table, oldest):
        self.asked.append((table, oldest))
        return self.rows


@pytest.mark.parametrize(("kind", "evicted"), [(GpuReplicas, 5), (GpuSplit, 8)])
def test_every_device_evicts_its_rows(kind, evicted):
    """Replicas have the same rows, which count once."""
    tier = kind.__new__(kind)  # without peer access between the devices
    tier.caches = (Device(3), Device(5))
    assert tier.expire(TABLE, 7) == evicted
    assert [device.asked for device in tier.caches] == [[(TABLE, 7)]] * 2
