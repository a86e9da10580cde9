"""Checks one file without starting anything, and collects all that is wrong with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hps.config.auth import check_exposure, key_file_warnings, load_api_keys, read_keys_file
from hps.config.loading import load_config
from hps.config.model_file import load_model_spec
from hps.config.schema import Settings
from hps.config.yaml_text import read_yaml
from hps.errors import ConfigError


@dataclass
class Report:
    """``kind`` is what the file was taken for; it is in order when there are no ``errors``."""

    kind: str
    errors: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def run(self, check: Callable[[], Any]) -> Any:
        """The check's result; None when it failed, its errors then stand in the report."""
        try:
            return check()
        except ConfigError as error:
            self.errors += str(error).splitlines()
            return None


def validate_file(path: Path, overrides: Sequence[str] = ()) -> Report:
    """Judge a configuration, a ``ps.json``, a ``model.yaml`` or an API key file."""
    if path.suffix.lower() == ".json":
        return _configuration(Report("HPS's ps.json"), path, overrides)
    report = Report("configuration")
    data = report.run(lambda: read_yaml(path).data)
    if report.errors:
        return report
    if isinstance(data, list):
        report.kind = "API keys"
        report.run(lambda: read_keys_file(path))
    elif isinstance(data, dict) and "tables" in data and not set(data) & set(Settings.model_fields):
        report.kind = "model description"
        report.run(lambda: load_model_spec(path))
    else:
        return _configuration(report, path, overrides)
    if overrides:
        report.errors.append(f"{path}: --set changes a configuration, and this is none")
    return report


def _configuration(report: Report, path: Path, overrides: Sequence[str]) -> Report:
    configuration = report.run(lambda: load_config(path, overrides))
    if configuration is None:
        return report
    report.warnings += configuration.warnings
    settings: Settings = configuration.settings
    report.run(lambda: check_exposure(settings))
    keys = settings.auth.keys_file
    if settings.auth.mode == "api_key" and keys is not None and not keys.exists():
        # Secrets are often mounted only where the server runs.
        report.warnings.append(
            f"{keys}: no such API key file here; the server will not start without"
        )
    else:
        report.warnings += key_file_warnings(settings.auth)
        report.run(lambda: load_api_keys(settings.auth))
    return report
