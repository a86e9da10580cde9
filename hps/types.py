"""Value types of the library: tables, keys, requests and results.

Arrays in, arrays out. Keys are ``(n,) int64``, vectors ``(n, dim)`` of the table's dtype, rows as tiers
store them ``(n, row_width)`` of its row_dtype (`hps.row_format`), versions ``(n,) uint64``, sources ``(n,)
uint8``; all C-contiguous, NumPy on the host and CuPy on the device. Every int64 is a valid key: negative
ones and reinterpreted unsigned 64-bit hashes included."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from hps.row_format import FLOAT32, RowFormat, row_format, row_format_of
from hps.tracing import RequestContext

KeyArray = NDArray[np.int64]
VectorArray = NDArray[Any]
RowArray = NDArray[Any]
VersionArray = NDArray[np.uint64]
SourceArray = NDArray[np.uint8]
IndexArray = NDArray[np.int64]

Pooling = Literal["sum", "mean", "sqrtn", "none"]


class Source(IntEnum):
    """The tier that a row came from, as reported per key (``f.source`` on the wire)."""

    DEFAULT = 0
    GPU = 1
    CPU = 2
    REDIS = 3
    ROCKSDB = 4
    MEMORY = 5
    REMOTE = 6


@dataclass(frozen=True, slots=True)
class MissPolicy:
    """Rule for a lookup's keys that are not in memory (invariant 7).

    ``wait``: fetch from the stores. ``default_then_promote``: answer with the default vector and promote
    the row in the background; but wait if fewer than ``min_hit_rate`` of the table's unique keys in the
    batch were in memory."""

    kind: Literal["wait", "default_then_promote"] = "wait"
    min_hit_rate: float = 0.0


@dataclass(frozen=True, eq=False, slots=True)
class EmbeddingTable:
    """One version of a named map from key to vector.

    Compared and hashed by identity: a process has one object per table, and tiers key their state by it.
    ``default`` is ``(dim,)`` of ``dtype``, read-only: the answer for an unknown key.
    ``tombstone_ttl_s`` is the time for which a deletion is kept, so that an older insert that arrives late
    is dropped. ``ttl_s``: the age at which a row expires, or None. ``key_bits``: the low bits that count.
    ``hps_version``: the version in its names in the layout `hps`; 0: its names are HPS's own, without one.
    ``row_format``: how tiers store a row. ``dtype``: of the vectors that lookups return."""

    model: str
    version: int
    name: str
    dim: int
    dtype: np.dtype[Any]
    default: VectorArray
    miss: MissPolicy = MissPolicy()
    tombstone_ttl_s: float = 86_400.0
    key_bits: Literal[32, 64] = 64
    hps_version: int = 0
    row_format: RowFormat = FLOAT32
    ttl_s: float | None = None

    @property
    def id(self) -> str:
        """``model/version/name``: unique within a process; used in stores, logs and metrics."""
        return f"{self.model}/{self.version}/{self.name}"

    @property
    def hps_name(self) -> str:
        """The name in HPS's layout: ``<model>.<table>``, with ``@<version>`` unless it is HPS's own."""
        version = f"@{self.hps_version}" if self.hps_version else ""
        return f"{self.model}.{self.name}{version}"

    @property
    def row_dtype(self) -> np.dtype[Any]:
        """The dtype of a stored row's items."""
        return self.row_format.dtype

    @property
    def row_width(self) -> int:
        """The items of a stored row."""
        return self.row_format.width(self.dim)

    @property
    def row_bytes(self) -> int:
        """The bytes of a stored row."""
        return self.row_format.row_bytes(self.dim)

    @property
    def vector_bytes(self) -> int:
        """The bytes of a vector that a lookup returns."""
        return self.dim * self.dtype.itemsize

    @property
    def stores_vectors(self) -> bool:
        """True if a stored row is its vector, in the dtype of lookups."""
        return self.row_format.is_plain and self.row_dtype == self.dtype

    def is_like(self, other: EmbeddingTable) -> bool:
        """True if ``other`` has the same name and properties."""
        names = "id", "dim", "dtype", "miss", "tombstone_ttl_s", "key_bits", "row_format", "ttl_s"
        same = all(getattr(self, name) == getattr(other, name) for name in names)
        return same and np.array_equal(self.default, other.default, equal_nan=True)

    def narrow(self, keys: KeyArray) -> KeyArray:
        """Reduce ``keys (n,) int64`` to the table's key bits: all 64, or the low 32."""
        return keys if self.key_bits == 64 else keys & np.int64(0xFFFF_FFFF)

    @staticmethod  # its arguments are the fields, named in most calls
    def make(
        name: str,
        dim: int,
        *,
        model: str = "model",
        version: int = 1,
        dtype: Any = np.float32,
        default: Any = 0.0,
        miss: MissPolicy | None = None,
        tombstone_ttl_s: float = 86_400.0,
        key_bits: Literal[32, 64] = 64,
        hps_version: int = 0,
        rows: str | None = None,
        ttl_s: float | None = None,
    ) -> EmbeddingTable:
        """Build a table. ``default``: a scalar or ``dim`` values. ``rows``: a format; None: as ``dtype``."""
        dt = np.dtype(dtype)
        row = np.ascontiguousarray(np.broadcast_to(np.asarray(default, dt), (dim,)))
        row.flags.writeable = False
        stored = row_format_of(dt) if rows is None else row_format(rows)
        first = model, version, name, dim, dt, row, miss or MissPolicy()
        return EmbeddingTable(*first, tombstone_ttl_s, key_bits, hps_version, stored, ttl_s)


