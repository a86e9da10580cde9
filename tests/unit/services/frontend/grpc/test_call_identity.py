"""Clients whose requests are counted."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from hps.config.admission_settings import ClientSettings
from hps.errors import Unavailable
from services.frontend.admission.client_limits import ClientLimits
from services.frontend.grpc.call_identity import CountedResponder


def test_an_answer_that_cannot_be_sent_and_is_told_as_a_failure_is_one_request():
    told = []

    def answer(_message):
        raise RuntimeError("can't start new thread")

    clients = ClientLimits(ClientSettings(running=1))
    reply = SimpleNamespace(context=None, caller="me", answer=answer, fail=told.append)
    counted = CountedResponder(reply, clients, "me")
    with pytest.raises(RuntimeError):
        counted.answer(b"")
    counted.fail(Unavailable("not sent"))
    assert len(told) == 1
    assert clients._known["me"].running == 0
