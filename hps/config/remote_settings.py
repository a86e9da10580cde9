"""Settings of processes whose lookups are answered by other nodes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field, StringConstraints

from hps.config.model_schema import Strict


class RemoteTlsSettings(Strict):
    """How nodes are asked over TLS."""

    ca_file: Path | None = None
    """Roots that the nodes' certificates must lead to, PEM; null takes the system's."""
    certificate_file: Path | None = None
    """The process's own certificate, PEM, where nodes ask for one."""
    key_file: Path | None = None
    """Its private key."""


class RemoteSettings(Strict):
    """Nodes that answer lookups in place of this process's own tiers."""

    targets: list[Annotated[str, StringConstraints(min_length=1)]] = Field(min_length=1)
    """`host:port` of each node's gRPC port."""
    tls: RemoteTlsSettings | None = None
    """Certificates; null speaks plain text."""
    api_key_file: Path | None = None
    """File with the API key that nodes ask for, role read."""
    in_flight: int = Field(1024, ge=1)
    """Lookups under way before new ones are refused (503), for each model."""
    retries: int = Field(2, ge=0, le=10)
    """How many other nodes a lookup is sent to when one is unavailable."""
    timeout_ms: float = Field(1_000.0, gt=0)
    """Longest wait for a lookup without a deadline of its own."""
