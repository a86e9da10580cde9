"""A table of rows by 64-bit key, on one of several backends."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from hps.errors import BadRequest, ConfigError
from hps.native.twin_scored import ScoreRule, Write
from hps.table import files, inputs
from hps.table.backend import SLOTS
from hps.table.growth import Growth, row_like
from hps.table.policy import MOST_EPOCH, UNCHANGED, Policy, Scoring, scoring_of
from hps.table.results import FoundRows, TableRows
from hps.types import IndexArray, VectorArray

_SLOTS_AT_ONCE = 1 << 16
"""Slots that `erase_if`, `size_if` and `save` read per call of the backend."""

Predicate = Callable[[NDArray[Any], NDArray[np.uint64]], NDArray[np.bool_]]
"""Chooses among rows: from keys (n,) and scores (n,) to bool (n,). It may be called several times."""


class Table:
    """Rows of ``dim`` numbers of ``dtype`` by 64-bit key, each with a 64-bit score.

    **Arrays.** ``keys (n,)`` are integers; any 64 bits are a key, and unsigned keys keep their bits. ``rows
    (n, dim)`` have the table's dtype. ``scores (n,)`` are unsigned. Each may be a NumPy array or another on
    the host with ``__dlpack__``, such as a PyTorch tensor; keys, rows and scores may also be lists. Results
    are NumPy arrays; those of backend ``cuda`` are CuPy's, and it also takes arrays on its device. Keys that
    the table returns have ``key_dtype``, int64 or uint64.

    **Scores.** `Policy` says what a row's score means. `find`, `find_rows`, `contains` and exports leave it
    unchanged; all other operations set it for the rows that they change or return. ``clock`` returns
    nanoseconds since 1970; where it goes back, the table's time stands still.

    **Capacity.** A key belongs to one bucket of ``bucket_size`` slots, and may take any of them. An insert
    of a new key into a full bucket evicts the bucket's lowest score, unless the new row's score is lower:
    then that row is not admitted (with LFU it always is). ``init_capacity`` is rounded up to whole buckets.
    Before an insert that would raise `load_factor` above ``max_load_factor``, the table doubles, while the
    double is at most ``max_capacity`` (default: never). Growth evicts nothing.

    **Host memory.** ``device_share`` of a ``cuda`` table's slots, a multiple of 1/8, have their rows in
    device memory, the others in pinned host memory. A write moves a row to the device if there is room, or a
    row with a lower score, which goes to host memory instead.

    **Batches.** Keys of a batch may repeat: the positions of one key are applied in their order. Different
    keys of a batch are applied in any order.

    **Threads.** All methods may be called from any threads at any time. Each key's change is atomic: a find
    returns a row and a score as one write left them, and sees all writes that returned before. A batch as a
    whole is not atomic. `clear`, `reserve`, growth and changes of `max_capacity` wait for the calls in
    progress; other calls wait for them. Only `rows` is memory without protection.

    **Errors.** Bad input raises ``BadRequest``; an invalid option, or memory that is missing for a table or
    its growth, ``ConfigError``. Both name what was given and what is possible, and nothing has changed then.
    """

    def __init__(
        self,
        dim: int,
        *,
        init_capacity: int,
        max_capacity: int | None = None,
        max_load_factor: float = 0.5,
        dtype: DTypeLike = np.float32,
        policy: Policy | str = Policy.LRU,
        key_dtype: DTypeLike = np.int64,
        backend: str = "cpu",
        device_share: float = 1.0,
        clock: Callable[[], int] = time.time_ns,
    ) -> None:
        self.dtype, self.key_dtype = np.dtype(dtype), np.dtype(key_dtype)
        if self.key_dtype not in (np.int64, np.uint64):
            raise ConfigError(f"key_dtype is {self.key_dtype}, but keys are int64 or uint64")
        if policy not in [*Policy]:
            raise ConfigError(f"policy is {policy!r}, but must be one of {', '.join(Policy)}")
        self.policy, self.backend = Policy(policy), backend
        self._epoch, self._clock, self._now = 0, clock, 0
        self._like = row_like(dim, self.dtype)
        self._growth = Growth(
            backend, self._like, init_capacity, max_capacity, max_load_factor, device_share
        )
        self._memory = self._growth.memory
        self._table = self._growth.backend

    @property
    def dim(self) -> int:
        """Numbers of a row."""
        return int(self._like.shape[1])

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self.dim * self.dtype.itemsize

    @property
    def size(self) -> int:
        """The number of rows."""
        return self._table.size

    def __len__(self) -> int:
        return self._table.size

    @property
    def capacity(self) -> int:
        """The number of slots."""
        return self._growth.capacity

    @property
    def bucket_size(self) -> int:
        """The slots that a key may take."""
        return SLOTS

    @property
    def load_factor(self) -> float:
        """``size / capacity``."""
        return self.size / self.capacity

    @property
    def max_load_factor(self) -> float:
        """The load factor above which an insert grows the table."""
        return self._growth.max_load_factor

    @property
    def max_capacity(self) -> int:
        """The most slots that the table may grow to. Raising it moves the table's rows: see `rows`."""
        return self._growth.max_capacity

    @max_capacity.setter
    def max_capacity(self, capacity: int) -> None:
        self._growth.set_max_capacity(capacity)

    @property
    def epoch(self) -> int:
        """The epoch of writes under the policies ``epoch_lru`` and ``epoch_lfu``: 0 at first, 32 bits."""
        return self._epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        if not 0 <= epoch <= MOST_EPOCH:
            raise BadRequest(f"epoch is {epoch}, but must be from 0 to {MOST_EPOCH}")
        self._epoch = int(epoch)

    # -- reading ----------------------------------------------------------------------------------

    def find(self, keys: Any, *, out: Any = None, with_scores: bool = False) -> FoundRows:
        """Return the rows of ``keys``, in ``out (n, dim)`` if given, and whether each was found."""
        keys = inputs.table_keys(keys, self._memory)
        rows = inputs.output_rows(out, len(keys), self._like, self._memory)
        if rows is None:
            rows = self._memory.xp.zeros((len(keys), self.dim), self.dtype)
        scores = self._memory.xp.zeros(len(keys), np.uint64) if with_scores else None
        found = self._table.find(keys, rows, scores)
        return FoundRows(rows, found, scores)

    def contains(self, keys: Any) -> NDArray[np.bool_]:
        """Return whether the table has each of ``keys`` (n,)."""
        return self._table.find(inputs.table_keys(keys, self._memory), None, None)

    def find_rows(self, keys: Any) -> IndexArray:
        """Return the numbers of the keys' rows in `rows` (n,) int64, -1 for keys that are not found.

        A number is valid until the next write, and until the table grows.
        """
        return self._table.find_rows(inputs.table_keys(keys, self._memory))

    @property
    def rows(self) -> NDArray[Any]:
        """The memory of all rows, (capacity, dim), to read or change rows by number in place.

        Nothing orders such accesses with other threads' writes. The array stays valid memory, but after
        growth and changes of `max_capacity`, get it again.
        """
        return self._table.rows

    # -- writing ----------------------------------------------------------------------------------

    def insert_or_assign(
        self, keys: Any, rows: Any, scores: Any = None, *, ignore_evict_strategy: bool = False
    ) -> NDArray[np.bool_]:
        """Insert rows, or replace those of keys that the table has; return which it had.

        ``ignore_evict_strategy``: store ``scores`` as they are, under any policy, as for rows that were
        exported.
        """
        return self._insert(keys, rows, scores, ignore_evict_strategy, False)[0]

    def insert_and_evict(
        self, keys: Any, rows: Any, scores: Any = None, *, ignore_evict_strategy: bool = False
    ) -> TableRows:
        """Insert or replace rows; return the rows that were evicted, and those that were not admitted."""
        return self._insert(keys, rows, scores, ignore_evict_strategy, True)[1]

    def _insert(
        self, keys: Any, rows: Any, scores: Any, as_given: bool, with_evicted: bool
    ) -> tuple[NDArray[np.bool_], TableRows]:
        keys = inputs.table_keys(keys, self._memory)
        rows = inputs.table_rows(rows, len(keys), self._like, self._memory)
        scoring = self._given(scores, len(keys)) if as_given else self._scoring(scores, len(keys))
        with self._growth.room_for(keys):
            return self._write(Write.INSERT, keys, rows, scoring, with_evicted=with_evicted)

    def find_or_insert(
        self, keys: Any, rows: Any, scores: Any = None, *, out: Any = None
    ) -> FoundRows:
        """Return the table's rows of the keys it has, and insert ``rows`` of the others.

        The result has the given row for a key that was not found, also if it was not admitted. ``out (n,
        dim)`` gets the rows; it may be ``rows``. Sets the scores of rows found, as a write.
        """
        keys = inputs.table_keys(keys, self._memory)
        rows = inputs.table_rows(rows, len(keys), self._like, self._memory)
        result = inputs.output_rows(out, len(keys), self._like, self._memory)
        scoring = self._scoring(scores, len(keys))
        with self._growth.room_for(keys):
            if result is None:
                result = rows.copy()
            elif result is not rows:
                result[:] = rows
            return FoundRows(result, self._write(Write.FIND_OR_INSERT, keys, result, scoring)[0])

    def assign(self, keys: Any, rows: Any, scores: Any = None) -> NDArray[np.bool_]:
        """Replace the rows of keys that the table has, and set their scores; return which it has."""
        keys = inputs.table_keys(keys, self._memory)
        rows = inputs.table_rows(rows, len(keys), self._like, self._memory)
        return self._write(Write.ASSIGN, keys, rows, self._scoring(scores, len(keys)))[0]

    def assign_scores(self, keys: Any, scores: Any = None) -> NDArray[np.bool_]:
        """Set the scores of keys that the table has, as a write would; return which it has."""
        keys = inputs.table_keys(keys, self._memory)
        return self._write(Write.ASSIGN, keys, None, self._scoring(scores, len(keys)))[0]

    def assign_values(self, keys: Any, rows: Any) -> NDArray[np.bool_]:
        """Replace the rows of keys that the table has, and keep their scores; return which it has."""
        keys = inputs.table_keys(keys, self._memory)
        rows = inputs.table_rows(rows, len(keys), self._like, self._memory)
        return self._write(Write.ASSIGN, keys, rows, UNCHANGED)[0]

    def accum_or_assign(
        self, keys: Any, rows: Any, accumulate: Any, scores: Any = None
    ) -> NDArray[np.bool_]:
        """Add to rows of the table, or insert rows; return which keys the table had.

        Where ``accumulate (n,)`` is true, ``rows`` are added to the rows of keys that the table has; where
        it is false, they are inserted for keys that it has not. Other keys are left alone: for them, the
        state changed since the caller found or missed them.
        """
        keys = inputs.table_keys(keys, self._memory)
        rows = inputs.table_rows(rows, len(keys), self._like, self._memory)
        flags = inputs.table_flags(accumulate, len(keys), self._memory)
        scoring = self._scoring(scores, len(keys))
        with self._growth.room_for(keys[~flags]):
            return self._write(Write.ACCUMULATE, keys, rows, scoring, accumulate=flags)[0]

    def erase(self, keys: Any) -> NDArray[np.bool_]:
        """Erase ``keys``; return which were erased."""
        return self._table.erase(inputs.table_keys(keys, self._memory), None)

    def erase_if(self, predicate: Predicate) -> int:
        """Erase the rows that ``predicate(keys, scores)`` chooses; return their number.

        A row whose score changes after the predicate saw it stays. The predicate may use the table.
        """
        erased = 0
        for keys, scores in self._slots():
            chosen = self._selected(predicate, self._keys(keys), scores)
            gone = self._table.erase(keys[chosen], scores[chosen])
            erased += int(gone.sum())
        return erased

    def clear(self) -> None:
        """Erase all rows. The capacity stays."""
        self._table.clear()

    # -- exports ----------------------------------------------------------------------------------

    def export_batch(self, n: int, offset: int = 0) -> TableRows:
        """Return the rows in ``n`` slots from number ``offset`` on: at most ``n`` rows.

        All rows are in the slots from 0 to `capacity`. While the table grows, a row may be exported twice.
        """
        if n < 0 or offset < 0:
            raise BadRequest(f"n and offset are {n} and {offset}, but must be at least 0")
        keys, scores, rows = self._table.export(offset, min(n, self.capacity), True)
        assert rows is not None
        return TableRows(self._keys(keys), rows, scores)

    def export_batch_if(self, predicate: Predicate, n: int, offset: int = 0) -> TableRows:
        """Return the rows that ``predicate(keys, scores)`` chooses among ``n`` slots from ``offset`` on."""
        if n < 0 or offset < 0:
            raise BadRequest(f"n and offset are {n} and {offset}, but must be at least 0")
        keys, scores, _ = self._table.export(offset, min(n, self.capacity), False)
        keys = keys[self._selected(predicate, self._keys(keys), scores)]
        xp = self._memory.xp
        rows, scores = xp.empty((len(keys), self.dim), self.dtype), xp.empty(len(keys), np.uint64)
        kept = self._table.find(keys, rows, scores)
        keys, rows, scores = keys[kept], rows[kept], scores[kept]
        kept = self._selected(predicate, self._keys(keys), scores)  # a write may have changed them
        return TableRows(self._keys(keys[kept]), rows[kept], scores[kept])

    def size_if(self, predicate: Predicate) -> int:
        """Return the number of rows that ``predicate(keys, scores)`` chooses."""
        pieces = (self._selected(predicate, self._keys(k), scores) for k, scores in self._slots())
        return sum(int(chosen.sum()) for chosen in pieces)

    def save(self, folder: str | Path) -> int:
        """Write all rows to the new folder ``folder``; return their number. `files` describes it.

        Rows that are written meanwhile are saved in their old or new state. Raises OSError.
        """
        step = max(1, min(_SLOTS_AT_ONCE, (64 << 20) // self.row_bytes))
        slots = self._offsets(step)
        host = self._memory.to_host
        batches = (TableRows(*map(host, self.export_batch(step, at))) for at in slots)
        return files.save(Path(folder), self, batches)

    def load(self, folder: str | Path) -> int:
        """Insert the rows that `save` wrote, with their scores as they are; return their number.

        Raises ``BadRequest`` if the folder is of another dim, dtype or policy, or has more rows than
        ``max_capacity``; ``ModelError`` if it is damaged; OSError. Nothing has changed then.
        """
        saved = files.SavedTable.open(Path(folder), self)
        self._growth.reserve_for(self.size + saved.rows)
        for keys, rows, scores in saved.batches(_SLOTS_AT_ONCE):
            self.insert_or_assign(keys, rows, scores, ignore_evict_strategy=True)
        return saved.rows

    def reserve(self, capacity: int) -> None:
        """Double the table until it has at least ``capacity`` slots; at most to ``max_capacity``."""
        self._growth.reserve(capacity)

    # -- helpers ----------------------------------------------------------------------------------

    def _scoring(self, scores: Any, n: int) -> Scoring:
        given = inputs.table_scores(scores, n, self._memory)
        # A clock that is set back must not make new rows older than all others.
        self._now = max(self._now, self._clock())
        return scoring_of(self.policy, given, self._now, self._epoch)

    def _given(self, scores: Any, n: int) -> Scoring:
        given = inputs.table_scores(scores, n, self._memory)
        if given is None:
            raise BadRequest("no scores were given, but ignore_evict_strategy stores them")
        return Scoring(ScoreRule.GIVEN, 0, given)

    def _write(
        self,
        operation: Write,
        keys: NDArray[np.int64],
        rows: VectorArray | None,
        scoring: Scoring,
        *,
        accumulate: NDArray[np.bool_] | None = None,
        with_evicted: bool = False,
    ) -> tuple[NDArray[np.bool_], TableRows]:
        found, evicted = self._table.write(
            operation, keys, rows, accumulate, *scoring, with_evicted
        )
        xp = self._memory.xp
        none = (keys[:0], xp.empty(self._like.shape, self.dtype), xp.empty(0, np.uint64))
        evicted_keys, evicted_rows, evicted_scores = evicted or none
        return found, TableRows(self._keys(evicted_keys), evicted_rows, evicted_scores)

    def _selected(
        self, predicate: Predicate, keys: NDArray[Any], scores: NDArray[np.uint64]
    ) -> NDArray[np.bool_]:
        return inputs.selected(predicate, keys, scores, self._memory)

    def _keys(self, keys: NDArray[Any]) -> NDArray[Any]:
        return keys.view(self.key_dtype)

    def _offsets(self, step: int) -> Iterator[int]:
        """Offsets of all slots; growth moves rows to higher ones only, so none is missed."""
        offset = 0
        while offset < self.capacity:
            yield offset
            offset += step

    def _slots(self) -> Iterator[tuple[NDArray[np.int64], NDArray[np.uint64]]]:
        for offset in self._offsets(_SLOTS_AT_ONCE):
            keys, scores, _ = self._table.export(offset, _SLOTS_AT_ONCE, False)
            yield keys, scores
