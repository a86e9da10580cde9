"""Local cache of downloaded versions: ``<folder>/<repository>/<model>/<version>/``, bounded in bytes.

Each repository's folder has the layout of a local repository. Processes share the cache: a lock on a
version's folder, shared by all that serve it, keeps it from being evicted; the modification time of the
folder is when it was last served."""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import re
import shutil
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hps.config.repository_uri import RepositoryUri
from hps.errors import ModelError
from hps.models.manifest import FILE_NAME

log = logging.getLogger(__name__)

DOWNLOAD_PREFIX = ".download-"
_EVICT_PREFIX = ".evict-"
_DEFAULT_SHARE = 0.8
_POLL_S = 0.1
_VERSION = re.compile(r"[1-9][0-9]{0,17}")


class VersionLease:
    """Keeps a version's folder in the cache until `close`, or until nothing refers to this object."""

    def __init__(self, handle: int, folder: Path) -> None:
        self._finalizer = weakref.finalize(self, _release, handle, folder)

    def close(self) -> None:
        self._finalizer()


def _release(handle: int, folder: Path) -> None:
    with suppress(OSError):
        os.utime(folder)
    os.close(handle)


class DownloadCache:
    """The cache in ``folder``. Thread-safe and process-safe."""

    def __init__(self, folder: Path, capacity_bytes: int | None) -> None:
        self.folder = folder
        self._capacity_bytes = capacity_bytes

    def root_of(self, uri: RepositoryUri, *, networks_only: bool = False) -> Path:
        """The folder of a repository; without rows, if ``networks_only``, another one."""
        readable = re.sub(r"[^a-zA-Z0-9_.\-]+", "-", uri.replace("://", "-"))[:80]
        digest = hashlib.sha256(uri.encode()).hexdigest()[:8]
        return self.folder / f"{readable}-{digest}{'-networks' if networks_only else ''}"

    def lease(self, folder: Path) -> VersionLease | None:
        """Keep a version's folder from being evicted; None if there is none."""
        while True:
            try:
                handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            except OSError:
                return None
            try:
                fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
                if os.fstat(handle).st_ino == folder.stat().st_ino:
                    os.utime(folder)
                    return VersionLease(handle, folder)
            except (BlockingIOError, FileNotFoundError):
                pass  # it is being evicted
            os.close(handle)
            time.sleep(_POLL_S)

    @contextmanager
    def exclusive(self, folder: Path, wait: Callable[[], None]) -> Iterator[None]:
        """Make and lock the folder of a download; calls ``wait`` while another process has it."""
        while (handle := _lock_new(folder)) is None:
            wait()
            time.sleep(_POLL_S)
        try:
            yield
        finally:
            os.close(handle)

    @contextmanager
    def reserve(self, size: int, what: str) -> Iterator[None]:
        """Make room for ``size`` more bytes, which the caller reserves on the disk in this context.

        Evicts versions, the least recently served first. Raises ModelError if that does not suffice."""
        self.folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(self.folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            self._evict(size, what)
            yield
        finally:
            os.close(handle)

    def discard(self, folder: Path) -> bool:
        """Remove a version's folder; False if it is served."""
        try:
            handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            return True
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            gone = folder.with_name(
                f"{_EVICT_PREFIX}{folder.name}-{os.getpid()}-{threading.get_ident()}"
            )
            folder.rename(gone)
            shutil.rmtree(gone, ignore_errors=True)
        except (BlockingIOError, FileNotFoundError):
            return False
        finally:
            os.close(handle)
        return True

    def _evict(self, size: int, what: str) -> None:
        capacity = self._capacity()
        oldest = sorted(self._versions(), key=lambda folder: folder.stat().st_mtime)
        used = folder_bytes(self.folder)
        for folder in oldest:
            if used + size <= capacity and size <= self._free():
                return
            if self.discard(folder):
                before, used = used, folder_bytes(self.folder)
                log.info("download: evicted %s (%d bytes)", folder, before - used)
        if used + size > capacity:
            raise ModelError(
                f"{what} needs {size} bytes, but {self.folder} holds {used} of at most {capacity} bytes in "
                "versions that are served or being downloaded; raise models.download.capacity_bytes, or "
                "unload a model"
            )
        if size > (free := self._free()):
            raise ModelError(
                f"{what} needs {size} bytes, but the disk of {self.folder} has {free} free; free some, or "
                "set models.download.folder to a larger disk"
            )

    def _capacity(self) -> int:
        if self._capacity_bytes is not None:
            return self._capacity_bytes
        return int(shutil.disk_usage(self.folder).total * _DEFAULT_SHARE)

    def _free(self) -> int:
        return shutil.disk_usage(self.folder).free

    def _versions(self) -> list[Path]:
        """Folders that may be evicted: versions, and downloads that no process continues."""
        return [
            each
            for each in self.folder.glob("*/*/*")
            if each.is_dir()
            and (
                _VERSION.fullmatch(each.name)
                or each.name.startswith((DOWNLOAD_PREFIX, _EVICT_PREFIX))
            )
        ]


def _lock_new(folder: Path) -> int | None:
    """Make a folder and lock it; None if another process has it. Raises ModelError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise ModelError(
            f"models.download.folder: cannot make {folder}: {error.strerror}; mount it writable, or set "
            "another folder"
        ) from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(handle).st_ino == folder.stat().st_ino:
            return handle
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(handle)
    return None


def folder_bytes(folder: Path) -> int:
    """Bytes of all files below ``folder``, each once, whatever its number of links.

    Files that vanish meanwhile don't count."""
    found: dict[tuple[int, int], int] = {}
    for path, _, files in os.walk(folder):
        for name in files:
            with suppress(OSError):
                stat = os.stat(os.path.join(path, name))
                found[stat.st_dev, stat.st_ino] = stat.st_size
    return sum(found.values())


def is_whole(folder: Path) -> bool:
    """True if a version's folder is complete."""
    return (folder / FILE_NAME).is_file()
