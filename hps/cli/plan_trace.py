"""Read key traces: requests in the order in which they arrived."""

from __future__ import annotations

import lzma
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from hps.cli.column_arrays import keys_of
from hps.cli.plan_live import read_recording
from hps.cli.sample_files import INPUTS, open_reader, read
from hps.errors import BadRequest, ConfigError
from hps.lookup.key_sampling import TRACE_ENTRY
from hps.tools.plan.model import PlannedModel
from hps.tools.plan.trace import Trace, TraceCollector
from hps.types import IndexArray, KeyArray, Progress

Part = tuple[KeyArray, IndexArray]
Block = tuple[Mapping[str, Part], int]
"""Keys and requests by feature or table, and the number of samples."""
_ROWS = 1 << 16
_BLOCK_BYTES = 8 << 20
KINDS = (*INPUTS, ".npz", ".npy", ".trace", ".trace.xz")


def read_trace(
    paths: Sequence[Path],
    model: PlannedModel,
    *,
    batch: int,
    max_keys: int,
    progress: Progress,
) -> Trace:
    """Read the files of a trace, one after the other, as requests of ``batch`` samples.

    The requests of an ``.npz`` of `hps generate requests` are taken as they are. Raises ConfigError or
    BadRequest for files that can't be read, and for keys that are not the model's."""
    for path in paths:
        if not path.is_file():
            raise ConfigError(f"there is no file {path}")
    if recording := _recording(paths, model):
        return recording
    collector = TraceCollector(model, max_keys)
    first = 0
    for path in paths:
        kind = _kind(path)
        with progress.task(f"reading {path.name}", path.stat().st_size, "bytes") as step:
            reader = _readers(kind)(path, model, collector, batch)
            for parts, samples in reader:
                shifted = {name: (keys, numbers + first) for name, (keys, numbers) in parts.items()}
                collector.add(shifted, samples)
            step(path.stat().st_size)
        first = collector.requests
    return collector.trace()


def _recording(paths: Sequence[Path], model: PlannedModel) -> Trace | None:
    """Read a recording of a running node; None if ``paths`` are other files."""
    for path in paths:
        if _kind(path) != ".npz" or not zipfile.is_zipfile(path):
            continue
        with np.load(path) as arrays:
            if TRACE_ENTRY not in arrays.files:
                continue
            if len(paths) > 1:
                raise ConfigError(f"{path} is a recording of a node, which is planned by alone")
            return read_recording(arrays, model, str(path))
    return None


def _kind(path: Path) -> str:
    for kind in KINDS:
        if path.name.lower().endswith(kind):
            return kind
    raise ConfigError(f"{path}: unknown format; name it one of *{', *'.join(KINDS)}")


def _readers(kind: str) -> Any:
    if kind in INPUTS:
        return _columns
    return _archive if kind == ".npz" else _bare


