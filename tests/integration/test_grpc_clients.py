"""Our own gRPC clients, for threads and for asyncio, ask a real server."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest

from hps.client import AsyncGrpcClient, Client, GrpcClient
from hps.client.calls import Patience
from hps.client.errors import Unreachable
from hps.errors import BadRequest, DeadlineExceeded, NotFound, Unavailable

FEATURES = {"user": [3, 200], "item": [4, -5], "history": [[1, 2], [3, 4]]}
DENSE = {"dense": [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]}


class Blocking:
    """The asyncio client, one call at a time."""

    def __init__(self, *args, **options):
        self._given = args, options

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def __getattr__(self, name):
        def call(*args, **options):
            async def once():
                given, settings = self._given
                async with AsyncGrpcClient(*given, **settings) as client:
                    return await getattr(client, name)(*args, **options)

            return asyncio.run(once())

        return call


KINDS = {"threads": GrpcClient, "asyncio": Blocking}


@pytest.fixture(params=KINDS)
def kind(request):
    return KINDS[request.param]


@pytest.fixture
def both(kind, small_server):
    with kind(small_server.grpc) as ours, Client(f"http://{small_server.address}") as rest:
        yield SimpleNamespace(ours=ours, rest=rest)


def test_answers_are_those_of_rest(both):
    ours = both.ours.predict("clicks", FEATURES, DENSE)
    theirs = both.rest.predict("clicks", FEATURES, DENSE)
    assert ours.outputs.keys() == theirs.outputs.keys()
    for name, values in theirs.outputs.items():
        assert ours.outputs[name].tobytes() == values.tobytes()
    assert ours.defaulted == theirs.defaulted == 1
    best = both.ours.predict("clicks", FEATURES, DENSE, top_k=1)
    assert best.outputs["top_k_index"].shape == (1,)
    rows = both.ours.lookup("clicks", FEATURES, want_source=True)
    again = both.rest.lookup("clicks", FEATURES, want_source=True)
    for name, vectors in again.vectors.items():
        assert rows.vectors[name].tobytes() == vectors.tobytes()
    # The first of the two may have found rows in a store that the second found in memory.
    assert rows.sources.keys() == again.sources.keys() == FEATURES.keys()
    raw = both.ours.infer("words.lookup", {"word": np.array([[7]])}, outputs=["word"])
    assert raw.outputs["word"][0, 0] == 7
    assert raw.parameters["hps_degraded"] == ""
    assert both.ours.ready()


def test_failures_are_ours(both):
    with pytest.raises(NotFound, match="'none' is not found"):
        both.ours.predict("none", FEATURES)
    with pytest.raises(BadRequest, match="did you mean 'user'"):
        both.ours.lookup("clicks", {"usr": [1]})
    with pytest.raises(BadRequest, match="keys must be integers"):
        both.ours.lookup("clicks", {"user": ["a"]})


def test_nobody_there(kind):
    with kind("127.0.0.1:1", timeout_s=5, retries=2) as client:
        for ask in (client.ready, lambda: client.lookup("m", {"f": [1]})):
            with pytest.raises((Unreachable, DeadlineExceeded)):
                ask()


def test_only_a_server_that_was_not_available_is_asked_again():
    patience = Patience(60, 2)
    assert 0 < patience.pause_s(Unavailable("")) < 0.1
    assert 0.05 <= patience.pause_s(Unavailable("")) < 0.2
    with pytest.raises(Unavailable):
        patience.pause_s(Unavailable(""))
    with pytest.raises(BadRequest):
        Patience(60, 2).pause_s(BadRequest(""))
    with pytest.raises(Unavailable):  # no time for another
        Patience(0.001, 2).pause_s(Unavailable(""))
