"""A producer's arrays as messages: versions, partitions, rejected arrays."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from hps.errors import BadRequest
from hps.types import make_version
from hps.updates.codec import (
    ConsumerRecords,
    MessageAttributes,
    decode_hps,
    decode_native,
    encode_hps,
)
from hps.updates.kafka.message_encoder import (
    check_changes,
    encode,
    partition_of,
    split_by_partition,
    unix_ms,
)
from hps.updates.version_clock import VersionClock

NOW = 1_700_000_000_000
ROWS = np.arange(6, dtype=np.float32).reshape(3, 2)


class DlpackArray:
    """An array with nothing but DLPack."""

    def __init__(self, array) -> None:
        self.array = array

    def __dlpack__(self, **_options):
        return self.array.__dlpack__()

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


def checked(keys=(1, 2, 3), rows=ROWS, versions=None, deleted=None, clock=None):
    return check_changes(keys, rows, versions, deleted, clock or VersionClock(0), NOW)


def test_versions_start_at_the_event_time_and_increase_over_rows_and_deletions():
    changes = checked(deleted=[7, 8])
    first = make_version(NOW)
    assert changes.versions.tolist() == [first, first + 1, first + 2]
    assert changes.deleted_versions.tolist() == [first + 3, first + 4]


def test_explicit_versions_apply_to_rows_then_deletions():
    changes = checked(versions=[5, 6, 7, 8], deleted=[9])
    assert changes.versions.tolist() == [5, 6, 7]
    assert changes.deleted_versions.tolist() == [8]


def test_arrays_with_dlpack_are_accepted():
    changes = checked(keys=DlpackArray(np.array([1, 2, 3])), rows=DlpackArray(ROWS))
    assert changes.keys.tolist() == [1, 2, 3]
    np.testing.assert_array_equal(changes.vectors, ROWS)


def test_unsigned_keys_are_reinterpreted_as_int64():
    assert checked(keys=np.array([2**64 - 1, 1, 2], np.uint64)).keys.tolist() == [-1, 1, 2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"keys": [1.5, 2, 3]}, "keys must be integers"),
        ({"keys": [[1, 2, 3]]}, r"keys must be \(n,\), not \(1, 3\)"),
        ({"keys": [1]}, r"rows must be \(1, dim\), as there are 1 keys, not \(3, 2\)"),
        ({"rows": ROWS.reshape(-1)}, r"rows must be \(3, dim\)"),
        ({"rows": ROWS.astype(np.float64)}, "float32 or float16, not float64; convert"),
        ({"rows": np.where(ROWS == 4, np.nan, ROWS).astype("f4")}, r"rows\[2\] .* not finite"),
        ({"versions": [1, 2]}, r"versions must be \(3,\), of the 3 keys"),
        ({"versions": [1, 2, 3], "deleted": [1]}, r"versions must be \(4,\)"),
        ({"versions": [-1, 2, 3]}, "versions must be whole numbers"),
        ({"versions": [1.0, 2.0, 3.0]}, "versions must be whole numbers"),
        ({"deleted": ["a"]}, "deleted: keys must be integers"),
    ],
)
def test_check_changes_rejects_mismatched_arrays(arguments, message):
    with pytest.raises(BadRequest, match=message):
        checked(**arguments)


@pytest.mark.parametrize("time", [NOW, -1.0, 1e300, float("nan")])
def test_event_time_out_of_range_is_rejected(time):
    with pytest.raises(BadRequest, match="Unix seconds"):
        unix_ms(time)


def test_event_time_is_converted_from_seconds_to_ms():
    assert unix_ms(1_700_000_000.25) == NOW + 250


def test_key_groups_and_partitions_equal_those_of_hps():
    keys = np.array([0, 1, 2, 3, 42, 1000, 123456789, 2**32 - 1, 2**32, 2**63 - 1, -1])
    groups = [0, 3, 6, 0, 5, 5, 4, 3, 1, 6, 4]
    assert partition_of(keys, 8, 100).tolist() == groups
    assert partition_of(keys, 8, 3).tolist() == [group % 3 for group in groups]


@given(
    hnp.arrays(np.int64, st.integers(0, 60), elements=st.integers(-50, 50)),
    hnp.arrays(np.int64, st.integers(0, 60), elements=st.integers(-50, 50)),
    st.integers(1, 12),
    st.integers(1, 12),
)
def test_changes_of_a_key_go_to_one_partition_in_order(keys, deleted, groups, partitions):
    rows = np.arange(len(keys), dtype=np.float32).reshape(-1, 1)
    changes = check_changes(keys, rows, None, deleted, VersionClock(), NOW)
    parts = dict(split_by_partition(changes, groups, partitions))
    expected = partition_of(changes.keys, groups, partitions)
    expected_gone = partition_of(changes.deleted, groups, partitions)
    assert sum(len(part.keys) + len(part.deleted) for part in parts.values()) == len(keys) + len(
        deleted
    )
    for number, part in parts.items():
        np.testing.assert_array_equal(part.keys, keys[expected == number])
        np.testing.assert_array_equal(part.vectors, rows[expected == number])
        np.testing.assert_array_equal(part.versions, changes.versions[expected == number])
        np.testing.assert_array_equal(part.deleted, deleted[expected_gone == number])
        np.testing.assert_array_equal(
            part.deleted_versions, changes.deleted_versions[expected_gone == number]
        )


def test_native_messages_hold_all_attributes():
    attributes = MessageAttributes(NOW, 60, 1234, 3)
    (message,) = encode("native", "m/t", checked(deleted=[9]), attributes)
    decoded = decode_native([message])
    (update,) = decoded.updates
    assert (update.table, update.changes.deleted.tolist()) == ("m/t", [9])
    (facts,) = decoded.messages
    assert (facts["event_ms"], facts["ttl_s"], facts["step"], facts["dense_version"]) == (
        NOW, 60, 1234, 3,
    )  # fmt: skip


@pytest.mark.parametrize("bits", [32, 64])
def test_hps_messages_equal_those_of_hps(bits):
    changes = checked()
    messages = encode("hps", "t", changes, MessageAttributes(NOW), key_bits=bits)
    assert messages == encode_hps(changes.keys, ROWS, key_bits=bits)
    decoded = decode_hps(
        ConsumerRecords(messages, np.array([NOW]), np.array([0])), "t", 2, key_bits=bits
    )
    np.testing.assert_array_equal(decoded.updates[0].changes.vectors, ROWS)


@pytest.mark.parametrize(
    ("changes", "attributes", "options", "message"),
    [
        (
            checked(deleted=[1]),
            MessageAttributes(NOW),
            {},
            "no deletions; send them in the native format",
        ),
        (checked(), MessageAttributes(NOW, ttl_s=1), {}, "has no ttl_s"),
        (checked(), MessageAttributes(NOW, step=1), {}, "has no ttl_s, step"),
        (
            checked(rows=ROWS.astype("f2")),
            MessageAttributes(NOW),
            {},
            "table t: vectors must be float32",
        ),
        (checked(), MessageAttributes(NOW), {"full": 23}, "24 bytes, but at most 23"),
        (checked(keys=[-1, 2, 3]), MessageAttributes(NOW), {"key_bits": 32}, "keys of 32 bits"),
    ],
)
def test_encode_rejects_attributes_that_hps_messages_do_not_have(
    changes, attributes, options, message
):
    with pytest.raises(BadRequest, match=message):
        encode("hps", "t", changes, attributes, **options)


def test_encode_rejects_a_row_larger_than_a_message():
    with pytest.raises(BadRequest, match="message of one row has 96 bytes, but at most 80"):
        encode("native", "m/t", checked(), MessageAttributes(NOW), full=80)
