"""The only reader of environment variables."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
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
    "HPS_NATIVE": "`auto` uses the compiled core when it is there, `on` fails without it, `off` takes "
    "the NumPy twins.",
    "HPS_CONFIG": "The configuration file of `hps serve`, `hps ingest`, `hps healthcheck` and `hps doctor`, "
    "where `--config` names none.",
    "HPS_API_KEY": "The key that `hps` sends to a server that asks for one, as `--api-key`.",
    "HPS_TLS": "The certificates that `hps` uses with an `https` server, as `--tls`.",
    "OTEL_EXPORTER_OTLP_ENDPOINT": "Where spans are sent, as OpenTelemetry has it; the package needs its "
    "extra `otel`. The other `OTEL_…` act, too.",
    "HPS__A__B": "Sets `a.b` over the configuration file: two underscores before every part, in any "
    "case, the value as YAML. Names of models and tables are taken as written.",
}
"""Every variable the product reads, for the docs."""


def native_mode() -> Literal["auto", "on", "off"]:
    """``HPS_NATIVE``: whether the compiled core must be (``on``) or must not be (``off``) used."""
    value = os.environ.get("HPS_NATIVE", "auto")
    if value in ("auto", "on", "off"):
        return cast(Literal["auto", "on", "off"], value)
    raise ConfigError(f"HPS_NATIVE is {value!r}; it must be auto, on or off")


def setting_variables(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variables that set something, by their names as written."""
    source = os.environ if environ is None else environ
    return {name: text for name, text in source.items() if name.upper().startswith(PREFIX)}


def near_misses(environ: Mapping[str, str] | None = None) -> list[str]:
    """Warnings on variables that look like settings but lack an underscore (``HPS_SERVER__…``)."""
    source = os.environ if environ is None else environ
    return [
        f"{name} sets nothing: settings start with {PREFIX}, two underscores before every part"
        for name in source
        if _NEAR_MISS.match(name) and "__" in name
    ]


def traces_exporter() -> str | None:
    """By which exporter spans go out, as OpenTelemetry names it; None: they don't. The other
    variables ``OTEL_…`` are read by OpenTelemetry itself."""
    given = {name: os.environ.get(name, "").strip() for name in _OTEL}
    disabled, named, protocol, *endpoints = given.values()
    if disabled.lower() == "true" or named == "none" or not (named or any(endpoints)):
        return None
    if named not in ("", "otlp"):
        return named
    return "otlp_proto_grpc" if protocol == "grpc" else "otlp_proto_http"


def keep_onnxruntime_quiet() -> None:
    """Switch ONNX Runtime's telemetry off, to be called before it is imported: a server sends nothing
    about itself and writes nothing into the home folder unless its user asked for that."""
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")


def keep_grpc_from_its_engine() -> None:
    """Have grpc's servers read their sockets themselves, to be called before it is imported: its engine of
    threads hands each request on once more, 300 µs of CPU for 26 keys instead of 230."""
    os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_listener")
