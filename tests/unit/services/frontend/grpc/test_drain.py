"""Shutdown of a gRPC server under load, beside another one: no call is lost."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

from hps.client import Client
from hps.lookup.remote.addresses import NodeAddress
from hps.lookup.remote.connection import NodeChannel
from hps.v1.lookup_pb2 import ServingRequest
from services.frontend.grpc import listener as port_module
from services.frontend.state import FrontendState
from tests.support.waiting import until
from tests.unit.services.frontend.protocol_clients import infer_request

CLIENTS, CALLS = 6, 40
# A client's service configuration that enables health checking.
HEALTH = {
    "loadBalancingConfig": [{"round_robin": {}}],
    "healthCheckConfig": {"serviceName": "inference.GRPCInferenceService"},
}


def question():
    request = pb.ModelInferRequest(model_name="words.lookup")
    request.inputs.add(name="left", datatype="INT64", shape=[1, 1])
    request.raw_input_contents.append(np.array([1]).tobytes())
    return request


@contextmanager
def load(ask: Callable[[], Callable[[], object]]) -> Iterator[Callable[[], None]]:
    """Clients that ask all the time; what is yielded waits until each has been answered some more. No call
    may fail."""
    done, errors = threading.Event(), []
    answered = [threading.Semaphore(0) for _ in range(CLIENTS)]

    def client(mine: threading.Semaphore) -> None:
        call = ask()
        while not done.is_set():
            try:
                call()
            except Exception as error:
                errors.append(error)
            mine.release()

    def some_more() -> None:
        for mine in answered:
            for _ in range(CALLS):
                assert mine.acquire(timeout=60)

    threads = [threading.Thread(target=client, args=(mine,)) for mine in answered]
    for thread in threads:
        thread.start()
    try:
        some_more()
        yield some_more
        some_more()
    finally:
        done.set()
        for thread in threads:
            thread.join(60)
    assert errors == []


@pytest.fixture
def channels():
    """``channels(target, config)``: a new connection's ``ModelInfer``; closed at the end."""
    made = []

    def connect(target, config=None, watch=None):
        options = [("grpc.use_local_subchannel_pool", 1)]
        if config:
            options.append(("grpc.service_config", json.dumps(config)))
        made.append(grpc.insecure_channel(target, options))
        if watch is not None:
            made[-1].subscribe(watch)
        infer = GRPCInferenceServiceStub(made[-1]).ModelInfer
        return lambda: infer(question(), timeout=60, wait_for_ready=True)

    yield connect
    for channel in made:
        channel.close()


def test_health_checking_clients_leave_a_server_before_it_ends(small, serve, channels):
    second = serve()
    ending = FrontendState()
    ending.serve(small.node)
    first = serve(state=ending)
    target = f"ipv4:{first.server.url},{second.server.url}"
    counted = ending.entries["words.lookup"].statistics
    with load(lambda: channels(target, HEALTH)) as some_more:
        assert counted.success_count
        ending.stop()
        some_more()  # within server.drain_delay_s
        before = counted.success_count
        some_more()
        assert counted.success_count == before  # no client calls it any more
        first.stop()
        first.join()


@pytest.mark.parametrize(
    "settings",
    [{"grpc": {"max_connection_age_s": 0.05}}, {"drain_delay_s": 0.1}],
    ids=["set", "half of drain_delay_s"],
)
def test_no_call_is_lost_when_a_connection_reaches_its_age(serve, channels, settings):
    running = serve(**settings)
    states = []
    with load(lambda: channels(running.server.url, watch=states.append)) as some_more:
        until(lambda: states.count(grpc.ChannelConnectivity.READY) > 2 * CLIENTS)
        some_more()


