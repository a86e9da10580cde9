"""The number of rows in an update batch."""

import numpy as np

from hps.tiers.positions import TableChanges
from hps.updates.codec import MessageAttributes, decode_native, encode_native
from hps.updates.source import UpdateBatch


def changes(n, gone):
    rows = np.arange(n), np.zeros((n, 2), np.float32), np.zeros(n, np.uint64)
    return TableChanges(*rows, np.arange(gone), np.zeros(gone, np.uint64))


def test_rows_and_deletions_of_all_tables_count():
    messages = [
        *encode_native("m/a", changes(3, 1), MessageAttributes(0)),
        *encode_native("m/b", changes(0, 2), MessageAttributes(0)),
    ]
    assert UpdateBatch(decode_native(messages).updates).rows == 6
    assert UpdateBatch([]).rows == 0
