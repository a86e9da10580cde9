"""A node with Redis before RocksDB, on a real server: promotion, preloading, Redis failures."""

import gc
import json
import os
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import yaml

import hps
from hps.config import load_config
from hps.config.model_schema import FeatureSpec, MissPolicySpec, ModelSpec, TableSpec
from hps.errors import ConfigError, ModelError, TierMisfit
from hps.models.version_writer import write_version
from hps.tiers.redis import RedisTier
from hps.tools.doctor.configuration import configured
from hps.types import Source, version_now
from tests.support.redis_servers import Proxy, RedisServer, need, settings, shared_cluster
from tests.support.waiting import until

KEYS, DIM = 2000, 4
SPEC = ModelSpec(
    name="ctr",
    tables=[TableSpec(name="user", dim=DIM, default=-1.0)],
    features=[FeatureSpec(name="user", table="user", pooling="none")],
)


def rows_of(keys):
    keys = np.asarray(keys)
    rows = np.float32(keys % 977)[:, None] + np.arange(DIM, dtype=np.float32)
    rows[keys >= KEYS] = -1.0
    return rows


@pytest.fixture
def folder(tmp_path):
    keys = np.arange(KEYS)
    write_version(tmp_path / "models", SPEC, 1, {"user": (keys, rows_of(keys))})
    return tmp_path


@pytest.fixture
def server(tmp_path):
    need("redis-server")
    server = RedisServer(tmp_path / "redis").start()
    yield server
    server.kill()


@pytest.fixture
def proxy(server):
    proxy = Proxy(server)
    yield proxy
    proxy.close()


@pytest.fixture
def open_node(folder):
    nodes = []

    def make(redis=None, rocksdb=None, cache=False, **tiers):
        path = folder / f"db{len(nodes)}"
        config = {
            "models": {"repository": str(folder / "models")},
            "tiers": {
                "cpu_cache": {"enabled": cache, "warm": False},
                "rocksdb": {"path": str(path), **(rocksdb or {})},
                "redis": redis and {"guard": {"deadline_ms": 10_000}, **redis},
                **tiers,
            },
        }
        nodes.append(hps.open(config))
        return nodes[-1]

    yield make
    for node in nodes:
        node.close()


def ask(node, keys, **options):
    """Look up keys and check every row."""
    result = node.lookup("ctr", {"user": np.asarray(keys)}, want_source=True, **options)
    np.testing.assert_array_equal(result.vectors["user"], rows_of(keys))
    return result


def sources(node, keys):
    return ask(node, keys).sources["user"].tolist()


def table(node):
    return node.model("ctr").tables["user"]


def tier(node, name):
    (found,) = (each for each in node.status()["tiers"] if each["name"] == name)
    return found


def metric(node, name, **labels):
    """The sum of all samples of the metric with these labels."""
    total = 0.0
    for line in node.metrics.render().decode().splitlines():
        if line.startswith(name + ("{" if labels else " ")) and all(
            f'{k}="{v}"' in line for k, v in labels.items()
        ):
            total += float(line.rpartition(" ")[2])
    return total


# -- rows that go to Redis -------------------------------------------------------------------------


def test_rows_found_in_rocksdb_are_promoted_to_redis_and_defaults_are_not(server, open_node):
    node = open_node({"addresses": [server.address]})
    keys = [5, 1, 3, KEYS + 7]
    assert sources(node, keys) == [Source.ROCKSDB] * 3 + [Source.DEFAULT]
    until(lambda: sources(node, keys) == [Source.REDIS] * 3 + [Source.DEFAULT])
    # Some perhaps more than once: they were asked for again before they were there.
    assert metric(node, "hps_promotions_total", tier="redis", result="inserted") >= 3
    assert sum(server.ask("HLEN", f"hps:{{ctr/1/user/p{i}}}v") for i in range(8)) == 3
    other = open_node({"addresses": [server.address]})
    assert sources(other, keys) == [Source.REDIS] * 3 + [Source.DEFAULT]


