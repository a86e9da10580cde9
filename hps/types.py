"""Values that travel through the library: tables, keys, requests and results.

Arrays in, arrays out. Keys are ``(n,) int64``, vectors ``(n, dim)`` of the table's dtype,
versions ``(n,) uint64``, sources ``(n,) uint8``; all C-contiguous, NumPy on the host and CuPy on
the device. Every int64 is an ordinary key: negative ones and unsigned 64-bit signs (reinterpreted)
included.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from hps.tracing import RequestContext

KeyArray = NDArray[np.int64]
VectorArray = NDArray[Any]
VersionArray = NDArray[np.uint64]
SourceArray = NDArray[np.uint8]
IndexArray = NDArray[np.int64]

Pooling = Literal["sum", "mean", "none"]


class Source(IntEnum):
    """Which tier a row came from; the code reported per key (``f.source`` on the wire)."""

    DEFAULT = 0
    GPU = 1
    CPU = 2
    REDIS = 3
    ROCKSDB = 4
    MEMORY = 5
    REMOTE = 6


@dataclass(frozen=True, slots=True)
class MissPolicy:
    """What a lookup does with keys that no memory tier holds (invariant 7).

    ``wait``: ask the stores. ``default_then_promote``: answer with the default at once and promote
    the row in the background, unless fewer than ``min_hit_rate`` of the batch's unique keys of the
    table were found in memory, in which case the lookup waits after all.
    """

    kind: Literal["wait", "default_then_promote"] = "wait"
    min_hit_rate: float = 0.0


@dataclass(frozen=True, eq=False, slots=True)
class EmbeddingTable:
    """One version of a named map from key to vector. Compared and hashed by identity: one object
    per table lives in the process, and tiers key their state by it.

    ``default`` is ``(dim,)`` of ``dtype``, read-only: what an unknown key gets.
    ``tombstone_ttl_s`` is how long a deletion is remembered against late, older upserts.
    ``key_bits`` is 64, or 32 where only the low 32 bits of a key count (`key_dtype: uint32`).
    """

    model: str
    version: int
    name: str
    dim: int
    dtype: np.dtype[Any]
    default: VectorArray
    miss: MissPolicy = MissPolicy()
    tombstone_ttl_s: float = 86_400.0
    key_bits: Literal[32, 64] = 64

    @property
    def id(self) -> str:
        """``model/version/name``: unique within a process; used in stores, logs and metrics."""
        return f"{self.model}/{self.version}/{self.name}"

    @property
    def row_bytes(self) -> int:
        return self.dim * self.dtype.itemsize

    def narrow(self, keys: KeyArray) -> KeyArray:
        """``keys (n,) int64`` as this table knows them: unchanged, or their low 32 bits."""
        return keys if self.key_bits == 64 else keys & np.int64(0xFFFF_FFFF)

    @staticmethod
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
    ) -> EmbeddingTable:
        """Build a table; ``default`` is a scalar or a vector of ``dim`` values."""
        dt = np.dtype(dtype)
        row = np.ascontiguousarray(np.broadcast_to(np.asarray(default, dt), (dim,)))
        row.flags.writeable = False
        return EmbeddingTable(
            model, version, name, dim, dt, row, miss or MissPolicy(), tombstone_ttl_s, key_bits
        )


@dataclass(frozen=True, slots=True)
class JaggedKeys:
    """The keys of one feature for a batch of samples.

    Fixed hotness: ``keys`` is ``(batch * hotness,)`` and ``offsets`` is None. Jagged: sample ``i``
    owns ``keys[offsets[i]:offsets[i + 1]]`` with ``offsets (batch + 1,) int64``. ``weights``, if
    given, is ``(n,) float32`` and multiplies each vector before it is summed.
    """

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
        """``keys (batch,)`` or ``(batch, hotness)``; unsigned 64-bit keys are reinterpreted.

        Raises ``TypeError`` for anything but integers, ``ValueError`` for lists of mixed depth.
        """
        try:
            arr = as_keys(keys)
        except ValueError:
            raise ValueError(_mixed_depth(keys)) from None
        return JaggedKeys(arr.reshape(-1), arr.shape[0])

    @staticmethod
    def from_lists(
        keys: Sequence[Sequence[int]], weights: Sequence[Sequence[float]] | None = None
    ) -> JaggedKeys:
        """One list (or array) of keys per sample, of any lengths; ``weights`` has the same lengths.

        Raises ``TypeError`` for keys that are not integers, ``ValueError`` for weights of other lengths.
        Converts element by element: arrays with ``offsets`` are faster for large batches.
        """
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
        """Keys in any form: ``JaggedKeys``, integers ``(batch,)`` or ``(batch, hotness)``, or a list of
        keys per sample. Raises ``TypeError`` or ``ValueError``."""
        if isinstance(keys, JaggedKeys):
            return keys
        if _is_nested(keys):
            if len({len(bag) for bag in keys}) > 1:
                return JaggedKeys.from_lists(keys)
            keys = list(keys)
        return JaggedKeys.dense(keys)


def _is_nested(keys: Any) -> bool:
    """Whether ``keys`` is a list, or an array of objects, of lists or arrays."""
    is_list = isinstance(keys, list | tuple)
    if not is_list and not (isinstance(keys, np.ndarray) and keys.dtype == object):
        return False
    return all(isinstance(bag, list | tuple | np.ndarray) for bag in keys)


def _mixed_depth(keys: Sequence[Any]) -> str:
    """Error message for keys of which some, but not all, are lists of a sample's keys."""
    wrong = [i for i, bag in enumerate(keys) if not hasattr(bag, "__len__")]
    if not wrong:
        return "a sample's keys must be one flat list"
    return f"expected a list of keys for each sample, got {keys[wrong[0]]!r} for sample {wrong[0]}"


