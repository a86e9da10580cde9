"""Open and check models without reading a row.

A broken configuration must end the process within seconds, so this comes before any load."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from hps.config import Configuration, Settings
from hps.config.model_schema import ModelSpec
from hps.config.repository_uri import Location, RepositoryUri
from hps.config.schema import ModelOverride
from hps.dense.base import DenseModel
from hps.dense.network_factory import NetworkSpec, check_local_network, open_network
from hps.errors import ConfigError, HpsError, ModelError
from hps.lookup.base import Feature, LookupModel
from hps.models.ps_json import ps_json_models, repository_with
from hps.models.repository import SPEC_FILE, ModelVersion, Repository
from hps.predict.network_inputs import check_wiring, fed_tensors, served_tensors
from hps.threads import rest
from hps.types import EmbeddingTable, Progress


def open_versions(
    configuration: Configuration,
    chosen: Mapping[str, int] | None = None,
    progress: Progress | None = None,
) -> list[ModelVersion]:
    """The versions to serve: those of ``ps.json`` and those of the repository.

    ``chosen``: versions by model that override the settings'."""
    return [opens() for opens in version_openers(configuration, chosen, progress).values()]


def version_openers(
    configuration: Configuration,
    chosen: Mapping[str, int] | None = None,
    progress: Progress | None = None,
    *,
    described: bool = False,
) -> dict[str, Callable[[], ModelVersion]]:
    """A function per model to serve, which opens its version; see `open_versions`.

    ``described``: of a remote repository open only descriptions and networks."""
    settings = configuration.settings.models
    overrides: Mapping[str, ModelOverride] = settings.serve or {}
    openers: dict[str, Callable[[], ModelVersion]] = {}
    repository = repository_with(ps_json_models(configuration), configuration, progress)
    for legacy in configuration.legacy:
        name = legacy.spec.name
        version = (chosen or {}).get(name)
        openers[name] = partial(repository.open, name, version, overrides.get(name))
    if chosen is not None:
        names = list(chosen)
    elif settings.serve is None and not (openers and is_missing(settings.repository)):
        names = repository.names()
    else:
        names = list(overrides)
    is_remote = isinstance(settings.repository, RepositoryUri)
    is_described = configuration.settings.server.role == "frontend" or (described and is_remote)
    opens = partial(_described, repository) if is_described else repository.open
    for name in names:
        version = (chosen or {}).get(name)
        openers.setdefault(name, partial(opens, name, version, overrides.get(name)))
    if not openers:
        raise ConfigError(_no_model(settings.repository))
    return openers


def is_missing(location: Location) -> bool:
    """True for a local repository without a folder; a remote one is not asked."""
    return isinstance(location, Path) and not location.is_dir()


def _no_model(repository: Location) -> str:
    """Error message for a repository without models."""
    message = f"no model to serve: {repository} holds none; "
    if isinstance(repository, RepositoryUri):
        return message + "publish one there, or set models.repository"
    folders = sorted(p.name for p in repository.glob("[!.]*") if p.is_dir())
    if folders:
        return (
            message + f"folder '{folders[0]}' has no {SPEC_FILE}: add it, or import the model again"
        )
    return message + "make one with `hps model import` or set models.repository"


def _described(
    repository: Repository, name: str, version: int | None, override: ModelOverride | None
) -> ModelVersion:
    """A version without tables, for a front end: lookup nodes have the rows and choose the version."""
    if version is None and override is not None:
        version = override.version
    complete = repository.complete(name)
    return repository.without_rows(name, version or (complete[-1] if complete else 1), override)


@dataclass(frozen=True, slots=True)
class OpenedTables:
    """A model version and its tables, as stores know them."""

    version: ModelVersion
    tables: dict[str, EmbeddingTable]

    @property
    def table_versions(self) -> set[int]:
        """Its version, and the versions that introduced its tables; metrics have these."""
        return {self.version.version, *(table.version for table in self.tables.values())}


HandleDamage = Callable[[OpenedTables, ModelError], None]
"""Raises the error of a model with damaged files, or leaves the model out."""


def raise_damage(_model: OpenedTables, error: ModelError) -> None:
    raise error


@dataclass(frozen=True, slots=True)
class OpenedModel(OpenedTables):
    """Opened tables with their lookup description and network: checked, no row read."""

    lookup: LookupModel
    dense: DenseModel | None

    @property
    def spec(self) -> ModelSpec:
        return self.version.spec


def tables_of(opened: Iterable[OpenedTables]) -> list[EmbeddingTable]:
    """The tables of models, each once: versions may share some."""
    return list(dict.fromkeys(table for each in opened for table in each.tables.values()))


