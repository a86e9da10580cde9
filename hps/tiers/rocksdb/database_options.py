"""Opening RocksDB: options, column families, and the three kinds of access.

Measurements behind the options: docs/decisions/0076-read-rocksdb-without-a-block-cache.md."""

from __future__ import annotations

import json
import resource
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
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
from hps.tiers.rocksdb.errors import rocksdb_error, translate_rocksdb_error

Access = Literal["primary", "read_only", "secondary"]
OnLostWrites = Literal["refuse", "accept", "repair"]

# Memory for unflushed rows, over all tables together. When it is used up, the oldest buffer is flushed, and
# counts until its file is written. A table's full buffer is flushed immediately. RocksDB does not merge
# buffers that wait for a flush, so a table may have several. Small buffers are faster, because more of a
# buffer is in the processor's cache when a row's place is searched: a streamed row costs 3.9 µs with
# buffers of 4 MiB, 4.8 with 16, 6 with 64.
_WRITE_BUFFERS = 64 << 20
_WRITE_BUFFER, _MOST_BUFFERS = 4 << 20, 8
# New files per compaction: each compaction also rewrites the overlapping files of the first level, up to
# 256 MiB.
_NEW_FILES = 8
_ARENA_BLOCK = 64 << 10
_MAX_WAL = 256 << 20
# RocksDB gives a quarter of its jobs to flushes. Two flushes at a time write the many small tables of
# a model five times as fast as one; `threads` bounds the compactions (see open_database).
_BACKGROUND_JOBS = 8
# Access for the user and the group.
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
    """Settings with which a database is opened.

    ``on_lost_writes``: a primary's reaction to acknowledged writes that are missing from its log;
    ``repair`` accepts the loss, and opens the database although table files are damaged too."""

    path: Path
    access: Access
    tuning: RocksDbTuning
    on_lost_writes: OnLostWrites = "refuse"

    @property
    def repair(self) -> bool:
        return self.on_lost_writes == "repair"


def make_options(settings: OpenSettings, families: int) -> Options:
    """Make one options object for the database and all its column families, which share its block cache."""
    tuning, writes = settings.tuning, settings.access == "primary"
    options = Options(raw_mode=True)
    options.set_block_based_table_factory(_block_options(tuning))
    options.set_paranoid_checks(not settings.repair)
    options.create_if_missing(writes)
    options.create_missing_column_families(writes)
    # Vectors do not compress: compression would cost time and save nothing.
    options.set_compression_type(DBCompressionType.none())
    options.set_allow_mmap_reads(tuning.mmap_reads)
    options.set_max_background_jobs(_BACKGROUND_JOBS)
    options.set_db_write_buffer_size(_WRITE_BUFFERS)
    options.set_write_buffer_size(_WRITE_BUFFER)
    options.set_max_write_buffer_number(_MOST_BUFFERS)
    options.set_level_zero_file_num_compaction_trigger(_NEW_FILES)
    options.set_arena_block_size(_ARENA_BLOCK)
    options.set_max_total_wal_size(_MAX_WAL)
    # A reader keeps all files open: the primary may remove one, and only an open file stays readable.
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
    """Return how many table files may stay open; the others are opened at each read.

    Raises the process's soft limit of file handles towards the hard one if necessary. A new column family
    needs a handle too; half of the other handles are left to the rest of the process. -1: no limit."""
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
        # A complete database has a log. A MANIFEST alone was left by a process that was killed while it
        # created the database.
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
    folder: TemporaryDirectory[str] | None = None,
) -> Rdict:
    """Open (or create) the database with these column families; all are created in one call."""
    path = settings.path
    columns = dict.fromkeys(families, options)
    try:
        if settings.access == "primary":
            make_private(path, "set tiers.rocksdb.path to another folder")
            opened = Rdict(str(path), options, columns, AccessType.read_write())
        elif settings.access == "read_only":
            assert folder is not None
            opened = Rdict(folder.name, options, columns, AccessType.read_only(False))
        else:
            assert folder is not None
            opened = Rdict(str(path), options, columns, AccessType.secondary(folder.name))
    except TierError:
        raise
    except Exception as error:
        raise translate_rocksdb_error(error, path) from error
    Env().set_background_threads(settings.tuning.threads)
    return opened


@contextmanager
def open_read_only(
    settings: OpenSettings, options: Options, families: Iterable[str], *, with_logs: bool = True
) -> Iterator[Rdict]:
    """Open the database read-only for a moment, without changing its folder."""
    reading = replace(settings, access="read_only")
    links = temporary_folder(reading)
    assert links is not None
    with links:
        if not with_logs:
            for link in Path(links.name).glob("*.log"):
                link.unlink()
        db = open_database(reading, options, families, links)
        try:
            yield db
        finally:
            db.close()


def make_private(path: Path, remedy: str = "name another folder", *, exist_ok: bool = True) -> None:
    """Create a folder for rows, and its parents, accessible to this user only.

    Raises OSError, and TierError with the given ``remedy`` if the path is not usable."""
    try:
        path.mkdir(mode=PRIVATE, parents=True, exist_ok=exist_ok)
    except FileNotFoundError as error:
        why = f"{error.strerror}: {error.filename}"
        raise rocksdb_error(f"{path} cannot be created ({why}); {remedy}") from None


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
        # Not an error: without the record (the disk may be full) the next start only skips a check.
        return


def check_manifest(path: Path) -> None:
    """Raise TierError if the MANIFEST is shorter than recorded.

    RocksDB would take a shortened MANIFEST for an earlier state, and delete all table files that it does
    not list."""
    try:
        noted = json.loads((path / _MANIFEST_NOTE).read_text())
        name = (path / "CURRENT").read_text().strip()
        size = (path / name).stat().st_size
    except (OSError, ValueError):
        return
    if name == noted.get("name") and size < noted.get("bytes", 0):
        why = f"Corruption: {name} has {size:,} bytes, but had {noted['bytes']:,} before"
        raise translate_rocksdb_error(OSError(why), path)


def temporary_folder(settings: OpenSettings) -> TemporaryDirectory[str] | None:
    """Make the temporary folder that a reader needs; None for a primary.

    ``read_only``: a folder of links to the database's files. RocksDB's binding writes a settings file at
    every opening, even read-only; with the links the database folder is never written to, and may be on a
    read-only file system. ``secondary``: the folder of its log."""
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
