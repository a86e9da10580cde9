"""Publish a version to a remote repository: its files in parallel, ``manifest.json`` last.

Object stores do not all have a conditional write, and PyArrow offers none. Publishers of one version
exclude each other by claims: each writes a claim file, then lists the claims, and withdraws if there is
another one. Stores list a file as soon as it is written, so at most one continues. A publisher renews its
claim; the claim of a killed one expires after `CLAIM_S`. One that was suspended for longer stops: another
publisher may have begun. Only files whose upload had begun are completed then: PyArrow cannot abandon an
upload, and half a file in the place of the other publisher's would be worse than a whole one."""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from threading import Event

from hps.config.model_file import parse_model_spec
from hps.config.model_schema import ModelSpec
from hps.errors import HpsError, ModelError
from hps.models.manifest import FILE_NAME, Manifest, compare_checksum, parse_manifest
from hps.models.remote.arrow_store import ArrowStore
from hps.models.remote.mapped_tables import mapped_paths, require_undamaged
from hps.models.remote.partial_file import RemoteEntry
from hps.models.remote.shared_files import identities, uploaded_files
from hps.models.remote.store import FileMissing
from hps.models.repository import SPEC_FILE, ModelVersion
from hps.models.version_writer import add_mapped_files
from hps.types import Progress

CLAIM_S = 120.0
_RENEW_S = 20.0
_POLL_S = 0.2
_BLOCK = 4 << 20


def publish_remote(
    version: ModelVersion,
    store: ArrowStore,
    progress: Progress,
    *,
    parallel: int = 8,
    replace_spec: bool = False,
    mapped: bool = True,
) -> str:
    """Upload a local version; returns its URI.

    A version that the store has is never replaced. ``replace_spec``: replace a ``model.yaml`` that
    differs. ``mapped``: write mapped files that the version misses first. Raises ModelError, also for a
    damaged mapped file, or StoreUnavailable; the version is not visible then."""
    manifest = version.manifest
    if manifest is None:
        raise ModelError(
            f"{version.folder} has no {FILE_NAME}, which names the files to publish; import the version "
            "with `hps model import`"
        )
    _require_new(store, version)
    writes_spec = _check_spec(store, version.spec, replace=replace_spec)
    if mapped:
        add_mapped_files(version, progress)
    stored = _stored(store, manifest)
    _verify_mapped(version, manifest, stored, progress)
    target = f"{version.name}/{version.version}"
    with _Claim(store, version).held() as claim:
        files = _SharedUploads(version, store, stored)
        _upload(files, _files(version, manifest), progress, parallel, claim)
        claim.require_sole()
        _require_new(store, version)
        if writes_spec:
            store.write(
                f"{version.name}/{SPEC_FILE}", (version.folder.parent / SPEC_FILE).read_bytes()
            )
        store.write(f"{target}/{FILE_NAME}", (version.folder / FILE_NAME).read_bytes())
    return f"{store.uri}/{target}"


def _files(version: ModelVersion, manifest: Manifest) -> dict[str, RemoteEntry]:
    """The manifest's files, and mapped ones."""
    files = {path: RemoteEntry(e.bytes, e.checksum) for path, e in manifest.files().items()}
    for path in mapped_paths(manifest):
        with suppress(FileNotFoundError):
            files[path] = RemoteEntry((version.folder / path).stat().st_size, None)
    return files


def _verify_mapped(
    version: ModelVersion, manifest: Manifest, stored: Mapping[str, str], progress: Progress
) -> None:
    """Verify the mapped files to upload. Raises ModelError for a damaged one."""
    paths = {p: version.folder / p for p in mapped_paths(manifest) if p not in stored}
    sizes = {p: path.stat().st_size for p, path in paths.items() if path.is_file()}
    if not sizes:
        return
    with progress.task(f"verify {version.key}", sum(sizes.values()), "bytes") as step:
        for path, size in sizes.items():
            require_undamaged(version.folder, manifest, [path])
            step(size)


@dataclass(frozen=True, slots=True)
class _SharedUploads:
    """A version to upload to a store, which has the files ``stored`` under other paths."""

    version: ModelVersion
    store: ArrowStore
    stored: Mapping[str, str]


def _stored(store: ArrowStore, manifest: Manifest) -> dict[str, str]:
    """Files of a version that the store has in another one, by their paths in the version's folder."""
    model, versions = manifest.model, manifest.table_versions()
    with suppress(FileMissing):
        versions |= set([v for v in store.versions(model) if v < manifest.version][-1:])
    manifests = {}
    for version in versions - {manifest.version}:
        path = f"{model}/{version}/{FILE_NAME}"
        with suppress(FileMissing, ModelError):
            manifests[version] = parse_manifest(store.read(path), path)
    there = uploaded_files(manifests, model)
    return {p: there[each] for p, each in identities(manifest).items() if each in there}


def _require_new(store: ArrowStore, version: ModelVersion) -> None:
    if store.exists(f"{version.name}/{version.version}/{FILE_NAME}"):
        raise ModelError(
            f"{store.uri} has version {version.version} of model '{version.name}' already; versions do not "
            "change: publish another version number"
        )


