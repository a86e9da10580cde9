"""Calibrations of lookups on a GPU: on its NumPy twin, and on a device."""

import pytest

from hps.errors import GpuUnavailable
from hps.tools.plan import calibration
from hps.tools.plan.calibration import calibrate_gpu
from hps.tools.plan.calibration_requests import TableLoad
from tests.support import twin_device

LOADS = [
    TableLoad("user", 16, "float32", 50_000, 64, 64, "sum"),
    TableLoad("ad", 8, "float16", 9_000, 64, 64),
]


@pytest.fixture(params=["twin", pytest.param("gpu", marks=pytest.mark.gpu)])
def gpu(request, monkeypatch):
    """A GPU, or its twin; the twin's caches."""
    if request.param == "gpu":
        return None
    monkeypatch.setattr(calibration, "missing_requirement", lambda: None)
    monkeypatch.setattr(calibration, "device_count", lambda: 1)
    return twin_device.install(monkeypatch)


def test_lookups_on_a_gpu_are_measured(gpu):
    found = calibrate_gpu(LOADS, seconds=2.0)
    assert found.keys == 128
    assert found.misses[0] == 0
    assert len(found.misses) >= 5
    # Cold rows that the GPU cache still has are found there, and hot ones that it has evicted are not.
    assert 0.3 * 128 < found.misses[-1] <= 128
    assert all(a < b for a, b in zip(found.misses, found.misses[1:], strict=False))
    assert 0 < found.p50_us[0] <= found.p50_us[-1]
    assert len(found.spread) == len(found.misses)


def test_missing_gpu_is_an_error(monkeypatch):
    monkeypatch.setattr(calibration, "missing_requirement", lambda: "no device is visible")
    with pytest.raises(GpuUnavailable, match="no device is visible"):
        calibrate_gpu(LOADS)
    monkeypatch.setattr(calibration, "missing_requirement", lambda: None)
    monkeypatch.setattr(calibration, "device_count", lambda: 1)
    with pytest.raises(GpuUnavailable, match=r"GPU 1 of .* does not exist"):
        calibrate_gpu(LOADS, device=1)
