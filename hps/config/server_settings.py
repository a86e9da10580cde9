"""Settings of the server: its ports, its limits, and who may use it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from hps.config import checks
from hps.config.admission_settings import AdmissionSettings, BatchingSettings
from hps.config.model_schema import StrictModel

KEY_PATTERN = r"^[\x21-\x7e]{16,512}$"


class TlsSettings(StrictModel):
    """Certificates of a port: PEM files, read again when they change."""

    certificate_file: Path
    """The server's certificate, and after it those that lead to a root."""
    key_file: Path
    """Its private key; keep it readable by the server only."""
    client_ca_file: Path | None = None
    """Roots that clients' certificates must lead to; null asks for none."""


class Listener(StrictModel):
    """A port."""

    host: str = Field("127.0.0.1", min_length=1)
    """Address to listen on; beyond loopback `auth.mode` must be stated."""
    port: int = Field(ge=0, le=65_535)
    """0 picks a free port, printed at start."""
    tls: TlsSettings | None = None
    """Certificates; null speaks plain text."""


class HttpSettings(Listener):
    """The port of the Open Inference Protocol."""

    port: int = Field(8000, ge=0, le=65_535)
    """0 picks a free port, printed at start."""


class GrpcListener(Listener):
    """A port that speaks gRPC."""

    reflection: bool = True
    """Tell tools like grpcurl what can be called."""
    max_connection_age_s: float | None = Field(None, gt=0)
    """How long a connection lasts, more or less; null: half of `drain_delay_s`, where that is 0 for ever."""


class GrpcAdminSettings(GrpcListener):
    """The port of `hps.v1.Updates` and `hps.v1.Admin`."""

    port: int = Field(8003, ge=0, le=65_535)
    """0 picks a free port, printed at start."""


class GrpcSettings(GrpcListener):
    """The port of the Open Inference Protocol over gRPC."""

    port: int = Field(8001, ge=0, le=65_535)
    """0 picks a free port, printed at start."""
    admin: GrpcAdminSettings | None = None
    """The port of updates and administration over gRPC; null offers none."""


class AdminSettings(Listener):
    """The port of status, metrics and administration."""

    port: int = Field(8002, ge=0, le=65_535)
    """0 picks a free port, printed at start."""


class MetricsSettings(StrictModel):
    """What `/metrics` on the admin port has."""

    triton_names: bool = False
    """Also Triton's metrics, `nv_inference_*`, for dashboards and autoscalers that were made for Triton."""


class ServerSettings(StrictModel):
    """Ports and limits of the server."""

    http: HttpSettings = HttpSettings()
    """The port of the Open Inference Protocol."""
    grpc: GrpcSettings | None = GrpcSettings()
    """The port of the same protocol over gRPC; null offers none."""
    admin: AdminSettings = AdminSettings()
    """The port of status, metrics and administration."""
    role: Literal["all", "frontend", "lookup", "ingest"] = "all"
    """`frontend` asks `lookup.nodes` for rows, `lookup` is one; `all`: both; `ingest`: `hps ingest`."""
    workers: int = Field(0, ge=0, le=256)
    """Processes that answer requests beside the node's, from its cache; 0: the node's answers them itself."""
    worker_timeout_s: float = Field(10.0, ge=1)
    """A worker that does not answer its heartbeat for so long is killed and replaced."""
    runtime: Path | None = None
    """Private folder of the socket by which other processes attach to the node; null: workers alone may."""
    max_body_bytes: int = Field(64 << 20, ge=1024)
    """Largest request body, after decompression; larger ones get 413, over gRPC RESOURCE_EXHAUSTED."""
    max_keys: int = Field(4_000_000, ge=1)
    """Most keys in one request; more get 413, over gRPC INVALID_ARGUMENT."""
    shared_memory: bool = False
    """Callers on this machine may have tensors in its `/dev/shm` instead of in messages."""
    request_timeout_ms: float = Field(10_000.0, gt=0)
    """Deadline of a request that brings none."""
    admission: AdmissionSettings = AdmissionSettings()
    """How many requests are worked at, and how many wait."""
    batching: BatchingSettings | None = None
    """Requests that wait at the same time, answered as one; null: each by itself."""
    metrics: MetricsSettings = MetricsSettings()
    """What `/metrics` on the admin port has."""
    drain_delay_s: float = Field(0.0, ge=0)
    """How long a stopping server still takes requests, not ready any more, for load balancers to notice."""
    drain_s: float = Field(10.0, ge=0)
    """How long a stopping server finishes what it has accepted."""
    docs: bool = True
    """Serve /docs and /openapi.json on both HTTP ports; the page loads nothing from other hosts."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """`debug` also logs every request, one line each; `POST /v2/logging` changes it while the server runs."""
    log_format: Literal["text", "json"] = "text"
    """Lines to be read, or a JSON object each."""
    access_log: float = Field(0.0, ge=0, le=1)
    """Share of the inference requests that get a log line: 1 is all, 0.01 one in a hundred."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        listeners = {
            name: (at.host, at.port)
            for name, at in (
                ("http", self.http),
                ("grpc", self.grpc),
                ("admin", self.admin),
                ("grpc.admin", self.grpc and self.grpc.admin),
            )
            if at is not None
        }
        shared = checks.shared_memory(self.shared_memory, self.workers)
        return self.consistent(checks.ports(listeners) + shared)


class ApiKey(StrictModel):
    """One caller of the server."""

    name: str = Field(min_length=1, max_length=120)
    """Who uses this key; shown in logs, never the key itself."""
    role: Literal["read", "write", "admin"]
    """`read` asks, `write` changes rows too, `admin` does everything."""
    key: str | None = Field(None, pattern=KEY_PATTERN, repr=False)
    """The secret itself, at least 16 printable ASCII characters; better kept in `keys_file`."""
    certificate: str | None = Field(None, min_length=1, max_length=512)
    """Instead of a key: an alternative name in the client's certificate, or `CN=` and its common name."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        return self.consistent(checks.caller(self.key is not None, self.certificate is not None))


class AuthSettings(StrictModel):
    """Who may use the server."""

    mode: Literal["off", "api_key"] | None = None
    """Must be stated when a port listens beyond loopback or keys are given; else null means `off`."""
    keys_file: Path | None = None
    """YAML list of {name, role, key}, read again when it changes; keep it readable by the server only."""
    keys: list[ApiKey] = []
    """API keys given here instead; they add to those of `keys_file`."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        given = [name for name in ("keys_file", "keys") if getattr(self, name)]
        return self.consistent(checks.auth(self.mode, given))


_PORTS = {"lookup": ("grpc", "admin"), "ingest": ("admin",)}


def opened_ports(server: ServerSettings) -> Iterator[tuple[str, Listener]]:
    """The ports that the role opens, by their settings below ``server``."""
    for name in _PORTS.get(server.role, ("http", "grpc", "admin")):
        listener: Listener | None = getattr(server, name)
        if listener is not None:
            yield name, listener
    if server.role != "ingest" and server.grpc is not None and server.grpc.admin is not None:
        yield "grpc.admin", server.grpc.admin
