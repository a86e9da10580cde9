"""The gRPC data port, called by Triton's client."""

from __future__ import annotations

import queue
import threading
import time
import weakref
from contextlib import closing
from types import SimpleNamespace

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc
from tritonclient.utils import InferenceServerException

from hps.config import auth
from hps.config.auth import load_api_keys
from hps.config.server_settings import AuthSettings, GrpcSettings, TlsSettings
from hps.errors import ConfigError
from hps.observability import metric_names as m
from services.frontend import log_settings
from services.frontend.auth import Authorizer, guard
from services.frontend.grpc import health as health_module
from services.frontend.grpc import stream_limit as streams_module
from services.frontend.grpc.server import GrpcServer
from services.frontend.grpc.service import SERVICE
from services.frontend.state import FrontendState
from tests.support.certificates import made
from tests.support.http2_client import Http2Client
from tests.support.waiting import until


def keys(name, *values, shape=None):
    array = np.array(values, np.int64).reshape(shape or (len(values), 1))
    sent = triton.InferInput(name, list(array.shape), "INT64")
    return sent.set_data_from_numpy(array)


def row(key, dim):
    return [key + i / 8 for i in range(dim)]


def refused(call, *args, **kwargs):
    with pytest.raises(InferenceServerException) as caught:
        call(*args, **kwargs)
    return caught.value.status(), caught.value.message()


def test_lookup_returns_vectors(client):
    result = client.infer(
        "words.lookup", [keys("left", 1, 2), keys("right", 3, 4)], request_id="a7"
    )
    assert result.as_numpy("left").tolist() == [row(1, 3), row(2, 3)]
    assert result.as_numpy("right").tolist() == [row(3, 2), row(4, 2)]
    response = result.get_response()
    assert (response.model_name, response.model_version, response.id) == ("words.lookup", "1", "a7")
    assert response.parameters["hps_defaulted"].int64_param == 0
    assert response.parameters["hps_degraded"].string_param == ""


def test_log_settings_are_read_and_changed(client, monkeypatch):
    set_to = []
    monkeypatch.setattr(log_settings, "set_level", set_to.append)
    reported = client.get_log_settings(as_json=True)["settings"]
    assert reported["log_error"] == {"bool_param": True}
    assert (
        client.update_log_settings({"log_verbose_level": 1}, as_json=True)["settings"] == reported
    )
    assert set_to == ["debug"]
    status, message = refused(client.update_log_settings, {"log_x": True})
    assert status == "StatusCode.INVALID_ARGUMENT"
    assert "unknown log setting" in message


def test_lookup_by_keys_and_numkeys_with_sources(client):
    inputs = [keys("KEYS", 1, 15, 99, shape=(1, 3))]
    counts = triton.InferInput("NUMKEYS", [1, 2], "INT32")
    inputs.append(counts.set_data_from_numpy(np.array([[2, 1]], np.int32)))
    names = ("OUTPUT0", "KEYS.source")
    outputs = [triton.InferRequestedOutput(name) for name in names]
    result = client.infer("words", inputs, outputs=outputs)
    assert result.as_numpy("OUTPUT0").tolist() == row(1, 3) + row(15, 3) + [0, 0]
    assert result.as_numpy("KEYS.source").tolist() == [[2, 4, 0]]
    assert result.get_response().parameters["hps_defaulted"].int64_param == 1


def test_prediction_returns_scores(client):
    dense = triton.InferInput("dense", [2, 3], "FP32")
    dense.set_data_from_numpy(np.ones((2, 3), np.float32))
    inputs = [keys("user", 1, 2), keys("item", 3, 4), keys("history", 5, 6), dense]
    result = client.infer("ctr", inputs)
    for name in ("score", "logit"):
        assert len(result.as_numpy(name)) == 2
    ranked = client.infer("ctr", inputs, parameters={"top_k": 1})
    assert ranked.as_numpy("top_k_index").tolist() == [1]
    assert ranked.as_numpy("logit").tolist() == [max(result.as_numpy("logit"))]


