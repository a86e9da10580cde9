"""The node's socket beyond the tiers' contract: reconnects, promotions, errors."""

import os
import socket
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from hps.errors import ConfigError, TierError, TierMisfit, TierTimeout, Unavailable
from hps.threads import BoundedThreadPool
from hps.tiers.base import FetchContext, Part, TierInfo
from hps.tiers.chain import TierChain
from hps.tiers.node import (
    AttachedProcesses,
    NodeConnectionPool,
    NodeServer,
    NodeTier,
    ServedTiers,
    frames,
    server,
    tier,
)
from hps.tiers.wrappers import GuardedTier
from hps.types import EmbeddingTable, MissPolicy, Source
from tests.support.memory_tier import MemoryTier
from tests.support.waiting import until

ITEMS = EmbeddingTable.make("items", 4)
QUICK = EmbeddingTable.make("quick", 3, miss=MissPolicy("default_then_promote"))
TABLES = [ITEMS, QUICK]


@pytest.fixture
def folder():
    with tempfile.TemporaryDirectory(prefix="hps-") as path:  # pytest's names are too long
        yield Path(path)


@pytest.fixture
def store():
    held = MemoryTier(TierInfo("memory", Source.ROCKSDB, blocking=True))
    for table in TABLES:
        keys = np.arange(100)
        rows = np.repeat(keys[:, None], table.dim, axis=1).astype(np.float32)
        held.insert(table, keys, rows, np.full(100, 7, np.uint64))
    return held


class Ends:
    """A node's server and its client."""

    def __init__(self, folder, store, tables=TABLES, caches=None, threads=2, queued=8):
        self.pool = BoundedThreadPool(threads, queued, name="lookup")
        self.promoted = []
        self.answers = {"sum": lambda given: sum(given["of"])}
        self.folder, self.store, self.caches = folder, store, caches or TierChain([])
        self.serve(tables)
        self.dropped = []
        self.connections = NodeConnectionPool(self.server.path, TABLES)
        self.tier = NodeTier([self.connections], self.dropped.append)

    def serve(self, tables):
        def promote(table, keys):
            self.promoted.append((table.name, keys.tolist()))

        self.attached = AttachedProcesses([("m", 1)])
        self.server = NodeServer(
            self.folder,
            lambda: tables,
            ServedTiers(self.caches, self.store, self.pool, promote),
            self.attached,
            self.answers,
        )

    def fetch(self, table, keys, ctx=None):
        part = Part.make(table, np.array(keys))
        self.tier.fetch([part], ctx or FetchContext())
        return part

    def close(self):
        self.tier.close()
        self.server.close()
        self.pool.close()


@pytest.fixture
def ends(folder, store):
    opened = Ends(folder, store)
    yield opened
    opened.close()


def test_socket_is_private_to_user(ends, folder):
    assert ends.server.path.stat().st_mode & 0o777 == 0o600
    assert folder.stat().st_mode & 0o777 == 0o700


def test_second_node_is_rejected_unless_first_was_killed(ends, folder, store):
    with pytest.raises(ConfigError, match="another running node"):
        Ends(folder, store)
    ends.server.close()
    (folder / "node.sock").touch()  # as a killed one leaves it
    other = Ends(folder, store)
    assert other.fetch(ITEMS, [1]).source.tolist() == [Source.ROCKSDB]
    other.close()


def test_folder_open_to_others_is_rejected(folder, store):
    folder.chmod(0o750)
    with pytest.raises(ConfigError, match="chmod 700"):
        Ends(folder, store)


def test_path_too_long_for_socket_is_reported(folder, store):
    with pytest.raises(ConfigError, match=r"too long for a socket.*server\.runtime"):
        Ends(folder / ("x" * 100), store)


def test_waited_for_rows_are_promoted_by_node(ends):
    ends.fetch(ITEMS, [3, 1000, 5])
    assert ends.promoted == [("items", [3, 5])]


