"""Load, replace and unload models on an open node."""

import json
import logging
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import hps
from benchmarks.peers.process import free_ports
from hps.config.model_schema import ModelSpec
from hps.errors import ConfigError, ModelError, NotFound, TierError, Unavailable
from hps.models.version_writer import write_version
from hps.node import version_retirement
from hps.node.streams import UpdateStreams
from hps.observability import metric_names as m
from hps.observability.metric_table import METRICS
from hps.tiers.capacity import TABLE_BYTES, slot_bytes
from hps.tiers.rocksdb import RocksDbTier
from tests.support.waiting import until

SPEC = {"name": "words", "tables": [{"name": "left", "dim": 4}, {"name": "right", "dim": 2}]}
metric_of = {spec.name: spec for spec in METRICS}
ROWS = 500


def write(root, version, rows=ROWS, spec=SPEC):
    """Row ``k`` of version ``v`` is full of ``1000 * v + k``."""
    keys = np.arange(rows)
    tables = {
        table["name"]: (
            keys,
            np.full((rows, table["dim"]), 1000 * version, np.float32) + keys[:, None],
        )
        for table in spec["tables"]
    }
    write_version(root, ModelSpec.model_validate(spec), version, tables)


@pytest.fixture
def repository(tmp_path):
    write(tmp_path / "models", 1)
    return tmp_path / "models"


@pytest.fixture
def guard():
    """Settings of RocksDB's guard."""
    return {}


@pytest.fixture
def settings(repository, tmp_path, guard):
    return {
        "models": {"repository": str(repository), "rollback_s": 0},
        "tiers": {
            "rocksdb": {"path": str(tmp_path / "db"), "guard": guard},
            "mapped": {"memory_bytes": 0},  # rows come from the cache and the store
            "cpu_cache": {"share": 0.5},
        },
    }


@pytest.fixture
def node(settings):
    with hps.open(settings) as opened:
        yield opened


def value(node, key=7):
    result = node.lookup("words", {"left": [key], "right": [key]})
    assert result.vectors["left"][0, 0] == result.vectors["right"][0, 0]
    assert not result.degraded
    return float(result.vectors["left"][0, 0])


def rocksdb_of(node):
    return node.tiers[-1].tier.inner


def families(node):
    return {name for name in rocksdb_of(node).families() if "/" in name}


def settled(node):
    """Wait until retired versions are freed."""
    until(lambda: node.control._switcher.retirement.is_idle)


def cached(node):
    return {table.version for table in node.tiers[0].tier._tables}


def test_load_replaces_a_version_and_goes_back(node, repository):
    assert value(node) == 1007
    write(repository, 2)
    write(repository, 3)
    assert node.load("words", 2) == 2
    assert value(node) == 2007
    settled(node)
    assert cached(node) == {2}
    assert families(node) == {f"words/{v}/{t}" for v in (1, 2) for t in ("left", "right")}
    assert node.load("words", 1) == 1
    assert value(node) == 1007
    settled(node)
    assert families(node) == {f"words/{v}/{t}" for v in (1, 2) for t in ("left", "right")}
    assert node.load("words") == 3
    settled(node)
    # The previous version stays for going back, older ones do not.
    assert families(node) == {f"words/{v}/{t}" for v in (1, 3) for t in ("left", "right")}
    assert cached(node) == {3}
    assert node.status()["models"][0]["version"] == 3


def test_hot_keys_of_the_served_version_are_cached_at_a_load(node, repository):
    node.lookup("words", {"left": list(range(250, 500)), "right": [1] * 250})
    node.writer.flush()
    hot = node.hot_keys("words", "left", 250)[0]["keys"]
    write(repository, 2)
    node.load("words")
    result = node.lookup("words", {"left": hot}, want_source=True)
    assert np.mean(result.sources["left"] == hps.Source.CPU) > 0.9


