"""Update messages to arrays and back: golden messages, and faulty messages that are rejected alone."""

import re
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest

from hps.tiers.positions import TableChanges
from hps.types import make_version
from hps.updates.codec import (
    ConsumerRecords,
    MessageAttributes,
    decode_hps,
    decode_native,
    encode_hps,
    encode_native,
    hps_table,
    hps_topic,
    record_versions,
)
from hps.updates.future_versions import drop_future_versions
from hps.updates.source import Reason

MESSAGES = Path(__file__).parent / "messages"
NOW = 1_700_000_000_000
BEACON = b"HCTR\x08\0\0\0"


def hps_message(*rows, dim=2, key="q"):
    """Rows are (key, value, value …)."""
    head = b"HCTR" + struct.pack("<I", 4 * dim)
    return head + b"".join(struct.pack(f"<{key}{dim}f", *row) for row in rows)


def decode(*payloads, dim=2, offset=0, keys=None, **options):
    m = len(payloads)
    records = ConsumerRecords(payloads, np.full(m, NOW), np.arange(offset, offset + m), keys)
    return decode_hps(records, "ads", dim, **options)


def changes(n=3, deletions=2, dim=2, dtype=np.float32):
    keys = np.arange(n, dtype=np.int64) - 1
    vectors = np.arange(n * dim).reshape(n, dim).astype(dtype)
    versions = np.arange(n, dtype=np.uint64) + np.uint64(2**63)
    deleted = np.arange(deletions, dtype=np.int64) + np.iinfo(np.int64).min
    return TableChanges(keys, vectors, versions, deleted, np.arange(deletions, dtype=np.uint64))


def sealed(message):
    """Correct the checksum, and the length unless the message is too short."""
    message = bytearray(message)
    struct.pack_into("<I", message, 12, len(message))
    struct.pack_into("<I", message, 8, zlib.crc32(message[:8] + message[12:]))
    return bytes(message)


def patched(message, at, layout, *values):
    message = bytearray(message)
    struct.pack_into(layout, message, at, *values)
    return sealed(message)


def same(mine, other):
    for name in ("keys", "vectors", "versions", "deleted", "deleted_versions"):
        one, two = getattr(mine, name), getattr(other, name)
        assert one.dtype == two.dtype
        np.testing.assert_array_equal(one, two)


# --- HPS's format ---


@pytest.mark.parametrize(
    ("name", "key_bits", "keys", "rows"),
    [
        ("hps_int64", 64, [42], [[1, -2]]),
        ("hps_uint32", 32, [2**32 - 1, 42], [[1, -2], [2, 3]]),
    ],
)
def test_hps_golden_messages_are_encoded_and_decoded(name, key_bits, keys, rows):
    golden = (MESSAGES / f"{name}.bin").read_bytes()
    (update,) = decode(golden, key_bits=key_bits).updates
    assert update.table == "ads"
    assert update.changes.keys.tolist() == keys
    assert update.changes.vectors.tolist() == rows
    assert update.changes.vectors.dtype == np.float32
    assert len(update.changes.deleted) == len(update.changes.deleted_versions) == 0
    assert encode_hps(np.array(keys), np.array(rows, np.float32), key_bits=key_bits) == [golden]


def test_hps_versions_are_timestamp_and_offset():
    rows = decode(hps_message((1, 0, 0), (2, 0, 0)), hps_message((1, 0, 0)), offset=2**20 + 5)
    (update,) = rows.updates
    first, second = make_version(NOW, 5), make_version(NOW, 6)
    assert update.changes.versions.tolist() == [first, first, second]
    assert update.messages["event_ms"].tolist() == [NOW, NOW]
    assert update.messages["upserts"].tolist() == [2, 1]


def test_record_without_a_timestamp_gets_the_lowest_version():
    versions = record_versions(np.array([-1, NOW]), np.array([3, 3]))
    assert versions.tolist() == [3, make_version(NOW, 3)]


@pytest.mark.parametrize("unit", [1_000, 1_000_000], ids=["microseconds", "nanoseconds"])
def test_timestamps_too_large_for_a_version_are_rejected_as_ahead(unit):
    timestamps = np.append(NOW * unit + np.arange(1000) * 13_700 * unit, [2**44, 2**63 - 1])
    messages = [hps_message((1, 0, 0))] * len(timestamps)
    offsets = np.arange(len(timestamps))
    (update,) = decode_hps(ConsumerRecords(messages, timestamps, offsets), "m/t", 2).updates
    assert drop_future_versions(update, ahead_s=1e9) == (None, offsets.tolist())
    # The last one that fits is compared by its time.
    assert record_versions(np.array([2**44 - 1]), np.array([0])).tolist() == [(2**44 - 1) << 20]