def test_rows_with_default_policy_are_promoted_on_request(ends):
    ends.fetch(QUICK, [3])
    assert ends.promoted == []
    ends.tier.promote(ITEMS, np.array([1]))
    ends.tier.promote(QUICK, np.array([4, 9]))
    until(lambda: ends.promoted == [("quick", [4, 9])])


def test_dropped_promotion_is_counted(ends):
    ends.server.close()
    ends.tier.promote(QUICK, np.array([4, 9]))
    until(lambda: ends.dropped == [2])


def test_large_fetches_are_split(ends, monkeypatch):
    monkeypatch.setattr(tier, "_ANSWER_BYTES", 100)
    wanted = np.arange(50, 150)
    parts = [Part.make(table, wanted) for table in TABLES]
    ends.tier.fetch(parts, FetchContext())
    for part in parts:
        assert part.missing.tolist() == list(range(50, 100))
        assert (part.out[:50, 0] == np.arange(50, 100)).all()
    assert len(ends.promoted) > 10


def test_frame_too_large_is_rejected_before_reading():
    client_end, server_end = socket.socketpair()
    with client_end, server_end:
        with pytest.raises(ValueError, match="a frame of"):
            frames.send(client_end, frames.FrameKind.ASK, [bytes(frames.MAX_PAYLOAD + 1)])
        client_end.sendall(b"\xff\xff\xff\xff\x03\0\0\0")
        with pytest.raises(frames.BadFrame, match="are allowed"):
            frames.receive_head(server_end)


def test_fetch_with_too_large_answer_is_rejected_before_allocation(monkeypatch):
    payload = bytearray().join(
        bytes(frames._flat(piece)) for piece in frames.fetch_request([(0, np.arange(1_000))], None)
    )
    monkeypatch.setattr(frames, "MAX_PAYLOAD", 10_000)
    monkeypatch.setattr(frames, "Part", None)
    with pytest.raises(frames.BadFrame, match="1,000 keys of table model/1/items are too many"):
        frames.read_fetch(payload, TABLES)


def test_folder_removed_by_another_node_is_created_again(folder, store, monkeypatch):
    def removed_first(path, *given):
        monkeypatch.setattr(os, "open", opened)
        path.parent.rmdir()
        return opened(path, *given)

    (folder / "run").mkdir(0o700)
    opened = os.open
    monkeypatch.setattr(os, "open", removed_first)
    ends = Ends(folder / "run", store)
    assert ends.fetch(ITEMS, [1]).source.tolist() == [Source.ROCKSDB]
    ends.close()
    assert not (folder / "run").exists()


def test_connection_without_thread_is_rejected_and_next_is_answered(ends, monkeypatch):
    class NoThread:
        def __init__(self, **_given):
            monkeypatch.undo()

        def start(self):
            raise RuntimeError("can't start new thread")

    monkeypatch.setattr(server, "threading", SimpleNamespace(Thread=NoThread))
    with pytest.raises(TierError):
        ends.connections.ask("sum", of=[1, 2])
    assert ends.connections.ask("sum", time.monotonic() + 60, of=[1, 2]) == 3
    assert ends.server.status()["connections"] == 1


def test_restarted_node_is_used_again(ends):
    assert ends.fetch(ITEMS, [1]).source.tolist() == [Source.ROCKSDB]
    ends.server.close()
    with pytest.raises(TierError, match="is it running"):
        ends.fetch(ITEMS, [1])
    ends.serve(TABLES)
    assert ends.fetch(ITEMS, [1]).source.tolist() == [Source.ROCKSDB]


def test_request_on_stale_connection_is_sent_again(ends):
    ends.fetch(ITEMS, [1])
    ends.server.close()
    ends.serve(TABLES)
    assert ends.fetch(ITEMS, [2]).source.tolist() == [Source.ROCKSDB]


