"""Settings of processes whose lookups are answered by other nodes."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from hps.config import checks
from hps.config.model_schema import StrictModel


class LookupTlsSettings(StrictModel):
    """How nodes are asked over TLS."""

    ca_file: Path | None = None
    """Roots that the nodes' certificates must lead to, PEM; null takes the system's."""
    certificate_file: Path | None = None
    """The process's own certificate, PEM, where nodes ask for one."""
    key_file: Path | None = None
    """Its private key."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        files = "certificate_file", self.certificate_file, "key_file", self.key_file
        return self.consistent(checks.pair(*files))


class EjectionSettings(StrictModel):
    """When a node that fails is left out, and for how long."""

    failures: int = Field(5, ge=1, le=10)
    """So many failures among a node's last ten lookups, and it is left out; at most half of the nodes are."""
    base_s: float = Field(1.0, gt=0)
    """For how long at first; twice as long each time it fails again."""
    most_s: float = Field(30.0, gt=0)
    """For how long at most."""


class LookupSettings(StrictModel):
    """The nodes that answer the lookups of front ends (`server.role: frontend`, `hps.connect`)."""

    nodes: list[str] = []
    """`host:port` of each node's gRPC port; `dns:///name:port`: every address of the name is a node."""
    resolve_s: float = Field(5.0, gt=0)
    """How often the names of `dns:///` are looked up again, in seconds."""
    tls: LookupTlsSettings | None = None
    """Certificates; null speaks plain text."""
    api_key_file: Path | None = None
    """File with the API key that nodes ask for, role read; read again when it changes."""
    in_flight: int = Field(1024, ge=1)
    """Lookups under way before new ones are refused (503), for each model."""
    retries: int = Field(2, ge=0, le=10)
    """How many other nodes a lookup is sent to when one fails."""
    timeout_ms: float = Field(1_000.0, gt=0)
    """Longest wait for a lookup without a deadline of its own."""
    attempt_ms: float = Field(1_000.0, gt=0)
    """Longest wait for one node before another one is asked; never more than half of what is left."""
    ejection: EjectionSettings = EjectionSettings()
    """When a node that fails is left out, and for how long."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        return self.consistent(checks.lookup_nodes(self.nodes))
