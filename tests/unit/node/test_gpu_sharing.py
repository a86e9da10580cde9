"""Versions of a table that share the arrays of a GPU cache: on a twin of it and on a real GPU."""

import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

import hps
from hps.config.schema import Settings
from hps.cuda.layout import EMPTY, MEMBER, MOST_MEMBERS, SLOT, EvictionPolicy
from hps.errors import GpuUnavailable
from hps.models.mapped_file import MAPPED_FILE
from hps.models.tables import TableFiles
from hps.models.version_writer import write_version
from hps.node.gpu_caches import NodeGpus
from hps.node.gpu_sharing import can_join, find_joins, may_share, with_joins, without
from hps.node.stores import NodeStores
from hps.observability.metric_names import PROMOTIONS
from hps.tiers.gpu.plan import GpuTablePlan, device_bytes
from hps.types import EmbeddingTable, Source
from hps.updates.cache_writer import CacheWriter
from tests.support import twin_device
from tests.support.waiting import PATIENT_GUARD, until
from tests.unit.node.test_delta_versions import CHANGED, DIM, KEYS, ROWS, SPEC, rows_of

UNCHANGED = np.setdiff1d(np.arange(ROWS), CHANGED)


# -- the choice of tables --------------------------------------------------------------------------


def table(version, name="t"):
    return EmbeddingTable.make(name, 4, model="m", version=version)


@pytest.fixture
def files(tmp_path):
    """Returns a function: files with this base, mapped or not."""

    def make(base, mapped=True):
        folder = tmp_path / base
        folder.mkdir(exist_ok=True)
        if mapped:
            (folder / MAPPED_FILE).touch()
        return SimpleNamespace(pairs=[SimpleNamespace(folder=folder, digest=base)])

    return make


def planned(rows=100, **fields):
    fields = {"host_rows": 0, "policy": EvictionPolicy.LRU, "static": False, "load": 0.5} | fields
    return GpuTablePlan(rows, **fields)


def test_tables_with_the_same_base_use_the_arrays_of_one(files):
    one, two, other = (table(n) for n in (1, 2, 3))
    found = {one: files("a"), two: files("a"), other: files("b"), table(1, "u"): files("a")}
    assert find_joins(found, {}) == {two: one}
    found = {two: files("c", mapped=False), one: files("c", mapped=False)}
    assert find_joins(found, {}) == {}


def test_tables_beyond_the_most_members_use_other_arrays(files):
    tables = [table(n) for n in range(MOST_MEMBERS + 2)]
    joins = find_joins(dict.fromkeys(tables, files("a")), {})
    first, rest = tables[:MOST_MEMBERS], tables[MOST_MEMBERS:]
    assert joins == dict.fromkeys(first[1:], first[0]) | {rest[1]: rest[0]}


def test_new_tables_use_the_arrays_of_held_ones(files):
    one, two, three, four = (table(n) for n in range(1, 5))
    held = {two: planned(shared_with=one), one: planned()}
    found = dict.fromkeys((four, three, two, one), files("a"))
    assert find_joins(found, held) == {four: one}


def test_retired_tables_count_as_members(files):
    """They are held until their last request has ended, though their model is not open any more."""
    tables = [table(n) for n in range(MOST_MEMBERS + 1)]
    held = {tables[0]: planned()} | dict.fromkeys(tables[1:-1], planned(shared_with=tables[0]))
    assert find_joins(dict.fromkeys((tables[0], tables[-1]), files("a")), held) == {}


@pytest.mark.parametrize("other", [{"dtype": np.float16}, {"key_bits": 32}])
def test_tables_with_other_rows_or_keys_are_not_joined(files, other):
    second = EmbeddingTable.make("t", 4, model="m", version=2, **other)
    assert find_joins(dict.fromkeys((table(1), second), files("a")), {}) == {}


def test_arrays_stay_with_a_table_that_uses_them():
    one, two, three = (table(n) for n in range(1, 4))
    plan = with_joins({one: planned()}, {two: one, three: one}, {})
    assert device_bytes(plan) == device_bytes({one: planned()})
    assert without(plan, [three]) == {one: planned(), two: planned(shared_with=one)}
    assert without(plan, [one]) == {two: planned(), three: planned(shared_with=two)}
    assert without(plan, [one, two]) == {three: planned()}


