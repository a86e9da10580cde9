"""Encoders reject what messages cannot hold, and accept arrays that are not contiguous."""

import numpy as np
import pytest

from hps.tiers.positions import TableChanges
from hps.updates.codec import (
    ConsumerRecords,
    MessageAttributes,
    decode_hps,
    encode_hps,
    encode_native,
)

NOW = 1_700_000_000_000


def changes(n=3, deletions=2, dim=2):
    rows = np.arange(n), np.zeros((n, dim), np.float32), np.zeros(n, np.uint64)
    return TableChanges(*rows, np.arange(deletions), np.zeros(deletions, np.uint64))


@pytest.mark.parametrize(
    ("keys", "vectors", "options", "message"),
    [
        (np.zeros(2, np.int32), np.zeros((2, 2), "f4"), {}, r"keys must be \(n,\) int64"),
        (np.zeros(2, int), np.zeros((3, 2), "f4"), {}, r"\(2, dim\), not \(3, 2\)"),
        (np.zeros(2, int), np.zeros((2, 2), "f2"), {}, "float32, not float16"),
        (np.zeros(2, int), np.zeros((2, 0), "f4"), {}, "dim must be between 1"),
        (np.array([-1]), np.zeros((1, 2), "f4"), {"key_bits": 32}, "keys of 32 bits"),
        (np.array([2**32]), np.zeros((1, 2), "f4"), {"key_bits": 32}, "keys of 32 bits"),
        (np.zeros(1, int), np.zeros((1, 2), "f4"), {"full": 23}, "24 bytes, but at most 23"),
    ],
)
def test_encode_hps_rejects_keys_and_arrays_that_do_not_fit_the_format(
    keys, vectors, options, message
):
    with pytest.raises(ValueError, match=message):
        encode_hps(keys, vectors, **options)


def test_encode_hps_accepts_lowest_and_highest_key_of_32_bits():
    keys = np.array([0, 2**32 - 1])
    messages = encode_hps(keys, np.zeros((2, 2), np.float32), key_bits=32)
    decoded = decode_hps(ConsumerRecords(messages, [NOW], [0]), "t", 2, key_bits=32)
    assert decoded.updates[0].changes.keys.tolist() == keys.tolist()


def test_row_that_fills_a_message_exactly_is_encoded():
    (message,) = encode_hps(np.zeros(1, int), np.zeros((1, 2), np.float32), full=24)
    assert len(message) == 24


@pytest.mark.parametrize("table", ["", "a b", "täble", "a\n", "x" * 65_536])
def test_encode_native_rejects_table_names_with_spaces_or_non_ascii(table):
    with pytest.raises(ValueError, match="printable ASCII"):
        encode_native(table, changes(), MessageAttributes(NOW))


@pytest.mark.parametrize("field", ["ttl_s", "step", "dense_version", "event_ms"])
def test_encode_native_rejects_numbers_out_of_range(field):
    with pytest.raises(ValueError, match="out of range"):
        encode_native("m/t", changes(), MessageAttributes(**{"event_ms": NOW, field: 2**64}))
    with pytest.raises(ValueError, match="out of range"):
        encode_native("m/t", changes(), MessageAttributes(**{"event_ms": NOW, field: -1}))


def test_encode_rejects_arrays_of_mismatched_shapes():
    valid = changes()
    short = TableChanges(
        valid.keys, valid.vectors, valid.versions[:1], valid.deleted, valid.versions
    )
    with pytest.raises(ValueError, match=r"\(3,\) uint64, not \(1,\)"):
        encode_native("m/t", short, MessageAttributes(NOW))
    with pytest.raises(ValueError, match="104 bytes, but at most 90"):
        encode_native("m/t", changes(1, 0, 4), MessageAttributes(NOW), full=90)


@pytest.mark.parametrize("deleted", [np.zeros(2, np.int32), np.zeros((2, 1), np.int64)])
def test_encode_native_rejects_deleted_keys_of_wrong_dtype_or_shape(deleted):
    versions = np.zeros(deleted.shape, np.uint64)
    valid = changes()
    wrong = TableChanges(valid.keys, valid.vectors, valid.versions, deleted, versions)
    with pytest.raises(ValueError, match=r"keys must be \(n,\) int64"):
        encode_native("m/t", wrong, MessageAttributes(NOW))


def test_strided_arrays_are_encoded_like_contiguous_ones():
    keys, vectors = np.arange(10)[::2], np.arange(30, dtype=np.float32).reshape(10, 3)[::2, ::-1]
    messages = encode_hps(keys, vectors)
    (update,) = decode_hps(ConsumerRecords(messages, [NOW], [0]), "t", 3).updates
    np.testing.assert_array_equal(update.changes.vectors, vectors)
    np.testing.assert_array_equal(update.changes.keys, keys)
