"""Tests of an instance of Triton's python backend."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hps.config.server_settings import ServerSettings
from hps.errors import (
    BadRequest,
    ConfigError,
    DeadlineExceeded,
    HpsError,
    NotFound,
    TierError,
    Unsupported,
)
from services.frontend.errors import RequestTooLarge
from services.triton.backend import BackendModel, BackendRequest, LookupBackend, triton_error_code

LIMITS = ServerSettings(request_timeout_ms=10_000, max_keys=100)


@pytest.mark.parametrize(
    ("parameters", "error"),
    [
        ({}, "m.lookup has no parameter config"),
        ({"config": "c", "modle": "m"}, r"unknown parameter modle.*did you mean 'model'"),
        ({"config": "c", "refresh_interval": "10"}, "refresh_interval of m.lookup: updates"),
        ({"config": "c", "refresh_delay": "0.5"}, "refresh_delay of m.lookup: updates"),
        ({"config": "c", "freeze_sparse": "true"}, "freeze_sparse of m.lookup: the node"),
        ({"config": "/none", "freeze_sparse": "False", "refresh_delay": "0"}, "/none"),
        ({"config": "/none", "FORCE_CPU_ONLY_INPUT_TENSORS": "no"}, "/none"),
    ],
)
def test_unsupported_parameters_are_rejected(parameters, error):
    with pytest.raises(ConfigError, match=error):
        LookupBackend("m.lookup", parameters)


def test_version_with_other_shapes_is_not_followed(small):
    served = small.node.models["words"]
    backend = LookupBackend.__new__(LookupBackend)
    backend._name, backend._model = "words.lookup", "words"
    backend._wanted, backend._served = "current", served
    backend._check(served)
    other = small.node.models["ctr"]
    changed = replace(other, name="words", version=2)
    with pytest.raises(Unsupported, match="version 2 has other features or vectors"):
        backend._check(changed)
    backend._wanted = "1"  # does not follow
    backend._check(changed)


@pytest.fixture
def backend(small):
    """The model of an instance without Triton: ``words`` of the small node."""
    return BackendModel(small.node.models["words"], "words.lookup", LIMITS, device=1)


def by_table(*keys):
    """HPS's form, all keys of the first table."""
    counts = np.array([[len(keys), 0]], np.int32)
    return BackendRequest({"KEYS": np.array([keys], np.int64), "NUMKEYS": counts})


@pytest.fixture
def lookups(backend, monkeypatch):
    """The number of keys of each lookup."""
    counts, real = [], type(backend._served.engine).lookup

    def lookup(self, request):
        counts.append(sum(len(keys.keys) for keys in request.features.values()))
        return real(self, request)

    monkeypatch.setattr(type(backend._served.engine), "lookup", lookup)
    return counts


def test_requests_of_one_call_share_a_lookup(backend, lookups):
    requests = [
        by_table(),
        by_table(1, 2),
        BackendRequest({"left": np.array([[3], [4]])}, ("left",)),
        BackendRequest({"left": np.array([[99]])}, ("left",)),
        BackendRequest({"wrong": np.array([[1]])}),
    ]
    empty, two, pair, unknown, wrong = backend.answer(requests)
    assert empty.outputs[0][1].shape == (1, 0)
    assert two.outputs[0][1].tolist() == [[k + i / 8 for k in (1, 2) for i in range(3)]]
    assert pair.outputs[0][1].tolist() == [[k + i / 8 for i in range(3)] for k in (3, 4)]
    assert [each.parameters["hps_defaulted"] for each in (two, pair, unknown)] == [0, 0, 1]
    assert isinstance(wrong, BadRequest)
    assert lookups == [2, 3]  # one of each form


@pytest.mark.parametrize("form", ["by table", "by feature"])
def test_oversized_lookup_is_split(backend, form, monkeypatch):
    engine = backend._served.engine
    bounds = {"max_table_keys": {"left": 4}} if form == "by table" else {"max_batch_size": 4}
    monkeypatch.setattr(engine, "model", replace(engine.model, **bounds))

    def request(*keys):
        if form == "by table":
            return by_table(*keys)
        return BackendRequest({"left": np.array(keys)[:, None]}, ("left",))

    *fit, too_large = backend.answer(
        [*[request(k, k + 1, k + 2) for k in range(5)], request(*[0] * 5)]
    )
    assert [each.outputs[0][1].reshape(-1)[0] for each in fit] == [0, 1, 2, 3, 4]
    assert isinstance(too_large, BadRequest)