def test_static_and_very_large_tables_are_not_joined():
    one = table(1)
    assert can_join({one: planned()}, one)
    assert not can_join({one: planned(static=True)}, one)
    assert not can_join({one: planned(rows=MEMBER)}, one)
    assert not can_join({one: planned(rows=0)}, one)
    assert not can_join({}, one)


@pytest.mark.parametrize(
    ("tiers", "shares"),
    [
        ({"rocksdb": {"path": "db"}}, True),
        ({"rocksdb": {"path": "db", "access": "secondary"}}, False),
        ({"rocksdb": {"path": "db"}, "mapped": {"enabled": False}}, False),
        ({"rocksdb": {"path": "db", "layout": "hps"}}, False),
        ({"rocksdb": {"path": "db"}, "redis": {"addresses": ["127.0.0.1:1"]}}, False),
    ],
)
def test_rows_are_shared_if_only_this_node_writes_its_stores(tiers, shares):
    assert may_share(Settings.model_validate({"tiers": tiers})) == shares


# -- nodes -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    root = tmp_path_factory.mktemp("gpu-delta") / "models"
    for version in (1, 2):
        write_version(root, SPEC, version, {"t": (KEYS, rows_of(version))}, mapped=True)
    write_version(root, SPEC, 3, {"t": (KEYS, 2 * rows_of(1))}, mapped=True, base="none")
    return root


@pytest.fixture(params=["twin", pytest.param("gpu", marks=pytest.mark.gpu)])
def device(request, monkeypatch):
    return twin_device.install(monkeypatch) if request.param == "twin" else None


@pytest.fixture
def config(repository, tmp_path, device):
    return {
        "models": {"repository": str(repository), "rollback_s": 3600},
        "tiers": {
            "gpu": {"use": "required", "capacity_bytes": 1 << 28},
            "rocksdb": {"path": str(tmp_path / "db"), "guard": PATIENT_GUARD},
        },
    }


def serving(config, *versions):
    served = {"versions": {"specific": list(versions)}} if len(versions) > 1 else {}
    one = {} if len(versions) > 1 else {"serve": {"m": {"version": versions[0]}}}
    return hps.open(config | {"models": config["models"] | served | one})


def gpu_of(node):
    return next(each.tier for each in node.tiers if each.tier.info.name == "gpu").caches[0]


def tables_of(node):
    return {t.version: t for t in list(gpu_of(node)._tables) or list(gpu_of(node).places)}


def rows_used(node):
    """The rows of all versions in the GPU cache."""
    cache = gpu_of(node)
    if hasattr(cache, "rows_held"):
        return cache.rows_held(cache.places)
    (lines,) = {id(held.lines): held.lines for held in cache._tables.values()}.values()
    return int((lines.get().view(SLOT)["word"] < EMPTY).sum())


def common_rows(node):
    """The rows that both versions see, of a twin: those that the second one shared."""
    cache = gpu_of(node)
    if hasattr(cache, "common"):
        return max(cache.common.values())
    one, two = (held.member for held in cache._tables.values())
    (words, *_) = (held.lines.get().view(SLOT)["word"] for held in cache._tables.values())
    hidden = np.uint32(EMPTY | MEMBER << one | MEMBER << two)
    return int((words & hidden == 0).sum())


def bytes_on_gpu(node):
    (tier,) = (each for each in node.status()["tiers"] if each["name"] == "gpu")
    return tier["bytes"]


def check(node, version, expected, on_gpu=0.0):
    """The version's rows are ``expected``, this share of them on the GPU."""
    found = node.lookup_on_device("m", {"t": KEYS}, version=version, want_source=True)
    assert not found.defaulted
    np.testing.assert_array_equal(found.vectors["t"].get(), expected)
    assert (found.sources["t"] == Source.GPU).mean() >= on_gpu


def changed(rows, at, value):
    rows = rows.copy()
    rows[at] = value
    return rows


def test_second_version_costs_two_percent_at_most(config):
    with serving(config, 1) as node:
        until(lambda: rows_used(node) == ROWS)
        used = bytes_on_gpu(node)
        node.load("m", 2)
        assert rows_used(node) <= 1.02 * ROWS
        assert common_rows(node) >= 0.98 * ROWS
        assert bytes_on_gpu(node) <= 1.02 * used
        assert len(tables_of(node)) == 2
        check(node, 2, rows_of(2), on_gpu=0.97)
        check(node, 1, rows_of(1), on_gpu=0.97)
        node.rollback("m")
        check(node, None, rows_of(1), on_gpu=0.97)


