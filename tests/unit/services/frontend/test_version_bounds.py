"""Automatic rollback: what is counted of a version, when bounds are left, and which versions are watched."""

import re
from types import SimpleNamespace

import numpy as np
import pytest

from hps.config.traffic_settings import RollbackBounds, TrafficRule
from hps.node.served_versions import VersionNames
from hps.node.version_choice import RecentSwitch
from services.frontend.rollback_guard import RollbackGuard
from services.frontend.version_bounds import stability_index, violation
from services.frontend.version_watch import (
    VersionCounts,
    VersionWatch,
    latency_classes,
    latency_s,
    score_classes,
)

BOUNDS = RollbackBounds()


def counts(requests, *, failures=0, slower=1.0, shift=0.0, seed=0):
    rng, watch = np.random.default_rng(seed), VersionWatch("score")
    for number in range(requests):
        if number < failures:
            watch.failed()
            continue
        logits = rng.normal(shift - 2, 1, (32, 1))
        scores = (1 / (1 + np.exp(-logits))).astype(np.float32)
        watch.answered(slower * rng.gamma(4, 1e-3), SimpleNamespace(outputs={"score": scores}))
    return watch.take()


BASE = counts(3000, seed=99)


@pytest.mark.parametrize(
    ("new", "reason", "sentence"),
    [
        ({"requests": 500}, None, ""),
        ({"requests": 500, "failures": 60}, "errors", "12 % of 500 requests failed, against 0 %"),
        ({"requests": 500, "failures": 8}, None, ""),  # 1.6 % of 500 may be chance
        ({"requests": 500, "slower": 4.0}, "latency", r"the p99 latency of 500 requests is \d+"),
        ({"requests": 500, "slower": 1.5}, None, ""),
        ({"requests": 500, "shift": 1.0}, "scores", "a population stability index of [01]"),
        ({"requests": 500, "shift": 0.2}, None, ""),
        ({"requests": 199, "failures": 199}, None, ""),  # fewer than min_requests
    ],
)
def test_bounds_are_left_beyond_chance(new, reason, sentence):
    found = violation(counts(**new), BASE, BOUNDS)
    assert (found and found[0]) == reason
    assert re.search(sentence, found[1] if found else "")


def test_equal_versions_are_hardly_ever_rolled_back():
    wrong = sum(violation(counts(200, seed=seed), BASE, BOUNDS) is not None for seed in range(100))
    assert wrong <= 1


def test_without_a_compared_version_only_failures_are_judged():
    assert violation(counts(500, slower=9, shift=3), None, BOUNDS) is None
    assert violation(counts(500, failures=60), None, BOUNDS)[0] == "errors"
    assert violation(counts(500, slower=9), counts(99), BOUNDS) is None


def test_bounds_may_be_off():
    off = RollbackBounds(max_error_rate=None, max_p99_ratio=None, max_psi=None)
    assert violation(counts(500, failures=400, slower=9, shift=3), BASE, off) is None


def test_classes_keep_the_order_and_are_narrow():
    values = np.array([-np.inf, -3.5, -1e-3, -0.0, 0.0, 1e-3, 0.5, 0.51, 7.0, np.inf], np.float32)
    classes = score_classes(values)
    assert classes.tolist() == sorted(classes)
    assert len({*classes.tolist()}) == len(values)
    seconds = np.array([1e-6, 1e-4, 1e-3, 0.1, 1e9])
    for second, each in zip(seconds[1:4], latency_classes(seconds)[1:4], strict=True):
        assert second <= latency_s(int(each)) <= 1.06 * second


def test_counts_of_processes_add_up():
    total = VersionCounts()
    for seed in (1, 2):
        total.add(VersionCounts.from_json(counts(50, failures=5, seed=seed).as_json()))
    assert (total.requests, total.failures, total.latencies.total()) == (100, 10, 90)
    assert stability_index(total.scores, total.scores) == 0


