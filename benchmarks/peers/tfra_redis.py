"""TensorFlow Recommenders-Addons' Redis table as a peer; run by the interpreter of ``.peers/tfra``.

    tfra_redis.py PORT DIM ROWS

Writes rows 0 … ROWS - 1 of DIM float32 into eight buckets, and prints ``ready``. Then reads batches from its
input, u64 count and that many i64 keys, and prints the seconds of ``RedisTable.lookup`` and a checksum of
the rows. Its lookup is compiled and uses hiredis.
"""

import json
import os
import struct
import sys
import tempfile
import time
import warnings
from pathlib import Path

# The library writes to the standard output itself.
ANSWERS = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
warnings.simplefilter("ignore")

import numpy as np  # noqa: E402  TensorFlow reads the environment when it is imported
import tensorflow as tf  # noqa: E402
from tensorflow_recommenders_addons import dynamic_embedding  # noqa: E402

BATCH = 10_000


def main(port: int, dim: int, rows: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        table = make(Path(folder) / "redis.json", port, dim)
        for start in range(0, rows, BATCH):
            keys = np.arange(start, min(rows, start + BATCH))
            # As in benchmarks/stores_redis.py.
            values = (keys * 7 % 65_521)[:, None] + np.arange(dim)
            table.insert(tf.constant(keys), tf.constant(values.astype(np.float32)))
        print("ready", file=ANSWERS, flush=True)
        answer(table)


def make(file: Path, port: int, dim: int) -> dynamic_embedding.RedisTable:
    chosen = {
        "redis_connection_mode": 2, "redis_host_ip": ["127.0.0.1"], "redis_host_port": [port],
        "redis_socket_timeout": 60_000, "storage_slice": 8, "using_hash_storage_slice": True,
        "keys_sending_size": 2048, "model_tag_runtime": "bench", "model_tag_import": "bench",
        "table_store_mode": 2,
    }  # fmt: skip
    file.write_text(json.dumps(chosen))
    return dynamic_embedding.RedisTable(
        tf.int64,
        tf.float32,
        [0.0] * dim,
        name="rows",
        config=dynamic_embedding.RedisTableConfig(redis_config_abs_dir=str(file)),
    )


def answer(table: dynamic_embedding.RedisTable) -> None:
    source = sys.stdin.buffer
    while head := source.read(8):
        (n,) = struct.unpack("<Q", head)
        keys = tf.constant(np.frombuffer(source.read(8 * n), np.int64))
        start = time.perf_counter()
        rows = table.lookup(keys).numpy()
        seconds = time.perf_counter() - start
        total = 0
        for first in np.ascontiguousarray(rows[:, 0]).view(np.uint32).tolist():
            total = (total * 31 + first) & (2**64 - 1)
        print(f"{seconds:.9f} {total}", file=ANSWERS, flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