@pytest.mark.parametrize("of_delta", [False, True])
@pytest.mark.parametrize("updated", [1, 2])
def test_update_of_one_version_changes_no_row_of_the_other(config, updated, of_delta):
    at = (CHANGED if of_delta else UNCHANGED)[:200]
    with serving(config, 1, 2) as node:
        until(lambda: rows_used(node) >= ROWS)
        check(node, 1, rows_of(1))
        check(node, 2, rows_of(2))
        for value in (9, 10):
            write(node, updated, KEYS[at], value)
            for _ in range(2):  # from the stores, and then from the GPU
                check(node, updated, changed(rows_of(updated), at, value))
                check(node, 3 - updated, rows_of(3 - updated))
                node.writer.flush()
    with serving(config, 1, 2) as node:  # the overlays are there from the start
        for _ in range(2):
            check(node, updated, changed(rows_of(updated), at, 10))
            check(node, 3 - updated, rows_of(3 - updated))
            node.writer.flush()


def write(node, version, keys, value):
    """Stream rows into a version."""
    node.write("m", "t", keys, np.full((len(keys), DIM), value, np.float32), version=version)


def test_versions_that_stay_keep_their_rows(config):
    with serving(config, 1) as node:
        until(lambda: rows_used(node) == ROWS)
        node.load("m", 2)
        node.unload("m", 1)
        # Lookups miss a table before its rows are removed.
        until(lambda: list(tables_of(node)) == [2] and rows_used(node) <= ROWS)
        check(node, 2, rows_of(2), on_gpu=0.97)
        assert 0.97 * ROWS <= rows_used(node) <= ROWS
        node.load("m", 1, switch=False)
        check(node, 1, rows_of(1), on_gpu=0.97)
        check(node, 2, rows_of(2), on_gpu=0.97)
        assert rows_used(node) <= 1.02 * ROWS


def test_versions_that_the_database_holds_whole_have_their_own_arrays(config):
    """They have no common rows to share."""
    config["tiers"]["mapped"] = {"enabled": False}
    with serving(config, 1, 2) as node:
        apart = bytes_on_gpu(node)
    del config["tiers"]["mapped"]
    with serving(config, 1, 2) as node:
        assert bytes_on_gpu(node) == apart
        check(node, 2, rows_of(2))


def test_shared_memory_counts_when_the_version_that_came_first_has_left(config):
    with serving(config, 1) as node:
        limit = int(1.2 * bytes_on_gpu(node))
    config["tiers"]["gpu"]["capacity_bytes"] = limit
    with serving(config, 1) as node:
        node.load("m", 2)
        with pytest.raises(GpuUnavailable, match="other versions hold"):
            node.load("m", 3, switch=False)
        assert bytes_on_gpu(node) <= limit


def test_tables_are_added_by_the_thread_that_writes_the_caches(config, monkeypatch):
    names, real = [], NodeGpus._add_tables
    monkeypatch.setattr(
        NodeGpus,
        "_add_tables",
        lambda *args: (names.append(threading.current_thread().name), real(*args)),
    )
    with serving(config, 1) as node:
        node.load("m", 2)
    assert names == ["hps-cache-writer"]


def test_fill_ends_with_the_table(config, monkeypatch):
    monkeypatch.setattr("hps.node.cache_fill._FIRST_BYTES", 0)
    monkeypatch.setattr("hps.node.cache_fill._BLOCK_ROWS", 100)
    reads, real = [], NodeStores.populate

    def populate(self, table, keys):
        if table.version == 1:
            time.sleep(0.02)
            reads.append(table)
        real(self, table, keys)

    monkeypatch.setattr(NodeStores, "populate", populate)
    config["models"]["rollback_s"] = 0
    with serving(config, 1) as node:
        until(lambda: reads)
        node.load("m", 3)
        until(lambda: list(tables_of(node)) == [3])
        until(lambda: not any(t.name == "hps-warmup" for t in threading.enumerate()))
        assert len(reads) < ROWS / 100 / 2
        check(node, None, 2 * rows_of(1))


