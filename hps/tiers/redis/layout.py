"""Rows in Redis: names, fields, values and packed commands of both layouts, as pure functions.

A table is spread over ``partitions`` by the partition hash of its keys. Each partition has up to four Redis
keys, on one node of a cluster because the part in braces is the same:

==========  ================================================  ====================================
hash        ``native``                                        ``hps``, HPS's own layout
==========  ================================================  ====================================
rows        ``hps:{<model>/<version>/<table>/p<i>}v``         ``hps_et{hps_et.<model>.<table>/p<i>}v``
stamps      ``…}t``: uses or last use, as HPS keeps them      ``…}t``
positions   ``…}o``: ``<topic>/<partition>`` -> offset;       ``…}o``
            ``<topic>/<partition>/id`` -> Kafka's id;
            ``highest`` -> version ever written
floors      ``…}f``: versions of evicted rows, a string
metadata    ``hps:{<model>/<version>/<table>}m``              ``hps_et{hps_et.<model>.<table>}m``
==========  ================================================  ====================================

In the layout ``hps``, ``<table>`` ends with ``@<version>`` for versions without HPS's own names.

A field is the key's 8 little-endian bytes; in the ``hps`` layout 4 with 32-bit keys. A value is versioned
in the ``native`` layout and a bare row in the other (`hps.tiers.row_values`). A stamp is the count of uses
in decimal (``least_used``) or the last use as 8 bytes of little-endian Unix seconds (``oldest``).
"""

from __future__ import annotations

import re
import struct
import time
from collections.abc import Iterator
from hashlib import sha1
from importlib.resources import files
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hps.native import partition_hash
from hps.tiers.base import TableName
from hps.tiers.row_values import Layout, RowValueCodec
from hps.types import EmbeddingTable, IndexArray, KeyArray

Policy = Literal["random", "least_used", "oldest"]

READ_SLICE = 2048
"""Fields per HMGET, so that the server answers other clients in between."""
WRITE_SLICE = 1000
"""Rows per script call, for the same reason, and because Lua's stack holds 8,000 values."""


class LuaScript(NamedTuple):
    text: bytes
    digest: bytes


def _script(*names: str) -> LuaScript:
    """Join files of ``redis_scripts`` to one script, so that later ones use the functions of earlier ones."""
    folder = files("hps.tiers").joinpath("redis_scripts")
    text = b"".join(folder.joinpath(f"{name}.lua").read_bytes() for name in names)
    return LuaScript(text, sha1(text, usedforsecurity=False).hexdigest().encode())


WRITE_SCRIPT, SWEEP_SCRIPT = _script("versions", "write"), _script("versions", "sweep")
TOUCH_SCRIPT, SAMPLE_SCRIPT, DESCRIBE_SCRIPT = map(_script, ("touch", "sample", "describe"))
SCRIPTS = [
    each.text for each in (WRITE_SCRIPT, TOUCH_SCRIPT, SAMPLE_SCRIPT, SWEEP_SCRIPT, DESCRIBE_SCRIPT)
]


class WriteScriptArguments(NamedTuple):
    """The write script's arguments before the rows.

    ``flags``, ``oldest_tombstone`` and ``stamp``: as the script takes them. ``positions``: field,
    offset and ``continues_from`` of each stream position. ``floors``: whether floors are kept."""

    flags: bytes
    oldest_tombstone: bytes
    stamp: bytes
    positions: list[tuple[bytes, bytes, bytes]]
    floors: bool = False


class PartitionKeys(NamedTuple):
    """The positions (n,) in a batch of the keys that belong to one partition."""

    partition: int
    at: IndexArray