def test_messages_ignored_by_hps_are_not_faults():
    row = hps_message((7, 1, 2))
    found = decode(BEACON, None, row, row, keys=[None, None, b"key", b""])
    reasons = [Reason(each) for each in found.messages["reason"]]
    assert reasons == [Reason.BEACON, Reason.NULL, Reason.KEYED, Reason.OK]
    assert found.faults() == []
    assert found.updates[0].numbers.tolist() == [3]


@pytest.mark.parametrize(
    ("payload", "reason", "at"),
    [
        (b"", Reason.TRUNCATED, 0),
        (b"HCT", Reason.TRUNCATED, 3),
        (b"HCTR\x08\0\0", Reason.TRUNCATED, 7),
        (b"HPSU\x08\0\0\0", Reason.BAD_MAGIC, 0),
        (b"x", Reason.BAD_MAGIC, 0),
        (hps_message((1, 1, 2))[:-1], Reason.TRUNCATED, 8),
        (hps_message((1, 1, 2), (2, 3, 4)) + b"tail", Reason.TRUNCATED, 40),
        (hps_message((1, 1, 2), key="I"), Reason.TRUNCATED, 8),
        (hps_message((1, 1, 2, 3), dim=3), Reason.ROW_SIZE, 4),
        (b"HCTR" + bytes(12), Reason.ROW_SIZE, 4),
        (hps_message(*[(1, 1, 2)] * 20), Reason.OVERSIZE, 100),
    ],
)
def test_faulty_hps_message_does_not_affect_others(payload, reason, at):
    good = hps_message((5, 1, 2))
    found = decode(good, payload, good, longest=100)
    assert found.faults() == [(1, reason, at)]
    assert found.updates[0].changes.keys.tolist() == [5, 5]
    assert found.updates[0].numbers.tolist() == [0, 2]


def test_messages_without_rows_make_no_update():
    assert decode(BEACON, None).updates == []
    assert decode().updates == []


def test_hps_messages_are_filled_up_to_the_limit():
    keys = np.arange(-5, 5)
    vectors = np.arange(20, dtype=np.float32).reshape(10, 2)
    messages = encode_hps(keys, vectors, full=8 + 3 * 16 + 15)
    assert [len(each) for each in messages] == [56, 56, 56, 24]
    (update,) = decode(*messages).updates
    np.testing.assert_array_equal(update.changes.keys, keys)
    np.testing.assert_array_equal(update.changes.vectors, vectors)
    assert encode_hps(keys[:0], vectors[:0]) == []


def test_hps_topic_is_made_and_parsed():
    assert hps_table(hps_topic("wdl", "sparse_0")) == ("wdl", "sparse_0")
    for other in ("hps_et.wdl", "hps_et.a.b.c", "xhps_et.a.b", "hps_et.a.b\n", "__hps_beacon"):
        assert hps_table(other) is None


# --- the native format ---

GOLDEN = TableChanges(
    np.array([42]),
    np.array([[1, -2]], np.float32),
    np.array([NOW << 20 | 7], np.uint64),
    np.array([-1]),
    np.array([NOW << 20 | 8], np.uint64),
)
ATTRIBUTES = {"event_ms": NOW, "ttl_s": 86_400, "step": 1234, "dense_version": 3}


@pytest.mark.parametrize("name", ["native", "native_newer_minor"])
def test_native_golden_messages_decode(name):
    found = decode_native([(MESSAGES / f"{name}.bin").read_bytes()])
    (update,) = found.updates
    assert update.table == "ctr/ads"
    same(update.changes, GOLDEN)
    assert {field: int(update.messages[field][0]) for field in ATTRIBUTES} == ATTRIBUTES


def test_native_encoding_equals_the_golden_message():
    golden = (MESSAGES / "native.bin").read_bytes()
    assert encode_native("ctr/ads", GOLDEN, MessageAttributes(**ATTRIBUTES)) == [golden]


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize(("n", "deletions"), [(50, 0), (0, 50), (50, 30), (1, 1)])
@pytest.mark.parametrize("full", [200, 1000, 10_000])
def test_native_round_trip_with_any_message_size(dtype, n, deletions, full):
    original = changes(n, deletions, 5, dtype)
    messages = encode_native("m/t", original, MessageAttributes(NOW), full=full)
    assert max(map(len, messages)) <= full
    assert full != 10_000 or len(messages) == 1
    (update,) = decode_native(messages).updates
    same(update.changes, original)
    assert update.messages["upserts"].sum() == n
    assert update.messages["deletes"].sum() == deletions


