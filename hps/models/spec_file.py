"""Reading and writing ``model.yaml``, by hps.config."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from hps.config.model_schema import ModelSpec


def _config() -> Any:
    return importlib.import_module("hps.config")


def load_model_spec(path: Path) -> ModelSpec:
    config = _config()
    if hasattr(config, "load_model_spec"):
        return config.load_model_spec(path)  # type: ignore[no-any-return]
    yaml = importlib.import_module("yaml")
    return ModelSpec.model_validate(yaml.safe_load(path.read_text()))


def dump_model_spec(spec: ModelSpec) -> str:
    config = _config()
    if hasattr(config, "dump_model_spec"):
        return config.dump_model_spec(spec)  # type: ignore[no-any-return]
    yaml = importlib.import_module("yaml")
    text: str = yaml.safe_dump(spec.model_dump(mode="json", exclude_defaults=True), sort_keys=False)
    return text
