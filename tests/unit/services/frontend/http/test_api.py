"""Bodies of routes other than inference: bounds and timeouts."""

from __future__ import annotations

import logging

import pytest

from services.frontend.auth import Authorizer
from services.frontend.http import api
from services.frontend.http.app import admin_app, data_app

INDEX = b"POST /v2/repository/index HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n{"
PROFILE = INDEX.replace(b"/v2/repository/index", b"/v1/profile/ctr")


@pytest.mark.parametrize("head", [INDEX, PROFILE])
def test_missing_body_times_out(http, admin, monkeypatch, head):
    monkeypatch.setattr(api, "_BODY_TIMEOUT_S", 0.01)

    async def scenario():
        protocol, wire = http.connect(admin)
        await http.read(protocol, head % 10)
        await http.until(lambda: wire.statuses == [408])

    http.run(scenario)


@pytest.mark.parametrize("head", [INDEX, PROFILE])
def test_too_large_body_is_rejected_by_its_length(http, admin, head):
    async def scenario():
        protocol, wire = http.connect(admin)
        await http.read(protocol, head % (200 << 20))
        await http.until(lambda: wire.statuses == [413])

    http.run(scenario)


def test_disconnected_client_is_not_an_error(http, admin, caplog):
    caplog.set_level(logging.ERROR)

    async def scenario():
        protocol, _wire = http.connect(admin)
        await http.read(protocol, INDEX % 10)
        await http.until(lambda: protocol.tasks)
        (task,) = protocol.tasks
        protocol.connection_lost(None)
        await task

    http.run(scenario)
    assert not caplog.messages


@pytest.mark.parametrize("size", ["9" * 5000, "\u00b2", "-1", "1"])
def test_invalid_header_size_is_rejected(call, admin, error, size):
    header = {"inference-header-content-length": size.encode("latin-1")}
    reply = call(admin, "POST", "/v1/profile/words.lookup", headers=header)
    assert reply.status_code == 400
    assert "inference header size should be in range (0, 0)" in error(reply)


@pytest.mark.parametrize("guarded", [False, True])
def test_requests_of_other_sites_pages_are_rejected(call, small, key_guard, guarded):
    """A browser sends them with its user's certificate."""
    guard = key_guard if guarded else Authorizer()
    admin, data = (make(small.state, small.settings, guard) for make in (admin_app, data_app))
    key = {"x-api-key": "a" * 16}
    unload = admin, "POST", "/v2/repository/models/ctr/unload"
    infer = data, "POST", "/v2/models/words.lookup/infer"
    for request in (unload, infer):
        for origin in ("http://evil.example", "https://x:8000", "http://x.evil.example", "null"):
            assert call(*request, headers={"origin": origin, **key}).status_code == 403
        for headers in ({"origin": "http://x"}, {"origin": "HTTP://X"}, {}):
            assert call(*request, headers={**headers, **key}).status_code != 403
        for site, refused in (("same-origin", False), ("same-site", True), ("cross-site", True)):
            # The host is the name by which a proxy calls this server.
            headers = {"origin": "https://hps.example", "sec-fetch-site": site}
            answer = call(*request, headers={**headers, **key})
            assert (answer.status_code == 403) == refused