def test_promotion_without_versions_keeps_row_written_meanwhile(server, open_node, monkeypatch):
    """Another process writes a row into Redis between the promotion's read and its write."""
    promote, promoted = RedisTier.promote, threading.Event()
    newer = rows_of([5]) + 100

    def late(self, table, keys, vectors, versions):
        self.insert(table, np.array([5]), newer, np.zeros(1, np.uint64))
        promote(self, table, keys, vectors, versions)
        promoted.set()

    monkeypatch.setattr(RedisTier, "promote", late)
    node = open_node({"addresses": [server.address], "layout": "hps"}, {"layout": "hps"})
    assert sources(node, [5, 6]) == [Source.ROCKSDB] * 2
    assert promoted.wait(60)
    found = node.lookup("ctr", {"user": np.array([5, 6])}, want_source=True)
    assert found.sources["user"].tolist() == [Source.REDIS] * 2
    np.testing.assert_array_equal(found.vectors["user"], np.concatenate([newer, rows_of([6])]))


def test_no_row_is_promoted_to_redis_when_disabled(server, open_node):
    node = open_node({"addresses": [server.address], "cache_missed_embeddings": False})
    for _ in range(2):
        assert sources(node, [5, 1]) == [Source.ROCKSDB] * 2
    assert sum(server.ask("HLEN", f"hps:{{ctr/1/user/p{i}}}v") for i in range(8)) == 0


def test_rows_served_as_defaults_are_promoted_to_redis(server, folder, open_node):
    policy = MissPolicySpec(kind="default_then_promote", min_hit_rate=0.0)
    spec = SPEC.model_copy(
        update={"tables": [SPEC.tables[0].model_copy(update={"miss_policy": policy})]}
    )
    keys = np.arange(KEYS)
    write_version(folder / "models", spec, 2, {"user": (keys, rows_of(keys))}, replace_spec=True)
    node = open_node({"addresses": [server.address]}, cache=True)
    node.lookup("ctr", {"user": np.array([5, 6])})
    until(lambda: sum(server.ask("HLEN", f"hps:{{ctr/2/user/p{i}}}v") for i in range(8)) == 2)
    assert sources(node, [5, 6]) == [Source.CPU] * 2


def test_share_of_rows_is_preloaded_into_redis(server, open_node):
    redis = {"addresses": [server.address], "initial_cache_rate": 0.25}
    node = open_node({**redis, "cache_missed_embeddings": False})
    found = Counter(sources(node, np.arange(KEYS)))
    assert 0.2 * KEYS < found[Source.REDIS] < 0.3 * KEYS
    assert found[Source.REDIS] + found[Source.ROCKSDB] == KEYS


def test_redis_works_as_only_store(server, folder, open_node):
    node = open_node({"addresses": [server.address]}, rocksdb={"enabled": False}, cache=True)
    assert not (folder / "db0").exists()
    keys = [3, KEYS + 1, 1999]
    assert sources(node, keys) == [Source.REDIS, Source.DEFAULT, Source.REDIS]
    until(lambda: sources(node, keys) == [Source.CPU, Source.DEFAULT, Source.CPU])
    assert [each["name"] for each in node.status()["tiers"]] == ["cpu", "redis"]
    assert metric(node, "hps_tier_skipped_total") == 0
    assert ask(node, np.arange(KEYS)).degraded == ()


def test_cpu_cache_is_warmed_with_newer_rows_of_redis(server, open_node):
    """Other processes may have written to Redis; the files may be older."""
    first = open_node({"addresses": [server.address], "initial_cache_rate": 1.0})
    tier = RedisTier(settings(server))
    newer = np.full((1, DIM), 77, np.float32)
    tier.insert(table(first), np.array([5]), newer, np.array([version_now()], np.uint64))
    tier.close()
    node = open_node({"addresses": [server.address]}, cpu_cache={"enabled": True, "warm": True})
    result = node.lookup("ctr", {"user": np.array([4, 5])}, want_source=True)
    assert result.sources["user"].tolist() == [Source.CPU] * 2
    assert result.vectors["user"].tolist() == [rows_of([4])[0].tolist(), [77.0] * DIM]


