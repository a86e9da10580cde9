"""Rows that expire by the clock, in RocksDB, Redis, the mapped file and the CPU cache of a node."""

import re
import time

import numpy as np
import pytest

import hps
from hps.config.model_schema import FeatureSpec, ModelSpec, TableSpec
from hps.models.version_writer import write_version
from hps.tiers.base import FetchContext, Part
from tests.support.redis_servers import RedisServer, need
from tests.support.waiting import PATIENT_GUARD, until

TTL_S = 4.0
SPEC = ModelSpec(
    name="ctr",
    tables=[TableSpec(name="user", dim=4, default=-1.0, ttl_s=TTL_S)],
    features=[FeatureSpec(name="user", table="user", pooling="none")],
)


def rows_of(keys):
    return np.repeat(np.float32(keys)[:, None], 4, axis=1)


@pytest.fixture
def server(tmp_path):
    need("redis-server")
    server = RedisServer(tmp_path / "redis").start()
    yield server
    server.kill()


@pytest.mark.parametrize("with_redis", [False, True])
def test_rows_expire_in_all_tiers(tmp_path, request, with_redis):
    keys = np.arange(500)
    write_version(tmp_path / "models", SPEC, 1, {"user": (keys, rows_of(keys))})
    redis = None
    if with_redis:
        address = request.getfixturevalue("server").address
        redis = {"addresses": [address], "guard": PATIENT_GUARD}
    config = {
        "models": {"repository": str(tmp_path / "models")},
        "tiers": {
            "rocksdb": {"path": str(tmp_path / "db"), "guard": PATIENT_GUARD},
            "redis": redis,
        },
    }
    with hps.open(config) as node:
        table = node.model("ctr").tables["user"]
        tiers = {each.tier.info.name: each.tier for each in node.tiers}

        def held(name, keys):
            part = Part.make(table, np.array(keys))
            tiers[name].fetch([part], FetchContext())
            return part.keys[part.source > 0].tolist()

        def ask(*keys):
            found = node.lookup("ctr", {"user": np.array(keys)})
            return found.vectors["user"][:, 0].tolist(), found.defaulted, found.degraded

        written = [3, 1000]  # a row of the file, and a new one
        until(lambda: ask(7) == ([-1.0], 1, ()))  # the file's rows expire
        began = time.monotonic()
        node.write("ctr", "user", written, rows_of(written))
        answer = ask(*written)
        node.writer.flush(60)
        stores = [name for name in tiers if name in ("rocksdb", "redis")]
        everywhere = [held(name, written) == written for name in (*stores, "cpu")]
        if time.monotonic() < began + TTL_S / 2:  # else the machine was too slow to see them
            assert answer == ([3.0, 1000.0], 0, ())
            assert all(everywhere)
        until(lambda: ask(*written) == ([-1.0, -1.0], 2, ()))
        assert time.monotonic() > began + TTL_S - 0.1
        for name in tiers:
            assert held(name, written) == []
        names = {"cpu", "rocksdb", "mapped"}
        expired = re.compile(r'hps_expired_rows_total\{.*tier="(\w+)"')
        until(lambda: names <= {*expired.findall(node.metrics.render().decode())})
        node.write("ctr", "user", [3], rows_of([3]))
        assert ask(3) == ([3.0], 0, ())
        assert len(stores) == 1 + with_redis
