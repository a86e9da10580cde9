"""Readers that restart when models change: the resources of the previous ones are freed."""

from __future__ import annotations

import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack

import numpy as np
import pytest

from benchmarks.peers.process import free_ports
from hps.config.update_settings import DirectorySettings, KafkaSettings
from hps.errors import Unavailable
from hps.node.streams import UpdateStreams
from hps.observability.metrics import Metrics
from hps.types import EmbeddingTable
from hps.updates.stream_positions import FedStore
from tests.support.waiting import until

USERS = EmbeddingTable.make("users", 2, model="ctr")


class Caches:
    """Counts refreshes."""

    def __init__(self) -> None:
        self.rows = 0

    def update(self, _table, keys, *_rest):
        self.rows += len(keys)
        done = Future()
        done.set_result(None)
        return done

    delete = update


class Takes:
    """A store that accepts everything and has no positions."""

    def apply(self, table, changes, positions):
        pass

    def applied(self, table, topic, partition):
        return None

    def versions(self, table, keys, at_least=0):
        return np.zeros(len(keys), np.uint64)


@pytest.fixture
def resources():
    with ExitStack() as resources:
        yield resources


def held():
    """This process' threads and descriptors."""
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def test_restart_frees_the_resources_of_the_previous_readers(resources, tmp_path):
    streams = UpdateStreams([USERS], Metrics(), resources)
    (port,) = free_ports(1)
    streams.read_kafka(KafkaSettings(brokers=f"127.0.0.1:{port}", group="here"), [], Caches())
    streams.read_folder(DirectorySettings(path=tmp_path), [], Caches())
    before, switches = np.array(held()), 4
    for _ in range(switches):
        streams.set_tables([USERS], {})
    # librdkafka's threads start slightly later than its clients.
    until(lambda: (held() - before < switches).all())
    assert len(resources._exit_callbacks) == 1
    assert [each["source"] for each in streams.status()] == ["kafka", "directory"]


def test_paused_reader_stays_paused_over_a_restart(resources, tmp_path):
    caches = Caches()
    streams = UpdateStreams([USERS], Metrics(), resources)
    streams.read_folder(DirectorySettings(path=tmp_path), [], caches)
    streams.pause()
    part = tmp_path / ".part.npz"
    np.savez(part, key=np.arange(5), vector=np.ones((5, 2), np.float32))
    part.rename(tmp_path / "ctr.users.1.npz")
    streams.set_tables([USERS], {})
    streams.pause()  # over when the reader has run
    assert caches.rows == 0
    streams.resume()
    until(lambda: caches.rows == 5)


def test_rows_of_unfollowed_tables_age(resources, tmp_path):
    streams = UpdateStreams([USERS], Metrics(), resources)
    streams.read_folder(DirectorySettings(path=tmp_path), [], Caches())
    assert streams.age_s(USERS) == 0
    other = EmbeddingTable.make("users", 2, model="ctr", version=2)
    streams.set_tables([other], {})
    until(lambda: streams.age_s(USERS) > 0)
    assert streams.age_s(other) == 0
    streams.set_tables([USERS], {})
    assert streams.age_s(USERS) == 0


def cut_off(resources, tables):
    """Streams of an unreachable Kafka."""
    streams = UpdateStreams(tables, Metrics(), resources)
    (port,) = free_ports(1)
    streams.read_kafka(KafkaSettings(brokers=f"127.0.0.1:{port}", group="here"), [], Caches())
    return streams


def test_rows_age_from_the_start_while_positions_are_unknown(resources):
    streams = cut_off(resources, [USERS])
    until(lambda: streams.age_s(USERS) > 0.2)
    assert streams.age_s(EmbeddingTable.make("other", 2, model="news")) == 0, "of no stream"
    streams.set_tables([USERS], {})
    assert streams.age_s(USERS) > 0.2, "readers that begin anew know no more"
    later = EmbeddingTable.make("users", 2, model="ctr", version=2)
    streams.set_tables([later], {})
    before = streams.age_s(USERS)
    assert streams.age_s(later) < before
    streams.set_tables([USERS], {})
    assert streams.age_s(USERS) >= before, "the other version was not loaded after all"


def test_direct_writes_do_not_change_the_age(resources):
    streams = cut_off(resources, [USERS])
    streams.write_directly([FedStore("store", Takes())], Caches())
    until(lambda: streams.age_s(USERS) > 0.2)
    streams.write([USERS], np.array([1]), np.ones((1, 2), np.float32), np.empty(0, np.int64))
    assert streams.age_s(USERS) > 0.2


def test_tables_whose_reader_restarts_are_behind(resources, monkeypatch):
    streams = cut_off(resources, [USERS])
    other = EmbeddingTable.make("users", 2, model="ctr", version=2)
    entered, gate = threading.Event(), threading.Event()

    def slow():
        entered.set()
        assert gate.wait(60)

    streams._readers._feeds[0].resources.callback(slow)  # closes first
    with ThreadPoolExecutor(2) as pool:
        restart = pool.submit(streams.set_tables, [other], {})
        assert entered.wait(60)
        behind = pool.submit(streams.behind, [other])
        assert not wait([behind], 0.1).done
        gate.set()
        restart.result(60)
        assert "does not know its partitions" in behind.result(60)


def test_seek_while_partitions_are_unknown_raises_unavailable(resources):
    streams = cut_off(resources, [USERS])
    with pytest.raises(
        Unavailable, match=r"hps\.node\.here does not know yet which partitions it reads"
    ):
        streams.seek("hps_updates.ctr", 0, 0)


def test_messages_of_unknown_age_are_behind(resources, monkeypatch):
    streams = cut_off(resources, [USERS])
    (stream,) = streams._readers.streams
    place = "hps_updates.ctr", 0
    monkeypatch.setattr(stream.source, "applied", lambda: {place: 0})
    monkeypatch.setattr(stream.source, "lag", lambda: {place: 1})
    assert 0 < streams.age_s(USERS) < 1, "the reader began just now"
    assert streams.behind([USERS]).endswith("has 1 messages to apply")