def test_newer_row_in_redis_is_served_and_promoted(server, open_node):
    node = open_node({"addresses": [server.address]}, cache=True)
    assert sources(node, [9]) == [Source.ROCKSDB]
    tier = RedisTier(settings(server))
    newer = np.full((1, DIM), 55, np.float32)
    tier.insert(table(node), np.array([10]), newer, np.array([version_now()], np.uint64))
    tier.close()
    for expected in (Source.REDIS, Source.CPU):
        result = node.lookup("ctr", {"user": np.array([10])}, want_source=True)
        assert result.sources["user"].tolist() == [expected]
        assert result.vectors["user"].tolist() == [[55.0] * DIM]
        assert node.writer.flush(60)


def test_ps_json_is_served_from_redis_cluster(folder, tmp_path):
    """With TLS and a user; rows that HPS's layout holds already are read in place."""
    cluster = shared_cluster()
    files = folder / "models/ctr/1/tables/user"
    volatile = {
        "type": "redis_cluster",
        "address": ",".join(server.address for server in cluster.servers[:2]),
        "user_name": cluster.USER,
        "password": cluster.PASSWORD,
        "num_partitions": 3,
        "enable_tls": True,
        "tls_ca_certificate": str(cluster.tls.ca),
        "tls_client_certificate": str(cluster.tls.certificate),
        "tls_client_key": str(cluster.tls.key),
        "tls_server_name_identification": cluster.tls.server_name,
        "initial_cache_rate": 0.0,
        "cache_missed_embeddings": True,
    }
    model = {
        "model": "ctr",
        "sparse_files": [str(files)],
        "embedding_vecsize_per_table": [DIM],
        "embedding_table_names": ["user"],
        "default_value_for_each_table": [-1.0],
        "gpucache": False,
    }
    disk = {"type": "rocks_db", "path": "db"}
    file = tmp_path / "ps.json"
    file.write_text(json.dumps({"volatile_db": volatile, "persistent_db": disk, "models": [model]}))
    tier = RedisTier(cluster.settings(layout="hps", partitions=3))
    try:
        with hps.open(file) as node:
            keys = np.array([8, 9])
            tier.insert(table(node), keys, rows_of(keys), np.zeros(2, np.uint64))
            assert node.status()["warnings"] == []
            expected = [Source.REDIS, Source.ROCKSDB, Source.DEFAULT]
            assert sources(node, [8, 5, KEYS + 3]) == expected
            until(lambda: sources(node, [8, 5]) == [Source.REDIS] * 2)
        assert tier.get(table(node), np.array([5])).out.tolist() == rows_of([5]).tolist()
    finally:
        tier.close()


def test_status_describes_redis(server, open_node):
    redis = {"addresses": [server.address], "initial_cache_rate": 1.0}
    node = open_node(redis)
    found = tier(node, "redis")
    assert (found["circuit"], found["layout"], found["shared"]) == ("closed", "native", True)
    assert found["addresses"] == [server.address]

    def reported():
        (described,) = node.status()["models"][0]["tables"]
        return (
            described["rows"].get("redis") == KEYS and described["bytes"].get("redis", 0) > 50_000
        )

    until(reported)
    assert tier(node, "redis")["reachable"]
    assert metric(node, "hps_table_rows", tier="redis") == KEYS


def test_doctor_checks_every_table(server, folder, open_node, tmp_path):
    redis = {"addresses": [server.address], "initial_cache_rate": 1.0}
    open_node(redis)
    file = tmp_path / "hps.yaml"

    def found(**changes):
        tiers = {"redis": {**redis, **changes}, "rocksdb": {"path": str(tmp_path / "none")}}
        file.write_text(
            yaml.safe_dump({"models": {"repository": str(folder / "models")}, "tiers": tiers})
        )
        checks = {c.name: c for c in configured(load_config(file, environ={}))}
        found = [c for name, c in checks.items() if name.startswith("Redis")]
        return next((c for c in found if c.name == "Redis: ctr/user"), found[0])

    check = found()
    assert (check.name, check.verdict) == ("Redis: ctr/user", "OK")
    assert check.found.startswith("2,000 rows, ")
    assert check.found.endswith("kB, native")
    check = found(partitions=3)
    assert check.verdict == "FAIL"
    assert "partitions in Redis: 8, here: 3" in check.found
    assert "set tiers.redis.partitions to that" in check.found
    server.kill()
    check = found()
    assert check.verdict == "FAIL"
    assert server.address in check.found