class TableLayout:
    """One table's Redis keys and encodings. Immutable."""

    def __init__(self, table: EmbeddingTable, layout: Layout, partitions: int) -> None:
        self.table = table
        self.layout: Layout = layout
        self.partitions = partitions
        self.values = RowValueCodec(table, layout)
        self.key_bytes = 4 if layout == "hps" and table.key_bits == 32 else 8
        stem = _stem(layout, table)
        self.metadata_key = f"{stem}}}m".encode()
        self._names = [f"{stem}/p{i}}}".encode() for i in range(partitions)]
        self.rows_keys = [name + b"v" for name in self._names]
        self.stamps_keys = [name + b"t" for name in self._names]
        self.positions_keys = [name + b"o" for name in self._names]
        self.floors_keys = [name + b"f" for name in self._names]
        self._read_heads = [
            b"$5\r\nHMGET\r\n$%d\r\n%s\r\n" % (len(name), name) for name in self.rows_keys
        ]
        self._field = np.dtype([("h", "S4"), ("key", f"<u{self.key_bytes}"), ("t", "S2")])

    @property
    def metadata(self) -> dict[str, str]:
        """Facts that all users of the table must agree on."""
        return {
            "layout": self.layout,
            "partitions": str(self.partitions),
            "dim": str(self.table.dim),
            "dtype": self.table.row_format.name,
            "key_bits": str(self.table.key_bits),
        }

    def stored_keys(self, keys: KeyArray) -> NDArray[Any]:
        """Convert (n,) keys to Redis field names: (n,) unsigned little-endian."""
        return self.table.narrow(keys).view(np.uint64).astype(f"<u{self.key_bytes}", copy=False)

    def keys(self, fields: list[bytes]) -> KeyArray:
        """Convert the fields of a hash to keys (n,)."""
        stored = np.frombuffer(b"".join(fields), f"<u{self.key_bytes}")
        return stored.astype(np.uint64).view(np.int64)

    def partition_of(self, keys: KeyArray) -> NDArray[np.uint16]:
        """Return the partitions (n,) of keys (n,)."""
        hashed = partition_hash(self.table.narrow(keys))
        return (hashed % np.uint64(self.partitions)).astype(np.uint16)

    def in_share(self, keys: KeyArray, share: float) -> NDArray[np.bool_]:
        """Return a mask (n,) of the keys (n,) that are part of a ``share`` of all keys.

        Keys are chosen by their hash: every node chooses the same ones each time, spread evenly over the
        partitions."""
        high = partition_hash(self.table.narrow(keys)) >> np.uint64(32)
        return high < np.uint64(min(1.0, share) * 2**32)

    def shares(self, keys: KeyArray) -> list[PartitionKeys]:
        """Split the batch by partition, in the batch's order; empty partitions are left out."""
        order, ends = self._by_partition(keys)
        starts = [0, *ends[:-1]]
        return [
            PartitionKeys(i, order[start:end])
            for i, (start, end) in enumerate(zip(starts, ends, strict=True))
            if end > start
        ]

    def _by_partition(self, keys: KeyArray) -> tuple[IndexArray, list[int]]:
        """Return positions (n,) sorted by partition, and the end of each partition."""
        if self.partitions == 1:
            return np.arange(len(keys)), [len(keys)]
        partition = self.partition_of(keys)
        order = np.argsort(partition, kind="stable")
        return order, np.cumsum(np.bincount(partition, minlength=self.partitions)).tolist()

    # -- packed commands --------------------------------------------------------------------------

    def reads(self, keys: KeyArray) -> Iterator[tuple[int, IndexArray, bytes]]:
        """Yield HMGET commands for all keys: partition, positions (n,) in the batch, packed command."""
        order, ends = self._by_partition(keys)
        fields = self._fields(keys[order]).view(np.uint8).data
        width = self._field.itemsize
        begin = 0
        for partition, last in enumerate(ends):
            while begin < last:
                end = min(last, begin + READ_SLICE)
                head = b"*%d\r\n%s" % (end - begin + 2, self._read_heads[partition])
                packed = b"".join((head, fields[begin * width : end * width]))
                yield partition, order[begin:end], packed
                begin = end

    def write(
        self, partition: int, head: WriteScriptArguments, keys: KeyArray, records: NDArray[np.void]
    ) -> bytes:
        """Return a call of the write script: ``head``, then pairs of key and record (of any one length).

        The call names only the hashes that it needs. While a cluster moves a slot, it rejects a script
        unless all of the script's hashes are on one server, and a hash that does not exist is on none."""
        size = records.dtype.itemsize
        length = b"$%d\r\n" % size
        pairs = np.empty(
            len(keys),
            [
                ("field", self._field), ("h", f"S{len(length)}"),
                ("value", f"V{size}"), ("t", "S2"),
            ],
        )  # fmt: skip
        pairs["field"] = self._fields(keys)
        pairs["h"], pairs["t"] = length, b"\r\n"
        pairs["value"] = records.view(f"V{size}")
        names = [self.rows_keys[partition]]
        names += [self.stamps_keys[partition]] if head.stamp else []
        names += [self.floors_keys[partition]] if head.floors else []
        versions = records["version"] if self.values.versioned and len(records) else ()
        bounds = (
            [each(versions).tobytes() for each in (np.min, np.max)] if len(versions) else [b"", b""]
        )
        names += [self.positions_keys[partition]] if head.positions or len(versions) else []
        flags = head.flags + (b"f" if head.floors else b"")
        arguments = [flags, head.oldest_tombstone, head.stamp, *bounds, b"%d" % len(head.positions)]
        arguments += [part for position in head.positions for part in position]
        return packed_script(WRITE_SCRIPT, names, arguments, 2 * len(keys)) + pairs.tobytes()

    def touch(self, partition: int, stamp: bytes, keys: KeyArray) -> bytes:
        names = [self.rows_keys[partition], self.stamps_keys[partition]]
        return packed_script(TOUCH_SCRIPT, names, [stamp], len(keys)) + self._fields(keys).tobytes()

    def remove(self, name: bytes, keys: KeyArray) -> bytes:
        """Return an HDEL of these keys from the hash ``name``."""
        head = b"*%d\r\n$4\r\nHDEL\r\n$%d\r\n%s\r\n" % (len(keys) + 2, len(name), name)
        return head + self._fields(keys).tobytes()

    def _fields(self, keys: KeyArray) -> NDArray[np.void]:
        fields = np.empty(len(keys), self._field)
        fields["h"] = b"$%d\r\n" % self.key_bytes
        fields["key"] = self.stored_keys(keys)
        fields["t"] = b"\r\n"
        return fields


