"""The model repository on disk: ``<root>/<model>/model.yaml`` and ``<root>/<model>/<version>/``."""

from __future__ import annotations

import re
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Protocol

import numpy as np

from hps.config.model_file import apply_override, load_model_spec
from hps.config.model_schema import ModelSpec, TableSpec
from hps.config.repository_uri import Location
from hps.config.schema import ModelOverride
from hps.errors import ModelError, NotFound
from hps.models.delta_files import open_files
from hps.models.file_stamp import FileStamp
from hps.models.fused_files import open_fused
from hps.models.manifest import (
    DENSE_FILE,
    FILE_NAME,
    TABLES_FOLDER,
    FileEntry,
    Manifest,
    checksum_file,
    compare_checksum,
    digest_of,
    read_manifest,
)
from hps.models.tables import TableFiles, open_table
from hps.threads import rest
from hps.types import EmbeddingTable, MissPolicy

SPEC_FILE = "model.yaml"
MAX_VERSION = 10**18 - 1
_NAME = re.compile(r"[a-zA-Z0-9_\-]{1,120}")


class LegacySource(Protocol):
    """A `ps.json` model: its description, and each table's HugeCTR directories."""

    @property
    def spec(self) -> ModelSpec: ...
    @property
    def directories(self) -> Mapping[str, Sequence[Path]]: ...
    @property
    def version(self) -> int: ...


@dataclass(frozen=True, slots=True)
class ModelVersion:
    """One version of a model, whose files match ``spec`` (with overrides applied).

    ``digest``: names the contents of the files. ``warnings``: for the log. ``dense_stamp``: stamp of the
    network's file when the version was opened. ``lease``: keeps downloaded files from being evicted while
    this object exists."""

    name: str
    version: int
    spec: ModelSpec
    folder: Path
    tables: dict[str, TableFiles]
    dense: Path | None
    manifest: Manifest | None
    digest: str
    warnings: tuple[str, ...] = ()
    dense_stamp: FileStamp | None = None
    lease: object = field(default=None, repr=False, compare=False)

    @property
    def key(self) -> str:
        """``<name>/<version>``, the identifier that processes exchange."""
        return f"{self.name}/{self.version}"

    @property
    def fingerprint(self) -> str:
        """Digest of files and description; processes that serve the same contents have the same one."""
        return digest_of({"files": self.digest, "spec": self.spec.model_dump(mode="json")})

    @contextmanager
    def verified_dense(self) -> Iterator[None]:
        """Context in which to open the network's file: compares it with the manifest's checksum.

        Raises ModelError if the file differs, or is changed while it is opened."""
        if self.dense is not None and self.manifest is not None and self.manifest.dense is not None:
            compare_checksum(self.dense, self.manifest.dense.checksum, checksum_file(self.dense))
        yield
        if self.dense_stamp is not None:
            self.dense_stamp.check()

    def stamps(self) -> Iterator[tuple[FileStamp, FileEntry | None]]:
        """Yield the stamps of all files except the manifest, each with its manifest entry."""
        for files in self.tables.values():
            entries = [entry for _, entry in files.entries()]
            yield from zip_longest(files.stamps, entries)  # without a manifest there are no entries
        if self.dense_stamp is not None:
            yield self.dense_stamp, self.manifest.dense if self.manifest else None

    def embedding_tables(self, reuse: Iterable[EmbeddingTable] = ()) -> dict[str, EmbeddingTable]:
        """Make the version's table objects.

        Tables are compared by identity: call this once per served version. A table has the version that
        introduced it; one that is shared with another version is among ``reuse``, if that is served. Raises
        ModelError if ``model.yaml`` has changed such a table."""
        known = {table.id: table for table in reuse}
        tables = {t.name: self._embedding_table(t) for t in self.spec.tables}
        for name, table in tables.items():
            served = known.get(table.id, table)
            if not served.is_like(table):
                raise ModelError(
                    f"{self.folder.parent / SPEC_FILE} has changed table '{name}', which version "
                    f"{self.version} shares with a served version; unload that version first, or publish "
                    "the table again without sharing (--base none)"
                )
            tables[name] = served
        return tables

    def _embedding_table(self, spec: TableSpec) -> EmbeddingTable:
        version = self.manifest.origin(spec.name).version if self.manifest else self.version
        return EmbeddingTable.make(
            spec.name,
            spec.dim,
            model=self.name,
            version=version,
            dtype=np.dtype(spec.dtype),
            rows=spec.row_format,
            default=spec.default,
            miss=MissPolicy(spec.miss_policy.kind, spec.miss_policy.min_hit_rate),
            tombstone_ttl_s=spec.tombstone_ttl_s,
            ttl_s=spec.ttl_s,
            key_bits=32 if spec.key_dtype == "uint32" else 64,
            hps_version=0 if version == self.spec.hps_version else version,
        )


