"""Fetches from a split table, on arrays of the host: arguments of the launches, order of the work, results.

Kernels are replaced by their twins, which read and write memory at the addresses in their arguments."""

import ctypes
from types import SimpleNamespace

import numpy as np
import pytest

from hps.cuda import fetch as fetch_module
from hps.cuda import launch, split_fetch
from hps.cuda.fetch import DirectFetch
from hps.cuda.layout import NO_ROW, ROOMY_LOAD, TOMBSTONE, plan_table_shape
from hps.cuda.owners import MOST_OWNERS, owner_of, partition
from hps.cuda.split_fetch import SplitFetch, TableShard
from hps.cuda.twin import TwinTable
from hps.types import EmbeddingTable
from tests.support.rows import distinct_rows

TABLE = EmbeddingTable.make("t", 4)


class Array(np.ndarray):
    """A device's array."""

    @property
    def data(self):
        return SimpleNamespace(ptr=self.ctypes.data, memset_async=self._fill)

    def _fill(self, value, nbytes, stream):
        assert nbytes == self.nbytes
        self[...] = value

    def get(self, stream=None):
        return np.array(self)


def at(address, shape, dtype):
    """The array at ``address``."""
    count = int(np.prod(shape))
    raw = (ctypes.c_uint8 * (count * np.dtype(dtype).itemsize)).from_address(int(address))
    return np.frombuffer(raw, dtype).reshape(shape)


class Host:
    """CuPy on the host, and the devices of a table with an array on each: what happened, in order."""

    def __init__(self, monkeypatch, devices):
        self.log, self.inside, self.twins = [], [], {}
        self.cuda = SimpleNamespace(get_current_stream=self.stream, Event=self.event)
        monkeypatch.setattr(split_fetch, "cupy", lambda: self)
        monkeypatch.setattr(split_fetch, "kernel", self.kernel)
        monkeypatch.setattr(fetch_module, "cupy", lambda: self)
        monkeypatch.setattr(
            DirectFetch, "_kernels_for", lambda *_: SimpleNamespace(launch=self.fetch)
        )
        self.shape = plan_table_shape(TABLE, 2000, load=ROOMY_LOAD)
        self.shards = [self.shard(device) for device in devices]

    def shard(self, number):
        twin = TwinTable(self.shape, TABLE.dim)
        self.twins[twin.keys.ctypes.data] = twin
        table = SimpleNamespace(
            table=TABLE,
            shape=self.shape,
            pointers=(twin.keys.ctypes.data, 0, 0, 0),
            sizes=(self.shape.buckets, self.shape.stride, TABLE.row_bytes, self.shape.rows),
            clock=SimpleNamespace(now=1, stamping=0),
            code=1,
        )
        readers = SimpleNamespace(run=lambda stream, launch: launch())
        host = self

        class Device:
            id = number

            def __enter__(self):
                host.inside.append(number)

            def __exit__(self, *_error):
                host.inside.pop()

        return TableShard(Device(), table, DirectFetch(readers))

    # -- CuPy ----------------------------------------------------------------------------------

    def empty(self, shape, dtype):
        array = np.empty(shape, dtype)
        array.view(np.uint8)[...] = 0x5A
        return array.view(Array)

    def zeros(self, shape, dtype):
        return np.zeros(shape, dtype).view(Array)

    def event(self, disable_timing):
        host = self

        class Event:
            def record(self, stream):
                self.of = stream.device
                host.log.append(("record", stream.device))

        return Event()

    def stream(self):
        device, log = self.inside[-1], self.log

        def wait(event):
            log.append(("wait", device, event.of))

        return SimpleNamespace(device=device, ptr=device, wait_event=wait)

    # -- kernels -------------------------------------------------------------------------------

    def kernel(self, name):
        assert name == "partition_kernel"
        return SimpleNamespace(launch=self.partition)

    def partition(self, blocks, args, stream):
        assert stream == self.inside[-1]
        args = args.array
        n, owners = int(args["n"]), int(args["owners"])
        assert blocks * 256 >= n
        keys = at(args["keys"], n, np.int64)
        chosen = np.arange(n)
        if args["positions"]:
            count = int(at(args["count"], 1, np.uint32)[0])
            chosen = at(args["positions"], count, np.uint32).astype(np.int64)
        left_out = None if args["left_out"] == NO_ROW else int(args["left_out"])
        lists = at(args["lists"], (owners, n), np.int64)
        counts = at(args["counts"], owners, np.uint32)
        assert not counts.any()
        for owner, mine in enumerate(partition(keys[chosen], owners, left_out)):
            positions = chosen[mine][::-1]  # in no order
            lists[owner, : len(mine)], counts[owner] = positions, len(mine)
            if args["grouped"]:
                at(args["grouped"], (owners, n), np.int64)[owner, : len(mine)] = keys[positions]

    def fetch(self, blocks, args, stream, windows, later):
        part, n = args["part"][0], int(args["part"][0]["n"])
        assert (int(args["parts"]), windows, later) == (1, 1, None)
        assert args["result"] == 0
        assert blocks * 256 >= 2 * n
        self.log.append(("fetch", stream.device, n))
        positions = np.arange(n)
        if part["positions"]:
            positions = at(part["positions"], n, np.int64)
        most = int(positions.max()) + 1
        keys = at(part["keys"], most, np.int64)[positions]
        vectors, words, _ = self.twins[int(part["lines"])].fetch(keys)
        there = words < TOMBSTONE
        at(part["out"], (most, TABLE.dim), np.float32)[positions[there]] = vectors[there]
        at(part["source"], most, np.uint8)[positions[there]] = int(part["code"]) & 255
        missed = np.flatnonzero(~there)
        assert at(args["miss_count"], 1, np.uint32)[0] == 0
        at(args["miss_count"], 1, np.uint32)[0] = len(missed)
        at(args["misses"], n, np.uint32)[: len(missed)] = missed