def test_no_call_of_hps_client_is_lost_when_a_connection_reaches_its_age(serve):
    """gRPC retries calls that a server has not processed, unless retries are disabled."""
    running = serve(grpc={"max_connection_age_s": 0.05})
    with ExitStack() as made:

        def ask_as_client():
            client = made.enter_context(Client(f"grpc://{running.server.url}", retries=0))
            return lambda: client.lookup("words", {"left": [1]})

        def ask_as_front_end():
            connection = NodeChannel(NodeAddress(running.server.url), None)
            made.callback(connection.close)
            return lambda: connection.serving(ServingRequest(), timeout=60)

        for ask in (ask_as_client, ask_as_front_end):
            with load(ask) as some_more:
                for _ in range(8):
                    some_more()


def test_stopping_server_rejects_calls_as_unavailable(serve, channels, monkeypatch):
    """CANCELLED would not make clients retry."""
    monkeypatch.setattr(port_module, "_REFUSING_S", 60.0)
    running = serve()
    with grpc.insecure_channel(running.server.url) as channel:
        stub = GRPCInferenceServiceStub(channel)
        stub.ModelInfer(question(), timeout=60)
        running.stop()
        health = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        until(lambda: next(health).status == health_pb2.HealthCheckResponse.NOT_SERVING)
        health.cancel()

        def refusal(call):
            with pytest.raises(grpc.RpcError) as caught:
                call()
            return caught.value

        for call in (
            lambda: stub.ModelInfer(question(), timeout=60),
            lambda: next(stub.ModelStreamInfer(iter([question()]), timeout=60)),
            lambda: stub.ServerMetadata(pb.ServerMetadataRequest(), timeout=60),
        ):
            until(lambda call=call: refusal(call).code() is grpc.StatusCode.UNAVAILABLE)
            refused = refusal(call)
            assert "ask another replica" in refused.details()
            pushback = dict(refused.trailing_metadata())["grpc-retry-pushback-ms"]
            assert int(pushback) == 1000


def test_client_retries_a_call_that_was_cut_off(serve):
    first, second = serve(), serve()
    ends = [first.server.url, second.server.url]
    clients = []

    def ask():
        # Retries find the other server, as they do behind a load balancer.
        client = Client(f"grpc://{ends[0]}", retries=4)
        other = Client(f"grpc://{ends[1]}")
        clients.extend([client, other])
        send, go_over = client._transport.send, other._transport.send

        def either(message, until):
            try:
                return send(message, until)
            except Exception:
                client._transport.send = go_over
                raise

        client._transport.send = either
        return lambda: client.lookup("words", {"left": [1]})

    with load(ask):
        first.stop()
        first.join()
    for client in clients:
        client.close()


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("beside", [False, True])
def test_uncancellable_work_does_not_delay_the_shutdown(slow, serve, monkeypatch, at_once, beside):
    running = serve(drain_s=60.0 if at_once else 0.2)
    began, leave = threading.Event(), threading.Event()

    def stuck(*_, **_only):
        began.set()
        leave.wait(60)
        return []

    monkeypatch.setattr("services.frontend.grpc.service.index", stuck)
    with grpc.insecure_channel(running.server.url) as channel:
        stub = GRPCInferenceServiceStub(channel)
        if beside:
            call = stub.RepositoryIndex.future(pb.RepositoryIndexRequest(), timeout=600)
            assert began.wait(60)
        else:
            call = stub.ModelInfer.future(infer_request(), timeout=600)
            until(lambda: slow.runs)
        running.stop()
        running.stop(force=at_once)
        running.join()
        assert call.code() in (grpc.StatusCode.CANCELLED, grpc.StatusCode.UNAVAILABLE)
    leave.set()
    slow.leave.set()


def test_health_watchers_do_not_delay_the_shutdown(serve):
    running = serve(drain_s=3600)
    with grpc.insecure_channel(running.server.url) as channel:
        said = channel.unary_stream("/grpc.health.v1.Health/Watch")(b"", timeout=600)
        assert next(said) == b"\x08\x01"
        running.stop()
        assert next(said) == b"\x08\x02"
        with pytest.raises(grpc.RpcError):
            next(said)
        running.join()