def test_half_precision_and_empty_tensors(client):
    result = client.infer("halves", [keys("half", 1, 2)])
    assert result.as_numpy("half").dtype == np.float16
    empty = client.infer("words.lookup", [keys("left", shape=(0, 1))])
    assert empty.as_numpy("left").shape == (0, 3)


def test_answers_equal_those_over_http(client, small, ask):
    from tritonclient.http import InferenceServerClient, InferInput, InferResult

    for numbers in ([1, 2, 3], [1, 15, 99], [-5]):
        sent = InferInput("left", [len(numbers), 1], "INT64")
        sent.set_data_from_numpy(np.array(numbers, np.int64).reshape(-1, 1))
        body, size = InferenceServerClient.generate_request_body([sent])
        header = {"inference-header-content-length": str(size)}
        path = "/v2/models/words.lookup/infer"
        reply = ask(small.app(), "POST", path, body, header)
        size = int(reply.headers["inference-header-content-length"])
        by_http = InferResult.from_response_body(reply.body, header_length=size)
        by_grpc = client.infer("words.lookup", [keys("left", *numbers)])
        assert by_http.as_numpy("left").tobytes() == by_grpc.as_numpy("left").tobytes()


def test_metadata_of_server_and_models(client):
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("words")
    assert client.is_model_ready("words", "1")
    assert not client.is_model_ready("words", "2")
    assert not client.is_model_ready("none")
    assert client.get_server_metadata().name == "hps"
    assert "statistics" in client.get_server_metadata().extensions
    metadata = client.get_model_metadata("ctr", as_json=True)
    assert [tensor["name"] for tensor in metadata["inputs"]] == ["user", "item", "history", "dense"]
    config = client.get_model_config("ctr").config
    assert (config.max_batch_size, config.input[0].name) == (64, "user")
    index = client.get_model_repository_index()
    assert {(each.name, each.state) for each in index.models} >= {("ctr", "READY")}
    client.infer("words.lookup", [keys("left", 1, 2)])
    refused(client.infer, "words.lookup", [keys("wrong", 1)])
    (stats,) = client.get_inference_statistics("words.lookup").model_stats
    assert (stats.inference_count, stats.execution_count) == (2, 1)
    assert stats.inference_stats.success.count == stats.inference_stats.fail.count == 1
    assert stats.inference_stats.compute_infer.ns > 0
    assert len(client.get_inference_statistics().model_stats) == 6


def test_errors_have_codes_and_name_the_remedy(client, small):
    code, message = refused(client.infer, "nope", [keys("left", 1)])
    assert (code, message) == (
        "StatusCode.NOT_FOUND",
        "Request for unknown model: 'nope' is not found",
    )
    assert "version 1 is served" in refused(client.get_model_metadata, "ctr", "7")[1]
    code, message = refused(client.infer, "words.lookup", [keys("lefft", 1)])
    assert code == "StatusCode.INVALID_ARGUMENT"
    assert "did you mean 'left'" in message
    code, _ = refused(client.load_model, "words")
    assert code == "StatusCode.UNIMPLEMENTED"
    for call in (client.get_system_shared_memory_status, client.get_trace_settings):
        code, message = refused(call)
        assert code == "StatusCode.UNIMPLEMENTED"
        assert "is not offered" in message


def test_unsupported_methods_are_unimplemented(serve):
    methods = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods
    refusing = set()
    with grpc.insecure_channel(serve().server.url) as channel:
        for method in {each.name for each in methods} - {"ModelStreamInfer"}:
            try:
                channel.unary_unary(f"/{SERVICE}/{method}")(b"", timeout=60)
            except grpc.RpcError as error:
                if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                    refusing.add(method)
    # Traces and CUDA regions are never offered, others by `server.shared_memory` and `server.model_control`.
    assert refusing == {
        "TraceSetting",
        "CudaSharedMemoryRegister",
        "CudaSharedMemoryStatus",
        "CudaSharedMemoryUnregister",
        "RepositoryModelLoad",
        "RepositoryModelUnload",
        "SystemSharedMemoryRegister",
        "SystemSharedMemoryStatus",
        "SystemSharedMemoryUnregister",
    }


