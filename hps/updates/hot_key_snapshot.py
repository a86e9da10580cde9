"""Hot key snapshot: a file of a cache's hot keys, from which a restarted node warms it.

It has keys, not rows: the rows in the stores may have changed meanwhile. The file is ``HPSHOT1 ``, the
length of a JSON header (u32, little endian), the header, which lists the tables, each table's keys
(int64) and scores (u8), hottest first, and the CRC-32 of all that."""

from __future__ import annotations

import json
import logging
import os
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np

from hps.periodic import PeriodicThread
from hps.tiers.ranking import HotKeys, RankedCache
from hps.types import EmbeddingTable

log = logging.getLogger(__name__)
_MAGIC = b"HPSHOT1\n"
_CHUNK_BYTES = 1 << 20
_ENTRY_BYTES = 9


def write_hot_keys(
    path: Path,
    tables: Mapping[str, HotKeys],
    bytes_per_s: float = float("inf"),
    wait: Callable[[float], object] = time.sleep,
) -> None:
    """Replace ``path`` by the hot keys of ``tables``, by their ids, at most ``bytes_per_s`` fast.

    Readers see the old file or the new one, never a part. Raises OSError."""
    header = json.dumps(
        {
            "written": time.time(),
            "tables": [[name, len(keys)] for name, (keys, _) in tables.items()],
        }
    ).encode()
    new = path.with_name(f".{path.name}.{os.getpid()}")
    checksum = 0
    try:
        with open(new, "wb", opener=_private) as file:
            for chunk in _chunks(header, tables):
                file.write(chunk)
                checksum = zlib.crc32(chunk, checksum)
                wait(len(chunk) / bytes_per_s)
            file.write(checksum.to_bytes(4, "little"))
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)


def _private(path: str, flags: int) -> int:
    """Keys may identify people: other users of the machine get no access."""
    return os.open(path, flags, 0o660)


def _chunks(header: bytes, tables: Mapping[str, HotKeys]) -> Iterator[bytes]:
    yield _MAGIC + len(header).to_bytes(4, "little") + header
    for keys, scores in tables.values():
        for array in (keys.astype("<i8", copy=False), scores):
            data = memoryview(array.tobytes())
            for start in range(0, len(data), _CHUNK_BYTES):
                yield bytes(data[start : start + _CHUNK_BYTES])


def read_hot_keys(path: Path) -> dict[str, HotKeys]:
    """Read a file of `write_hot_keys`. Raises OSError, and ValueError for a damaged file."""
    data = path.read_bytes()
    start = len(_MAGIC) + 4
    if len(data) < start + 4 or not data.startswith(_MAGIC):
        raise ValueError(f"{path} is not a hot key snapshot")
    if zlib.crc32(memoryview(data)[:-4]) != int.from_bytes(data[-4:], "little"):
        raise ValueError(f"{path} is damaged: its checksum does not match")
    at = start + int.from_bytes(data[start - 4 : start], "little")
    tables = {}
    for name, n in json.loads(data[start:at])["tables"]:
        keys = np.frombuffer(data, "<i8", n, at).astype(np.int64)
        scores = np.frombuffer(data, np.uint8, n, at + 8 * n)
        tables[name] = keys, scores
        at += _ENTRY_BYTES * n
    return tables


class HotKeySnapshots:
    """Writes ``cache``'s hot keys of the current ``tables`` to ``path`` every ``interval_s`` and at `close`.

    A thread does it; neither readers nor the writer of the cache wait for it. ``most``: keys per table,
    None for all."""

    def __init__(
        self,
        cache: RankedCache,
        tables: Callable[[], Iterable[EmbeddingTable]],
        path: Path,
        *,
        interval_s: float,
        most: int | None = None,
        bytes_per_s: float = float("inf"),
    ) -> None:
        self._cache = cache
        self._tables = tables
        self._path = path
        self._most = most
        self._bytes_per_s = bytes_per_s
        self._thread = PeriodicThread(self._write, interval_s, "hps-hot-keys")
        self._thread.start()

    def close(self) -> None:
        """Write a last snapshot. The cache must still be open. Idempotent."""
        if self._thread.wait(0):
            return
        self._thread.close(timeout_s=None)
        self._write()

    def _write(self) -> None:
        try:
            hot = {}
            for table in self._tables():
                n = self._cache.capacity(table)
                hot[table.id] = self._cache.top_k(table, n if self._most is None else self._most)
            if not any(len(keys) for keys, _ in hot.values()):
                return  # nothing was served: keep the earlier snapshot
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_hot_keys(self._path, hot, self._bytes_per_s, self._thread.wait)
        except OSError as error:
            log.warning("writing the hot keys to %s failed: %s", self._path, error)
        except Exception:
            log.exception("writing the hot keys to %s failed", self._path)


def hot_keys_at_start(path: Path) -> dict[str, HotKeys]:
    """Read a file of `write_hot_keys`; empty if there is none, or, with a warning, if it is damaged."""
    try:
        return read_hot_keys(path)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        log.warning("cache starts without its hot keys: %s", error)
        return {}
