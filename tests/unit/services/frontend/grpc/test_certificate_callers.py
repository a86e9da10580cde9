"""Callers identified by their certificates, over real TLS."""

import os
from pathlib import Path

import grpc
import pytest
import yaml

from hps.config import auth as auth_module
from hps.config.server_settings import GrpcAdminSettings
from hps.v1 import admin_pb2, lookup_pb2
from services.frontend.grpc.admin_port import AdminPort
from tests.support.server_thread import Running
from tests.support.waiting import until
from tests.unit.services.frontend.conftest import CALLERS
from tests.unit.services.frontend.grpc.conftest import running
from tests.unit.services.frontend.grpc.test_admin_port import Stub, refused

KEY = [("x-api-key", "s" * 16)]


@pytest.fixture
def connect(certificates):
    """``connect(url, who)``: a channel with the certificate of ``who``."""
    channels = []

    def connect(url, who):
        read = [Path(path).read_bytes() for path in (certificates["ca"][1], *certificates[who])]
        credentials = grpc.ssl_channel_credentials(*read)
        channels.append(grpc.secure_channel(f"localhost:{url.rpartition(':')[2]}", credentials))
        return channels[-1]

    yield connect
    for channel in channels:
        channel.close()


@pytest.fixture
def admin(small, by_certificate, tls):
    at = GrpcAdminSettings(port=0, tls=tls)
    server = Running(AdminPort(at, small.state, small.settings, by_certificate))
    yield server.server.url
    server.stop(force=True)
    server.join()


def asks(channel, **options):
    """The status of one call for each role."""
    updates, admin = Stub(channel, "Updates"), Stub(channel, "Admin")
    write = refused(updates.Write, admin_pb2.WriteRequest(model="none"), **options)[0]
    try:
        admin.Status(admin_pb2.StatusRequest(), **options)
    except grpc.RpcError as error:
        return write, error.code().name
    return write, "OK"


@pytest.mark.parametrize(
    ("who", "found"),
    [
        ("front", ("PERMISSION_DENIED", "PERMISSION_DENIED")),
        ("trainer", ("NOT_FOUND", "PERMISSION_DENIED")),
        ("operator", ("NOT_FOUND", "OK")),
        ("both", ("NOT_FOUND", "PERMISSION_DENIED")),
        ("liar", ("UNAUTHENTICATED", "UNAUTHENTICATED")),
    ],
)
def test_certificate_determines_the_role(admin, connect, who, found):
    assert asks(connect(admin, who)) == found


def test_api_key_takes_precedence_over_certificate(admin, connect):
    assert asks(connect(admin, "front"), metadata=KEY) == ("NOT_FOUND", "OK")
    assert asks(connect(admin, "liar"), metadata=KEY) == ("NOT_FOUND", "OK")
    wrong = [("x-api-key", "w" * 16)]
    assert asks(connect(admin, "operator"), metadata=wrong)[1] == "UNAUTHENTICATED"


def test_errors_name_the_caller(admin, connect):
    status = admin_pb2.StatusRequest()
    reported = refused(Stub(connect(admin, "front"), "Admin").Status, status)[1]
    assert reported == "certificate of 'front' has role read; this needs role admin"
    reported = refused(Stub(connect(admin, "liar"), "Admin").Status, status)[1]
    assert "unknown certificate, with the names CN=liar" in reported


def test_data_port_requires_a_known_certificate(small, by_certificate, tls, connect):
    with running(small, by_certificate, grpc={"tls": tls}) as server:
        request = lookup_pb2.DescribeRequest(model="words")

        def describe(who):
            call = connect(server.server.url, who).unary_unary(
                "/hps.v1.Lookup/Describe",
                lookup_pb2.DescribeRequest.SerializeToString,
                lookup_pb2.DescribeResponse.FromString,
            )
            return call(request).version

        assert describe("front") == 1
        with pytest.raises(grpc.RpcError, match="unknown certificate"):
            describe("liar")


def test_reloaded_keys_file_changes_roles(admin, connect, keys_file, monkeypatch):
    monkeypatch.setattr(auth_module, "CHECK_EVERY_S", 0.01)
    channel = connect(admin, "front")
    assert asks(channel)[1] == "PERMISSION_DENIED"
    changed = [{**caller, "role": "admin"} for caller in CALLERS]
    other = keys_file.with_suffix(".new")
    other.write_text(yaml.safe_dump(changed))
    os.replace(other, keys_file)
    until(lambda: asks(channel)[1] == "OK")
