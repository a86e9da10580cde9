"""Several requests to one server: beside each other, an error told to its caller."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future

import pytest

from hps.client import Client
from hps.client.pool import ClientPool
from hps.errors import BadRequest

WAIT_S = 20.0


@pytest.fixture
def client() -> Iterator[Client]:
    with Client("http://127.0.0.1:1") as made:
        yield made


def test_requests_are_under_way_at_the_same_time(client: Client) -> None:
    together = threading.Barrier(3)

    def work(given: Client) -> Client:
        together.wait(WAIT_S)
        return given

    with ClientPool(client, 3) as pool:
        done = [pool.submit(work) for _ in range(6)]
        assert all(future.result(WAIT_S) is client for future in done)


def test_an_error_belongs_to_its_request(client: Client) -> None:
    def fail(_client: Client) -> None:
        raise BadRequest("not so")

    with ClientPool(client, 1) as pool:
        bad, good = pool.submit(fail), pool.submit(lambda _client: 5)
        with pytest.raises(BadRequest, match="not so"):
            bad.result(WAIT_S)
        assert good.result(WAIT_S) == 5


def test_what_nobody_began_is_given_up_at_the_end(client: Client) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def work(_client: Client) -> int:
        begun.set()
        assert go_on.wait(WAIT_S)
        return 1

    futures: list[Future[int]] = []

    def interrupted() -> None:
        with ClientPool(client, 1) as pool:
            futures.extend(pool.submit(work) for _ in range(2))
            assert begun.wait(WAIT_S)
            raise KeyboardInterrupt  # leaves without waiting for the answer

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    running, waiting = futures
    assert waiting.cancelled()
    assert not running.done()
    go_on.set()
    assert running.result(WAIT_S) == 1
