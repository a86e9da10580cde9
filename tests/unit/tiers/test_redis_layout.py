"""Names and bytes of both layouts in Redis, as golden values: they are a data format."""

import struct

import numpy as np
import pytest

from hps.tiers.redis.layout import (
    READ_SLICE,
    TableLayout,
    TableName,
    entry_stamp,
    pack,
    parse_key,
    scan_pattern,
    stamp_value,
)
from hps.types import EmbeddingTable

# Computed from the definition of HPS's partition hash: key -> partition of 8, of 16.
PARTITIONS = {
    0: (0, 0),
    1: (3, 3),
    2: (6, 14),
    3: (0, 0),
    42: (5, 5),
    1000: (5, 5),
    123456789: (4, 12),
    4294967295: (3, 11),
    4294967296: (1, 1),
    2**63 - 1: (6, 14),
    -1: (4, 12),
}


def keys_of(*keys):
    return np.array(keys, np.int64)


@pytest.mark.parametrize(("partitions", "column"), [(8, 0), (16, 1)])
def test_partitions_equal_those_of_hps(partitions, column):
    layout = TableLayout(EmbeddingTable.make("t", 2), "hps", partitions)
    wanted = [both[column] for both in PARTITIONS.values()]
    assert layout.partition_of(keys_of(*PARTITIONS)).tolist() == wanted


def test_narrow_keys_are_hashed_without_their_sign():
    layout = TableLayout(EmbeddingTable.make("t", 2, key_bits=32), "hps", 8)
    assert layout.partition_of(keys_of(-1, 42, 2**32 + 42)).tolist() == [3, 5, 5]


def test_key_names_of_hps_layout():
    layout = TableLayout(EmbeddingTable.make("user-id", 2, model="wdl_1", version=7), "hps", 2)
    assert layout.rows_keys == [
        b"hps_et{hps_et.wdl_1.user-id/p0}v",
        b"hps_et{hps_et.wdl_1.user-id/p1}v",
    ]
    assert layout.stamps_keys[1] == b"hps_et{hps_et.wdl_1.user-id/p1}t"
    assert layout.positions_keys[1] == b"hps_et{hps_et.wdl_1.user-id/p1}o"
    assert layout.metadata_key == b"hps_et{hps_et.wdl_1.user-id}m"


def test_key_names_of_native_layout():
    layout = TableLayout(EmbeddingTable.make("user-id", 2, model="wdl_1", version=7), "native", 1)
    assert layout.rows_keys == [b"hps:{wdl_1/7/user-id/p0}v"]
    assert layout.stamps_keys == [b"hps:{wdl_1/7/user-id/p0}t"]
    assert layout.positions_keys == [b"hps:{wdl_1/7/user-id/p0}o"]
    assert layout.metadata_key == b"hps:{wdl_1/7/user-id}m"


@pytest.mark.parametrize("kind", ["native", "hps"])
def test_key_names_are_parsed(kind):
    table = EmbeddingTable.make("t-1", 2, model="m_2", version=3)
    layout = TableLayout(table, kind, 12)
    name = TableName("m_2", 3 if kind == "native" else 0, "t-1")
    assert parse_key(kind, layout.rows_keys[11]) == (name, 11, "v")
    assert parse_key(kind, layout.stamps_keys[0]) == (name, 0, "t")
    assert parse_key(kind, layout.metadata_key) == (name, None, "m")
    other = "hps" if kind == "native" else "native"
    for key in (b"", b"x", b"hps:{a/b/c/p0}v", b"hps_et{hps_et.a/p1}v", b"hps:{a/1/c}\xff"):
        assert parse_key(kind, key) is None
    assert parse_key(other, layout.rows_keys[0]) is None


def test_scan_pattern_matches_keys_of_model():
    assert scan_pattern("native") == "hps:{*/*}[vtomuf]"
    assert scan_pattern("native", "wdl") == "hps:{wdl/*}[vtomuf]"
    assert scan_pattern("hps", "wdl") == "hps_et{hps_et.wdl.*}[vtomuf]"


