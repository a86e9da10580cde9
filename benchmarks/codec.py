"""Speed of decoding and encoding update messages: HPS's wire format and the native one.

Polls of 16,384 rows of dim 32, in messages as full as producers make them (256 KiB) and in messages of
4 KiB, as when rows are sent immediately; million rows per second of CPU time on one thread. The sides
alternate.

Peers: a plain NumPy decoder, message by message (`numpy.frombuffer` with a record type, then one
concatenation; for the native format the NumPy twin), and `struct`, row by row. Floor: a copy of the same
bytes into memory that is already allocated; ours allocates its results and checks its input.

Bars: ours must reach half of the copy's speed with HPS's format, and a third with the native one, whose
checksum reads everything a second time. In messages of 4 KiB it must be 8 times as fast as NumPy.
"""

from __future__ import annotations

import struct
import sys
import time
from collections.abc import Callable, Sequence

import numpy as np

from benchmarks.common import Bar, Benchmark, Options, Report, main
from benchmarks.measure import Spread, alternate, ratio
from hps.native import twin_codec
from hps.tiers.positions import TableChanges
from hps.updates.codec import (
    ConsumerRecords,
    MessageAttributes,
    decode_hps,
    decode_native,
    encode_hps,
    encode_native,
)

ROWS, DIM = 16_384, 32
SIZES = {"256 KiB": 256 << 10, "4 KiB": 4 << 10}
BARS = (
    Bar("hps_copy", "hps, 256 KiB: decoding, of a copy's speed", at_least=0.5),
    Bar("native_copy", "native, 256 KiB: decoding, of a copy's speed", at_least=0.33),
    Bar("hps_numpy", "hps, 4 KiB: ours / NumPy message by message, decoding", at_least=8),
    Bar("native_numpy", "native, 4 KiB: ours / NumPy message by message, decoding", at_least=8),
)
RECORD = np.dtype([("key", "<i8"), ("row", "<f4", DIM)])


def numpy_decode_hps(messages: Sequence[bytes]) -> tuple[object, object]:
    rows = np.concatenate([np.frombuffer(each, RECORD, offset=8) for each in messages])
    return rows["key"].copy(), rows["row"].copy()


def struct_decode_hps(messages: Sequence[bytes]) -> tuple[object, object]:
    keys, rows = [], []
    record = struct.Struct(f"<q{DIM}f")
    for each in messages:
        for key, *row in record.iter_unpack(memoryview(each)[8:]):
            keys.append(key)
            rows.append(row)
    return np.array(keys, np.int64), np.array(rows, np.float32)


def timed(call: Callable[[], object], times: int) -> Callable[[], float]:
    """Million rows per second of CPU time."""

    def run() -> float:
        start = time.process_time()
        for _ in range(times):
            call()
        return times * ROWS / (time.process_time() - start) / 1e6

    return run


def sides(
    kind: str, full: int, changes: TableChanges, quick: bool
) -> dict[str, Callable[[], float]]:
    """Functions to compare, for one format and size of message."""
    keys, vectors = changes.keys, changes.vectors

    def encode() -> list[bytes]:
        if kind == "hps":
            return encode_hps(keys, vectors, full=full)
        return encode_native("model/table", changes, MessageAttributes(1), full=full)

    messages = encode()
    at = np.arange(len(messages))
    source = np.frombuffer(b"".join(messages), np.uint8)
    target = source.copy()
    calls: dict[str, Callable[[], object]] = {
        "decode": lambda: decode_native(messages),
        "encode": encode,
        "copy": lambda: np.copyto(target, source),
        "NumPy": lambda: twin_codec.decode_native(messages, 1 << 30),
    }
    if kind == "hps":
        calls["decode"] = lambda: decode_hps(ConsumerRecords(messages, at, at), "table", DIM)
        calls["NumPy"] = lambda: numpy_decode_hps(messages)
        calls["struct"] = lambda: struct_decode_hps(messages)
    times = {"struct": 1, "NumPy": 4 if quick else 10}
    return {
        name: timed(call, times.get(name, 40 if quick else 200)) for name, call in calls.items()
    }


def run(options: Options) -> Report:
    report = Report()
    random = np.random.default_rng(options.seed)
    keys = random.integers(-(2**63), 2**63 - 1, ROWS)
    versions = np.arange(ROWS).astype(np.uint64)
    nothing = (np.empty(0, np.int64), np.empty(0, np.uint64))
    changes = TableChanges(keys, random.random((ROWS, DIM), np.float32), versions, *nothing)
    table = []
    for kind in ("hps", "native"):
        for size, full in SIZES.items():
            found = alternate(sides(kind, full, changes, options.quick), 5 if options.quick else 15)
            of_copy = ratio(found["decode"], found["copy"])
            of_numpy = ratio(found["decode"], found["NumPy"])
            names = ("decode", "encode", "NumPy", "struct", "copy")
            speeds = {
                name: f"{Spread.of(found[name]).median:.2f}" if name in found else "–"
                for name in names
            }
            table.append(
                {"format": kind, "message": size, **speeds} | {"of the copy": f"{of_copy}"}
            )
            bar, value = ("numpy", of_numpy.median) if size == "4 KiB" else ("copy", of_copy.median)
            report.values[f"{kind}_{bar}"] = value
    report.tables["Million rows per second"] = table
    return report


BENCHMARK = Benchmark(
    name="codec",
    title="Decoding and encoding update messages",
    run=run,
    bars=BARS,
    measured=("hps/native", "hps/updates/codec.py"),
)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
