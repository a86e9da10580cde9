"""Counters, histograms and gauges, and their exposition as Prometheus reads it."""

import json
import re
import threading

import pytest
from prometheus_client.parser import text_string_to_metric_families

from hps import metric_names as m
from hps.meters import DenseMeter, LookupMeter, TierMeter
from hps.metric_names import METRICS, SECONDS_BUCKETS
from hps.metrics import Metrics, Numbers
from hps.types import EmbeddingTable, Source

TABLE = EmbeddingTable.make("t", 2, model="clicks")


def samples(metrics):
    """(name, labels) -> value of everything exposed."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(metrics.render().decode())
        for sample in family.samples
    }


def of(metrics, name, **labels):
    return samples(metrics).get((name, tuple(sorted(labels.items()))))


def test_the_table_of_names():
    names = [spec.name for spec in METRICS]
    assert len(set(names)) == len(names)
    constants = {
        value for name, value in vars(m).items() if name.isupper() and str(value)[:4] == "hps_"
    }
    assert constants == set(names)
    for spec in METRICS:
        assert re.fullmatch(r"hps_[a-z_]+", spec.name)
        assert spec.help[0].isupper()
        assert spec.help.endswith(".")
        assert spec.name.endswith("_total") == (spec.kind == "counter")
        if spec.kind == "histogram":
            assert spec.name.endswith(("_seconds", "_requests"))
    assert list(SECONDS_BUCKETS) == sorted(SECONDS_BUCKETS)
    assert SECONDS_BUCKETS[0] < 1e-3


def test_every_metric_is_exposed_with_its_help():
    text = Metrics().render().decode()
    for spec in METRICS:
        assert f"# TYPE {spec.name} {spec.kind}" in text
        assert f"# HELP {spec.name} {spec.help}" in text


def test_counter():
    metrics = Metrics()
    counter = metrics.counter(m.PROMOTIONS, "cpu", "inserted")
    assert metrics.counter(m.PROMOTIONS, "cpu", "inserted") is counter
    counter.add()
    counter.add(4)
    assert of(metrics, m.PROMOTIONS, tier="cpu", result="inserted") == 5
    assert of(metrics, m.PROMOTIONS, tier="cpu", result="gone") is None


def test_histogram_buckets_are_cumulative_and_upper_bounds_belong():
    metrics = Metrics()
    histogram = metrics.histogram(m.TIER_SECONDS, "cpu")
    for seconds in (0.0, 10e-6, 11e-6, 0.5, 99.0):
        histogram.observe(seconds)
    name = m.TIER_SECONDS
    assert of(metrics, f"{name}_bucket", tier="cpu", le="1e-05") == 2
    assert of(metrics, f"{name}_bucket", tier="cpu", le="2.5e-05") == 3
    assert of(metrics, f"{name}_bucket", tier="cpu", le="0.5") == 4
    assert of(metrics, f"{name}_bucket", tier="cpu", le="10.0") == 4
    assert of(metrics, f"{name}_bucket", tier="cpu", le="+Inf") == 5
    assert of(metrics, f"{name}_count", tier="cpu") == 5
    assert of(metrics, f"{name}_sum", tier="cpu") == pytest.approx(99.500021)


def test_gauges_are_read_when_asked():
    metrics, rows = Metrics(), {"a": 1.0}
    metrics.gauge(m.UPTIME, lambda: len(rows))
    metrics.gauges(m.TABLE_ROWS, lambda: [(("cpu", "m", t), n) for t, n in rows.items()])
    rows["b"] = 2.0
    assert of(metrics, m.UPTIME) == 2
    assert of(metrics, m.TABLE_ROWS, tier="cpu", model="m", table="b") == 2


def test_wrong_use_is_an_error_at_once():
    metrics = Metrics()
    with pytest.raises(KeyError):
        metrics.counter("hps_nonsense_total")
    with pytest.raises(ValueError, match="is a histogram with labels"):
        metrics.counter(m.TIER_SECONDS, "cpu")
    with pytest.raises(ValueError, match=r"labels \('tier',\), got \(\)"):
        metrics.histogram(m.TIER_SECONDS)


def test_hostile_label_values_stay_one_sample():
    metrics = Metrics()
    metrics.counter(m.LOOKUP_DEGRADED, 'a"b\n}', "cpu").add()
    assert of(metrics, m.LOOKUP_DEGRADED, model='a"b\n}', tier="cpu") == 1


def test_no_count_is_lost_between_threads():
    metrics = Metrics()

    def work():
        for _ in range(2000):
            metrics.counter(m.PROMOTIONS, "cpu", "gone").add()
            metrics.histogram(m.TIER_SECONDS, "cpu").observe(0.1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert of(metrics, m.PROMOTIONS, tier="cpu", result="gone") == 8000
    assert of(metrics, f"{m.TIER_SECONDS}_count", tier="cpu") == 8000


def test_lookup_meter():
    metrics = Metrics()
    meter = LookupMeter(metrics, "clicks")
    every = [source for source in Source for _ in range(source + 1)]
    meter.finished([(TABLE, bytes(every)), (TABLE, b"")], 0.1, ("rocksdb",))
    for source in Source:
        labels = {"model": "clicks", "table": "t", "tier": source.name.lower()}
        assert of(metrics, m.LOOKUP_KEYS, **labels) == source + 1
    assert of(metrics, m.LOOKUP_DEGRADED, model="clicks", tier="rocksdb") == 1
    assert of(metrics, f"{m.LOOKUP_SECONDS}_count", model="clicks") == 1


def test_tier_and_dense_meter():
    metrics = Metrics()
    meter = TierMeter(metrics, "cpu")
    meter([(TABLE, 5, 3), (TABLE, 0, 0)], 0.1)
    meter([(TABLE, 4, 4)], 0.1)
    labels = {"tier": "cpu", "model": "clicks", "table": "t"}
    assert of(metrics, m.TIER_KEYS, **labels, result="found") == 7
    assert of(metrics, m.TIER_KEYS, **labels, result="missed") == 2
    meter([(TABLE, 6, 1)], 0.1, True)
    meter.passed_over("late")
    assert of(metrics, m.TIER_KEYS, **labels, result="found") == 8
    assert of(metrics, m.TIER_KEYS, **labels, result="missed") == 2
    assert of(metrics, m.TIER_KEYS, **labels, result="skipped") == 5
    assert of(metrics, f"{m.TIER_SECONDS}_count", tier="cpu") == 2
    assert of(metrics, m.TIER_SKIPPED, tier="cpu", reason="late") == 1
    dense = DenseMeter(metrics, "clicks")
    dense.ran(0.1)
    dense.not_finite("ctr", 3)
    assert of(metrics, m.SCORES_NOT_FINITE, model="clicks", output="ctr") == 3
    assert of(metrics, f"{m.DENSE_SECONDS}_sum", model="clicks") == pytest.approx(0.1)


def test_no_observation_is_lost_while_others_read():
    """Observations are noted and sorted later: however many threads note and read, none is lost."""
    histogram = Metrics().histogram(m.TIER_SECONDS, "cpu")
    stop = threading.Event()

    def observe():
        for _ in range(20_000):
            histogram.observe(3e-5)

    def read():
        while not stop.is_set():
            histogram.read()

    reader = threading.Thread(target=read)
    writers = [threading.Thread(target=observe) for _ in range(4)]
    for thread in (reader, *writers):
        thread.start()
    for thread in writers:
        thread.join()
    stop.set()
    reader.join()
    counts, total = histogram.read()
    assert sum(counts) == 80_000
    assert counts[SECONDS_BUCKETS.index(50e-6)] == 80_000
    assert total == pytest.approx(80_000 * 3e-5)


@pytest.mark.parametrize("index", range(len(SECONDS_BUCKETS)))
def test_a_bucket_holds_its_upper_bound(index):
    histogram = Metrics().histogram(m.TIER_SECONDS, "cpu")
    bound = SECONDS_BUCKETS[index]
    for seconds in (bound, bound * 1.0001):
        histogram.observe(seconds)
    counts, _ = histogram.read()
    assert counts[index] == 1
    assert counts[index + 1] == 1


def test_numbers_of_other_processes_are_added_to_ours():
    """Over JSON, as they travel; of what only ended processes had, no gauge."""
    ours, other = Metrics(), Metrics()
    for each, n in ((ours, 1), (other, 2)):
        each.counter(m.LOOKUP_KEYS, "clicks", "users", "cpu").add(n)
        each.histogram(m.TIER_SECONDS, "cpu").observe_all([3e-5] * n)
        each.gauge(m.LOOKUP_WAITING, lambda n=n: n)
    other.counter(m.LOOKUP_KEYS, "clicks", "users", "redis").add(5)
    told = json.loads(json.dumps(other.numbers().as_json()))
    ours.include(lambda: Numbers.from_json(told))
    ours.include(lambda: Numbers.from_json(told).grown())
    assert of(ours, m.LOOKUP_KEYS, model="clicks", table="users", tier="cpu") == 5
    assert of(ours, m.LOOKUP_KEYS, model="clicks", table="users", tier="redis") == 10
    assert of(ours, f"{m.TIER_SECONDS}_count", tier="cpu") == 5
    assert of(ours, f"{m.TIER_SECONDS}_sum", tier="cpu") == pytest.approx(15e-5)
    assert of(ours, m.LOOKUP_WAITING) == 3
    assert ours.counter(m.LOOKUP_KEYS, "clicks", "users", "cpu").value == 1


def test_metrics_that_are_not_known_here_are_left_out():
    assert Numbers.from_json({"hps_of_tomorrow": [[[], 1]]}) == {}