def as_keys(keys: Any) -> KeyArray:
    """Integer keys as C-contiguous int64 without changing a bit (uint64 is reinterpreted).

    Raises ``TypeError`` for anything but integers of 64 bits.
    """
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
    found = f"{wrong[0]!r}" if wrong else f"dtype {arr.dtype}"
    raise TypeError(f"keys must be integers from -2^63 to 2^64-1, got {found}")


def _large_integers(keys: Sequence[Any], arr: NDArray[Any]) -> NDArray[Any]:
    """``keys`` as uint64; ``arr`` if one of them is not an integer of 64 bits. NumPy converts a list with
    integers from 2^63 on and smaller ones to float64, ``arr``."""
    exact = np.array(keys, object)
    if not all(_is_key(key) for key in exact.flat):
        return arr
    return (exact & (2**64 - 1)).astype(np.uint64)


def _is_key(key: Any) -> bool:
    return type(key) is int and -(2**63) <= key < 2**64


@dataclass(slots=True)
class LookupRequest:
    """Keys of one batch, by feature name.

    ``deadline`` is a ``time.monotonic()`` instant or None. ``out`` optionally names caller-owned
    arrays per feature that receive the vectors. ``want_source`` asks for the per-key report.
    ``by_table``: the names are tables, keys are taken as they are and vectors come back unpooled.
    ``origin``: on whose behalf, where anybody cares.
    """

    features: Mapping[str, JaggedKeys]
    deadline: float | None = None
    want_source: bool = False
    out: Mapping[str, VectorArray] | None = None
    by_table: bool = False
    origin: RequestContext | None = None


@dataclass(slots=True)
class LookupResult:
    """``vectors[f]`` is ``(batch, dim)`` when pooled, ``(n, dim)`` when pooling is ``none``.

    ``sources[f] (n,) uint8`` and ``versions[f] (n,) uint64`` are filled when asked for.
    ``defaulted`` counts keys (not unique keys) that were answered with the table's default;
    ``degraded`` names the tiers that were skipped. ``stale_s``: how old rows may be, in seconds, when that
    is more than `updates.max_staleness_s`; else 0.
    """

    vectors: dict[str, VectorArray]
    sources: dict[str, SourceArray] = field(default_factory=dict)
    versions: dict[str, VersionArray] = field(default_factory=dict)
    defaulted: int = 0
    degraded: tuple[str, ...] = ()
    stale_s: int = 0


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
    """Named outputs, in the model's order; with ``top_k`` also ``top_k_index (k,) int64``. ``defaulted``,
    ``degraded``, ``stale_s``: as of the lookup."""

    outputs: dict[str, NDArray[Any]]
    sources: dict[str, SourceArray] = field(default_factory=dict)
    defaulted: int = 0
    degraded: tuple[str, ...] = ()
    stale_s: int = 0


class Progress(Protocol):
    """How long work reports itself; the command line draws bars, a server logs, tests ignore it."""

    def task(
        self, title: str, total: int, unit: str = "rows"
    ) -> AbstractContextManager[Callable[[int], None]]:
        """Open a task of ``total`` units; call the returned function with each step's size."""
        ...


class NoProgress:
    """Tells nobody."""

    def task(
        self, title: str, total: int, unit: str = "rows"
    ) -> AbstractContextManager[Callable[[int], None]]:
        return nullcontext(lambda _step: None)


# A row's version: Unix milliseconds << 20 | sequence. Newest wins.
VERSION_SEQUENCE_BITS = 20


def make_version(unix_ms: int, sequence: int = 0) -> int:
    """The version of a write at ``unix_ms`` with a tie-breaking ``sequence`` (taken mod 2^20)."""
    return (unix_ms << VERSION_SEQUENCE_BITS) | (sequence & ((1 << VERSION_SEQUENCE_BITS) - 1))


def version_now(sequence: int = 0) -> int:
    """The version of a write of this moment."""
    return make_version(time.time_ns() // 1_000_000, sequence)


def version_unix_ms(version: int) -> int:
    """When the write was, in Unix milliseconds."""
    return int(version) >> VERSION_SEQUENCE_BITS


def oldest_tombstone(table: EmbeddingTable, unix_s: float) -> int:
    """The version below which a tombstone of ``table`` is forgotten at the instant ``unix_s``.

    The deletion's own version tells its time, so a replay or another tier decides alike.
    """
    return make_version(int(max(0.0, (unix_s - table.tombstone_ttl_s) * 1000.0)))
