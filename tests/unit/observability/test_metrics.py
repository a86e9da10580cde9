"""Counters, histograms and gauges, and their exposition as Prometheus reads it."""

import gc
import json
import re
import threading
import weakref

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from hps.observability import metric_names as m
from hps.observability.meters import DenseMeter, LookupMeter, TierMeter, UpdateMeter
from hps.observability.metric_spec import SCORE_BUCKETS, SECONDS_BUCKETS, MetricSpec
from hps.observability.metric_table import METRICS
from hps.observability.metrics import MetricHistogram, Metrics, MetricValues
from hps.types import EmbeddingTable, Source

TABLE = EmbeddingTable.make("t", 2, model="clicks")


def samples(metrics):
    """Parse the exposition: (name, labels) -> value."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(metrics.render().decode())
        for sample in family.samples
    }


def value_of(metrics, name, **labels):
    return samples(metrics).get((name, tuple(sorted(labels.items()))))


def test_metric_table_follows_the_naming_rules():
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
            assert spec.name.endswith(("_seconds", "_requests", "_scores", "_difference"))
    assert list(SECONDS_BUCKETS) == sorted(SECONDS_BUCKETS)
    assert SECONDS_BUCKETS[0] < 1e-3
    assert list(SCORE_BUCKETS) == sorted(SCORE_BUCKETS)


def test_every_metric_is_exposed_with_its_help():
    text = Metrics().render().decode()
    for spec in METRICS:
        assert f"# TYPE {spec.name} {spec.kind}" in text
        assert f"# HELP {spec.name} {spec.help}" in text


def test_counter_counts_per_label_values():
    metrics = Metrics()
    counter = metrics.counter(m.PROMOTIONS, "cpu", "inserted")
    assert metrics.counter(m.PROMOTIONS, "cpu", "inserted") is counter
    counter.add()
    counter.add(4)
    assert value_of(metrics, m.PROMOTIONS, tier="cpu", result="inserted") == 5
    assert value_of(metrics, m.PROMOTIONS, tier="cpu", result="gone") is None


def test_histogram_buckets_are_cumulative_and_include_upper_bounds():
    metrics = Metrics()
    histogram = metrics.histogram(m.TIER_SECONDS, "cpu")
    for seconds in (0.0, 10e-6, 11e-6, 0.5, 99.0):
        histogram.observe(seconds)
    name = m.TIER_SECONDS
    assert value_of(metrics, f"{name}_bucket", tier="cpu", le="1e-05") == 2
    assert value_of(metrics, f"{name}_bucket", tier="cpu", le="2.5e-05") == 3
    assert value_of(metrics, f"{name}_bucket", tier="cpu", le="0.5") == 4
    assert value_of(metrics, f"{name}_bucket", tier="cpu", le="10.0") == 4
    assert value_of(metrics, f"{name}_bucket", tier="cpu", le="+Inf") == 5
    assert value_of(metrics, f"{name}_count", tier="cpu") == 5
    assert value_of(metrics, f"{name}_sum", tier="cpu") == pytest.approx(99.500021)


def test_gauges_are_read_at_each_scrape():
    metrics, rows = Metrics(), {"a": 1.0}
    metrics.gauge(m.UPTIME, lambda: len(rows))
    metrics.gauges(m.TABLE_ROWS, lambda: [(("cpu", "m", "1", t), n) for t, n in rows.items()])
    rows["b"] = 2.0
    assert value_of(metrics, m.UPTIME) == 2
    assert value_of(metrics, m.TABLE_ROWS, tier="cpu", model="m", version="1", table="b") == 2


def test_unknown_metric_or_wrong_labels_raise():
    metrics = Metrics()
    with pytest.raises(KeyError):
        metrics.counter("hps_nonsense_total")
    with pytest.raises(ValueError, match="is a histogram with labels"):
        metrics.counter(m.TIER_SECONDS, "cpu")
    with pytest.raises(ValueError, match=r"labels \('tier',\), got \(\)"):
        metrics.histogram(m.TIER_SECONDS)


def test_special_characters_in_label_values_are_escaped():
    metrics = Metrics()
    metrics.counter(m.LOOKUP_DEGRADED, 'a"b\n}', "cpu").add()
    assert value_of(metrics, m.LOOKUP_DEGRADED, model='a"b\n}', tier="cpu") == 1


def test_concurrent_counts_are_not_lost():
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
    assert value_of(metrics, m.PROMOTIONS, tier="cpu", result="gone") == 8000
    assert value_of(metrics, f"{m.TIER_SECONDS}_count", tier="cpu") == 8000


def test_lookup_meter_counts_keys_by_tier_and_feature():
    metrics = Metrics()
    meter = LookupMeter(metrics, "clicks", 3)
    every = [source for source in Source for _ in range(source + 1)]
    features = [("first", 4), ("second", len(every) - 4)]
    meter.finished([(TABLE, bytes(every), features), (TABLE, b"", [])], 0.1, ("rocksdb",))
    for source in Source:
        labels = {"model": "clicks", "version": "3", "table": "t", "tier": source.name.lower()}
        assert value_of(metrics, m.LOOKUP_KEYS, **labels) == source + 1
    for feature, found, defaulted in (("first", 3, 1), ("second", len(every) - 4, None)):
        labels = {"model": "clicks", "version": "3", "feature": feature}
        assert value_of(metrics, m.FEATURE_KEYS, **labels, result="found") == found
        assert value_of(metrics, m.FEATURE_KEYS, **labels, result="defaulted") in (defaulted, 0.0)
    assert value_of(metrics, m.LOOKUP_DEGRADED, model="clicks", tier="rocksdb") == 1
    assert value_of(metrics, f"{m.LOOKUP_SECONDS}_count", model="clicks", version="3") == 1


def test_tier_and_dense_meters_count_keys_and_runs():
    metrics = Metrics()
    meter = TierMeter(metrics, "cpu")
    meter([(TABLE, 5, 3), (TABLE, 0, 0)], 0.1)
    meter([(TABLE, 4, 4)], 0.1)
    labels = {"tier": "cpu", "model": "clicks", "version": "1", "table": "t"}
    assert value_of(metrics, m.TIER_KEYS, **labels, result="found") == 7
    assert value_of(metrics, m.TIER_KEYS, **labels, result="missed") == 2
    meter([(TABLE, 6, 1)], 0.1, True)
    meter.passed_over("late")
    assert value_of(metrics, m.TIER_KEYS, **labels, result="found") == 8
    assert value_of(metrics, m.TIER_KEYS, **labels, result="missed") == 2
    assert value_of(metrics, m.TIER_KEYS, **labels, result="skipped") == 5
    assert value_of(metrics, f"{m.TIER_SECONDS}_count", tier="cpu") == 2
    assert value_of(metrics, m.TIER_SKIPPED, tier="cpu", reason="late") == 1
    dense = DenseMeter(metrics, "clicks", 3)
    dense.ran(0.1)
    dense.not_finite("ctr", 3)
    assert value_of(metrics, m.SCORES_NOT_FINITE, model="clicks", version="3", output="ctr") == 3
    assert value_of(
        metrics, f"{m.DENSE_SECONDS}_sum", model="clicks", version="3"
    ) == pytest.approx(0.1)


def test_observations_are_not_lost_during_reads():
    """Observations are appended and sorted later; concurrent appends and reads lose none."""
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
def test_bucket_includes_its_upper_bound(index):
    histogram = Metrics().histogram(m.TIER_SECONDS, "cpu")
    bound = SECONDS_BUCKETS[index]
    for seconds in (bound, bound * 1.0001):
        histogram.observe(seconds)
    counts, _ = histogram.read()
    assert counts[index] == 1
    assert counts[index + 1] == 1


def test_values_of_other_processes_are_added():
    """Values are passed as JSON; of ended processes (`grown`), gauges are left out."""
    ours, other = Metrics(), Metrics()
    for each, n in ((ours, 1), (other, 2)):
        each.counter(m.LOOKUP_KEYS, "clicks", "1", "users", "cpu").add(n)
        each.histogram(m.TIER_SECONDS, "cpu").observe_all([3e-5] * n)
        each.gauge(m.LOOKUP_WAITING, lambda n=n: n)
    other.counter(m.LOOKUP_KEYS, "clicks", "1", "users", "redis").add(5)
    sent = json.loads(json.dumps(other.numbers().as_json()))
    ours.include(lambda: MetricValues.from_json(sent))
    ours.include(lambda: MetricValues.from_json(sent).grown())
    assert (
        value_of(ours, m.LOOKUP_KEYS, model="clicks", version="1", table="users", tier="cpu") == 5
    )
    assert (
        value_of(ours, m.LOOKUP_KEYS, model="clicks", version="1", table="users", tier="redis")
        == 10
    )
    assert value_of(ours, f"{m.TIER_SECONDS}_count", tier="cpu") == 5
    assert value_of(ours, f"{m.TIER_SECONDS}_sum", tier="cpu") == pytest.approx(15e-5)
    assert value_of(ours, m.LOOKUP_WAITING) == 3
    assert ours.counter(m.LOOKUP_KEYS, "clicks", "1", "users", "cpu").value == 1


def test_unknown_metrics_of_other_processes_are_skipped():
    assert MetricValues.from_json({"hps_future_metric": [[[], 1]]}) == {}


def test_batched_counters_add_their_amounts_at_each_add():
    """Also if values are read before, between or after the additions, and after deletion."""
    metrics = Metrics()
    inserted = metrics.counter(m.PROMOTIONS, "cpu", "inserted")
    gone = metrics.counter(m.PROMOTIONS, "cpu", "gone")
    once = metrics.batched_counters([(inserted, 1000)])
    once.add()
    repeated = metrics.batched_counters([(inserted, 2), (gone, 3)])
    for times in range(1, 5):
        repeated.add()
        if times != 3:
            assert value_of(metrics, m.PROMOTIONS, tier="cpu", result="gone") == 3 * times
    repeated.add()
    del repeated, once
    assert value_of(metrics, m.PROMOTIONS, tier="cpu", result="gone") == 15
    assert value_of(metrics, m.PROMOTIONS, tier="cpu", result="inserted") == 1010


def test_concurrent_batched_additions_are_not_lost():
    metrics = Metrics()
    counter = metrics.counter(m.PROMOTIONS, "cpu", "gone")
    shared, stop = metrics.batched_counters([(counter, 2)]), threading.Event()

    def work():
        for _ in range(2000):
            shared.add()
            own = metrics.batched_counters([(counter, 1)])
            for _ in range(3):
                own.add()

    def read():
        while not stop.is_set():
            metrics.numbers()

    reader = threading.Thread(target=read)
    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in (reader, *threads):
        thread.start()
    for thread in threads:
        thread.join()
    stop.set()
    reader.join()
    assert value_of(metrics, m.PROMOTIONS, tier="cpu", result="gone") == 4 * 2000 * 5


def test_score_histogram_counts_arrays():
    metrics = Metrics()
    meter = DenseMeter(metrics, "clicks", 3)
    labels = {"model": "clicks", "version": "3", "output": "ctr"}
    scores = np.array([[0.005], [0.5]], np.float32)
    meter.scored("ctr", scores)
    scores[:] = 9.0  # the caller may reuse the array
    meter.scored("ctr", np.linspace(0.0, 1.0, 100_001))
    assert value_of(metrics, f"{m.SCORES}_count", **labels) == 100_003
    assert value_of(metrics, f"{m.SCORES}_bucket", **labels, le="0.0") == 1
    assert value_of(metrics, f"{m.SCORES}_bucket", **labels, le="0.5") == 50_003
    assert value_of(metrics, f"{m.SCORES}_bucket", **labels, le="1.0") == 100_003
    assert value_of(metrics, f"{m.SCORES}_sum", **labels) == pytest.approx(50_001.005)


def test_scores_are_counted_when_they_are_observed():
    """A request that counts those before it, too, is among the slowest percent."""
    histogram = MetricHistogram(SCORE_BUCKETS)
    for values in (np.float16([0.5, -2.0]), np.float32([[0.5], [20.0]]), np.arange(50_000.0)[::-2]):
        before = histogram._counts.sum()
        histogram.observe_array(values)
        assert histogram._counts.sum() - before == values.size
    counts, total = histogram.read()
    assert sum(counts) == 25_004
    assert total == pytest.approx(19 + sum(range(1, 50_000, 2)))


def test_absolute_score_sums_never_decrease():
    """Unlike the histogram's sum, whose decrease Prometheus takes for a restart."""
    metrics = Metrics()
    meter = DenseMeter(metrics, "clicks", 3)
    labels = {"model": "clicks", "version": "3", "output": "logit"}

    def absolute_sum(sign):
        return value_of(metrics, m.SCORES_ABSOLUTE, **labels, sign=sign)

    meter.scored("logit", np.array([[1.0], [-4.0]], np.float32))
    assert (absolute_sum("positive"), absolute_sum("negative")) == (1.0, 4.0)
    meter.scored("logit", np.full(1000, 0.1, np.float32))
    meter.scored("logit", np.full(1000, -0.2, np.float32))
    assert absolute_sum("positive") == pytest.approx(101)
    assert absolute_sum("negative") == pytest.approx(204)
    assert value_of(metrics, f"{m.SCORES}_sum", **labels) == pytest.approx(-103)


