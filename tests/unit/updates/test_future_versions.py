"""Messages with future versions are dropped; everything else stays."""

import time

import numpy as np
import pytest

from hps.tiers.positions import TableChanges
from hps.types import make_version
from hps.updates.codec import MessageAttributes, decode_native, encode_native
from hps.updates.future_versions import drop_future_versions

HOUR_S = 3600.0
NOW_MS = int(time.time() * 1000)
LATE_MS = NOW_MS + 2 * 3_600_000


def message(keys, deleted, unix_ms):
    """Rows and deletions of the same moment; a row is its key twice."""
    stamps = np.full(len(keys) + len(deleted), make_version(unix_ms), np.uint64)
    rows = np.repeat(np.array(keys, np.float32)[:, None], 2, axis=1).reshape(-1, 2)
    changes = TableChanges(
        np.array(keys, np.int64), rows, stamps[: len(keys)],
        np.array(deleted, np.int64), stamps[len(keys) :],
    )  # fmt: skip
    (one,) = encode_native("m/t", changes, MessageAttributes(NOW_MS))
    return one


def updated(*messages):
    (update,) = decode_native(messages).updates
    return update


def test_update_without_future_versions_is_unchanged():
    update = updated(message([1, 2], [3], NOW_MS), message([4], [], NOW_MS + 3_000_000))
    assert drop_future_versions(update, HOUR_S) == (update, [])


@pytest.mark.parametrize(
    ("late", "keys", "deleted"),
    [(0, [3, 4], [20, 30, 40]), (1, [1, 2, 4], [10, 30, 40]), (2, [1, 2, 3, 4], [10, 20])],
)
def test_whole_message_with_a_future_version_is_dropped(late, keys, deleted):
    holds = [([1, 2], [10]), ([3], [20]), ([], [30, 40])]
    messages = [
        message(*each, LATE_MS if number == late else NOW_MS) for number, each in enumerate(holds)
    ]
    messages.append(message([4], [], NOW_MS))
    kept, numbers = drop_future_versions(updated(None, *messages), HOUR_S)
    assert numbers == [
        late + 1
    ]  # index among the polled messages, the one without payload included
    assert kept.changes.keys.tolist() == keys
    assert kept.changes.vectors.tolist() == [[key, key] for key in keys]
    assert kept.changes.deleted.tolist() == deleted
    assert len(kept.changes.versions) == len(keys)
    assert len(kept.changes.deleted_versions) == len(deleted)
    assert kept.messages["upserts"].sum() == len(keys)
    assert kept.messages["deletes"].sum() == len(deleted)
    assert kept.numbers.tolist() == [n + 1 for n in range(4) if n != late]


def test_single_future_row_drops_its_message():
    (one,) = encode_native(
        "m/t",
        TableChanges(
            np.arange(3), np.zeros((3, 2), np.float32),
            np.array([0, make_version(LATE_MS), 5], np.uint64),
            np.empty(0, np.int64), np.empty(0, np.uint64),
        ),
        MessageAttributes(NOW_MS),
    )  # fmt: skip
    assert drop_future_versions(updated(one), HOUR_S) == (None, [0])
    kept, numbers = drop_future_versions(updated(one), 3 * HOUR_S)
    assert (kept.changes.keys.tolist(), numbers) == ([0, 1, 2], [])


def test_largest_version_is_ahead_of_any_clock():
    (one,) = encode_native(
        "m/t",
        TableChanges(
            np.empty(0, np.int64), np.zeros((0, 2), np.float32), np.empty(0, np.uint64),
            np.array([7]), np.array([2**64 - 1], np.uint64),
        ),
        MessageAttributes(NOW_MS),
    )  # fmt: skip
    assert drop_future_versions(updated(one), 1e9) == (None, [0])
