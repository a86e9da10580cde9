"""`hps.v1.Lookup`, called by a plain gRPC client."""

import logging
from dataclasses import replace

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from hps.config.schema import ModelsSettings
from hps.types import Source
from hps.v1 import lookup_pb2 as pb
from services.frontend.request_observer import RequestObserver
from tests.support.waiting import until
from tests.unit.services.conftest import ROW_VERSION, row, serve_models


class Client:
    def __init__(self, channel):
        self.lookup = channel.unary_unary(
            "/hps.v1.Lookup/Lookup",
            pb.LookupRequest.SerializeToString,
            pb.LookupResponse.FromString,
        )
        self.describe = channel.unary_unary(
            "/hps.v1.Lookup/Describe",
            pb.DescribeRequest.SerializeToString,
            pb.DescribeResponse.FromString,
        )
        self.serving = channel.unary_unary(
            "/hps.v1.Lookup/Serving",
            pb.ServingRequest.SerializeToString,
            pb.ServingResponse.FromString,
        )


@pytest.fixture
def channel(serve):
    with grpc.insecure_channel(serve().server.url) as channel:
        yield channel


@pytest.fixture
def client(channel):
    return Client(channel)


def keys(name, *values, batch=0, **more):
    """The keys of one name in a request: their description and their numbers."""
    if "offsets" in more:
        batch = len(more["offsets"]) - 1
    reported = {f"has_{what}": True for what in more}
    return pb.Keys(name=name, count=len(values), batch=batch, **reported), {"keys": values, **more}


def question(model, *given, **more):
    """The request for these keys."""
    dtypes = {"keys": np.int64, "offsets": np.int64, "weights": np.float32}
    numbers = {
        what: b"".join(np.array(n.get(what, ()), dtype).tobytes() for _, n in given)
        for what, dtype in dtypes.items()
    }
    header = pb.Asked(model=model, names=[name for name, _ in given], **more)
    return pb.LookupRequest(asked=header.SerializeToString(), **numbers)


def vectors(answer, *dims, dtype=np.float32, rows=2):
    """The vectors by name; ``rows`` has their number of rows."""
    flat, found, at = np.frombuffer(answer.vectors, dtype), [], 0
    for dim in dims:
        found.append(flat[at : at + rows * dim].reshape(rows, dim).tolist())
        at += rows * dim
    assert at == len(flat)
    return found


def refused(call, *args, **kwargs):
    with pytest.raises(grpc.RpcError) as caught:
        call(*args, **kwargs)
    return caught.value.code().name, caught.value.details()


def test_vectors_have_the_order_of_the_request(client):
    answer = client.lookup(question("words", keys("right", 3, 4), keys("left", 1, 2)))
    assert (answer.version, answer.defaulted) == (1, 0)
    assert vectors(answer, 2, 3) == [[row(3, 2), row(4, 2)], [row(1, 3), row(2, 3)]]
    assert not answer.sources


def test_repeated_description_is_parsed_once(client, small):
    """Until other models are served."""
    for key in (1, 2, 3):
        answer = client.lookup(question("words", keys("right", key, 4), keys("left", 5, key)))
        assert vectors(answer, 2, 3) == [[row(key, 2), row(4, 2)], [row(5, 3), row(key, 3)]]
        defaulted = client.lookup(question("words", keys("left", key, 99)))
        assert (defaulted.version, defaulted.defaulted) == (1, 1)
    other_version(small, 2)
    assert client.lookup(question("words", keys("left", 1, 99))).version == 2


def test_report_has_the_source_and_version_of_every_key(client):
    answer = client.lookup(
        question("words", keys("left", 1, 15, 99), keys("right", 99, 2, 3), report=True)
    )
    cpu, default = Source.CPU, Source.DEFAULT
    sources = [cpu, Source.ROCKSDB, default, default, cpu, cpu]
    assert list(answer.sources) == sources
    versions = [ROW_VERSION, ROW_VERSION, 0, 0, ROW_VERSION, ROW_VERSION]
    assert np.frombuffer(answer.versions, np.uint64).tolist() == versions
    assert answer.defaulted == 2