# -- shapes that differ ----------------------------------------------------------------------------


def test_table_of_another_shape_is_skipped_and_reported(server, open_node):
    open_node({"addresses": [server.address], "partitions": 4, "initial_cache_rate": 1.0})
    node = open_node({"addresses": [server.address], "partitions": 8})
    (warning,) = node.status()["warnings"]
    assert "partitions in Redis: 4, here: 8" in warning
    result = ask(node, [1, 2])
    assert result.degraded == ("redis",)
    assert result.sources["user"].tolist() == [Source.ROCKSDB] * 2


def test_mismatching_only_store_fails_start(server, open_node):
    open_node({"addresses": [server.address], "partitions": 4, "initial_cache_rate": 1.0})
    with pytest.raises(TierMisfit, match="partitions in Redis: 4, here: 8"):
        open_node({"addresses": [server.address], "partitions": 8}, rocksdb={"enabled": False})


def test_damaged_files_are_not_loaded(server, folder, open_node):
    """Other nodes would serve rows of the shared Redis immediately."""
    (file,) = (folder / "models").rglob("emb_vector")
    data = bytearray(file.read_bytes())
    data[7] ^= 1
    file.write_bytes(data)
    with pytest.raises(ModelError, match="emb_vector"):
        open_node({"addresses": [server.address]}, rocksdb={"enabled": False})
    assert not server.ask("EXISTS", "hps:{ctr/1/user/p0}v")


def test_single_server_in_cluster_mode_is_reported(server, open_node):
    with pytest.raises(ConfigError, match=r"set tiers\.redis\.mode to single"):
        open_node({"addresses": [server.address], "mode": "cluster"})


# -- Redis is missing, dies, is slow ---------------------------------------------------------------


def test_node_starts_without_redis_and_uses_it_later(server, open_node):
    server.kill()
    start = time.monotonic()
    redis = {"addresses": [server.address], "initial_cache_rate": 1.0}
    node = open_node(redis, rocksdb={})
    assert time.monotonic() - start < 60
    assert any("serving without it until it responds" in w for w in node.status()["warnings"])
    assert ask(node, [1, 2, KEYS + 1]).degraded == ("redis",)
    until(lambda: not tier(node, "redis")["reachable"])
    server.start()
    until(lambda: ask(node, [1, 2]).degraded == ())
    until(lambda: sources(node, [1, 2]) == [Source.REDIS] * 2)
    until(lambda: sum(server.ask("HLEN", f"hps:{{ctr/1/user/p{i}}}v") for i in range(8)) == KEYS)


class Load:
    """Lookups from several threads until the block ends. Every row is checked.

    ``seconds`` and ``degraded`` of each answer are recorded with its time."""

    def __init__(self, node, threads=3, timeout_s=30.0):
        self.node, self.timeout_s = node, timeout_s
        self.answers = []
        self.stop = threading.Event()
        self.pool = ThreadPoolExecutor(threads)
        self.work = [self.pool.submit(self.run, seed) for seed in range(threads)]

    def run(self, seed):
        random = np.random.default_rng(seed)
        while not self.stop.is_set():
            keys = random.integers(0, KEYS + 100, 20)
            start = time.monotonic()
            result = ask(self.node, keys, timeout_s=self.timeout_s)
            self.answers.append((start, time.monotonic() - start, result.degraded))

    def __enter__(self):
        return self

    def __exit__(self, *_error):
        self.stop.set()
        for done in self.work:
            done.result(60)
        self.pool.shutdown()

    def since(self, moment):
        return [(seconds, degraded) for start, seconds, degraded in self.answers if start > moment]

    def wait_for(self, answers, moment):
        until(lambda: len(self.since(moment)) >= answers)