def test_failures_are_counted_by_status(client, small):
    refused(client.infer, "nope", [keys("left", 1)])
    client.infer("words.lookup", [keys("left", 1)])
    metrics = small.state.metrics
    for of, code in ((("", ""), "NOT_FOUND"), (("words.lookup", "1"), "OK")):
        counts, _ = metrics.histogram(m.REQUEST_SECONDS, "grpc", "infer", *of, code).read()
        assert sum(counts) == 1


def test_loading_server_is_unavailable(small, serve):
    small.state = FrontendState()
    with triton.InferenceServerClient(serve().server.url) as client:
        assert client.is_server_live()
        assert not client.is_server_ready()
        code, message = refused(client.infer, "words", [keys("left", 1)])
        assert code == "StatusCode.UNAVAILABLE"
        assert "the server is loading" in message
        small.state.serve(small.node)
        assert client.is_server_ready()
        client.infer("words.lookup", [keys("left", 1)])


def test_calls_fail_at_their_deadline(client, small):
    small.store.gate.clear()
    waiting = [keys("left", 12)]
    code, _ = refused(client.infer, "words.lookup", waiting, client_timeout=0.3)
    assert code == "StatusCode.DEADLINE_EXCEEDED"
    code, message = refused(client.infer, "words.lookup", waiting, timeout=20_000)
    assert code == "StatusCode.DEADLINE_EXCEEDED"
    # With 20 ms, a stalled machine may leave no time for the lookup to begin.
    assert "server.request_timeout_ms" in message or "for a thread" in message
    small.store.gate.set()
    assert client.infer("words.lookup", waiting).as_numpy("left").tolist() == [row(12, 3)]


def test_health_is_answered_while_all_threads_are_busy(client, small):
    small.store.gate.clear()
    answers = queue.Queue()
    for key in range(10, 18):  # twice the threads
        client.async_infer(
            "words.lookup", [keys("left", key)], lambda result, error: answers.put(result or error)
        )
    assert client.is_server_live()
    assert client.get_model_metadata("ctr").name == "ctr"
    small.store.gate.set()
    for _ in range(8):
        assert isinstance(answers.get(timeout=60), triton.InferResult)


def test_calls_without_a_request_do_not_block_others(serve):
    url = serve().server.url
    gate = threading.Event()

    def nothing():
        gate.wait(60)
        yield from ()

    with grpc.insecure_channel(url) as channel, triton.InferenceServerClient(url) as client:
        waiting = [
            channel.stream_unary(f"/{SERVICE}/{method}").future(nothing())
            for method in ("ModelInfer", "ModelInfer", "ModelInfer", *["ServerLive"] * 6)
        ]
        for _ in range(5):
            client.infer("words.lookup", [keys("left", 1)])
            assert client.is_server_live()
        gate.set()
        for each in waiting:
            each.cancel()


def test_stream_frees_its_answered_requests(serve, small):
    kept = []
    endpoint = small.state.entries["words.lookup"].endpoint
    submit = type(endpoint).submit

    def counted(self, *args, **kwargs):
        future = submit(self, *args, **kwargs)
        kept.append(weakref.ref(future))
        return future

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(endpoint), "submit", counted)
        answers = queue.Queue()
        with triton.InferenceServerClient(serve().server.url) as client:
            client.start_stream(lambda result, error: answers.put((result, error)))
            for key in range(10, 20):  # in the store: the answer waits for it
                client.async_stream_infer("words.lookup", [keys("right", key)])
                assert answers.get(timeout=60)[1] is None
            until(lambda: sum(ref() is not None for ref in kept) <= 1)
            client.stop_stream()
    assert len(kept) == 10


