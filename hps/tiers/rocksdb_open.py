"""Opening RocksDB: options, column families, and errors that say who holds the folder or what is wrong."""

from __future__ import annotations

import fcntl
import os
import resource
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

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

NAME = "rocksdb"
DEFAULT_FAMILY = "default"
# Memory for rows not yet flushed, over all tables together; each table's share grows on demand.
_WRITE_BUFFERS = 64 << 20
_WRITE_BUFFER = 16 << 20
_ARENA_BLOCK = 64 << 10
_MAX_WAL = 256 << 20
# RocksDB gives a quarter of its jobs to flushes. Two flushes at a time write the many small tables of
# a model five times as fast as one; `threads` bounds the compactions (see open_database).
_BACKGROUND_JOBS = 8
_BINDING_FILE = "rocksdict-config.json"


@dataclass(frozen=True, slots=True)
class OpenSettings:
    """``block_cache_bytes`` are shared by all tables; ``threads`` run compactions."""

    path: Path
    block_cache_bytes: int
    block_size: int
    threads: int
    read_only: bool


def make_options(settings: OpenSettings, families: int) -> Options:
    """One option object for the database and every column family: they share the block cache."""
    blocks = BlockBasedOptions()
    if settings.block_cache_bytes:
        blocks.set_block_cache(Cache(settings.block_cache_bytes))
    else:
        blocks.disable_cache()
    blocks.set_block_size(settings.block_size)
    blocks.set_bloom_filter(10, False)
    blocks.set_format_version(5)
    blocks.set_data_block_index_type(DataBlockIndexType.binary_and_hash())
    options = Options(raw_mode=True)
    options.set_block_based_table_factory(blocks)
    options.create_if_missing(not settings.read_only)
    options.create_missing_column_families(not settings.read_only)
    # Vectors are noise to a compressor: it would cost time and win nothing.
    options.set_compression_type(DBCompressionType.none())
    options.set_max_background_jobs(_BACKGROUND_JOBS)
    options.set_db_write_buffer_size(_WRITE_BUFFERS)
    options.set_write_buffer_size(_WRITE_BUFFER)
    options.set_arena_block_size(_ARENA_BLOCK)
    options.set_max_total_wal_size(_MAX_WAL)
    options.set_max_open_files(_open_files(families))
    options.set_keep_log_file_num(4)
    options.set_max_log_file_size(8 << 20)
    options.set_stats_dump_period_sec(0)
    options.set_stats_persist_period_sec(0)
    return options


def _open_files(families: int) -> int:
    """How many table files may stay open; more are opened when they are read.

    A new column family holds a handle as well. Where they do not fit this process' soft limit it is
    raised towards the hard one; else half of the handles are left to the rest of the process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return -1
    wanted = 2 * families + 512
    if soft < wanted and soft != hard:
        soft = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return max(64, (soft - families) // 2)


def existing_families(path: Path) -> list[str]:
    """Names of the column families in the folder; empty when there is no database yet."""
    try:
        return list(Rdict.list_cf(str(path))) if (path / "CURRENT").exists() else []
    except Exception as error:
        raise translate(error, path) from error


def open_database(settings: OpenSettings, options: Options, families: Iterable[str]) -> Rdict:
    """Open (or create) the database with these column families; all are made in one go."""
    path = settings.path
    access = AccessType.read_only(False) if settings.read_only else AccessType.read_write()
    try:
        if not settings.read_only:
            path.mkdir(parents=True, exist_ok=True)
        opened = Rdict(str(path), options, dict.fromkeys(families, options), access)
    except Exception as error:
        raise translate(error, path) from error
    Env().set_background_threads(settings.threads)
    return opened


def linked_copy(path: Path) -> TemporaryDirectory[str]:
    """A folder of links to the database's files, for reading only.

    RocksDB's binding writes a settings file at every opening, even a read-only one; this way the
    folder itself is never written to and may lie on a read-only file system."""
    folder = TemporaryDirectory(prefix="hps-rocksdb-")
    try:
        for file in path.iterdir():
            if file.is_file() and file.name != _BINDING_FILE:
                (Path(folder.name) / file.name).symlink_to(file.resolve())
    except OSError as error:
        folder.cleanup()
        raise translate(error, path) from error
    return folder


def translate(error: BaseException, path: Path) -> TierError:
    """RocksDB's message -> a TierError that names the cause and the mend."""
    text = str(error)
    low = text.lower()
    if "lock hold by current process" in low:
        return TierError(
            NAME, f"{path} is already open in this process; close what opened it first"
        )
    if "lock file" in low or "resource temporarily unavailable" in low:
        return TierError(
            NAME,
            f"{path} is locked by {_lock_owner(path)}; a database folder belongs to one node: "
            "stop that process or set tiers.rocksdb.path to another folder",
        )
    if "no space left" in low:
        return TierError(NAME, f"no space left on the device of {path}; free some ({text})")
    if "permission denied" in low or isinstance(error, PermissionError):
        return TierError(NAME, f"no permission for {path}; make it writable for this user ({text})")
    if "read-only file system" in low:
        return TierError(NAME, f"{path} is on a read-only file system ({text})")
    if "too many open files" in low:
        return TierError(
            NAME,
            f"{path}: too many open files; raise the limit (ulimit -n) to 4 per table ({text})",
        )
    if "not supported operation in read only mode" in low:
        return TierError(NAME, f"{path} was opened with read_only: true; writing is off")
    if "not a directory" in low or isinstance(error, (NotADirectoryError, FileExistsError)):
        return TierError(NAME, f"{path} is not a folder ({text})")
    if "corruption" in low or "checksum mismatch" in low or "no such file" in low:
        return TierError(
            NAME,
            f"{path} is damaged: {text}. Restore the folder from a copy, or remove it: tables are "
            "loaded again from the model repository, but rows streamed in since are lost with it",
        )
    return TierError(NAME, f"{path}: {text}")


def _lock_owner(path: Path) -> str:
    """Asks the kernel who holds the lock. Only called when another process does: closing the lock
    file in the owning process would give up the lock."""
    try:
        fd = os.open(path / "LOCK", os.O_RDWR)
    except OSError:
        return "another process"
    try:
        layout = "hhqqi4x"
        asked = struct.pack(layout, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        _kind, _whence, _start, _len, pid = struct.unpack(
            layout, fcntl.fcntl(fd, fcntl.F_GETLK, asked)
        )
    except (OSError, struct.error):
        return "another process"
    finally:
        os.close(fd)
    if pid <= 0:
        return "another process"
    try:
        command = (Path("/proc") / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    except (OSError, UnicodeDecodeError):
        return f"process {pid}"
    command = command.strip()
    # Long enough for the file of `hps serve --config FILE`, short enough for a line.
    return f"process {pid} ({command if len(command) <= 400 else command[:399] + '…'})"