def test_jagged_and_weighted_keys_are_pooled(client):
    offsets, weights = np.array([0, 2, 2, 3]), np.array([2, 4, 6], np.float32)
    given = keys("left", 1, 2, 3, offsets=offsets, weights=weights)
    even = keys("right", 4, 5, 6)
    bags = keys("left", 1, 2, 3, offsets=np.array([0, 1, 3, 3]))
    a, b, c = (np.array(row(key, 3)) for key in (1, 2, 3))
    weighted = [(2 * a + 4 * b).tolist(), [0.0] * 3, (6 * c).tolist()]
    rights = [row(key, 2) for key in (4, 5, 6)]
    answer = client.lookup(question("words", given, even))
    assert vectors(answer, 3, 2, rows=3) == [weighted, rights]
    answer = client.lookup(question("words", even, bags))
    assert vectors(answer, 2, 3, rows=3) == [rights, [a.tolist(), (b + c).tolist(), [0.0] * 3]]


def test_tables_of_half_precision_return_float16(client):
    answer = client.lookup(question("halves", keys("half", 1, 2), by_table=True))
    assert vectors(answer, 4, dtype=np.float16) == [[row(1, 4), row(2, 4)]]


def test_request_without_keys_returns_no_vectors(client):
    assert client.lookup(question("words", keys("left"))).vectors == b""


def test_describe_lists_what_can_be_looked_up(client):
    reported = client.describe(pb.DescribeRequest(model="ctr"))
    assert (reported.model, reported.version, reported.max_batch_size) == ("ctr", 1, 64)
    assert [(t.name, t.dim, t.datatype, t.key_bits) for t in reported.tables] == [
        ("users", 4, "FP32", 64),
        ("items", 2, "FP32", 64),
    ]
    history = reported.features[2]
    assert (history.name, history.table, history.pooling) == ("history", "items", "mean")
    assert (reported.features[0].hotness, reported.features[0].context) == (1, True)


@pytest.mark.parametrize(
    ("request_", "code", "text"),
    [
        (question("none"), "NOT_FOUND", "unknown model: 'none.lookup'"),
        (question("words", version=9), "NOT_FOUND", "version 9 is not found"),
        (question("words"), "INVALID_ARGUMENT", "names no feature"),
        (
            question("words", keys("lift", 1)),
            "INVALID_ARGUMENT",
            "has no feature 'lift'; did you mean 'left'",
        ),
        (
            question("words", keys("left", 1), keys("left", 2)),
            "INVALID_ARGUMENT",
            '"left" occurs twice',
        ),
        (
            question("words", (pb.Keys(name="left", count=2), {"keys": [1]})),
            "INVALID_ARGUMENT",
            "keys: 8 bytes do not match 'asked', which declares 2 int64 numbers",
        ),
        (
            question("words", (pb.Keys(name="left", count=-1), {})),
            "INVALID_ARGUMENT",
            '"left": count -1 and batch 0 must not be negative',
        ),
        (
            question("words", (pb.Keys(name="left", batch=-1), {})),
            "INVALID_ARGUMENT",
            "must not be negative",
        ),
        (
            question("words", (pb.Keys(name="left", batch=2**63 - 1, has_offsets=True), {})),
            "INVALID_ARGUMENT",
            "offsets: 0 bytes do not match 'asked'",
        ),
        (
            question("words", (pb.Keys(name="left", has_weights=True, count=1), {"keys": [1]})),
            "INVALID_ARGUMENT",
            "weights: 0 bytes do not match 'asked', which declares 1 float32 numbers",
        ),
        (
            question("words", (pb.Keys(name="left", count=2**62), {})),
            "INVALID_ARGUMENT",
            "keys",
        ),
        (
            question("words", keys("left", 1, offsets=np.array([0, 5]))),
            "INVALID_ARGUMENT",
            "offsets run from 0 to 5",
        ),
        (
            pb.LookupRequest(asked=b"\xff"),
            "INVALID_ARGUMENT",
            "the message is not a valid hps.v1.Asked",
        ),
    ],
)
def test_invalid_requests_are_rejected(client, request_, code, text):
    found = refused(client.lookup, request_)
    assert found[0] == code
    assert text in found[1]


def test_too_many_keys_are_rejected(serve):
    with grpc.insecure_channel(serve(max_keys=3).server.url) as channel:
        request = question("words", keys("left", 1, 2, 3, 4))
        code, text = refused(Client(channel).lookup, request)
    assert code == "INVALID_ARGUMENT"
    assert "has 4 keys" in text


def test_api_key_is_required(serve, key_guard):
    request = question("words", keys("left", 1))
    with grpc.insecure_channel(serve(key_guard).server.url) as channel:
        client = Client(channel)
        assert refused(client.lookup, request)[0] == "UNAUTHENTICATED"
        assert refused(client.describe, pb.DescribeRequest(model="words"))[0] == "UNAUTHENTICATED"
        assert client.lookup(request, metadata=[("x-api-key", "r" * 16)]).vectors


