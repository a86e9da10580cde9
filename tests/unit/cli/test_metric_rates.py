"""Rates and quantiles between two readings of a server's metrics."""

from __future__ import annotations

import math

import pytest

from hps.cli.metric_rates import MetricsInterval, MetricsReading, account
from hps.client.admin import MetricSample

REQUESTS = "hps_request_duration_seconds"


def reading(at: float, *samples: tuple[str, dict[str, str], float]) -> MetricsReading:
    return MetricsReading.of(at, [MetricSample(*sample) for sample in samples])


def histogram(
    code: str, counts: dict[str, float], model: str = "m"
) -> list[tuple[str, dict[str, str], float]]:
    labels = {"model": model, "code": code, "protocol": "http", "method": "infer"}
    rows = [(f"{REQUESTS}_bucket", labels | {"le": bound}, n) for bound, n in counts.items()]
    return [*rows, (f"{REQUESTS}_count", labels, max(counts.values()))]


def test_rates_are_per_interval_and_code() -> None:
    before = reading(10.0, *histogram("200", {"+Inf": 100}))
    after = reading(12.0, *histogram("200", {"+Inf": 140}), *histogram("503", {"+Inf": 6}))
    summary = account(before, after)
    assert (summary["requests_per_s"], summary["errors_per_s"]) == (23.0, 3.0)
    assert summary["models"] == [
        {
            "model": "m",
            "requests_per_s": 23.0,
            "errors_per_s": 3.0,
            "p50_s": math.inf,
            "p99_s": math.inf,
        }
    ]


def test_counters_of_a_restarted_server_start_at_zero() -> None:
    before = reading(0.0, *histogram("200", {"+Inf": 1000}))
    after = reading(1.0, *histogram("200", {"+Inf": 7}))
    assert account(before, after)["requests_per_s"] == 7.0


def test_quantiles_cover_only_the_interval() -> None:
    """All slow requests were before the interval."""
    before = reading(0.0, *histogram("200", {"0.001": 0, "0.01": 0, "+Inf": 900}))
    after = reading(1.0, *histogram("200", {"0.001": 50, "0.01": 100, "+Inf": 1000}))
    it = MetricsInterval(before, after)
    assert it.quantile(REQUESTS, 0.25) == pytest.approx(0.0005)
    assert it.quantile(REQUESTS, 0.75) == pytest.approx(0.0055)
    assert it.quantile(REQUESTS, 0.75, model="other") is None
    assert MetricsInterval(after, after).quantile(REQUESTS, 0.5) is None


def test_account_has_tiers_freshness_and_lag() -> None:
    keys = "hps_tier_keys_total"
    cpu = {"tier": "cpu", "model": "m", "table": "t"}
    age = [
        ("hps_update_age_seconds", {"model": "m", "table": t}, v) for t, v in (("a", 1), ("b", 4))
    ]
    lag = [("hps_update_lag_messages", {"topic": "t", "partition": p}, 5) for p in "01"]
    after = reading(
        2.0,
        (keys, cpu | {"result": "found"}, 90),
        (keys, cpu | {"result": "missed"}, 10),
        ("hps_lookup_keys_total", {"tier": "cpu", "table": "t"}, 90),
        ("hps_lookup_keys_total", {"tier": "default", "table": "t"}, 10),
        *age,
        *lag,
    )
    summary = account(reading(0.0), after)
    assert (
        summary["tiers"][0] | {"tier": "cpu", "keys_per_s": 50.0, "hit_rate": 0.9}
        == summary["tiers"][0]
    )
    assert (summary["age_s"], summary["lag_messages"], summary["defaulted"]) == (4, 10, 0.1)
    idle = account(reading(0.0), reading(1.0))
    assert (idle["age_s"], idle["lag_messages"], idle["defaulted"], idle["tiers"]) == (
        None,
        None,
        None,
        [],
    )


def test_account_has_a_row_per_lookup_node() -> None:
    def node_metrics(
        answered: float, failed: float, retries: float
    ) -> list[tuple[str, dict[str, str], float]]:
        requests = "hps_lookup_node_requests_total"
        at = {"address": "a:1"}
        return [
            ("hps_lookup_node_up", at, 1.0),
            ("hps_lookup_node_up", {"address": "b:1"}, 0.0),
            ("hps_lookup_node_running", at, 3.0),
            (requests, at | {"code": "OK"}, answered),
            (requests, at | {"code": "UNAVAILABLE"}, failed),
            ("hps_lookup_node_retries_total", at, retries),
        ]

    rows = account(reading(0.0, *node_metrics(0, 0, 0)), reading(2.0, *node_metrics(20, 4, 2)))[
        "lookup_nodes"
    ]
    assert rows == [
        {
            "address": "a:1",
            "up": True,
            "requests_per_s": 12.0,
            "errors_per_s": 2.0,
            "running": 3.0,
            "retries_per_s": 1.0,
        },
        {**rows[1], "address": "b:1", "up": False, "requests_per_s": 0},
    ]
