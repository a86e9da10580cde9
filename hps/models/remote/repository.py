"""A remote model repository: its versions are downloaded into a local cache, then opened there."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Hashable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from hps.config.model_file import apply_override, load_model_spec
from hps.config.model_schema import NAME_PATTERN, ModelSpec
from hps.config.repository_uri import RepositoryUri
from hps.config.schema import ModelOverride
from hps.errors import ModelError, NotFound
from hps.models.manifest import FILE_NAME
from hps.models.remote.cache import DOWNLOAD_PREFIX, DownloadCache, VersionLease, is_whole
from hps.models.remote.download import DownloadLimits
from hps.models.remote.meter import DOWNLOADS
from hps.models.remote.partial_file import is_empty
from hps.models.remote.peers import PeerAccess
from hps.models.remote.store import FileMissing, RemoteStore, StoreUnavailable
from hps.models.remote.version_fetch import VersionFetcher, disk_errors
from hps.models.repository import (
    SPEC_FILE,
    ModelVersion,
    Repository,
    open_version,
    open_without_rows,
)
from hps.models.staging import fsync_path, write_atomically
from hps.types import Progress

log = logging.getLogger(__name__)

_VERSION = re.compile(r"[1-9][0-9]{0,17}")
_EVICTED_AT_ONCE = 3


class RemoteRepository(Repository):
    """See `Repository`. Listings ask the store; `open` downloads a version that the cache does not hold.

    While the store is unavailable, versions in the cache still open. Thread-safe."""

    def __init__(
        self,
        store: RemoteStore,
        cache: DownloadCache,
        limits: DownloadLimits,
        progress: Progress,
        peers: PeerAccess | None = None,
    ) -> None:
        super().__init__(cache.root_of(store.uri))
        self._networks = cache.root_of(store.uri, networks_only=True)
        self.location: RepositoryUri = store.uri
        self._store, self._cache = store, cache
        self._reported = False  # that the store is unavailable
        self._fetcher = VersionFetcher(store, cache, limits, progress, peers or PeerAccess())

    def names(self) -> list[str]:
        try:
            found = self._store.models()
        except StoreUnavailable as error:
            if not (cached := [n for n in self._cached_names() if self._cached_versions(n)]):
                raise
            if not self._reported:
                log.warning("repository unavailable, using downloaded models: %s", error)
            self._reported = True
            return cached
        self._reported = False
        return found

    def versions(self, name: str) -> list[int]:
        """The complete versions in the store, ascending; one listing, so it may be polled."""
        self._check_name(name)
        try:
            if found := self._store.versions(name):
                return found
        except FileMissing:
            pass
        self.spec(name)  # raises NotFound if there is no such model
        return []

    def published(self, name: str) -> dict[int, Hashable]:
        """See `Repository.published`; a version in the store is complete and does not change."""
        return dict.fromkeys(self.versions(name), True)

    def spec(self, name: str) -> ModelSpec:
        """Download and read the model's description."""
        self._check_name(name)
        path = self.root / name / SPEC_FILE
        try:
            text = self._store.read(f"{name}/{SPEC_FILE}").decode(errors="replace")
        except FileMissing:
            there = ", ".join(self.names()) or "none"
            raise NotFound(f"no model '{name}' in {self.location} (models: {there})") from None
        except StoreUnavailable:
            if not path.is_file():
                raise
        else:
            if not path.is_file() or path.read_text(errors="replace") != text:
                self._keep_spec(path, text)
        spec = load_model_spec(path)
        if spec.name != name:
            raise ModelError(
                f"{self.location}/{name}/{SPEC_FILE}: name is '{spec.name}', but the folder is '{name}'"
            )
        return spec

    def _keep_spec(self, path: Path, text: str) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, text)
        except OSError as error:
            raise ModelError(
                f"models.download.folder: cannot write {path}: {error.strerror}; mount it writable, free "
                "some space, or set another folder"
            ) from error

    def choose(
        self, name: str, version: int | None = None, override: ModelOverride | None = None
    ) -> int:
        """See `Repository.choose`; a version that is stated needs no listing."""
        if version is None and override is not None:
            version = override.version
        return super().choose(name) if version is None else version

    def require_complete(
        self,
        name: str,
        version: int | None = None,
        override: ModelOverride | None = None,
        *,
        exempt: Collection[int] = (),
    ) -> None:
        """See `Repository.require_complete`; `open` finds no version without a manifest."""

    def open(
        self, name: str, version: int | None = None, override: ModelOverride | None = None
    ) -> ModelVersion:
        """Open a version as `Repository.open` does, downloaded first if need be."""
        warning = ""
        try:
            number = self.choose(name, version, override)
            lease = self._downloaded(self.root, name, number)
        except FileMissing:
            super().choose(name, number)  # raises NotFound
            raise
        except StoreUnavailable as error:
            number, lease = self._cached(name, version, override, error)
            warning = f"the model repository is unavailable ({error}); opened version {number} from the cache"
        spec = apply_override(self.spec(name), override)
        opened = open_version(self.root / name / str(number), number, spec)
        warnings = (*opened.warnings, *([warning] if warning else []))
        return replace(opened, lease=lease, warnings=warnings)

    def without_rows(
        self, name: str, version: int, override: ModelOverride | None = None
    ) -> ModelVersion:
        spec = apply_override(self.spec(name), override)
        whole = is_whole(self.root / name / str(version))
        root = self.root if whole else self._networks
        folder = root / name / str(version)
        try:
            lease: VersionLease | None = self._downloaded(root, name, version)
        except FileMissing:
            lease = None  # without a network no version folder is needed
        except StoreUnavailable:
            if (lease := self._cache.lease(folder)) is None:
                raise
        return replace(open_without_rows(folder, version, spec), lease=lease)

    def _downloaded(self, root: Path, name: str, version: int) -> VersionLease:
        """Have a version in the cache below ``root``, and keep it there."""
        text = self._store.read(f"{name}/{version}/{FILE_NAME}")
        folder = root / name / str(version)
        hidden = root / name / f"{DOWNLOAD_PREFIX}{version}"
        for _ in range(_EVICTED_AT_ONCE):
            if (lease := self._cached_lease(folder, text)) is not None:
                return lease
            with self._exclusive(hidden, f"download {name}/{version}"):
                if not is_whole(folder):  # else another process has downloaded it meanwhile
                    with DOWNLOADS.measure(name):
                        networks_only = root == self._networks
                        self._fetcher.fetch(
                            name, version, hidden, text, networks_only=networks_only
                        )
                    with disk_errors(hidden):
                        hidden.rename(folder)
                        fsync_path(folder.parent)
        raise StoreUnavailable(
            f"{folder} was evicted before it could be opened; raise models.download.capacity_bytes, or give "
            "each server a folder"
        )

    @contextmanager
    def _exclusive(self, hidden: Path, title: str) -> Iterator[None]:
        """Lock the folder of a download, which another process may be making."""
        with ExitStack() as held:
            with self._fetcher.progress.task(
                f"{title}: waiting for another process", 1, "folder"
            ) as step:
                held.enter_context(self._cache.exclusive(hidden, lambda: step(0)))
            yield
            if is_empty(hidden):
                hidden.rmdir()

    def _cached_lease(self, folder: Path, manifest: bytes) -> VersionLease | None:
        """The lease of a cached version with this manifest; removes one with another manifest."""
        lease = self._cache.lease(folder)
        if lease is None:
            return None
        path = folder / FILE_NAME
        if path.is_file() and path.read_bytes() == manifest:
            return lease
        lease.close()
        if not self._cache.discard(folder):
            raise ModelError(
                f"{self.location}/{folder.parent.name}/{folder.name} was replaced while this version is "
                "served. Files of a version must not change: publish them as a new version and load that"
            )
        return None

    def _cached(
        self,
        name: str,
        version: int | None,
        override: ModelOverride | None,
        error: StoreUnavailable,
    ) -> tuple[int, VersionLease]:
        """A version in the cache, while the store is unavailable. Raises ``error`` if there is none."""
        if version is None and override is not None:
            version = override.version
        cached = self._cached_versions(name)
        number = version if version is not None else max(cached, default=0)
        lease = self._cache.lease(self.root / name / str(number)) if number in cached else None
        if lease is None:
            raise error
        return number, lease

    def _cached_names(self) -> list[str]:
        return sorted(p.parent.name for p in self.root.glob(f"*/{SPEC_FILE}"))

    def _cached_versions(self, name: str) -> list[int]:
        folders = self.root.glob(f"{name}/*")
        return sorted(int(p.name) for p in folders if _VERSION.fullmatch(p.name) and is_whole(p))

    def _check_name(self, name: str) -> None:
        if not re.fullmatch(NAME_PATTERN, name):
            raise NotFound(f"no model '{name}' in {self.location}")
