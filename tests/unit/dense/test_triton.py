"""TritonModel with a Triton that is slow, hangs, restarts, or serves another network."""

from __future__ import annotations

import gc
import json
import socket
import threading
import time
import weakref
from base64 import b64encode
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from multiprocessing.shared_memory import SharedMemory
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc.service_pb2_grpc import (
    GRPCInferenceServiceServicer,
    add_GRPCInferenceServiceServicer_to_server,
)
from tritonclient.utils import InferenceServerException

from hps.config.dense_settings import DenseSettings, TritonSettings
from hps.dense.base import NetworkTensor
from hps.dense.fallback import FallbackModel
from hps.dense.network_factory import NetworkSpec, open_network
from hps.dense.triton import TritonModel, TritonRunOptions
from hps.dense.triton.device_memory import DeviceRegion
from hps.dense.triton.grpc import GrpcTransport
from hps.dense.triton.host_memory import HostRegion
from hps.dense.triton.http import HttpTransport
from hps.dense.triton.shared_regions import ThreadRegions
from hps.dense.triton.transport import (
    CudaSharedMemory,
    TritonModelInfo,
    TritonNotConnected,
    TritonRejected,
    TritonUnavailable,
    translate_triton_error,
)
from hps.errors import (
    ConfigError,
    DeadlineExceeded,
    DenseModelError,
    ModelError,
    NotFound,
    Unavailable,
)
from tests.support.network import Network

IN, OUT = NetworkTensor("x", "FP32", (-1, 2)), NetworkTensor("y", "FP32", (-1, 2))


class Triton:
    """A TritonTransport whose network doubles its input.

    ``faults``: the errors of the next calls, by method; "reach" fails a registration before it is made.
    """

    def __init__(self) -> None:
        self.regions: dict[str, SharedMemory] = {}
        self.registrations: list[str] = []
        self.faults: dict[str, list[Exception]] = {}
        self.runs: list[Any] = []
        self.during: Callable[[], None] = lambda: None

    def _fail(self, call: str) -> None:
        if errors := self.faults.get(call):
            raise errors.pop(0)

    def describe(self, timeout_s: float) -> TritonModelInfo:
        self.during()
        self._fail("describe")
        return TritonModelInfo((IN,), (OUT,), 0)

    def infer(self, inputs, outputs, timeout_s, shared=None):
        self.runs.append(shared)
        if shared is None:
            self._fail("infer")
            return {"y": inputs[0][2] * 2}
        if shared.region not in self.regions:
            raise DenseModelError(f"Unable to find shared memory region: '{shared.region}'")
        self._fail("infer")
        self.write(shared, self.read(shared, "x") * 2)
        return {}

    def read(self, shared, name):
        offset, size = shared.places[name]
        return np.frombuffer(bytes(self.regions[shared.region].buf[offset : offset + size]), "f4")

    def write(self, shared, values):
        offset, size = shared.places["y"]
        self.regions[shared.region].buf[offset : offset + size] = values.astype("f4").tobytes()

    def register(self, region, key, size, timeout_s):
        self._fail("reach")
        if region in self.regions:
            raise DenseModelError(f"shared memory region '{region}' already in manager")
        self.regions[region] = SharedMemory(key.removeprefix("/"))
        self.registrations.append(region)
        self._fail("register")

    def unregister(self, region, key, timeout_s):
        self._fail("unregister")
        if region in self.regions:
            self.regions.pop(region).close()

    def close(self) -> None:
        pass


@pytest.fixture
def triton() -> Triton:
    return Triton()


@pytest.fixture
def opened(triton: Triton) -> Iterator[Callable[..., TritonModel]]:
    networks = []

    def open_network(regions: ThreadRegions | None = None, **changes: Any) -> TritonModel:
        options = TritonRunOptions(60.0, regions=regions, **changes)
        networks.append(TritonModel("n", "triton:1", triton, ((IN,), (OUT,)), options))
        return networks[-1]

    yield open_network
    triton.faults.clear()
    for network in networks:
        network.close()
    assert not triton.regions


def rows(value: float, batch: int = 1) -> dict[str, Any]:
    return {"x": np.full((batch, 2), value, np.float32)}