@pytest.mark.parametrize("guard", [{"deadline_ms": 60_000}])
def test_lookup_in_flight_finishes_on_its_version(node, repository):
    write(repository, 2)
    gate, entered = threading.Event(), threading.Event()
    rocksdb = rocksdb_of(node)
    fetch = rocksdb.fetch

    def gated(parts, ctx):
        if not gate.is_set() and parts[0].table.version == 1:
            entered.set()
            assert gate.wait(60)
        fetch(parts, ctx)

    rocksdb.fetch = gated
    cold = [
        key for key in range(ROWS) if key not in node.hot_keys("words", "left", ROWS)[0]["keys"]
    ]
    results = []
    client = threading.Thread(
        target=lambda: results.append(node.lookup("words", {"left": cold[:1]}, timeout_s=60))
    )
    client.start()
    assert entered.wait(60)
    assert node.load("words") == 2
    assert value(node, cold[0]) == 2000 + cold[0]
    assert cached(node) == {1, 2}
    gate.set()
    client.join()
    assert results[0].vectors["left"][0, 0] == 1000 + cold[0]
    results.clear()
    settled(node)
    assert cached(node) == {2}


def test_lookups_while_versions_change(node, repository):
    """Each answer is of one version, and none fails."""
    write(repository, 2)
    ended, wrong, count = threading.Event(), [], [0]

    def ask(seed):
        rng = np.random.default_rng(seed)
        while not ended.is_set():
            keys = rng.integers(0, ROWS, 40)
            try:
                result = node.lookup("words", {"left": keys, "right": keys})
                both = {int(v) for n in result.vectors for v in result.vectors[n][:, 0] - keys}
            except Exception as error:
                wrong.append(error)
                return
            count[0] += 1
            if both not in ({1000}, {2000}) or result.defaulted or result.degraded:
                wrong.append(both)

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for version in (2, 1, 2):
        before = count[0]
        node.load("words", version)
        until(lambda before=before: count[0] > before + 20 or wrong)
    ended.set()
    for thread in threads:
        thread.join()
    assert not wrong
    settled(node)


def test_models_can_be_loaded_and_unloaded(node, repository):
    write(repository, 1, spec={"name": "more", "tables": [{"name": "t", "dim": 3}]})
    assert node.control.available() == {"more": [1], "words": [1]}
    assert node.load("more") == 1
    assert node.lookup("more", {"t": [5]}).vectors["t"].tolist() == [[1005.0] * 3]
    node.unload("more")
    with pytest.raises(NotFound, match="'more' is not found"):
        node.lookup("more", {"t": [5]})
    settled(node)
    assert {table.model for table in node.tiers[0].tier._tables} == {"words"}
    assert node.load("more") == 1
    assert node.lookup("more", {"t": [5]}).vectors["t"].tolist() == [[1005.0] * 3]
    with pytest.raises(NotFound):
        node.unload("none")


def test_served_version_is_not_loaded_again(node):
    served = node.models["words"]
    assert node.load("words") == 1
    assert node.models["words"] is served


def _replaced(path):
    """Other bytes of the same length."""
    path.write_bytes(bytes(byte ^ 1 for byte in path.read_bytes()))


CHANGES = {
    "1/tables/left/emb_vector": _replaced,
    "1/tables/right/key": _replaced,
    "1/manifest.json": lambda p: p.write_text(
        p.read_text().replace('"created": "2', '"created": "1')
    ),
    "model.yaml": lambda p: p.write_text(p.read_text() + "\nmax_batch_size: 7\n"),
}


@pytest.mark.parametrize("file", CHANGES)
def test_load_rejects_a_served_version_with_changed_files(node, repository, file):
    path = repository / "words" / file
    before = path.read_bytes()
    CHANGES[file](path)
    with pytest.raises(ModelError, match=f"changed after it was loaded: {file.removeprefix('1/')}"):
        node.load("words", 1)
    assert value(node) == 1007
    path.write_bytes(before)
    assert node.load("words", 1) == 1


