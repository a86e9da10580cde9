"""Staleness limit: answers flagged, requests rejected, counts, recovery."""

from __future__ import annotations

import pytest

from hps.errors import Unavailable
from hps.observability import metric_names as m
from hps.observability.metrics import Metrics
from hps.types import EmbeddingTable, LookupResult
from hps.updates.freshness import FRESH, Freshness

USERS = EmbeddingTable.make("users", 2, model="ctr")
ITEMS = EmbeddingTable.make("items", 2, model="ctr")


def counted(metrics: Metrics, result: str) -> float:
    return metrics.counter(m.STALE_ANSWERS, "ctr", result).value


def test_answers_are_flagged_while_a_table_is_older_than_the_limit():
    metrics = Metrics()
    freshness = Freshness("ctr", 10.0, "flag", metrics)
    assert freshness.mark(LookupResult({})).stale_s == 0
    freshness.judge({USERS: 3.0, ITEMS: 10.0})
    assert freshness.mark(LookupResult({})).stale_s == 0
    freshness.judge({USERS: 3.0, ITEMS: 42.5})
    freshness.require()
    assert freshness.mark(LookupResult({})).stale_s == 42
    assert freshness.flag() == 42
    assert (counted(metrics, "flagged"), counted(metrics, "refused")) == (2, 0)
    freshness.judge({USERS: 3.0, ITEMS: 0.0})
    assert freshness.mark(LookupResult({})).stale_s == 0
    assert counted(metrics, "flagged") == 2


def test_stale_model_rejects_requests_with_the_reason():
    metrics = Metrics()
    freshness = Freshness("ctr", 0.5, "refuse", metrics)
    freshness.judge({USERS: 0.7, ITEMS: 0.6})
    assert freshness.stale_s == 1, "never 0 while it is stale"
    with pytest.raises(
        Unavailable, match=r"'users' have been waiting for 1 s.*max_staleness_s.*0\.5 s"
    ):
        freshness.require()
    assert counted(metrics, "refused") == 1
    freshness.judge({USERS: 0.1, ITEMS: 0.0})
    freshness.require()
    assert freshness.refusal is None


def test_no_answer_is_stale_without_a_limit():
    FRESH.judge({USERS: 1e9})
    FRESH.require()
    assert FRESH.mark(LookupResult({})).stale_s == 0
