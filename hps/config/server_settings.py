"""Settings of the server: its ports, its limits, and who may use it."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from hps.config import checks
from hps.config.model_schema import Strict

KEY_PATTERN = r"^[\x21-\x7e]{16,512}$"


class HttpSettings(Strict):
    """The port of the Open Inference Protocol."""

    host: str = Field("127.0.0.1", min_length=1)
    """Address to listen on; beyond loopback `auth.mode` must be stated."""
    port: int = Field(8000, ge=0, le=65_535)
    """0 picks a free port, printed at start."""


class AdminSettings(Strict):
    """The port of status, metrics and administration."""

    host: str = Field("127.0.0.1", min_length=1)
    """Address to listen on; beyond loopback `auth.mode` must be stated."""
    port: int = Field(8002, ge=0, le=65_535)
    """0 picks a free port, printed at start."""


class ServerSettings(Strict):
    """Ports and limits of the server."""

    http: HttpSettings = HttpSettings()
    """The port of the Open Inference Protocol."""
    admin: AdminSettings = AdminSettings()
    """The port of status, metrics and administration."""
    max_body_bytes: int = Field(64 << 20, ge=1024)
    """Largest request body, after decompression; larger ones get 413."""
    max_keys: int = Field(4_000_000, ge=1)
    """Most keys in one request; more get 413."""
    request_timeout_ms: float = Field(10_000.0, gt=0)
    """Deadline of a request that brings none."""
    drain_s: float = Field(10.0, ge=0)
    """How long a stopping server finishes what it has accepted."""
    docs: bool = True
    """Serve /docs and /openapi.json on the admin port."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """`debug` also logs every request, one line each."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        listeners = {
            "http": (self.http.host, self.http.port),
            "admin": (self.admin.host, self.admin.port),
        }
        return self.consistent(checks.ports(listeners))


class ApiKey(Strict):
    """One caller of the server."""

    name: str = Field(min_length=1, max_length=120)
    """Who uses this key; shown in logs, never the key itself."""
    role: Literal["read", "write", "admin"]
    """`read` asks, `write` changes rows too, `admin` does everything."""
    key: str = Field(pattern=KEY_PATTERN, repr=False)
    """The secret itself, at least 16 printable ASCII characters; better kept in `keys_file`."""


class AuthSettings(Strict):
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
