"""Checks of ``hps config validate`` beyond the settings: models, certificates, Kafka's options.

They need files and the server's packages, but no other process, no port and no GPU."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from hps.config.validation import FileCheck, kafka_files
from hps.errors import HpsError

if TYPE_CHECKING:
    from hps.config import Configuration
    from hps.config.schema import Settings
    from hps.config.validation import ValidationReport
    from hps.models.repository import ModelVersion


def check_parts(report: ValidationReport, path: Path) -> list[ModelVersion]:
    """Check the parts of the file at ``path``: add errors to ``report``, return the opened models."""
    if report.errors:
        return []
    if report.configuration is not None:
        return _check_configuration(report, report.configuration)
    if report.kind == "model description":
        found = report.run(partial(_check_description, report, path.absolute()))
        return [found] if found else []
    return []


def _check_configuration(
    report: ValidationReport, configuration: Configuration
) -> list[ModelVersion]:
    settings = configuration.settings
    for each in (*port_certificates(settings), *_kafka_options(settings)):
        report.run_file_check(each)
    if absent := _absent_models(configuration):
        report.warnings.append(
            f"models are not checked: there is no {absent} here; the server will not start without it"
        )
        return []
    opened: list[ModelVersion] = report.run(partial(_check_models, report, configuration)) or []
    return opened


def _absent_models(configuration: Configuration) -> Path | None:
    """Return a missing folder of models if all are missing, else None.

    Models are often mounted only where the server runs."""
    legacy = configuration.legacy
    folders = [each for model in legacy for some in model.directories.values() for each in some]
    repository = configuration.settings.models.repository
    if isinstance(repository, str):
        return None
    folders = folders or [repository]
    return None if any(folder.exists() for folder in folders) else folders[0]


def _check_models(report: ValidationReport, configuration: Configuration) -> list[ModelVersion]:
    from hps.node.model_opening import check_models

    opened = []
    for name, found in check_models(configuration):
        if isinstance(found, HpsError):
            report.errors += [f"model {name}: {line}" for line in str(found).splitlines()]
        else:
            report.warnings += found.warnings
            opened.append(found)
    return opened


def _check_description(report: ValidationReport, path: Path) -> ModelVersion | None:
    """Check the newest version next to a ``model.yaml``; None if there is none. Raises ModelError."""
    from hps.config import Settings
    from hps.models.repository import SPEC_FILE, Repository
    from hps.node.model_opening import check_model

    folder = path.parent
    if path.name != SPEC_FILE or not any(each.name.isdigit() for each in folder.iterdir()):
        return None
    version = Repository(folder.parent).open(folder.name)
    report.warnings += version.warnings
    if version.spec.dense is not None and version.dense is None:
        report.warnings.append(f"{version.folder}: dense.onnx is missing: only a Triton can run it")
    else:
        check_model(version, Settings())
    return version


def port_certificates(settings: Settings) -> Iterator[FileCheck]:
    """Certificates of the ports that the role opens."""
    from hps.config.server_settings import opened_ports
    from services.frontend.certificates import server_context

    for name, listener in opened_ports(settings.server):
        tls = listener.tls
        if tls is not None:
            files = [tls.certificate_file, tls.key_file, tls.client_ca_file]
            named = [file for file in files if file is not None]
            setting = f"server.{name}"
            yield FileCheck(f"{setting}.tls", named, partial(server_context, listener, setting))


def _kafka_options(settings: Settings) -> Iterator[FileCheck]:
    kafka = settings.updates.kafka
    if kafka is not None and settings.server.role != "frontend":
        from hps.updates.kafka.client import check_options

        files = [file for each in kafka_files(kafka) for file in each.files]
        files += kafka.options_files.values()
        yield FileCheck("updates.kafka", files, partial(check_options, kafka))