def _columns(
    path: Path, model: PlannedModel, collector: TraceCollector, batch: int
) -> Iterator[Block]:
    """A sample per row; columns are named as features or tables, others are ignored."""
    names = [name for name in _column_names(path) if name in collector.names]
    if not names:
        raise BadRequest(
            f"{path}: no column has the name of a feature or table of model {model.name}: it has "
            f"{', '.join(_column_names(path))}; the model has {', '.join(collector.names)}"
        )
    reader, row = open_reader(path, tuple(names)), 0
    for columns, _ in read(reader, path, _ROWS):
        parts, count = {}, 0
        for name in names:
            found = keys_of(name, columns[name], row)
            count = found.batch
            lengths = _lengths(found.offsets, found.keys, count)
            parts[name] = found.keys, np.repeat((row + np.arange(count)) // batch, lengths)
        row += count
        yield parts, count


def _lengths(offsets: IndexArray | None, keys: KeyArray, batch: int) -> IndexArray:
    if offsets is not None:
        return np.diff(offsets)
    return np.full(batch, len(keys) // batch if batch else 0)


def _column_names(path: Path) -> list[str]:
    """The names of a file's columns; of JSONL those of the first line."""
    import orjson
    import pyarrow as pa
    import pyarrow.parquet as pq

    kind = path.suffix.lower()
    try:
        if kind == ".parquet":
            return list(pq.read_schema(path).names)
        with path.open("rb") as lines:
            head = lines.readline()
        if kind == ".jsonl":
            return list(orjson.loads(head))
        text = head.decode("utf-8-sig").strip()
        return [name.strip('" ') for name in text.split("\t" if kind == ".tsv" else ",")]
    except (pa.ArrowInvalid, OSError, ValueError, TypeError) as error:
        raise BadRequest(f"{path}: {error}") from None


def _archive(
    path: Path, model: PlannedModel, collector: TraceCollector, batch: int
) -> Iterator[Block]:
    """Requests ``NUMBER/TENSOR``, or an array of keys per feature or table."""
    try:
        with np.load(path) as arrays:
            if all("/" in name for name in arrays.files):
                yield from _requests(path, arrays, model, collector)
                return
            parts, count = {}, 0
            for name in arrays.files:
                collector.check_name(name, str(path))
                parts[name] = _samples(path, name, arrays[name], batch)
                count = len(arrays[name])
    except (OSError, ValueError, EOFError) as error:
        raise BadRequest(f"{path}: not an .npz of arrays: {error}") from None
    yield parts, count


def _requests(
    path: Path, arrays: Any, model: PlannedModel, collector: TraceCollector
) -> Iterator[Block]:
    named = [(*name.split("/", 1), name) for name in arrays.files]
    if not all(number.isdecimal() for number, _, _ in named):
        raise BadRequest(f"{path}: arrays must be named NUMBER/TENSOR, or as features or tables")
    named.sort(key=lambda each: int(each[0]))
    for position, (_, tensors) in enumerate(groupby(named, key=lambda each: each[0])):
        parts, batch = {}, 0
        for _, tensor, name in tensors:
            if tensor in model.inputs or tensor.endswith((".offsets", ".weights")):
                continue
            if tensor in ("KEYS", "NUMKEYS"):
                raise BadRequest(
                    f"{path}: requests by table; write them with hps generate requests --form features"
                )
            collector.check_name(tensor, str(path))
            array = _keys(path, name, arrays[name])
            keys, batch = array.reshape(-1), max(batch, len(array))
            parts[tensor] = keys, np.full(len(keys), position)
        yield parts, batch


def _samples(path: Path, name: str, array: Any, batch: int) -> Part:
    keys = _keys(path, name, array)
    hotness = keys.shape[1] if keys.ndim == 2 else 1
    samples = np.arange(len(keys)) // batch
    return keys.reshape(-1), np.repeat(samples, hotness)


def _keys(path: Path, name: str, array: Any) -> KeyArray:
    if array.dtype.kind not in "iu" or array.ndim not in (1, 2):
        raise BadRequest(
            f"{path}: array {name!r} is {array.dtype} {array.shape}, not integer keys (n,) or (n, hotness)"
        )
    if array.dtype == np.uint64:
        return np.ascontiguousarray(array).view(np.int64)
    return np.ascontiguousarray(array, np.int64)


def _bare(
    path: Path, model: PlannedModel, collector: TraceCollector, batch: int
) -> Iterator[Block]:
    """Keys alone: NumPy's ``.npy``, or big-endian 64-bit integers as in Caffeine's simulator."""
    name, row = collector.only_name, 0
    if name is None:
        raise BadRequest(
            f"{path} has keys alone, and model {model.name} has {', '.join(collector.names)}; use a format "
            "with names: .npz, .parquet or .csv"
        )
    blocks = _array_blocks(path) if path.suffix == ".npy" else _raw_blocks(path)
    for block in blocks:
        keys = _keys(path, path.name, block)
        hotness = keys.shape[1] if keys.ndim == 2 else 1
        numbers = (row + np.arange(len(keys))) // batch
        row += len(keys)
        yield {name: (keys.reshape(-1), np.repeat(numbers, hotness))}, len(keys)


def _array_blocks(path: Path) -> Iterator[Any]:
    try:
        array = np.load(path, mmap_mode="r")
    except (OSError, ValueError, EOFError) as error:
        raise BadRequest(f"{path}: not a NumPy array: {error}") from None
    rows = _BLOCK_BYTES // 8
    for start in range(0, len(array), rows):
        yield np.array(array[start : start + rows])


def _raw_blocks(path: Path) -> Iterator[Any]:
    opens: Any = lzma.open if path.suffix == ".xz" else open
    try:
        with opens(path, "rb") as file:
            while block := file.read(_BLOCK_BYTES):
                if len(block) % 8:
                    raise BadRequest(f"{path}: its length is no multiple of 8, the bytes of a key")
                yield np.frombuffer(block, ">i8").astype(np.int64)
    except (OSError, lzma.LZMAError, EOFError) as error:
        raise BadRequest(f"{path}: {error}") from None
