"""Warm-up of a version by sampled requests of its model."""

import logging
import threading
import time
import weakref
from contextlib import ExitStack

import numpy as np
import pytest

import hps
from hps.config.model_schema import ModelSpec
from hps.lookup.request_sample import MOST_BYTES, MOST_REQUESTS, RequestSample, RequestSamples
from hps.models.version_writer import write_version
from hps.observability import metric_names as m
from hps.types import JaggedKeys, LookupRequest, PredictRequest
from tests.support.small_models import RANKING, network, write_models
from tests.support.waiting import PATIENT_GUARD, until

MODEL = "clicks"


@pytest.fixture
def settings(tmp_path):
    write_models(tmp_path / "models")
    tables = {
        "users": (np.arange(100), np.ones((100, 4), np.float32)),
        "items": (np.arange(-50, 50), np.ones((100, 2), np.float32)),
    }
    spec = ModelSpec.model_validate(RANKING)
    write_version(tmp_path / "models", spec, 2, tables, dense=network())
    return {
        "models": {
            "repository": str(tmp_path / "models"),
            "serve": {MODEL: {"version": 1}},
        },
        "tiers": {
            "rocksdb": {"path": str(tmp_path / "db"), "guard": PATIENT_GUARD},
            "cpu_cache": {"warm": False},
            "mapped": {"memory_bytes": 0},
        },
    }


def predict(node, user, version=None):
    features = {"user": [[user]], "item": [[user]], "history": [[user, 1]]}
    return node.predict(MODEL, features, {"dense": np.ones((1, 3), np.float32)}, version=version)


def sample_of(node):
    return node.models[MODEL].sample


def warm_ups(node):
    found = node.metrics.values(m.MODEL_WARM_UPS)
    return {result: n for (_, result), n in found.items() if n}


def test_sampled_requests_bring_rows_into_the_cache_before_the_switch(settings, caplog):
    caplog.set_level(logging.INFO)
    with hps.open(settings) as node:
        for user in range(1, 40):
            until(lambda: sample_of(node).armed)
            predict(node, user)
        assert len(sample_of(node).requests()) >= 39
        node.load(MODEL, 2)
        assert node.models[MODEL].version == 2
        asked = _keys_of(node, "rocksdb")
        assert _keys_of(node, "cpu") > asked > 0, "the second replay found the rows in the cache"
        for user in range(1, 40):
            predict(node, user)
        assert _keys_of(node, "rocksdb") == asked, "no live request asked the store"
        assert warm_ups(node) == {"settled": 1}
    (line,) = [text for text in caplog.messages if "warmed up" in text]
    assert "clicks: version 2 warmed up (settled) with" in line


def test_a_version_in_memory_is_ready_after_a_part_of_the_requests(settings, caplog):
    caplog.set_level(logging.INFO)
    del settings["tiers"]["mapped"]  # small files are read into memory by the load
    with hps.open(settings) as node:
        for user in range(1, 200):
            sample_of(node).armed = True
            predict(node, 1 + user % 40)
        node.load(MODEL, 2)
    (line,) = [text for text in caplog.messages if "warmed up" in text]
    replayed = int(line.partition("(settled) with ")[2].split()[0])
    assert 32 <= replayed < 199, line


@pytest.mark.parametrize("requested", [False, True])
def test_a_load_leaves_the_interpreter_to_requests(settings, monkeypatch, requested):
    """It works a fifth of the time at most, if there are requests."""
    loading, pauses, sleep = threading.current_thread(), [], time.sleep

    def slept(seconds):
        if threading.current_thread() is loading:
            pauses.append(seconds)
        sleep(seconds)

    settings["models"]["warm_up_s"] = 0.1
    with hps.open(settings) as node:
        if requested:
            sample_of(node).armed = True
            predict(node, 1)
        monkeypatch.setattr("hps.threads.time.sleep", slept)
        monkeypatch.setattr("hps.node.warm_up.WarmUp.run", lambda _self, _served: None)
        began = time.thread_time()
        node.load(MODEL, 2)
        worked = time.thread_time() - began
        assert node.models[MODEL].version == 2
    assert sum(pauses) > worked if requested else not pauses


def _keys_of(node, tier):
    keys = node.metrics.values(m.LOOKUP_KEYS)
    return sum(n for (_, v, _, found), n in keys.items() if (v, found) == ("2", tier))


def test_a_switch_to_a_version_served_beside_warms_it_and_a_rollback_does_not(settings):
    with hps.open(settings) as node:
        until(lambda: sample_of(node).armed)
        predict(node, 5)
        node.load(MODEL, 2, switch=False)
        assert warm_ups(node) == {}
        node.control.switch(MODEL, 2)
        assert warm_ups(node) == {"settled": 1}
        node.control.rollback(MODEL)
        assert warm_ups(node) == {"settled": 1}


def test_time_is_bounded_and_zero_switches_it_off(settings):
    settings["models"]["warm_up_s"] = 1e-9
    with hps.open(settings) as node:
        until(lambda: sample_of(node).armed)
        predict(node, 5)
        node.load(MODEL, 2)
        assert set(warm_ups(node)) <= {"timed_out", "failed"}
    settings["models"]["warm_up_s"] = 0
    with hps.open(settings) as node:
        time.sleep(0.15)
        assert not sample_of(node).armed
        predict(node, 5)
        node.load(MODEL, 1)
        assert warm_ups(node) == {}


def test_requests_that_the_new_version_rejects_do_not_fail_the_load(settings):
    with hps.open(settings) as node:
        sample = sample_of(node)
        sample.armed = True
        sample.add(LookupRequest({"no such feature": JaggedKeys.dense(np.array([1]))}))
        node.load(MODEL, 2)
        assert node.models[MODEL].version == 2
        assert warm_ups(node) == {"failed": 1}


def test_a_sample_is_bounded_and_shares_no_memory():
    sample, keys = RequestSample(), np.arange(8)
    for number in range(MOST_REQUESTS + 10):
        sample.armed = True
        keys[:] = number
        sample.add(LookupRequest({"f": JaggedKeys.dense(keys)}, deadline=1.0))
    kept = sample.requests()
    assert [each.features["f"].keys[0] for each in kept] == list(range(10, MOST_REQUESTS + 10))
    assert kept[0].deadline is None
    sample.add(LookupRequest({"f": JaggedKeys.dense(keys)}))
    assert len(sample.requests()) == MOST_REQUESTS, "a disarmed sample keeps nothing"
    large = np.zeros(MOST_BYTES // 8 // 4 - 100, np.float32)
    for _ in range(20):
        sample.armed = True
        sample.add(PredictRequest({"f": JaggedKeys.dense(keys)}, {"x": large}))
    assert len(sample.requests()) < 10
    sample.armed = True
    sample.add(PredictRequest({}, {"x": np.zeros(MOST_BYTES, np.float32)}))
    assert "x" not in sample.requests()[-1].dense or sample.requests()[-1].dense["x"].size < 1e6


def test_a_sample_lives_as_long_as_a_version_refers_to_it():
    with ExitStack() as resources:
        samples = RequestSamples(resources, 0.01)
        held = [samples.of("m")]
        assert samples.of("m") is held[0]
        until(lambda: held[0].armed)
        alive = weakref.ref(held.pop())
        until(lambda: alive() is None)