def test_unused_meter_is_freed():
    metrics = Metrics()
    table = EmbeddingTable.make("t", 2, model="clicks", version=1)
    kept, unused = TierMeter(metrics, "gpu"), TierMeter(metrics, "gpu")
    for meter in (kept, unused):
        meter([(table, 2, 1)], 0.1)
    reference = weakref.ref(unused)
    del unused, meter
    gc.collect()
    assert reference() is None
    metrics.release("clicks", 1)
    assert not kept._keys


def test_series_do_not_grow_with_released_versions_and_models():
    metrics = Metrics()
    tier_meter, update_meter = TierMeter(metrics, "cpu"), UpdateMeter(metrics)

    def serve(model, version):
        table = EmbeddingTable.make("t", 2, model=model, version=version)
        metrics.retain(model, version)
        lookups, network = LookupMeter(metrics, model, version), DenseMeter(metrics, model, version)
        lookups.finished([(table, bytes([0, 1]), [("f", 2)])], 0.1, ("redis",))
        network.ran(0.1)
        network.fell_back(1)
        network.scored("ctr", np.array([0.5]))
        tier_meter([(table, 2, 1)], 0.1)
        update_meter.applied(table, "upserted", 1)
        update_meter.visible(table, "redis", np.array([0.0]))
        for name in (model, f"{model}.lookup"):
            metrics.histogram(m.REQUEST_SECONDS, "http", "infer", name, str(version), "200")
            metrics.histogram(m.QUEUE_SECONDS, name)
        metrics.counter(m.MODEL_LOADS, model, "served").add()

    def series():
        return sum(map(len, metrics.numbers().values()))

    before = series()
    serve("clicks", 1)
    with_one_version = series()
    assert with_one_version >= before + 20
    for version in range(2, 20):
        serve("clicks", version)
        metrics.release("clicks", version - 1)
    assert series() == with_one_version
    for day in range(20):
        serve(f"trial-{day}", 1)
        metrics.release(f"trial-{day}", 1)
    assert series() == with_one_version
    metrics.release("clicks", 19)
    assert series() == before
    assert not tier_meter._keys  # whose tables, with their default vectors, would be kept