def check_doubled(
    network: Any, value: float, batch: int = 1, deadline: float | None = None
) -> None:
    answer = network.predict(rows(value, batch), None, deadline)
    np.testing.assert_array_equal(answer["y"], np.full((batch, 2), 2 * value))


TIMED_OUT = DeadlineExceeded("late")
CONNECTION_LOST = DenseModelError("the call to Triton failed: the connection was closed")
UNREACHABLE = TritonUnavailable("unreachable")


@pytest.mark.parametrize("error", [TIMED_OUT, CONNECTION_LOST, UNREACHABLE])
def test_region_of_a_failed_run_is_never_used_again(triton, opened, error):
    network = opened(ThreadRegions())
    triton.faults["infer"] = [error]
    with pytest.raises((DeadlineExceeded, DenseModelError, Unavailable)):
        network.predict(rows(1))
    (failed,) = triton.runs
    check_doubled(network, 2)
    assert triton.runs[-1].region != failed.region
    assert failed.region not in triton.regions
    with pytest.raises(FileNotFoundError):
        SharedMemory(failed.region)


def test_restarted_triton_gets_a_region_with_a_new_name(triton, opened):
    network = opened(ThreadRegions())
    check_doubled(network, 1)
    triton.regions.popitem()[1].close()
    check_doubled(network, 2)
    assert len(set(triton.registrations)) == len(triton.registrations) == 2


def test_region_grows_after_registrations_failed(triton, opened):
    network = opened(ThreadRegions())
    check_doubled(network, 1)
    triton.faults |= {"register": [UNREACHABLE] * 2, "unregister": [UNREACHABLE]}
    for _ in range(2):
        with pytest.raises(Unavailable):
            network.predict(rows(1, 1 << 16))
    for value in (2, 3):
        check_doubled(network, value, 1 << 16)


def test_next_run_succeeds_after_a_registration_timed_out(triton, opened):
    network = opened(ThreadRegions())
    triton.faults["register"] = [TIMED_OUT]
    with pytest.raises(DeadlineExceeded):
        network.predict(rows(1))
    check_doubled(network, 2)


def test_processes_with_equal_pids_use_different_region_names(triton, opened, monkeypatch):
    monkeypatch.setattr("os.getpid", lambda: 7)
    networks = [opened(ThreadRegions()) for _ in range(2)]  # as two processes with the same PID
    for network in networks:
        check_doubled(network, 1)
    assert len(set(triton.registrations)) == 2


def test_close_unregisters_regions_and_can_be_repeated(triton, opened):
    network = opened(ThreadRegions())
    check_doubled(network, 1)
    triton.faults["unregister"] = [UNREACHABLE]
    network.close()
    (name,) = triton.regions
    with pytest.raises(FileNotFoundError):
        SharedMemory(name)
    network.close()
    assert not triton.regions


class PersistentRegion(HostRegion):
    """A region that exists until it is released, like GPU memory."""

    def drop(self):
        pass

    def release(self):
        super().drop()


def test_region_that_triton_may_write_to_is_kept_until_close(triton, opened):
    network = opened(ThreadRegions(PersistentRegion))
    triton.faults |= {"infer": [TIMED_OUT], "unregister": [UNREACHABLE]}
    with pytest.raises(DeadlineExceeded):
        network.predict(rows(1))
    check_doubled(network, 2)  # in a new region; Triton may still have the old one registered
    for name in triton.registrations:
        SharedMemory(name).close()
    network.close()
    for name in triton.registrations:
        with pytest.raises(FileNotFoundError):
            SharedMemory(name)


class Counted(PersistentRegion):
    """Counts the regions made, and keeps the sizes of those not released, by name."""

    unreleased: dict[str, int]
    made: int

    def __init__(self, size):
        super().__init__(size)
        self.unreleased[self.name] = self.size
        type(self).made += 1

    def release(self):
        del self.unreleased[self.name]
        super().release()


@pytest.fixture
def counted() -> type[Counted]:
    return type("CountedRegion", (Counted,), {"unreleased": {}, "made": 0})


