"""hps plan on a real trace, and with latencies measured on this machine."""

import json
import lzma

import numpy as np
import pytest
from typer.testing import CliRunner

from benchmarks.peers.process import free_ports
from hps.cli.main import app
from hps.errors import TierError
from hps.lookup.key_sampling import KeySampler
from hps.tools.plan.calibration import calibrate, calibrate_redis
from hps.tools.plan.calibration_requests import TableLoad
from hps.tools.plan.curves import TableCurve, simulate
from tests.support import redis_servers

BATCH = 1024


@pytest.fixture(scope="module")
def trace_file(shared_data):
    return shared_data / "scarab" / "scarab-recs.trace.xz"


@pytest.fixture(scope="module")
def keys(trace_file):
    """(1245184,) keys in the order of their access."""
    return np.frombuffer(lzma.decompress(trace_file.read_bytes()), ">i8").astype(np.int64)


@pytest.mark.data
@pytest.mark.parametrize("eviction", ["lru", "lfu"])
def test_second_half_of_the_scarab_trace_is_predicted_from_the_first(keys, eviction):
    half, rows = len(keys) // 2, len(np.unique(keys))
    sampler = KeySampler()
    sampler.add(keys[:half], np.arange(half) // BATCH)
    curve = TableCurve(sampler.sample(), rows, eviction)
    for share in (0.01, 0.1, 0.2):
        capacity = int(share * rows)
        measured = 1 - simulate(keys, capacity, eviction)[half:].mean()
        assert curve.at(capacity) == pytest.approx(measured, abs=0.02), share


@pytest.mark.data
def test_scarab_trace_is_planned_from_its_file(trace_file):
    words = ["plan", str(trace_file), "--table", "items=258368x32", "--batch", str(BATCH)]
    done = CliRunner().invoke(app, [*words, "--no-latency", "--hit-rate", "0.6", "-o", "json"])
    assert done.exit_code == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["trace"] == {"requests": 1216, "keys": 1_245_184}
    assert 0.08 * 258_368 < found["plan"]["rows"]["items"] < 0.1 * 258_368


def test_lookups_of_this_machine_are_measured():
    loads = [TableLoad("user", 16, "float32", 50_000, 64, 64, "sum")]
    loads.append(TableLoad("ads", 8, "float16", 9_000, 192, 64, "mean"))
    found = calibrate(loads, seconds=2.0)
    assert found.keys == 256
    assert found.misses[0] == 0
    assert found.misses[-1] == pytest.approx(0.8 * 256, abs=2)
    assert 0 < found.p50_us[0] < found.p50_us[1] <= found.p50_us[-1]
    assert len(found.spread) == len(found.misses)


@pytest.mark.parametrize("mapped", [False, True])
def test_lookups_of_mapped_files_in_memory_are_measured(mapped):
    loads = [TableLoad("user", 32, "float32", 50_000, 512, 512, "none")]
    found = calibrate(loads, mapped=mapped, in_memory=True, seconds=2.0)
    assert found.misses[-1] == pytest.approx(0.8 * 512, abs=2)
    assert 0 < found.mapped_us < found.p50_us[-1]
    assert calibrate(loads, seconds=0.1).mapped_us is None


def test_plan_measures_latencies(tmp_path):
    keys = np.minimum(np.random.default_rng(1).zipf(1.3, (500, 64)) - 1, 19_999)
    np.save(tmp_path / "keys.npy", keys.reshape(-1))
    saved = tmp_path / "calibration.json"
    words = ["plan", str(tmp_path / "keys.npy"), "--table", "t=20000x16", "--batch", "64"]
    done = CliRunner().invoke(app, [*words, "--save-calibration", str(saved), "-o", "json"])
    assert done.exit_code == 0, done.stderr
    plan = json.loads(done.stdout)["plan"]
    assert 0 < plan["p50_us"] <= plan["p99_us"]
    assert plan["core_keys_per_s"] > 1_000
    again = CliRunner().invoke(app, [*words, "--calibration", str(saved), "-o", "json"])
    assert json.loads(again.stdout)["plan"] == plan


@pytest.fixture
def redis():
    return redis_servers.shared_server()


@pytest.mark.parametrize("layout", ["native", "hps"])
def test_lookups_over_redis_are_measured_and_leave_nothing(redis, layout):
    loads = [TableLoad("user", 16, "float32", 50_000, 64, 64, "sum")]
    loads.append(TableLoad("ads", 8, "float16", 9_000, 192, 64, "mean"))
    # Limits that would take rows away during the measurement.
    chosen = redis_servers.settings(redis, layout=layout, overflow_margin=10)
    found = calibrate_redis(loads, chosen, seconds=2.0)
    assert found.misses[0] == 0
    assert found.misses[-1] == pytest.approx(0.8 * 256, abs=2)
    assert 0 < found.p50_us[0] < found.p50_us[1] <= found.p50_us[-1]
    assert redis.ask("DBSIZE") == 0


def test_redis_that_does_not_answer_is_an_error():
    (port,) = free_ports(1)
    chosen = redis_servers.RedisSettings(addresses=[f"127.0.0.1:{port}"])
    with pytest.raises(TierError, match="redis"):
        calibrate_redis([TableLoad("user", 16, "float32", 50_000, 64)], chosen, seconds=0.1)


@pytest.fixture
def plan_words(tmp_path):
    keys = np.minimum(np.random.default_rng(1).zipf(1.3, (500, 64)) - 1, 19_999)
    np.save(tmp_path / "keys.npy", keys.reshape(-1))
    table = ["--table", "t=20000x16", "--batch", "64", "--memory", "50000"]
    return ["plan", str(tmp_path / "keys.npy"), *table]


def test_plan_measures_redis(tmp_path, plan_words, redis):
    saved = tmp_path / "calibration.json"
    words = [*plan_words, "--redis", redis.address, "-o", "json"]
    done = CliRunner().invoke(app, [*words, "--save-calibration", str(saved)])
    assert done.exit_code == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["unknown_latency"] == {}
    assert 0 < found["plan"]["p50_us"] <= found["plan"]["p99_us"]
    assert found["calibration"]["redis"]["p50_us"][-1] > 0
    assert [tier["tier"] for tier in found["tiers"]] == ["CPU cache", "Redis", "mapped files"]
    again = CliRunner().invoke(app, [*words, "--calibration", str(saved)])
    assert json.loads(again.stdout)["plan"] == found["plan"]


def test_plan_says_that_redis_is_not_predicted(plan_words):
    (port,) = free_ports(1)
    done = CliRunner().invoke(app, [*plan_words, "--redis", f"127.0.0.1:{port}"])
    assert done.exit_code == 0, done.stderr
    assert "Redis is not in the predicted latencies" in " ".join(done.stderr.split())