def test_load_accepts_a_served_version_whose_files_were_copied_again(node, repository):
    served = node.models["words"]
    shutil.copytree(repository / "words", repository / "again")
    shutil.rmtree(repository / "words")
    (repository / "again").rename(repository / "words")
    assert node.load("words", 1) == 1
    assert node.models["words"] is served


def test_failed_load_changes_nothing(node, repository):
    with pytest.raises(NotFound, match="has no version 9"):
        node.load("words", 9)
    with pytest.raises(NotFound, match="no model 'none'"):
        node.load("none")
    write(repository, 2)
    (repository / "words" / "2" / "tables" / "left" / "emb_vector").write_bytes(b"short")
    with pytest.raises(ModelError):
        node.load("words", 2)
    assert (value(node), node.control.loading) == (1007, {})
    assert cached(node) == {1}
    assert node.metrics.numbers()[m.MODEL_LOADS] == {("words", "failed"): 1}


def test_written_rows_go_to_the_served_version(node, repository):
    write(repository, 2)
    node.write("words", "left", [7], [[5.0] * 4])
    node.load("words")
    assert node.lookup("words", {"left": [7]}).vectors["left"][0, 0] == 2007
    node.write("words", "left", [7], [[6.0] * 4])
    assert node.lookup("words", {"left": [7]}).vectors["left"][0, 0] == 6
    node.load("words", 1)
    assert node.lookup("words", {"left": [7]}).vectors["left"][0, 0] == 5


def test_rows_in_use_are_dropped_after_the_last_request(node, repository):
    write(repository, 2)
    write(repository, 3)
    request = node.models["words"].engine
    node.load("words", 2)
    node.load("words", 3)
    until(lambda: cached(node) == {1, 3})
    assert families(node) == {f"words/{v}/{t}" for v in (1, 2, 3) for t in ("left", "right")}
    del request
    settled(node)
    assert families(node) == {f"words/{v}/{t}" for v in (2, 3) for t in ("left", "right")}


def test_failed_drop_of_rows_is_retried(node, repository, monkeypatch):
    monkeypatch.setattr(version_retirement, "_DROP_AGAIN_S", 0.01)
    rocksdb = rocksdb_of(node)
    drop, refused = rocksdb.drop, []

    def once(*tables):
        if not refused:
            refused.append(tables)
            raise TierError("rocksdb", "disk full")
        drop(*tables)

    rocksdb.drop = once
    for version in (2, 3):
        write(repository, version)
        assert node.load("words", version) == version
        settled(node)
    assert refused
    assert families(node) == {f"words/{v}/{t}" for v in (2, 3) for t in ("left", "right")}
    assert value(node) == 3007


def test_repeated_switches_free_memory_and_disk(node, repository):
    rocksdb = rocksdb_of(node)
    write(repository, 2)
    bytes_of_one = rocksdb.figures().table_bytes
    request = node.models["words"].engine
    for version in (2, 1, 2, 1):
        node.load("words", version)
        value(node)
    assert node.metrics.numbers()[m.MODEL_LOADS] == {("words", "failed"): 0, ("words", "served"): 4}
    assert rocksdb.figures().table_bytes <= 2 * bytes_of_one
    del request
    settled(node)
    open_families = rocksdb._database._families
    assert {table.version for table in open_families} == {1}
    assert len(open_families) == 2
    for name in (m.LOOKUP_KEYS, m.FEATURE_KEYS, m.LOOKUP_SECONDS, m.TIER_KEYS):
        at = metric_of[name].labels.index("version")
        assert {labels[at] for labels in node.metrics.numbers()[name]} == {"1"}, name


def test_load_without_memory_for_the_cpu_cache_is_refused(node, repository, monkeypatch):
    """Before the switch: rows fill the memory only later, and the system would end the node then."""
    write(repository, 2)
    with monkeypatch.context() as short:
        short.setattr("hps.node.caches.free_host_bytes", lambda: 1000)
        with pytest.raises(ConfigError, match=r"and 1,000 bytes of memory are left\. Unload"):
            node.load("words", 2)
    assert value(node) == 1007
    node.load("words", 2)
    assert value(node) == 2007