def test_region_is_reused_if_triton_was_not_reached(triton, opened, counted):
    network = opened(ThreadRegions(counted))
    triton.faults["reach"] = [TritonNotConnected("refused")] * 9
    for _ in range(8):
        with pytest.raises(Unavailable):
            network.predict(rows(1))
    assert counted.made == 1
    with pytest.raises(Unavailable):
        network.predict(rows(1, 1 << 16))
    assert (counted.made, len(counted.unreleased)) == (2, 1)  # the small one was released
    check_doubled(network, 2)
    triton.faults["infer"] = [TritonNotConnected("refused")]
    with pytest.raises(Unavailable):
        network.predict(rows(1))
    check_doubled(network, 3)
    assert counted.made == 2


def test_region_that_triton_rejects_is_released(triton, opened, counted):
    network = opened(ThreadRegions(counted))
    triton.faults["reach"] = [TritonRejected("failed to register shared memory region")] * 4
    for _ in range(2):
        with pytest.raises(DenseModelError):
            network.predict(rows(1))
        assert not counted.unreleased


def test_regions_of_a_hung_triton_are_bounded_and_not_freed(triton, opened, counted, monkeypatch):
    monkeypatch.setattr("hps.dense.triton.shared_regions._STALE_BYTES", 1 << 20)
    network = opened(ThreadRegions(counted))
    triton.faults |= {"infer": [TIMED_OUT] * 99, "unregister": [UNREACHABLE] * 99}
    for _ in range(16):
        with pytest.raises(DeadlineExceeded):
            network.predict(rows(1))
    for _ in range(4):
        with pytest.raises(Unavailable, match="1 MiB of shared memory"):
            network.predict(rows(1))
    assert counted.unreleased.keys() == set(triton.registrations) == triton.regions.keys()
    assert sum(counted.unreleased.values()) == 1 << 20
    triton.faults["infer"] = []
    check_doubled(FallbackModel("n", network, opened()), 1)
    triton.faults.clear()
    check_doubled(network, 2)
    assert len(counted.unreleased) == len(triton.regions) == 1


@pytest.mark.parametrize(
    ("error", "kept"),
    [
        (
            TritonRejected("Cannot unregister shared memory region 'r', it is currently in use."),
            True,
        ),
        (CONNECTION_LOST, True),
        (TritonRejected("no such region"), False),
    ],
)
def test_stale_region_is_released_once_triton_reports_it_unknown(
    triton, opened, counted, error, kept
):
    network = opened(ThreadRegions(counted))
    triton.faults |= {"infer": [TIMED_OUT], "unregister": [error]}
    with pytest.raises(DeadlineExceeded):
        network.predict(rows(1))
    check_doubled(network, 2)
    assert (triton.registrations[0] in counted.unreleased) == kept
    triton.regions.pop(triton.registrations[0]).close()


def test_region_that_triton_still_holds_outlives_the_network(triton, counted, caplog):
    regions = ThreadRegions(counted)
    regions.infer(triton, [("x", "FP32", rows(1)["x"])], (OUT,), lambda: 60.0)
    triton.faults["unregister"] = [UNREACHABLE]
    regions.close(triton)
    assert "1 shared regions" in caplog.text
    reference = weakref.ref(regions)
    del regions
    gc.collect()
    assert len(counted.unreleased) == 1
    closed = reference()
    assert closed is not None
    closed.close(triton)
    assert not counted.unreleased


@pytest.mark.parametrize("kind", ["http", "grpc"])
def test_refused_connection_raises_not_connected(kind):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = f"127.0.0.1:{closed.getsockname()[1]}"
    transport: Any = (
        HttpTransport(address, "n", "")
        if kind == "http"
        else GrpcTransport(address, "n", "", channels=1)
    )
    with pytest.raises(TritonNotConnected):
        transport.register("r", "/r", 4096, 10.0)
    transport.close()


@pytest.mark.parametrize(
    ("status", "is_rejection"),
    [
        ("400", True),
        ("StatusCode.INVALID_ARGUMENT", True),
        ("StatusCode.INTERNAL", False),
        (None, False),
    ],
)
def test_only_a_client_error_status_is_a_rejection(status, is_rejection):
    error = translate_triton_error(InferenceServerException("no", status))
    assert isinstance(error, DenseModelError)
    assert isinstance(error, TritonRejected) == is_rejection


