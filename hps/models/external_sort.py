"""External sort: a table's files as rows in the order of a store's keys, in bounded memory.

``codes`` are uint64 that sort as the store's keys do (`RocksDbTier.codes`). Of rows with the same key
the last one in the files wins.

There are two ways. If the codes fit ``SORT_ROWS`` and the vectors fit the operating system's cache, all
codes are sorted, and the vectors are gathered from memory or from a mapped copy of their file. The copy has
no name, so no other process can shorten it; a mapped file that is shortened ends the process.

Otherwise rows are first spread over temporary files, one per range of codes, each of which fits
``BUCKET_BYTES``. All reads and writes are then sequential, and a table may be larger than memory."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, Full, Queue
from threading import Event, Thread
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from hps.errors import ModelError
from hps.models.tables import TableFiles
from hps.types import IndexArray, KeyArray, NoProgress

Codes = NDArray[np.uint64]
Chunk = tuple[Codes, NDArray[np.float32]]
Task = Callable[[], AbstractContextManager[Callable[[int], None]]]
T = TypeVar("T")
_PrefetchQueue = Queue[tuple[T | None, BaseException | None]]

# The most rows sorted in memory: sorting takes 32 bytes per row at its peak, 384 MB in total.
SORT_ROWS = 12_000_000
BUCKET_BYTES = 128 << 20
_BLOCK_BYTES = 2 << 20
_SAMPLE = 1 << 17


@dataclass(slots=True)
class DuplicateCounter:
    """Number of rows dropped because their key is repeated later in the files."""

    count: int = 0


def sorted_chunks(
    files: TableFiles,
    to_codes: Callable[[KeyArray], Codes],
    duplicates: DuplicateCounter,
    scratch: Path,
    spreading: Task = lambda: NoProgress().task("", 0),
) -> Generator[Chunk, None, None]:
    """Return blocks of codes (n,), strictly ascending, with their vectors (n, dim) float32.

    ``scratch``: a folder for temporary files, which is made if needed, and removed at the end.
    ``spreading``: opens the progress task for the rows that are written to it."""
    sort = _ExternalSort(files, to_codes, duplicates, scratch)
    vector_bytes = files.rows * files.dim * 4
    if files.rows <= SORT_ROWS and vector_bytes <= _cacheable_bytes():
        return sort.gathered()
    return sort.bucketed(spreading)


def block_rows(dim: int) -> int:
    """Return the rows per block: about 2 MB, which fits a processor's cache."""
    return max(256, _BLOCK_BYTES // (dim * 4))


def sort_last(code: Codes, duplicates: DuplicateCounter) -> tuple[Codes, IndexArray]:
    """Return the distinct codes, ascending, and the last position of each; count the others."""
    if len(code) < 2 or bool((code[1:] > code[:-1]).all()):
        return code, np.arange(len(code))
    order = np.argsort(code)
    code = code[order]
    repeated = code[1:] == code[:-1]
    if not repeated.any():
        return code, order
    starts = np.flatnonzero(np.concatenate([[True], ~repeated]))
    duplicates.count += len(code) - len(starts)
    return code[starts], np.maximum.reduceat(order, starts)


@dataclass(frozen=True, slots=True)
class _ExternalSort:
    """The sort of one table's files, in either way; see `sorted_chunks`."""

    files: TableFiles
    to_codes: Callable[[KeyArray], Codes]
    duplicates: DuplicateCounter
    scratch: Path

    def gathered(self) -> Generator[Chunk, None, None]:
        """Sort all codes at once and gather the vectors."""
        files = self.files
        code, at = sort_last(self.to_codes(files.keys()), self.duplicates)
        vectors, step = self._private_vectors(), block_rows(files.dim)
        for start in range(0, len(code), step):
            rows = np.empty((min(step, len(code) - start), files.dim), np.float32)
            np.take(vectors, at[start : start + step], axis=0, out=rows, mode="clip")
            yield code[start : start + step], rows

    def _private_vectors(self) -> NDArray[np.float32]:
        """Return a copy of the vectors (rows, dim) that no other process can change."""
        files, scratch = self.files, self.scratch
        size = files.rows * files.dim * 4
        if size <= BUCKET_BYTES:
            return files.vectors()
        scratch.mkdir(parents=True, exist_ok=True)
        try:
            copy = scratch / "vectors"
            files.copy_vectors(copy)
            if (copied := copy.stat().st_size) != size:
                raise ModelError(
                    f"{files.vector_path} was changed while it was copied: {copied} bytes, expected {size}"
                )
            return np.memmap(copy, np.dtype("<f4"), "r", shape=(files.rows, files.dim))
        finally:
            # The mapping of the removed file stays valid.
            shutil.rmtree(scratch, ignore_errors=True)

    def bucketed(self, spreading: Task) -> Generator[Chunk, None, None]:
        """Spread the rows over temporary files by ranges of codes, and sort one file after the other."""
        files, scratch = self.files, self.scratch
        record = _record_dtype(files.dim)
        scratch.mkdir(parents=True, exist_ok=True)
        try:
            with spreading() as written:
                paths = self._spread(written)
            for path in filter(Path.exists, paths):
                rows = np.fromfile(path, record)
                path.unlink()
                code, at = sort_last(np.ascontiguousarray(rows["code"]), self.duplicates)
                step = block_rows(files.dim)
                for start in range(0, len(code), step):
                    part = slice(start, start + step)
                    yield code[part], rows["row"][at[part]]
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def _spread(self, progress: Callable[[int], None]) -> list[Path]:
        """Append every row to the temporary file of its range of codes, in the order of the files.

        Returns the paths of all ranges, ascending; ranges without rows have no file."""
        files = self.files
        record = _record_dtype(files.dim)
        buckets = max(1, -(-files.rows * record.itemsize // BUCKET_BYTES))
        paths = [self.scratch / f"{number}.rows" for number in range(buckets)]
        sample = np.sort(self.to_codes(_sample(files)))
        bounds = sample[np.arange(1, buckets) * len(sample) // buckets]
        for keys, vectors in files.blocks(8 * block_rows(files.dim)):
            # Duplicates are dropped here too: otherwise a key that is repeated a million times would make its
            # temporary file large.
            code, at = sort_last(self.to_codes(keys), self.duplicates)
            block = np.empty(len(code), record)
            block["code"] = code
            block["row"] = vectors[at]
            ends = [*np.searchsorted(code, bounds), len(code)]
            begin = 0
            for path, end in zip(paths, ends, strict=True):
                if end > begin:
                    # Opened again for each block: a large table has more ranges than a process may have open
                    # files.
                    with path.open("ab", buffering=0) as out:
                        view = memoryview(block[begin:end].view(np.uint8).data)
                        while len(view):
                            view = view[out.write(view) :]
                begin = end
            progress(len(keys))
        return paths


def _record_dtype(dim: int) -> np.dtype[Any]:
    """The dtype of a row in a temporary file."""
    return np.dtype([("code", "<u8"), ("row", "<f4", (dim,))])


def _sample(files: TableFiles) -> KeyArray:
    """Return a sample of at least ``_SAMPLE`` keys, evenly over the file, or all keys."""
    every, block = max(1, files.rows // _SAMPLE), 1 << 20
    picked, at = [], 0
    while at < files.rows:
        picked.append(files.keys(at, at + block)[::every])
        at += -(-block // every) * every
    return np.concatenate([np.empty(0, np.int64), *picked])


def _cacheable_bytes() -> int:
    """Return half of the memory: the bytes that random reads may expect in the system's cache."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    except (OSError, ValueError):
        return 1 << 30


def prefetch(items: Iterable[T], depth: int = 2) -> Generator[T, None, None]:
    """Iterate on a separate thread, up to ``depth`` items ahead of the consumer."""
    queue: _PrefetchQueue[T] = Queue(depth)
    stop = Event()
    thread = Thread(target=_produce, args=(items, queue, stop), name="hps-ahead", daemon=True)
    thread.start()
    try:
        while True:
            item, error = queue.get()
            if error is not None:
                raise error
            if item is None:
                return
            yield item
    finally:
        stop.set()
        with suppress(Empty):
            while True:
                queue.get_nowait()
        thread.join()


def _produce(items: Iterable[T], queue: _PrefetchQueue[T], stop: Event) -> None:
    """Put the items, then the end (None) or an error, into the queue until ``stop`` is set."""
    iterator = iter(items)
    try:
        for item in iterator:
            _put(queue, (item, None), stop)
            if stop.is_set():
                return
        _put(queue, (None, None), stop)
    except BaseException as error:  # raised by the consumer
        _put(queue, (None, error), stop)
    finally:
        if close := getattr(iterator, "close", None):
            close()


def _put(
    queue: _PrefetchQueue[T], entry: tuple[T | None, BaseException | None], stop: Event
) -> None:
    while not stop.is_set():
        with suppress(Full):
            queue.put(entry, timeout=0.1)
            return