def test_batch_is_split_by_table_and_row_format_in_order():
    payloads = []
    for step, (table, dim, dtype) in enumerate(
        [("m/b", 2, "f4"), ("m/a", 2, "f4"), ("m/b", 2, "f4"), ("m/b", 3, "f4"), ("m/a", 2, "f2")]
    ):
        original = changes(step + 1, 1, dim, dtype)
        payloads += encode_native(table, original, MessageAttributes(NOW + step, step=step))
    payloads.insert(2, None)
    found = decode_native(payloads)
    kinds = [(u.table, u.changes.vectors.shape, u.changes.vectors.dtype) for u in found.updates]
    assert kinds == [
        ("m/b", (4, 2), np.float32),
        ("m/a", (2, 2), np.float32),
        ("m/b", (4, 3), np.float32),
        ("m/a", (5, 2), np.float16),
    ]
    assert [u.numbers.tolist() for u in found.updates] == [[0, 3], [1], [4], [5]]
    assert [u.messages["step"].tolist() for u in found.updates] == [[0, 2], [1], [3], [4]]
    assert found.updates[0].changes.keys.tolist() == [-1, -1, 0, 1]
    assert found.messages["reason"].tolist() == [0, 0, Reason.NULL, 0, 0, 0]


(GOOD,) = encode_native("m/t", changes(), MessageAttributes(NOW))


def flipped(at):
    message = bytearray(GOOD)
    message[at] ^= 16
    return bytes(message)


@pytest.mark.parametrize(
    ("payload", "reason", "at"),
    [
        (b"", Reason.TRUNCATED, 0),
        (GOOD[:63], Reason.TRUNCATED, 63),
        (GOOD[:-1], Reason.TRUNCATED, len(GOOD) - 1),
        (GOOD + b"x", Reason.MALFORMED, 12),
        (hps_message((1, 1, 2)), Reason.BAD_MAGIC, 0),
        (b"HPSU\2" + GOOD[5:], Reason.UNKNOWN_VERSION, 4),
        (b"HPSU\0", Reason.UNKNOWN_VERSION, 4),
        (flipped(20), Reason.CHECKSUM, 8),
        (flipped(len(GOOD) - 1), Reason.CHECKSUM, 8),
        (flipped(8), Reason.CHECKSUM, 8),
        (patched(GOOD, 29, "<B", 1), Reason.UNKNOWN_VERSION, 29),
        (patched(GOOD, 28, "<B", 6), Reason.UNKNOWN_VERSION, 28),
        (patched(GOOD, 6, "<H", 56), Reason.MALFORMED, 6),
        (patched(GOOD, 6, "<H", 68), Reason.MALFORMED, 6),
        (patched(GOOD, 6, "<H", 0xFFF8), Reason.MALFORMED, 6),
        (patched(GOOD, 24, "<I", 0), Reason.ROW_SIZE, 24),
        (patched(GOOD, 24, "<I", 2**20 + 1), Reason.ROW_SIZE, 24),
        (patched(GOOD, 24, "<I", 3), Reason.MALFORMED, 16),
        (patched(GOOD, 24, "<I", 1), Reason.MALFORMED, 16),
        (patched(GOOD, 16, "<II", 2**32 - 1, 2**32 - 1), Reason.MALFORMED, 16),
        (patched(GOOD, 32, "<q", -1), Reason.MALFORMED, 32),
        (patched(GOOD, 32, "<q", 2**44), Reason.MALFORMED, 32),
        (patched(GOOD, 30, "<H", 0), Reason.MALFORMED, 30),
        (patched(GOOD, 30, "<H", 0xFFFF), Reason.MALFORMED, 30),
        (patched(GOOD, 65, "<B", 0xE4), Reason.MALFORMED, 65),
        (encode_native("m/t", changes(100), MessageAttributes(0))[0], Reason.OVERSIZE, 1000),
    ],
)
def test_faulty_native_message_does_not_affect_others(payload, reason, at):
    found = decode_native([GOOD, payload, GOOD], longest=1000)
    assert found.faults() == [(1, reason, at)]
    assert found.updates[0].numbers.tolist() == [0, 2]
    assert found.updates[0].changes.keys.tolist() == [-1, 0, 1, -1, 0, 1]


def test_truncated_and_changed_messages_are_detected():
    for at in range(len(GOOD)):
        (fault,) = decode_native([GOOD[:at]]).faults()
        assert fault[1] == Reason.TRUNCATED
        assert decode_native([flipped(at)]).faults()


def test_ignored_messages_have_reasons_that_are_not_faults():
    assert [each.name for each in Reason if not each.fault] == ["OK", "BEACON", "NULL", "KEYED"]


# --- the documentation ---


def test_wire_format_page_has_golden_messages_and_all_reasons():
    page = (Path(__file__).parents[3] / "docs/wire-format.md").read_text()
    block = re.search(r"```\n(4850.*?)```", page, re.DOTALL)[1]
    shown = "".join(re.split(r"   +", line)[0] for line in block.splitlines())
    assert bytes.fromhex(shown) == (MESSAGES / "native.bin").read_bytes()
    shown = re.search(r"`(48435452 .*?)`", page)[1]
    assert bytes.fromhex(shown) == (MESSAGES / "hps_int64.bin").read_bytes()
    reasons = {int(number): name for number, name in re.findall(r"\b(\d+) [|(] ?`([A-Z_]+)`", page)}
    assert reasons == {each.value: each.name for each in Reason}
