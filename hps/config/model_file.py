"""``model.yaml`` on disk: read, write, and overridden by the server's settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hps.config.checks import Path as KeyPath
from hps.config.config_errors import ConfigProblem, InvalidConfiguration, validate
from hps.config.model_schema import ModelSpec
from hps.config.schema import ModelOverride
from hps.config.yaml_text import dump_yaml, read_yaml
from hps.suggestions import hint_for


def load_model_spec(path: Path) -> ModelSpec:
    """Read a ``model.yaml``; ConfigError names file, line, key, what was expected and found."""
    document = read_yaml(path, "model description")

    def where(key: KeyPath) -> str:
        return place(str(path), document.lines, key)

    data = {} if document.data is None else document.data
    return validate(ModelSpec, data, where, document.faults)


def dump_model_spec(spec: ModelSpec) -> str:
    """The spec as YAML without what is default anyway; ``load_model_spec`` reads it back equal."""
    return dump_yaml(spec.model_dump(mode="json", exclude_defaults=True))


def place(file: str, lines: dict[KeyPath, int], key: KeyPath) -> str:
    """``file:line`` of the nearest value that stands in the file."""
    for length in range(len(key), 0, -1):
        if key[:length] in lines:
            return f"{file}:{lines[key[:length]]}"
    return file


def apply_override(spec: ModelSpec, override: ModelOverride | None) -> ModelSpec:
    """The spec with the server's settings laid over it (``version`` and cache sizes are not part
    of it). ConfigError when the result is inconsistent or names a table the model does not have."""
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
        given = override.tables.get(table["name"])
        if given is not None:
            table |= given.model_dump(
                include={"default", "miss_policy", "tombstone_ttl_s"}, exclude_none=True
            )
    data |= override.model_dump(include={"dense", "max_batch_size"}, exclude_none=True)

    def where(key: KeyPath) -> str:
        named = (*base, "tables", names[int(key[1])]) if key[:1] == ("tables",) else base
        return ".".join(str(part) for part in named)

    return validate(ModelSpec, data, where)