def open_tables(versions: Iterable[ModelVersion]) -> list[OpenedTables]:
    """Make the tables of versions, without their networks; see `OpenedTables`."""
    opened: list[OpenedTables] = []
    for version in versions:
        opened.append(OpenedTables(version, version.embedding_tables(tables_of(opened))))
    return opened


def watermarks_of(
    opened: Iterable[OpenedTables],
) -> dict[EmbeddingTable, Mapping[str, Mapping[str, int]]]:
    """Stream offsets up to which each table's files contain the updates (`Manifest.origin`)."""
    return {
        table: model.version.manifest.origin(table.name).watermark
        for model in opened
        for table in model.tables.values()
        if model.version.manifest is not None
    }


def open_model(
    version: ModelVersion,
    settings: Settings,
    resources: ExitStack,
    remote: DenseModel | None = None,
    reuse: Iterable[EmbeddingTable] = (),
) -> OpenedModel:
    """Make the version's tables and open its network, which ``resources`` closes.

    A lookup node has no network. ``remote``: use this one, which runs in another process. ``reuse``: see
    `ModelVersion.embedding_tables`."""
    lookup, network = _described_model(version, settings, reuse)
    rest()
    dense = remote
    if network is not None and remote is None:
        dense = open_network(network, settings.dense, settings.tiers.gpu.devices[0])
        resources.callback(dense.close)
    return OpenedModel(version, dict(lookup.tables), lookup, dense)


def check_model(version: ModelVersion, settings: Settings) -> None:
    """Open the version as `open_model` does, and close it, without Triton or a GPU. Raises ModelError."""
    _, network = _described_model(version, settings)
    if network is not None:
        check_local_network(network, settings.dense)


def check_models(configuration: Configuration) -> Iterator[tuple[str, ModelVersion | HpsError]]:
    """Check every model to serve: yields its version as a start would open it, or the error.

    Sizes of tables are checked, not their contents. Raises ConfigError and ModelError if there is no model.
    """
    for name, opens in version_openers(configuration, described=True).items():
        try:
            version = opens()
            check_model(version, configuration.settings)
        except HpsError as error:
            yield name, error
        else:
            yield name, version


def _described_model(
    version: ModelVersion, settings: Settings, reuse: Iterable[EmbeddingTable] = ()
) -> tuple[LookupModel, NetworkSpec | None]:
    """The version's lookup description, and its network's; a lookup node has no network."""
    spec, tables = version.spec, version.embedding_tables(reuse)
    check_expiring_tables(tables.values(), settings)
    lookup = LookupModel(
        version.name,
        version.version,
        tables,
        features_of(spec, tables),
        spec.max_batch_size,
        settings.server.max_keys,
        _table_bounds(spec),
    )
    if spec.dense is None or settings.server.role == "lookup":
        return lookup, None
    network = NetworkSpec(
        version.name,
        version.dense,
        fed_tensors(version.name, spec.dense, lookup.features),
        served_tensors(spec.dense),
        partial(check_wiring, version.name, spec.dense, lookup.features),
        version.verified_dense,
    )
    return lookup, network


def check_expiring_tables(tables: Iterable[EmbeddingTable], settings: Settings) -> None:
    """Raise ConfigError if the rows of a table expire and a store does not know their age."""
    tiers = settings.tiers
    layouts = {"tiers.rocksdb.layout": tiers.rocksdb.layout if tiers.rocksdb.enabled else "native"}
    if tiers.redis is not None:
        layouts["tiers.redis.layout"] = tiers.redis.layout
    expiring = [table for table in tables if table.ttl_s is not None]
    for name, layout in layouts.items():
        if expiring and layout == "hps":
            raise ConfigError(
                f"table {expiring[0].id} has ttl_s: {expiring[0].ttl_s:g}, but {name} is hps: rows of HPS's "
                "layout have no version, so their age is unknown. Use the layout native, or remove ttl_s"
            )


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
            f.max_norm,
            f.max_length,
            f.truncation,
        )
        for f in spec.served_features
        for name, table in f.vectors.items()
    }


def _table_bounds(spec: ModelSpec) -> dict[str, int]:
    """Largest number of keys of a table in one request, where every feature on it has a bound."""
    bounds: dict[str, int] = {}
    for table in {table for f in spec.features for table in f.tables}:
        most = [f.max_hotness for f in spec.features if table in f.tables]
        if None not in most:
            bounds[table] = spec.max_batch_size * sum(m for m in most if m is not None)
    return bounds