@pytest.fixture(params=[(0,), (0, 1), (5, 0, 5)], ids=str)
def host(request, monkeypatch):
    """400 rows, each on its owner; keys from 380 on are deleted; copies of keys below 50 everywhere."""
    made = Host(monkeypatch, request.param)
    keys = np.arange(400)
    for owner, twin in enumerate(made.twins.values()):
        mine = keys[(owner_of(keys, len(made.shards)) == owner) | (keys < 50)]
        versions = np.ones(len(mine), np.uint64)
        twin.write(mine, distinct_rows(TABLE, mine), versions)
        twin.write(mine[mine >= 380], None, versions[mine >= 380] + np.uint64(1))
    return made


ASKED = np.random.default_rng(2).permutation(np.arange(-20, 420))


@pytest.mark.parametrize("copies", [False, True])
def test_rows_of_all_owners_are_written_to_the_caller(host, copies):
    split = SplitFetch(host.shards)
    for home, shard in enumerate(host.shards):
        out = host.empty((len(ASKED), 4), np.float32)
        untouched = np.array(out)
        source = host.empty(len(ASKED), np.uint8)
        host.log.clear()
        split.fetch(home, ASKED.view(Array), out, source, copies=copies)
        there = (ASKED >= 0) & (ASKED < 380)
        np.testing.assert_array_equal(source, there)
        np.testing.assert_array_equal(out[there], distinct_rows(TABLE, ASKED[there]))
        np.testing.assert_array_equal(
            np.asarray(out)[~there].view(np.uint32), untouched[~there].view(np.uint32)
        )
        check_order(host, home, shard.device.id, asked_first=copies)
        assert host.inside == []


def check_order(host, home, device, *, asked_first):
    """The owners' work follows the division of the keys, and the caller's later work follows theirs."""
    log = list(host.log)
    fetches = [entry for entry in log if entry[0] == "fetch"]
    if asked_first:
        assert log.pop(0) == ("fetch", device, len(ASKED))
        fetches.pop(0)
        there = (ASKED >= 0) & (ASKED < 50)
        left = ASKED[~there & (owner_of(ASKED, len(host.shards)) != home)]
    else:
        left = ASKED
    counts = [len(mine) for mine in partition(left, len(host.shards))]
    expected = [
        ("fetch", shard.device.id, count)
        for shard, count in zip(host.shards, counts, strict=True)
        if count
    ]
    assert fetches == expected
    assert log.pop(0) == ("record", device)
    for fetch in expected:
        assert log[:3] == [("wait", fetch[1], device), fetch, ("record", fetch[1])]
        del log[:3]
    assert log == [("wait", device, fetch[1]) for fetch in expected]


def test_rows_left_on_owners_are_those_of_their_keys(host):
    split = SplitFetch(host.shards)
    for home in range(len(host.shards)):
        host.log.clear()
        apart = split.fetch_apart(home, ASKED.view(Array))
        seen = []
        for shard, mine, positions in zip(
            host.shards, apart, partition(ASKED, len(host.shards)), strict=True
        ):
            assert mine.device == shard.device.id
            np.testing.assert_array_equal(np.sort(mine.positions), positions)
            keys = ASKED[mine.positions]
            there = (keys >= 0) & (keys < 380)
            np.testing.assert_array_equal(mine.source, there)
            np.testing.assert_array_equal(mine.rows[there], distinct_rows(TABLE, keys[there]))
            seen += mine.positions.tolist()
        assert sorted(seen) == list(range(len(ASKED)))
        check_order(host, home, host.shards[home].device.id, asked_first=False)


def test_keys_that_the_caller_has_ask_no_owner(host):
    """Copies of the caller answer without the connection."""
    keys = np.arange(50).view(Array)
    out, source = host.empty((50, 4), np.float32), host.empty(50, np.uint8)
    host.log.clear()
    SplitFetch(host.shards).fetch(0, keys, out, source)
    device = host.shards[0].device.id
    assert host.log == [("fetch", device, 50), ("record", device)]
    assert source.all()


def test_owners_are_limited(host):
    for shards in ([], host.shards[:1] * (MOST_OWNERS + 1)):
        with pytest.raises(ValueError, match="1 to 16 owners"):
            SplitFetch(shards)


def test_fetch_of_positions_launches_threads_for_these_alone(host):
    """`DirectFetch` counts positions, not keys."""
    shard = host.shards[0]
    keys = np.arange(300).view(Array)
    out, source = host.zeros((300, 4), np.float32), host.zeros(300, np.uint8)
    positions, misses = np.array([7, 3]).view(Array), host.zeros(6, np.uint32)
    variant = fetch_module.FetchVariant(launch.VECTORS)
    host.log.clear()
    with shard.device:
        shard.direct.fetch(
            *(shard.table, keys, out, misses, variant), positions=positions, source=source
        )
    assert host.log == [("fetch", shard.device.id, 2)]
    assert np.flatnonzero(source).tolist() == [3, 7]
    np.testing.assert_array_equal(out[[3, 7]], distinct_rows(TABLE, np.array([3, 7])))