def test_loaded_models_do_not_exceed_the_cpu_cache(settings, repository):
    for name in ("more", "most"):
        write(repository, 1, spec={"name": name, "tables": [{"name": "t", "dim": 4}]})
    settings["models"]["serve"] = {"words": {}}
    capacity = settings["tiers"]["cpu_cache"] = {"capacity_bytes": 20_000}
    with hps.open(settings) as node:
        cache = node.tiers[0].tier

        def used():
            return sum(cache.capacity(t) * slot_bytes(t) + TABLE_BYTES for t in list(cache._tables))

        for name in ("more", "most"):
            node.load(name)
            assert used() <= capacity["capacity_bytes"] + len(cache._tables) * TABLE_BYTES
            assert node.lookup(name, {"t": [5]}).vectors["t"][0, 0] == 1005
            warning = "the model gets 0 % of the CPU cache capacity that a start would give it"
            assert warning in node.control.warnings[name]
        assert node.status()["warnings"][-1].startswith(
            "model most: the model gets 0 % of the CPU cache capacity"
        )
        # Memory that one model frees is available to the next.
        node.unload("words")
        node.unload("more")
        settled(node)
        node.load("more")
        assert cache.capacity(node.models["more"].tables["t"]) > 100
        assert node.control.warnings.keys() == {"most"}


def test_start_warns_about_rows_of_deleted_versions(settings, repository):
    for version in (2, 3):
        write(repository, version)
    settings["models"]["serve"] = {"words": {"version": 1}}
    with hps.open(settings) as node:
        node.load("words", 2)
        node.load("words", 3)
        settled(node)
    shutil.rmtree(repository / "words" / "2")
    settings["models"]["serve"] = {"words": {"version": 1}}
    with hps.open(settings) as node:
        (warning,) = node.status()["warnings"]
        assert "rows of words/2, which are no longer in the model repository" in warning
        assert "hps store erase words --version 2" in warning
        assert value(node) == 3007  # chosen at run time


def test_close_does_not_wait_for_a_redis_missing_at_a_load(settings, repository):
    (port,) = free_ports(1)
    settings["models"]["serve"] = {"words": {}}
    settings["tiers"]["redis"] = {"addresses": [f"127.0.0.1:{port}"], "initial_cache_rate": 1.0}
    before = set(threading.enumerate())
    write(repository, 1, spec={"name": "more", "tables": [{"name": "t", "dim": 3}]})
    with hps.open(settings) as node:
        node.load("more")
    until(lambda: not {t for t in set(threading.enumerate()) - before if "redis" in t.name})


def test_node_can_close_during_a_load(settings, repository, tmp_path):
    (tmp_path / "updates").mkdir()
    settings["updates"] = {"directory": {"path": str(tmp_path / "updates"), "models": ["more"]}}
    before = set(threading.enumerate())
    node = hps.open(settings)
    write(repository, 2)
    started, gate = threading.Event(), threading.Event()

    def behind(*_):
        started.set()
        assert gate.wait(60)
        return "3 messages to apply"

    node.streams.behind = behind
    raised = []

    def load():
        with pytest.raises(Unavailable, match="is being closed") as error:
            node.load("words")
        raised.append(error)

    loading = threading.Thread(target=load)
    loading.start()
    assert started.wait(60)
    closing = threading.Thread(target=node.close)
    closing.start()
    closing.join(0.3)
    assert closing.is_alive()  # the load's resources stay open until it has ended
    gate.set()
    closing.join()
    assert not {t.name for t in set(threading.enumerate()) - before - {loading} if t.is_alive()}
    loading.join()
    assert raised