def test_reads_are_packed_as_by_hps():
    table = EmbeddingTable.make("t", 2, model="m")
    wide = TableLayout(table, "hps", 8)
    narrow = TableLayout(EmbeddingTable.make("t", 2, model="m", key_bits=32), "hps", 8)
    head = b"*3\r\n$5\r\nHMGET\r\n$22\r\nhps_et{hps_et.m.t/p%d}v\r\n"
    assert [(p, at.tolist(), request) for p, at, request in wide.reads(keys_of(42, -1))] == [
        (4, [1], head % 4 + b"$8\r\n" + b"\xff" * 8 + b"\r\n"),
        (5, [0], head % 5 + b"$8\r\n\x2a\0\0\0\0\0\0\0\r\n"),
    ]
    assert [(p, at.tolist(), request) for p, at, request in narrow.reads(keys_of(42, -1))] == [
        (3, [1], head % 3 + b"$4\r\n" + b"\xff" * 4 + b"\r\n"),
        (5, [0], head % 5 + b"$4\r\n\x2a\0\0\0\r\n"),
    ]
    assert list(wide.reads(keys_of())) == []


def test_reads_are_sliced():
    layout = TableLayout(EmbeddingTable.make("t", 2), "native", 2)
    keys = np.arange(3 * READ_SLICE)
    reads = list(layout.reads(keys))
    assert max(len(at) for _, at, _ in reads) <= READ_SLICE
    assert len(reads) == 4
    assert sorted(np.concatenate([at for _, at, _ in reads]).tolist()) == keys.tolist()
    for partition, at, request in reads:
        assert request.startswith(b"*%d\r\n" % (len(at) + 2))
        assert layout.rows_keys[partition] in request
        assert (layout.partition_of(keys[at]) == partition).all()
        assert all(struct.pack("<q", key) in request for key in keys[at[:3]].tolist())


def test_native_layout_stores_narrow_keys_in_8_bytes():
    layout = TableLayout(EmbeddingTable.make("t", 2, key_bits=32), "native", 8)
    assert layout.stored_keys(keys_of(-2)).tobytes() == b"\xfe\xff\xff\xff\0\0\0\0"


@pytest.mark.parametrize(("kind", "bits"), [("native", 64), ("hps", 64), ("hps", 32)])
def test_fields_decode_to_keys(kind, bits):
    layout = TableLayout(EmbeddingTable.make("t", 2, key_bits=bits), kind, 8)
    keys = keys_of(0, 1, 2**31, 2**32 - 1) if bits == 32 else keys_of(0, -1, -(2**63), 2**63 - 1)
    fields = [each.tobytes() for each in layout.stored_keys(keys)]
    assert layout.keys(fields).tolist() == keys.tolist()


def test_values_are_encoded_per_layout():
    table = EmbeddingTable.make("t", 2)
    row = np.array([[1.0, -2.0]], np.float32)
    native = TableLayout(table, "native", 1).values.records(row, np.array([258], np.uint64))
    assert native.tobytes() == b"\x02\x01\0\0\0\0\0\0" + b"\0" + b"\0\0\x80\x3f\0\0\0\xc0"
    hps = TableLayout(table, "hps", 1).values.records(row, np.array([258], np.uint64))
    assert hps.tobytes() == b"\0\0\x80\x3f\0\0\0\xc0"


def test_each_key_is_in_one_partition_share():
    layout = TableLayout(EmbeddingTable.make("t", 2), "native", 5)
    keys = np.arange(-500, 500)
    shares = layout.shares(keys)
    assert sorted(np.concatenate([s.at for s in shares]).tolist()) == list(range(1000))
    for share in shares:
        assert set(layout.partition_of(keys[share.at]).tolist()) == {share.partition}
        assert (np.diff(share.at) > 0).all()
    assert layout.shares(keys[:0]) == []
    assert [s.partition for s in layout.shares(keys[:1])] == layout.partition_of(keys[:1]).tolist()


def test_stamps_equal_those_of_hps():
    assert entry_stamp(None) == b""
    assert entry_stamp("random") == b""
    assert entry_stamp("least_used") == b"n"
    assert entry_stamp("oldest", 1_700_000_000.9) == struct.pack("<q", 1_700_000_000)
    assert stamp_value("oldest", struct.pack("<q", 1_700_000_000)) == 1_700_000_000
    assert stamp_value("least_used", b"17") == 17
    for policy in ("oldest", "least_used"):
        assert stamp_value(policy, b"") == 0
        assert stamp_value(policy, b"x") == 0


def test_commands_are_packed_for_the_wire():
    assert pack("SET", b"k\r\n", 12) == b"*3\r\n$3\r\nSET\r\n$3\r\nk\r\n\r\n$2\r\n12\r\n"
