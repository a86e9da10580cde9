"""The model that a plan is for: its tables with their numbers of rows, and its features."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hps.config import Configuration, Settings, configuration_from
from hps.config.model_schema import NAME_PATTERN
from hps.errors import ConfigError, NotFound
from hps.lookup.base import Feature
from hps.models.mapped_file import KEYS_PER_BUCKET, MAPPED_FILE
from hps.models.repository import ModelVersion, Repository
from hps.models.tables import TableFiles
from hps.native.mapped_format import HEADER_BYTES, record_bytes
from hps.node.model_opening import features_of, version_openers
from hps.row_format import ROW_FORMAT_NAMES
from hps.suggestions import hint_for
from hps.types import EmbeddingTable

_SPEC = re.compile(r"([^=]+)=(\d+)x(\d+)(?::(\w+))?")
MODEL = "model"
"""Name of a model that is described on the command line."""


@dataclass(frozen=True, slots=True)
class PlannedTable:
    """A table, the number of its rows, and its files if they are in a repository.

    ``expected_bytes``: the size of the mapped file that it will have, if it has no files yet."""

    table: EmbeddingTable
    rows: int
    files: TableFiles | None = None
    expected_bytes: int | None = None

    @property
    def mapped_bytes(self) -> int | None:
        """The size of its mapped file; None if it has none."""
        if self.files is None:
            return self.expected_bytes
        path = self.files.folder / MAPPED_FILE
        return path.stat().st_size if path.is_file() else None


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """A model's tables and features by name; ``settings``: those of the node that will serve it."""

    name: str
    tables: Mapping[str, PlannedTable]
    features: Mapping[str, Feature]
    settings: Settings = field(default_factory=Settings)
    inputs: frozenset[str] = frozenset()
    """Names of the network's other inputs in requests."""

    def direct_files(self) -> dict[str, int]:
        """Bytes of the mapped files that lookups may read from memory, by table, in the node's order.

        Empty if the settings rule it out: see `NodeStores.direct_file`."""
        tiers = self.settings.tiers
        rocksdb = tiers.rocksdb
        if not tiers.mapped.enabled or tiers.redis is not None:
            return {}
        if rocksdb.enabled and (rocksdb.layout == "hps" or rocksdb.access == "secondary"):
            return {}
        sizes = {name: planned.mapped_bytes for name, planned in self.tables.items()}
        return {name: size for name, size in sizes.items() if size is not None}


def model_of_configuration(configuration: Configuration, name: str | None) -> PlannedModel:
    """The model ``name`` that a node of ``configuration`` would serve; None: its only one.

    Raises ConfigError, ModelError, NotFound."""
    openers = version_openers(configuration)
    return _of_version(openers[_chosen(name, openers)](), configuration.settings)


def _of_version(version: ModelVersion, settings: Settings) -> PlannedModel:
    tables = version.embedding_tables()
    planned = {
        name: PlannedTable(table, version.tables[name].rows, version.tables[name])
        for name, table in tables.items()
    }
    dense = version.spec.dense
    inputs = frozenset(tensor.name for tensor in dense.inputs) if dense else frozenset()
    return PlannedModel(version.name, planned, features_of(version.spec, tables), settings, inputs)


def model_of_specs(specs: Sequence[str], name: str | None = None) -> PlannedModel:
    """A model with a feature per table, from texts ``NAME=ROWSxDIM[:FORMAT]``. Raises ConfigError."""
    name, tables = name or MODEL, {}
    for spec in specs:
        match = _SPEC.fullmatch(spec)
        if match is None or not re.fullmatch(NAME_PATTERN, match[1]):
            raise ConfigError(
                f"--table {spec!r}: expected NAME=ROWSxDIM or NAME=ROWSxDIM:FORMAT, such as "
                "user=1000000x32 or user=1000000x32:int8"
            )
        table, rows, dim = match[1], int(match[2]), int(match[3])
        if table in tables or not rows or not 1 <= dim <= 65_536:
            reason = (
                "is there twice" if table in tables else "needs rows and a dim from 1 to 65,536"
            )
            raise ConfigError(f"--table {spec!r}: {table} {reason}")
        rows_as = match[4] or "float32"
        if rows_as not in ROW_FORMAT_NAMES:
            hint = hint_for(rows_as, ROW_FORMAT_NAMES, "the row formats are")
            raise ConfigError(f"--table {spec!r}: there is no row format {rows_as!r}{hint}")
        dtype = "float16" if rows_as == "float16" else "float32"
        made = EmbeddingTable.make(table, dim, model=name, dtype=dtype, rows=rows_as)
        tables[table] = PlannedTable(made, rows, expected_bytes=mapped_file_bytes(made, rows))
    features = {n: Feature(n, planned.table, pooling="none") for n, planned in tables.items()}
    return PlannedModel(name, tables, features)


def mapped_file_bytes(table: EmbeddingTable, rows: int) -> int:
    """Return the approximate size of a mapped file of ``rows`` rows: header, keys with rows, index."""
    # A byte per bucket; 4 per slot beyond the keys, of which there is one in 99.
    index = 1 / KEYS_PER_BUCKET + 4 / 99
    return HEADER_BYTES + int(rows * (record_bytes(table.dim, table.row_format) + index))


def model_of_repository(repository: Repository, name: str | None) -> PlannedModel:
    """A model of ``repository``, to be served with default settings. Raises as `model_of_configuration`."""
    names = repository.names()
    return _of_version(repository.open(_chosen(name, names)), Settings())


def with_redis(model: PlannedModel, address: str) -> PlannedModel:
    """Return ``model`` to be served over the Redis at ``address``. Raises ConfigError."""
    given = {"tiers": {"redis": {"addresses": [address]}}}
    redis = configuration_from(given, environ={}).settings.tiers.redis
    tiers = model.settings.tiers
    if tiers.redis is not None:
        redis = tiers.redis.model_copy(update={"addresses": [address]})
    tiers = tiers.model_copy(update={"redis": redis})
    return replace(model, settings=model.settings.model_copy(update={"tiers": tiers}))


def _chosen(name: str | None, names: Collection[str]) -> str:
    if name is None and len(names) > 1:
        raise ConfigError(f"name the model by --model; there are {', '.join(names)}")
    if name is not None and name not in names:
        raise NotFound(f"there is no model {name!r}{hint_for(name, names, 'the models are')}")
    if not names:
        raise ConfigError("the repository holds no model; make one with `hps model import`")
    return name or next(iter(names))


def model_of_status(status: Mapping[str, Any], name: str | None) -> PlannedModel:
    """A model of a running node, from its ``/v1/status``; keys of its traces are those of tables.

    Raises ConfigError, NotFound."""
    served = {model["name"]: model for model in status["models"]}
    found = served[_chosen(name, served)]
    tables = {}
    for each in found["tables"]:
        table = EmbeddingTable.make(
            each["name"], each["dim"], model=found["name"], dtype=each["dtype"]
        )
        tables[table.name] = PlannedTable(table, max(1, *each["rows"].values(), 0))
    return PlannedModel(found["name"], tables, {})