@pytest.fixture
def streams(serve):
    """``streams()``: an idle stream, whose first request has been answered."""
    url, gate = serve().server.url, threading.Event()

    def asking():
        yield pb.ModelInferRequest(model_name="none")
        gate.wait(60)

    channels = []

    def begin():
        channels.append(grpc.insecure_channel(url))
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channels[-1])
        stream = stub.ModelStreamInfer(asking())
        assert "is not found" in next(stream).error_message
        return stream

    yield begin
    gate.set()
    for channel in channels:
        channel.close()


def ended(stream):
    with pytest.raises(grpc.RpcError) as caught:
        next(stream)
    return caught.value.code()


@pytest.mark.parametrize("most", [1, 2])
def test_one_client_cannot_open_all_streams(streams, monkeypatch, most):
    """If one stream is allowed, a client may have it."""
    monkeypatch.setattr(streams_module, "STREAMS", most)
    first = streams()
    with pytest.raises(grpc.RpcError, match="half of it per client") as caught:
        streams()
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    if most == 2:
        monkeypatch.setattr(
            "services.frontend.grpc.inference_service.address_of", lambda _: "another"
        )
        second = streams()
        monkeypatch.setattr(
            "services.frontend.grpc.inference_service.address_of", lambda _: "a third"
        )
        with pytest.raises(grpc.RpcError):
            streams()
        second.cancel()
    first.cancel()

    def room():
        try:
            streams()
        except grpc.RpcError:
            return False
        return True

    until(room)


def test_idle_streams_are_closed(streams, monkeypatch):
    monkeypatch.setattr(streams_module, "_SWEEP_S", 0.01)
    monkeypatch.setattr(streams_module, "_IDLE_TIMEOUT_S", 0.1)
    assert ended(streams()) is grpc.StatusCode.CANCELLED


def test_idle_streams_of_reflection_are_closed(serve, monkeypatch):
    """They keep threads, and their messages bytes of the budget."""
    monkeypatch.setattr(streams_module, "_SWEEP_S", 0.01)
    monkeypatch.setattr(streams_module, "_IDLE_TIMEOUT_S", 0.1)
    over = threading.Event()

    def requests():
        yield reflection_pb2.ServerReflectionRequest(list_services="")
        over.wait(60)

    with grpc.insecure_channel(serve().server.url) as channel:
        call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(requests())
        assert next(call).list_services_response.service
        assert ended(call) is grpc.StatusCode.CANCELLED
    over.set()


def test_streams_that_wait_for_an_answer_stay_open(small, serve, monkeypatch):
    monkeypatch.setattr(streams_module, "_SWEEP_S", 0.01)
    looked = threading.Semaphore(0)
    works = streams_module.OpenStream.works
    monkeypatch.setattr(
        streams_module.OpenStream,
        "works",
        lambda self: (works(self), monkeypatch.setattr(streams_module, "_IDLE_TIMEOUT_S", -1.0)),
    )
    monotonic = time.monotonic
    monkeypatch.setattr(
        streams_module,
        "time",
        SimpleNamespace(monotonic=lambda: (looked.release(), monotonic())[1], sleep=time.sleep),
    )
    small.store.gate.clear()
    request = pb.ModelInferRequest(model_name="words.lookup")
    request.inputs.add(name="left", datatype="INT64", shape=[1, 1])
    request.raw_input_contents.append(np.array([12]).tobytes())
    with grpc.insecure_channel(serve().server.url) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        stream = stub.ModelStreamInfer(iter([request]))
        for _ in range(10):
            assert looked.acquire(timeout=60)
        monkeypatch.setattr(streams_module, "_IDLE_TIMEOUT_S", 60.0)
        small.store.gate.set()
        assert not next(stream).error_message