def _check_spec(store: ArrowStore, spec: ModelSpec, *, replace: bool) -> bool:
    """True if ``model.yaml`` is to be written. Raises ModelError if it differs from the store's."""
    path = f"{spec.name}/{SPEC_FILE}"
    try:
        found = parse_model_spec(store.read(path), f"{store.uri}/{path}")
    except FileMissing:
        return True
    if found == spec:
        return False
    if replace:
        return True
    raise ModelError(
        f"{store.uri}/{path} differs from the one of the version to publish; it describes all versions of "
        "the model: publish under another name, or replace it with --replace-spec"
    )


def _upload(
    uploads: _SharedUploads,
    files: dict[str, RemoteEntry],
    progress: Progress,
    parallel: int,
    claim: _Claim,
) -> None:
    title, size = f"upload {uploads.version.key}", sum(entry.bytes for entry in files.values())
    stop, sent = Event(), [0] * len(files)
    with (
        progress.task(title, size, "bytes") as step,
        ThreadPoolExecutor(parallel, "hps-upload") as pool,
    ):
        jobs: set[Future[None]] = set()
        reported = 0
        try:
            for i, (path, entry) in enumerate(files.items()):
                upload = _FileUpload(uploads, claim, stop, sent, i)
                jobs.add(pool.submit(upload.run, path, entry))
            while jobs:
                done, jobs = wait(jobs, _POLL_S, FIRST_EXCEPTION)
                for job in done:
                    job.result()
                claim.renew()
                total = sum(sent)
                step(total - reported)
                reported = total
        except _ClaimExpired:
            pool.shutdown(cancel_futures=True)
            raise
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            stop.set()


class _FileUpload:
    """The upload of one file, which counts its bytes in ``sent[index]``."""

    def __init__(
        self, uploads: _SharedUploads, claim: _Claim, stop: Event, sent: list[int], index: int
    ) -> None:
        self._version, self._store, self._stored = uploads.version, uploads.store, uploads.stored
        self._claim, self._stop, self._sent, self._index = claim, stop, sent, index

    def run(self, path: str, entry: RemoteEntry) -> None:
        """Upload, and compare what was read with the manifest; or copy a file that the store has."""
        self._claim.require_current()
        source = self._version.folder / path
        digest = hashlib.sha256()
        target = f"{self._version.key}/{path}"
        stored = self._stored.get(path)
        if stored is not None and self._store.copy(stored, target, entry.bytes):
            self._sent[self._index] = entry.bytes
            return
        if stored is not None and self._version.manifest is not None:
            require_undamaged(self._version.folder, self._version.manifest, [path])
        with self._store.create(target) as file, source.open("rb") as read:
            while (block := read.read(_BLOCK)) and not self._stop.is_set():
                digest.update(block)
                file.write(block)
                self._sent[self._index] += len(block)
        if entry.checksum is not None and not self._stop.is_set():
            compare_checksum(source, entry.checksum, f"sha256:{digest.hexdigest()}")


class _ClaimExpired(ModelError):
    """The claim was not renewed in time; another publisher may have begun."""


class _Claim:
    """A publisher's claim to a version; written by one thread."""

    def __init__(self, store: ArrowStore, version: ModelVersion) -> None:
        self._store, self._version = store, version
        self._folder = f"{version.name}/.publish-{version.version}"
        self._name = secrets.token_hex(8)
        self._renewed = 0.0
        self._stamp: float | None = None  # of the claim's file, by the store's clock

    @contextmanager
    def held(self) -> Iterator[_Claim]:
        self._write()
        try:
            self.require_sole()
            yield self
        finally:
            with suppress(HpsError):
                self._store.delete(f"{self._folder}/{self._name}")

    def renew(self) -> None:
        """Renew the claim if it is time; raises ModelError as `require_sole`."""
        if _now() - self._renewed > _RENEW_S:
            self.require_sole()

    def require_current(self) -> None:
        """Raise ModelError if the claim has expired by this machine's clock. Thread-safe."""
        if _now() - self._renewed >= CLAIM_S:
            raise self._expired()

    def require_sole(self) -> None:
        """Raise ModelError if the claim had expired, or another publisher has one.

        Ages are by the store's clock: this machine's may have stopped, too."""
        self.require_current()  # first, for a renewed claim would stop the publisher that took over
        self._write()
        claims = self._store.modified(self._folder)
        before, self._stamp = self._stamp, claims.pop(self._name, None)
        now = self._stamp
        if now is not None and before is not None and now - before >= CLAIM_S:
            raise self._expired()
        for name, at in claims.items():
            if now is None or at is None or now - at < CLAIM_S:
                raise ModelError(
                    f"version {self._version.version} of model '{self._version.name}' is being published to "
                    f"{self._store.uri} by another process; wait for it, or, if it was killed, try again "
                    f"after {CLAIM_S:g} s (its claim is {self._folder}/{name})"
                )

    def _expired(self) -> _ClaimExpired:
        return _ClaimExpired(
            f"publishing version {self._version.version} of model '{self._version.name}' to "
            f"{self._store.uri} was suspended for more than {CLAIM_S:g} s, so that another process may have "
            "begun to publish it; publish it again, and if the repository has the version then, check that "
            f"one with `hps model verify {self._version.name} --version {self._version.version} "
            f"--repository {self._store.uri}`"
        )

    def _write(self) -> None:
        began = _now()  # a slow write may have reached the store at any time since
        self._store.write(f"{self._folder}/{self._name}", self._name.encode())
        self._renewed = began


def _now() -> float:
    """Seconds of a clock that goes on while the machine is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