def test_lookup_fails_at_its_deadline(client, small):
    small.store.gate.clear()
    request = question("words", keys("left", 15))
    assert refused(client.lookup, request, timeout=0.05)[0] == "DEADLINE_EXCEEDED"
    small.store.gate.set()
    assert client.lookup(request).vectors


def test_keys_by_table_count_as_one_sample(client, small):
    client.lookup(question("words", keys("left", 1, 2, 3), by_table=True))
    for given in (keys("left", batch=2**63 - 1), keys("left", 1, batch=2)):
        request = question("words", given, by_table=True)
        code, text = refused(client.lookup, request)
        assert (code, "omit the batch" in text) == ("INVALID_ARGUMENT", True)
    counted = small.state.entries["words.lookup"].statistics
    assert (counted.success_count, counted.inferences) == (1, 1)


def test_lookups_are_logged(client, small, caplog):
    small.state.observer = RequestObserver(1.0)
    caplog.set_level(logging.INFO, "hps.access")
    caller = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    given = [("x-request-id", "r-1"), ("traceparent", caller)]
    for by_table in (False, True):
        request = question("words", keys("left", 1, 99), by_table=by_table)
        client.lookup(request, metadata=given)
    refused(client.lookup, question("words", keys("lift", 1)))
    until(lambda: len(caplog.records) == 3)
    first, second, third = (record.args for record in caplog.records)
    for each in (first, second):
        assert (each["request_id"], each["trace_id"]) == ("r-1", caller[3:35])
        assert (each["model"], each["keys"], each["misses"]) == ("words.lookup", 2, 1)
    assert third["status"] == "INVALID_ARGUMENT"
    assert "did you mean 'left'" in third["error"]


def test_lookups_are_counted_as_requests(client, small):
    client.lookup(question("words", keys("left", 1, 2)))
    refused(client.lookup, question("words", keys("lift", 1)))
    counted = small.state.entries["words.lookup"].statistics
    until(lambda: counted.fail_count)
    assert (counted.success_count, counted.inferences) == (1, 2)
    text = small.state.metrics.render().decode()
    assert 'method="lookup",model="words.lookup",protocol="grpc"' in text


def test_health_service_reports_the_lookup_service(channel):
    stub = health_pb2_grpc.HealthStub(channel)
    reported = stub.Check(health_pb2.HealthCheckRequest(service="hps.v1.Lookup"))
    assert reported.status == health_pb2.HealthCheckResponse.SERVING


def other_version(small, version):
    served = small.node.models["words"]
    serve_models(small, {**small.node.models, "words": replace(served, version=version)})
    small.state.serve(small.node)


def served_by(client):
    reported = client.serving(pb.ServingRequest())
    return reported.ready, {
        (m.model, m.version, m.former) for m in reported.models if m.model == "words"
    }


def test_nodes_describe_their_models_and_readiness(client, small):
    ready, models = served_by(client)
    assert ready
    assert models == {("words", 1, False)}
    described = client.describe(pb.DescribeRequest(model="words"))
    reported = client.serving(pb.ServingRequest()).models
    assert described.digest in {each.digest for each in reported}
    small.state.stop()
    assert served_by(client) == (False, models)


def test_replaced_version_is_served_for_a_while(client, small):
    """If a request names it by its number."""
    calls = []
    small.state.call_later = lambda seconds, work: calls.append((seconds, work))
    first = question("words", keys("left", 1), version=1)
    other_version(small, 2)
    assert refused(client.lookup, first)[0] == "NOT_FOUND"  # it was not served by its number
    other_version(small, 1)
    assert client.lookup(first).version == 1
    other_version(small, 2)
    assert client.lookup(first).version == 1
    assert client.lookup(question("words", keys("left", 1))).version == 2
    assert served_by(client)[1] == {("words", 2, False), ("words", 1, True)}
    seconds, drop = calls[-1]
    assert seconds == ModelsSettings().linger_s
    drop()
    assert refused(client.lookup, first)[0] == "NOT_FOUND"
    assert served_by(client)[1] == {("words", 2, False)}


def test_unloaded_model_is_not_found(client, small):
    small.state.call_later = lambda _seconds, _work: None
    first = question("words", keys("left", 1), version=1)
    client.lookup(first)
    serve_models(small, {n: m for n, m in small.node.models.items() if n != "words"})
    small.state.serve(small.node)
    assert refused(client.lookup, first)[0] == "NOT_FOUND"