def test_node_serving_other_tables_is_reported(ends):
    ends.server.close()
    ends.serve([ITEMS])
    with pytest.raises(TierMisfit, match=r"no longer serves model/1/quick"):
        ends.fetch(ITEMS, [1])


def test_guarded_node_that_ended_degrades_answer(ends):
    guarded = GuardedTier(ends.tier, 5.0, 1, 60.0)
    ends.server.close()
    part, ctx = Part.make(ITEMS, np.array([1])), FetchContext()
    guarded.fetch([part], ctx)
    assert ctx.degraded == ["node"]
    assert part.missing.tolist() == [0]
    guarded.close()


class Slow(MemoryTier):
    """Answers when released, and skips one of its tiers."""

    def __init__(self):
        super().__init__(TierInfo("memory", Source.ROCKSDB, blocking=True))
        self.begun, self.go = threading.Semaphore(0), threading.Event()

    def fetch(self, parts, ctx):
        self.begun.release()
        assert self.go.wait(60)
        ctx.degraded.append("redis")
        super().fetch(parts, ctx)


def test_tiers_skipped_by_node_are_reported(folder):
    slow = Slow()
    slow.go.set()
    ends, ctx = Ends(folder, slow), FetchContext()
    ends.fetch(ITEMS, [1], ctx)
    assert ctx.degraded == ["redis"]
    ends.close()


def test_deadline_holds_on_both_sides(folder, monkeypatch):
    slow = Slow()
    ends = Ends(folder, slow, threads=1)
    submit, deadlines = ends.pool.submit, []

    def noted(work, deadline):
        deadlines.append(deadline)
        return submit(work, deadline)

    monkeypatch.setattr(ends.pool, "submit", noted)
    waiting = threading.Thread(target=ends.fetch, args=(ITEMS, [1]))
    waiting.start()
    assert slow.begun.acquire(timeout=60)
    for left in (0.05, -1.0):
        with pytest.raises(TierTimeout):
            ends.fetch(ITEMS, [2], FetchContext(time.monotonic() + left))
    # The node's own counts from when the request came.
    until(lambda: len(deadlines) == 2 and time.monotonic() > deadlines[1])
    slow.go.set()
    waiting.join(60)
    # The abandoned request did not reach the store.
    ends.fetch(ITEMS, [3])
    assert slow.begun.acquire(timeout=60)
    assert not slow.begun.acquire(blocking=False)
    ends.close()


def test_overloaded_node_rejects(folder):
    slow = Slow()
    ends = Ends(folder, slow, threads=1, queued=0)
    waiting = threading.Thread(target=ends.fetch, args=(ITEMS, [1]))
    waiting.start()
    assert slow.begun.acquire(timeout=60)
    with pytest.raises(Unavailable, match="overloaded"):
        ends.fetch(ITEMS, [2])
    slow.go.set()
    waiting.join(60)
    ends.close()


def test_handlers_are_called_by_name(ends):
    assert ends.connections.ask("sum", of=[1, 2]) == 3
    with pytest.raises(Unavailable, match="no handler for 'age'"):
        ends.connections.ask("age")


@pytest.mark.parametrize(
    "frame",
    [
        b"\x01\0\0\0\x63\0\0\0x",  # of no kind
        b"\x03\0\0\0\x01\0\0\0abc",  # a fetch cut short
        b"\x18\0\0\0\x01\0\0\0"
        + b"\0" * 8
        + b"\1\0\0\0\0\0\0\0"
        + b"\5\0\0\0\1\0\0\0",  # no such table
        b"\x03\0\0\0\x03\0\0\0{,}",  # no JSON
    ],
)
def test_damaged_frame_closes_only_its_connection(ends, frame):
    ends.fetch(ITEMS, [1])
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as damaged:
        damaged.settimeout(60)
        damaged.connect(str(ends.server.path))
        damaged.sendall(frame)
        assert damaged.recv(1) == b""
    assert ends.fetch(ITEMS, [1]).source.tolist() == [Source.ROCKSDB]
