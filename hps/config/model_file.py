"""Read and write ``model.yaml``, and apply the server's overrides to it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hps.config.checks import Path as KeyPath
from hps.config.config_errors import ConfigProblem, InvalidConfiguration, validate
from hps.config.model_schema import ModelSpec
from hps.config.schema import ModelOverride
from hps.config.yaml_text import dump_yaml, parse_yaml, read_yaml
from hps.suggestions import hint_for


def load_model_spec(path: Path) -> ModelSpec:
    """Read a ``model.yaml``; its ConfigErrors name file, line, key, and the expected and found values."""
    document = read_yaml(path, "model description")

    def where(key: KeyPath) -> str:
        return place(str(path), document.lines, key)

    data = {} if document.data is None else document.data
    return validate(ModelSpec, data, where, document.faults)


def parse_model_spec(text: bytes, name: str) -> ModelSpec:
    """Parse the contents of a ``model.yaml``; ``name`` is that of the file in errors."""
    document = parse_yaml(text.decode(errors="replace"), name)
    data = {} if document.data is None else document.data
    faults = document.faults
    return validate(ModelSpec, data, lambda key: place(name, document.lines, key), faults)


def dump_model_spec(spec: ModelSpec) -> str:
    """The spec as YAML without default values; ``load_model_spec`` returns an equal one."""
    return dump_yaml(spec.model_dump(mode="json", exclude_defaults=True))


def place(file: str, lines: dict[KeyPath, int], key: KeyPath) -> str:
    """Location ``file:line`` of the value at ``key``, or of the nearest one around it."""
    for length in range(len(key), 0, -1):
        if key[:length] in lines:
            return f"{file}:{lines[key[:length]]}"
    return file


def apply_override(spec: ModelSpec, override: ModelOverride | None) -> ModelSpec:
    """Apply the server's settings to the spec, except ``version`` and cache sizes.

    Those are not part of the spec. Raises ConfigError if the result is inconsistent or names a table
    that the model does not have."""
    if override is None:
        return spec
    base: KeyPath = ("models", "serve", spec.name)
    names = [t.name for t in spec.tables]
    unknown = [name for name in override.tables if name not in names]
    if unknown:
        raise InvalidConfiguration(
            [
                ConfigProblem(
                    "",
                    (*base, "tables", name),
                    f"model {spec.name!r} has no table {name!r}{hint_for(name, names, 'the tables are')}",
                )
                for name in unknown
            ]
        )
    data: dict[str, Any] = spec.model_dump()
    for table in data["tables"]:
        table_override = override.tables.get(table["name"])
        if table_override is not None:
            table |= table_override.model_dump(
                include={"default", "miss_policy", "tombstone_ttl_s", "ttl_s"}, exclude_none=True
            )
    data |= override.model_dump(
        include={"dense", "max_batch_size", "hps_version"}, exclude_none=True
    )

    def where(key: KeyPath) -> str:
        path = (*base, "tables", names[int(key[1])]) if key[:1] == ("tables",) else base
        return ".".join(str(part) for part in path)

    return validate(ModelSpec, data, where)
