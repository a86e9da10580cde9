"""Write planned tables as a version of the model repository."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hps.config.config_errors import validate
from hps.config.model_file import load_model_spec
from hps.config.model_schema import DenseSpec, FeatureSpec, ModelSpec
from hps.errors import ModelError
from hps.models.importers.arrays import import_errors
from hps.models.importers.plan import Chunk, ImportPlan, ImportTable, table_name
from hps.models.manifest import Offsets
from hps.models.repository import SPEC_FILE, Repository
from hps.models.table_sharing import Base
from hps.models.version_writer import write_version
from hps.types import NoProgress, Progress


@dataclass(frozen=True, slots=True)
class ImportSettings:
    """Settings of an import, besides its tables.

    ``version``: by default the next one. ``dense``: the network's file. ``allow_nan``: NaN and infinite
    values are accepted. ``replace``, ``replace_spec``, ``base``, ``watermark``: see `write_version`."""

    version: int | None = None
    dense: Path | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    allow_nan: bool = False
    replace: bool = False
    replace_spec: bool = False
    base: Base = "latest"
    watermark: Offsets = field(default_factory=dict)


def import_model(
    root: Path,
    name: str,
    plan: ImportPlan,
    settings: ImportSettings = ImportSettings(),
    *,
    spec: ModelSpec | None = None,
    progress: Progress | None = None,
) -> Path:
    """Write the plan's tables as a version of model ``name``; return the version's folder.

    ``spec``: by default that of `describe`. Takes a few blocks of 4 MB of memory, and what the decoder
    of the source's format needs. Raises ModelError or ConfigError."""
    spec = describe(root, name, plan) if spec is None else spec
    _check_tables(spec, plan)
    shown = progress or NoProgress()
    return write_version(
        root,
        spec,
        next_version(root, name) if settings.version is None else settings.version,
        {
            table.name: _CheckedChunks(plan.source, table, shown, allow_nan=settings.allow_nan)
            for table in plan.tables
        },
        dense=settings.dense,
        metadata={"source": plan.source.name, "format": plan.format, **settings.metadata},
        watermark=settings.watermark,
        replace=settings.replace,
        replace_spec=settings.replace_spec,
        base=settings.base,
    )


def next_version(root: Path, name: str) -> int:
    """Return the lowest version number above all versions of a model."""
    folder = root / name
    if not (folder / SPEC_FILE).is_file():
        return 1
    return max(Repository(root).versions(name), default=0) + 1


def describe(
    root: Path,
    name: str,
    plan: ImportPlan,
    features: Sequence[FeatureSpec] = (),
    dense: DenseSpec | None = None,
    defaults: Mapping[str, float | list[float]] | None = None,
) -> ModelSpec:
    """Return the description (`model.yaml`) of the model to import.

    That is the repository's ``model.yaml`` if it exists and no features, network or defaults are given;
    else the description in the source; else a new one with a feature per table, or, for a stacked
    table, a feature per source with its key offset. ``defaults``: default vectors by table. Raises
    ModelError or ConfigError."""
    path = root / name / SPEC_FILE
    if path.is_file() and not features and not defaults and dense is None:
        return load_model_spec(path)
    if plan.spec is None:
        tables = [{"name": t.name, "dim": t.dim} for t in plan.tables]
        data: dict[str, Any] = {"name": name, "tables": tables}
    else:
        data = plan.spec.model_dump() | {"name": name}
    for table, default in (defaults or {}).items():
        described = next((t for t in data["tables"] if t["name"] == table), None)
        if described is None:
            names = ", ".join(t["name"] for t in data["tables"])
            raise ModelError(f"--default names table '{table}'; the tables are {names}")
        described["default"] = default
    if used := list(features) or _stacked_features(plan):
        data["features"] = [f.model_dump() for f in used]
    if dense is not None:
        data["dense"] = dense.model_dump()
    return validate(ModelSpec, data, lambda _key: f"model '{name}' from {plan.source}")


def with_rows(spec: ModelSpec, rows: Mapping[str, str], source: str) -> ModelSpec:
    """Return ``spec`` with the row formats ``rows`` of its tables, by their names.

    Raises ModelError if the description, which is that of ``source``, has `rows:` in another format, or
    ConfigError."""
    if not rows:
        return spec
    check_rows(spec, rows, source, "remove one of the two")
    data = spec.model_dump()
    for table, described in zip(spec.tables, data["tables"], strict=True):
        if rows.get(table.name, table.row_format) != table.row_format:
            described["rows"] = rows[table.name]
    return validate(ModelSpec, data, lambda _key: "--rows")


def check_rows(
    spec: ModelSpec, rows: Mapping[str, str], source: str, remedy: str, *, defaults: bool = False
) -> None:
    """Raise ModelError if the description of ``source`` has `rows:` in another format than ``rows`` says.

    ``defaults``: also where it has no `rows:`, which are then as the table's `dtype`."""
    for table in spec.tables:
        wanted = rows.get(table.name, table.row_format)
        if wanted != table.row_format and (defaults or table.rows is not None):
            raise ModelError(
                f"{source} stores the rows of table '{table.name}' as {table.row_format}, but --rows says "
                f"{wanted}; {remedy}"
            )


def _stacked_features(plan: ImportPlan) -> list[FeatureSpec]:
    """Return the features of stacked tables; empty if none is stacked, for the default features."""
    if not any(table.parts for table in plan.tables):
        return []
    return [
        FeatureSpec(name=name, table=table.name, key_offset=offset)
        for table in plan.tables
        for name, offset in [(table_name(p), o) for p, o in table.parts] or [(table.name, 0)]
    ]


def _check_tables(spec: ModelSpec, plan: ImportPlan) -> None:
    described = {t.name: t.dim for t in spec.tables}
    found = {t.name: t.dim for t in plan.tables}
    if missing := sorted(set(described) - set(found)):
        raise ModelError(
            f"model.yaml describes table '{missing[0]}', but {plan.source} gives "
            f"{', '.join(sorted(found))}; name it with --table {missing[0]}=SOURCE"
        )
    if unknown := sorted(set(found) - set(described)):
        raise ModelError(
            f"table '{unknown[0]}' is not described in model.yaml, which has "
            f"{', '.join(sorted(described))}"
        )
    for name, dim in found.items():
        if described[name] != dim:
            raise ModelError(
                f"table '{name}' has dim {dim} in {plan.source}, {described[name]} in model.yaml"
            )


class _CheckedChunks:
    """The chunks of a table, with progress and a check for NaN and infinite values."""

    def __init__(
        self, source: Path, table: ImportTable, progress: Progress, *, allow_nan: bool
    ) -> None:
        self._source = source
        self._table = table
        self._progress = progress
        self._allow_nan = allow_nan

    def __iter__(self) -> Iterator[Chunk]:
        table, row = self._table, 0
        task = self._progress.task(f"importing {table.name}", table.rows)
        with import_errors(self._source), task as step:
            for keys, vectors in table.chunks():
                if not self._allow_nan and not np.isfinite(vectors).all():
                    bad = int(np.flatnonzero(~np.isfinite(vectors).all(axis=1))[0])
                    raise ModelError(
                        f"table '{table.name}': row {row + bad} (key {keys[bad]}) holds NaN or a value "
                        "that is infinite in float32; fix it, or import it unchanged with --allow-nan"
                    )
                yield keys, vectors
                row += len(keys)
                step(len(keys))
        for stamp in table.stamps:
            stamp.check()
        if row != table.rows:
            raise ModelError(f"table '{table.name}': expected {table.rows} rows, found {row}")
