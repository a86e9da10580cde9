"""Our clients, for threads and asyncio, over REST and gRPC: all get the same answers."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest

from hps.client import AsyncClient, Client
from hps.errors import BadRequest, DeadlineExceeded, NotFound, Unavailable

FEATURES = {"user": [3, 200], "item": [4, -5], "history": [[1, 2], [3, 4]]}
DENSE = {"dense": [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]}


class Blocking:
    """The asyncio client, one call at a time, all on one loop."""

    def __init__(self, *args, **options):
        self._loop = asyncio.new_event_loop()
        self._client = AsyncClient(*args, **options)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._loop.run_until_complete(self._client.close())
        self._loop.close()

    def __getattr__(self, name):
        method = getattr(self._client, name)
        return lambda *args, **options: self._loop.run_until_complete(method(*args, **options))


@pytest.fixture(params=[Client, Blocking], ids=["threads", "asyncio"])
def kind(request):
    return request.param


@pytest.fixture(params=["http", "grpc"])
def scheme(request):
    return request.param


@pytest.fixture
def ours(kind, scheme, small_server):
    at = {"http": small_server.address, "grpc": small_server.grpc}[scheme]
    with kind(f"{scheme}://{at}") as client:
        yield client


@pytest.fixture
def plain(small_server):
    with Client(small_server.address) as client:
        yield client


def test_all_clients_give_the_same_answers(ours, plain):
    theirs = plain.predict("clicks", FEATURES, DENSE)
    mine = ours.predict("clicks", FEATURES, DENSE, want_source=True, request_id="p1")
    assert list(mine.outputs) == list(theirs.outputs) == ["score", "logit"]
    for name, values in theirs.outputs.items():
        assert mine.outputs[name].tobytes() == values.tobytes()
    assert mine.sources.keys() == FEATURES.keys()
    assert mine.defaulted == theirs.defaulted == 1
    best = ours.predict("clicks", FEATURES | {"user": [3]}, DENSE, top_k=1, timeout_s=20)
    assert best.outputs["top_k_index"].shape == (1,)
    rows = ours.lookup("clicks", FEATURES, want_source=True)
    again = plain.lookup("clicks", FEATURES, want_source=True)
    for name, vectors in again.vectors.items():
        assert rows.vectors[name].tobytes() == vectors.tobytes()
        assert rows.sources[name].tolist() == again.sources[name].tolist()
    raw = ours.infer("words.lookup", {"word": np.array([[7]])}, outputs=["word"])
    assert raw.outputs["word"][0, 0] == 7
    raw.outputs["word"][0, 0] = 8  # the array is its receiver's
    assert raw.parameters["hps_degraded"] == ""
    nothing = ours.lookup("words", {"word": np.empty((0, 1), np.int64)})
    assert nothing.vectors["word"].shape == (0, 8)
    assert ours.metadata("words.lookup")["inputs"] == plain.metadata("words.lookup")["inputs"]
    assert ours.config("clicks")["max_batch_size"] == 64
    assert ours.ready()


def test_failures_are_hps_errors(ours):
    with pytest.raises(NotFound, match="'none' is not found"):
        ours.predict("none", FEATURES)
    with pytest.raises(BadRequest, match="did you mean 'user'"):
        ours.lookup("clicks", {"usr": [1]})
    with pytest.raises(BadRequest, match="keys must be integers"):
        ours.lookup("clicks", {"user": ["a"]})
    with pytest.raises(DeadlineExceeded):
        ours.lookup("clicks", FEATURES, timeout_s=1e-7)


def test_missing_server_raises_unavailable(kind, scheme):
    with kind(f"{scheme}://127.0.0.1:1", timeout_s=5, retries=1) as client:
        for ask in (client.ready, lambda: client.lookup("m", {"f": [1]})):
            with pytest.raises(Unavailable, match=r"127\.0\.0\.1:1"):
                ask()


def test_threads_may_share_a_client(scheme, small_server):
    at = {"http": small_server.address, "grpc": small_server.grpc}[scheme]
    wrong = []

    def ask(first):
        for word in range(first, first + 50):
            found = client.lookup("words", {"word": [word]}).vectors["word"]
            if found[0, 0] != word:
                wrong.append(word)

    with Client(f"{scheme}://{at}") as client:
        threads = [threading.Thread(target=ask, args=(100 * i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong
