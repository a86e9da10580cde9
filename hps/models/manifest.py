"""``manifest.json``: the contents of a model version; the last file that is written.

Checksums are SHA-256 (1.3 GB/s on one core with SHA extensions; ``sha256sum`` checks them as well).
`hps model verify` compares them, and so does the first load of a table into a store; a start that reuses
loaded tables compares file sizes only."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    StringConstraints,
    ValidationError,
    model_serializer,
)

from hps.config.model_schema import Name, RowFormatName
from hps.errors import ModelError

FORMAT: Literal[1] = 1
FILE_NAME = "manifest.json"
DENSE_FILE = "dense.onnx"
TABLES_FOLDER = "tables"
KEY_FILE = "key"
VECTOR_FILE = "emb_vector"
DELTA_FOLDER = "delta"
MASKED_FILE = "masked"
_BLOCK = 1 << 20
Checksum = Annotated[str, StringConstraints(pattern=r"^sha256:[0-9a-f]{64}$")]


class _ManifestModel(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


def _present(fields: dict[str, Any], *optional: str) -> dict[str, Any]:
    """Return the fields without those of ``optional`` that are None."""
    return {n: v for n, v in fields.items() if n not in optional or v is not None}


def _mix(first: float, second: float, share: float) -> float:
    return first * (1 - share) + second * share


class FileEntry(_ManifestModel):
    """Size and checksum of a file."""

    bytes: int = Field(ge=0)
    checksum: Checksum


Offsets = dict[str, dict[str, int]]
"""Offsets of update streams by topic and partition."""


class TableOrigin(_ManifestModel):
    """The version that introduced a table, when it did, and the stream offsets that its rows contain."""

    version: int = Field(ge=1)
    created: datetime
    watermark: Offsets = {}


class RowConversion(_ManifestModel):
    """Errors of a table's rows in the format ``rows`` of its mapped file, against the float32 of its files.

    ``max_error``, ``mean_error``: of a value. ``mean_relative_error``: the norm of a row's error as a share
    of the row's norm, the mean over the rows. ``not_finite_rows``: rows with a value that is not finite as
    it is stored, which the other figures leave out."""

    rows: RowFormatName
    max_error: float = Field(ge=0, allow_inf_nan=False)
    mean_error: float = Field(ge=0, allow_inf_nan=False)
    mean_relative_error: float = Field(ge=0, allow_inf_nan=False)
    not_finite_rows: int = Field(0, ge=0)


class DeltaEntry(_ManifestModel):
    """Rows in the folder ``delta`` of a table, which change those of its files ``key`` and ``emb_vector``.

    ``masked``: file with the numbers of the rows there that are replaced or removed. ``whole``: checksums of
    the table's two files as they were published, before only the difference was kept."""

    rows: int = Field(ge=0)
    masked_rows: int = Field(ge=0)
    key: FileEntry
    emb_vector: FileEntry
    masked: FileEntry
    whole: tuple[Checksum, Checksum] | None = None
    conversion: RowConversion | None = None

    @model_serializer(mode="wrap")
    def _without_unused(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return _present(write(self), "conversion")


class TableEntry(_ManifestModel):
    """Rows, dim and files of a table.

    ``origin``: of a table that the version shares with another one. ``delta``: of one that differs little
    from the base to which the other fields belong. ``conversion``: of one with `rows:` in model.yaml, unless
    they are float32."""

    rows: int = Field(ge=0)
    dim: int = Field(ge=1)
    dtype: Literal["float32"] = "float32"
    key: FileEntry
    emb_vector: FileEntry
    delta: DeltaEntry | None = None
    origin: TableOrigin | None = None
    conversion: RowConversion | None = None

    @model_serializer(mode="wrap")
    def _without_unused(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out what is unused, so that older releases read versions without it."""
        return _present(write(self), "origin", "delta", "conversion")

    @property
    def errors(self) -> RowConversion | None:
        """The errors of the table's rows: the base's, and those of its delta."""
        base, delta = self.conversion, self.delta
        if base is None or delta is None or delta.conversion is None:
            return base
        added, share = delta.conversion, delta.rows / max(self.rows + delta.rows, 1)
        return RowConversion(
            rows=base.rows,
            max_error=max(base.max_error, added.max_error),
            mean_error=_mix(base.mean_error, added.mean_error, share),
            mean_relative_error=_mix(base.mean_relative_error, added.mean_relative_error, share),
            not_finite_rows=base.not_finite_rows + added.not_finite_rows,
        )

    @property
    def checksums(self) -> tuple[str, str] | None:
        """Of the table's two files as they were published; None if they never existed as a whole."""
        if self.delta is None:
            return self.key.checksum, self.emb_vector.checksum
        return self.delta.whole

    def files(self) -> dict[str, FileEntry]:
        """The files, by their paths in the table's folder."""
        files = {KEY_FILE: self.key, VECTOR_FILE: self.emb_vector}
        if (delta := self.delta) is not None:
            entries = delta.key, delta.emb_vector, delta.masked
            names = KEY_FILE, VECTOR_FILE, MASKED_FILE
            files |= {f"{DELTA_FOLDER}/{n}": e for n, e in zip(names, entries, strict=True)}
        return files


class Manifest(_ManifestModel):
    """Contents of a version, as in its manifest.json."""

    format: Literal[1] = FORMAT
    model: Name
    version: int = Field(ge=1)
    created: datetime
    tables: dict[Name, TableEntry]
    dense: FileEntry | None = None
    watermark: Offsets = {}
    """Offsets of update streams by topic and partition: the first that the tables do not contain."""
    metadata: dict[str, Any] = {}
    """Free-form data of the training: framework, metrics, dates."""

    def files(self) -> dict[str, FileEntry]:
        """All files of the version except the manifest, by their paths in its folder."""
        files = {
            f"{TABLES_FOLDER}/{name}/{file}": entry
            for name, table in self.tables.items()
            for file, entry in table.files().items()
        }
        return files | ({} if self.dense is None else {DENSE_FILE: self.dense})

    def origin(self, table: str) -> TableOrigin:
        """The version that introduced a table: this one, unless its entry names another."""
        entry = self.tables.get(table)
        if entry is not None and entry.origin is not None:
            return entry.origin
        return TableOrigin(version=self.version, created=self.created, watermark=self.watermark)

    def with_conversions(self, conversions: Mapping[str, RowConversion]) -> Manifest:
        """Return the manifest with the errors of the tables ``conversions``."""
        added = {
            name: self.tables[name].model_copy(update={"conversion": conversion})
            for name, conversion in conversions.items()
        }
        return self.model_copy(update={"tables": {**self.tables, **added}})

    def table_versions(self) -> set[int]:
        """The versions that introduced the tables."""
        return {self.origin(table).version for table in self.tables}


def manifest_time() -> datetime:
    """Return the current time in milliseconds, the unit of row versions.

    Cut to a second, the files could seem older than rows that were streamed before them."""
    created = datetime.now(UTC)
    return created.replace(microsecond=created.microsecond // 1000 * 1000)


def read_manifest(path: Path) -> Manifest:
    """Read a manifest. Raises ModelError with the file, the field, the expected and the actual value."""
    try:
        text = path.read_bytes()
    except OSError as error:
        raise ModelError(f"{path}: not a readable manifest: {error}") from error
    return parse_manifest(text, str(path))


def parse_manifest(text: bytes, path: str) -> Manifest:
    """Parse the text of the manifest ``path``; raises ModelError as `read_manifest`."""
    try:
        data = json.loads(text)
    except ValueError as error:
        raise ModelError(f"{path}: not a readable manifest: {error}") from error
    found = data.get("format") if isinstance(data, dict) else None
    if isinstance(found, int) and found > FORMAT:
        raise ModelError(
            f"{path}: manifest format {found} is newer than the {FORMAT} this release reads; update hps"
        )
    try:
        manifest = Manifest.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "the document"
        raise ModelError(
            f"{path}: {where}: {first['msg']}, found {str(first.get('input'))[:80]!r}"
        ) from error
    for created in (manifest.created, *(manifest.origin(t).created for t in manifest.tables)):
        if created.tzinfo is None:
            raise ModelError(f"{path}: created: expected a time with its offset, found {created}")
    return manifest


def write_manifest(path: Path, manifest: Manifest) -> None:
    """Write a manifest as JSON. Raises OSError."""
    path.write_text(manifest.model_dump_json(indent=2) + "\n")


def checksum_file(path: Path, progress: Callable[[int], None] = lambda _n: None) -> str:
    """Return a file's SHA-256, read as a stream; ``progress`` gets the bytes of each step."""
    digest = hashlib.sha256()
    block = memoryview(bytearray(_BLOCK))
    with path.open("rb", buffering=0) as file:
        while n := file.readinto(block):
            digest.update(block[:n])
            progress(n)
    return f"sha256:{digest.hexdigest()}"


def compare_checksum(path: Path, expected: str, found: str) -> None:
    """Raise ModelError unless ``found`` is ``expected``."""
    if found != expected:
        raise ModelError(
            f"{path}: the contents do not match the manifest (expected {expected}, found {found}); "
            "the file was damaged or replaced: import the version again"
        )


def digest_of(parts: Mapping[str, Any]) -> str:
    """Return a short, stable digest of a mapping that JSON can represent."""
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]
