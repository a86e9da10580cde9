"""A node whose rows expire: every tier lets go of them, lookups return the default, metrics count both."""

import logging
import threading
import time

import numpy as np
import pytest

import hps
from hps.config.model_schema import FeatureSpec, ModelSpec, TableSpec
from hps.errors import ConfigError
from hps.models.version_writer import write_version
from hps.node import cache_fill
from hps.node import expiry as expiry_module
from hps.node.expiry import DueTables
from hps.tiers.base import FetchContext, Part
from hps.tiers.mapped import overlaid_table
from hps.tiers.rocksdb import rows as rocksdb_rows
from hps.types import EmbeddingTable, make_version, oldest_row
from tests.support import memory_tier, twin_device
from tests.support.waiting import PATIENT_GUARD, until

TTL_S, HELD = 3600.0, 200
SPEC = ModelSpec(
    name="m",
    tables=[TableSpec(name="a", dim=4, default=-1.0), TableSpec(name="b", dim=4)],
    features=[FeatureSpec(name=name, table=name, pooling="none") for name in "ab"],
)


def rows_of(keys):
    return np.repeat(np.float32(keys)[:, None], 4, axis=1)


class Opened:
    """A node and its tiers, for which it is ``shift_s`` later than it is."""

    def __init__(self, folder, monkeypatch, spec=SPEC, serve=None, **tiers):
        self.shift_s = 0.0
        if not (folder / "models").exists():
            keys = np.arange(HELD)
            held = {table.name: (keys, rows_of(keys)) for table in spec.tables}
            write_version(folder / "models", spec, 1, held)
        for module in (rocksdb_rows, overlaid_table, expiry_module, cache_fill, memory_tier):
            monkeypatch.setattr(module, "oldest_row", self.oldest_row)
        gpus = twin_device.install(monkeypatch)
        base = {
            "cpu_cache": {"warm": False},
            "rocksdb": {"path": str(folder / "db"), "guard": PATIENT_GUARD},
        }
        models = {
            "repository": str(folder / "models"),
            "serve": {"m": {"tables": {"a": {"ttl_s": TTL_S}}}} if serve is None else serve,
        }
        self.node = hps.open({"models": models, "tiers": {**base, **tiers}})
        (self.gpu,) = gpus
        self.table = self.node.model("m").tables["a"]
        self.tiers = {each.tier.info.name: each.tier for each in self.node.tiers}

    def ask(self, *keys, table="a"):
        """Whether each key has a row, and the number that were answered by the default."""
        found = self.node.lookup("m", {table: keys})
        expected = rows_of(keys)
        has_row = (found.vectors[table] == expected).all(axis=1)
        if table == "a":
            assert (found.vectors[table][~has_row] == -1).all()
        assert not found.degraded
        return has_row.tolist(), found.defaulted

    def held(self, tier, *keys):
        """The keys of which a tier has a row."""
        part = Part.make(self.table, np.array(keys))
        self.tiers[tier].fetch([part], FetchContext())
        return part.keys[part.source > 0].tolist()

    def expired(self, tier):
        labels = [f'tier="{tier}"', 'model="m"', 'table="a"']
        return sum(
            float(line.rpartition(" ")[2])
            for line in self.node.metrics.render().decode().splitlines()
            if line.startswith("hps_expired_rows_total") and all(each in line for each in labels)
        )

    def oldest_row(self, table, unix_s):
        return oldest_row(table, unix_s + self.shift_s)

    def write(self, *keys):
        """Write rows at the time that it is for the node."""
        version = make_version(int((time.time() + self.shift_s) * 1000))
        rows = self.table, np.array(keys), rows_of(keys), np.full(len(keys), version, np.uint64)
        self.tiers["rocksdb"].insert(*rows)
        self.node.writer.update(*rows).result()


@pytest.fixture
def open_node(tmp_path, monkeypatch):
    # Passes run every fifth of a second here, instead of every minute.
    monkeypatch.setattr(expiry_module, "_LONGEST_CACHE_S", 0.2)
    monkeypatch.setattr(expiry_module, "_LONGEST_STORE_S", 0.2)
    opened = []

    def make(**settings):
        opened.append(Opened(tmp_path, monkeypatch, **settings))
        return opened[-1]

    yield make
    for each in opened:
        each.node.close()