class Folder:
    """A folder of update files, which `words` reads."""

    def __init__(self, settings, path, **options):
        self.path = path / "updates"
        settings["updates"] = {"directory": {"path": str(self.path), **options}}

    def apply(self, node, number, key=7):
        """Write ``number`` as row ``key`` of table `left`, in a file, and wait until it is moved away."""
        name = f"words.left.{number}.npz"
        vector = np.full((1, 4), number, np.float32)
        np.savez(self.path / f".{name}", key=np.array([key]), vector=vector)
        (self.path / f".{name}").rename(self.path / name)
        until(lambda: updated(node, key) == number)
        until(lambda: not (self.path / name).exists())


def updated(node, key=7, version=None):
    return node.lookup("words", {"left": [key]}, version=version).vectors["left"][0, 0]


def test_applied_files_are_replayed_for_a_version_that_is_loaded_later(
    settings, repository, tmp_path
):
    folder = Folder(settings, tmp_path)
    settings["models"]["rollback_s"] = 0
    with hps.open(settings) as node:
        write(repository, 2)  # older than the files, whose rows win
        folder.apply(node, 5)
        folder.apply(node, 6, key=8)
        assert node.load("words", 2) == 2
        assert (updated(node), updated(node, 8), updated(node, 9)) == (5, 6, 2009)
        folder.apply(node, 4)  # version 1 is not fed any more
        assert node.load("words", 1) == 1
        assert (updated(node), updated(node, 8), updated(node, 9)) == (4, 6, 1009)
        time.sleep(0.01)
        write(repository, 3)  # newer than all files, whose rows it contains or replaces
        assert node.load("words", 3) == 3
        assert (updated(node), updated(node, 8)) == (3007, 3008)
        folder.apply(node, 3)
        assert not list((folder.path / "rejected").iterdir())


def test_applied_files_are_replayed_at_a_start_with_another_version(settings, repository, tmp_path):
    folder = Folder(settings, tmp_path)
    with hps.open(settings) as node:
        folder.apply(node, 5)
    made = repository / "words/1/manifest.json"
    write(repository, 2)
    manifest = json.loads((repository / "words/2/manifest.json").read_text())
    manifest["created"] = json.loads(made.read_text())["created"]
    (repository / "words/2/manifest.json").write_text(json.dumps(manifest))
    (tmp_path / "db" / "hps-served-versions.json").unlink(missing_ok=True)
    with hps.open(settings) as node:
        assert node.model("words").version == 2
        assert (updated(node), updated(node, 8)) == (5, 2008)


def test_files_are_replayed_once(settings, repository, tmp_path, caplog):
    folder = Folder(settings, tmp_path)
    caplog.set_level(logging.INFO, "hps.updates.files.applied_files")
    with hps.open(settings) as node:
        folder.apply(node, 5)
    with hps.open(settings) as node:
        assert updated(node) == 5
        assert "were replayed" not in caplog.text  # the store records what the reader has applied


def test_load_rejects_models_whose_applied_files_are_removed(settings, repository, tmp_path):
    folder = Folder(settings, tmp_path, keep_applied=False)
    with hps.open(settings) as node:
        write(repository, 2)
        folder.apply(node, 5)
        with pytest.raises(ConfigError, match=r"keep_applied: true; or unload the model"):
            node.load("words", 2)
        assert node.load("words", 1) == 1  # served already
        assert updated(node) == 5
        node.unload("words")  # as the message says
        assert node.load("words", 2) == 2


def test_replay_that_a_store_rejects_ends_the_load(settings, repository, tmp_path, monkeypatch):
    folder = Folder(settings, tmp_path)
    settings["models"]["catch_up_s"] = 0.3
    with hps.open(settings) as node:
        write(repository, 2)
        folder.apply(node, 5)
        apply = RocksDbTier.apply

        def fail(tier, table, changes, positions):
            if table.version == 2:
                raise TierError("rocksdb", "disk full")
            apply(tier, table, changes, positions)

        monkeypatch.setattr(RocksDbTier, "apply", fail)
        with pytest.raises(Unavailable, match="updates waited for rocksdb"):
            node.load("words", 2)
        assert (node.model("words").version, updated(node)) == (1, 5)
        monkeypatch.setattr(RocksDbTier, "apply", apply)
        assert node.load("words", 2) == 2
        assert updated(node) == 5


