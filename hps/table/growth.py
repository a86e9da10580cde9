"""Sizes of a table: the checks of its options, and growth."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hps.errors import BadRequest, ConfigError
from hps.native.twin_scored import MOST_BUCKETS, MOST_DOUBLINGS
from hps.table.backend import SLOTS, Backend, backend_class, backend_options, memory_of
from hps.types import KeyArray

_MOST_DIM = 1 << 20


def row_like(dim: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return an array (0, dim) of ``dtype``. Raises ConfigError."""
    if not 0 < dim <= _MOST_DIM:
        raise ConfigError(f"dim is {dim}, but must be from 1 to {_MOST_DIM}")
    if dtype.kind not in "iuf" or dtype.itemsize > 8 or not dtype.isnative:
        raise ConfigError(f"dtype is {dtype}, but rows are integers or floats of up to 64 bits")
    return np.empty((0, dim), dtype)


def _most_buckets(buckets: int, max_capacity: int) -> int:
    """Return ``buckets`` doubled while the capacity is at most ``max_capacity``. Raises ConfigError."""
    most = buckets
    while 2 * most * SLOTS <= max_capacity:
        most *= 2
    if most > MOST_BUCKETS:
        raise ConfigError(
            f"a capacity of {most * SLOTS} is more than a table has, {MOST_BUCKETS * SLOTS}"
        )
    return most


class Growth:
    """Makes the backend ``name`` for ``init_capacity`` slots and grows it. Raises ConfigError.

    Thread-safe: inserts in progress count, so that none evicts a row for which the table could grow.
    """

    def __init__(
        self,
        name: str,
        like: NDArray[Any],
        init_capacity: int,
        max_capacity: int | None,
        max_load_factor: float,
        device_share: float,
    ) -> None:
        if not 0 < max_load_factor <= 1:
            raise ConfigError(
                f"max_load_factor is {max_load_factor}, but must be above 0 and at most 1"
            )
        if init_capacity < 1:
            raise ConfigError(f"init_capacity is {init_capacity}, but must be at least 1")
        if max_capacity is not None and max_capacity < init_capacity:
            raise ConfigError(
                f"max_capacity is {max_capacity}, less than init_capacity, {init_capacity}"
            )
        self.max_load_factor = float(max_load_factor)
        self._lock, self._pending = Lock(), 0
        self._first = -(-init_capacity // SLOTS)
        self._row_bytes = like.shape[1] * like.itemsize
        self._class = backend_class(name)
        self._options = backend_options(name, device_share)
        self.memory = memory_of(name)
        most = _most_buckets(self._first, max_capacity or 0)
        self._check_growth(0, self._first)
        try:
            self.backend: Backend = self._class(self._first, most, like, **self._options)
        except MemoryError as error:
            if self._options:
                raise ConfigError(
                    f"a table of {self._first * SLOTS} slots needs more memory than is free: {error}; choose "
                    "a lower init_capacity or another device_share"
                ) from None
            raise self._no_address_space(most) from None

    @property
    def capacity(self) -> int:
        """The number of slots."""
        return self.backend.buckets * SLOTS

    @property
    def max_capacity(self) -> int:
        """The most slots after growth."""
        return self.backend.max_buckets * SLOTS

    def set_max_capacity(self, max_capacity: int) -> None:
        """Change the most slots. Raises BadRequest, ConfigError."""
        if max_capacity < self.capacity:
            raise BadRequest(
                f"max_capacity of {max_capacity} is less than the present capacity, {self.capacity}"
            )
        most = _most_buckets(self.backend.buckets, max_capacity)
        if most > self.backend.max_buckets:
            moved = self._bytes_for(self.backend.buckets)
            self._require(moved, f"a max_capacity of {max_capacity}, which moves the rows,")
        try:
            self.backend.set_max_buckets(most)
        except MemoryError:
            raise self._no_address_space(most) from None

    @contextmanager
    def room_for(self, keys: KeyArray) -> Iterator[None]:
        """Grow if the new ones among ``keys`` would raise the load factor above its maximum.

        While the caller inserts them, they count as rows for other threads.
        """
        if 2 * self.capacity > self.max_capacity:
            yield
            return
        with self._lock:
            rows, new = self.backend.size + self._pending, len(keys)
            if rows + new > self.max_load_factor * self.capacity:
                missing = keys[~self.backend.find(keys, None, None)]
                new = self.memory.distinct(missing)
                self.reserve_for(rows + new)
            self._pending += new
        try:
            yield
        finally:
            with self._lock:
                self._pending -= new

    def reserve_for(self, rows: int) -> None:
        """Grow as ``rows`` need at the maximal load factor, as far as ``max_capacity`` allows."""
        capacity = self.capacity
        while rows > self.max_load_factor * capacity and 2 * capacity <= self.max_capacity:
            capacity *= 2
        self.reserve(capacity)

    def reserve(self, capacity: int) -> None:
        """Double the table until it has at least ``capacity`` slots. Raises BadRequest, ConfigError."""
        buckets = self.backend.buckets
        target = buckets
        while target * SLOTS < capacity:
            target *= 2
        if target == buckets:
            return
        if target > min(self.backend.max_buckets, self._first << MOST_DOUBLINGS):
            raise BadRequest(
                f"a reserve of {capacity} slots doubles the present {buckets * SLOTS} to "
                f"{target * SLOTS}, but max_capacity is {self.max_capacity}"
            )
        self._check_growth(buckets, target)
        try:
            self.backend.reserve(target)
        except MemoryError as error:
            raise ConfigError(
                f"growth from {buckets * SLOTS} to {target * SLOTS} slots needs more memory than is free: "
                f"{error}; choose a lower capacity"
            ) from None

    def _check_growth(self, buckets: int, target: int) -> None:
        needed = self._bytes_for(target) - self._bytes_for(buckets)
        self._require(needed, f"growth from {buckets * SLOTS} to {target * SLOTS} slots")

    def _bytes_for(self, buckets: int) -> int:
        return int(self._class.bytes_for(buckets, self._row_bytes, **self._options))

    def _require(self, needed: int, what: str) -> None:
        with suppress(OSError):  # unknown without /proc
            free = self.memory.free_bytes()
            if needed > free:
                raise ConfigError(
                    f"{what} needs {needed} bytes of memory, but {free} are free: choose a lower capacity"
                )

    def _no_address_space(self, most: int) -> ConfigError:
        needed = self._bytes_for(most)
        return ConfigError(
            f"a table of up to {most * SLOTS} slots needs {needed} bytes of address space, which the system "
            "refused: lower max_capacity"
        )