class CudaError(RuntimeError):
    pass


@pytest.mark.parametrize(
    ("call", "text"),
    [("Memory", "no 65536 bytes to share"), ("ipcGetMemHandle", "shares no memory with other")],
)
def test_gpu_that_cannot_share_memory_is_a_config_error_at_start(monkeypatch, call, text):
    def fail(*_):
        raise CudaError("cudaErrorNone: no")

    runtime = SimpleNamespace(CUDARuntimeError=CudaError, ipcGetMemHandle=lambda at: bytes(64))
    cuda = SimpleNamespace(
        Device=lambda number: nullcontext(),
        Stream=lambda **_: None,
        Memory=lambda size: SimpleNamespace(ptr=0),
        runtime=runtime,
    )
    setattr(cuda if call == "Memory" else runtime, call, fail)
    monkeypatch.setattr("hps.dense.triton.device_memory.cupy", lambda: SimpleNamespace(cuda=cuda))
    with pytest.raises(Unavailable, match=rf"{text}.*cudaErrorNone.*or set .*shared_memory"):
        DeviceRegion(0, 1 << 16)
    monkeypatch.setattr("hps.dense.network_factory.missing_requirement", lambda: None)
    fed = {"x": IN}
    triton = TritonSettings(url="127.0.0.1:1", shared_memory="cuda", protocol="http")
    settings = DenseSettings(triton=triton)
    described = NetworkSpec("n", None, fed, (OUT,), lambda network: None)
    with pytest.raises(ConfigError, match=text):
        open_network(described, settings, 0)


def test_cuda_region_is_registered_by_its_ipc_handle(monkeypatch):
    memory, sent = CudaSharedMemory(bytes(range(64)), 3), []
    http = HttpTransport("triton:1", "n", "")
    monkeypatch.setattr(
        http, "_send", lambda _method, path, _s, body=b"": sent.append((path, body))
    )
    http.register("r", memory, 4096, 1.0)
    http.unregister("r", memory, 1.0)
    (path, body), (last_path, _) = sent
    assert path == "/v2/cudasharedmemory/region/r/register"
    handle = {"b64": b64encode(memory.handle).decode()}
    assert json.loads(body) == {"raw_handle": handle, "device_id": 3, "byte_size": 4096}
    assert last_path == "/v2/cudasharedmemory/region/r/unregister"
    grpc, requests = GrpcTransport("triton:1", "n", "", channels=1), []
    stub = SimpleNamespace(
        CudaSharedMemoryRegister=lambda request, **_: requests.append(request),
        CudaSharedMemoryUnregister=lambda request, **_: requests.append(request),
    )
    monkeypatch.setattr(grpc._clients[0], "_client_stub", stub)
    grpc.register("r", memory, 4096, 1.0)
    grpc.unregister("r", memory, 1.0)
    assert (requests[0].raw_handle, requests[0].device_id) == (memory.handle, 3)
    assert (requests[0].name, requests[0].byte_size, requests[1].name) == ("r", 4096, "r")
    grpc.close()


@pytest.mark.parametrize(("timeout_s", "timeout_us"), [(2.5, 2_500_000), (1e-7, 1)])
def test_infer_request_carries_its_timeout_in_microseconds(monkeypatch, timeout_s, timeout_us):
    inputs = [("x", "FP32", rows(1)["x"])]
    calls: list[Any] = []

    def fail(*arguments, request=None, **_):
        calls.extend(arguments or [request])
        raise UNREACHABLE

    by_http = HttpTransport("triton:1", "n", "")
    monkeypatch.setattr(by_http, "_send", fail)
    with pytest.raises(TritonUnavailable):
        by_http.infer(inputs, ["y"], timeout_s)
    *_, limit, body, headers = calls
    head = json.loads(body[: int(headers["inference-header-content-length"])])
    assert (limit, head["parameters"]["timeout"]) == (timeout_s, timeout_us)
    by_grpc = GrpcTransport("triton:1", "n", "", channels=1)
    monkeypatch.setattr(by_grpc._clients[0], "_client_stub", SimpleNamespace(ModelInfer=fail))
    with pytest.raises(TritonUnavailable):
        by_grpc.infer(inputs, ["y"], timeout_s)
    assert calls[-1].parameters["timeout"].int64_param == timeout_us
    by_grpc.close()


