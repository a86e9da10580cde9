"""A cluster moves slots, as ``redis-cli --cluster reshard`` does it, while rows are read and written."""

import itertools
import subprocess
import threading
import time
from collections import Counter

import numpy as np
import pytest
from redis.exceptions import AskError, MovedError, NoScriptError, TryAgainError

from hps.tiers.base import FetchContext, Part
from hps.tiers.positions import StreamPosition, TableChanges
from hps.tiers.redis import RedisTier
from hps.tiers.redis.client import RedisClient
from hps.types import EmbeddingTable, make_version
from tests.support.redis_servers import need, shared_cluster
from tests.support.waiting import until

DIM = 4
N = 3000
PARTITIONS = 512  # so that some are in any few hundred slots
SLOTS = 300
NOTHING = np.empty(0, np.int64)


@pytest.fixture
def cluster():
    need("redis-cli")
    return shared_cluster()


@pytest.fixture
def table():
    return EmbeddingTable.make("user", DIM, model="ctr")


def reshard(cluster, source, target):
    """Move key by key, so that a partition's hashes are on two servers for some time."""
    node = [each.ask("CLUSTER", "MYID").decode() for each in (source, target)]
    tls = ["--tls", "--cacert", cluster.tls.ca, "--cert", cluster.tls.certificate, "--key",
           cluster.tls.key]  # fmt: skip
    command = ["redis-cli", *tls, "--cluster", "reshard", source.address, "--cluster-from", node[0],
               "--cluster-to", node[1], "--cluster-slots", SLOTS, "--cluster-yes",
               "--cluster-pipeline", 1]  # fmt: skip
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout[-500:] + done.stderr


class Writing:
    """Writes all rows again and again, the ``turn``-th time with that number; every other time as a stream
    does.

    ``turn`` is the last one that was acknowledged."""

    def __init__(self, tier, table):
        self.tier, self.table, self.keys = tier, table, np.arange(N)
        self.turn, self.born = 0, int(time.time() * 1000)
        self.write(1)

    def write(self, turn):
        rows = np.full((N, DIM), turn, np.float32)
        versions = np.full(N, make_version(self.born) + turn, np.uint64)
        if turn % 2:
            self.tier.insert(self.table, self.keys, rows, versions)
        else:
            none = NOTHING.astype(np.uint64)
            changes = TableChanges(self.keys, rows, versions, NOTHING, none)
            self.tier.apply(self.table, changes, [StreamPosition("rows", 0, turn)])
        self.turn = turn

    def read(self, tier):
        """Check that every row is present and whole, and not older than the last acknowledged one."""
        least = self.turn
        part = Part.make(self.table, self.keys)
        ctx = FetchContext(deadline=time.monotonic() + 60)
        tier.fetch([part], ctx)
        assert not ctx.degraded
        assert not len(part.missing)
        assert (part.out == part.out[:, :1]).all()
        assert (part.out[:, 0] >= least).all()
        assert (part.out[:, 0] <= self.turn + 1).all()
        turns = part.out[:, 0].astype(np.uint64)
        np.testing.assert_array_equal(part.versions, np.uint64(make_version(self.born)) + turns)


def test_slots_move_while_rows_are_read_and_written(cluster, table, monkeypatch):
    met = Counter()
    learn = RedisClient._update_topology

    def note(self, failed, deadline):
        met.update(type(command.reply) for command in failed)
        learn(self, failed, deadline)

    monkeypatch.setattr(RedisClient, "_update_topology", note)
    given = {"partitions": PARTITIONS, "overflow_margin": N, "overflow_policy": "oldest"}
    tiers = [RedisTier(cluster.settings(**given)) for _ in range(2)]
    writing = Writing(tiers[0], table)
    stop, failures, reads = threading.Event(), [], []

    def work(step):
        try:
            while not stop.is_set():
                step()
        except BaseException as error:
            failures.append(error)

    def read():
        writing.read(tiers[1])
        reads.append(writing.turn)

    threads = [threading.Thread(target=work, args=(read,))]
    threads.append(threading.Thread(target=work, args=(lambda: writing.write(writing.turn + 1),)))
    for thread in threads:
        thread.start()
    try:
        first, second = cluster.servers[:2]
        until(lambda: reads or failures)
        before = reads[-1]
        for turn in itertools.count(1):
            for source, target in ((first, second), (second, first)):
                reshard(cluster, source, target)
            if failures or reads[-1] > before + 5:
                break
            assert turn < 20, "hardly anything is read meanwhile"
        after = len(reads)
        until(lambda: len(reads) > after + 3 or failures)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not failures
    assert met[MovedError]
    assert set(met) <= {MovedError, AskError, TryAgainError, NoScriptError}
    moved = tiers[0]._client._topology
    assert moved.addresses() == {("127.0.0.1", each.port) for each in cluster.servers[:3]}
    fresh = RedisTier(cluster.settings(**given))
    for tier in (*tiers, fresh):
        writing.read(tier)
    assert fresh.applied(table, "rows", 0) == writing.turn - writing.turn % 2
    for tier in (*tiers, fresh):
        tier.close()
    until(cluster.complete)