class Repository:
    """Reads a repository; every call reads the disk. Thread-safe.

    ``root``: its local folder, of a remote repository that of its downloads. ``location``: the name of
    the repository in messages."""

    def __init__(self, root: Path | str) -> None:
        self.root = Path(root)
        self.location: Location = self.root

    def names(self) -> list[str]:
        """Return the models in alphabetical order: the folders with a ``model.yaml``."""
        if not self.root.is_dir():
            raise ModelError(
                f"model repository {self.root} is not a folder; set models.repository, "
                "or make one with `hps model import`"
            )
        return sorted(p.parent.name for p in self.root.glob(f"*/{SPEC_FILE}"))

    def versions(self, name: str) -> list[int]:
        """Return the version numbers, ascending; folders of running or killed imports don't count."""
        folder = self._model_folder(name)
        return sorted(
            int(p.name) for p in folder.iterdir() if re.fullmatch(r"[1-9][0-9]{0,17}", p.name)
        )

    def complete(self, name: str) -> list[int]:
        """Return the versions to choose from where none is named by its number, ascending.

        Those with a manifest, which is written last: the others may be half copied. If none has one, all."""
        return sorted(self.published(name)) or self.versions(name)

    def published(self, name: str) -> dict[int, Hashable]:
        """The complete versions, those with a manifest, each with a stamp that changes with it."""
        stamps: dict[int, Hashable] = {}
        for version in self.versions(name):
            with suppress(OSError):
                manifest = (self.root / name / str(version) / FILE_NAME).stat()
                stamps[version] = manifest.st_mtime_ns, manifest.st_size, manifest.st_ino
        return stamps

    def spec(self, name: str) -> ModelSpec:
        path = self._model_folder(name) / SPEC_FILE
        spec = load_model_spec(path)
        if spec.name != name:
            raise ModelError(f"{path}: name is '{spec.name}', but the folder is '{name}'")
        return spec

    def open(
        self, name: str, version: int | None = None, override: ModelOverride | None = None
    ) -> ModelVersion:
        """Open ``version``, else the override's, else the highest of `complete`; check its files."""
        version = self.choose(name, version, override)
        spec = apply_override(self.spec(name), override)
        rest()
        return open_version(self.root / name / str(version), version, spec)

    def choose(
        self, name: str, version: int | None = None, override: ModelOverride | None = None
    ) -> int:
        """The version that `open` opens. Raises ModelError or NotFound."""
        if version is None and override is not None:
            version = override.version
        if version is None:
            if not (complete := self.complete(name)):
                raise ModelError(
                    f"{self.location}/{name}: no version folder (1, 2, ...); "
                    "make one with `hps model import`"
                )
            return complete[-1]
        if version not in (versions := self.versions(name)):
            raise NotFound(
                f"model '{name}' has no version {version} in {self.location}; "
                f"there is {', '.join(map(str, versions)) or 'none'}"
            )
        return version

    def require_complete(
        self,
        name: str,
        version: int | None = None,
        override: ModelOverride | None = None,
        *,
        exempt: Collection[int] = (),
    ) -> None:
        """Raise ModelError if the version that `open` opens has no manifest, but another one has.

        ``exempt``: versions that need none. Raises NotFound as `choose`."""
        version = self.choose(name, version, override)
        if version in exempt or version in self.complete(name):
            return
        raise ModelError(
            f"version {version} of model '{name}' has no {FILE_NAME}, which is written last, but other "
            "versions have one: it is being written, or its copy was cut short; finish it and load it "
            "again, or publish it as a new version (`hps model import`)"
        )

    def without_rows(
        self, name: str, version: int, override: ModelOverride | None = None
    ) -> ModelVersion:
        """Open a version for a process whose rows are remote: its description and, if present, its network.

        Without a network no version folder is needed."""
        spec = apply_override(self.spec(name), override)
        return open_without_rows(self.root / name / str(version), version, spec)

    def _model_folder(self, name: str) -> Path:
        folder = self.root / name
        if not _NAME.fullmatch(name) or not (folder / SPEC_FILE).is_file():
            there = ", ".join(self.names()) or "none"
            raise NotFound(f"no model '{name}' in {self.root} (models: {there})")
        return folder


def check_version_number(version: int) -> None:
    """Raise ModelError for a number that `Repository.versions` would not list."""
    if not 1 <= version <= MAX_VERSION:
        raise ModelError(f"version must be from 1 to {MAX_VERSION:,}, found {version}")


