"""Opening RocksDB: options, column families, and the three kinds of access.

Figures behind the options: 10 million rows of 137 bytes in 1.6 GB of table files, all in the operating
system's file cache; 10,000 sorted random keys a batch; µs of one core a key, hits (misses cost 0.3
throughout, without the bloom filter as much as hits):

====================================================  ====
pread, no block cache, 1 KiB blocks, hash index       2.9   chosen
the same, mapped files (``mmap_reads``)               2.5
pread, block cache of 256 MiB (LRU)                   4.8
the same, hyper clock cache                           4.8
direct I/O, block cache of 256 MiB                    23
mapped: blocks of 512 B, 2, 4, 16 KiB                 2.7, 2.5, 2.8, 4.6
mapped: without the hash index in the blocks          2.8
mapped: two-level index                               2.8
mapped: restart interval 1                            3.3
====================================================  ====

A block cache in front of the operating system's only copies: hot rows are in the tiers above. Mapped files
would be a seventh faster, but a disk that fails under them, or a file cut short, ends the process by a
signal instead of being an error; so they are an option. Small blocks cost most where memory is short: a
block that is not cached costs a disk read whatever its size. Ribbon filters would save a third of 1.25 bytes
a row; the binding does not offer them.
"""

from __future__ import annotations

import json
import resource
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

from rocksdict import (
    AccessType,
    BlockBasedOptions,
    Cache,
    DataBlockIndexType,
    DBCompressionType,
    Env,
    Options,
    Rdict,
)

from hps.errors import TierError
from hps.tiers.rocksdb.errors import NAME, translate_rocksdb_error

Access = Literal["primary", "read_only", "secondary"]
OnLostWrites = Literal["refuse", "accept"]

# Memory for unflushed rows, over all tables together: when it is used up, the oldest buffer is flushed, and
# counts until its file is written. A table's full buffer is flushed immediately: RocksDB leaves alone those
# that are to be flushed together, and each table may have some. A row's place is found in one buffer,
# faster the more of it is in the processor's cache: a streamed row costs 3.9 µs with buffers of 4 MiB, 4.8
# with 16, 6 with 64.
_WRITE_BUFFERS = 64 << 20
_WRITE_BUFFER, _MOST_BUFFERS = 4 << 20, 8
# Each compaction of new files rewrites the overlapping files of the first level, up to 256 MiB.
_NEW_FILES = 8
_ARENA_BLOCK = 64 << 10
_MAX_WAL = 256 << 20
# RocksDB gives a quarter of its jobs to flushes. Two flushes at a time write the many small tables of
# a model five times as fast as one; `threads` bounds the compactions (see open_database).
_BACKGROUND_JOBS = 8
# The user's and the group's.
PRIVATE = 0o770
_MANIFEST_NOTE = "hps-manifest.json"
_BINDING_FILE = "rocksdict-config.json"


@dataclass(frozen=True, slots=True)
class RocksDbTuning:
    """Tuning of an open database.

    ``block_cache_bytes``: shared by all tables. ``block_size``: bytes of a data block. ``threads``:
    compaction threads. ``min_free_bytes``: free disk space below which writes are rejected.
    ``catch_up_s``: a secondary reads the primary's new writes at the first fetch after this many
    seconds."""

    block_cache_bytes: int = 0
    block_size: int = 1024
    threads: int = 2
    mmap_reads: bool = False
    min_free_bytes: int = 256 << 20
    catch_up_s: float = 1.0


@dataclass(frozen=True, slots=True)
class OpenSettings:
    """Settings of one opening.

    ``on_lost_writes``: a primary's reaction to acknowledged writes that are missing from its log.
    ``repair``: open a primary although table files are damaged."""

    path: Path
    access: Access
    tuning: RocksDbTuning
    on_lost_writes: OnLostWrites = "refuse"
    repair: bool = False


def make_options(settings: OpenSettings, families: int) -> Options:
    """Make one option object for the database and every column family: they share the block cache."""
    tuning, writes = settings.tuning, settings.access == "primary"
    options = Options(raw_mode=True)
    options.set_block_based_table_factory(_block_options(tuning))
    options.set_paranoid_checks(not settings.repair)
    options.create_if_missing(writes)
    options.create_missing_column_families(writes)
    # Vectors are noise to a compressor: it would cost time and save nothing.
    options.set_compression_type(DBCompressionType.none())
    options.set_allow_mmap_reads(tuning.mmap_reads)
    options.set_max_background_jobs(_BACKGROUND_JOBS)
    options.set_db_write_buffer_size(_WRITE_BUFFERS)
    options.set_write_buffer_size(_WRITE_BUFFER)
    options.set_max_write_buffer_number(_MOST_BUFFERS)
    options.set_level_zero_file_num_compaction_trigger(_NEW_FILES)
    options.set_arena_block_size(_ARENA_BLOCK)
    options.set_max_total_wal_size(_MAX_WAL)
    # The primary removes files that a reader may still need; only open ones stay readable.
    options.set_max_open_files(_open_files(families) if writes else -1)
    options.set_keep_log_file_num(4)
    options.set_max_log_file_size(8 << 20)
    options.set_stats_dump_period_sec(0)
    options.set_stats_persist_period_sec(0)
    return options