@dataclass(frozen=True, slots=True)
class JaggedKeys:
    """The keys of one feature for a batch of samples.

    Fixed hotness: ``keys`` is ``(batch * hotness,)`` and ``offsets`` is None. Jagged: sample ``i``
    has ``keys[offsets[i]:offsets[i + 1]]`` with ``offsets (batch + 1,) int64``. ``weights`` is
    ``(n,) float32`` or None, and multiplies each vector before it is summed."""

    keys: KeyArray
    batch: int
    offsets: IndexArray | None = None
    weights: NDArray[np.float32] | None = None

    @property
    def hotness(self) -> int | None:
        """Keys per sample, or None when jagged (0 for an empty batch)."""
        if self.offsets is not None:
            return None
        return len(self.keys) // self.batch if self.batch else 0

    @staticmethod
    def dense(keys: Any) -> JaggedKeys:
        """Build from ``keys (batch,)`` or ``(batch, hotness)``; unsigned 64-bit keys are reinterpreted.

        Raises ``TypeError`` for anything but integers, ``ValueError`` for lists of mixed depth."""
        try:
            arr = as_keys(keys)
        except ValueError:
            raise ValueError(_mixed_depth(keys)) from None
        return JaggedKeys(arr.reshape(-1), arr.shape[0])

    @staticmethod
    def from_lists(
        keys: Sequence[Sequence[int]], weights: Sequence[Sequence[float]] | None = None
    ) -> JaggedKeys:
        """Build from one list (or array) of keys per sample; ``weights`` has the same lengths.

        Raises ``TypeError`` for keys that are not integers, ``ValueError`` for weights of other lengths.
        Converts element by element: arrays with ``offsets`` are faster for large batches."""
        try:
            lengths = [len(bag) for bag in keys]
        except TypeError:
            raise TypeError(_mixed_depth(keys)) from None
        flat = as_keys([key for bag in keys for key in bag])
        if flat.ndim != 1:
            raise TypeError(f"a sample's keys must be one flat list, got shape {flat.shape[1:]}")
        offsets = np.zeros(len(lengths) + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        if weights is None:
            return JaggedKeys(flat, len(lengths), offsets)
        if len(weights) != len(lengths):
            raise ValueError(f"{len(lengths)} samples have keys, {len(weights)} have weights")
        for i, (length, bag) in enumerate(zip(lengths, weights, strict=True)):
            if len(bag) != length:
                raise ValueError(f"sample {i} has {length} keys, but {len(bag)} weights")
        factors = np.asarray([weight for bag in weights for weight in bag], np.float32)
        return JaggedKeys(flat, len(lengths), offsets, factors)

    @staticmethod
    def of(keys: Any) -> JaggedKeys:
        """Build from keys in any form.

        That is ``JaggedKeys``, integers ``(batch,)`` or ``(batch, hotness)``, or a list of keys per sample.
        Raises ``TypeError`` or ``ValueError``."""
        if isinstance(keys, JaggedKeys):
            return keys
        if _is_nested(keys):
            if len({len(bag) for bag in keys}) > 1:
                return JaggedKeys.from_lists(keys)
            keys = list(keys)
        return JaggedKeys.dense(keys)


def _is_nested(keys: Any) -> bool:
    """True if ``keys`` is a list, or an array of objects, of lists or arrays."""
    is_list = isinstance(keys, list | tuple)
    if not is_list and not (isinstance(keys, np.ndarray) and keys.dtype == object):
        return False
    return all(isinstance(bag, list | tuple | np.ndarray) for bag in keys)


def _mixed_depth(keys: Sequence[Any]) -> str:
    """Error message for keys of which some, but not all, are lists."""
    wrong = [i for i, bag in enumerate(keys) if not hasattr(bag, "__len__")]
    if not wrong:
        return "a sample's keys must be one flat list"
    return f"expected a list of keys for each sample, got {keys[wrong[0]]!r} for sample {wrong[0]}"


def as_keys(keys: Any) -> KeyArray:
    """Convert integer keys to C-contiguous int64, bit for bit (uint64 is reinterpreted).

    Raises ``TypeError`` for anything but integers of 64 bits."""
    arr = np.ascontiguousarray(keys)
    if arr.dtype.kind in "fO" and isinstance(keys, list | tuple):
        arr = _large_integers(keys, arr)
    if arr.dtype == np.int64:
        return arr
    if arr.dtype == np.uint64:
        return arr.view(np.int64)
    if arr.dtype.kind in "iu":
        return arr.astype(np.int64)
    if arr.size == 0:
        return arr.astype(np.int64)
    wrong = [key for key in arr.flat if not _is_key(key)][:1] if arr.dtype == object else []
    value = f"{wrong[0]!r}" if wrong else f"dtype {arr.dtype}"
    raise TypeError(f"keys must be integers from -2^63 to 2^64-1, got {value}")


def _large_integers(keys: Sequence[Any], arr: NDArray[Any]) -> NDArray[Any]:
    """Convert ``keys`` to uint64; return ``arr`` if one of them is not an integer of 64 bits.

    NumPy converts a list with integers from 2^63 on and smaller ones to float64, ``arr``."""
    exact = np.array(keys, object)
    if not all(_is_key(key) for key in exact.flat):
        return arr
    return (exact & (2**64 - 1)).astype(np.uint64)


def _is_key(key: Any) -> bool:
    return type(key) is int and -(2**63) <= key < 2**64


@dataclass(slots=True)
class LookupRequest:
    """Keys of one batch, by feature name.

    ``deadline`` is a ``time.monotonic()`` instant or None. ``out`` optionally holds the caller's
    arrays per feature that receive the vectors. ``want_source`` requests sources and versions per key.
    ``by_table``: the names are tables, keys are used unchanged and vectors are unpooled.
    ``origin`` is the request's id and trace, or None. ``stored_rows`` requests rows as they are stored, see
    `LookupResult`."""

    features: Mapping[str, JaggedKeys]
    deadline: float | None = None
    want_source: bool = False
    out: Mapping[str, VectorArray] | None = None
    by_table: bool = False
    origin: RequestContext | None = None
    stored_rows: bool = False


@dataclass(slots=True)
class LookupResult:
    """Vectors of a lookup, by feature: ``(batch, dim)`` if pooled, ``(n, dim)`` if pooling is ``none``.

    ``sources[f] (n,) uint8`` and ``versions[f] (n,) uint64`` are filled with ``want_source``.
    ``defaulted`` counts keys (not unique keys) that were answered with the table's default;
    ``degraded`` names the tiers that were skipped. ``stale_s`` is the possible age of the rows in seconds
    if it exceeds `updates.max_staleness_s`; else 0.

    Of ``node.lookup``, ``offsets[f] (batch + 1,) int64`` divides vectors of jagged keys that are not pooled
    into samples; with ``padded``, vectors are ``(batch, max_length, dim)``, and ``masks[f] (batch,
    max_length) bool`` is True at keys (`hps.lookup.padding`).

    With ``stored_rows``, what is not pooled and comes from tables of narrow row formats are rows as they are
    stored, ``(n, row_width)`` (`hps.row_format`). It is False if a default was among these rows, and where
    rows are on a GPU."""

    vectors: dict[str, VectorArray]
    sources: dict[str, SourceArray] = field(default_factory=dict)
    versions: dict[str, VersionArray] = field(default_factory=dict)
    defaulted: int = 0
    degraded: tuple[str, ...] = ()
    stale_s: int = 0
    stored_rows: bool = False
    offsets: dict[str, IndexArray] = field(default_factory=dict)
    masks: dict[str, NDArray[np.bool_]] = field(default_factory=dict)


@dataclass(slots=True)
class PredictRequest:
    """A ranking request: keys per categorical feature plus the named dense input tensors.

    Features marked ``context`` may come with batch 1 and are broadcast over the others' batch
    (the candidates). ``top_k`` keeps the k best candidates by the model's ranking output.
    """

    features: Mapping[str, JaggedKeys]
    dense: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    top_k: int | None = None
    deadline: float | None = None
    want_source: bool = False
    outputs: tuple[str, ...] | None = None
    origin: RequestContext | None = None


@dataclass(slots=True)
class PredictResult:
    """Named outputs, in the model's order; with ``top_k`` also ``top_k_index (k,) int64``.

    ``defaulted``, ``degraded`` and ``stale_s`` are those of the lookup."""

    outputs: dict[str, NDArray[Any]]
    sources: dict[str, SourceArray] = field(default_factory=dict)
    defaulted: int = 0
    degraded: tuple[str, ...] = ()
    stale_s: int = 0


class Progress(Protocol):
    """Progress reports of long work; the command line draws bars, a server logs, tests ignore them."""

    def task(
        self, title: str, total: int, unit: str = "rows"
    ) -> AbstractContextManager[Callable[[int], None]]:
        """Open a task of ``total`` units; call the returned function with each step's size."""
        ...


class NoProgress:
    """Ignores progress."""

    def task(
        self, title: str, total: int, unit: str = "rows"
    ) -> AbstractContextManager[Callable[[int], None]]:
        return nullcontext(lambda _step: None)


# A row's version: Unix milliseconds << 20 | sequence. The highest wins.
VERSION_SEQUENCE_BITS = 20


def make_version(unix_ms: int, sequence: int = 0) -> int:
    """Version of a write at ``unix_ms`` with a tie-breaking ``sequence`` (taken mod 2^20)."""
    return (unix_ms << VERSION_SEQUENCE_BITS) | (sequence & ((1 << VERSION_SEQUENCE_BITS) - 1))


def version_now(sequence: int = 0) -> int:
    """Version of a write at this moment."""
    return make_version(time.time_ns() // 1_000_000, sequence)


def version_unix_ms(version: int) -> int:
    """Time of the write in Unix milliseconds."""
    return int(version) >> VERSION_SEQUENCE_BITS


def oldest_tombstone(table: EmbeddingTable, unix_s: float) -> int:
    """The version below which a tombstone of ``table`` has expired at the instant ``unix_s``.

    The version of a deletion contains its time, so all tiers, and a replay, decide in the same way."""
    return make_version(int(max(0.0, (unix_s - table.tombstone_ttl_s) * 1000.0)))


def oldest_row(table: EmbeddingTable, unix_s: float) -> int:
    """The version below which a row of ``table`` has expired at the instant ``unix_s``; 0: none."""
    age = table.ttl_s
    return 0 if age is None else make_version(int(max(0.0, (unix_s - age) * 1000.0)))