def pack(*arguments: Any) -> bytes:
    """Pack a command for the wire; arguments are bytes, text or numbers."""
    parts = [b"*%d\r\n" % len(arguments)]
    for argument in arguments:
        data = argument if isinstance(argument, bytes) else str(argument).encode()
        parts.append(b"$%d\r\n%s\r\n" % (len(data), data))
    return b"".join(parts)


def packed_script(
    script: LuaScript, keys: list[bytes], arguments: list[bytes], following: int = 0
) -> bytes:
    """Pack an EVALSHA; the caller appends ``following`` more packed arguments."""
    parts = [b"EVALSHA", script.digest, b"%d" % len(keys), *keys, *arguments]
    body = b"".join(b"$%d\r\n%s\r\n" % (len(part), part) for part in parts)
    return b"*%d\r\n" % (len(parts) + following) + body


def entry_stamp(policy: Policy | None, unix_s: float | None = None) -> bytes:
    """Return the stamp of an entry used now, as the scripts take it; empty if no stamps are kept."""
    if policy == "least_used":
        return b"n"
    if policy == "oldest":
        return struct.pack("<q", int(time.time() if unix_s is None else unix_s))
    return b""


def stamp_value(policy: Policy, stored: bytes) -> int:
    """Return a stored stamp as a number; 0 if there is none."""
    if policy == "least_used":
        return int(stored) if stored.isdigit() else 0
    return int(struct.unpack("<q", stored)[0]) if len(stored) == 8 else 0


# -- names ----------------------------------------------------------------------------------------

_NATIVE = re.compile(r"hps:\{([\w-]+)/(\d+)/([\w-]+)(?:/p(\d+))?\}([vtomuf])")
_HPS = re.compile(r"hps_et\{hps_et\.([\w-]+)\.([\w-]+)(?:@(\d+))?(?:/p(\d+))?\}([vtomuf])")


class KeyName(NamedTuple):
    """A Redis key, split into its parts; ``partition`` is None for the metadata."""

    table: TableName
    partition: int | None
    kind: str


def parse_key(layout: Layout, key: bytes) -> KeyName | None:
    """Parse a Redis key; None if it is not a table's."""
    text = key.decode("ascii", "replace")
    if layout == "native":
        if not (match := _NATIVE.fullmatch(text)):
            return None
        model, version, name, partition, kind = match.groups()
    else:
        if not (match := _HPS.fullmatch(text)):
            return None
        model, name, version, partition, kind = match.groups()
    at = None if partition is None else int(partition)
    return KeyName(TableName(model, int(version or 0), name), at, kind)


def scan_pattern(layout: Layout, model: str | None = None) -> str:
    """Return the SCAN pattern of one model or of all; names contain no characters special to SCAN."""
    if layout == "native":
        return f"hps:{{{model or '*'}/*}}[vtomuf]"
    return f"hps_et{{hps_et.{model or '*'}.*}}[vtomuf]"


def _stem(layout: Layout, table: EmbeddingTable) -> str:
    if layout == "native":
        return f"hps:{{{table.id}"
    return f"hps_et{{hps_et.{table.hps_name}"
