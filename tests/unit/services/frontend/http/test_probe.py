"""The probe of uvicorn's private protocol, and the choice of a port's connections."""

from __future__ import annotations

import pytest

from services.frontend.http.protocol import probe
from services.frontend.http.protocol.connection import HttpProtocol
from services.frontend.http.protocol.cycle import HttpCycle
from services.frontend.http.server import HttpPortOptions, port_config
from services.frontend.http.uvicorn_connection import UvicornEvents


@pytest.fixture
def fresh_probe(monkeypatch):
    """The probe without its cached result."""
    monkeypatch.setattr(probe, "is_supported", probe.is_supported.__wrapped__)
    monkeypatch.setattr(probe, "_TIMEOUT_S", 0.5)
    return probe


def test_probe_accepts_installed_uvicorn(fresh_probe, caplog):
    assert fresh_probe.is_supported()
    assert not caplog.records


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (HttpProtocol, "_take_known"),
        (HttpProtocol, "on_message_complete"),
        (HttpProtocol, "write_reply"),
        (HttpProtocol, "_learn"),
        (HttpProtocol, "_send_refusal"),
        (HttpCycle, "finish"),
    ],
)
@pytest.mark.parametrize("raises", [False, True])
def test_probe_rejects_uvicorn_whose_internals_fail(
    fresh_probe, monkeypatch, caplog, owner, name, raises
):
    def fail(*_, **_only):
        if raises:
            raise AttributeError(name)

    monkeypatch.setattr(owner, name, fail)
    assert not fresh_probe.is_supported()
    (record,) = [each for each in caplog.records if each.name == probe.__name__]
    assert record.levelname == "WARNING"
    assert "unsupported uvicorn" in record.message
    assert "using uvicorn's public interface" in record.message


def test_unsupported_uvicorn_serves_by_its_public_interface(data, monkeypatch):
    monkeypatch.setattr(probe, "is_supported", lambda: False)
    config = port_config(data, HttpPortOptions(60))
    assert issubclass(config.http_protocol_class, UvicornEvents)


def test_setting_chooses_public_interface_without_a_probe(data, monkeypatch):
    monkeypatch.setattr(probe, "is_supported", lambda: 1 / 0)
    config = port_config(data, HttpPortOptions(60, protocol="uvicorn"))
    assert issubclass(config.http_protocol_class, UvicornEvents)


def test_supported_uvicorn_serves_by_its_private_protocol(data):
    config = port_config(data, HttpPortOptions(60))
    config.load()
    assert issubclass(config.http_protocol_class, HttpProtocol)