def test_stream_ends_when_its_callers_key_expires(serve, tmp_path, monkeypatch):
    monkeypatch.setattr(auth, "CHECK_EVERY_S", 0.0)
    file = tmp_path / "keys.yaml"
    entry = "- {{name: {0}, role: read, key: {0}-secret-000001}}\n"
    file.write_text(entry.format("web") + entry.format("other"))
    file.chmod(0o600)
    keys_of = guard(load_api_keys(AuthSettings(mode="api_key", keys_file=file)))
    requests = queue.Queue()
    with grpc.insecure_channel(serve(keys_of).server.url) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        answers = stub.ModelStreamInfer(
            iter(requests.get, None), metadata=[("x-api-key", "web-secret-000001")]
        )
        requests.put(pb.ModelInferRequest(model_name="none"))
        assert "is not found" in next(answers).error_message
        file.write_text(entry.format("other"))
        requests.put(pb.ModelInferRequest(model_name="none"))
        with pytest.raises(grpc.RpcError) as caught:
            next(answers)
        requests.put(None)
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_stream_answers_in_order(client):
    answers = queue.Queue()
    client.start_stream(lambda result, error: answers.put((result, error)))
    for name in ("left", "wrong", "right"):
        client.async_stream_infer("words.lookup", [keys(name, 1)], request_id=name)
    result, error = answers.get(timeout=60)
    assert result.as_numpy("left").tolist() == [row(1, 3)]
    result, error = answers.get(timeout=60)
    assert result is None
    assert "unexpected inference input" in error.message()
    result, error = answers.get(timeout=60)
    assert result.get_response().id == "right"
    client.stop_stream()


def test_statistics_count_the_requests(client, small):
    answers = queue.Queue()
    client.start_stream(lambda result, error: answers.put((result, error)))
    for key in (1, 12, 2):  # the second is in the store
        client.async_stream_infer("words.lookup", [keys("left", key, key)])
        client.async_stream_infer("words.lookup", [keys("lift", key)])
        client.infer("words.lookup", [keys("right", key)])
        refused(client.infer, "words.lookup", [keys("lift", key)])
    for _ in range(6):
        answers.get(timeout=60)
    client.stop_stream()
    reported = client.get_inference_statistics("words.lookup").model_stats[0]
    stats = reported.inference_stats
    assert (stats.success.count, stats.fail.count) == (6, 6)
    assert (reported.execution_count, reported.inference_count) == (6, 9)
    split = [stats.queue, stats.compute_input, stats.compute_infer, stats.compute_output]
    assert [part.count for part in split] == [6] * 4
    assert sum(part.ns for part in split) == stats.success.ns


def test_strict_stream_fails_with_the_status_of_its_error(serve):
    with grpc.insecure_channel(serve().server.url) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        strict = (("triton_grpc_error", "true"),)
        answers = stub.ModelStreamInfer(
            iter([pb.ModelInferRequest(model_name="x")]), metadata=strict
        )
        with pytest.raises(grpc.RpcError) as caught:
            next(answers)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


def test_health_watch_reports_changes(serve, small):
    small.state = FrontendState()
    server = serve()
    with grpc.insecure_channel(server.server.url) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        said = stub.Watch(health_pb2.HealthCheckRequest())
        assert next(said).status == health_pb2.HealthCheckResponse.NOT_SERVING
        small.state.serve(small.node)
        assert next(said).status == health_pb2.HealthCheckResponse.SERVING
        checked = stub.Check(health_pb2.HealthCheckRequest(service=SERVICE))
        assert checked.status == health_pb2.HealthCheckResponse.SERVING
        server.stop()
        assert next(said).status == health_pb2.HealthCheckResponse.NOT_SERVING
        said.cancel()


