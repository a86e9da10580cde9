"""Updates whose rows are narrow: bit for bit into tables of their format, converted into others."""

import numpy as np
import pytest

from hps.errors import BadRequest
from hps.native import twin_codec
from hps.row_format import ROW_FORMAT_NAMES, row_format
from hps.tiers.base import FetchContext, Part
from hps.tiers.cpu.cache import CpuCache
from hps.tiers.positions import TableChanges
from hps.tiers.stored_rows import to_rows, to_vectors
from hps.types import EmbeddingTable
from hps.updates.codec import MessageAttributes, decode_native, encode_native
from hps.updates.ingestor import _stored
from hps.updates.kafka.message_encoder import (
    check_changes,
    encode,
    format_named,
    split_by_partition,
)
from hps.updates.version_clock import VersionClock

NOW = 1_700_000_000_000
NARROW = ROW_FORMAT_NAMES[2:]
KEYS = np.arange(50)


def vectors_of(dim, seed=1):
    return np.random.default_rng(seed).standard_normal((len(KEYS), dim)).astype(np.float32)


def table_of(rows, dim=8):
    return EmbeddingTable.make("t", dim, model="m", rows=rows)


def changes_of(rows, dim=8, **options):
    values = options.pop("values", vectors_of(dim))
    clock = VersionClock()
    return check_changes(KEYS, values, None, [77], clock, NOW, format_named(rows))


@pytest.mark.parametrize("rows", NARROW)
@pytest.mark.parametrize("full", [1 << 20, 300])
def test_messages_carry_narrow_rows_bit_for_bit(rows, full):
    changes = changes_of(rows)
    messages = encode_native("m/t", changes, MessageAttributes(NOW), full=full)
    assert (len(messages) > 1) == (full == 300)
    (update,) = decode_native(messages).updates
    found = update.changes
    assert (found.row_format, found.row_dim, found.dim) == (row_format(rows), 8, 8)
    assert found.vectors.tobytes() == to_rows(table_of(rows), vectors_of(8)).tobytes()
    assert found.deleted.tolist() == [77]
    assert sum(map(len, messages)) < sum(
        map(len, encode_native("m/t", changes_of("float32"), MessageAttributes(NOW), full=full))
    )


@pytest.mark.parametrize("rows", NARROW)
def test_both_decoders_agree(rows):
    messages = encode_native("m/t", changes_of(rows, 5), MessageAttributes(NOW), full=500)
    fields, groups = twin_codec.decode_native(messages, 1 << 20)
    update = decode_native(messages).updates[0]
    assert fields.tobytes() == decode_native(messages).messages.tobytes()
    assert groups[0][5].tobytes() == update.changes.vectors.tobytes()
    cut = [messages[0][:-1], *messages[1:]]
    assert (
        twin_codec.decode_native(cut, 1 << 20)[0].tobytes() == decode_native(cut).messages.tobytes()
    )


@pytest.mark.parametrize("rows", NARROW)
def test_rows_of_the_table_format_are_stored_bit_for_bit(rows):
    table = table_of(rows)
    stored, finite = _stored(table, changes_of(rows))
    assert finite.all()
    assert stored.tobytes() == to_rows(table, vectors_of(8)).tobytes()


@pytest.mark.parametrize("sent", NARROW)
@pytest.mark.parametrize("kept", ["float32", "float16", "int8", "int4"])
def test_rows_of_another_format_are_converted(sent, kept):
    table = table_of(kept)
    stored, finite = _stored(table, changes_of(sent))
    decoded = to_vectors(table_of(sent), to_rows(table_of(sent), vectors_of(8)))
    assert finite.all()
    assert stored.tobytes() == to_rows(table, decoded).tobytes()


def test_rows_with_a_scale_that_is_not_finite_are_not_used():
    changes = changes_of("int8")
    changes.vectors[3, -4:-2] = np.float16([np.nan]).view(np.uint8)
    changes.vectors[5, -2:] = np.float16([np.inf]).view(np.uint8)
    for table in (table_of("int8"), table_of("float32")):
        finite = _stored(table, changes)[1]
        assert np.flatnonzero(~finite).tolist() == [3, 5]


@pytest.mark.parametrize("rows", ["int8", "int4", "float8_e4m3"])
def test_a_producer_sends_narrow_rows_as_they_are(rows):
    narrow = to_rows(table_of(rows), vectors_of(8))
    changes = changes_of(rows, values=narrow)
    assert changes.row_dim == 8
    assert changes.vectors.tobytes() == narrow.tobytes()


def test_a_producer_refuses_what_readers_would():
    narrow = to_rows(table_of("int8"), vectors_of(8))
    narrow[4, -4:-2] = np.float16([np.nan]).view(np.uint8)
    with pytest.raises(BadRequest, match=r"rows\[4\] holds a value that is not finite"):
        changes_of("int8", values=narrow)
    large = vectors_of(8)
    large[7, 0] = 1e9
    with pytest.raises(BadRequest, match=r"row 7 .* too large for int8"):
        changes_of("int8", values=large)
    with pytest.raises(BadRequest, match=r"no row format 'int9'; did you mean 'int8'\?"):
        format_named("int9")


def test_partitions_and_messages_keep_the_format():
    parts = dict(split_by_partition(changes_of("int4"), 4, 4))
    assert len(parts) == 4
    found = [
        decode_native(encode("native", "m/t", each, MessageAttributes(NOW))).updates[0].changes
        for each in parts.values()
    ]
    assert all(each.row_format == row_format("int4") for each in found)
    assert sorted(np.concatenate([each.keys for each in found])) == KEYS.tolist()


@pytest.mark.parametrize(
    ("width", "dtype", "dim", "message"),
    [
        (12, np.uint8, 9, r"must be \(50, 13\) uint8, not \(50, 12\) uint8"),
        (12, np.int16, 8, "uint8, not .* int16"),
        (4, np.uint8, 0, "dim must be between 1"),
    ],
)
def test_stored_rows_of_another_shape_are_not_encoded(width, dtype, dim, message):
    versions = np.ones(len(KEYS), np.uint64)
    rows = np.zeros((len(KEYS), width), dtype)
    changes = TableChanges(KEYS, rows, versions, KEYS[:0], versions[:0], row_format("int8"), dim)
    with pytest.raises(ValueError, match=message):
        encode_native("m/t", changes, MessageAttributes(NOW))


def test_a_cache_serves_rows_that_came_narrow():
    table = table_of("int8")
    stored, _ = _stored(table, changes_of("int8"))
    cache = CpuCache({table: 100})
    cache.insert(table, KEYS, stored, np.ones(len(KEYS), np.uint64))
    part = Part.make(table, KEYS)
    cache.fetch([part], FetchContext())
    assert part.out.tobytes() == stored.tobytes()
    out = np.empty((len(KEYS), 8), np.float32)
    assert cache.gather([(table, KEYS, out)])
    np.testing.assert_array_equal(out, to_vectors(table, stored))
    assert cache.gather([(table, KEYS, raw := np.empty_like(stored))])
    assert raw.tobytes() == stored.tobytes()
