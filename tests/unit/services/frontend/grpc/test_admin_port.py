"""gRPC's admin port: `hps.v1.Updates` and `hps.v1.Admin`."""

from typing import ClassVar

import grpc
import numpy as np
import pytest
from google.protobuf.json_format import MessageToDict
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from hps.config.server_settings import GrpcAdminSettings
from hps.errors import ConfigError, NotFound
from hps.tiers.base import FetchContext, Part
from hps.tiers.positions import TableChanges
from hps.updates.stream_positions import FedStore
from hps.v1 import admin_pb2 as pb
from services.frontend.auth import Authorizer
from services.frontend.grpc.admin_port import AdminPort
from services.frontend.state import FrontendState
from tests.support.server_thread import Running
from tests.unit.services.conftest import row


class Stub:
    """The methods of a service."""

    def __init__(self, channel, service):
        descriptor = pb.DESCRIPTOR.services_by_name[service]
        for method in descriptor.methods:
            request, response = (
                getattr(pb, kind.name) for kind in (method.input_type, method.output_type)
            )
            call = channel.unary_unary(
                f"/{descriptor.full_name}/{method.name}",
                request.SerializeToString,
                response.FromString,
            )
            setattr(self, method.name, call)


@pytest.fixture
def serve(small):
    """``serve(guard)``: a channel to a running admin port."""
    open_ones = []

    def serve(guard=None, state=None):
        at = GrpcAdminSettings(port=0)
        port = AdminPort(at, state or small.state, small.settings, guard or Authorizer())
        channel = grpc.insecure_channel(port.url)
        open_ones.append((Running(port), channel))
        return channel

    yield serve
    for running, channel in open_ones:
        channel.close()
        running.stop(force=True)
        running.join()


class KeptStore:
    """A `PositionedStore` that records the changes it gets."""

    def __init__(self, tier):
        self.tier = tier

    def applied(self, _table):
        return {}

    def versions(self, table, keys, at_least=0):
        part = Part.make(table, keys)
        self.tier.fetch([part], FetchContext())
        return part.versions

    def apply(self, table, changes: TableChanges, _positions):
        self.tier.insert(table, changes.keys, changes.vectors, changes.versions)
        self.tier.delete(table, changes.deleted, changes.deleted_versions)


@pytest.fixture
def writable(small):
    small.node.streams.write_directly(
        [FedStore("rocksdb", KeptStore(small.store), True)], small.node.writer
    )


def refused(call, *args, **kwargs):
    with pytest.raises(grpc.RpcError) as caught:
        call(*args, **kwargs)
    return caught.value.code().name, caught.value.details()


def packed(dtype, *values):
    return np.array(values, dtype).tobytes()


@pytest.mark.usefixtures("writable")
def test_rows_are_written_and_deleted_in_all_stores(serve, small):
    updates = Stub(serve(), "Updates")
    keys = packed(np.uint64, 15, 2**64 - 1)
    vectors = packed(np.float32, *range(6))
    written = updates.Write(
        pb.WriteRequest(
            model="words", table="left", keys=keys, vectors=vectors, deleted=packed(np.int64, 16)
        )
    )
    assert (written.written, written.deleted) == (2, 1)
    found = small.node.lookup("words", {"left": [15, -1, 16, 17]}, want_source=True)
    assert found.vectors["left"].tolist() == [[0, 1, 2], [3, 4, 5], [0, 0, 0], row(17, 3)]
    assert found.versions["left"][0] == written.version


@pytest.mark.usefixtures("writable")
@pytest.mark.parametrize(
    ("request_", "code", "text"),
    [
        (pb.WriteRequest(model="words", table="lift"), "NOT_FOUND", "has no table 'lift'"),
        (
            pb.WriteRequest(model="words", table="left", keys=b"123"),
            "INVALID_ARGUMENT",
            'keys of "left": 3 bytes',
        ),
        (
            pb.WriteRequest(model="words", table="left", keys=b"12345678", vectors=b"1234"),
            "INVALID_ARGUMENT",
            "table 'left' has dim 3: 1 keys need 3 values of 'vectors', not 1",
        ),
    ],
)
def test_invalid_writes_are_rejected(serve, request_, code, text):
    found = refused(Stub(serve(), "Updates").Write, request_)
    assert found[0] == code
    assert text in found[1]


class FakeStreams:
    """A node's streams that record what is requested."""

    def __init__(self):
        self.calls = []

    def pause(self, group):
        self.calls.append(("pause", group))

    def resume(self, group):
        self.calls.append(("resume", group))

    def seek(self, *to):
        self.calls.append(("seek", *to))
        if to[0] == "unread":
            raise NotFound("no partition 0 of topic 'unread' is read here")

    def status(self):
        partitions = [
            {"topic": "t", "partition": 0, "lag": 3},
            {"topic": "t", "partition": 1, "lag": None},
        ]
        return [
            {
                "group": "g",
                "source": "kafka",
                "state": "paused",
                "problem": None,
                "stores": ["rocksdb"],
                "caches": True,
                "lag": None,
                "partitions": partitions,
                "tables": [{"model": "m", "table": "t", "age_s": 1.5}],
            }
        ]


def test_streams_are_paused_resumed_and_replayed(serve, small):
    small.node.streams = streams = FakeStreams()
    updates = Stub(serve(), "Updates")
    updates.Pause(pb.Group(group="g"))
    updates.Resume(pb.Group())
    reported = updates.Seek(pb.SeekRequest(topic="t", partition=1, offset=2**40))
    assert streams.calls == [("pause", "g"), ("resume", None), ("seek", "t", 1, 2**40, None)]
    stream = reported.updates[0]
    assert (stream.group, stream.state, stream.problem) == ("g", "paused", "")
    assert not stream.HasField("lag")
    assert [p.lag for p in stream.partitions if p.HasField("lag")] == [3]
    assert [(t.model, t.table, t.age_s) for t in stream.tables] == [("m", "t", 1.5)]
    assert updates.Status(pb.UpdatesStatusRequest()) == reported
    assert refused(updates.Seek, pb.SeekRequest(topic="unread"))[0] == "NOT_FOUND"
    assert refused(updates.Seek, pb.SeekRequest()) == ("INVALID_ARGUMENT", "'topic' is missing")