def test_watchers_that_do_not_read_block_no_others(serve, small):
    server = serve()
    watching = server.server._health._watchers
    with closing(Http2Client(server.server.url)) as deaf:
        for _ in range(40):
            deaf.call("/grpc.health.v1.Health/Watch")
        until(lambda: len(watching) == 40)
        with grpc.insecure_channel(server.server.url) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            said = stub.Watch(health_pb2.HealthCheckRequest(), timeout=60)
            assert next(said).status == health_pb2.HealthCheckResponse.SERVING
            small.state.stop()
            assert next(said).status == health_pb2.HealthCheckResponse.NOT_SERVING
            checked = stub.Check(health_pb2.HealthCheckRequest(), timeout=60)
            assert checked.status == health_pb2.HealthCheckResponse.NOT_SERVING
            said.cancel()
    until(lambda: not watching)


def test_new_watcher_does_not_delay_a_stopping_server(serve):
    server = serve()
    health = server.server._health
    health.stop()
    health.end()
    with grpc.insecure_channel(server.server.url) as channel:
        said = health_pb2_grpc.HealthStub(channel).Watch(
            health_pb2.HealthCheckRequest(), timeout=60
        )
        with pytest.raises(grpc.RpcError) as caught:
            next(said)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    until(lambda: not health._watchers)


def test_number_of_watchers_is_bounded(serve, monkeypatch):
    monkeypatch.setattr(health_module, "WATCHERS", 1)
    with grpc.insecure_channel(serve().server.url) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        first = stub.Watch(health_pb2.HealthCheckRequest())
        next(first)
        with pytest.raises(grpc.RpcError) as caught:
            next(stub.Watch(health_pb2.HealthCheckRequest(), timeout=60))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        first.cancel()


def test_reflection_describes_the_services(serve):
    def services(url):
        with grpc.insecure_channel(url) as channel:
            stub = reflection_pb2_grpc.ServerReflectionStub(channel)
            request = reflection_pb2.ServerReflectionRequest(list_services="")
            (answer,) = stub.ServerReflectionInfo(iter([request]))
            return {each.name for each in answer.list_services_response.service}

    assert {SERVICE, "grpc.health.v1.Health"} <= services(serve().server.url)
    with pytest.raises(grpc.RpcError):
        services(serve(grpc={"reflection": False}).server.url)


def test_api_key_is_required(serve, key_guard, small):
    server = serve(key_guard)
    with triton.InferenceServerClient(server.server.url) as client:
        assert client.is_server_live()
        asking = [keys("left", 1)]
        code, message = refused(client.infer, "words.lookup", asking)
        assert code == "StatusCode.UNAUTHENTICATED"
        assert "X-API-Key" in message
        assert refused(client.get_model_metadata, "words")[0] == "StatusCode.UNAUTHENTICATED"
        for headers in (
            {"x-api-key": "r" * 16},
            {"authorization": "Bearer " + "r" * 16},
        ):
            client.infer("words.lookup", asking, headers=headers)
            client.get_model_metadata("words", headers=headers)
        wrong = {"x-api-key": "s" * 16}
        assert refused(client.infer, "words.lookup", asking, headers=wrong)[1] == "unknown API key"
    assert small.state.metrics.counter(m.REQUESTS_REFUSED, "unauthenticated").value == 2


def test_very_long_deadline_is_accepted(client):
    waiting = [keys("left", 13)]
    assert client.infer("words.lookup", waiting, timeout=2**62).as_numpy("left").size == 3


def test_invalid_certificates_are_a_configuration_error(small, tmp_path):
    (tmp_path / "f").write_text("no certificate")
    tls = TlsSettings(key_file=tmp_path / "f", certificate_file=tmp_path / "f")
    with pytest.raises(ConfigError, match=r"server.grpc.tls: .*/f.* cannot be used"):
        GrpcServer(GrpcSettings(port=0, tls=tls), small.state, small.settings, Authorizer())


