"""The download of one version into a folder of the cache."""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from hps.errors import ModelError
from hps.models.manifest import DENSE_FILE, FILE_NAME, Manifest, read_manifest
from hps.models.mapped_file import MAPPED_FILE
from hps.models.remote.cache import DownloadCache
from hps.models.remote.download import DownloadLimits, OpenFile, VersionDownload
from hps.models.remote.mapped_tables import mapped_entries, remove_damaged
from hps.models.remote.meter import DOWNLOADS
from hps.models.remote.partial_file import PartialFile, RemoteEntry, allocated, clear
from hps.models.remote.peers import PeerAccess, PeerVersion
from hps.models.remote.shared_files import link_downloaded
from hps.models.remote.store import RemoteFile, RemoteStore
from hps.models.staging import fsync_all
from hps.native.mapped_format import HEADER_BYTES
from hps.types import Progress

log = logging.getLogger(__name__)

_LOG_EVERY_S = 10.0
_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class VersionFetcher:
    """Downloads versions of one repository. Thread-safe; callers lock the folder of each version."""

    def __init__(
        self,
        store: RemoteStore,
        cache: DownloadCache,
        limits: DownloadLimits,
        progress: Progress,
        peers: PeerAccess,
    ) -> None:
        self._store, self._cache, self._limits = store, cache, limits
        self.progress = progress
        self._peers = peers

    def fetch(
        self, name: str, version: int, hidden: Path, text: bytes, *, networks_only: bool = False
    ) -> None:
        """Fill the folder ``hidden``; ``text``: the manifest, which gets its name last.

        Raises ModelError or StoreUnavailable; what is complete remains for the next attempt, unless the
        disk is full."""
        with disk_errors(hidden):
            manifest = self._read_manifest(name, version, hidden, text)
            self._fetch_all(manifest, hidden, text, networks_only=networks_only)

    def _fetch_all(
        self, manifest: Manifest, hidden: Path, text: bytes, *, networks_only: bool
    ) -> None:
        key, started = f"{manifest.model}/{manifest.version}", time.monotonic()
        files = {path: RemoteEntry(e.bytes, e.checksum) for path, e in manifest.files().items()}
        if networks_only:
            files = {path: entry for path, entry in files.items() if path == DENSE_FILE}
        elif self._limits.mapped:
            files |= mapped_entries(self._store, key, manifest)
        size = sum(entry.bytes for entry in files.values())
        log.info("download: %s/%s, %d bytes, to %s", self._store.uri, key, size, hidden.parent)
        link_downloaded(hidden.parent, hidden, manifest, files)
        peers, no_peers = (
            PeerVersion(access, manifest.model, manifest.version, text)
            for access in (self._peers, PeerAccess())
        )
        has_peers = bool(peers)
        self._fetch(key, hidden, files, peers)
        if remove_damaged(hidden, manifest) and has_peers:
            log.warning("download: %s: downloading these files again, from the store", key)
            self._fetch(key, hidden, files, no_peers)
            remove_damaged(hidden, manifest)
        fsync_all(hidden)
        (hidden / f"{FILE_NAME}.part").rename(hidden / FILE_NAME)
        log.info("download: %s complete after %.1f s", key, time.monotonic() - started)

    def _read_manifest(self, name: str, version: int, hidden: Path, text: bytes) -> Manifest:
        """Check the manifest, and keep it with the files; files of another manifest are removed."""
        path = hidden / f"{FILE_NAME}.part"
        if not path.is_file() or path.read_bytes() != text:
            clear(hidden)
            path.write_bytes(text)
        try:
            manifest = read_manifest(path)
        except ModelError as error:
            where = f"{self._store.uri}/{name}/{version}/{FILE_NAME}"
            raise ModelError(str(error).replace(str(path), where)) from None
        if (manifest.model, manifest.version) != (name, version):
            raise ModelError(
                f"{self._store.uri}/{name}/{version}/{FILE_NAME}: describes model '{manifest.model}' version "
                f"{manifest.version}, but lies in '{name}' version {version}"
            )
        return manifest

    def _fetch(
        self, key: str, hidden: Path, files: Mapping[str, RemoteEntry], peers: PeerVersion
    ) -> None:
        """Download what is missing of ``files``; ``key``: ``<model>/<version>``."""
        size = sum(entry.bytes for entry in files.values())
        absent = {path: entry for path, entry in files.items() if not (hidden / path).is_file()}
        with ExitStack() as opened, self.progress.task(f"download {key}", size, "bytes") as step:
            partials = self._reserve(key, hidden, absent, opened)
            missing = sum(file.range_of(i)[1] for file in partials for i in file.missing())
            step(size - missing)
            report = _ProgressLog(key, size - missing, size)

            def advance(done: int) -> None:
                DOWNLOADS.count_bytes(key.partition("/")[0], done)
                report.add(done)
                step(done)

            where, opener = f"{self._store.uri}/{key}", self._opener(key, files, peers)
            VersionDownload(where, opener, self._limits, peers.distrust).run(partials, advance)

    def _reserve(
        self, key: str, hidden: Path, files: Mapping[str, RemoteEntry], opened: ExitStack
    ) -> list[PartialFile]:
        """Open the files, which ``opened`` closes, with their sizes reserved in the cache."""
        there = sum(allocated(hidden / f"{path}.part") for path in files)
        needed = max(0, sum(entry.bytes for entry in files.values()) - there)
        partials = []
        with self._cache.reserve(needed, f"version {key}"):
            for path, entry in files.items():
                file = PartialFile(hidden / path, path, entry, self._limits.chunk_bytes)
                opened.callback(file.close)
                partials.append(file)
        return partials

    def _opener(self, key: str, files: Mapping[str, RemoteEntry], peers: PeerVersion) -> OpenFile:
        """Opens files at peers, else in the store.

        The manifest has no checksum of a mapped file. The file's header is the store's; it determines the
        checksums of all blocks, which `remove_damaged` compares."""

        def from_store(path: str) -> RemoteFile:
            return self._store.open(f"{key}/{path}")

        def open_file(path: str, repeated: bool) -> RemoteFile:
            is_mapped = path.endswith(f"/{MAPPED_FILE}")
            is_checked = is_mapped or files[path].checksum is not None
            # A file that differed is downloaded again from the store alone.
            if repeated or not is_checked or not peers:
                return from_store(path)
            return peers.open(path, from_store, HEADER_BYTES if is_mapped else 0)

        return open_file


@contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """Turn errors of the local disk into ModelError; if it is full, ``folder`` is emptied."""
    try:
        yield
    except OSError as error:
        where = f"downloading to {folder} failed: {error.strerror or error}"
        if error.errno not in _NO_SPACE:
            raise ModelError(f"{where}; check the disk of models.download.folder") from error
        clear(folder)
        raise ModelError(
            f"{where}; free some space, lower models.download.capacity_bytes, or set "
            "models.download.folder to a larger disk"
        ) from error


class _ProgressLog:
    """Log lines of a long download."""

    def __init__(self, key: str, done: int, total: int) -> None:
        self._key, self._done, self._total = key, done, total
        self._logged = time.monotonic()

    def add(self, size: int) -> None:
        self._done += size
        if time.monotonic() - self._logged > _LOG_EVERY_S:
            self._logged = time.monotonic()
            log.info("download: %s: %d of %d bytes", self._key, self._done, self._total)
