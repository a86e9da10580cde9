"""Write the file ``mapped`` of a table, its served form (see `hps.native.mapped_format`).

The rows are sorted by the hash of their keys, in bounded memory, so that the index and the records are built
and written part by part."""

from __future__ import annotations

import os
import secrets
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from hps.config.model_schema import TableSpec
from hps.errors import ModelError
from hps.models.external_sort import Chunk, Codes, DuplicateCounter, prefetch, sorted_chunks
from hps.models.manifest import RowConversion
from hps.models.row_errors import RowErrors, measure_errors
from hps.models.tables import TableFiles
from hps.native import build_index_part, crc32, index_hashes, mapped_format, place_records
from hps.native.mapped_format import BLOCK_BYTES, HEADER, HEADER_BYTES
from hps.row_format import FLOAT32, RowFormat, row_format
from hps.tiers.stored_rows import NotStorable, to_rows
from hps.types import EmbeddingTable, KeyArray, RowArray

Vectors = NDArray[np.float32]
MAPPED_FILE = "mapped"
# More keys a bucket: a smaller index that takes much longer to build (3.0: 3.0 bits and 120 ns a key, 3.5:
# 2.6 bits and 720 ns).
KEYS_PER_BUCKET = 3
PART_KEYS, PART_BYTES = 1 << 18, 32 << 20
_SEEDS = 8
_MAX_ROWS = 2**32 - 2
_MIX, _HALF = 0xD6E8FEB86659FD93, np.uint64(32)
_UNMIX = np.uint64(pow(_MIX, -1, 2**64))


@dataclass(frozen=True, slots=True)
class MappedReport:
    """Rows, bytes and index bytes of a file; ``duplicates``: rows whose key is repeated later.

    ``errors``: of the rows, if `MappedOptions` demands them."""

    rows: int
    duplicates: int
    bytes: int
    index_bytes: int
    errors: RowConversion | None = None


@dataclass(frozen=True, slots=True)
class MappedOptions:
    """Properties of a mapped file.

    ``row_format``: of its rows, to which the vectors are converted. ``key_bits``: of the table's keys; with
    32, only the low 32 bits of a key count. ``threads``: that build the index. ``measured``: report
    the errors of the rows."""

    row_format: RowFormat = FLOAT32
    key_bits: Literal[32, 64] = 64
    threads: int = field(default_factory=lambda: min(8, len(os.sched_getaffinity(0))))
    measured: bool = False

    @staticmethod
    def of(spec: TableSpec) -> MappedOptions:
        """The properties that a table's description demands.

        Errors are measured of tables with `rows:` only: older releases read the manifests of others."""
        measured = spec.rows not in (None, "float32")
        bits: Literal[32, 64] = 32 if spec.key_dtype == "uint32" else 64
        return MappedOptions(row_format(spec.row_format), bits, measured=measured)


def write_mapped(
    files: TableFiles,
    target: Path,
    options: MappedOptions | None = None,
    progress: Callable[[int], None] = lambda _rows: None,
) -> MappedReport:
    """Write the mapped file of ``files`` to ``target``, which appears complete or not at all.

    Of rows with the same key the last one is kept. ``progress`` gets the rows of each step. Takes about
    512 MB of memory at most, and the disk space of the table twice while it sorts a large one. Raises
    ModelError for files that cannot be read or written."""
    options = options or MappedOptions()
    if files.rows > _MAX_ROWS:
        raise ModelError(
            f"table '{files.name}': {files.rows:,} rows are too many for a mapped file ({_MAX_ROWS:,}); "
            "spread them over several tables"
        )
    temporary = target.with_name(f".{target.name}-{secrets.token_hex(4)}")
    try:
        for seed in range(_SEEDS):
            report = _Writer(files, temporary, options, seed).write(progress)
            if report is not None:
                temporary.rename(target)
                _sync(target.parent)
                return report
    except OSError as error:
        raise ModelError(f"cannot write {target}: {error.strerror or error}") from error
    finally:
        temporary.unlink(missing_ok=True)
    raise ModelError(f"table '{files.name}': found no index for its keys with {_SEEDS} seeds")