@pytest.mark.parametrize("error", [UNREACHABLE, TIMED_OUT])
def test_unreachable_triton_at_start_is_asked_again_later(triton, opened, error):
    triton.faults["describe"] = [error]
    check_doubled(opened(), 1)


def test_request_waiting_for_the_description_keeps_its_deadline(triton, opened):
    triton.faults["describe"] = [UNREACHABLE]
    network = opened()
    describing, proceed = threading.Event(), threading.Event()

    def hang() -> None:
        describing.set()
        assert proceed.wait(60)

    triton.during = hang
    other = threading.Thread(target=check_doubled, args=(network, 1))
    other.start()
    assert describing.wait(60)
    with pytest.raises(DeadlineExceeded, match="while reading the model's description"):
        network.predict(rows(1), None, time.monotonic() + 0.01)
    proceed.set()
    other.join()


@pytest.mark.parametrize("fault", [NotFound("no such model"), ModelError("another network")])
def test_missing_or_other_network_is_unavailable_until_it_is_served(triton, opened, fault):
    triton.faults["describe"] = [fault]
    with pytest.raises(ModelError):
        opened()
    triton.faults["describe"] = [UNREACHABLE, fault]
    network = opened()
    with pytest.raises(Unavailable, match="retry later"):
        network.predict(rows(1))
    check_doubled(network, 2)


class LateNetwork:
    """A network whose every run exceeds its deadline; at most two runs are expected."""

    inputs, outputs = (IN,), (OUT,)
    takes_device_arrays = False

    def __init__(self) -> None:
        self.calls = 0

    def predict(self, inputs, outputs=None, deadline=None):
        self.calls += 1
        assert self.calls <= 2
        while deadline is not None and time.monotonic() < deadline:
            pass
        raise TIMED_OUT

    def runs_inline(self, batch: int) -> bool:
        return False

    def close(self) -> None:
        pass


def test_requests_fall_back_after_one_deadline_was_exceeded(opened, monkeypatch):
    monkeypatch.setattr("hps.dense.fallback._SKIP_S", 60.0)
    late = LateNetwork()
    both = FallbackModel("n", late, opened())
    with pytest.raises(DeadlineExceeded):
        both.predict(rows(1), None, time.monotonic() - 1)
    with pytest.raises(
        DeadlineExceeded
    ):  # that deadline had passed before the call: no fallback yet
        both.predict(rows(1), None, time.monotonic() + 0.01)
    check_doubled(both, 1, deadline=time.monotonic() + 60)
    assert late.calls == 2


def test_only_unavailable_runs_are_retried(triton, opened):
    network = opened(retries=1)
    triton.faults["infer"] = [UNREACHABLE]
    check_doubled(network, 1)
    assert len(triton.runs) == 2
    triton.faults["infer"] = [UNREACHABLE] * 2
    with pytest.raises(Unavailable):
        check_doubled(network, 1)
    assert len(triton.runs) == 4
    for runs, fault in enumerate((CONNECTION_LOST, TIMED_OUT), 5):
        triton.faults["infer"] = [fault]
        with pytest.raises(type(fault)):
            check_doubled(network, 1)
        assert len(triton.runs) == runs


@pytest.mark.parametrize("status", ["StatusCode.NOT_FOUND", "StatusCode.UNAVAILABLE", "400", "404"])
def test_unknown_model_error_is_translated_to_unavailable(status):
    error = InferenceServerException("Request for unknown model: 'n' is not found", status)
    assert isinstance(translate_triton_error(error), TritonUnavailable)


@pytest.mark.parametrize("status", ["StatusCode.UNAVAILABLE", "503", "400"])
def test_timeout_in_tritons_queue_is_deadline_exceeded_and_not_retried(triton, opened, status):
    error = translate_triton_error(
        InferenceServerException("in ensemble 'n', Request timeout expired", status)
    )
    assert isinstance(error, DeadlineExceeded)
    network = opened(retries=2)
    triton.faults["infer"] = [error]
    with pytest.raises(DeadlineExceeded, match="in Triton's queue"):
        check_doubled(network, 1)
    assert len(triton.runs) == 1


