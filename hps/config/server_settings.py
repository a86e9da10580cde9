"""Settings of the server: ports, limits and callers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from pydantic import Field

from hps.config.admission_settings import AdmissionSettings, BatchingSettings
from hps.config.checks import ConfigFinding, finding, incomplete_pair
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


class ClientTlsSettings(StrictModel):
    """TLS of connections to other servers."""

    ca_file: Path | None = None
    """PEM file of trusted roots for the servers' certificates; null: the system's."""
    certificate_file: Path | None = None
    """PEM file of this process's certificate, if the servers require one."""
    key_file: Path | None = None
    """PEM file of its private key."""

    def violations(self) -> Iterator[ConfigFinding]:
        return incomplete_pair(self, "certificate_file", "key_file")


class Listener(StrictModel):
    """A port."""

    host: str = Field("127.0.0.1", min_length=1)
    """Address to listen on; beyond loopback, `auth.mode` must be set."""
    port: int = Field(ge=0, le=65_535)
    """0: a free port, which is logged at start."""
    tls: TlsSettings | None = None
    """TLS certificates; null: plain text."""


class HttpListener(Listener):
    """An HTTP port."""

    protocol: Literal["auto", "uvicorn"] = "auto"
    """`auto` uses uvicorn's private protocol where that works; `uvicorn` uses its public interface only."""


class HttpSettings(HttpListener):
    """The port of the Open Inference Protocol."""

    port: int = Field(8000, ge=0, le=65_535)
    """0: a free port, which is logged at start."""


class GrpcListener(Listener):
    """A gRPC port."""

    reflection: bool = True
    """gRPC server reflection, for tools such as grpcurl."""
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


class AdminSettings(HttpListener):
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

    def violations(self) -> Iterator[ConfigFinding]:
        yield from self._shared_ports()
        if self.shared_memory and self.workers > 1:
            message = (
                f"can't be used with {self.workers} workers: a region is registered with one worker "
                "only; set workers to 0 or 1"
            )
            yield finding("shared_memory", message, "workers")

    def _shared_ports(self) -> Iterator[ConfigFinding]:
        """Two listeners must not share a port, unless their addresses differ."""
        seen: list[tuple[str, Listener]] = []
        for name, at in self.listeners().items():
            for other, known in seen:
                overlap = at.host == known.host or {at.host, known.host} & {"0.0.0.0", "::", ""}
                if at.port and at.port == known.port and overlap:
                    message = f"is {at.port}, the same as server.{other}.port; every listener needs its own"
                    involved = f"{other}.port", f"{other}.host", f"{name}.host"
                    yield finding(f"{name}.port", message, *involved)
            seen.append((name, at))

    def listeners(self) -> dict[str, Listener]:
        """The configured ports, by their settings."""
        grpc_admin = self.grpc and self.grpc.admin
        named = {
            "http": self.http,
            "grpc": self.grpc,
            "admin": self.admin,
            "grpc.admin": grpc_admin,
        }
        return {name: at for name, at in named.items() if at is not None}


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

    def violations(self) -> Iterator[ConfigFinding]:
        if self.key is not None and self.certificate is not None:
            yield finding("certificate", "is set together with key; a caller has one of them")
        if self.key is None and self.certificate is None:
            yield finding("key", "is missing, and so is certificate; one of them is needed")


class AuthSettings(StrictModel):
    """Authentication of callers."""

    mode: Literal["off", "api_key"] | None = None
    """Required if a port listens beyond loopback or keys are set; else null means `off`."""
    keys_file: Path | None = None
    """YAML list of {name, role, key}, read again when it changes; make it readable only by the server."""
    keys: list[ApiKey] = []
    """API keys in addition to those of `keys_file`."""

    def violations(self) -> Iterator[ConfigFinding]:
        # Without an explicit mode, API keys would have no effect.
        sources = [name for name in ("keys_file", "keys") if getattr(self, name)]
        if self.mode is None and sources:
            message = f"must be set with auth.{sources[0]}: api_key or off"
            yield finding("mode", message, sources[0])
        if self.mode == "api_key" and not sources:
            yield finding("mode", "is api_key, but neither auth.keys_file nor auth.keys is set")


_PORTS = {"lookup": ("grpc", "admin", "grpc.admin"), "ingest": ("admin",)}


def opened_ports(server: ServerSettings) -> Iterator[tuple[str, Listener]]:
    """The ports that the role opens, by their settings below ``server``."""
    for name, listener in server.listeners().items():
        if server.role not in _PORTS or name in _PORTS[server.role]:
            yield name, listener
