"""Direct writes: rows by a library call and over the admin port, into every tier, durably."""

from __future__ import annotations

import asyncio
import time
from contextlib import contextmanager

import httpx
import numpy as np
import pytest

import hps
from hps.config.auth import Role
from hps.config.model_schema import ModelSpec, TableSpec
from hps.config.server_settings import ServerSettings
from hps.errors import BadRequest, Forbidden, NotFound, Unsupported
from hps.models.version_writer import write_version
from hps.tiers.positions import TableChanges
from hps.types import Source, make_version, version_now
from services.frontend.auth import Authorizer
from services.frontend.http.app import admin_app
from services.frontend.state import FrontendState
from tests.support.redis_servers import shared_server
from tests.support.waiting import PATIENT_GUARD

PATH = "/v1/tables/m/items/rows"


def settings(folder, **tiers):
    return {
        "models": {"repository": str(folder / "models")},
        "tiers": {
            "rocksdb": {"path": str(folder / "db"), "guard": PATIENT_GUARD},
            "mapped": {"memory_bytes": 0},
            **tiers,
        },
    }


@pytest.fixture
def folder(tmp_path):
    """A model ``m`` with a table ``items`` that holds 0 for the keys 0 to 9, and a narrow one."""
    tables = [
        TableSpec(name="items", dim=2, default=-1.0),
        TableSpec(name="narrow", dim=1, dtype="float16", key_dtype="uint32"),
    ]
    rows = {t.name: (np.arange(10), np.zeros((10, t.dim), np.float32)) for t in tables}
    write_version(tmp_path / "models", ModelSpec(name="m", tables=tables), 1, rows)
    return tmp_path


@contextmanager
def opened(folder, **tiers):
    with hps.open(settings(folder, **tiers)) as node:
        yield node


def values(node, *keys, table="items"):
    found = node.lookup("m", {table: np.array(keys)}, want_source=True, by_table=True)
    sources = [Source(int(code)).name.lower() for code in found.sources[table]]
    return list(zip(found.vectors[table][:, 0].tolist(), sources, strict=True))


def post(node, body, path=PATH, guard=None, raw=None):
    state = FrontendState()
    state.serve(node)
    app = admin_app(state, ServerSettings(), guard or Authorizer())

    async def send():
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
            if raw is not None:
                return await client.post(path, content=raw)
            return await client.post(path, json=body)

    return asyncio.run(send())


def test_rows_and_deletions_reach_cache_and_store_durably(folder):
    with opened(folder) as node:
        assert values(node, 1, 2) == [(0.0, "cpu")] * 2
        version = node.write("m", "items", [1, -7], [[1.5, 1], [7, 7]], deleted=[2])
        assert abs(version - version_now()) < 60_000 << 20
        assert values(node, 1, 2) == [(1.5, "cpu"), (-1.0, "default")]
        assert values(node, -7)[0][0] == 7.0
        found = node.lookup("m", {"items": np.array([1])}, want_source=True)
        assert found.versions["items"].tolist() == [version]
    with opened(folder) as node:
        assert [value for value, _ in values(node, 1, 2, -7)] == [1.5, -1.0, 7.0]


@pytest.mark.parametrize("redis", [False, True])
def test_write_replaces_rows_and_deletions_ahead_of_the_clock(folder, redis, caplog):
    """A producer's clock was half an hour ahead, or this machine's was set back."""
    tiers = {"redis": {"addresses": [shared_server().address]}} if redis else {}
    with opened(folder, **tiers) as node:
        table, stores = node.table("m", "items"), [s.store for s in node.streams._direct._stores]
        ahead = np.full(2, make_version(int(time.time() * 1000) + 1_800_000), np.uint64)
        none, rows = np.empty(0, np.int64), np.full((2, 2), 5, np.float32)
        for store in stores:
            store.apply(table, TableChanges(np.array([1, 2]), rows, ahead, none, ahead[:0]), [])
            store.apply(table, TableChanges(none, rows[:0], ahead[:0], np.array([3, 4]), ahead), [])
        version = node.write("m", "items", [1, 3, 9], [[1, 1], [3, 3], [9, 9]], deleted=[2])
        assert version > ahead[0]
        for store in stores:
            assert store.versions(table, np.array([1, 2, 3])).min() > ahead[0]
            (plain,) = store.versions(table, np.array([9]))
            assert plain < ahead[0], "what was not ahead is not put ahead"
        assert [value for value, _ in values(node, 1, 2, 3, 9)] == [1.0, -1.0, 3.0, 9.0]
        assert "3 rows are stored with versions" in caplog.text
        again = node.write("m", "items", [1], [[7, 7]])
        assert again > version
        assert values(node, 1)[0][0] == 7.0


def test_rows_are_written_over_http(folder):
    with opened(folder) as node:
        body = {"keys": [1, 2**64 - 1], "vectors": [[1, 2], [3, 4]], "deleted": [3]}
        reply = post(node, body)
        assert reply.status_code == 200
        assert reply.json()["written"] == 2
        assert reply.json()["deleted"] == 1
        assert [value for value, _ in values(node, 1, -1, 3)] == [1.0, 3.0, -1.0]


