"""Several clients of one server: beside each other, each closed, an error told to its caller."""

from __future__ import annotations

import threading
from concurrent.futures import Future

import pytest

from hps.client import Client
from hps.client.pool import ClientPool
from hps.errors import BadRequest

WAIT_S = 20.0


class Counted(Client):
    """Notes which thread made it and whether it was closed."""

    made: list[Counted]

    def __init__(self) -> None:
        super().__init__("http://127.0.0.1:1")
        self.thread = threading.current_thread()
        self.closed = False
        self.made.append(self)

    def close(self) -> None:
        assert threading.current_thread() is self.thread
        self.closed = True
        super().close()


@pytest.fixture(autouse=True)
def made() -> list[Counted]:
    Counted.made = []
    return Counted.made


def test_requests_are_under_way_at_the_same_time(made: list[Counted]) -> None:
    together = threading.Barrier(3)

    def work(client: Client) -> tuple[Client, threading.Thread]:
        together.wait(WAIT_S)
        return client, threading.current_thread()

    with ClientPool(Counted, 3) as pool:
        done = [pool.submit(work) for _ in range(6)]
        results = [future.result(WAIT_S) for future in done]
    for client, thread in results:
        assert isinstance(client, Counted)
        assert client.thread is thread
    assert len(made) == 3
    assert all(client.closed for client in made)


def test_an_error_belongs_to_its_request() -> None:
    def fail(_client: Client) -> None:
        raise BadRequest("not so")

    with ClientPool(Counted, 1) as pool:
        bad, good = pool.submit(fail), pool.submit(lambda _client: 5)
        with pytest.raises(BadRequest, match="not so"):
            bad.result(WAIT_S)
        assert good.result(WAIT_S) == 5


def test_what_nobody_began_is_given_up_at_the_end(made: list[Counted]) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def work(_client: Client) -> int:
        begun.set()
        assert go_on.wait(WAIT_S)
        return 1

    futures: list[Future[int]] = []

    def interrupted() -> None:
        with ClientPool(Counted, 1) as pool:
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
    made[0].thread.join(WAIT_S)
    assert made[0].closed
