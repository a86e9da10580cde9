"""Views of a configuration: values with their origin, the schema, a ``ps.json`` as YAML."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel

from hps.config.config_errors import dotted_path, leaf_values
from hps.config.loading import Configuration
from hps.config.model_file import dump_model_spec
from hps.config.model_schema import ModelSpec
from hps.config.ps_json.legacy import PsJson
from hps.config.schema import Settings
from hps.config.schema_paths import SchemaSlot, is_secret, walk
from hps.config.server_settings import ApiKey
from hps.config.yaml_text import dump_yaml

HIDDEN = "********"
SETTINGS_FILE = "hps.yaml"
"""The file of settings in the result of `convert_ps_json`."""
SchemaName = Literal["settings", "model", "api-key"]
_SCHEMAS: dict[str, type[BaseModel]] = {
    "settings": Settings,
    "model": ModelSpec,
    "api-key": ApiKey,
}


def effective_settings(configuration: Configuration) -> dict[str, tuple[Any, str]]:
    """All settings by dotted key: the effective value (secrets hidden) and its origin."""
    values = {}
    for path, value in leaf_values(configuration.settings.model_dump(mode="json")):
        slot, _ = walk(Settings, path)
        key = dotted_path(path)
        values[key] = (_masked(slot, value), configuration.origins.get(key, "default"))
    return values


def public_settings(settings: Settings) -> dict[str, Any]:
    """The settings as plain nested data, secrets hidden."""
    data = settings.model_dump(mode="json")
    return dict(_masked(SchemaSlot(Settings, Settings), data))


def deployment_identity(settings: Settings) -> dict[str, str | None]:
    """Absolute folders that distinguish this deployment's server from others on the machine.

    None for a folder that the role does not use."""
    rocksdb, role = settings.tiers.rocksdb, settings.server.role
    has_database = rocksdb.enabled and role not in ("frontend", "ingest")
    repository = settings.models.repository
    return {
        "repository": repository if isinstance(repository, str) else str(repository.absolute()),
        "database": str(rocksdb.path.absolute()) if has_database else None,
    }


def _masked(slot: SchemaSlot, value: Any) -> Any:
    if not is_secret(slot) or value is None:
        return value
    if isinstance(value, Mapping):
        below = {k: (slot.below(k), v) for k, v in value.items()}
        return {k: HIDDEN if s is None else _masked(s, v) for k, (s, v) in below.items()}
    if isinstance(value, list):
        return [
            HIDDEN if (s := slot.below(i)) is None else _masked(s, v) for i, v in enumerate(value)
        ]
    return HIDDEN


def json_schema(name: SchemaName = "settings") -> dict[str, Any]:
    """JSON Schema (2020-12); a field's docstring is its description."""
    schema = _SCHEMAS[name].model_json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def convert_ps_json(legacy: PsJson) -> dict[str, str]:
    """Convert a ``ps.json`` to ``hps.yaml`` and one ``<model>/model.yaml`` per model."""
    settings = {**legacy.settings, "models": dict(legacy.settings["models"])}
    if not settings["models"]["serve"]:
        del settings["models"]["serve"]
    settings["models"] = {"repository": "models", **settings["models"]}
    files = {SETTINGS_FILE: dump_yaml(settings)}
    for model in legacy.models:
        files[f"models/{model.spec.name}/model.yaml"] = dump_model_spec(model.spec)
    return files