def test_each_version_has_separate_freshness(settings, repository, tmp_path, monkeypatch):
    """Also while another version, possibly far behind, catches up."""
    (tmp_path / "updates").mkdir()
    settings["updates"] = {
        "directory": {"path": str(tmp_path / "updates"), "models": ["more"]},
        "max_staleness_s": 0.2,
        "on_stale": "refuse",
    }
    looks = {1: 0, 2: 0}

    def age_s(_, table):
        looks[table.version] += 1
        return 3600.0 if table.version == 2 else 0.0

    monkeypatch.setattr(UpdateStreams, "age_s", age_s)
    entered, gate = threading.Event(), threading.Event()

    def behind(*_):
        entered.set()
        assert gate.wait(60)
        return ""

    monkeypatch.setattr(UpdateStreams, "behind", behind)
    with hps.open(settings) as node:
        write(repository, 2)
        loading = threading.Thread(target=node.load, args=("words",))
        loading.start()
        assert entered.wait(60)
        before = looks[1]
        until(lambda: looks[1] > before + 6)
        assert value(node) == 1007
        gate.set()
        loading.join()
        until(lambda: node.models["words"].freshness.refusal)
        with pytest.raises(Unavailable, match="max_staleness_s"):
            node.lookup("words", {"left": [7]})
        node.load("words", 1)
        assert value(node) == 1007


class _Behind:
    def __init__(self, streams):
        self._streams, self.why = streams, "hps.node.x has 3 messages to apply"
        self.tables_set = []
        self.compared = []

    def __getattr__(self, name):
        return getattr(self._streams, name)

    def set_tables(self, tables, watermarks):
        self.tables_set.append({table.version for table in tables})

    def behind(self, _tables, beside=(), _max_lag=0):
        self.compared.append({table.version for table in beside})
        return self.why


def test_version_that_does_not_catch_up_is_not_served(settings, repository):
    settings["models"]["catch_up_s"] = 0.05
    with hps.open(settings) as node:
        write(repository, 2)
        streams = node.streams = _Behind(node.streams)
        with pytest.raises(
            Unavailable, match=r"within 0\.05 s \(models\.catch_up_s\): hps\.node\.x has 3"
        ):
            node.load("words")
        assert value(node) == 1007
        assert streams.tables_set == [{1, 2}, {1}]
        streams.why = ""
        assert node.load("words") == 2


def test_rollback_that_waits_for_updates_ends_when_the_model_is_unloaded(settings, repository):
    settings["models"]["catch_up_s"] = 600
    with hps.open(settings) as node, ThreadPoolExecutor(1) as pool:
        write(repository, 2)
        node.load("words", 2)
        settled(node)
        streams = node.streams = _Behind(node.streams)
        rollback = pool.submit(node.rollback, "words")  # is a load
        until(lambda: streams.compared)
        node.unload("words")
        with pytest.raises(NotFound, match="'words' is not found"):
            rollback.result(60)
        assert not node.control.loading


def test_loaded_version_is_compared_with_the_present_current_one(settings, repository):
    settings["models"]["catch_up_s"] = 600
    with hps.open(settings) as node, ThreadPoolExecutor(1) as pool:
        write(repository, 2)
        write(repository, 3)
        node.load("words", 2, switch=False)
        compared = []

        def behind(tables, beside=(), _max_lag=0):
            """Version 3 has the reader of version 2."""
            if {table.version for table in tables} != {3}:
                return ""
            compared.append({table.version for table in beside})
            return "" if compared[-1] == {2} else "hps.node.x has 3 messages to apply"

        node.streams = _Behind(node.streams)
        node.streams.behind = behind
        load = pool.submit(node.load, "words", 3)
        until(lambda: {1} in compared)
        node.switch("words", 2)
        assert load.result(60) == 3
        assert value(node) == 3007