def test_status_and_models_equal_those_over_http(serve, small):
    admin = Stub(serve(), "Admin")
    reported = MessageToDict(admin.Status(pb.StatusRequest()).status)
    assert reported["phase"] == "ready"
    assert [model["name"] for model in reported["models"]] == ["ctr", "words", "halves"]
    models = admin.Models(pb.ModelsRequest()).models
    assert (models[0].name, models[0].version, models[0].dense) == ("ctr", 1, True)
    table = models[0].tables[0]
    assert (table.name, table.dim, table.rows["cpu"]) == ("users", 4, 10)


def test_status_reports_loading_and_writes_are_unavailable(serve):
    channel = serve(state=FrontendState())
    assert refused(Stub(channel, "Admin").Models, pb.ModelsRequest())[0] == "UNAVAILABLE"
    reported = Stub(channel, "Admin").Status(pb.StatusRequest()).status
    assert reported["phase"] == "starting"
    health = health_pb2_grpc.HealthStub(channel)
    reported = health.Check(health_pb2.HealthCheckRequest(service="hps.v1.Admin"))
    assert reported.status == health_pb2.HealthCheckResponse.NOT_SERVING


def test_each_method_requires_its_role(serve, key_guard):
    channel = serve(key_guard)
    updates, admin = Stub(channel, "Updates"), Stub(channel, "Admin")
    write = pb.WriteRequest(model="none")
    codes = {
        (updates.Write, "read"): "PERMISSION_DENIED",
        (updates.Write, "write"): "NOT_FOUND",
        (updates.Status, "write"): "PERMISSION_DENIED",
        (updates.Pause, "write"): "PERMISSION_DENIED",
        (updates.Resume, "write"): "PERMISSION_DENIED",
        (updates.Seek, "write"): "PERMISSION_DENIED",
        (admin.Status, "write"): "PERMISSION_DENIED",
        (admin.Models, "write"): "PERMISSION_DENIED",
        (admin.LoadModel, "write"): "PERMISSION_DENIED",
        (admin.UnloadModel, "write"): "PERMISSION_DENIED",
    }
    requests = {updates.Write: write, updates.Status: pb.UpdatesStatusRequest()}
    requests |= {updates.Pause: pb.Group(), updates.Resume: pb.Group()}
    requests |= {updates.Seek: pb.SeekRequest(topic="t")}
    requests |= {admin.LoadModel: pb.LoadModelRequest()}
    requests |= {admin.UnloadModel: pb.UnloadModelRequest()}
    requests |= {admin.Status: pb.StatusRequest(), admin.Models: pb.ModelsRequest()}
    for (call, role), code in codes.items():
        key = [("x-api-key", role[0] * 16)]
        assert refused(call, requests[call], metadata=key)[0] == code
    assert refused(admin.Status, pb.StatusRequest())[0] == "UNAUTHENTICATED"
    assert admin.Status(pb.StatusRequest(), metadata=[("x-api-key", "a" * 16)]).status


def test_reflection_lists_the_services(serve):
    stub = reflection_pb2_grpc.ServerReflectionStub(serve())
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    (reported,) = stub.ServerReflectionInfo(iter([request]))
    names = {each.name for each in reported.list_services_response.service}
    assert {"hps.v1.Updates", "hps.v1.Admin", "grpc.health.v1.Health"} <= names


def test_taken_port_is_named_in_the_error(small):
    taken = AdminPort(GrpcAdminSettings(port=0), small.state, small.settings, Authorizer())
    port = int(taken.url.rsplit(":", 1)[1])
    again = GrpcAdminSettings(port=port)
    with pytest.raises(ConfigError, match=r"server\.grpc\.admin: cannot listen .*\.admin\.port"):
        AdminPort(again, small.state, small.settings, Authorizer())
    running = Running(taken)
    running.stop(force=True)
    running.join()


class FakeControl:
    """Model control that records changes."""

    loading: ClassVar = {"ctr": 2}
    warnings: ClassVar = {"other": "the CPU cache is full"}

    def __init__(self):
        self.calls = []

    def available(self):
        return {"ctr": [1, 2], "other": [1, 7]}

    def problem(self, name, version):
        return "its manifest is damaged" if (name, version) == ("other", 1) else ""

    def load(self, name, version=None):
        self.calls.append(("load", name, version))
        return version or 7

    def unload(self, name):
        self.calls.append(("unload", name))

    def rollback_loads(self, name):
        return False


def test_models_are_loaded_and_unloaded_over_grpc(serve, small):
    admin = Stub(serve(), "Admin")
    code, text = refused(admin.LoadModel, pb.LoadModelRequest(model="ctr"))
    assert (code, "gets its models from a node" in text) == ("UNIMPLEMENTED", True)
    small.node.control = control = FakeControl()
    loaded = admin.LoadModel(pb.LoadModelRequest(model="other"))
    assert (loaded.version, loaded.warning) == (7, "the CPU cache is full")
    loaded = admin.LoadModel(pb.LoadModelRequest(model="ctr", version=2))
    assert (loaded.version, loaded.warning) == (2, "")
    admin.UnloadModel(pb.UnloadModelRequest(model="ctr"))
    assert control.calls == [("load", "other", None), ("load", "ctr", 2), ("unload", "ctr")]
