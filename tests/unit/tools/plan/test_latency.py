"""Calibrations: interpolation, percentiles, files."""

import json
from dataclasses import replace

import numpy as np
import pytest

from hps.config import configuration_from
from hps.errors import ConfigError
from hps.tools.plan.latency import Calibration
from hps.tools.plan.node_latency import NodeLatency, redis_share_of
from hps.tools.plan.requests import RequestMisses

REDIS = Calibration(100.0, (0.0, 10.0), (11.0, 211.0), 0.05, ((1.0, 2.0),))
MADE = Calibration(100.0, (0.0, 10.0, 20.0), (10.0, 30.0, 40.0), 0.05, ((0.5, 1.0, 3.0),) * 3)


def requests(keys, misses):
    return RequestMisses(np.array(keys, float), np.array(misses, float), np.zeros(len(keys)))


def test_medians_are_interpolated_and_continued():
    keys = np.array([100.0, 100.0, 100.0, 100.0, 200.0])
    misses = np.array([0.0, 5.0, 20.0, 40.0, 0.0])
    assert MADE.medians_us(keys, misses).tolist() == pytest.approx([10, 20, 40, 60, 15])


def test_percentiles_are_over_requests_and_spread():
    keys, misses = np.full(1_000, 100.0), np.repeat([0.0, 20.0], 500)
    p25, p99 = NodeLatency(MADE).percentiles_us(requests(keys, misses), (25, 99))
    assert p25 == pytest.approx(10, rel=0.1)
    assert 100 < p99 < 120


@pytest.mark.parametrize("made", [MADE, replace(MADE, redis=REDIS, gpu=REDIS)])
def test_calibration_is_saved_and_loaded(tmp_path, made):
    made.save(tmp_path / "c.json")
    assert Calibration.load(tmp_path / "c.json") == made


@pytest.mark.parametrize(
    ("share", "expected"),
    [
        (None, (10, 30, 40)),  # the local store
        (1.0, (11, 211, 411)),
        (0.0, (11, 231, 441)),  # every miss asks Redis first
        (0.5, (11, 221, 431)),
    ],
)
def test_redis_answers_its_share_of_the_misses(share, expected):
    found = requests([100] * 3, [0, 10, 20])
    latency = NodeLatency(replace(MADE, redis=REDIS), share)
    assert latency.mean_us(found) == pytest.approx(np.mean(expected))
    assert NodeLatency(MADE, share).mean_us(found) == pytest.approx(np.mean([10, 30, 40]))


def test_spread_of_the_latencies_is_that_of_redis():
    found = requests([100], [10])
    p1, p99 = NodeLatency(replace(MADE, redis=REDIS), 1.0).percentiles_us(found, (1, 99))
    assert (p1, p99) == pytest.approx((211, 422), rel=0.02)


@pytest.mark.parametrize(
    ("tiers", "share"),
    [
        ({}, None),
        ({"redis": {}}, 1.0),
        ({"redis": {"cache_missed_embeddings": False, "initial_cache_rate": 0.3}}, 0.3),
        ({"redis": {"cache_missed_embeddings": False}, "rocksdb": {"enabled": False}}, 1.0),
    ],
)
def test_share_of_redis_follows_from_the_settings(tiers, share):
    assert redis_share_of(configuration_from({"tiers": tiers}, environ={}).settings) == share


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
