"""Read environment variables; no other module does."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, cast

from hps.errors import ConfigError

# HPS__SERVER__HTTP__PORT sets server.http.port.
PREFIX = "HPS__"
_OTEL = (
    "OTEL_SDK_DISABLED",
    "OTEL_TRACES_EXPORTER",
    "OTEL_EXPORTER_OTLP_PROTOCOL",
    "OTEL_EXPORTER_OTLP_ENDPOINT",
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
)
_NEAR_MISS = re.compile(r"(?i)^HPS_(models|tiers|updates|lookup|dense|server|auth)_")

VARIABLES = {
    "HPS_NATIVE": "`auto` uses the compiled core if it is installed, `on` fails without it, `off` uses "
    "the NumPy twins.",
    "HPS_CONFIG": "The configuration file of `hps serve`, `hps ingest`, `hps healthcheck` and `hps doctor`, "
    "unless `--config` is given.",
    "HPS_API_KEY": "The API key that `hps` sends to a server, like `--api-key`.",
    "HPS_TLS": "The certificates that `hps` uses with an `https` server, like `--tls`.",
    "AWS_ENDPOINT_URL_S3": "The URL of an S3-compatible store, for `models.repository: s3://…`; else "
    "`AWS_ENDPOINT_URL`, else AWS.",
    "AWS_ENDPOINT_URL": "As `AWS_ENDPOINT_URL_S3`, which precedes it. The AWS SDK reads its other `AWS_…` "
    "variables, too.",
    "AWS_REGION": "The region of S3; else `AWS_DEFAULT_REGION`, else the bucket's.",
    "AWS_DEFAULT_REGION": "As `AWS_REGION`, which precedes it.",
    "STORAGE_EMULATOR_HOST": "The URL of an emulator for `models.repository: gs://…`.",
    "NETRC": "The file of credentials for `models.repository: https://…`, by default `~/.netrc`.",
    "XDG_CACHE_HOME": "The folder in which commands keep downloaded versions, by default `~/.cache`.",
    "OTEL_EXPORTER_OTLP_ENDPOINT": "OpenTelemetry's URL of the span collector; needs the package's "
    "extra `otel`. The other `OTEL_…` variables work, too.",
    "HPS__A__B": "Overrides setting `a.b` of the configuration file: two underscores before every part, "
    "in any case, the value as YAML. Names of models and tables are case-sensitive.",
}
"""Descriptions of all environment variables, for the documentation."""


def native_mode() -> Literal["auto", "on", "off"]:
    """Mode of the compiled core, from ``HPS_NATIVE``: required (``on``), unused (``off``) or ``auto``."""
    value = os.environ.get("HPS_NATIVE", "auto")
    if value in ("auto", "on", "off"):
        return cast(Literal["auto", "on", "off"], value)
    raise ConfigError(f"HPS_NATIVE is {value!r}; it must be auto, on or off")


def setting_variables(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Environment variables that set a setting, by their names as written."""
    source = os.environ if environ is None else environ
    return {name: text for name, text in source.items() if name.upper().startswith(PREFIX)}


def near_misses(environ: Mapping[str, str] | None = None) -> list[str]:
    """Warnings about variables that look like settings but miss an underscore (``HPS_SERVER__…``)."""
    source = os.environ if environ is None else environ
    return [
        f"{name} is ignored: settings start with {PREFIX}, two underscores before every part"
        for name in source
        if _NEAR_MISS.match(name) and "__" in name
    ]


def traces_exporter() -> str | None:
    """OpenTelemetry's name of the span exporter; None if spans are not exported.

    OpenTelemetry itself reads the other ``OTEL_…`` variables."""
    values = [os.environ.get(name, "").strip() for name in _OTEL]
    disabled, exporter, protocol, *endpoints = values
    if disabled.lower() == "true" or exporter == "none" or not (exporter or any(endpoints)):
        return None
    if exporter not in ("", "otlp"):
        return exporter
    return "otlp_proto_grpc" if protocol == "grpc" else "otlp_proto_http"


def disable_onnxruntime_telemetry() -> None:
    """Disable ONNX Runtime's telemetry; call it before the import.

    A server sends nothing about itself and writes nothing into the home folder unless its user asks for it.
    """
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")


def sets_allocator() -> bool:
    """Return True if variables set glibc's allocator: ``MALLOC_TRIM_THRESHOLD_`` or the like."""
    return "GLIBC_TUNABLES" in os.environ or any(
        name.startswith("MALLOC_") and name.endswith("THRESHOLD_") for name in os.environ
    )


def s3_endpoint() -> str | None:
    """The URL of an S3-compatible store, from the AWS SDK's variables; None: AWS."""
    return os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or None


def s3_region() -> str | None:
    """The region of S3, from the AWS SDK's variables; None if they don't name one."""
    return os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or None


def gs_endpoint() -> str | None:
    """The URL of an emulator of Google Cloud Storage, from the variable of its SDKs; None: the service."""
    return os.environ.get("STORAGE_EMULATOR_HOST") or None


def netrc_file() -> str | None:
    """The file of credentials for web servers, from ``NETRC``; None: ``~/.netrc``."""
    return os.environ.get("NETRC") or None


def user_cache_folder() -> Path:
    """The user's folder for caches: ``XDG_CACHE_HOME``, by default ``~/.cache``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
