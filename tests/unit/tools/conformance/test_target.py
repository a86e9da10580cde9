"""Tests of checks, their verdicts and requests."""

from __future__ import annotations

import http.client
import itertools

import numpy as np
import pytest

from hps.tools.conformance import CheckedServer, Deviation, NotOffered, SampleRequest
from hps.tools.conformance import target as target_module
from hps.tools.conformance.checks import CHECKS
from hps.tools.conformance.http_wire import HttpResponse, request, tensors_of
from hps.tools.conformance.target import CheckSuite, note, require, same, steady

TARGET = CheckedServer("none:1", "none:2", ())


def check(body):
    suite = CheckSuite("http")
    suite.check(body)
    return suite.checks[0]


def test_check_continues_after_note_and_ends_at_require():
    def all_kinds(target):
        """What the server
        must do."""
        note(True, "good")
        note(False, "first")
        note(False, "second")
        require(False, "third")
        raise AssertionError

    made = check(all_kinds)
    assert (made.name, made.text) == ("http: all kinds", "What the server must do.")
    with pytest.raises(Deviation) as caught:
        made.run(TARGET)
    assert caught.value.found == ("first", "second", "third")


def test_steady_gives_up_on_changing_counts(monkeypatch):
    monkeypatch.setattr(target_module, "_SETTLES_S", 0.2)
    counts = itertools.count()
    assert steady(lambda: next(counts)) > 0
    assert steady(lambda: 3) == 3


def test_not_offered_is_not_a_deviation():
    def not_offered(target):
        raise NotOffered("trace")

    with pytest.raises(NotOffered):
        check(not_offered).run(TARGET)
    check(lambda target: None).run(TARGET)


def answer(status, body, kind="application/json"):
    headers = http.client.HTTPMessage()
    headers["Content-Type"] = kind
    return HttpResponse(status, headers, body)


@pytest.mark.parametrize(
    ("given", "texts"),
    [
        (answer(400, b'{"error": "no"}'), ()),
        (answer(500, b'{"error": "no"}'), ("500 instead of 400",)),
        (answer(200, b"{}"), ("200 instead of 400",)),
        (answer(400, b'{"detail": "no"}'), ('no {"error"}',)),
        (answer(400, b"no", "text/plain"), ("type 'text/plain'", 'no {"error"}')),
    ],
)
def test_errors(given, texts):
    made = check(lambda target: given.refused(400))
    if not texts:
        made.run(TARGET)
        return
    with pytest.raises(Deviation) as caught:
        made.run(TARGET)
    assert len(caught.value.found) == len(texts)
    assert all(part in text for part, text in zip(texts, caught.value.found, strict=True))


def test_arrays_are_compared_to_the_bit():
    one = {"f": np.array([1, np.nan], np.float32)}
    same(one, {"f": one["f"].copy()}, "copy")
    text = {"s": np.array([b"a", b""], np.object_)}
    same(text, {"s": np.array([b"a", b""], np.object_)}, "text")
    for other in (one["f"].astype(np.float64), one["f"][:, None], np.nextafter(one["f"], 2)):
        with pytest.raises(Deviation, match="'f'"):
            same({"f": other}, one, "other")
    with pytest.raises(Deviation, match="outputs"):
        same({}, one, "none")


@pytest.mark.parametrize(
    ("output", "data", "error"),
    [
        ({"shape": [2], "parameters": {"binary_data_size": 8}}, bytes(7), "7 of 8 bytes"),
        ({"shape": [2], "parameters": {"binary_data_size": 8}}, bytes(9), "1 bytes behind"),
        ({"shape": [3], "parameters": {"binary_data_size": 8}}, bytes(8), "2 elements for"),
        ({"shape": [1], "data": [1], "parameters": {"binary_data_size": 4}}, bytes(4), "twice"),
    ],
)
def test_inconsistent_answers_are_deviations(output, data, error):
    with pytest.raises(Deviation, match=error):
        tensors_of({"outputs": [{"name": "f", "datatype": "FP32", **output}]}, data)


def test_requests():
    sample = SampleRequest("m", {"a": np.array([[1, 2]]), "h": np.ones((1, 2), np.float16)}, ("o",))
    body, length = request(sample, binary=False)
    assert body[length:] == sample.inputs["h"].tobytes()
    assert b'"data": [1, 2]' in body[:length]
    assert request(SampleRequest("m", {"a": np.array([[1]])}, ("o",)), binary=False)[1] is None


def test_every_check_has_a_text():
    assert len({each.name for each in CHECKS}) == len(CHECKS) > 40
    assert all(each.text for each in CHECKS)