def test_http_call_past_its_deadline_closes_its_connection():
    with socket.create_server(("127.0.0.1", 0)) as hung:
        transport = HttpTransport(f"127.0.0.1:{hung.getsockname()[1]}", "n", "")
        for batch in (1, 1, 1 << 20):  # the deadline passes while the last one is sent
            with pytest.raises(DeadlineExceeded):
                transport.infer([("x", "FP32", rows(1, batch)["x"])], ["y"], 0.05)
        with pytest.raises(DeadlineExceeded):
            transport.describe(0.05)
        hung.settimeout(10)
        for _ in range(4):
            hung.accept()[0].close()
    transport.close()


@contextmanager
def scripted_server(*answers: bytes) -> Iterator[tuple[str, list[int]]]:
    """Run a server that sends ``answers``, one per request; an empty one closes the connection instead.

    Gives its address and the list of request counts, one per connection."""
    remaining, counts = list(answers), []

    def serve() -> None:
        while remaining:
            connection, _ = listener.accept()
            counts.append(0)
            with connection:
                while remaining and connection.recv(1 << 16):
                    counts[-1] += 1
                    if not (answer := remaining.pop(0)):
                        break
                    connection.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}", counts
        thread.join(60)


def http(body: bytes, *headers: bytes) -> bytes:
    lines = [b"HTTP/1.1 200 OK", b"Content-Length: %d" % len(body), *headers]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def test_connection_is_reused_until_the_server_closes_it():
    answers = http(b"1"), http(b"2", b"Connection: close"), http(b"3"), b"", http(b"5")
    with scripted_server(*answers) as (address, counts):
        transport = HttpTransport(address, "n", "")
        bodies = [transport._send("GET", "/", 60).body for _ in range(3)]
        with pytest.raises(TritonUnavailable):
            transport._send("GET", "/", 60)
        bodies.append(transport._send("GET", "/", 60).body)
        transport.close()
    assert bodies == [b"1", b"2", b"3", b"5"]
    assert counts == [2, 2, 1]


@pytest.mark.parametrize(
    "answer", [b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf", b"what\r\n"]
)
def test_truncated_response_is_unavailable(answer):
    with scripted_server(answer) as (address, _):
        transport = HttpTransport(address, "n", "")
        with pytest.raises(TritonUnavailable):
            transport.infer([("x", "FP32", rows(1)["x"])], ["y"], 60)
        transport.close()


def test_grpc_connection_lost_in_a_call_is_unavailable():
    """The next call opens another connection."""
    calls: list[int] = []

    class Service(GRPCInferenceServiceServicer):
        def ModelInfer(self, request, context):
            calls.append(1)
            if len(calls) == 1:
                network.cut()
            answer = pb.ModelInferResponse(model_name="n")
            answer.outputs.add(name="y", datatype="FP32", shape=[1, 2])
            answer.raw_output_contents.append(rows(2)["x"].tobytes())
            return answer

    server = grpc.server(ThreadPoolExecutor(2))
    add_GRPCInferenceServiceServicer_to_server(Service(), server)
    network = Network(server.add_insecure_port("127.0.0.1:0"))
    server.start()
    transport = GrpcTransport(network.address, "n", "", channels=1)
    try:
        with pytest.raises(TritonUnavailable):
            transport.infer([("x", "FP32", rows(1)["x"])], ["y"], 60)
        assert len(calls) == 1  # it is not sent again by itself
        outputs = _retried(lambda: transport.infer([("x", "FP32", rows(1)["x"])], ["y"], 60))
        assert outputs["y"].tolist() == [[2, 2]]
        assert len(calls) >= 2  # a try over the lost connection may have reached the server, too
    finally:
        transport.close()
        network.close()
        server.stop(None)


def _retried(call: Callable[[], Any]) -> Any:
    """Retry ``call``: the client may use the lost connection for a moment longer."""
    for _ in range(100):
        try:
            return call()
        except TritonUnavailable:
            time.sleep(0.05)
    raise AssertionError("Triton stayed unavailable")