def open_without_rows(folder: Path, version: int, spec: ModelSpec) -> ModelVersion:
    """Open a version's description and network; the folder need not exist."""
    path = folder / FILE_NAME
    manifest = read_manifest(path) if path.is_file() else None
    dense = _dense(folder, spec, manifest)
    file = None if dense is None else dense.path
    return ModelVersion(
        spec.name, version, spec, folder, {}, file, manifest, digest_of({}), dense_stamp=dense
    )


def open_version(folder: Path, version: int, spec: ModelSpec) -> ModelVersion:
    """Open one version folder, checked against ``spec``: manifest, sizes, missing and unknown tables."""
    path = folder / FILE_NAME
    manifest = read_manifest(path) if path.is_file() else None
    warnings = [] if manifest else [f"{folder} has no {FILE_NAME}: contents cannot be verified"]
    if manifest and (manifest.model, manifest.version) != (spec.name, version):
        raise ModelError(
            f"{path}: describes model '{manifest.model}' version {manifest.version}, "
            f"but lies in '{spec.name}' version {version}"
        )
    root = folder / TABLES_FOLDER
    tables = {t.name: open_files(root / t.name, t.name, t.dim, manifest) for t in spec.tables}
    known = set(tables)
    if manifest:
        for name in sorted(known - set(manifest.tables)):
            raise ModelError(f"{path}: table '{name}' of model.yaml is not in the manifest")
    on_disk = {p.name for p in root.iterdir() if p.is_dir()} if root.is_dir() else set()
    warnings += [
        f"{root / name}: not a table of model.yaml, ignored" for name in sorted(on_disk - known)
    ]
    dense = _dense(folder, spec, manifest)
    digest = digest_of(
        {
            "tables": {n: t.digest for n, t in tables.items()},
            "dense": manifest.dense.checksum
            if manifest and manifest.dense
            else _size_and_time(dense),
        }
    )
    file = None if dense is None else dense.path
    return ModelVersion(
        spec.name, version, spec, folder, tables, file, manifest, digest, tuple(warnings), dense
    )


def check_unchanged(served: ModelVersion, found: ModelVersion) -> None:
    """Raise ModelError, with the names of the files, if a version's files changed after it was loaded.

    ``served``: the version as it was opened; ``found``: as it is now. A file with a new time, such as a
    copy, counts as unchanged if the manifest's checksum matches."""
    changed = []
    if found.spec != served.spec:
        changed.append(SPEC_FILE)
    if found.manifest != served.manifest:
        changed.append(FILE_NAME)
    now = {stamp.path: stamp for stamp, _ in found.stamps()}
    before = {stamp.path: (stamp, entry) for stamp, entry in served.stamps()}
    for path in before.keys() | now.keys():
        stamp, entry = before.get(path, (None, None))
        if now.get(path) == stamp:
            continue
        if path in now and entry is not None and checksum_file(path) == entry.checksum:
            continue
        inside = path.is_relative_to(served.folder)
        changed.append(str(path.relative_to(served.folder)) if inside else path.name)
    if changed:
        raise ModelError(
            f"version {served.version} of model '{served.name}' is served, and its files were changed "
            f"after it was loaded: {', '.join(sorted(changed))}. Files of a version must not change: "
            "publish them as a new version (`hps model import`; in a ps.json, another `version`) and load "
            "that, or restore the previous files"
        )


def _dense(folder: Path, spec: ModelSpec, manifest: Manifest | None) -> FileStamp | None:
    path = folder / DENSE_FILE
    if spec.dense is None:
        return None
    if not path.is_file():
        return None  # a Triton server may run the network
    stamp = FileStamp.of(path)
    if manifest and manifest.dense and manifest.dense.bytes != stamp.bytes:
        raise ModelError(
            f"{path}: the manifest says {manifest.dense.bytes} bytes, found {stamp.bytes}; the file was "
            "replaced or truncated: import the version again"
        )
    return stamp


def _size_and_time(stamp: FileStamp | None) -> list[int] | None:
    return None if stamp is None else [stamp.bytes, stamp.mtime_ns]


def open_legacy(model: LegacySource) -> ModelVersion:
    """Open a version of a `ps.json` model; its HugeCTR directories are read in place."""
    tables = {}
    for spec in model.spec.tables:
        folders = model.directories.get(spec.name)
        if not folders:
            raise ModelError(f"model '{model.spec.name}': no directory for table '{spec.name}'")
        parts = [open_table(folder, spec.name, spec.dim, None) for folder in folders]
        tables[spec.name] = open_fused(spec.name, parts)
    digest = digest_of({n: t.digest for n, t in tables.items()})
    folder = next(iter(tables.values())).folder.parent
    return ModelVersion(
        model.spec.name, model.version, model.spec, folder, tables, None, None, digest
    )
