"""Callers of gRPC calls: their addresses, and the count of their requests."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from hps.config.admission_settings import ClientSettings
from hps.errors import Unavailable
from services.frontend.admission.client_limits import ClientLimits
from services.frontend.errors import TooManyRequests
from services.frontend.grpc.call_identity import CountedResponder, address_of


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("ipv4:10.0.0.7:5555", "10.0.0.7"),
        ("ipv6:%5B::1%5D:5555", "::1"),
        ("ipv6:%5Bfe80::2%25eth0%5D:5555", "fe80::2%eth0"),
        ("ipv6:[::1]:5555", "::1"),
    ],
)
def test_address_has_the_form_that_http_uses(peer, address):
    assert address_of(SimpleNamespace(peer=lambda: peer)) == address


def test_request_ends_once_if_its_answer_cannot_be_sent_and_it_fails():
    failures = []

    def answer(_message):
        raise RuntimeError("can't start new thread")

    clients = ClientLimits(ClientSettings(running=1))
    reply = SimpleNamespace(context=None, caller="me", answer=answer, fail=failures.append)
    counted = CountedResponder(reply, clients, "me")
    with pytest.raises(RuntimeError):
        counted.answer(b"")
    counted.fail(Unavailable("not sent"))
    assert len(failures) == 1
    clients.enter("me")
    with pytest.raises(TooManyRequests):
        clients.enter("me")