def threads_of_hps():
    return sum(thread.name.startswith("hps-") for thread in threading.enumerate())


def sockets():
    return sum(_is_a_socket(fd) for fd in os.listdir("/proc/self/fd"))


def _is_a_socket(fd):
    try:
        return os.readlink(f"/proc/self/fd/{fd}").startswith("socket:")
    except FileNotFoundError:  # the listing's own, closed by now: anywhere among the others
        return False


GUARD = {"guard": {"retry_after_s": 0.2}}


@pytest.mark.alone
@pytest.mark.parametrize("how", ["killed", "silent", "slow", "cut"])
def test_failing_redis_loses_only_its_rows(server, proxy, open_node, how):
    address = server.address if how == "killed" else proxy.address
    node = open_node({"addresses": [address], **GUARD})
    ask(node, np.arange(KEYS))
    until(lambda: sources(node, np.arange(50)) == [Source.REDIS] * 50)
    with Load(node) as load:
        load.wait_for(50, 0)
        until(lambda: threads_of_hps() > 5)
        trouble = time.monotonic()
        cutting = threading.Event()
        if how == "killed":
            server.kill()
        elif how == "silent":
            proxy.silent = True
        elif how == "slow":
            proxy.delay_s = 0.2
        else:

            def cut():
                while not cutting.wait(0.002):
                    proxy.cut_after = 40

            threading.Thread(target=cut, daemon=True).start()
        load.wait_for(200, trouble)
        until(lambda: tier(node, "redis")["circuit"] != "closed")
        seen = load.since(trouble)
        assert any(degraded == ("redis",) for _, degraded in seen)
        took = sorted(seconds for seconds, _ in seen)
        assert took[len(took) * 9 // 10] < 1.0  # what Redis has is 5 s
        threads = threads_of_hps()
        # Back to normal.
        cutting.set()
        proxy.silent, proxy.delay_s, proxy.cut_after = False, 0.0, None
        if how == "killed":
            server.start()
        until(lambda: tier(node, "redis")["circuit"] == "closed")
        until(lambda: sum(degraded == () for _, _, degraded in load.answers[-100:]) > 90)
    assert threads_of_hps() <= threads + 2
    until(lambda: Source.REDIS in sources(node, np.arange(50)))
    assert metric(node, "hps_lookup_degraded_total", tier="redis") > 0
    assert metric(node, "hps_tier_skipped_total", tier="redis") > 0


def test_outage_does_not_count_as_misses(server, open_node):
    guard = {"retry_after_s": 0.2, "deadline_ms": 10_000}
    redis = {"addresses": [server.address], "cache_missed_embeddings": False, "guard": guard}
    node = open_node(redis)
    ask(node, [1, 2, 3])
    missed = metric(node, "hps_tier_keys_total", tier="redis", result="missed")
    server.kill()
    for _ in range(20):
        assert ask(node, [1, 2, 3]).degraded == ("redis",)
    assert metric(node, "hps_tier_keys_total", tier="redis", result="missed") == missed
    assert metric(node, "hps_tier_keys_total", tier="redis", result="skipped") == 60
    reasons = ("open", "failed", "late", "full")
    skips = [metric(node, "hps_tier_skipped_total", tier="redis", reason=r) for r in reasons]
    assert sum(skips) == 20
    assert skips[0] > 0


def test_ten_thousand_failing_requests_leak_nothing(server, open_node):
    node = open_node({"addresses": [server.address], "guard": {"retry_after_s": 0.01}})
    ask(node, [1])
    server.kill()
    for _ in range(200):
        ask(node, [1, 2])
    gc.collect()
    before = threads_of_hps(), sockets(), _memory()
    for _ in range(10_000):
        node.lookup("ctr", {"user": np.array([1, 2])})
    gc.collect()
    threads, open_sockets, memory = threads_of_hps(), sockets(), _memory()
    assert threads <= before[0] + 4  # of the pools, which start theirs when they are needed
    assert open_sockets <= before[1] + 2
    assert memory < before[2] + (32 << 20)


def _memory():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096
