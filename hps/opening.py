"""Models opened and checked as far as that goes without reading a row.

A broken configuration must end the process within seconds, so this comes before any load.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial

from hps.config import Configuration, Settings, apply_override
from hps.config.model_schema import ModelSpec
from hps.config.schema import ModelOverride
from hps.dense.base import DenseModel
from hps.dense.choose import open_network
from hps.errors import ConfigError
from hps.lookup.base import Feature, LookupModel
from hps.models.repository import ModelVersion, Repository, open_legacy
from hps.types import EmbeddingTable
from hps.wiring import check_wiring, fed_tensors, served_tensors


def open_versions(
    configuration: Configuration, chosen: Mapping[str, int] | None = None
) -> list[ModelVersion]:
    """The versions to serve: those of ``ps.json`` and those of the repository; ``chosen``, by model, instead
    of those that the settings would choose now."""
    settings = configuration.settings.models
    overrides: Mapping[str, ModelOverride] = settings.serve or {}
    versions = []
    for legacy in configuration.legacy:
        version = open_legacy(legacy)
        spec = apply_override(version.spec, overrides.get(version.name))
        versions.append(replace(version, spec=spec))
    taken = {version.name for version in versions}
    if chosen is not None:
        names = list(chosen)
    elif settings.serve is None and not (taken and not settings.repository.is_dir()):
        names = Repository(settings.repository).names()
    else:
        names = list(overrides)
    repository = Repository(settings.repository)
    versions += [
        repository.open(name, (chosen or {}).get(name), overrides.get(name))
        for name in names
        if name not in taken
    ]
    if not versions:
        raise ConfigError(
            f"no model to serve: {settings.repository} holds none; make one with `hps model import` "
            "or set models.repository"
        )
    return versions


@dataclass(frozen=True, slots=True)
class OpenedTables:
    """A model version and its tables, as stores know them."""

    version: ModelVersion
    tables: dict[str, EmbeddingTable]


@dataclass(frozen=True, slots=True)
class OpenedModel(OpenedTables):
    """With its lookup description and its network: everything checked but no row read."""

    lookup: LookupModel
    dense: DenseModel | None

    @property
    def spec(self) -> ModelSpec:
        return self.version.spec


def watermarks_of(
    opened: Iterable[OpenedTables],
) -> dict[EmbeddingTable, Mapping[str, Mapping[str, int]]]:
    """Of each table, what its files contain of the update streams (`Manifest.watermark`)."""
    return {
        table: model.version.manifest.watermark
        for model in opened
        for table in model.tables.values()
        if model.version.manifest is not None
    }


def open_model(version: ModelVersion, settings: Settings, resources: ExitStack) -> OpenedModel:
    """Make the version's tables and open its network, which ``resources`` closes; a lookup node has none."""
    spec, tables = version.spec, version.embedding_tables()
    lookup = LookupModel(
        version.name,
        version.version,
        tables,
        features_of(spec, tables),
        spec.max_batch_size,
        settings.server.max_keys,
        _table_bounds(spec),
    )
    dense = None
    if spec.dense is not None and settings.server.role != "lookup":
        dense = open_network(
            version.name,
            version.dense,
            fed_tensors(version.name, spec.dense, lookup.features),
            served_tensors(spec.dense),
            settings.dense,
            settings.tiers.gpu.devices[0],
            partial(check_wiring, version.name, spec.dense, lookup.features),
        )
        resources.callback(dense.close)
    return OpenedModel(version, tables, lookup, dense)


def features_of(spec: ModelSpec, tables: Mapping[str, EmbeddingTable]) -> dict[str, Feature]:
    """The features of ``model.yaml``, by the names of their vectors."""
    return {
        name: Feature(
            name,
            tables[table],
            f.key_offset,
            f.pooling,
            f.hotness,
            f.context,
            f.max_hotness,
            "" if name == f.name else f.name,
        )
        for f in spec.served_features
        for name, table in f.vectors.items()
    }


def _table_bounds(spec: ModelSpec) -> dict[str, int]:
    """The most keys of a table in one request, where every feature on it has a bound per sample."""
    bounds: dict[str, int] = {}
    for table in {table for f in spec.features for table in f.tables}:
        most = [f.max_hotness for f in spec.features if table in f.tables]
        if None not in most:
            bounds[table] = spec.max_batch_size * sum(m for m in most if m is not None)
    return bounds
