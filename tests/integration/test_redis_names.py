"""Server names, resolved by a name server that hangs or changes its answer."""

import socket
import threading
import time

import numpy as np
import pytest

from hps.errors import TierError, TierTimeout
from hps.tiers.redis import RedisTier
from hps.types import EmbeddingTable, version_now
from tests.support.redis_servers import settings, shared_server
from tests.support.waiting import until

NAME = "redis.test"
TABLE = EmbeddingTable.make("user", 2, model="ctr")
KEYS = np.arange(10)


class NameServer:
    """Knows one name. ``hangs`` until it is set to False; ``at`` None: the name does not exist."""

    def __init__(self):
        self.at = "127.0.0.1"
        self.queries = 0
        self.awake = threading.Event()
        self.awake.set()
        self._system = socket.getaddrinfo

    def getaddrinfo(self, host, *args, **kwargs):
        if host != NAME:
            return self._system(host, *args, **kwargs)
        self.queries += 1
        self.awake.wait(60)
        if self.at is None:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return self._system(self.at, *args, **kwargs)


@pytest.fixture
def names(monkeypatch):
    made = NameServer()
    monkeypatch.setattr(socket, "getaddrinfo", made.getaddrinfo)
    yield made
    made.awake.set()


@pytest.fixture
def server():
    return shared_server()


@pytest.fixture
def tier(server):
    made = RedisTier(settings(server, addresses=[f"{NAME}:{server.port}"]))
    yield made
    start = time.monotonic()
    made.close()
    assert time.monotonic() - start < 10


def fill(tier):
    tier.insert(TABLE, KEYS, np.ones((10, 2), np.float32), np.full(10, version_now(), np.uint64))


def hang_up(server):
    server.ask("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")


def test_hanging_resolution_ends_at_deadline(names, server):
    """All callers share one thread."""
    tier = RedisTier(settings(server, addresses=[f"{NAME}:{server.port}"], timeout_ms=300))
    names.awake.clear()
    before = threading.active_count()
    for _ in range(5):
        start = time.monotonic()
        with pytest.raises(TierTimeout, match=f"the name '{NAME}' was not resolved in time"):
            tier.get(TABLE, KEYS)
        assert time.monotonic() - start < 10
    assert names.queries == 1
    assert threading.active_count() <= before + 2
    names.awake.set()
    until(lambda: filled(tier))
    tier.close()


def test_known_address_is_used_while_resolution_hangs(names, tier, server, monkeypatch):
    fill(tier)
    monkeypatch.setattr("hps.tiers.redis.host_resolver._FRESH_S", 0.0)
    names.awake.clear()
    for _ in range(3):
        hang_up(server)
        start = time.monotonic()
        assert len(tier.get(TABLE, KEYS).missing) == 0
        assert time.monotonic() - start < 10
    assert names.queries == 2


def test_changed_address_is_found(names, tier, server):
    """The known address has not expired yet."""
    names.at = "127.0.0.3"  # nobody there: the server listens on 127.0.0.1 alone
    with pytest.raises(TierError):
        fill(tier)
    names.at = "127.0.0.1"
    until(lambda: filled(tier))


def filled(tier):
    try:
        fill(tier)
    except TierError:
        return False
    return True


def test_unknown_name_fails_immediately(names, tier):
    names.at = None
    with pytest.raises(
        TierError, match=rf"{NAME}:\d+ cannot be reached .*Name or service not known"
    ):
        tier.get(TABLE, KEYS)
    names.at = "127.0.0.1"
    fill(tier)