def test_message_size_is_bounded(serve):
    with triton.InferenceServerClient(serve(max_body_bytes=4096).server.url) as client:
        client.infer("words.lookup", [keys("left", *range(400))])
        code, _ = refused(client.infer, "words.lookup", [keys("left", *range(600))])
        assert code == "StatusCode.RESOURCE_EXHAUSTED"
    with triton.InferenceServerClient(serve(max_keys=3).server.url) as client:
        code, message = refused(client.infer, "words.lookup", [keys("left", 1, 2, 3, 4)])
        assert code == "StatusCode.INVALID_ARGUMENT"
        assert "server.max_keys" in message


def test_accepted_calls_are_answered_during_shutdown(serve, small, monkeypatch):
    server = serve()
    small.store.gate.clear()
    fetching = threading.Event()
    fetch = small.store.fetch
    monkeypatch.setattr(small.store, "fetch", lambda *args: (fetching.set(), fetch(*args)))
    answers = queue.Queue()
    with triton.InferenceServerClient(server.server.url) as client:
        waiting = [keys("left", 12)]
        client.async_infer(
            "words.lookup", waiting, lambda result, error: answers.put(result or error)
        )
        assert fetching.wait(60)
        server.stop()
        small.store.gate.set()
        assert isinstance(answers.get(timeout=60), triton.InferResult)
    server.join()


def certified(folder, name, ca=None):
    """Files of a key and a certificate for ``name``, signed by ``ca`` or by itself."""
    return made(folder, name, [f"DNS:{name}"] if ca else (), ca)


def test_mutual_tls(serve, small, tmp_path):
    ca = certified(tmp_path, "ca")
    key, certificate = certified(tmp_path, "localhost", ca)
    client_key, client_certificate = certified(tmp_path, "client", ca)
    tls = {"key_file": key, "certificate_file": certificate}
    port = serve(grpc={"tls": tls}).server.url.rpartition(":")[2]

    def asks(port, **files):
        chosen = {"ssl": True, "root_certificates": str(ca[1])} | files
        with triton.InferenceServerClient(f"localhost:{port}", **chosen) as client:
            return client.is_server_live(client_timeout=10)

    assert asks(port)
    with triton.InferenceServerClient(f"localhost:{port}") as client:
        assert refused(client.is_server_live)[0] == "StatusCode.UNAVAILABLE"
    port = serve(grpc={"tls": {**tls, "client_ca_file": ca[1]}}).server.url.rpartition(":")[2]
    assert asks(port, private_key=str(client_key), certificate_chain=str(client_certificate))
    assert refused(asks, port)[0] == "StatusCode.UNAVAILABLE"


def test_renewed_certificates_are_used(serve, tmp_path, caplog):
    old = certified(tmp_path, "localhost")
    tls = {"key_file": old[0], "certificate_file": old[1]}
    port = serve(grpc={"tls": tls}).server.url.rpartition(":")[2]

    def asks(root):
        with triton.InferenceServerClient(
            f"localhost:{port}", ssl=True, root_certificates=str(root)
        ) as client:
            return client.is_server_live(client_timeout=10)

    root = tmp_path / "root.crt"
    root.write_bytes(old[1].read_bytes())
    assert asks(root)
    old[0].unlink()
    assert asks(root)
    assert "failed to reload certificates, keeping the former ones" in caplog.text
    certified(tmp_path, "localhost")
    assert asks(old[1])
    assert refused(asks, root)[0] == "StatusCode.UNAVAILABLE"


def test_missing_certificate_files_are_a_configuration_error(small, tmp_path):
    tls = TlsSettings(key_file=tmp_path / "no", certificate_file=tmp_path / "no")
    with pytest.raises(ConfigError, match=r"server.grpc.tls: .*/no: No such file"):
        GrpcServer(GrpcSettings(port=0, tls=tls), small.state, small.settings, Authorizer())


def test_taken_port_is_a_configuration_error(small, serve):
    port = int(serve().server.url.rpartition(":")[2])
    with pytest.raises(ConfigError, match=f"server.grpc: cannot listen on 127.0.0.1:{port}"):
        GrpcServer(GrpcSettings(port=port), small.state, small.settings, Authorizer())