class Node:
    """What the guard sees of a server; `watch` gives counts of one second."""

    def __init__(self, rule, current=1, switch_before_start=None):
        self.now, self.rolled, self._counts = 0.0, [], {}
        self.all_entries = [
            SimpleNamespace(name="m", served=SimpleNamespace(version=v)) for v in (1, 2)
        ]
        self.set(rule, current)
        self.guard = RollbackGuard(
            self, self._roll_back, lambda _name: switch_before_start, lambda: self.now
        )

    def set(self, rule, current=1, rolled_back=None):
        self.names = {"m": VersionNames(current, {}, rule, rolled_back or {})}

    def take_watched(self):
        taken, self._counts = self._counts, {}
        return taken

    def ask_workers(self, query):
        assert query == "watched"
        return []

    def second(self, **by_version):
        self.now += 1
        self._counts = {f"m/{name[1:]}": each.as_json() for name, each in by_version.items()}
        self.guard.round()

    def _roll_back(self, name, version, reason, _detail):
        self.rolled.append((name, version, reason))
        current = self.names["m"].current
        self.set(
            self.names["m"].traffic, 3 - version if version == current else current, {version: "x"}
        )
        return self.names["m"].current


def rule(**parts):
    return TrafficRule.model_validate({"rollback": {"watch_s": 60}} | parts)


def test_a_share_is_compared_with_the_current_version():
    node = Node(rule(weights={"2": 50}))
    node.second()
    node.second(v1=counts(300), v2=counts(300))
    assert node.rolled == []
    node.second(v1=counts(300), v2=counts(300, failures=60))
    assert node.rolled == [("m", 2, "errors")]


def test_a_switch_is_compared_with_the_time_before():
    node = Node(rule())
    for seed in range(3):
        node.second(v1=counts(300, seed=seed))
    node.set(rule(), current=2)
    node.second(v2=counts(300, shift=2))
    assert node.rolled == [("m", 2, "scores")]
    for seed in range(5):  # the former version is no new one
        node.second(v1=counts(300, seed=seed))
    assert len(node.rolled) == 1
    node.set(rule(), current=2)  # the operator insists
    node.second(v2=counts(300, shift=2))
    assert len(node.rolled) == 2


def test_going_back_by_hand_is_not_watched():
    node = Node(rule())
    node.second(v1=counts(300))
    node.set(rule(), current=2)
    node.second(v2=counts(100, shift=2))
    node.set(rule(), current=1)
    for _ in range(3):
        node.second(v1=counts(300))
    assert node.rolled == []


@pytest.mark.parametrize(("ago_s", "is_watched"), [(20, True), (70, False)])
def test_a_switch_before_a_restart_is_watched(ago_s, is_watched):
    node = Node(rule(), current=2, switch_before_start=RecentSwitch(1, ago_s))
    node.second(v2=counts(300, shift=2))  # there is nothing to compare scores with
    assert node.rolled == []
    node.second(v2=counts(300, failures=60))
    assert node.rolled == ([("m", 2, "errors")] if is_watched else [])


def test_going_back_by_hand_after_a_restart_is_not_watched():
    node = Node(rule(), current=2, switch_before_start=RecentSwitch(1, 20))
    node.second(v2=counts(300))
    node.set(rule(), current=1)
    node.second(v1=counts(300, failures=60))
    assert node.rolled == []


def test_versions_are_watched_for_a_time():
    node = Node(rule(weights={"2": 50}))
    node.second()
    node.now += 61
    node.second(v1=counts(300), v2=counts(300, failures=300))
    assert node.rolled == []
    node.set(rule(weights={"2": 60}))  # a changed share begins anew
    node.second()
    node.second(v1=counts(300), v2=counts(300, failures=300))
    assert node.rolled == [("m", 2, "errors")]


def test_nothing_is_watched_without_bounds():
    node = Node(TrafficRule(weights={"2": 50}))
    assert node.guard.round() is False