def test_rows_of_a_loaded_version_are_read_once_from_its_mapped_file(config, monkeypatch):
    """Not from its portable files, nor again from the CPU cache, whose lookups read the same file."""
    inserts, real = [], CacheWriter.promote_at_once
    monkeypatch.setattr(
        CacheWriter,
        "promote_at_once",
        lambda self, table, keys, *cache: (
            inserts.append(len(keys)),
            real(self, table, keys, *cache),
        )[1],
    )
    with serving(config, 1) as node:
        inserts.clear()
        monkeypatch.setattr(TableFiles, "vectors", None)
        node.load("m", 3, switch=False)
        check(node, 3, 2 * rows_of(1), on_gpu=0.99)
        assert sum(inserts) == ROWS


HOT = KEYS[-500:]


@pytest.fixture
def half(config, monkeypatch):
    """The configuration, with a cache of half of the rows that is filled in several pieces."""
    monkeypatch.setattr("hps.updates.cache_warmup._CHUNK_ROWS", 4000)
    monkeypatch.setattr("hps.updates.cache_warmup._SERVED_CHUNK_BYTES", 0)
    config["tiers"]["gpu"] = {"use": "required", "share": 0.5}
    return config


def share_of_hot(node, version, n=1000):
    """The share of `HOT` keys that are among the ``n`` hottest of a version."""
    return np.isin(HOT, gpu_of(node).top_k(tables_of(node)[version], n)[0]).mean()


def make_hot(node):
    def ask():
        node.lookup_on_device("m", {"t": HOT})
        node.writer.flush()
        return share_of_hot(node, 1) > 0.9

    until(ask)


def is_filled():
    """True once no warm-up is running in the background."""
    return not any(thread.name == "hps-warmup" for thread in threading.enumerate())


def require_no_failed_promotion(node):
    found = node.metrics.values(PROMOTIONS)
    assert not any(count for (*_, result), count in found.items() if result == "failed")


def test_keys_that_are_hot_rank_first_in_a_loaded_version(half):
    with serving(half, 1) as node:
        make_hot(node)
        node.load("m", 3, switch=False)
        assert share_of_hot(node, 3) > 0.9
        check(node, 3, 2 * rows_of(1), on_gpu=0.4)
        require_no_failed_promotion(node)


def test_keys_that_are_hot_rank_first_where_all_rows_fit(config):
    with serving(config, 1) as node:
        until(lambda: rows_used(node) == ROWS)
        gpu_of(node).evict(tables_of(node)[1], HOT)
        make_hot(node)
        node.load("m", 3, switch=False)
        assert share_of_hot(node, 3, ROWS // 3) > 0.9
        check(node, 3, 2 * rows_of(1), on_gpu=0.99)


def test_keys_of_the_snapshot_rank_first_after_a_start(half, device, monkeypatch, tmp_path):
    monkeypatch.setattr("hps.node.cache_fill._FIRST_BYTES", 0)
    half["tiers"]["cpu_cache"] = {"snapshot": {"path": str(tmp_path / "snapshot"), "keys": 20_000}}
    with serving(half, 1) as node:
        until(is_filled)
        make_hot(node)
    with serving(half, 1) as node:
        until(is_filled)
        require_no_failed_promotion(node)
        if device is None:  # a twin's rank is the order in which keys came
            assert share_of_hot(node, 1, 10_000) > 0.9  # the hottest half has one score


@pytest.mark.parametrize("hot", [0, 3000])
def test_caches_of_a_large_mapped_table_are_filled_after_the_start(
    config, monkeypatch, tmp_path, hot
):
    """With the snapshot's keys first, then with others."""
    monkeypatch.setattr("hps.node.cache_fill._FIRST_BYTES", 0)
    monkeypatch.setattr("hps.node.cache_fill._BLOCK_ROWS", 10_000)
    snapshot = {"path": str(tmp_path / "snapshot"), "keys": hot or 1}
    cpu = {"capacity_bytes": 1 << 20, "snapshot": snapshot if hot else {}}
    config["tiers"] |= {"cpu_cache": cpu, "mapped": {"memory_bytes": 0}}
    for _ in range(2 if hot else 1):  # the second start has a snapshot
        with serving(config, 1) as node:
            until(lambda: rows_used(node) == ROWS)
            write(node, 1, KEYS[:10], 9)
            check(node, 1, changed(rows_of(1), slice(10), 9), on_gpu=0.99)
