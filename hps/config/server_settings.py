"""Settings of the server: ports, limits and callers."""

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
    """The server's certificate, followed by the intermediate ones."""
    key_file: Path
    """Its private key; only the server should be able to read it."""
    client_ca_file: Path | None = None
    """Trusted roots for clients' certificates; null: clients need none."""


class Listener(StrictModel):
    """A port."""

    host: str = Field("127.0.0.1", min_length=1)
    """Address to listen on; beyond loopback, `auth.mode` must be set."""
    port: int = Field(ge=0, le=65_535)
    """0: a free port, which is logged at start."""
    tls: TlsSettings | None = None
    """TLS certificates; null: plain text."""


class HttpSettings(Listener):
    """The port of the Open Inference Protocol."""

    port: int = Field(8000, ge=0, le=65_535)
    """0: a free port, which is logged at start."""


class GrpcListener(Listener):
    """A gRPC port."""

    reflection: bool = True
    """gRPC server reflection, for tools such as grpcurl."""
    calls: Literal["auto", "threads"] = "auto"
    """`auto` takes calls from grpc's core where that works; `threads` uses grpc's public interface only."""
    max_connection_age_s: float | None = Field(None, gt=0)
    """Approximate lifetime of a connection; null: half of `drain_delay_s`, or unlimited if that is 0."""


class GrpcAdminSettings(GrpcListener):
    """The port of `hps.v1.Updates` and `hps.v1.Admin`."""

    port: int = Field(8003, ge=0, le=65_535)
    """0: a free port, which is logged at start."""


class GrpcSettings(GrpcListener):
    """The port of the Open Inference Protocol over gRPC."""

    port: int = Field(8001, ge=0, le=65_535)
    """0: a free port, which is logged at start."""
    admin: GrpcAdminSettings | None = None
    """The port of updates and administration over gRPC; null: none."""


class AdminSettings(Listener):
    """The port of status, metrics and administration."""

    port: int = Field(8002, ge=0, le=65_535)
    """0: a free port, which is logged at start."""


class MetricsSettings(StrictModel):
    """Contents of `/metrics` on the admin port."""

    triton_names: bool = False
    """Export Triton's metrics, `nv_inference_*`, for dashboards and autoscalers made for Triton."""


class ServerSettings(StrictModel):
    """Ports and limits of the server."""

    http: HttpSettings = HttpSettings()
    """The port of the Open Inference Protocol."""
    grpc: GrpcSettings | None = GrpcSettings()
    """The port of the same protocol over gRPC; null: none."""
    admin: AdminSettings = AdminSettings()
    """The port of status, metrics and administration."""
    role: Literal["all", "frontend", "lookup", "ingest"] = "all"
    """`lookup`: rows; `frontend`: networks, rows by `lookup.nodes`; `all`: both; `ingest`: `hps ingest`."""
    workers: int = Field(0, ge=0, le=256)
    """Processes that answer requests from the node's cache; 0: the node's process answers them."""
    worker_timeout_s: float = Field(10.0, ge=1)
    """A worker that does not answer heartbeats for this long is killed and replaced."""
    runtime: Path | None = None
    """Private folder of the socket by which other processes attach to the node; null: only workers may."""
    max_body_bytes: int = Field(64 << 20, ge=1024)
    """Largest request body after decompression; larger ones get 413, over gRPC RESOURCE_EXHAUSTED."""
    max_keys: int = Field(4_000_000, ge=1)
    """Largest number of keys per request; more get 413, over gRPC INVALID_ARGUMENT."""
    shared_memory: bool = False
    """Let clients on this machine pass tensors in `/dev/shm` instead of in messages."""
    request_timeout_ms: float = Field(10_000.0, gt=0)
    """Deadline of a request without one."""
    admission: AdmissionSettings = AdmissionSettings()
    """Limits on running and queued requests."""
    batching: BatchingSettings | None = None
    """Dynamic batching of requests that wait at the same time; null: off."""
    metrics: MetricsSettings = MetricsSettings()
    """Contents of `/metrics` on the admin port."""
    drain_delay_s: float = Field(0.0, ge=0)
    """Time for which a stopping server is not ready but accepts requests, until load balancers notice."""
    drain_s: float = Field(10.0, ge=0)
    """Time for which a stopping server finishes accepted requests."""
    docs: bool = True
    """Serve /docs and /openapi.json on both HTTP ports; the page loads nothing from other hosts."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """`debug` also logs every request, one line each; `POST /v2/logging` changes it at run time."""
    log_format: Literal["text", "json"] = "text"
    """Text lines, or one JSON object per line."""
    access_log: float = Field(0.0, ge=0, le=1)
    """Share of the inference requests that are logged: 1 is all, 0.01 one in a hundred."""

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
    """Name of the caller; logs show it, never the key."""
    role: Literal["read", "write", "admin"]
    """`read`: queries; `write`: also row changes; `admin`: everything."""
    key: str | None = Field(None, pattern=KEY_PATTERN, repr=False)
    """The secret, at least 16 printable ASCII characters; prefer `keys_file`."""
    certificate: str | None = Field(None, min_length=1, max_length=512)
    """Instead of a key: an alternative name in the client's certificate, or `CN=` and its common name."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        return self.consistent(checks.caller(self.key is not None, self.certificate is not None))


class AuthSettings(StrictModel):
    """Authentication of callers."""

    mode: Literal["off", "api_key"] | None = None
    """Required if a port listens beyond loopback or keys are set; else null means `off`."""
    keys_file: Path | None = None
    """YAML list of {name, role, key}, read again when it changes; make it readable only by the server."""
    keys: list[ApiKey] = []
    """API keys in addition to those of `keys_file`."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        sources = [name for name in ("keys_file", "keys") if getattr(self, name)]
        return self.consistent(checks.auth(self.mode, sources))


_PORTS = {"lookup": ("grpc", "admin"), "ingest": ("admin",)}


def opened_ports(server: ServerSettings) -> Iterator[tuple[str, Listener]]:
    """The ports that the role opens, by their settings below ``server``."""
    for name in _PORTS.get(server.role, ("http", "grpc", "admin")):
        listener: Listener | None = getattr(server, name)
        if listener is not None:
            yield name, listener
    if server.role != "ingest" and server.grpc is not None and server.grpc.admin is not None:
        yield "grpc.admin", server.grpc.admin