def test_expired_request_is_left_out_of_the_lookup(backend, lookups):
    late = replace(by_table(1), timeout_us=1)
    alone = replace(BackendRequest({"left": np.array([[9]])}, ("left",)), timeout_us=1)
    patient = replace(by_table(2, 3), timeout_us=60_000_000)
    *too_late, found, usual = backend.answer([late, alone, patient, by_table(4)])
    for answer in too_late:
        assert isinstance(answer, DeadlineExceeded)
    assert [each.outputs[0][1][0, 0] for each in (found, usual)] == [2, 4]
    assert lookups == [3]


def test_request_that_expires_during_a_shared_lookup_is_answered(backend, monkeypatch):
    """The lookup that they share may last as long as the last one's time."""
    now, limits = 1000.0, []
    monkeypatch.setattr("services.triton.backend.time.monotonic", lambda: now)
    real = type(backend._served.engine).lookup

    def lookup(self, request):
        nonlocal now
        limits.append(request.deadline)
        now += 2
        return real(self, replace(request, deadline=None))

    monkeypatch.setattr(type(backend._served.engine), "lookup", lookup)
    short, by_feature = by_table(1), BackendRequest({"left": np.array([[9]])}, ("left",))
    requests = [replace(each, timeout_us=1_000_000) for each in (short, by_feature)]
    answer, late, other = backend.answer([*requests, by_table(2)])
    assert limits == [1010.0]
    assert [each.outputs[0][1][0, 0] for each in (answer, other)] == [1, 2]
    assert isinstance(late, DeadlineExceeded)


def test_float32_outputs_are_converted(small):
    for float32, dtype in (((), np.float16), (("half",), np.float32)):
        backend = BackendModel(
            small.node.models["halves"], "halves.lookup", LIMITS, float32=float32
        )
        (answer,) = backend.answer([BackendRequest({"half": np.array([[1]])}, ("half",))])
        assert answer.outputs[0][1].dtype == dtype


def test_hps_response_parameters(backend, monkeypatch):
    """To requests in its own form; of samples where it is known how many keys they have at most."""
    by_feature = BackendRequest({"left": np.array([[3], [4]])}, ("left",))
    answers = backend.answer([by_table(*range(7)), by_feature])
    assert [each.parameters.get("DeviceID") for each in answers] == [1, None]
    assert not any("NumSample" in each.parameters for each in answers)
    engine = backend._served.engine
    bound = {
        name: replace(each, max_hotness=most)
        for (name, each), most in zip(engine.features.items(), (2, 1), strict=True)
    }
    monkeypatch.setattr(engine, "features", bound)
    answers = backend.answer([by_table(*range(7)), by_feature])
    assert [each.parameters.get("NumSample") for each in answers] == [2, None]


def test_lookup_failure_fails_its_requests(backend, monkeypatch):
    def fail(request):
        raise RuntimeError("broken")

    monkeypatch.setattr(type(backend._served.engine), "lookup", lambda self, request: fail(request))
    (answer,) = backend.answer([by_table(1)])
    assert isinstance(answer, HpsError)
    assert "internal error" in str(answer)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RequestTooLarge("m"), "INVALID_ARG"),
        (NotFound("m"), "NOT_FOUND"),
        (Unsupported("m"), "UNSUPPORTED"),
        (TierError("redis", "m"), "UNAVAILABLE"),
        (DeadlineExceeded("m"), "UNAVAILABLE"),
        (HpsError("m"), "INTERNAL"),
    ],
)
def test_errors_map_to_triton_codes(error, expected):
    assert triton_error_code(error) == expected


def test_configuration_without_a_socket_is_rejected(tmp_path):
    path = tmp_path / "hps.yaml"
    path.write_text("{}")
    with pytest.raises(ConfigError, match=r"server.runtime is not set"):
        LookupBackend("m.lookup", {"config": str(path)})
