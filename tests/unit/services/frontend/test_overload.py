"""Overload and client limits over each protocol."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.support.waiting import until
from tests.unit.services.frontend.conftest import load, rejections
from tests.unit.services.frontend.protocol_clients import Reply, grpc_client, http_client

OK = Reply(200)


@pytest.fixture(params=[http_client, grpc_client], ids=["http", "grpc"])
def start(request: pytest.FixtureRequest, small: Any, limit: Any) -> Iterator[Callable[..., Any]]:
    """``start(guard, **settings)``: the client of a server with these admission settings."""
    with ExitStack() as stack:

        def start(guard: Any = None, **settings: Any) -> Any:
            limit(**settings)
            return stack.enter_context(request.param(small, guard))

        yield start


def test_queue_rejects_when_full_and_other_models_answer(small, slow, start):
    client = start()
    admitted = [client.send() for _ in range(5)]
    until(lambda: load(small) == (2, 3))
    # All of this while not one prediction has ended.
    for reply in [each.reply() for each in [client.send() for _ in range(80)]]:
        assert (reply.status, reply.retry_after_s) == (503, 1)
        assert "Exceeds maximum queue size" in reply.error
    assert load(small) == (2, 3)
    assert client.is_ready()
    assert client.send("words.lookup").reply() == OK
    slow.leave.set()
    assert [each.reply() for each in admitted] == [OK] * 5
    until(lambda: load(small) == (0, 0))
    assert slow.runs == 5
    assert rejections(small) == {"queue_full": 80}


def test_queue_is_shared_by_all_ports(small, slow, limit):
    limit()
    with grpc_client(small) as grpc, http_client(small) as http:
        admitted = [client.send() for client in (grpc, grpc, grpc, http, http)]
        until(lambda: load(small) == (2, 3))
        for client in (grpc, http):
            reply = client.send().reply()
            assert (reply.status, reply.retry_after_s) == (503, 1)
            assert "Exceeds maximum queue size" in reply.error
            assert client.is_ready()
        slow.leave.set()
        assert [each.reply() for each in admitted] == [OK] * 5
    assert rejections(small) == {"queue_full": 2}


def test_queued_request_is_dropped_when_its_client_cancels(small, slow, start):
    client = start()
    admitted = [client.send() for _ in range(2)]
    until(lambda: load(small) == (2, 0))
    cancelled, stays = client.send(), client.send()
    until(lambda: load(small) == (2, 2))
    cancelled.cancel()
    until(lambda: load(small) == (2, 1))
    slow.leave.set()
    assert [each.reply() for each in (*admitted, stays)] == [OK] * 3
    assert slow.runs == 3


def test_timeout_parameter_includes_time_in_queue(small, slow, start):
    client = start()
    admitted = [client.send() for _ in range(2)]
    until(lambda: load(small) == (2, 0))
    assert client.send(timeout_us=50_000).reply().status == 504
    until(lambda: load(small) == (2, 0))
    slow.leave.set()
    assert [each.reply() for each in admitted] == [OK] * 2
    assert slow.runs == 2


def test_queued_request_is_rejected_after_maximum_wait(small, slow, start):
    client = start(running=1, max_wait_ms=10)
    admitted = client.send()
    until(lambda: load(small) == (1, 0))
    reply = client.send().reply()
    assert (reply.status, "has waited for 10 ms" in reply.error) == (503, True)
    assert rejections(small) == {"queue_wait": 1}
    slow.leave.set()
    assert admitted.reply() == OK


def test_client_limit_rejects_concurrent_requests_of_one_key(small, slow, start, key_guard):
    client = start(key_guard, running=8, client={"running": 2})
    reader, writer = "r" * 16, "w" * 16
    admitted = [client.send(key=reader) for _ in range(2)]
    until(lambda: load(small) == (2, 0))
    rejected = client.send(key=reader).reply()
    assert (rejected.status, rejected.retry_after_s) == (429, 1)
    admitted.append(client.send(key=writer))
    until(lambda: load(small) == (3, 0))
    slow.leave.set()
    assert [each.reply() for each in admitted] == [OK] * 3
    assert [client.send(key=reader).reply() for _ in range(3)] == [OK] * 3
    assert rejections(small) == {"client_running": 1}


def test_rate_limit_identifies_clients_without_keys_by_address(small, start):
    client = start(client={"per_second": 1e-3, "burst": 3})
    statuses = [client.send("words.lookup").reply().status for _ in range(4)]
    assert statuses == [200, 200, 200, 429]
    assert rejections(small) == {"client_rate": 1}


@pytest.mark.parametrize("queue", [{"queue": 0}, {"max_wait_ms": 1}], ids=["at once", "queued"])
def test_requests_rejected_for_overload_do_not_count_against_rate_limit(small, slow, start, queue):
    client = start(running=1, client={"per_second": 1e-3, "burst": 2}, **queue)
    admitted = client.send()
    until(lambda: load(small) == (1, 0))
    assert [client.send().reply().status for _ in range(5)] == [503] * 5
    slow.leave.set()
    assert admitted.reply() == OK
    assert [client.send().reply().status for _ in range(2)] == [200, 429]


def test_invalid_request_releases_its_slot_and_counts_once(small, slow, start):
    client = start(queue=0, client={"running": 1})
    for _ in range(3):
        assert [each.reply().status for each in client.send_invalid()] == [400, 400]
    admitted = client.send()
    until(lambda: load(small) == (1, 0))
    assert client.send().reply().status == 429
    slow.leave.set()
    assert admitted.reply() == OK
