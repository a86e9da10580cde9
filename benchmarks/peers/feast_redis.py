"""Feast's Redis online store as a peer; run by the interpreter of ``.peers/feast``.

    feast_redis.py PORT DIM ROWS

Writes rows 0 … ROWS - 1 as one feature each, an array of DIM float32, and prints ``ready``. Then reads
batches from its input, u64 count and that many i64 keys, and prints the seconds of ``online_read`` and a
checksum of the rows. Making Feast's key objects and taking its values apart is not counted."""

import struct
import sys
import tempfile
import time
from datetime import UTC, datetime, timedelta

from feast import Entity, FeatureView, Field, FileSource, RepoConfig, ValueType
from feast.infra.online_stores.redis import RedisOnlineStore, RedisOnlineStoreConfig
from feast.protos.feast.types.EntityKey_pb2 import EntityKey
from feast.protos.feast.types.Value_pb2 import FloatList, Value
from feast.types import Array, Float32

BATCH = 5000


def main(port: int, dim: int, rows: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        config = RepoConfig(
            project="bench",
            provider="local",
            registry=f"{folder}/registry.db",
            online_store=RedisOnlineStoreConfig(connection_string=f"127.0.0.1:{port}"),
            entity_key_serialization_version=3,
        )
        entity = Entity(name="key", join_keys=["key"], value_type=ValueType.INT64)
        view = FeatureView(
            name="rows",
            entities=[entity],
            schema=[Field(name="row", dtype=Array(Float32))],
            source=FileSource(path=f"{folder}/none.parquet", timestamp_field="at"),
            ttl=timedelta(0),
        )
        store = RedisOnlineStore()
        write(store, config, view, dim, rows)
        print("ready", flush=True)
        answer(store, config, view)


def entity_key(key: int) -> EntityKey:
    return EntityKey(join_keys=["key"], entity_values=[Value(int64_val=key)])


def row(key: int, dim: int) -> list[float]:
    """As in benchmarks/stores_redis.py."""
    return [float(key * 7 % 65_521 + i) for i in range(dim)]


def write(
    store: RedisOnlineStore, config: RepoConfig, view: FeatureView, dim: int, rows: int
) -> None:
    now = datetime.now(tz=UTC)
    for start in range(0, rows, BATCH):
        data = [
            (entity_key(k), {"row": Value(float_list_val=FloatList(val=row(k, dim)))}, now, now)
            for k in range(start, min(rows, start + BATCH))
        ]
        store.online_write_batch(config, view, data, None)


def answer(store: RedisOnlineStore, config: RepoConfig, view: FeatureView) -> None:
    source = sys.stdin.buffer
    while head := source.read(8):
        (n,) = struct.unpack("<Q", head)
        keys = [entity_key(k) for k in struct.unpack(f"<{n}q", source.read(8 * n))]
        start = time.perf_counter()
        found = store.online_read(config, view, keys, ["row"])
        seconds = time.perf_counter() - start
        total = 0
        for _, values in found:
            (first,) = struct.unpack("<I", struct.pack("<f", values["row"].float_list_val.val[0]))
            total = (total * 31 + first) & (2**64 - 1)
        print(f"{seconds:.9f} {total}", flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