@dataclass(frozen=True, slots=True)
class _Layout:
    """The parts and buckets of an index for ``rows`` keys."""

    parts: int
    buckets: int  # of a part

    @staticmethod
    def of(rows: int, record_bytes: int) -> _Layout:
        keys = min(PART_KEYS, max(1 << 12, PART_BYTES // record_bytes))
        parts = max(1, -(-rows // keys))
        return _Layout(parts, max(1, -(-rows // (KEYS_PER_BUCKET * parts))))


@dataclass(frozen=True, slots=True)
class _BuiltPart:
    """The index and the records (n, record bytes) of a part; no pilots if none were found."""

    pilots: NDArray[np.uint8] | None
    remap: NDArray[np.uint32]
    records: NDArray[np.uint8]
    slots: int
    errors: RowErrors | None = None


@dataclass(slots=True)
class _Index:
    """The index of the parts so far."""

    parts: list[tuple[int, int, int, int]] = field(default_factory=list)
    pilots: list[NDArray[np.uint8]] = field(default_factory=list)
    remaps: list[NDArray[np.uint32]] = field(default_factory=list)
    rows: int = 0
    remap_entries: int = 0

    def add(self, pilots: NDArray[np.uint8], part: _BuiltPart) -> None:
        n = len(part.records)
        self.parts.append((self.rows, n, part.slots, self.remap_entries))
        self.pilots.append(pilots)
        self.remaps.append(part.remap)
        self.rows += n
        self.remap_entries += len(part.remap)


@dataclass(slots=True)
class _Writer:
    """One attempt to write a file, with one seed."""

    files: TableFiles
    path: Path
    options: MappedOptions
    seed: int
    record_bytes: int = field(init=False)
    layout: _Layout = field(init=False)

    def __post_init__(self) -> None:
        self.record_bytes = mapped_format.record_bytes(self.files.dim, self.options.row_format)
        self.layout = _Layout.of(self.files.rows, self.record_bytes)

    def write(self, progress: Callable[[int], None]) -> MappedReport | None:
        """Return the report; None if the seed has no pilots."""
        duplicates, index, errors = DuplicateCounter(), _Index(), RowErrors()
        scratch = self.path.with_name(f"{self.path.name}.sorting")
        chunks = sorted_chunks(self.files, self._codes, duplicates, scratch)
        with (
            self.path.open("wb", buffering=0) as file,
            closing(prefetch(chunks, 4)) as ahead,
            closing(self._built(ahead)) as built,
        ):
            out = _ChecksummedBlocks(file.fileno())
            for part in built:
                if part.pilots is None:
                    return None
                out.write(part.records)
                index.add(part.pilots, part)
                if part.errors is not None:
                    errors.add(part.errors)
                progress(len(part.records))
            header = self._header(index.rows)
            self._write_index(out, header, index)
            self._finish(out, header)
        index_bytes = int(header["checksums"] - header["parts"])
        measured = errors.conversion(self.options.row_format) if self.options.measured else None
        return MappedReport(index.rows, duplicates.count, out.offset, index_bytes, measured)

    def _codes(self, keys: KeyArray) -> Codes:
        if self.options.key_bits == 32:
            keys = keys & np.int64(0xFFFF_FFFF)
        return index_hashes(keys, self.seed)

    def _header(self, rows: int) -> Any:
        header = np.zeros((), HEADER)
        header["magic"], header["format"] = mapped_format.MAGIC, mapped_format.FORMAT
        code = self.options.row_format.code
        assert code is not None  # no table has rows of another type
        header["dtype"] = mapped_format.FIRST_FORMAT_CODE + code
        header["key_bits"] = self.options.key_bits
        header["dim"], header["record_bytes"] = self.files.dim, self.record_bytes
        header["rows"], header["seed"] = rows, self.seed
        header["digest"] = self.files.digest.encode()
        header["n_parts"] = self.layout.parts
        header["n_buckets"] = self.layout.parts * self.layout.buckets
        return header

    @staticmethod
    def _write_index(out: _ChecksummedBlocks, header: Any, index: _Index) -> None:
        header["parts"] = out.offset
        out.write(np.array(index.parts, "<u4"))
        header["pilots"] = out.offset
        out.write(np.concatenate(index.pilots))
        out.pad(8)
        header["remap"] = out.offset
        out.write(np.concatenate(index.remaps))

    @staticmethod
    def _finish(out: _ChecksummedBlocks, header: Any) -> None:
        """Write the checksums, then, when all else is on the disk, the header."""
        header["checksums"] = out.offset
        sums = np.array(out.sums(), "<u4")
        out.write_unchecked(sums)
        header["bytes"] = out.offset
        header["checksums_crc"] = crc32(sums.view(np.uint8))
        header["crc"] = crc32(np.frombuffer(header.tobytes(), np.uint8)[:-4])
        os.fsync(out.file)
        os.pwrite(out.file, header.tobytes(), 0)
        os.fsync(out.file)

    def _built(self, chunks: Iterator[Chunk]) -> Generator[_BuiltPart, None, None]:
        """Build the parts on threads, and yield them in order."""
        waiting: deque[Future[_BuiltPart]] = deque()
        with ThreadPoolExecutor(self.options.threads, "hps-index") as pool:
            for number, codes, vectors in _parts(chunks, self.layout.parts):
                waiting.append(pool.submit(self._build, number, codes, vectors))
                if len(waiting) > self.options.threads:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()

    def _build(self, number: int, codes: Codes, vectors: list[Vectors]) -> _BuiltPart:
        n, buckets = len(codes), self.layout.buckets
        slots = n + n // 99 + 4 if n else 0
        records = np.zeros((n, self.record_bytes), np.uint8)
        index = build_index_part(
            codes, number * buckets, buckets, self.layout.parts * buckets, slots
        )
        if index is None:
            return _BuiltPart(None, np.empty(0, np.uint32), records, slots)
        pilots, positions, remap = index
        keys = _keys(codes, self.seed)
        whole = np.concatenate([np.empty((0, self.files.dim), np.float32), *vectors])
        rows = self._rows(keys, whole)
        place_records(positions, keys, rows, records)
        errors = measure_errors(self._table(), whole, rows) if self.options.measured else None
        return _BuiltPart(pilots, remap, records, slots, errors)

    def _table(self) -> EmbeddingTable:
        files = self.files
        return EmbeddingTable.make(files.name, files.dim, rows=self.options.row_format.name)

    def _rows(self, keys: KeyArray, vectors: Vectors) -> RowArray:
        """Convert the vectors (n, dim) of ``keys (n,)`` to rows (n, width)."""
        table = self._table()
        try:
            return to_rows(table, vectors)
        except NotStorable as error:
            raise ModelError(
                f"table '{table.name}', key {keys[error.first]}: {error}; correct the files, or take another "
                "format (rows: float32; in a ps.json fp8_quant: false)"
            ) from error


def _keys(codes: Codes, seed: int) -> KeyArray:
    """Return the keys (n,) of the hashes ``codes (n,)``: the inverse of `index_hashes`."""
    x = codes ^ (codes >> _HALF)
    for _ in range(2):
        x *= _UNMIX
        x ^= x >> _HALF
    return (x ^ np.uint64(seed)).view(np.int64)


def _parts(chunks: Iterator[Chunk], parts: int) -> Iterator[tuple[int, Codes, list[Vectors]]]:
    """Yield number, hashes (n,) and blocks of vectors of every part, also of those without keys."""
    # The first hash of each part but the first; see `reduce` in the twin of the index.
    bounds = np.array([-(-(p << 32) // parts) << 32 for p in range(1, parts)], np.uint64)
    number, codes, vectors = 0, [np.empty(0, np.uint64)], []
    for code, rows in chunks:
        begin = 0
        for end in [*np.searchsorted(code, bounds[number:]).tolist(), None]:
            codes.append(code[begin:end])
            vectors.append(rows[begin:end])
            if end is None or end == len(code):
                break
            yield number, np.concatenate(codes), vectors
            number, codes, vectors, begin = number + 1, [], [], end
    while number < parts:
        yield number, np.concatenate(codes), vectors
        number, codes, vectors = number + 1, [np.empty(0, np.uint64)], []


class _ChecksummedBlocks:
    """A file that is written in order, behind its header, with a checksum per block."""

    def __init__(self, file: int) -> None:
        self.file, self.offset = file, HEADER_BYTES
        self._sums: list[int] = []
        self._sum = self._filled = 0

    def write(self, array: NDArray[Any]) -> None:
        data = array.reshape(-1).view(np.uint8)
        at = 0
        while at < len(data):
            piece = data[at : at + BLOCK_BYTES - self._filled]
            self._sum = crc32(piece, self._sum)
            self._filled += len(piece)
            at += len(piece)
            if self._filled == BLOCK_BYTES:
                self._end_block()
        self.write_unchecked(data)

    def write_unchecked(self, array: NDArray[Any]) -> None:
        view = array.reshape(-1).view(np.uint8).data
        while len(view):
            n = os.pwrite(self.file, view, self.offset)
            view, self.offset = view[n:], self.offset + n

    def pad(self, multiple: int) -> None:
        self.write(np.zeros(-self.offset % multiple, np.uint8))

    def sums(self) -> list[int]:
        if self._filled:
            self._end_block()
        return self._sums

    def _end_block(self) -> None:
        self._sums.append(self._sum)
        self._sum = self._filled = 0


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # some file systems cannot
            os.fsync(handle)
    finally:
        os.close(handle)