def test_rows_are_written_to_redis(folder):
    guard = {"deadline_ms": 10_000}
    redis = {"addresses": [shared_server().address], "guard": guard, "initial_cache_rate": 0}
    with opened(folder, redis=redis, cpu_cache={"enabled": False}) as node:
        node.write("m", "items", [1], [[1.5, 1]], deleted=[2])
        assert values(node, 1, 2) == [(1.5, "redis"), (-1.0, "default")]
        assert node.status()["tiers"][0]["circuit"] == "closed"


def test_keys_are_narrowed_and_rows_get_the_tables_dtype(folder):
    with opened(folder) as node:
        node.write("m", "narrow", [(1 << 33) + 5], [[0.1]])
        assert values(node, 5, table="narrow") == [(float(np.float16(0.1)), "cpu")]


def test_later_write_wins_when_the_clock_goes_back(folder, monkeypatch):
    with opened(folder) as node:
        first = node.write("m", "items", [1], [[1, 1]])
        earlier_ns = time.time_ns() - 3600 * 10**9
        monkeypatch.setattr("hps.updates.version_clock.time.time_ns", lambda: earlier_ns)
        assert node.write("m", "items", [1], [[2, 2]]) == first + 1
        assert values(node, 1) == [(2.0, "cpu")]


WRONG = {
    "keys and vectors": ({"keys": [1, 2], "vectors": [[1, 1]]}, "2 keys need vectors of shape"),
    "dim": ({"keys": [1], "vectors": [[1]]}, "has dim 2"),
    "ragged": ({"keys": [1, 2], "vectors": [[1, 1], [1]]}, "list of lists"),
    "text": ({"keys": [1], "vectors": "no"}, "list of lists"),
    "too large": ({"keys": [1], "vectors": [[1e300, 0]]}, "not finite in float32"),
    "both": (
        {"keys": [1], "vectors": [[1, 1]], "deleted": [1]},
        "key 1 is in both keys and deleted",
    ),
    "float key": ({"keys": [1.5], "vectors": [[1, 1]]}, "'keys' must be a list of integers"),
    "true": ({"keys": [True], "vectors": [[1, 1]]}, "'keys' must be a list of integers"),
    "field": ({"key": [1]}, "is not a field here; did you mean 'keys'"),
    "deep": ({"keys": [1], "vectors": [[[1, 1]]]}, "vectors must be numbers"),
}


@pytest.mark.parametrize("case", WRONG)
def test_invalid_write_is_rejected_and_changes_nothing(folder, case):
    body, message = WRONG[case]
    with opened(folder) as node:
        reply = post(node, body)
        assert reply.status_code == 400, reply.text
        assert message in reply.json()["error"]
        assert values(node, 1, 2) == [(0.0, "cpu")] * 2


def test_write_to_a_key_with_the_highest_version_is_rejected(folder):
    with opened(folder) as node:
        table, (store,) = node.table("m", "items"), node.streams._direct._stores
        highest = np.full(1, 2**64 - 1, np.uint64)
        store.store.insert(table, np.array([1]), np.full((1, 2), 5, np.float32), highest)
        reply = post(node, {"keys": [2, 1], "vectors": [[1, 1], [1, 1]]})
        assert reply.status_code == 400
        assert "key 1 of table 'items' is stored with version 18446744073709551615" in reply.text
        assert values(node, 2)[0][0] == 0.0


@pytest.mark.parametrize("key", [2**64, -(2**63) - 1])
def test_keys_beyond_64_bits_are_rejected(folder, key):
    with opened(folder) as node:
        reply = post(node, None, raw=f'{{"deleted": [{key}]}}'.encode())
        assert reply.status_code == 400
        assert "64 bits" in reply.json()["error"] or "integers" in reply.json()["error"]


def test_unknown_names_invalid_json_and_large_bodies_are_rejected(folder):
    with opened(folder) as node:
        assert post(node, {}, "/v1/tables/nobody/items/rows").status_code == 404
        assert "did you mean 'items'" in post(node, {}, "/v1/tables/m/item/rows").json()["error"]
        assert post(node, None, raw=b"[1]").status_code == 400
        assert post(node, None, raw=b" " * (1 << 21)).status_code == 413
        with pytest.raises(NotFound):
            node.write("m", "nothing", [1], [[1, 1]])
        with pytest.raises(BadRequest, match="keys must be integers"):
            node.write("m", "items", [0.5], [[1, 1]])


def test_write_requires_the_write_role(folder):
    asked = []

    class Guarded(Authorizer):
        def check(self, headers, role: Role, certificate):
            asked.append(role)
            raise Forbidden("no")

    with opened(folder) as node:
        body = {"keys": [1], "vectors": [[1, 1]]}
        assert post(node, body, guard=Guarded()).status_code == 403
        assert asked == ["write"]
        assert values(node, 1) == [(0.0, "cpu")]


def test_write_to_a_static_table_is_rejected_before_any_store(folder):
    with opened(folder) as node:
        table = node.table("m", "items")
        node.streams._direct._fixed = [table]
        reply = post(node, {"keys": [1], "vectors": [[1, 1]]})
        assert reply.status_code == 501
        assert "gpu_static: false" in reply.json()["error"]
        assert values(node, 1) == [(0.0, "cpu")]


def test_write_to_a_read_only_node_is_rejected(folder):
    with opened(folder):
        pass
    rocksdb = {"path": str(folder / "db"), "access": "read_only"}
    with opened(folder, rocksdb=rocksdb) as node, pytest.raises(Unsupported, match="read only"):
        node.write("m", "items", [1], [[1, 1]])