def test_series_of_a_released_version_are_removed():
    metrics = Metrics()
    for _ in range(2):  # loaded again while requests still use it
        metrics.retain("clicks", 3)
    for version in "34":
        for name in ("clicks", "clicks.lookup", "other"):
            metrics.counter(m.LOOKUP_KEYS, name, version, "t", "cpu").add()
    metrics.release("clicks", 3)
    assert len(metrics.numbers()[m.LOOKUP_KEYS]) == 6
    metrics.release("clicks", 3)
    assert sorted(metrics.numbers()[m.LOOKUP_KEYS]) == [
        ("clicks", "4", "t", "cpu"),
        ("clicks.lookup", "4", "t", "cpu"),
        ("other", "3", "t", "cpu"),
        ("other", "4", "t", "cpu"),
    ]


def test_exposed_metrics_are_derived_from_ours():
    metrics = Metrics()
    spec = MetricSpec("nv_derived", "counter", ("model",), "Derived.")
    metrics.counter(m.PROMOTIONS, "cpu", "gone").add(3)
    metrics.expose(
        [spec],
        lambda values: MetricValues({spec.name: {("a",): 2 * sum(values[m.PROMOTIONS].values())}}),
    )
    text = metrics.render().decode()
    assert '# TYPE nv_derived counter\nnv_derived{model="a"} 6.0\n' in text