def _block_options(tuning: RocksDbTuning) -> BlockBasedOptions:
    blocks = BlockBasedOptions()
    if tuning.block_cache_bytes:
        blocks.set_block_cache(Cache(tuning.block_cache_bytes))
    else:
        blocks.disable_cache()
    blocks.set_block_size(tuning.block_size)
    blocks.set_bloom_filter(10, False)
    blocks.set_format_version(5)
    blocks.set_data_block_index_type(DataBlockIndexType.binary_and_hash())
    return blocks


def _open_files(families: int) -> int:
    """Return how many table files may stay open; others are opened when they are read.

    A new column family holds a handle as well. If the handles exceed the process's soft limit, it is
    raised towards the hard one; otherwise half of the handles are left to the rest of the process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return -1
    wanted = 2 * families + 512
    if soft < wanted and soft != hard:
        soft = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return max(64, (soft - families) // 2)


def existing_families(path: Path) -> list[str]:
    """Return the names of the column families in the folder; empty if there is no database yet.

    Raises TierError for a folder with an incomplete database."""
    try:
        if (path / "CURRENT").exists():
            return list(Rdict.list_cf(str(path)))
        # A database has a log from the start. A lone MANIFEST was left by a process that was killed while
        # it created the database.
        left = next((f for f in path.glob("*") if f.suffix in (".sst", ".log")), None)
    except Exception as error:
        raise translate_rocksdb_error(error, path) from error
    if left is not None:
        raise translate_rocksdb_error(
            OSError(f"Corruption: the file CURRENT is missing beside {left.name}"), path
        )
    return []


def open_database(
    settings: OpenSettings,
    options: Options,
    families: Iterable[str],
    beside: TemporaryDirectory[str] | None = None,
) -> Rdict:
    """Open (or create) the database with these column families; all are created in one call."""
    path = settings.path
    columns = dict.fromkeys(families, options)
    try:
        if settings.access == "primary":
            make_private(path, "set tiers.rocksdb.path to another folder")
            opened = Rdict(str(path), options, columns, AccessType.read_write())
        elif settings.access == "read_only":
            assert beside is not None
            opened = Rdict(beside.name, options, columns, AccessType.read_only(False))
        else:
            assert beside is not None
            opened = Rdict(str(path), options, columns, AccessType.secondary(beside.name))
    except TierError:
        raise
    except Exception as error:
        raise translate_rocksdb_error(error, path) from error
    Env().set_background_threads(settings.tuning.threads)
    return opened


def make_private(path: Path, remedy: str = "name another folder", *, exist_ok: bool = True) -> None:
    """Create a folder for rows, and its parents, accessible to this user only.

    Raises OSError, and TierError with the given ``remedy`` if the path is not usable."""
    try:
        path.mkdir(mode=PRIVATE, parents=True, exist_ok=exist_ok)
    except FileNotFoundError as error:
        why = f"{error.strerror}: {error.filename}"
        raise TierError(NAME, f"{path} cannot be made ({why}); {remedy}") from None


def repair_folder(path: Path) -> Path:
    """Return the folder in which a repair of the database at ``path`` keeps salvaged rows."""
    return path / "hps-repair"


def note_manifest(path: Path) -> None:
    """Record the length of the MANIFEST, the list of table files, for `check_manifest`.

    It only grows, and RocksDB syncs it to disk before it acknowledges anything."""
    try:
        name = (path / "CURRENT").read_text().strip()
        size = (path / name).stat().st_size
        part = path / f"{_MANIFEST_NOTE}.part"
        part.write_text(json.dumps({"name": name, "bytes": size}))
        part.replace(path / _MANIFEST_NOTE)
    except OSError:
        # Not an error, only a check less at the next start: the disk may be full.
        return


def check_manifest(path: Path) -> None:
    """Raise TierError if the MANIFEST is shorter than recorded.

    RocksDB would take the rest for an earlier state, and delete the table files that are not in it."""
    try:
        noted = json.loads((path / _MANIFEST_NOTE).read_text())
        name = (path / "CURRENT").read_text().strip()
        size = (path / name).stat().st_size
    except (OSError, ValueError):
        return
    if name == noted.get("name") and size < noted.get("bytes", 0):
        why = f"Corruption: {name} has {size:,} bytes, but had {noted['bytes']:,} before"
        raise translate_rocksdb_error(OSError(why), path)


def folder_beside(settings: OpenSettings) -> TemporaryDirectory[str] | None:
    """Return the temporary folder that a reader needs.

    For a read-only one it holds links to the database's files: RocksDB's binding writes a settings file
    at every opening, even read-only; this way the database folder is never written to and may be on a
    read-only file system. A secondary keeps its log there."""
    if settings.access == "primary":
        return None
    folder = TemporaryDirectory(prefix="hps-rocksdb-")
    if settings.access == "read_only":
        try:
            for file in settings.path.iterdir():
                if file.is_file() and file.name != _BINDING_FILE:
                    (Path(folder.name) / file.name).symlink_to(file.resolve())
        except OSError as error:
            folder.cleanup()
            raise translate_rocksdb_error(error, settings.path) from error
    return folder