@pytest.mark.parametrize("mapped", ["loaded", "mapped", "in_memory"])
def test_rows_expire_in_every_tier_of_a_node(open_node, mapped):
    tiers = {"mapped": {"enabled": mapped != "loaded"}}
    if mapped == "mapped":
        tiers["mapped"]["memory_bytes"] = 0
    one = open_node(**tiers)
    one.write(5, 1000)
    for _ in range(2):
        assert one.ask(3, 5, 1000, 5000) == ([True, True, True, False], 1)
        one.node.writer.flush(60)
    assert one.held("cpu", 3, 5, 1000) == [3, 5, 1000]
    if mapped != "in_memory":
        assert one.gpu.keys_of(one.table) == [3, 5, 1000]
    one.shift_s = TTL_S / 2
    one.write(5)
    one.shift_s = TTL_S + 10
    until(lambda: one.held("cpu", 3, 5, 1000) == [5])
    until(lambda: set(one.gpu.keys_of(one.table)) <= {5})
    assert one.ask(3, 5, 1000, 5000) == ([False, True, False, False], 3)
    assert one.held("rocksdb", 3, 5, 1000) == [5]
    assert one.ask(3, table="b") == ([True], 0)
    assert one.expired("cpu") >= 1
    if mapped == "loaded":
        # Those of the file, without the one that was written again, and one that was written once.
        until(lambda: one.expired("rocksdb") == HELD)
    else:
        until(lambda: one.expired("mapped") == HELD - 1)
        until(lambda: one.expired("rocksdb") == 1)
    one.write(3)
    assert one.ask(3) == ([True], 0)


def test_expired_rows_are_not_promoted(open_node):
    one = open_node(mapped={"enabled": False})
    one.shift_s = TTL_S + 10
    assert one.ask(3) == ([False], 1)
    one.node.writer.promote(one.table, np.array([3]))
    one.node.writer.flush(60)
    assert one.held("cpu", 3) == []


def test_a_start_with_expired_files_warns_and_fills_no_cache(open_node, caplog):
    one = open_node()
    one.node.close()
    with caplog.at_level(logging.WARNING):
        again = open_node(
            serve={"m": {"tables": {"a": {"ttl_s": 0.001}}}}, cpu_cache={"warm": True, "share": 1.0}
        )
    assert "table m/1/a: all rows of its files are older than ttl_s (0.001 s)" in caplog.text
    assert again.ask(3) == ([False], 1)
    assert again.ask(3, table="b") == ([True], 0)
    assert again.held("cpu", 3) == []


def test_a_version_that_is_loaded_later_expires_too(open_node, tmp_path):
    one = open_node()
    keys = np.arange(HELD + 1)  # else the version would share the tables of the other
    held = {table.name: (keys, rows_of(keys)) for table in SPEC.tables}
    write_version(tmp_path / "models", SPEC, 2, held)
    one.node.load("m")
    one.table = one.node.model("m").tables["a"]
    assert one.table.version == 2
    assert one.ask(3) == ([True], 0)
    one.shift_s = TTL_S + 10
    until(lambda: one.ask(3) == ([False], 1))


def test_no_thread_runs_without_a_time_to_live(open_node):
    names = lambda: {t.name for t in threading.enumerate()}  # noqa: E731
    open_node(serve={"m": {}})
    assert not {"hps-expire-caches", "hps-expire-store"} & names()


def test_layout_hps_is_refused(open_node):
    with pytest.raises(
        ConfigError, match=r"table m/1/a has ttl_s: 3600, but tiers\.rocksdb\.layout is hps"
    ):
        open_node(rocksdb={"layout": "hps", "path": "unused"})


def test_static_gpu_tables_are_refused(open_node):
    static = {"m": {"tables": {"a": {"ttl_s": TTL_S, "gpu_static": True}}}}
    with pytest.raises(ConfigError, match=r"table m/1/a is static .* but has ttl_s: 3600"):
        open_node(serve=static)


def test_model_yaml_has_the_setting_and_the_server_overrides_it(open_node):
    tables = [SPEC.tables[0].model_copy(update={"ttl_s": 60.0}), SPEC.tables[1]]
    one = open_node(spec=SPEC.model_copy(update={"tables": tables}), serve={"m": {}})
    assert one.table.ttl_s == 60
    one.node.close()
    one = open_node(serve={"m": {"tables": {"a": {"ttl_s": 30}}}})
    assert one.table.ttl_s == 30


def test_tables_are_due_by_their_own_intervals(monkeypatch):
    now, done = [0.0], []
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    quick, slow = (EmbeddingTable.make(n, 1, ttl_s=s) for n, s in (("quick", 10), ("slow", 40)))
    tables = [quick, slow, EmbeddingTable.make("never", 1)]
    due = DueTables(lambda: tables, lambda table: table.ttl_s / 10)

    def run():
        done.clear()
        return due.run(lambda table: done.append(table.name)), [*done]

    assert run() == (True, ["quick", "slow"])
    assert due.pause_s() == 1.0
    assert run() == (True, [])
    now[0] = 1.5
    assert run() == (True, ["quick"])
    assert due.pause_s() == 1.0
    now[0] = 4.0
    assert run() == (True, ["quick", "slow"])
    tables[:] = tables[2:]
    assert run() == (False, [])


def test_the_age_of_a_row_is_that_of_its_version():
    table = EmbeddingTable.make("t", 1, ttl_s=10)
    assert oldest_row(table, 100.0) == make_version(90_000)
    assert oldest_row(table, 5.0) == 0
    assert oldest_row(EmbeddingTable.make("t", 1), 100.0) == 0
