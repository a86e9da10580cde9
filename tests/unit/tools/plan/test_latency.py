"""Calibrations: interpolation, percentiles, files."""

import json

import numpy as np
import pytest

from hps.errors import ConfigError
from hps.tools.plan.latency import Calibration

MADE = Calibration(100.0, (0.0, 10.0, 20.0), (10.0, 30.0, 40.0), 0.05, ((0.5, 1.0, 3.0),) * 3)


def test_medians_are_interpolated_and_continued():
    keys = np.array([100.0, 100.0, 100.0, 100.0, 200.0])
    misses = np.array([0.0, 5.0, 20.0, 40.0, 0.0])
    assert MADE.medians_us(keys, misses).tolist() == pytest.approx([10, 20, 40, 60, 15])


def test_percentiles_are_over_requests_and_spread():
    keys, misses = np.full(1_000, 100.0), np.repeat([0.0, 20.0], 500)
    p25, p99 = MADE.percentiles_us(keys, misses, (25, 99))
    assert p25 == pytest.approx(10, rel=0.1)
    assert 100 < p99 < 120


def test_calibration_is_saved_and_loaded(tmp_path):
    MADE.save(tmp_path / "c.json")
    assert Calibration.load(tmp_path / "c.json") == MADE


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", json.dumps({"keys": 1, "misses": [1], "p50_us": [1], "more": 0})]
)
def test_wrong_file_is_an_error(tmp_path, text):
    (tmp_path / "c.json").write_text(text)
    with pytest.raises(ConfigError, match="not a calibration"):
        Calibration.load(tmp_path / "c.json")
    with pytest.raises(ConfigError, match="cannot be read"):
        Calibration.load(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("misses", "times"), [((0, 0), (1, 1)), ((1,), (1,)), ((0,), (1, 2)), ((0,), (0,))]
)
def test_contradictory_calibration_is_rejected(misses, times):
    with pytest.raises(ValueError, match="must"):
        Calibration(1.0, misses, times)
